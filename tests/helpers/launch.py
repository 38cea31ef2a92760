"""Starts a script, or a function, in several processes of one group, as torchrun would, or in one.

A server imports what takes long, once, and forks: eight ranks cost little more than one.
"""

import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from kernels import products
from plumbing import curves
from processes import leave

TESTS = Path(__file__).parent.parent
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["transformers.models.qwen3.modeling_qwen3", "test_mars"])


def choose_route() -> None:
    """Forces the route of kernels/products.py that TEST_BY_ONEDNN names, True or False."""
    if "TEST_BY_ONEDNN" in os.environ:  # set by conftest.products_by, or by .ci/run
        by_onednn = os.environ["TEST_BY_ONEDNN"] == "True"
        products.onednn_is_faster = lambda: by_onednn


def start(script, *arguments, log, world: int = 1) -> list[multiprocessing.Process]:
    """Starts the ranks, whose output goes into the file `log`."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        CONTEXT.Process(target=run, args=(environment, rank, str(log), script, arguments))
        for rank in range(world)
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTHONPATH", "OMP_NUM_THREADS"):  # the server starts with the first rank
            patch.setenv(name, environment[name])
        for process in ranks:
            process.start()
    return ranks


def run(environment: dict, rank: int, log: str, script: Path | str | Callable, arguments) -> None:
    """What a process does: a script joins the group itself, a function is called within it."""
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    choose_route()
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    curves.draw = lambda *panels, **columns: b""  # as in conftest.draw
    if callable(script):
        dist.init_process_group("gloo")
        script(*arguments)
        leave(0)
    sys.argv = [str(script), *map(str, arguments)]
    runpy.run_path(sys.argv[0], run_name="__main__")


def launch(script, *arguments, log, world: int = 2) -> int:
    """The exit code that all ranks end with; 99 if they differ."""
    ranks = start(script, *arguments, log=log, world=world)
    for process in ranks:
        process.join(600)
        process.kill()  # of ranks that hang none stays
    codes = {process.exitcode for process in ranks}
    print(Path(log).read_text())
    return codes.pop() if len(codes) == 1 else 99
