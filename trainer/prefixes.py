"""Shared prefixes: what samples begin with alike goes through the model once.

The attempts of a group share their prompt, and often most of what follows. Samples are sorted by
their tokens, so that neighbours share the longest prefixes. A sample adds only the tokens after the
prefix that it shares with the sample before it, and attends to that prefix and to its own tokens
(`Keys`). All loss tokens of all samples are in the loss, so loss and gradient are the same up to
rounding. (On CUDA the gradients of shared keys are sums in bf16, in no fixed order.)

A prefix of a few tokens, such as the start token of most models, is not worth its bookkeeping:
there the sorted samples are cut into families. First-fit decreasing packs the families into
micro-batches; where nothing is shared, that is plain packing.

Tests: `pytest tests/test_prefixes.py`.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from binpack import first_fit_decreasing
from family import common_prefix

# The limit of keys per token of a micro-batch's capacity. Each layer copies these keys and values
# for its backward pass. The memory plan counts them.
MAX_KEYS_PER_TOKEN = 4
# A prefix counts as shared if it is at least this part of a sample's input.
LEAST_SHARED = 0.25


@dataclass
class Keys:
    """The keys of each sequence: its shared prefix, then its own tokens. K keys in all."""

    lengths: list[int]  # of each sequence, K in all
    indices: Tensor  # [K] int64, where they stand among the T input tokens
    cu_seqlens: Tensor  # [sequences + 1] int32, boundaries of the sequences among the keys
    masks: list[Tensor | None] | None = None  # attention's on a CPU, made once for all layers


def pack(inputs: list[list[int]], loss_tokens: list[int], capacity: int) -> list[list[int]]:
    """Indices of samples by micro-batch, in the order of their tokens.

    `inputs` are their input tokens, `loss_tokens` how many of each carry loss. A micro-batch holds
    at most `capacity` input tokens, `capacity` loss tokens and MAX_KEYS_PER_TOKEN · `capacity`
    keys. A sample over a limit is alone.
    """
    families = []
    sizes = []
    counts = [0, 0, 0]  # of the last family: input tokens, loss tokens, keys / MAX_KEYS_PER_TOKEN
    before = []
    for index in sorted(range(len(inputs)), key=lambda i: inputs[i]):
        current = inputs[index]
        alike = shared_prefix(before, current)
        own = [len(current), loss_tokens[index], len(current) / MAX_KEYS_PER_TOKEN]
        grown = [a + b for a, b in zip(counts, own)]
        grown[0] -= alike
        if alike and max(grown) <= capacity:
            counts = grown
        else:
            counts = own
            families.append([])
            sizes.append(0)
        families[-1].append(index)
        sizes[-1] = min(capacity, math.ceil(max(counts)))
        before = current
    bins = first_fit_decreasing(sizes, capacity)
    return [[index for family in sorted(bin) for index in families[family]] for bin in bins]


def shared_prefix(before: list[int], current: list[int]) -> int:
    """The length of the longest prefix of both; 0 if it is too short to count for `current`."""
    alike = common_prefix(before, current)
    return alike if alike >= LEAST_SHARED * len(current) else 0


def lay_out(
    inputs: list[list[int]],
) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """Samples' input tokens end to end; each adds what follows the prefix of the one before it.

    Returns all tokens, the position of each in its sample, how many each sample adds, and each
    sample's rows: where its tokens stand in the whole, its prefix first.
    """
    tokens = []
    positions = []
    added = []
    rows_of = []
    rows = []
    for before, current in itertools.pairwise([[], *inputs]):
        alike = shared_prefix(before, current)
        own = current[alike:]
        rows = rows[:alike] + list(range(len(tokens), len(tokens) + len(own)))
        tokens += own
        positions += range(alike, len(current))
        added.append(len(own))
        rows_of.append(rows)
    return tokens, positions, added, rows_of


def keys_of(added: list[int], rows_of: list[list[int]], device) -> Keys | None:
    """The keys of each sample that adds a token; None if each attends to its own tokens only."""
    sequences = [rows for rows, count in zip(rows_of, added) if count]
    lengths = [len(rows) for rows in sequences]
    if sum(lengths) == sum(added):
        return None
    indices = torch.tensor([row for rows in sequences for row in rows], device=device)
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return Keys(lengths, indices, boundaries)
