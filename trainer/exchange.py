"""Samples change ranks, so that all ranks train on about equally many tokens.

A rank plays whole questions, and a question whose attempts all earn the same has no gradient. Of
eight ranks with four questions each, half of them like that, the busiest has twice the mean, and
all others wait for it. Weights already divide by counts over all ranks, so loss and gradient are
the same wherever a sample is.

Tests: pytest tests/test_exchange.py tests/test_policy.py
"""

from collections import defaultdict
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from trainer.prefixes import shared_prefix

SampleGroup = tuple[int, str]  # a question's samples of one role, by its index and the role


def even_out(samples: list, weights: list[Tensor], *, pack: bool) -> tuple[list, list[Tensor]]:
    """The samples (rollout.Sample) and weights that this rank trains on, given its own.

    All ranks call it together. A lot stays whole: what its samples begin with is computed once.
    `pack` is micro_batches'.
    """
    if not dist.is_initialized():
        return samples, weights
    lots = defaultdict(list)
    for sample, weight in zip(samples, weights, strict=True):
        lots[sample.question_index, sample.role].append((sample, weight))
    mine = {lot: added_tokens([s.tokens for s, _ in pairs], pack) for lot, pairs in lots.items()}
    sizes = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, mine)
    rank = dist.get_rank()
    received = []
    # In the same order on all ranks, so that sends and receives pair up.
    for lot, source, target in moves(sizes):
        if rank == source:
            dist.send_object_list([lots.pop(lot)], target)
        elif rank == target:
            box = [None]
            dist.recv_object_list(box, source)
            received.append(box[0])
    kept = [pair for pairs in [*lots.values(), *received] for pair in pairs]
    return [sample for sample, _ in kept], [weight for _, weight in kept]


def added_tokens(inputs: list[list[int]], pack: bool) -> int:
    """How many tokens go through the model: with `pack` shared beginnings only once."""
    count = 0
    before = []
    for current in sorted(inputs):
        count += len(current) - (shared_prefix(before, current) if pack else 0)
        before = current
    return count


def moves(sizes: list[dict[SampleGroup, int]]) -> Iterator[tuple[SampleGroup, int, int]]:
    """The lots that move: (lot, from this rank, to that). `sizes[rank]` are a rank's tokens by lot.

    Largest first: a lot stays if its rank then has at most the mean, else it goes to the rank with
    the least so far. So none has more than the mean plus one lot.
    """
    lots = [(size, rank, lot) for rank, own in enumerate(sizes) for lot, size in own.items()]
    mean = sum(size for size, _, _ in lots) / len(sizes)
    loads = [0] * len(sizes)
    for size, rank, lot in sorted(lots, reverse=True):
        target = rank
        if loads[rank] + size > mean:
            # Among equals its own.
            target = min(range(len(sizes)), key=lambda other: (loads[other], other != rank))
        loads[target] += size
        if target != rank:
            yield lot, rank, target
