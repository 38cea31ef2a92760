"""Micro-batches: only what is trained on enters the head, and every loss token knows its sample."""

import pytest
import torch
from helpers.tiny import CPU, make_samples, weigh

import trainer


def last_trained(sample) -> int:
    return max(i for i, sampled in enumerate(sample.mask) if sampled)


@pytest.mark.parametrize("capacity", [1, 60, 10_000])
def test_every_loss_token_knows_its_sample_and_what_nobody_predicts_is_dropped(capacity):
    """`owner` is the index in the list that was given, whatever order the packing takes."""
    samples = make_samples()
    weights = weigh(samples)
    found = {index: [] for index in range(len(samples))}
    batches = trainer.micro_batches(samples, weights, capacity, CPU)
    assert sum(batch.tokens.numel() for batch in batches) == sum(map(last_trained, samples))
    for batch in batches:
        assert batch.owner.dtype == torch.int64
        assert batch.cu_seqlens.tolist()[-1] == batch.tokens.numel() == sum(batch.lengths)
        alone = len(batch.owner.unique()) == 1
        assert batch.tokens.numel() <= capacity or alone, "a sample over the limit is alone"
        for i, index in enumerate(batch.owner.tolist()):
            place = batch.positions[0, batch.loss_positions[i]].item() + 1
            sample = samples[index]
            assert batch.target[i] == sample.tokens[place]
            assert batch.tokens[0, batch.loss_positions[i]] == sample.tokens[place - 1]
            assert batch.weight[i] == weights[index][place]
            assert batch.advantage[i].item() == pytest.approx(sample.advantage)
            assert batch.old_logprob[i].item() == pytest.approx(sample.logprobs[place])
            found[index].append(place)
    for index, sample in enumerate(samples):
        assert found[index] == [i for i, sampled in enumerate(sample.mask) if sampled]


def test_an_empty_micro_batch_is_one_token_without_loss():
    batch = trainer.make_micro_batch([], [], [], CPU)
    assert batch.tokens.shape == (1, 1)
    assert batch.lengths == [1]
    assert batch.cu_seqlens.tolist() == [0, 1]
    for name in ("owner", "target", "loss_positions", "old_logprob", "advantage", "weight"):
        assert getattr(batch, name).shape == (0,), name
    assert trainer.micro_batches([], [], 100, CPU) == []


def test_a_sample_without_a_sampled_token_is_left_out():
    samples = make_samples()
    samples[2].mask = [False] * len(samples[2].mask)
    batches = trainer.micro_batches(samples, weigh(samples), 100, CPU)
    owners = torch.cat([batch.owner for batch in batches]).unique().tolist()
    assert owners == [i for i in range(len(samples)) if i != 2]


def test_lists_that_do_not_fit_are_refused():
    samples = make_samples()
    weights = weigh(samples)
    samples[0].logprobs.pop()
    with pytest.raises(ValueError, match="differ in length"):
        trainer.micro_batches(samples, weights, 100, CPU)
    samples[0].logprobs.append(0.0)
    samples[1].mask[0] = True
    with pytest.raises(ValueError, match="nothing stands before it"):
        trainer.micro_batches(samples, weights, 100, CPU)
