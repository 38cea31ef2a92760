"""Runs the programs of programs.txt as the Python tool would, and reports what each of them reached.

No pytest in here: it is copied with tools/ into a folder that another user can read, and run by that user's Python.
`python harness.py locked|unlocked [name…]` prints {"unavailable": reason or null, "reached": {name: [witness, …]}}.
`unlocked` replaces the jail by a child that only claims to be locked, to show that the witnesses do see what gets out.

Witnesses are things outside that must stay as they were: a victim process, sockets that must not be contacted, a file,
a key in our environment, bytes in our memory, our own limits and files, the machine's process list. Messages prove
nothing, with one exception: a program whose forbidden call leaves no trace prints a token when the call succeeds.
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
CALLS = {
    "x86_64": dict(clone=56, kill=62, tkill=200, tgkill=234, fcntl=72, rt_sigqueueinfo=129, prlimit64=302, kcmp=312,
                   reboot=169, init_module=175, finit_module=313, bpf=321, perf_event_open=298, add_key=248,
                   userfaultfd=323, seccomp=317),
    "aarch64": dict(clone=220, kill=129, tkill=130, tgkill=131, fcntl=25, rt_sigqueueinfo=138, prlimit64=261, kcmp=272,
                    reboot=142, init_module=105, finit_module=273, bpf=280, perf_event_open=241, add_key=217,
                    userfaultfd=282, seccomp=277)}
CALLS_EVERYWHERE = dict(io_uring_setup=425, clone3=435, openat2=437, pidfd_getfd=438, fsopen=430, open_tree=428,
                        landlock_create_ruleset=444, fchmodat2=452)
PRELUDE = """
import ctypes, os, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    return libc.syscall(CALLS[name], *arguments)
def landed():
    os.write(1, "-".join(["landed", TOKEN]).encode())
"""


def read_programs() -> dict[str, tuple[list[str], str]]:
    """name -> (options, program)"""
    programs = {}
    for block in (HERE / "programs.txt").read_text().split("\n### ")[1:]:
        head, _, body = block.partition("\n")
        name, *options = head.split()
        assert name not in programs, name
        programs[name] = options, body
    return programs


class Witnesses:
    """Everything a program could reach, in a known state; `reached` compares. Made anew after every success."""

    def __init__(self, key: str):
        self.key = key
        self.token, self.secret, self.memory = (secrets.token_hex(8) for _ in range(3))
        self.folder = tempfile.mkdtemp(prefix="witness-", dir=HERE)
        self.file = Path(self.folder, "secret.py")
        self.file.write_text(f"text = '{self.secret}'\n")
        self.fd = os.open(self.file, os.O_RDONLY)
        os.set_inheritable(self.fd, True)
        self.victim = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.buffer = ctypes.create_string_buffer(self.memory.encode())
        self.unix, self.abstract = f"{self.folder}/socket", self.token + "-abstract"
        self.sockets = {"tcp": self._socket(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
                        "udp": self._socket(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
                        "unix socket": self._socket(socket.AF_UNIX, socket.SOCK_STREAM, self.unix),
                        "abstract socket": self._socket(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + self.abstract)}
        self.signals = []
        for name in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGIO, signal.SIGTERM):
            signal.signal(name, lambda number, frame: self.signals.append(number))
        self.before = self.state()

    def _socket(self, family, kind, address):
        it = socket.socket(family, kind)
        it.bind(address)
        if kind == socket.SOCK_STREAM:
            it.listen()
        it.setblocking(False)
        return it

    def state(self) -> dict:
        """What must be the same before and after."""
        def read(path):
            return Path(path).read_text() if os.path.exists(path) else None

        file = os.stat(self.file) if self.file.exists() else None
        pid, alive = self.victim.pid, self.victim.poll() is None
        return {
            "victim": alive and [read(f"/proc/{pid}/limits"), read(f"/proc/{pid}/oom_score_adj"),
                                 "State:\tT" in read(f"/proc/{pid}/status"), os.getpriority(os.PRIO_PROCESS, pid),
                                 os.sched_getaffinity(pid), os.sched_getscheduler(pid)],
            "file": file and [file.st_mode, file.st_mtime, file.st_size, file.st_nlink, file.st_uid, file.st_ino,
                              read(self.file)],
            "folder": sorted(os.listdir(self.folder)),
            "memory": self.buffer.raw,
            "limits": [resource.getrlimit(what) for what in range(16)] + [os.getpriority(os.PRIO_PROCESS, 0)],
            "files": len(os.listdir("/proc/self/fd")),
            "machine": [platform.node(), read("/proc/sys/kernel/core_pattern"), read("/proc/self/mounts")],
            "clock": abs(time.time() - time.monotonic() - CLOCK) < 5,
        }

    def names(self) -> dict:
        """What a program is told: where everything is, but no secret."""
        return {"VICTIM": self.victim.pid, "PARENT": os.getpid(), "HOME": os.path.expanduser("~"),
                "FOLDER": self.folder, "SECRET": str(self.file), "SECRET_FD": self.fd,
                "ADDRESS": ctypes.addressof(self.buffer), "LENGTH": len(self.buffer),
                "TCP": self.sockets["tcp"].getsockname()[1], "UDP": self.sockets["udp"].getsockname()[1],
                "UNIX": self.unix, "ABSTRACT": self.abstract, "MARKER": self.marker(), "TOKEN": self.token,
                "JAIL": str(HERE / "tools" / "jail.py"), "CALLS": CALLS[platform.machine()] | CALLS_EVERYWHERE}

    def marker(self) -> str:
        return "mars-attack-" + self.token

    def survivors(self) -> list[int]:
        """Processes whose command line names our folder or the marker, ourselves apart."""
        found = []
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            pid = int(path.split("/")[2])
            try:
                line = Path(path).read_bytes()
            except OSError:
                continue
            if pid != os.getpid() and (f"{HERE}/tools/".encode() in line or self.marker().encode() in line):
                found.append(pid)
        return found

    def contacted(self) -> list[str]:
        names = []
        for name, it in self.sockets.items():
            try:
                it.recv(100) if name == "udp" else it.accept()[0].close()
            except BlockingIOError:
                continue
            names.append(name)
        return names

    def reached(self, output: str) -> list[str]:
        """The witnesses that a program, whose output is given, has touched."""
        time.sleep(0.01)                    # a signal or a new process takes its time
        after = self.state()
        hits = [name for name in after if after[name] != self.before[name]] + self.contacted()
        hits += ["signal"] * bool(self.signals) + ["process"] * bool(self.survivors())
        folders = "/var/tmp", "/", "/usr/lib", "/sys/fs/cgroup", os.path.expanduser("~"), os.path.dirname(os.__file__)
        made = any(os.path.lexists(f"{folder}/{self.marker()}") for folder in (*folders, *sys.path))
        made = made or any(glob.glob(f"{folder}/{self.marker()}*") for folder in (self.folder, "/tmp", "/dev/shm"))
        hits += ["new file"] * made
        told = {"secret": self.secret, "key": self.key, "our memory": self.memory,
                "forbidden call": "landed-" + self.token}
        return hits + [name for name, text in told.items() if text in output]

    def close(self) -> None:
        for pid in self.survivors():
            os.kill(pid, signal.SIGKILL)
        self.victim.kill()
        self.victim.wait()
        for it in self.sockets.values():
            it.close()
        os.close(self.fd)
        for folder in (self.folder, "/tmp", "/dev/shm"):
            for path in glob.glob(f"{folder}/{self.marker()}*"):
                os.rmdir(path) if os.path.isdir(path) else os.unlink(path)


def attack(python, witnesses: Witnesses, options: list[str], program: str) -> list[str]:
    """Runs one program; returns the witnesses it reached; ToolError is one: no program may make the tool fail."""
    prelude = "".join(f"{name} = {value!r}\n" for name, value in witnesses.names().items()) + PRELUDE
    limits = {"memory": 1024, "timeout": 10} | {name: int(value) for name, value in
                                                (option.split("=") for option in options if "=" in option)}
    start, failures = time.monotonic(), []
    try:
        output = python.run(prelude + program, timeout=limits["timeout"], memory=limits["memory"] << 20)
    except python.ToolError as error:
        output, failures = str(error), [f"ToolError: {error}"]
    failures += ["time"] * (time.monotonic() - start > limits["timeout"] + 5)
    failures += ["frames of the tool"] * ('jail.py", line' in output)
    return failures + witnesses.reached(output)


def main(mode: str, names: list[str]) -> None:
    from tools import python
    key = os.environ["SERPER_API_KEY"]              # given by the caller, so that /proc/…/environ shows it
    programs = read_programs()
    if mode == "unlocked":
        python.JAIL = HERE / "tools" / "unlocked.py"
        python.JAIL.write_text(UNLOCKED)
        programs = {name: it for name, it in programs.items() if {"unlocked", "unlocked?"} & set(it[0])}
    unavailable, reached = mode == "locked" and python.available() or None, {}
    witnesses = Witnesses(key)
    for name, (options, program) in programs.items():
        if unavailable or names and name not in names:
            continue
        reached[name] = attack(python, witnesses, options, program)
        if reached[name]:
            witnesses.close()
            witnesses = Witnesses(key)
    witnesses.close()
    print(json.dumps({"unavailable": unavailable, "reached": reached}))


CLOCK = time.time() - time.monotonic()

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
