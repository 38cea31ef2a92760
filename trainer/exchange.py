"""Samples change ranks, so that all ranks train on about as many tokens.

A rank plays whole questions, and those whose attempts earn alike have no gradient. With four
questions a rank, half of them like that, the rank with the most to train on has twice the mean, and
all others wait for it. Weights were divided by counts over all ranks before, so loss and gradient
are the same wherever a sample is.

Tests: pytest tests/test_exchange.py
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from itertools import pairwise

import torch.distributed as dist
from torch import Tensor

from trainer import prefixes


def even_out(samples: list, weights: list[Tensor]) -> tuple[list, list[Tensor]]:
    """What this rank trains on in place of its own samples (rollout.Sample) and their weights.

    A question's samples of one role stay together, because they begin alike.
    """
    if not dist.is_initialized():
        return samples, weights
    lots = defaultdict(list)
    for sample, weight in zip(samples, weights, strict=True):
        lots[sample.question_index, sample.role].append((sample, weight))
    sizes = [{}] * dist.get_world_size()
    dist.all_gather_object(sizes, {key: added_tokens(lot) for key, lot in lots.items()})
    rank = dist.get_rank()
    received = []
    for key, source, target in moves(sizes):  # in the same order on all ranks
        if rank == source:
            dist.send_object_list([lots.pop(key)], target)
        elif rank == target:
            box = [None]
            dist.recv_object_list(box, source)
            received += box
    kept = [pair for lot in [*lots.values(), *received] for pair in lot]
    return [sample for sample, _ in kept], [weight for _, weight in kept]


def added_tokens(lot: list[tuple]) -> int:
    """Tokens of a lot's samples, shared beginnings once."""
    tokens = sorted(sample.tokens for sample, _ in lot)
    pairs = pairwise([[], *tokens])
    return sum(len(own) - prefixes.shared_prefix(before, own) for before, own in pairs)


def moves(sizes: list[dict[Hashable, int]]) -> Iterator[tuple[Hashable, int, int]]:
    """Which lots leave, from which rank, for which; `sizes` of each rank's lots by their keys.

    Largest first, a lot stays while its rank has no more than the mean, or else it goes to the rank
    with the least so far. So none has more than the mean and one lot.
    """
    lots = [(size, rank, key) for rank, own in enumerate(sizes) for key, size in own.items()]
    mean = sum(size for size, _, _ in lots) / len(sizes)
    loads = [0] * len(sizes)
    for size, rank, key in sorted(lots, reverse=True):
        target = rank
        if loads[rank] + size > mean:
            target = min(range(len(sizes)), key=lambda other: (loads[other], other != rank))
        loads[target] += size
        if target != rank:
            yield key, rank, target
