"""Samples in tests: their text, and what a step of training makes of them."""

from types import SimpleNamespace

import torch
from helpers.tiny import CPU

import train


def text_of(chat, sample, sampled: bool) -> str:
    """What a role wrote, or what it was given."""
    return chat.text([token for token, own in zip(sample.tokens, sample.mask) if own == sampled])


def prepared(config, terms, policy=None) -> tuple:
    """What train.prepare makes of them: samples, micro-batches."""
    policy = policy or SimpleNamespace(can_pack=True)
    run = SimpleNamespace(config=config, rank=0, ranks=1, device=CPU, reference=None, policy=policy)
    return train.prepare(run, terms)


def stock_scores(policy, sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [n] of the n sampled tokens, by transformers' own attention."""
    policy.model.set_attn_implementation("eager")
    logprobs = policy.model(torch.tensor([sample.tokens])).logits[0].log_softmax(-1)
    policy.model.set_attn_implementation("mars_packed")
    sampled = torch.tensor(sample.mask)
    logprobs = logprobs[:-1][sampled[1:]]
    tokens = torch.tensor(sample.tokens)[sampled]
    return logprobs.gather(1, tokens[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
