"""Importance weights: what is trained is weighed by the trainer's gap to the sampler."""

from types import SimpleNamespace

import pytest
import torch
from helpers import tiny

import mars
import train
import trainer


@pytest.mark.parametrize("kind", ["token", "sequence", "off"])
def test_what_is_trained_is_weighed_by_the_gap_to_the_sampler(kind):
    """`prepare`, beside each sample scored by itself with the stock model."""
    model = tiny.model("qwen3")
    samples = tiny.make_samples()
    config = mars.MarsConfig(importance=kind, importance_cap=1.5, micro_tokens=60)
    run = SimpleNamespace(
        config=config,
        policy=trainer.Policy(tiny.model("qwen3"), bf16=False),
        reference=None,
        ranks=1,
        device=tiny.CPU,
    )
    known = []
    for sample in samples:
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens])).logits[0].log_softmax(-1)
        sampled = [i for i, own in enumerate(sample.mask) if own]
        scored = torch.tensor([float(logits[i - 1, sample.tokens[i]]) for i in sampled])
        drawn = scored - 0.3 * torch.randn(len(sampled))  # what a sampler that is off would say
        for i, logprob in zip(sampled, drawn.tolist()):
            sample.logprobs[i] = logprob
        known.append((scored, drawn))
    terms = {role: [s for s in samples if s.role == role] for role in ("sys2", "sys1")}
    kept, batches, _ = train.prepare(run, terms)
    masked = 0
    for batch in batches:
        for owner in set(batch.owner.tolist()):
            mine = batch.owner == owner
            scored, drawn = known[samples.index(kept[owner])]
            gap = scored - drawn
            ratio = float(gap.sum().exp())
            factor = {
                "token": gap.exp().clamp(max=1.5),
                "sequence": torch.full_like(gap, ratio if ratio <= 1.5 else 0.0),
                "off": torch.ones_like(gap),
            }[kind]
            masked += float(factor.sum()) == 0
            want = factor / len(terms[kept[owner].role]) / len(gap)
            assert torch.allclose(batch.weight[mine], want, rtol=1e-4)
            old = drawn if kind == "off" else scored
            assert torch.allclose(batch.old_logprob[mine], old, atol=1e-5)
    assert bool(masked) == (kind == "sequence"), "some sample leaves the bound"
