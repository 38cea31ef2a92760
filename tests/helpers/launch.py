"""Starts a script on several processes of one group, as torchrun would.

One process imports what takes long and then forks: eight ranks cost little more than one.
"""

import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent


def launch(script, *arguments, world: int = 2) -> int:
    """The exit code that all ranks end with; 99 if they differ."""
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
    command = [sys.executable, __file__, str(world), script, *map(str, arguments)]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(600)
    finally:
        with contextlib.suppress(ProcessLookupError):  # of ranks that hang none stays
            os.killpg(process.pid, signal.SIGKILL)


def fork(world: int, command: list[str]) -> int:
    children = []
    for rank in range(world):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
            sys.exit(0)
        children.append(child)
    codes = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
    return codes.pop() if len(codes) == 1 else 99


if __name__ == "__main__":
    import torch  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import trainer  # noqa: F401

    sys.exit(fork(int(sys.argv[1]), sys.argv[2:]))
