"""The Python tool: runs a program that a model wrote and returns what it printed.

Such a program counts as hostile. It runs in a child that locks itself in (tools/jail.py) and that gets nothing from us:
no environment, no open file, no working folder, an own session. Its output goes to one nameless file in memory,
which needs no cleaning up; the program can only append to it.

Fail closed: output that does not begin with the jail's word `locked` is refused with ToolError, and there is no plain
subprocess to fall back to. The only other backend is a SandboxFusion server, when MARS_SANDBOX_URL names one.

`python -m tools.python < program.py` prints what the model would see.
"""
import http.client
import inspect
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from pathlib import Path

from config import UserError
from tools import Document, ToolError, jail

TIMEOUT = 10.0          # seconds a program may take, its start included
MEMORY = 1 << 30        # bytes of address space: numpy takes 0.2 GiB of it
OUTPUT = 64 << 10       # bytes of output that are kept: more would fill a model's context
THREADS = 64            # no rlimit on them binds root, so the parent counts
NO_OUTPUT = "(no output)"
LOCKED = b"locked\n"
JAIL = Path(jail.__file__).resolve()
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0", "MPLBACKEND": "Agg",
               "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

_slots = threading.BoundedSemaphore(max(8, 2 * (os.cpu_count() or 1)))


def run(code: str, *, timeout: float = TIMEOUT, memory: int = MEMORY) -> str:
    """Runs `code` for up to `timeout` seconds in `memory` bytes; returns its output and its last expression's value.

    The model's own mistakes are output: a traceback, or a last line `output cut …`, `timed out after … s`, `killed: …`.
    ToolError when the program could not be run at all, UserError when MARS_SANDBOX_URL is no web address. Safe to call
    from many threads; more than a few programs at once wait for each other, which does not count as their time.
    """
    url = os.environ.get("MARS_SANDBOX_URL")
    return _run_on_server(url, code, timeout, memory) if url else _run_in_jail(code, timeout, memory)


def tool(code: str) -> list[Document]:
    """The tool as System 2 calls it: one document that holds the output."""
    text = run(code) or NO_OUTPUT
    return [Document(f"python-{zlib.crc32(code.encode('utf-8', 'replace')):08x}", "Python output", "", text)]


def available() -> str | None:
    """None when programs can be run here; otherwise the reason, in one sentence. Runs one to find out."""
    try:
        answer = run("20 + 22")
    except (ToolError, UserError) as error:
        return str(error)
    return None if answer == "42" else f"the Python tool gave {answer[-200:]!r} for 20 + 22"


def _run_in_jail(code: str, timeout: float, memory: int) -> str:
    if sys.platform != "linux":
        raise ToolError("the Python tool needs Linux, or a SandboxFusion server named by MARS_SANDBOX_URL")
    try:
        with (_slots, open(os.memfd_create("program"), "w+b") as program,
              open(os.memfd_create("output"), "rb") as output,
              open(f"/proc/self/fd/{output.fileno()}", "ab") as append):
            program.write(code.encode("utf-8", "replace"))
            program.seek(0)
            child = subprocess.Popen(_command(timeout, memory), stdin=program, stdout=append, stderr=append,
                                     env=ENVIRONMENT, cwd="/", start_new_session=True)
            try:
                ended = _wait(child.pid, timeout)
            finally:
                os.killpg(child.pid, signal.SIGKILL)    # not yet waited for, so the number is still the child's
                child.wait()
            printed = output.read()
    except OSError as error:
        raise ToolError(f"the Python tool could not start a process: {error}") from error
    return _read(printed, ended or _death(child.returncode, timeout))


def _command(timeout: float, memory: int) -> list[str]:
    """The child: isolated, and without the site module, whose .pth files would run before the lock.

    Readable are the library folders alone: a prefix or /usr as a whole may hold a pip.conf or an app with its keys."""
    packages = [path for path in sys.path if path.endswith(("/site-packages", "/dist-packages"))]
    prefixes = sys.prefix, sys.base_prefix, "/usr", "/usr/local", ""
    libraries = [f"{prefix}/{name}" for prefix in prefixes for name in ("lib", "lib64")]
    files = ["/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo", "/dev/null", "/dev/urandom"]
    limits = math.ceil(timeout), int(memory), OUTPUT + len(LOCKED), os.getpid()
    return [sys.executable, "-P", "-s", "-S", "-B", "-u", str(JAIL), *map(str, limits),
            ":".join(packages + libraries + files), ":".join(packages)]


def _wait(pid: int, timeout: float) -> str:
    """Waits until the child has ended by itself ("") or has to be killed (why)."""
    deadline = time.monotonic() + timeout
    pidfd = os.pidfd_open(pid)
    try:
        end = select.poll()
        end.register(pidfd, select.POLLIN)
        while not end.poll(max(0.0, min(0.05, deadline - time.monotonic())) * 1000):
            if time.monotonic() >= deadline:
                return f"timed out after {timeout:g} s"
            if _threads(pid) > THREADS:
                return f"killed: more than {THREADS} threads"
        return ""
    finally:
        os.close(pidfd)


def _threads(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2    # one link a thread: cheaper than to list them
    except FileNotFoundError:                               # ended this moment
        return 0


def _death(returncode: int, timeout: float) -> str:
    """The last line for a child that ended by a signal; the kernel says SIGKILL when the machine is out of memory."""
    if returncode >= 0:
        return ""
    known = {-signal.SIGKILL: "killed: memory", -signal.SIGXCPU: f"timed out after {timeout:g} s"}
    return known.get(returncode) or f"killed: {signal.Signals(-returncode).name}"


def _read(printed: bytes, ended: str) -> str:
    """The child's output as the model sees it; refuses output from a child that did not lock itself in."""
    if not printed.startswith(LOCKED):
        said = printed.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise ToolError(f"the Python tool refuses to run here: {said[:300] or ended or 'its jail did not start'}")
    return _shown(printed[len(LOCKED):], ended)


def _shown(output: bytes, ended: str) -> str:
    lines = [output[:OUTPUT].decode("utf-8", "replace").rstrip("\n")]
    if len(output) >= OUTPUT:
        lines.append(f"output cut after {OUTPUT} bytes")
    return "\n".join(filter(None, lines + [ended]))


def _run_on_server(url: str, code: str, timeout: float, memory: int) -> str:
    """SandboxFusion's `POST /run_code`; the program travels inside jail.execute, so that both backends show the same.

    Its server keeps standard output and error apart: the second comes after the first."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"MARS_SANDBOX_URL must begin with http:// or https://, not {url!r}")
    program = f"{inspect.getsource(jail.execute)}\n\nexecute({ascii(code)})\n"
    body = {"code": program, "language": "python", "run_timeout": timeout, "memory_limit_MB": memory >> 20}
    request = urllib.request.Request(url.rstrip("/") + "/run_code", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout + 30) as response:     # the server may queue
            answer = json.load(response)
        status, result = answer["status"], answer["run_result"]
        if status == "SandboxError" or result is None:
            raise ToolError(f"the sandbox server failed: {str(answer.get('message'))[:300]}")
        output = ((result["stdout"] or "") + (result["stderr"] or "")).encode("utf-8", "replace")
        late = result["status"] == "TimeLimitExceeded"
        died = _death(result.get("return_code") or 0, timeout)          # by a signal, as subprocess counts it
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise ToolError(f"the sandbox server at {url} did not answer as it should: {error!r:.300}") from error
    return _shown(output, f"timed out after {timeout:g} s" if late else died)


def main() -> int:
    try:
        if sys.argv[1:]:
            raise UserError("tools.python takes no options: give it the program on standard input")
        print(tool(sys.stdin.buffer.read().decode("utf-8", "replace"))[0].text)
    except (ToolError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
