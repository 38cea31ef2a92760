"""Shared prefixes: what samples begin with alike goes through the model once.

The attempts of a group share their prompt, and often most of what follows. Samples are sorted by
their tokens, so that neighbours share the longest prefixes. A sample adds only the tokens after the
prefix that it shares with the sample before it, and attends to that prefix and to its own tokens
(`Keys`). All loss tokens of all samples are in the loss, so loss and gradient are the same up to
rounding.

batches.py lays samples end to end without this. Tests: `pytest tests/test_prefixes.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# The limit of keys per token of a micro-batch's capacity. Each layer copies these keys and values
# for its backward pass. The memory plan counts them.
MAX_KEYS_PER_TOKEN = 4


@dataclass
class Keys:
    """The keys of each sequence: its shared prefix, then its own tokens. K keys in all."""

    lengths: list[int]  # of each sequence, K in all
    indices: Tensor  # [K] int64, where they stand among the T input tokens
    cu_seqlens: Tensor  # [sequences + 1] int32, boundaries of the sequences among the keys


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


def lay_out_once(
    inputs: list[list[int]],
) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """batches.lay_out, but a sample adds only what follows the prefix of the sample before it.

    A sample's rows begin with those of its prefix.
    """
    tokens = []
    positions = []
    added = []
    rows_of = []
    before = []
    rows = []
    for current in inputs:
        alike = common_prefix(before, current)
        own = current[alike:]
        rows = rows[:alike] + list(range(len(tokens), len(tokens) + len(own)))
        tokens += own
        positions += range(alike, len(current))
        added.append(len(own))
        rows_of.append(rows)
        before = current
    return tokens, positions, added, rows_of


def keys_of(added: list[int], rows_of: list[list[int]], device) -> Keys:
    """The keys of each sample that adds a token, from what `lay_out_once` gives."""
    sequences = [rows for rows, count in zip(rows_of, added) if count]
    lengths = [len(rows) for rows in sequences]
    indices = torch.tensor([row for rows in sequences for row in rows], device=device)
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return Keys(lengths, indices, boundaries)
