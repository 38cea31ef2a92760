"""Load balancing: samples move between ranks, so that all ranks train on about equally many tokens.

A rank holds whole questions. A question whose attempts all earn the same reward has no gradient and
no training work. With eight ranks of four questions each, half of them without gradient, the rank
with the most work has twice the mean, and all other ranks wait for it. The token weights already
divide by counts over all ranks, so loss and gradient do not depend on a sample's rank.

Tests: pytest tests/test_exchange.py tests/test_policy.py
"""

from collections import defaultdict
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from processes import deliver
from trainer.prefixes import shared_prefix

SampleGroup = tuple[int, str]  # a question's samples of one role, by its index and the role


def even_out(samples: list, weights: list[Tensor], *, pack: bool) -> tuple[list, list[Tensor]]:
    """The samples (rollout.Sample) and weights that this rank trains on, from the ones it played.

    All ranks call it together. A sample group stays whole, because its samples share prefixes.
    `pack` is the option of micro_batches.
    """
    if not dist.is_initialized():
        return samples, weights
    groups = defaultdict(list)
    for sample, weight in zip(samples, weights, strict=True):
        groups[sample.question_index, sample.role].append((sample, weight))
    inputs = {group: [sample.tokens for sample, _ in pairs] for group, pairs in groups.items()}
    own_sizes = {group: added_tokens(tokens, pack) for group, tokens in inputs.items()}
    sizes = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, own_sizes)
    rank = dist.get_rank()
    parts = [[] for _ in sizes]  # of this rank's pairs, by the rank that trains on them
    for group, source, target in plan_moves(sizes):
        if source == rank:
            parts[target] += groups.pop(group)
    parts[rank] = [pair for pairs in groups.values() for pair in pairs]
    result = deliver(parts)
    return [sample for sample, _ in result], [weight for _, weight in result]


def added_tokens(inputs: list[list[int]], pack: bool) -> int:
    """The number of tokens that go through the model. With `pack` shared prefixes count once."""
    count = 0
    before = []
    for current in sorted(inputs):
        count += len(current) - (shared_prefix(before, current) if pack else 0)
        before = current
    return count


def plan_moves(sizes: list[dict[SampleGroup, int]]) -> Iterator[tuple[SampleGroup, int, int]]:
    """The groups that move, each as (group, its rank, its new rank).

    `sizes[rank]` has a rank's tokens by group. The largest group is placed first. It stays if its
    rank then has at most the mean, else it goes to the rank with the fewest tokens so far. So no
    rank has more than the mean plus one group.
    """
    groups = [(size, rank, group) for rank, own in enumerate(sizes) for group, size in own.items()]
    mean = sum(size for size, _, _ in groups) / len(sizes)
    loads = [0] * len(sizes)
    for size, rank, group in sorted(groups, reverse=True):
        target = rank
        if loads[rank] + size > mean:
            # Among ranks with equal loads, its own rank is preferred.
            target = min(range(len(sizes)), key=lambda other: (loads[other], other != rank))
        loads[target] += size
        if target != rank:
            yield group, rank, target
