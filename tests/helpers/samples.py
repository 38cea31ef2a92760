"""Samples in tests: their text, and what a step of training makes of them."""

from types import SimpleNamespace

from helpers.tiny import CPU

import train


def text_of(chat, sample, sampled: bool) -> str:
    """What a role wrote, or what it was given."""
    return chat.text([token for token, own in zip(sample.tokens, sample.mask) if own == sampled])


def prepared(config, terms, policy=None) -> tuple:
    """What train.prepare makes of them: samples, micro-batches."""
    policy = policy or SimpleNamespace(can_pack=True)
    run = SimpleNamespace(config=config, ranks=1, device=CPU, reference=None, policy=policy)
    return train.prepare(run, terms)
