"""The processes of one run. One process alone has no group, and needs none of this."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping

import torch.distributed as dist

from config import UserError


def is_first() -> bool:
    """Whether this process writes the run's files: rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def from_first_rank(value):
    """Rank 0's value, on every rank. All ranks wait here for rank 0."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def sum_over_ranks(sums: Mapping) -> Counter:
    """The sum of each key's values over all ranks. Ranks may have different keys."""
    parts = [sums]
    if dist.is_initialized():
        parts *= dist.get_world_size()
        dist.all_gather_object(parts, dict(sums))
    total = Counter()
    for part in parts:
        total.update(part)
    return total


def next_number(name: str) -> int:
    """0, 1, 2, …: each number of a name is given out once, to whichever rank asks first."""
    return dist.distributed_c10d._get_default_store().add(f"mars {name}", 1) - 1


def deliver(parts: list[list]) -> list:
    """Sends the items of parts[r] to each rank r; returns those for this rank."""
    rank = dist.get_rank()
    # Its own part stays here: it is the largest, and PyTorch pads all parts to the same size.
    arrivals = list(parts[rank])
    parts = [*parts[:rank], [], *parts[rank + 1 :]]
    for source in range(len(parts)):
        box = [None]
        dist.scatter_object_list(box, parts, source)
        arrivals += box[0]
    return arrivals


def on_first_rank(function: Callable):
    """The result of `function` on rank 0, None on other ranks. Its UserError is raised on all."""
    value = problem = None
    if is_first():
        try:
            value = function()
        except UserError as error:
            problem = str(error)
    problem = from_first_rank(problem)
    if problem:
        raise UserError(problem)
    return value


def end_at_once(*error) -> None:
    """A rank's sys.excepthook: prints the error as Python does, and ends the process."""
    sys.__excepthook__(*error)
    leave(1)


def leave(code: int) -> None:
    """Ends this process with `code`. Without a process group it returns, and Python ends as usual.

    The threads of a process group can outlive it, and Python's own exit would then abort (SIGABRT,
    after the work was done). So the process flushes its output and ends without Python's exit.

    A rank that failed does not close the group: NCCL would wait for the other ranks, and they may
    wait for this one. torchrun ends them.
    """
    if not dist.is_initialized():
        return
    if code == 0:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
