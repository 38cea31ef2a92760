"""The processes of one run: torch.distributed where several were started, nothing where one was."""

import torch.distributed as dist


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
