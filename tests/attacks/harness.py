"""Runs the programs of programs.txt as the Python tool would; reports what each of them reached.

    python harness.py locked|unlocked [NAME...]

prints one line of JSON: {"unavailable": reason or null, "users": what the programs are,
"reached": {name: [witness, ...]}}. `unlocked` replaces the jail by a child that only claims to be
locked, to show that the witnesses do see what gets out.

There is no pytest in here: the file is copied with tools/ into a folder that another user can
read, and run by that user's Python.

Witnesses are things outside that must stay as they were: a victim process, sockets that must not
be contacted, a file, a key in our environment, bytes in our memory, our own limits and files, the
machine's process list. Messages prove nothing, with one exception: a program whose forbidden call
leaves no trace prints a token when the call succeeds.
"""

import ctypes
import glob
import json
import os
import platform
import resource
import secrets
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
# The numbers of system calls. ARM has no vfork: clone with CLONE_VFORK takes its place.
CALLS = {
    "x86_64": """
clone=56 vfork=58 kill=62 fcntl=72 ptrace=101 setuid=105 setgid=106 setreuid=113 setregid=114
setgroups=116 setresuid=117 setresgid=119 setfsuid=122 setfsgid=123 capget=125 capset=126
rt_sigqueueinfo=129 prctl=157 reboot=169 init_module=175 tkill=200 tgkill=234 add_key=248
request_key=249 keyctl=250 perf_event_open=298 prlimit64=302 kcmp=312 finit_module=313
seccomp=317 bpf=321 userfaultfd=323
    """,
    "aarch64": """
clone=220 vfork=220 kill=129 fcntl=25 ptrace=117 setuid=146 setgid=144 setreuid=145 setregid=143
setgroups=159 setresuid=147 setresgid=149 setfsuid=151 setfsgid=152 capget=90 capset=91
rt_sigqueueinfo=138 prctl=167 reboot=142 init_module=105 tkill=130 tgkill=131 add_key=217
request_key=218 keyctl=219 perf_event_open=241 prlimit64=261 kcmp=272 finit_module=273
seccomp=277 bpf=280 userfaultfd=282
    """,
}
CALLS_EVERYWHERE = """
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
CLOCK = time.time() - time.monotonic()


def numbers_of_calls() -> dict[str, int]:
    pairs = f"{CALLS[platform.machine()]} {CALLS_EVERYWHERE}".split()
    return {name: int(number) for name, number in (pair.split("=") for pair in pairs)}


def read_programs() -> dict[str, tuple[list[str], str]]:
    """name -> (options, program)"""
    programs = {}
    for block in (HERE / "programs.txt").read_text().split("\n### ")[1:]:
        head, _, body = block.partition("\n")
        name, *options = head.split()
        assert name not in programs, name
        programs[name] = options, body
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

    def __init__(self, key: str):
        self.key = key
        self.token = secrets.token_hex(8)
        self.secret = secrets.token_hex(8)
        self.memory = secrets.token_hex(8)
        self.marker = "mars-attack-" + self.token
        self.folder = tempfile.mkdtemp(prefix="witness-", dir=HERE)
        os.chmod(self.folder, 0o755)  # that it is another user's must not be what guards it
        self.open_folders = self.folder, "/tmp", "/dev/shm"
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
            "file": self.file_state(),
            "folder": sorted(os.listdir(self.folder)),
            "memory": self.buffer.raw,
            "limits": [resource.getrlimit(what) for what in range(16)],
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "users": [os.getresuid(), os.getresgid(), os.getgroups()],
            "files": len(os.listdir("/proc/self/fd")),
            "machine": [
                platform.node(),
                read_if_there("/proc/sys/kernel/core_pattern"),
                read_if_there("/proc/self/mounts"),
            ],
            "clock": abs(time.time() - time.monotonic() - CLOCK) < 5,
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

    def file_state(self) -> list | None:
        if not self.file.exists():
            return None
        file = os.stat(self.file)
        but_times = file[:7]
        return [*but_times, file.st_mtime, read_if_there(self.file)]

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
        found = []
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            pid = int(path.split("/")[2])
            try:
                line = Path(path).read_bytes()
            except OSError:
                continue
            is_ours = f"{HERE}/tools/".encode() in line or self.marker.encode() in line
            if is_ours and pid != os.getpid():
                found.append(pid)
        return found

    def contacted(self) -> list[str]:
        names = []
        for name, listener in self.sockets.items():
            try:
                if name == "udp":
                    listener.recv(100)
                else:
                    listener.accept()[0].close()
            except BlockingIOError:
                continue
            names.append(name)
        return names

    def made_file(self) -> bool:
        folders = ["/var/tmp", "/", "/usr/lib", "/sys/fs/cgroup", os.path.expanduser("~")]
        folders += [os.path.dirname(os.__file__), *sys.path]
        if any(os.path.lexists(f"{folder}/{self.marker}") for folder in folders):
            return True
        return any(glob.glob(f"{folder}/{self.marker}*") for folder in self.open_folders)

    def reached(self, output: str, seconds: float) -> list[str]:
        """The witnesses that a program, whose output is given, has touched.

        A signal or a new process takes its time: the first look comes after 10 ms, and further ones
        follow for so many seconds while none is touched.
        """
        deadline = time.monotonic() + seconds
        while True:
            time.sleep(0.01)
            hits = self.look(output)
            if hits or time.monotonic() > deadline:
                return hits

    def look(self, output: str) -> list[str]:
        after = self.state()
        hits = [name for name in after if after[name] != self.before[name]]
        hits += self.contacted()
        if self.signals:
            hits.append("signal")
        if self.survivors():
            hits.append("process")
        if self.made_file():
            hits.append("new file")
        told = {
            "secret": self.secret,
            "key": self.key,
            "our memory": self.memory,
            "forbidden call": "landed-" + self.token,
        }
        return hits + [name for name, text in told.items() if text in output]

    def close(self) -> None:
        for pid in self.survivors():
            os.kill(pid, signal.SIGKILL)
        self.victim.kill()
        self.victim.wait()
        for listener in self.sockets.values():
            listener.close()
        os.close(self.fd)
        for folder in self.open_folders:
            for path in glob.glob(f"{folder}/{self.marker}*"):
                if os.path.isdir(path):
                    os.rmdir(path)
                else:
                    os.unlink(path)


def attack(python, witnesses: Witnesses, options: list[str], program: str) -> list[str]:
    """Runs one program; returns the witnesses it reached.

    ToolError counts as one: no program may make the tool fail. What must reach one is waited for.
    """
    names = "".join(f"{name} = {value!r}\n" for name, value in witnesses.names().items())
    limits = {"memory": 1024, "timeout": 10}
    for option in options:
        name, equals, value = option.partition("=")
        if equals:
            limits[name] = int(value)
    failures = []
    start = time.monotonic()
    try:
        output = python.run(
            names + PRELUDE + program,
            timeout=limits["timeout"],
            memory=limits["memory"] << 20,
        )
    except python.ToolError as error:
        output = str(error)
        failures.append(f"ToolError: {error}")
    if time.monotonic() - start > limits["timeout"] + 300:  # a busy machine is slow, not endless
        failures.append("time")
    if 'jail.py", line' in output:
        failures.append("frames of the tool")
    patience = 60 if "unlocked" in options and python.JAIL.name == "unlocked.py" else 0
    return failures + witnesses.reached(output, patience)


def main(mode: str, wanted: list[str]) -> None:
    from tools import python

    # The caller gives us the key, so that /proc/PID/environ shows it.
    key = os.environ["SERPER_API_KEY"]
    programs = read_programs()
    unavailable = None
    users = None
    if mode == "unlocked":
        python.JAIL = HERE / "tools" / "unlocked.py"
        python.JAIL.write_text(UNLOCKED)
        marks = {"unlocked", "unlocked?"}
        programs = {name: it for name, it in programs.items() if marks & set(it[0])}
    else:
        unavailable = python.available()
    if mode == "locked" and not unavailable:
        users = python.run("import os\n[*os.getresuid(), *os.getresgid(), *os.getgroups()]")
    reached = {}
    witnesses = Witnesses(key)
    for name, (options, program) in programs.items():
        if unavailable or (wanted and name not in wanted):
            continue
        reached[name] = attack(python, witnesses, options, program)
        if reached[name]:
            witnesses.close()
            witnesses = Witnesses(key)
    witnesses.close()
    print(json.dumps({"unavailable": unavailable, "users": users, "reached": reached}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
