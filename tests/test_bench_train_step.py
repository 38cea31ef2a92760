"""bench/train_step.py and prefixes.py show only forms that agree; operations are PyTorch's."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import trainer
from bench import prefixes
from bench import train_step as bench
from trainer import batches

TINY = bench.SMALL | {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
}


def test_operations_are_what_pytorch_counts():
    policy = trainer.Policy(bench.random_model(TINY, "cpu"), bf16=False)
    samples = bench.draw_samples(2, 1 / 64, 128)
    packed = trainer.micro_batches(samples, bench.weigh(samples), 128, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        trainer.backward(policy, packed, [None] * len(packed), **bench.OBJECTIVE)
    squares = sum(length**2 for batch in packed for length in batch.lengths)
    masked = 6 * 2 * 8 * 32 * squares  # plain attention computes the upper half as well
    assert counter.get_total_flops() == bench.operations(policy.model, packed) + masked


def test_forms_that_disagree_get_no_table(monkeypatch):
    assert len(bench.cpu(2, 1 / 64, 256, TINY, rounds=1)) == 4
    plain = bench.padded_loss
    monkeypatch.setattr(bench, "padded_loss", lambda *given: 1.001 * plain(*given))
    with pytest.raises(ValueError, match="disagree"):
        bench.cpu(2, 1 / 64, 256, TINY, rounds=1)


def test_samples_are_as_the_docstring_says():
    samples = bench.draw_samples(200, 1 / 16, 128)
    for role, median, share in (("sys2", 400, 1 / 3), ("sys1", 120, 1 / 5)):
        lengths = sorted(len(s.tokens) for s in samples if s.role == role)
        trained = sum(sum(s.mask) for s in samples if s.role == role)
        assert len(lengths) == 200
        assert lengths[-1] <= 1984
        assert abs(lengths[100] / median - 1) < 0.2
        assert abs(trained / sum(lengths) / share - 1) < 0.05
    assert len({sample.role for sample in samples[:3]}) == 2


def gpu_rows(save_rows=lambda rows: None):
    return bench.gpu(1, 1 / 64, 256, TINY, 1, "cpu", save_rows)


def test_recomputing_is_measured_first_and_rows_are_saved_as_they_come():
    saved = []
    rows = gpu_rows(lambda rows: saved.append([row["form"] for row in rows]))
    forms = ["activations recomputed", "activations kept"]
    assert saved == [forms[:1], forms]
    assert all(row["tokens/s"] > 0 for row in rows)
    assert rows[0]["planned GB"] < rows[1]["planned GB"]


def test_what_does_not_fit_is_a_note_beside_what_does(monkeypatch, capsys):
    plain = bench.gpu_row

    def full(*given):
        if not given[-1]:
            raise torch.OutOfMemoryError
        return plain(*given)

    monkeypatch.setattr(bench, "gpu_row", full)
    rows = gpu_rows()
    assert rows[1] == {"form": "activations kept", "note": "out of memory"}
    bench.print_rows("gpu part", rows)
    said = capsys.readouterr().out
    assert "activations recomputed" in said
    assert "activations kept: out of memory" in said
    monkeypatch.undo()
    monkeypatch.setattr(bench, "planned_bytes", lambda *given: float("inf"))
    monkeypatch.setattr(bench.math, "inf", 4e9)
    assert "GB are free" in gpu_rows()[0]["note"]


def test_shared_prefixes_that_disagree_get_no_table(monkeypatch):
    rows = prefixes.measure(32, 256, TINY, rounds=1)
    assert [row["prefix"] for row in rows] == list(prefixes.SHARES)
    for row in rows:
        samples = prefixes.GROUPS * prefixes.SIZE
        least = 1 - row["prefix"] * 7 / 8
        assert row["tokens, packed"] == 31 * samples
        # Random tokens are now and then alike too, and a group may be cut in two.
        assert 0.95 < row["tokens, shared"] / (least * 32 * samples - samples) < 1.15
    right = batches.make_micro_batch

    def shifted(*given, **options):
        batch = right(*given, **options)
        if batch.keys:
            batch.keys.indices = batch.keys.indices.roll(1)
        return batch

    monkeypatch.setattr(batches, "make_micro_batch", shifted)
    with pytest.raises(ValueError, match="disagree"):
        prefixes.measure(32, 256, TINY, rounds=1)
