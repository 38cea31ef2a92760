"""The Python tool: it lets nothing through, shows what is useful, and never runs unlocked."""

import contextlib
import functools
import gc
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tools import ToolError, jail, python

ROOT = Path(__file__).parent.parent
OURSELVES = os.getuid()
NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"
PROGRAMS = (ROOT / "tests" / "attacks" / "programs.txt").read_text()
UNAVAILABLE = python.available()
REFUSES = UNAVAILABLE is not None and "20 + 22" not in UNAVAILABLE  # a wrong sum is a fault
pytestmark = pytest.mark.skipif(REFUSES, reason=str(UNAVAILABLE))
run = functools.partial(python.run, timeout=300)  # the machine may be busy
needs_root = pytest.mark.skipif(OURSELVES != 0, reason="only root can become another user")


def identity(user: int) -> dict:
    """Options of a process that is started as this user; root has groups for the jail to drop."""
    if user == 0:
        return {"extra_groups": [4, 27]}
    return {"user": user, "group": user, "extra_groups": []} if user != OURSELVES else {}


def start_harness(mode: str, *programs: str, without="", user=OURSELVES, executable=sys.executable):
    """Starts it in a folder with its own copy of the tool, whose jail may lack the call `without`.

    Its parent then looks at a program only after ten seconds, or the two would race.
    """
    folder = Path(tempfile.mkdtemp(prefix="attacks-"))
    folder.chmod(0o755)
    shutil.copytree(ROOT / "tests" / "attacks", folder, dirs_exist_ok=True)
    shutil.copytree(ROOT / "tools", folder / "tools")
    shutil.copy(ROOT / "config.py", folder)
    if without:
        jail = folder / "tools" / "jail.py"
        line = f"^    {re.escape(without)}.*$"
        lacking, lines = re.subn(line, "    pass", jail.read_text(), flags=re.MULTILINE)
        assert lines == 1
        jail.write_text(lacking)
        tool = folder / "tools" / "python.py"
        patient = tool.read_text().replace("LOOK_EVERY = 0.05", "LOOK_EVERY = 10")
        assert "LOOK_EVERY = 10" in patient
        tool.write_text(patient)
    if user != OURSELVES:
        subprocess.run(["chown", "-R", f"{user}:{user}", folder], check=True)
    environment = {name: os.environ.get(name, "/") for name in ("PATH", "HOME")}
    environment["SERPER_API_KEY"] = secrets.token_hex(8)
    with open(folder / "report", "wb") as report:
        process = subprocess.Popen(
            [executable, "-B", "harness.py", mode, *programs],
            cwd=folder,
            env=environment,
            stdout=report,
            stderr=subprocess.STDOUT,
            **identity(user),
        )
    return process, folder


def read_report(process, folder: Path) -> dict:
    process.wait()
    text = (folder / "report").read_text()
    shutil.rmtree(folder)
    assert process.returncode == 0, text
    return json.loads(text.strip().rpartition("\n")[2])


@pytest.fixture(scope="module")
def reports():
    """What all programs reached, by name of the run. All runs, and two halves of one, run at once.

    As root there are three identities; ATTACK_AS_EVERYONE=1 in the environment asks for all.
    """
    names = re.findall(r"\n### (\S+)", PROGRAMS)
    running = {"own user": start_harness("locked", *names[::2])}
    running |= {"half": start_harness("locked", *names[1::2]), "no lock": start_harness("unlocked")}
    if OURSELVES == 0 and "ATTACK_AS_EVERYONE" in os.environ:
        readable = python._is_public(os.path.dirname(os.__file__))
        executable = os.path.realpath(sys.executable) if readable else SYSTEM_PYTHON
        for name, user in {"ordinary user": NOBODY, "unused user": 0}.items():
            running[name] = start_harness("locked", user=user, executable=executable)
    found = {name: read_report(*harness) for name, harness in running.items()}
    found["own user"]["reached"] |= found.pop("half")["reached"]
    return found


def test_no_program_reaches_a_witness(reports):
    for who in reports.keys() - {"no lock"}:
        reached = reports[who]["reached"]
        assert len(reached) == PROGRAMS.count("\n### ") >= 60
        assert {name: hits for name, hits in reached.items() if hits} == {}, who


@needs_root
def test_root_becomes_a_user_who_owns_nothing(reports):
    """If not everybody can read Python, only the real user changes, whose tasks are counted."""
    for who in reports.keys() & {"own user", "unused user"}:
        real, *others = json.loads(reports[who]["users"])
        assert real > 0x70000000
        counted = who == "own user" and others[:2] == [0, 0]
        assert counted or others == [real] * 5, "and no groups"


def test_the_witnesses_see_the_same_programs_when_nothing_holds_them(reports):
    """Otherwise the test above could pass because an attack is misspelt."""
    reached = reports["no lock"]["reached"]
    assert len(reached) == len(re.findall(r"\n### .* unlocked", PROGRAMS)) >= 60
    missed = {name for name, hits in reached.items() if not hits}
    assert {name for name in missed if f"### {name} unlocked?" not in PROGRAMS} == set()


@pytest.mark.parametrize(
    "layer, program",
    [
        ("limit_resources(", "memory_bomb"),
        ("limit_threads(", "thread_storm"),
        pytest.param("drop_privileges(", "thread_storm", marks=needs_root),
        ("seccomp(", "clone_raw"),
        ("check(libc.syscall(LANDLOCK_RESTRICT_SELF", "read_secret"),
    ],
)
def test_each_layer_holds_something_that_the_others_do_not(layer, program):
    report = read_report(*start_harness("locked", program, without=layer))
    assert report["reached"][program], "the other layers hold it, too"


JAIL = python.JAIL.read_text()
NO_LIBRARY = JAIL.replace('CDLL("libseccomp.so.2")', 'CDLL("none.so")')
# A number of no call, which answers as on a kernel without Landlock.
NO_LANDLOCK = JAIL.replace("CREATE_RULESET = 444", "CREATE_RULESET = 9444")


@pytest.mark.parametrize(
    "child, reason",
    [
        (NO_LIBRARY, "libseccomp2"),
        (NO_LANDLOCK, "no Landlock"),
        ("import sys; exec(sys.stdin.read())", "refuses"),
        ("print('unlocked')\nprint('locked')", "refuses"),
    ],
)
def test_a_child_that_is_not_locked_is_not_believed(tmp_path, monkeypatch, child, reason):
    monkeypatch.setattr(python, "JAIL", tmp_path / "jail.py")
    python.JAIL.write_text(child)
    with pytest.raises(ToolError, match=reason):
        run("print(6 * 7)")
    assert reason in python.available() and "\n" not in python.available()


def children(parent: int, named: str = "") -> set[int]:
    """The children of a process whose command line holds this text."""
    pids = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and named in Path(f"/proc/{pid}/cmdline").read_text():
                pids.add(int(pid))
    return pids


def possessions() -> tuple:
    """What a call may leave behind: children, zombies included, descriptors, slots taken."""
    gc.collect()  # what other tests left open is closed at a time of its own otherwise
    free_slots = python._slots._value
    return children(os.getpid()), sorted(os.listdir("/proc/self/fd")), free_slots


def test_a_caller_that_is_interrupted_ends_its_program(monkeypatch):
    before = possessions()
    interrupt = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    real = python._wait

    def wait(*arguments):
        interrupt.start()
        return real(*arguments)

    monkeypatch.setattr(python, "_wait", wait)
    with pytest.raises(KeyboardInterrupt):
        run("while True: pass")
    assert possessions() == before


@pytest.mark.parametrize("after", [0.0, 0.5])
def test_the_program_ends_with_its_parent(after):
    """Seconds `after` the child was seen: it may be before or past its parent-death signal."""
    program = "from tools import python; python.run('import time; time.sleep(900)', timeout=900)"
    command = [sys.executable, "-c", program]
    parent = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    running = set()
    while not running:
        running = children(parent.pid, "jail.py")
        assert parent.poll() is None
    time.sleep(after)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in running):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# A program -> its whole output, or a part of it behind an ellipsis.
SHOWN = {
    "print(1)\n2 + 3": "1\n5",
    "import sys\nprint(1, file=sys.stderr)\nprint('to stdout')": "1\nto stdout",
    "def f():\n    return 1 / 0\n\nf()": (
        '…Traceback (most recent call last):\n  File "<code>", line 4, in <module>\n    f()\n'
    ),
    "x = (": "…SyntaxError: '(' was never closed",
    "```python\nx = 6\nprint('```', x * 7)\n```": "``` 42",
    "\n```\n  if True:\n    print(6 * 7)\n```\n": "42",
    "    x = 6\n    x * 7": "42",
    "s = '''\n```\nx\n```\n'''\nlen(s)": "11",
    "```python\nx = (\n```": "…SyntaxError: '(' was never closed",
    "import math\nsum(map(int, str(math.factorial(2000))))": "23382",
    "import asyncio\nasync def f():\n    pass\nasyncio.run(f())": f"…{jail.NOT_PERMITTED}",
    "exit()": "",
    "import sys\nsys.exit('bye')": "bye",
    "input()": "…EOFError",
    "print('é', '√', '\\U0001f600')": "é √ \U0001f600",
    "import os\nos.write(1, b'\\xff\\xfe') and None": "\ufffd\ufffd",
    "import os, sys\nos.getcwd(), sys.argv, __name__": "('/', [''], '__main__')",
    "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nA(1)": "A(x=1)",
    "import json, re, math, decimal, fractions, statistics, random, sqlite3, csv\n7": "7",
    "import numpy as np\nnp.linalg.det(np.eye(3) * 2).round(3).item()": "8.0",
    "import io, matplotlib.pyplot as plt\nplt.plot([1])\nplt.savefig(f := io.BytesIO())\n"
    "f.getvalue()[1:4]": "…b'PNG'",
    "open('/tmp/mars-leftover', 'w')": "…PermissionError",
    "import ctypes\nctypes.string_at(1)": "killed: SIGSEGV",
    "'half \ud800'": "'half ?'",
}


def test_what_many_programs_at_once_show_and_that_they_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    programs = list(SHOWN)
    before = possessions()
    with ThreadPoolExecutor(32) as pool:
        outputs = list(pool.map(run, programs))
    assert possessions() == before
    assert os.listdir(tmp_path) == []
    assert not os.path.exists("/tmp/mars-leftover")
    for code, output in zip(programs, outputs, strict=True):
        expected = SHOWN[code]
        assert expected == output or (expected[:1] == "…" and expected[1:] in output), code
        assert "jail" not in output
        assert not expected.endswith(jail.NOT_PERMITTED) or output.endswith(jail.NOT_PERMITTED)


def test_a_limit_is_reported_behind_what_was_printed_before_it():
    for timeout in (1.5, 20, 200):  # a busy machine may not even have begun after 1.5 s
        with contextlib.suppress(ToolError):
            output = python.run("print('before')\nwhile True: pass", timeout=timeout)
            assert output.removeprefix("before\n") == f"timed out after {timeout:g} s"
            if output.startswith("before"):
                break
    assert output.startswith("before")
    assert run("print('before')\nx = 'x' * 10**11") == "before\nkilled: memory"
    for memory, expected in ((256 << 20, "killed: memory"), (512 << 20, str(300 << 20))):
        assert run(f"len(bytearray({300 << 20}))", memory=memory) == expected
    lines = run("for i in range(10**6): print(i)").split("\n")
    assert (lines[0], lines[-1]) == ("0", f"output cut after {python.OUTPUT} bytes")
    # The heaps of 14 threads once filled the memory. The jail's trial thread may still be ending.
    threads = f"""
import threading
everybody = threading.Barrier({python.THREADS - 4})
for _ in range(everybody.parties - 1):
    threading.Thread(target=everybody.wait).start()
everybody.wait()
len([bytearray(1 << 20) for _ in range(64)])"""
    assert run(threads) == "64"


def test_as_a_tool_it_returns_one_document_and_as_a_command_its_text():
    [document] = python.tool("40 + 2")
    assert (document.text, document.url) == ("42", "") and python.tool("40 + 2") == [document]
    assert python.tool("40 + 3")[0].id != document.id
    assert python.tool("x = 1")[0].text == python.NO_OUTPUT
    command = [sys.executable, "-m", "tools.python"]
    output = subprocess.check_output(command, cwd=ROOT, input=b"print('hello')\n6 * 7")
    assert output == b"hello\n42\n"
