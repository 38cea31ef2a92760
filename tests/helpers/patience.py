"""A rank that waits longer for the other one than a GPU would; tests/test_mars.py starts two."""

import datetime
import time

import torch.distributed as dist

import processes
from mars import MarsConfig
from plumbing import outside

assert outside.GPU_PATIENCE == datetime.timedelta(minutes=30)
outside.GPU_PATIENCE = datetime.timedelta(seconds=1)
init = dist.init_process_group
given = []


def noted(*arguments, **options):
    given.append(options["timeout"])
    init(*arguments, **options)


dist.init_process_group = noted
rank = outside.join(MarsConfig()).rank
assert given == [outside.GPU_PATIENCE]  # NCCL keeps it
if rank == 0:
    time.sleep(2)
assert processes.from_first_rank(7) == 7
processes.leave(0)
