"""bench/train_step.py: its count of operations is PyTorch's own, and forms that disagree get no table."""
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainer import policy as trainer
from bench import train_step as bench

TINY = bench.SMALL | dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2)


def test_operations_are_what_pytorch_counts():
    policy = trainer.Policy(bench.random_model(TINY, "cpu", "mars_packed"), bf16=False)
    samples = bench.draw_samples(2, 1 / 64, 128)
    batches = trainer.micro_batches(samples, bench.weigh(samples), 128, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        trainer.backward(policy, batches, [None] * len(batches), **bench.OBJECTIVE)
    squares = sum(length ** 2 for batch in batches for length in batch.lengths)
    masked = 6 * 2 * 8 * 32 * squares                       # plain attention computes the upper half as well
    assert counter.get_total_flops() == bench.operations(policy.model, batches) + masked


def test_forms_that_disagree_get_no_table(monkeypatch):
    assert len(bench.cpu(2, 1 / 64, 256, TINY, rounds=1)) == 4
    plain = bench.padded_loss
    monkeypatch.setattr(bench, "padded_loss", lambda *arguments: 1.001 * plain(*arguments))
    with pytest.raises(ValueError, match="disagree"):
        bench.cpu(2, 1 / 64, 256, TINY, rounds=1)


def test_samples_are_as_the_docstring_says():
    samples = bench.draw_samples(200, 1 / 16, 128)
    for role, median, share in (("sys2", 400, 1 / 3), ("sys1", 120, 1 / 5)):
        lengths = sorted(len(s.tokens) for s in samples if s.role == role)
        trained = sum(sum(s.mask) for s in samples if s.role == role)
        assert len(lengths) == 200 and lengths[-1] <= 1984 and abs(lengths[100] / median - 1) < 0.2
        assert abs(trained / sum(lengths) / share - 1) < 0.05
    assert samples[0].role != samples[1].role or samples[1].role != samples[2].role
