"""Micro-batches: samples of any length laid end to end in one row of tokens, without padding.

Departure from the textbook: a batch is no rectangle. `cu_seqlens` marks where each sample begins
and ends, so attention stays within it, and positions restart at 0. What follows a sample's last
sampled token predicts nothing that is trained on, so it is left out.

With `share_prefixes` the model computes a beginning that samples have in common once. A group's
attempts share their prompt, and often most of what follows. Sorted by their tokens, samples lie
beside those they have most in common with. Each lays only the rest into the row, and its keys are
picked out of the row: those of the beginning, then its own. The loss still sees every sample's
every token, so loss and gradient are the same up to rounding.

Tests: `pytest tests/test_batches.py tests/test_prefixes.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from binpack import first_fit_decreasing

# With shared prefixes a micro-batch holds at most so many keys per token of its capacity. Every
# layer keeps them, and the memory plan counts them.
MOST_KEYS = 4


@dataclass
class Keys:
    """What each sample attends to, K tokens in all, where samples share the rows of a prefix."""

    lengths: list[int]  # tokens of each sample with the prefix it shares, K in all
    rows: Tensor  # [K] int64, where in the row of tokens they stand
    cu_seqlens: Tensor  # [samples + 1] int32, where each sample begins and ends in `rows`


@dataclass
class MicroBatch:
    """Samples end to end: T tokens of input, N predictions of a token that carries loss.

    With shared prefixes one token of input can make predictions for several samples.
    """

    lengths: list[int]  # tokens of each sample that lie in the row, T in all
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
    keys: Keys | None = None  # None: each sample attends to its own tokens in the row


def micro_batches(
    samples: list,
    weights: list[Tensor],
    capacity: int,
    device,
    *,
    share_prefixes: bool = False,
) -> list[MicroBatch]:
    """Packs samples (rollout.Sample) into micro-batches of at most `capacity` tokens.

    The packing is first-fit decreasing; with `share_prefixes` it follows the order of tokens. A
    sample that is longer stands alone, and one without a sampled token is left out. `weights` are
    grpo.token_weights of the samples. ValueError if a sample's lists differ in length.
    """
    lengths = [
        input_length(sample, weight) for sample, weight in zip(samples, weights, strict=True)
    ]
    trained = [index for index, length in enumerate(lengths) if length]
    if share_prefixes:
        bins = cut_in_order(samples, lengths, trained, capacity)
    else:
        bins = first_fit_decreasing([min(lengths[i], capacity) for i in trained], capacity)
        bins = [[trained[member] for member in members] for members in bins]
    batches = []
    for owners in bins:
        batch = make_micro_batch(
            [samples[i] for i in owners],
            [weights[i] for i in owners],
            [lengths[i] for i in owners],
            device,
            owners,
            share_prefixes=share_prefixes,
        )
        batches.append(batch)
    return batches


def cut_in_order(
    samples: list, lengths: list[int], trained: list[int], capacity: int
) -> list[list[int]]:
    """Indices of `trained` samples by micro-batch, in the order of their tokens.

    In that order no earlier sample has a longer beginning in common with one than its neighbour. At
    most `capacity` tokens and as many predictions stand in a micro-batch, and MOST_KEYS times as
    many keys, or else one sample.
    """
    bins = []
    before = []
    laid = predictions = keys = 0
    for index in sorted(trained, key=lambda i: samples[i].tokens[: lengths[i]]):
        read = samples[index].tokens[: lengths[index]]
        laid += len(read) - common_prefix(before, read)
        predictions += sum(samples[index].mask)
        keys += len(read)
        if not bins or max(laid, predictions, keys / MOST_KEYS) > capacity:
            bins.append([])
            laid = len(read)
            predictions = sum(samples[index].mask)
            keys = len(read)
        bins[-1].append(index)
        before = read
    return bins


def common_prefix(one: list[int], other: list[int]) -> int:
    """The number of tokens that two lists begin with alike."""
    pairs = zip(one, other)
    shorter = min(len(one), len(other))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), shorter)


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
    *,
    share_prefixes: bool = False,
) -> MicroBatch:
    """Lays samples end to end, the first `lengths[i]` tokens of each.

    With `share_prefixes` a sample's tokens that the one before it begins with are not laid again.

    Without samples it is one token that nothing is learned from. A rank whose share makes fewer
    micro-batches than another's fills up with these. `owners` are 0, 1, 2, … unless given.
    """
    if owners is None:
        owners = range(len(samples))
    tokens = []
    positions = []
    laid = []  # of each sample: how many of its tokens
    rows = []  # of each sample: where in the row its tokens stand
    path = []
    read = []
    loss_positions = []
    owner = []
    target = []
    logprob = []
    advantage = []
    for sample, length, index in zip(samples, lengths, owners, strict=True):
        shared = common_prefix(read, sample.tokens[:length]) if share_prefixes else 0
        read = sample.tokens[:length]
        path = path[:shared] + list(range(len(tokens), len(tokens) + length - shared))
        tokens += read[shared:]
        positions += range(shared, length)
        if length > shared:  # else all its tokens lie in the row already
            laid.append(length - shared)
            rows.append(path)
        sampled = [i for i in range(1, length + 1) if sample.mask[i]]
        loss_positions += [path[i - 1] for i in sampled]
        owner += [index] * len(sampled)
        target += [sample.tokens[i] for i in sampled]
        logprob += [sample.logprobs[i] for i in sampled]
        advantage += [sample.advantage] * len(sampled)
    weight = [w[1:][torch.tensor(s.mask[1:])] for s, w in zip(samples, weights, strict=True)]
    if not samples:
        tokens = positions = [0]
        laid = [1]
        weight = [torch.zeros(0)]

    def bounds(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).int().to(device)

    def integers(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    def numbers(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    keys = None
    if share_prefixes and rows:
        held = [len(path) for path in rows]
        keys = Keys(held, integers([row for path in rows for row in path]), bounds(held))
    return MicroBatch(
        lengths=laid,
        tokens=integers([tokens]),
        positions=integers([positions]),
        cu_seqlens=bounds(laid),
        loss_positions=integers(loss_positions),
        owner=integers(owner),
        target=integers(target),
        sampler_logprob=numbers(logprob),
        old_logprob=numbers(logprob),
        advantage=numbers(advantage),
        weight=torch.cat(weight).to(device),
        keys=keys,
    )
