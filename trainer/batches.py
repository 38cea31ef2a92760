"""Micro-batches: samples of any length laid end to end in one row of tokens, without padding.

Departure from the textbook: a batch is no rectangle. `cu_seqlens` marks where each sample begins
and ends, so attention stays within it, and positions restart at 0. What follows a sample's last
sampled token predicts nothing that is trained on, so it is left out.

Tests: `pytest tests/test_batches.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from binpack import first_fit_decreasing


@dataclass
class MicroBatch:
    """Samples end to end: T tokens of input, N of them predict a token that carries loss."""

    lengths: list[int]  # tokens of each sample, T in all
    tokens: Tensor  # [1, T] int64
    positions: Tensor  # [1, T] int64, from 0 in every sample
    cu_seqlens: Tensor  # [samples + 1] int32, where each sample begins and ends
    loss_positions: Tensor  # [N] int64, where in the row the predicting tokens stand
    # One entry for each loss token:
    owner: Tensor  # [N] int64, index of its sample in the list given to micro_batches
    target: Tensor  # [N] int64, the token itself
    sampler_logprob: Tensor  # [N] fp32, under the sampler
    old_logprob: Tensor | None  # [N] fp32, the same unless replaced; None: nobody sampled it
    advantage: Tensor  # [N] fp32
    weight: Tensor  # [N] fp32, its share of the loss


def micro_batches(samples: list, weights: list[Tensor], capacity: int, device) -> list[MicroBatch]:
    """Packs samples (rollout.Sample) into micro-batches of at most `capacity` tokens.

    The packing is first-fit decreasing. A sample that is longer stands alone, and one without a
    sampled token is left out. `weights` are grpo.token_weights of the samples. ValueError if a
    sample's lists differ in length.
    """
    lengths = [
        input_length(sample, weight) for sample, weight in zip(samples, weights, strict=True)
    ]
    trained = [index for index, length in enumerate(lengths) if length]
    bins = first_fit_decreasing([min(lengths[i], capacity) for i in trained], capacity)
    batches = []
    for members in bins:
        owners = [trained[member] for member in members]
        batch = make_micro_batch(
            [samples[i] for i in owners],
            [weights[i] for i in owners],
            [lengths[i] for i in owners],
            device,
            owners,
        )
        batches.append(batch)
    return batches


def input_length(sample, weight: Tensor) -> int:
    """How many of a sample's tokens are input: tokens[:n] predict tokens[1:n + 1].

    n is the index of the last sampled token; 0 if nothing was sampled.
    """
    if not len(sample.tokens) == len(sample.mask) == len(sample.logprobs) == len(weight):
        raise ValueError(
            f"a sample's lists differ in length: {len(sample.tokens)} tokens, "
            f"{len(sample.mask)} mask, {len(sample.logprobs)} log-probs, {len(weight)} weights"
        )
    if sample.mask and sample.mask[0]:
        raise ValueError("a sample's first token carries loss, but nothing stands before it")
    return max((index for index, sampled in enumerate(sample.mask) if sampled), default=0)


def make_micro_batch(
    samples: list,
    weights: list[Tensor],
    lengths: list[int],
    device,
    owners: Sequence[int] | None = None,
) -> MicroBatch:
    """Lays samples end to end, the first `lengths[i]` tokens of each.

    Without samples it is one token that nothing is learned from. A rank whose share makes fewer
    micro-batches than another's fills up with these. `owners` are 0, 1, 2, … unless given.
    """
    if owners is None:
        owners = range(len(samples))
    tokens = []
    loss_positions = []
    owner = []
    target = []
    logprob = []
    advantage = []
    for sample, length, index in zip(samples, lengths, owners, strict=True):
        start = len(tokens)
        sampled = [i for i in range(1, length + 1) if sample.mask[i]]
        loss_positions += [start + i - 1 for i in sampled]
        owner += [index] * len(sampled)
        target += [sample.tokens[i] for i in sampled]
        logprob += [sample.logprobs[i] for i in sampled]
        advantage += [sample.advantage] * len(sampled)
        tokens += sample.tokens[:length]
    weight = [w[1:][torch.tensor(s.mask[1:])] for s, w in zip(samples, weights, strict=True)]
    if not samples:
        tokens = [0]
        lengths = [1]
        weight = [torch.zeros(0)]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths])

    def integers(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    def numbers(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return MicroBatch(
        lengths=lengths,
        tokens=integers([tokens]),
        positions=positions[None].to(device),
        cu_seqlens=cu_seqlens.to(device),
        loss_positions=integers(loss_positions),
        owner=integers(owner),
        target=integers(target),
        sampler_logprob=numbers(logprob),
        old_logprob=numbers(logprob),
        advantage=numbers(advantage),
        weight=torch.cat(weight).to(device),
    )
