"""Prefix sharing in training: a prefix of several samples goes through the model once.

The attempts of a group share their prompt, and often most of their later tokens. Samples are sorted
by their tokens, so that neighbours share the longest prefixes. A sample adds only the tokens after
the prefix that it shares with the sample before it. They attend to that prefix and to each other
(`Keys`). Every loss token of every sample is in the loss, so loss and gradient are the same up to
rounding. (On CUDA the gradients of shared keys are sums in bf16, in no fixed order.)

Sharing a prefix of a few tokens, such as the start token, would cost more than it saves. So samples
without a long common prefix go into different chains, and first-fit decreasing packs whole
chains into micro-batches. Without any shared prefix this is plain packing.

Tests: `pytest tests/test_prefixes.py`.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from binpack import first_fit_decreasing
from family import common_prefix

# A micro-batch has at most this many keys per token of its capacity. Each layer copies these keys
# and values for its backward pass. The memory plan counts them.
MAX_KEYS_PER_TOKEN = 4
# A prefix is shared if it is at least this fraction of a sample's input.
LEAST_SHARED = 0.25


@dataclass
class Keys:
    """The keys of each sequence: its shared prefix, then its own tokens. K keys in all."""

    lengths: list[int]  # of each sequence, K in all
    indices: Tensor  # [K] int64, the index of each key among the T input tokens
    cu_seqlens: Tensor  # [sequences + 1] int32, boundaries of the sequences among the keys
    masks: list[Tensor | None] | None = None  # for attention on a CPU, made once for all layers


def pack(inputs: list[list[int]], loss_tokens: list[int], capacity: int) -> list[list[int]]:
    """The indices of the samples of each micro-batch, in the order of their tokens.

    `inputs` are the samples' input tokens, `loss_tokens` their numbers of loss tokens. A
    micro-batch has at most `capacity` input tokens, `capacity` loss tokens and
    MAX_KEYS_PER_TOKEN · `capacity` keys. A sample over a limit gets its own micro-batch.
    """
    chains = []
    sizes = []
    counts = [0, 0, 0]  # of the last chain: input tokens, loss tokens, keys / MAX_KEYS_PER_TOKEN
    before = []
    for index in sorted(range(len(inputs)), key=lambda i: inputs[i]):
        current = inputs[index]
        prefix = shared_prefix(before, current)
        own = [len(current), loss_tokens[index], len(current) / MAX_KEYS_PER_TOKEN]
        sums = [a + b for a, b in zip(counts, own)]
        sums[0] -= prefix
        if prefix and max(sums) <= capacity:
            counts = sums
        else:
            counts = own
            chains.append([])
            sizes.append(0)
        chains[-1].append(index)
        sizes[-1] = min(capacity, math.ceil(max(counts)))
        before = current
    bins = first_fit_decreasing(sizes, capacity)
    return [[index for chain in sorted(bin) for index in chains[chain]] for bin in bins]


def shared_prefix(before: list[int], current: list[int]) -> int:
    """The length of the longest common prefix; 0 if it is too short for `current` to share it."""
    length = common_prefix(before, current)
    return length if length >= LEAST_SHARED * len(current) else 0


def lay_out(
    inputs: list[list[int]],
) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """Packs the samples' input tokens without the prefix that each shares with the one before it.

    Returns all T tokens, the position of each in its sample, the number of tokens that each sample
    adds, and each sample's rows: the indices of its tokens among the T, with its prefix.
    """
    tokens = []
    positions = []
    additions = []
    rows_of = []
    rows = []
    for before, current in itertools.pairwise([[], *inputs]):
        prefix = shared_prefix(before, current)
        own = current[prefix:]
        rows = rows[:prefix] + list(range(len(tokens), len(tokens) + len(own)))
        tokens += own
        positions += range(prefix, len(current))
        additions.append(len(own))
        rows_of.append(rows)
    return tokens, positions, additions, rows_of


def keys_of(additions: list[int], rows_of: list[list[int]], device) -> Keys | None:
    """The keys of each sample that adds a token; None if no sample shares a prefix."""
    sequences = [rows for rows, count in zip(rows_of, additions) if count]
    lengths = [len(rows) for rows in sequences]
    if sum(lengths) == sum(additions):
        return None
    indices = torch.tensor([row for rows in sequences for row in rows], device=device)
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return Keys(lengths, indices, boundaries)
