"""The Python tool: runs a program that a model wrote and returns what it printed.

The program is untrusted. It runs in a child process that locks itself in (tools/jail.py) and that
inherits no environment, no open file and no working folder. It can only append to its output, an
unnamed file in memory. Output that does not begin with the jail's word `locked` raises ToolError.
docs/jail.md lists what the jail prevents and what it does not.

    python -m tools.python < program.py        prints what the model would see
    pytest tests/test_python_tool.py           also runs the programs of tests/attacks/
"""

import functools
import math
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from pathlib import Path

from config import UserError, fail
from tools import Document, ToolError, jail, show

TIMEOUT = 10.0  # seconds for one program, its start included
MEMORY = 1 << 30  # bytes of address space, of which numpy takes 0.2 GiB
OUTPUT = 64 << 10  # the most bytes of output: more would fill a model's context
THREADS = 64  # the most threads of one program
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
    # matplotlib needs a folder whose mode is writable. The jail still forbids writing to it.
    "MPLCONFIGDIR": "/tmp",
    # Python may print a number of any length: the time limit bounds the work.
    "PYTHONINTMAXSTRDIGITS": "0",
    # With a heap of 64 MiB of address space for each thread, 14 threads filled 1 GiB.
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

_slots = threading.BoundedSemaphore(max(8, 2 * (os.cpu_count() or 1)))


def run(code: str, *, timeout: float = TIMEOUT, memory: int = MEMORY) -> str:
    """Runs `code` for up to `timeout` seconds in `memory` bytes and returns its output.

    The value of the last expression is printed as well. The program's own failures are output: a
    traceback, or a last line `output cut …`, `timed out after … s` or `killed: …`.
    Raises ToolError if the program could not be run at all. Any thread may call it. Only a few
    programs run at once; the time that a program waits for its turn does not count.
    """
    if sys.platform != "linux":
        raise ToolError("the Python tool needs Linux")
    with _slots:
        try:
            output, ending = _run_child(_plain(code), timeout, memory)
        except OSError as error:
            raise ToolError(f"the Python tool could not start a process: {error}") from None
    return _read(output, ending)


def tool(code: str) -> list[Document]:
    """The tool as System 2 calls it. It returns the output as one document."""
    text = run(code) or NO_OUTPUT
    name = f"python-{zlib.crc32(code.encode('utf-8', 'replace')):08x}"
    return [Document(name, "Python output", "", text)]


def available() -> str | None:
    """None if this machine can run a program (it runs one), else the reason in one sentence."""
    try:
        answer = run("20 + 22")
    except ToolError as error:
        return str(error)
    return None if answer == "42" else f"the Python tool gave {answer[-200:]!r} for 20 + 22"


def _plain(code: str) -> str:
    """A program without the Markdown fence around it and without an indent of the whole."""
    code = re.sub(r"\A\s*```\w*\n(.*)```\s*\Z", r"\1", code, flags=re.DOTALL)
    return textwrap.dedent(code) if code.lstrip("\n").startswith((" ", "\t")) else code


# The jail -----------------------------------------------------------------------------------------


def _run_child(code: str, timeout: float, memory: int) -> tuple[bytes, str]:
    """(the child's output, the reason why it was ended or "")"""
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
            ending = _wait(child.pid, timeout, memory)
        finally:
            # Until child.wait() below no other process can get the child's number.
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return output.read(), ending or _death(child.returncode, timeout)


def _command(timeout: float, memory: int) -> list[str]:
    """The child's command. It skips the site module, whose .pth files would run before the lock.

    Only library folders are readable, because /usr or a whole prefix may hold somebody's keys.
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
    """The user of the program. The kernel does not limit root's threads, so root changes its user.

    unused    a user who owns nothing, if everybody can read Python and its packages
    counted   root's access to files, but the thread count of another user
    shared    our own user: an ordinary one, or root without the capabilities for a change
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
    """Whether the mode bits let everybody read a library folder, or the folder does not exist."""
    if not os.path.isdir(folder):
        return True
    above = (*Path(folder).absolute().parents, *Path(folder).resolve().parents)
    if not all(parent.stat().st_mode & 0o001 for parent in above):
        return False
    inside = filter(Path.exists, (Path(folder), *Path(folder).iterdir()))
    return all(path.stat().st_mode & 0o004 for path in inside)


def _wait(pid: int, timeout: float, memory: int) -> str:
    """Waits until the child ends by itself (returns "") or must be killed (returns the reason)."""
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
    """The reason to kill a child that exceeds a limit which the kernel does not enforce, or "".

    The kernel does not limit root's threads, and it does not count page tables as address space:
    a page that is far from all others takes two more pages for its tables.
    """
    for thread in _threads(pid):
        try:
            status = Path(f"/proc/{pid}/task/{thread}/status").read_text()
        except OSError:  # it has just ended
            continue
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if "VmPTE" not in fields:  # It has ended, as the program's first thread can before others.
            continue
        if int(fields["Threads"]) > THREADS:
            return f"killed: more than {THREADS} threads"
        page_tables = int(fields["VmPTE"].split()[0]) << 10
        return "killed: memory" if page_tables > memory // 8 else ""
    return ""


def _threads(pid: int) -> list[str]:
    """The numbers of a child's threads; none if it has just ended."""
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _death(returncode: int, timeout: float) -> str:
    """The last line for a child that ended by a signal, or ""."""
    if returncode >= 0:
        return ""
    if returncode == -signal.SIGXCPU:
        return f"timed out after {timeout:g} s"
    if returncode == -signal.SIGKILL:  # by the kernel, when the machine is out of memory
        return "killed: memory"
    return f"killed: {signal.Signals(-returncode).name}"


def _read(raw: bytes, ending: str) -> str:
    """The output as the model sees it. Raises ToolError if the child did not lock itself in.

    A line after the output says that it was cut, and another line why the child was ended.
    """
    if not raw.startswith(LOCKED):
        last_line = raw.decode("utf-8", "replace").strip().rpartition("\n")[2]
        reason = last_line[:300] or ending or "its jail did not start"
        raise ToolError(f"the Python tool refuses to run here: {reason}")
    output = raw[len(LOCKED) :]
    lines = [output[:OUTPUT].decode("utf-8", "replace").rstrip("\n")]
    if len(output) >= OUTPUT:
        lines.append(f"output cut after {OUTPUT} bytes")
    return "\n".join(filter(None, [*lines, ending]))


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
