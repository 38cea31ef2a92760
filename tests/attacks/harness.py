"""Runs the programs of programs.txt as the Python tool would; reports what each of them reached.

    python harness.py locked|unlocked [NAME...]

prints one line of JSON: {"users": what the programs are, "reached": {name: [witness, ...]}}.
`unlocked` replaces the jail by a child that only claims to be locked, to show that the witnesses do
see what gets out.

It is copied with tools/ and run by a Python that may have no pytest. Witnesses are things outside
that must stay as they were. Messages prove nothing, with one exception: a program whose forbidden
call leaves no trace prints a token when the call succeeds.
"""

import ctypes
import glob
import json
import os
import platform
import resource
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
UNLOCKED = """
import sys, types
print("locked", flush=True)
sys.modules["__main__"] = module = types.ModuleType("__main__")
exec(sys.stdin.read(), vars(module))
"""
# Those without a number are known to libseccomp. Others may be newer than it; they have the same
# number on every architecture.
CALLS = """
clone vfork kill fcntl ptrace setuid setgid setreuid setregid setgroups setresuid setresgid setfsuid
setfsgid capset rt_sigqueueinfo prctl reboot init_module tkill tgkill add_key request_key keyctl
perf_event_open prlimit64 kcmp finit_module seccomp bpf userfaultfd
pidfd_send_signal=424 io_uring_setup=425 open_tree=428 fsopen=430 pidfd_open=434 clone3=435
openat2=437 pidfd_getfd=438 process_madvise=440 landlock_create_ruleset=444 memfd_secret=447
process_mrelease=448 fchmodat2=452
"""
PRELUDE = """
import ctypes, os, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    return libc.syscall(CALLS[name], *arguments)
def landed():
    os.write(1, "-".join(["landed", TOKEN]).encode())
"""


def numbers_of_calls() -> dict[str, int]:
    look_up = ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name
    calls = (call.partition("=") for call in CALLS.split())
    return {name: int(number or look_up(name.encode())) for name, _, number in calls}


def read_programs() -> dict[str, tuple[dict[str, str], str]]:
    """name -> (options, program)"""
    programs = {}
    for block in (HERE / "programs.txt").read_text().split("\n### ")[1:]:
        head, _, body = block.partition("\n")
        name, *options = head.split()
        programs[name] = dict(option.partition("=")[::2] for option in options), body
    return programs


def listen(family: int, kind: int, address) -> socket.socket:
    """A socket that waits to be contacted and never blocks us."""
    listener = socket.socket(family, kind)
    listener.bind(address)
    if kind == socket.SOCK_STREAM:
        listener.listen()
    listener.setblocking(False)
    return listener


def read_if_there(path) -> str | None:
    if not os.path.exists(path):
        return None
    return Path(path).read_text()


class Witnesses:
    """Everything a program could reach, in a known state. Made anew after every success."""

    def __init__(self):
        self.key = os.environ["SERPER_API_KEY"]  # so that /proc/PID/environ shows it
        self.token = secrets.token_hex(8)
        self.secret = secrets.token_hex(8)
        self.memory = secrets.token_hex(8)
        self.marker = "mars-attack-" + self.token
        self.folder = tempfile.mkdtemp(prefix="witness-", dir=HERE)
        os.chmod(self.folder, 0o755)  # that it is another user's must not be what guards it
        self.file = Path(self.folder, "secret.py")
        self.file.write_text(f"text = '{self.secret}'\n")
        self.fd = os.open(self.file, os.O_RDONLY)
        os.set_inheritable(self.fd, True)
        self.victim = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.buffer = ctypes.create_string_buffer(self.memory.encode())
        self.unix = f"{self.folder}/socket"
        self.abstract = self.token + "-abstract"
        self.sockets = {
            "tcp": listen(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            "udp": listen(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            "unix socket": listen(socket.AF_UNIX, socket.SOCK_STREAM, self.unix),
            "abstract socket": listen(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + self.abstract),
        }
        self.signals = []
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGIO, signal.SIGTERM):
            signal.signal(number, lambda number, frame: self.signals.append(number))
        self.before = self.state()

    def state(self) -> dict:
        """What must be the same before and after."""
        return {
            "victim": self.victim_state(),
            # A change of what any file holds or is shows in its time.
            "folder": sorted(
                (path.name, path.lstat().st_ctime_ns) for path in Path(self.folder).iterdir()
            ),
            "memory": self.buffer.raw,
            "limits": [resource.getrlimit(what) for what in range(16)],
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "users": [os.getresuid(), os.getresgid(), os.getgroups()],
            "files": len(os.listdir("/proc/self/fd")),
            "host name": platform.node(),
            "core pattern": read_if_there("/proc/sys/kernel/core_pattern"),
            "mounts": read_if_there("/proc/self/mounts"),
        }

    def victim_state(self) -> list | None:
        if self.victim.poll() is not None:
            return None
        pid = self.victim.pid
        status = read_if_there(f"/proc/{pid}/status")
        return [
            read_if_there(f"/proc/{pid}/limits"),
            read_if_there(f"/proc/{pid}/oom_score_adj"),
            "State:\tT" in status,
            "TracerPid:\t0" in status,
            os.getpriority(os.PRIO_PROCESS, pid),
            os.sched_getaffinity(pid),
            os.sched_getscheduler(pid),
        ]

    def names(self) -> dict:
        """What a program is told: where everything is, but no secret."""
        return {
            "VICTIM": self.victim.pid,
            "PARENT": os.getpid(),
            "HOME": os.path.expanduser("~"),
            "FOLDER": self.folder,
            "SECRET": str(self.file),
            "SECRET_FD": self.fd,
            "ADDRESS": ctypes.addressof(self.buffer),
            "LENGTH": len(self.buffer),
            "TCP": self.sockets["tcp"].getsockname()[1],
            "UDP": self.sockets["udp"].getsockname()[1],
            "UNIX": self.unix,
            "ABSTRACT": self.abstract,
            "MARKER": self.marker,
            "TOKEN": self.token,
            "JAIL": str(HERE / "tools" / "jail.py"),
            "CALLS": numbers_of_calls(),
        }

    def survivors(self) -> list[int]:
        """Processes whose command line names our folder or the marker, ourselves apart."""
        pids = []
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            pid = int(path.split("/")[2])
            try:
                line = Path(path).read_bytes()
            except OSError:
                continue
            is_ours = f"{HERE}/tools/".encode() in line or self.marker.encode() in line
            if is_ours and pid != os.getpid():
                pids.append(pid)
        return pids

    def contacted(self) -> list[str]:
        ready = select.select(self.sockets.values(), [], [], 0)[0]
        return [name for name, listener in self.sockets.items() if listener in ready]

    def made_files(self) -> list[str]:
        folders = ["/tmp", "/dev/shm", "/var/tmp", "/", "/usr/lib", "/sys/fs/cgroup", self.folder]
        folders += [os.path.expanduser("~"), os.path.dirname(os.__file__), *sys.path]
        return [path for folder in folders for path in glob.glob(f"{folder}/{self.marker}*")]

    def look(self, output: str) -> list[str]:
        """The witnesses that a program, whose output is given, has touched."""
        after = self.state()
        hits = [name for name in after if after[name] != self.before[name]]
        hits += self.contacted()
        if self.signals:
            hits.append("signal")
        if self.survivors():
            hits.append("process")
        if self.made_files():
            hits.append("new file")
        secrets_by_name = {
            "secret": self.secret,
            "key": self.key,
            "our memory": self.memory,
            "forbidden call": "landed-" + self.token,
        }
        return hits + [name for name, text in secrets_by_name.items() if text in output]

    def close(self) -> None:
        for pid in self.survivors():
            os.kill(pid, signal.SIGKILL)
        self.victim.kill()
        self.victim.wait()
        for listener in self.sockets.values():
            listener.close()
        os.close(self.fd)
        subprocess.run(["rm", "-rf", *self.made_files()])


def attack(python, witnesses: Witnesses, options: dict[str, str], program: str) -> list[str]:
    """Runs one program; returns the witnesses it reached.

    ToolError counts as one: no program may make the tool fail. A signal or a new process takes its
    time, so the first look comes after 10 ms; what must reach a witness is waited for.
    """
    names = "".join(f"{name} = {value!r}\n" for name, value in witnesses.names().items())
    memory = int(options.get("memory", 1024)) << 20
    timeout = int(options.get("timeout", 10))
    failures = []
    start = time.monotonic()
    try:
        output = python.run(names + PRELUDE + program, timeout=timeout, memory=memory)
    except python.ToolError as error:
        output = str(error)
        failures.append(f"ToolError: {error}")
    if time.monotonic() - start > timeout + 300:  # a busy machine is slow, not endless
        failures.append("time")
    if 'jail.py", line' in output:
        failures.append("frames of the tool")
    patience = 60 if "unlocked" in options and python.JAIL.name == "unlocked.py" else 0
    deadline = time.monotonic() + patience
    while True:
        time.sleep(0.01)
        hits = failures + witnesses.look(output)
        if hits or time.monotonic() > deadline:
            return hits


def main(mode: str, wanted: list[str]) -> None:
    from tools import python

    programs = read_programs()
    if mode == "unlocked":
        python.JAIL = HERE / "tools" / "unlocked.py"
        python.JAIL.write_text(UNLOCKED)
        marks = {"unlocked", "unlocked?"}
        programs = {name: it for name, it in programs.items() if marks & it[0].keys()}
    users = python.run("import os\n[*os.getresuid(), *os.getresgid(), *os.getgroups()]")
    reached = {}
    witnesses = Witnesses()
    for name in wanted or programs:
        reached[name] = attack(python, witnesses, *programs[name])
        if reached[name]:
            witnesses.close()
            witnesses = Witnesses()
    witnesses.close()
    print(json.dumps({"users": users, "reached": reached}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
