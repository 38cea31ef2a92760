"""The Python tool: runs a program that a model wrote and returns what it printed.

Such a program counts as hostile. It runs in a child that locks itself in (tools/jail.py) and gets
nothing of ours, no environment, no open file and no working folder. Its output goes to one nameless
file in memory, which the program can only append to. Output that does not begin with the jail's
word `locked` is refused with ToolError. docs/jail.md says what holds a program and what does not.

    python -m tools.python < program.py        prints what the model would see
    pytest tests/test_python_tool.py           runs the programs of tests/attacks/ among others
"""

import functools
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

from config import UserError, fail
from tools import Document, ToolError, jail, show

TIMEOUT = 10.0  # seconds a program may take, its start included
MEMORY = 1 << 30  # bytes of address space: numpy takes 0.2 GiB of it
OUTPUT = 64 << 10  # bytes of output that are kept: more would fill a model's context
THREADS = 64  # threads a program may have
NO_OUTPUT = "(no output)"

LOCKED = b"locked\n"
JAIL = Path(jail.__file__).resolve()
LOOK_EVERY = 0.05  # seconds between two looks at a running program
CAP_KILL, CAP_SETGID, CAP_SETUID = 5, 6, 7
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",
    "MPLBACKEND": "Agg",
    # matplotlib wants a folder that looks writable. This one does, and the jail lets nobody write.
    "MPLCONFIGDIR": "/tmp",
    # The time limit bounds how long a number's digits take.
    "PYTHONINTMAXSTRDIGITS": "0",
    # A heap for each thread would take 64 MiB of address space each: 14 threads filled 1 GiB.
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

_slots = threading.BoundedSemaphore(max(8, 2 * (os.cpu_count() or 1)))


def run(code: str, *, timeout: float = TIMEOUT, memory: int = MEMORY) -> str:
    """Runs `code` for up to `timeout` seconds in `memory` bytes; returns what it showed.

    That is its output and the value of its last expression. The model's own mistakes are output:
    a traceback, or a last line `output cut …`, `timed out after … s`, `killed: …`.
    ToolError when the program could not be run at all. Safe to call from many threads; more than a
    few programs at once wait for each other, and waiting does not count as their time.
    """
    if sys.platform != "linux":
        raise ToolError("the Python tool needs Linux")
    with _slots:
        try:
            printed, ended = _run_child(code, timeout, memory)
        except OSError as error:
            raise ToolError(f"the Python tool could not start a process: {error}") from None
    return _read(printed, ended)


def tool(code: str) -> list[Document]:
    """The tool as System 2 calls it: one document that holds the output."""
    text = run(code) or NO_OUTPUT
    name = f"python-{zlib.crc32(code.encode('utf-8', 'replace')):08x}"
    return [Document(name, "Python output", "", text)]


def available() -> str | None:
    """None when programs can be run here; otherwise the reason, in one sentence. Runs one."""
    try:
        answer = run("20 + 22")
    except ToolError as error:
        return str(error)
    return None if answer == "42" else f"the Python tool gave {answer[-200:]!r} for 20 + 22"


# The jail -----------------------------------------------------------------------------------------


def _run_child(code: str, timeout: float, memory: int) -> tuple[bytes, str]:
    """(what the child printed, why it was ended or "")"""
    with (
        open(os.memfd_create("program"), "w+b") as program,
        open(os.memfd_create("output"), "rb") as output,
        open(f"/proc/self/fd/{output.fileno()}", "ab") as append,
    ):
        program.write(code.encode("utf-8", "replace"))
        program.seek(0)
        child = subprocess.Popen(
            _command(timeout, memory),
            stdin=program,
            stdout=append,
            stderr=append,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
        try:
            ended = _wait(child.pid, timeout, memory)
        finally:
            # The child was not waited for yet, so the number is still its own.
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return output.read(), ended or _death(child.returncode, timeout)


def _command(timeout: float, memory: int) -> list[str]:
    """The child: isolated, and without the site module, whose .pth files would run before the lock.

    Only library folders are readable: /usr or a prefix as a whole may hold somebody's keys.
    """
    packages = tuple(path for path in sys.path if path.endswith(jail.PACKAGES))
    readable = list(packages)
    for prefix in (sys.prefix, sys.base_prefix, "/usr", "/usr/local", ""):
        readable += [f"{prefix}/lib", f"{prefix}/lib64"]
    readable += ["/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo"]
    readable += ["/dev/null", "/dev/urandom"]
    interpreter = [sys.executable, "-P", "-s", "-S", "-B", "-u", str(JAIL)]
    limits = [math.ceil(timeout), int(memory), OUTPUT + len(LOCKED), THREADS, os.getpid()]
    return interpreter + [str(limit) for limit in limits] + [_user(packages)] + readable


@functools.cache
def _user(packages: tuple[str, ...]) -> str:
    """Who the program is to be; the kernel limits no threads of root, so root becomes another.

    unused    a user who owns nothing; possible where everybody can read Python and its packages
    counted   root's rights to files, another user's count of threads
    shared    ourselves: we are an ordinary user, or root without the rights that a change needs
    """
    try:
        everyone_mapped = Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
        status = Path("/proc/self/status").read_text()
    except OSError:
        return "shared"
    rights = int(status.partition("CapEff:")[2].split()[0], 16)
    needed = 1 << CAP_KILL | 1 << CAP_SETGID | 1 << CAP_SETUID
    if os.getresuid() != (0, 0, 0) or not everyone_mapped or rights & needed != needed:
        return "shared"
    if all(map(_is_public, (os.path.dirname(os.__file__), *packages))):
        return "unused"
    return "counted"


def _is_public(folder: str) -> bool:
    """Whether everybody can read a library folder, or there is none, by its files' mode bits."""
    if not os.path.isdir(folder):
        return True
    above = (*Path(folder).absolute().parents, *Path(folder).resolve().parents)
    if not all(parent.stat().st_mode & 0o001 for parent in above):
        return False
    inside = filter(Path.exists, (Path(folder), *Path(folder).iterdir()))
    return all(path.stat().st_mode & 0o004 for path in inside)


def _wait(pid: int, timeout: float, memory: int) -> str:
    """Waits until the child has ended by itself ("") or has to be killed (why)."""
    deadline = time.monotonic() + timeout
    pidfd = os.pidfd_open(pid)
    try:
        child = select.poll()
        child.register(pidfd, select.POLLIN)
        while True:
            seconds_left = max(0.0, deadline - time.monotonic())
            if child.poll(1000 * min(LOOK_EVERY, seconds_left)):
                return ""
            if time.monotonic() >= deadline:
                return f"timed out after {timeout:g} s"
            excess = _excess(pid, memory)
            if excess:
                return excess
    finally:
        os.close(pidfd)


def _excess(pid: int, memory: int) -> str:
    """What the child has too much of although it is limited, or "".

    The kernel does not limit threads of root where root cannot become another user, and it does not
    count page tables as address space: single pages far apart take two more pages each.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        # The child has ended this moment.
        return ""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    page_tables = int(fields.get("VmPTE", "0 kB").split()[0]) << 10
    if int(fields["Threads"]) > THREADS:
        return f"killed: more than {THREADS} threads"
    if page_tables > memory // 8:
        return "killed: memory"
    return ""


def _death(returncode: int, timeout: float) -> str:
    """The last line for a child that ended by a signal, or ""."""
    if returncode >= 0:
        return ""
    if returncode == -signal.SIGXCPU:
        return f"timed out after {timeout:g} s"
    if returncode == -signal.SIGKILL:  # by the kernel, when the machine is out of memory
        return "killed: memory"
    return f"killed: {signal.Signals(-returncode).name}"


def _read(printed: bytes, ended: str) -> str:
    """The child's output as the model sees it; ToolError if the child did not lock itself in.

    At most OUTPUT bytes, and a line each for what cut them and what ended the child.
    """
    if not printed.startswith(LOCKED):
        last_line = printed.decode("utf-8", "replace").strip().rpartition("\n")[2]
        reason = last_line[:300] or ended or "its jail did not start"
        raise ToolError(f"the Python tool refuses to run here: {reason}")
    output = printed[len(LOCKED) :]
    lines = [output[:OUTPUT].decode("utf-8", "replace").rstrip("\n")]
    if len(output) >= OUTPUT:
        lines.append(f"output cut after {OUTPUT} bytes")
    lines.append(ended)
    return "\n".join(line for line in lines if line)


# The command --------------------------------------------------------------------------------------


def main() -> int:
    try:
        if sys.argv[1:]:
            raise UserError("tools.python takes no options: give it the program on standard input")
        [document] = tool(sys.stdin.buffer.read().decode("utf-8", "replace"))
        show(document.text)
    except (ToolError, UserError) as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
