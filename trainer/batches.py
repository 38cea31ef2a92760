"""Micro-batches: samples of any length laid end to end in one row of tokens, without padding.

Departure from the textbook: a batch is no rectangle. `cu_seqlens` marks where each sample begins
and ends, so attention stays within it, and positions restart at 0. The last sampled token and all
after it predict no loss token. So they are no input.

With `share_prefixes` the model computes a shared prefix only once. The attempts of a group share
their prompt, and often most of what follows. Samples are sorted by their tokens, so that neighbours
share the longest prefixes. A sample adds only the tokens after the prefix that it shares with the
sample before it. It attends to that prefix and to its own tokens (`Keys`). All loss tokens of all
samples are in the loss, so loss and gradient are the same up to rounding.

Tests: `pytest tests/test_batches.py tests/test_prefixes.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from binpack import first_fit_decreasing

# With shared prefixes: the limit of keys per token of a micro-batch's capacity. Each layer copies
# these keys and values for its backward pass. The memory plan counts them.
MAX_KEYS_PER_TOKEN = 4


@dataclass
class Keys:
    """The keys of each sequence: its shared prefix, then its own tokens. K keys in all."""

    lengths: list[int]  # of each sequence, K in all
    indices: Tensor  # [K] int64, where they stand among the T input tokens
    cu_seqlens: Tensor  # [sequences + 1] int32, boundaries of the sequences among the keys


@dataclass
class MicroBatch:
    """Samples end to end: T input tokens, N loss tokens.

    A sequence is what one sample adds: all its input, or with shared prefixes the rest of it. A
    sample that adds nothing has no sequence. There one input token can predict the loss tokens of
    several samples.
    """

    lengths: list[int]  # tokens that each sequence adds, T in all
    tokens: Tensor  # [1, T] int64
    positions: Tensor  # [1, T] int64, each token's place in its own sample
    cu_seqlens: Tensor  # [sequences + 1] int32, boundaries of the sequences
    loss_positions: Tensor  # [N] int64, which of the T input tokens predicts each loss token
    # One entry for each loss token:
    owner: Tensor  # [N] int64, index of its sample in the list given to micro_batches
    target: Tensor  # [N] int64, the token itself
    sampler_logprob: Tensor  # [N] fp32, under the sampler
    old_logprob: Tensor | None  # [N] fp32, the same unless replaced; None: the policy's own, ρ is 1
    advantage: Tensor  # [N] fp32
    weight: Tensor  # [N] fp32, its share of the loss
    keys: Keys | None = None  # None: a sequence is a whole sample and attends to itself


def micro_batches(
    samples: list,
    weights: list[Tensor],
    capacity: int,
    device,
    *,
    share_prefixes: bool = False,
) -> list[MicroBatch]:
    """Packs samples (rollout.Sample) into micro-batches of at most `capacity` tokens.

    Without `share_prefixes` the packing is first-fit decreasing, with it `cut_in_order`. A sample
    over the limit is alone, and one without a sampled token is left out. `weights` are
    grpo.token_weights of the samples. ValueError if a sample's lists differ in length, or if its
    first token carries loss.
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

    In sorted order, of all earlier samples the one just before shares the longest prefix. A
    micro-batch holds at most `capacity` input tokens, `capacity` loss tokens and
    MAX_KEYS_PER_TOKEN · `capacity` keys. A sample over a limit is alone.
    """
    bins = []
    previous = []
    added = loss_tokens = keys = 0
    for index in sorted(trained, key=lambda i: samples[i].tokens[: lengths[i]]):
        current = samples[index].tokens[: lengths[index]]
        added += len(current) - common_prefix(previous, current)
        loss_tokens += sum(samples[index].mask)
        keys += len(current)
        if not bins or max(added, loss_tokens, keys / MAX_KEYS_PER_TOKEN) > capacity:
            # A new micro-batch, which shares nothing with the last.
            bins.append([])
            added = keys = len(current)
            loss_tokens = sum(samples[index].mask)
        bins[-1].append(index)
        previous = current
    return bins


def common_prefix(one: list[int], other: list[int]) -> int:
    """The length of the longest prefix of both lists."""
    pairs = zip(one, other)
    shorter = min(len(one), len(other))
    return next((length for length, (a, b) in enumerate(pairs) if a != b), shorter)


def input_length(sample, weight: Tensor) -> int:
    """How many of a sample's tokens are input: tokens[:n] predict tokens[1:n + 1].

    n is the index of the last sampled token; 0 if nothing was sampled. ValueError for a sample that
    is not well formed.
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
    """Lays samples end to end, the first `lengths[i]` tokens of each (`lay_out`).

    Without samples it is one token without loss. A rank with fewer micro-batches than the others
    adds these. `owners` are 0, 1, 2, … unless given.
    """
    if owners is None:
        owners = range(len(samples))
    tokens, positions, added, indices = lay_out(samples, lengths, share_prefixes)
    loss_positions = []
    owner = []
    target = []
    logprob = []
    advantage = []
    for sample, length, index, own in zip(samples, lengths, owners, indices, strict=True):
        sampled = [i for i in range(1, length + 1) if sample.mask[i]]
        loss_positions += [own[i - 1] for i in sampled]
        owner += [index] * len(sampled)
        target += [sample.tokens[i] for i in sampled]
        logprob += [sample.logprobs[i] for i in sampled]
        advantage += [sample.advantage] * len(sampled)
    weight = [w[1:][torch.tensor(s.mask[1:])] for s, w in zip(samples, weights, strict=True)]
    if not samples:
        tokens = positions = [0]
        added = [1]  # the one token
        weight = [torch.zeros(0)]

    def boundaries(counts: list[int]) -> Tensor:
        return torch.tensor([0, *counts]).cumsum(0).int().to(device)

    def integers(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    def numbers(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    sequence_lengths = [count for count in added if count]
    keys = None
    if share_prefixes and samples:
        of_sequences = [own for own, count in zip(indices, added) if count]
        key_lengths = [len(own) for own in of_sequences]
        flat = [index for own in of_sequences for index in own]
        keys = Keys(key_lengths, integers(flat), boundaries(key_lengths))
    return MicroBatch(
        lengths=sequence_lengths,
        tokens=integers([tokens]),
        positions=integers([positions]),
        cu_seqlens=boundaries(sequence_lengths),
        loss_positions=integers(loss_positions),
        owner=integers(owner),
        target=integers(target),
        sampler_logprob=numbers(logprob),
        old_logprob=numbers(logprob),
        advantage=numbers(advantage),
        weight=torch.cat(weight).to(device),
        keys=keys,
    )


def lay_out(samples: list, lengths: list[int], share_prefixes: bool) -> tuple:
    """The first `lengths[i]` tokens of each sample, end to end.

    With `share_prefixes` a sample adds only the tokens after the prefix that it shares with the one
    before. Returns the tokens, their positions, how many tokens each sample adds, and the indices
    in the tokens of each sample's own, its prefix included.
    """
    tokens = []
    positions = []
    added = []
    indices = []
    before = []
    places = []
    for sample, length in zip(samples, lengths, strict=True):
        current = sample.tokens[:length]
        shared = common_prefix(before, current) if share_prefixes else 0
        places = places[:shared] + list(range(len(tokens), len(tokens) + length - shared))
        tokens += current[shared:]
        positions += range(shared, length)
        added.append(length - shared)
        indices.append(places)
        before = current
    return tokens, positions, added, indices
