"""The processes of one run: torch.distributed where several were started, nothing where one was."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping

import torch.distributed as dist

from config import UserError


def is_first() -> bool:
    """Whether this process is the one that writes: rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def from_first_rank(value):
    """What rank 0 holds, on every rank; they wait for it here."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def sum_over_ranks(sums: Mapping) -> Counter:
    """Sums over all ranks, of whatever keys each of them brings. What nobody counted is 0."""
    parts = [sums]
    if dist.is_initialized():
        parts *= dist.get_world_size()
        dist.all_gather_object(parts, dict(sums))
    total = Counter()
    for part in parts:
        total.update(part)
    return total


def on_first_rank(function: Callable):
    """What `function` returns, on rank 0, and None elsewhere; its UserError on every rank."""
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
    """Ends this process with `code`; alone it returns, and the caller ends as always.

    A process group's threads can outlive it, and Python's own end would abort on them (SIGABRT,
    after the work was done). So the process ends without it, once what was printed is flushed.

    A rank that has failed does not close the group: NCCL would wait for the other ranks, and they
    may wait for this one. torchrun ends them.
    """
    if not dist.is_initialized():
        return
    if code == 0:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
