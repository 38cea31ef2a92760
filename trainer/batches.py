"""Micro-batches: samples of any length packed into one row of tokens, without padding.

Departure from the textbook: a batch is not a rectangle. `cu_seqlens` has the boundaries of the
samples, so attention stays within each of them, and positions are those in the sample. The input
ends before the last sampled token, because that token and the tokens after it predict no loss
token.

A prefix that samples share is input only once (prefixes.py). If a model cannot be packed
(loading.can_pack), each of its micro-batches is one sample.

Tests: `pytest tests/test_prefixes.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trainer import prefixes


@dataclass
class MicroBatch:
    """Packed samples: T input tokens, N loss tokens.

    A sequence is the input of one sample after the prefix that it shares with the sample before it.
    If nothing comes after that prefix, the sample has no sequence. One input token can predict the
    loss tokens of several samples.
    """

    lengths: list[int]  # the number of tokens of each sequence; their sum is T
    tokens: Tensor  # [1, T] int64
    positions: Tensor  # [1, T] int64, each token's position in its own sample
    cu_seqlens: Tensor  # [sequences + 1] int32, boundaries of the sequences
    loss_positions: Tensor  # [N] int64, the index of the input token that predicts each loss token
    # One entry for each loss token:
    owner: Tensor  # [N] int64, the index of its sample in the argument of micro_batches
    target: Tensor  # [N] int64, the token itself
    behaviour_logprob: Tensor  # [N] fp32, under the sampler that drew it
    old_logprob: Tensor  # [N] fp32, under π_old: the sampler's, unless the trainer's replace them
    advantage: Tensor  # [N] fp32
    weight: Tensor  # [N] fp32, its token weight w
    ref_logprob: Tensor | None = None  # [N] fp32, under the reference model if there is one
    keys: prefixes.Keys | None = None  # None: each sequence is a whole sample and has its own keys


def micro_batches(
    samples: list, weights: list[Tensor], capacity: int, device, *, pack: bool = True
) -> list[MicroBatch]:
    """Packs samples (rollout.Sample) into micro-batches of at most `capacity` tokens.

    A sample over the limit gets its own micro-batch, and without `pack` every sample does. A sample
    without sampled tokens is left out. `weights` are the samples' grpo.token_weights. ValueError if
    a sample's lists differ in length, or if its first token has mask True.
    """
    lengths = [input_length(*pair) for pair in zip(samples, weights, strict=True)]
    indices = [index for index, length in enumerate(lengths) if length]
    bins = [[member] for member in range(len(indices))]
    if pack:
        inputs = [samples[i].tokens[: lengths[i]] for i in indices]
        bins = prefixes.pack(inputs, [sum(samples[i].mask) for i in indices], capacity)

    def batch_of(owners: list[int]) -> MicroBatch:
        parts = ([values[i] for i in owners] for values in (samples, weights, lengths))
        return make_micro_batch(*parts, device, owners)

    return [batch_of([indices[member] for member in members]) for members in bins]


def input_length(sample, weight: Tensor) -> int:
    """The number n of a sample's input tokens: tokens[:n] predict tokens[1:n + 1].

    n is the index of the last sampled token, or 0 if no token was sampled. ValueError for a sample
    with wrong lists.
    """
    if not len(sample.tokens) == len(sample.mask) == len(sample.logprobs) == len(weight):
        raise ValueError(
            f"a sample's lists differ in length: {len(sample.tokens)} tokens, "
            f"{len(sample.mask)} mask, {len(sample.logprobs)} log-probs, {len(weight)} weights"
        )
    if sample.mask and sample.mask[0]:
        raise ValueError("a sample's first token has mask True, but no token predicts it")
    return max((index for index, sampled in enumerate(sample.mask) if sampled), default=0)


def make_micro_batch(
    samples: list,
    weights: list[Tensor],
    lengths: list[int],
    device,
    owners: Sequence[int] | None = None,
) -> MicroBatch:
    """Packs the first `lengths[i]` tokens of each sample i into one micro-batch.

    Without samples the micro-batch is two tokens without loss. (For one token the compiler would
    compile all code again.) A rank with fewer micro-batches than another rank adds such ones. The
    default of `owners` is 0, 1, 2, ….
    """
    owners = owners or range(len(samples))
    inputs = [sample.tokens[:length] for sample, length in zip(samples, lengths, strict=True)]
    tokens, positions, additions, rows_of = prefixes.lay_out(inputs or [[0, 0]])
    loss_tokens = [
        (rows[i - 1], owner, sample.tokens[i], sample.logprobs[i], sample.advantage)
        for sample, length, owner, rows in zip(samples, lengths, owners, rows_of)
        for i in range(1, length + 1)
        if sample.mask[i]
    ]
    columns = zip(*loss_tokens) if loss_tokens else [()] * 5
    loss_positions, owner, target, logprob, advantage = columns
    weight = [w[1:][torch.tensor(s.mask[1:])] for s, w in zip(samples, weights, strict=True)]
    integers = partial(torch.tensor, dtype=torch.long, device=device)
    numbers = partial(torch.tensor, dtype=torch.float32, device=device)
    sequences = [count for count in additions if count]
    return MicroBatch(
        lengths=sequences,
        tokens=integers([tokens]),
        positions=integers([positions]),
        cu_seqlens=integers([0, *sequences]).cumsum(0).int(),
        loss_positions=integers(loss_positions),
        owner=integers(owner),
        target=integers(target),
        behaviour_logprob=numbers(logprob),
        old_logprob=numbers(logprob),
        advantage=numbers(advantage),
        weight=torch.cat([torch.zeros(0), *weight]).to(device),
        keys=prefixes.keys_of(additions, rows_of, device),
    )
