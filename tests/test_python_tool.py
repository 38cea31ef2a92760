"""The Python tool: it lets nothing through, what it shows is useful, and where it cannot lock it does not run."""
import http.server
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
from hypothesis import given, settings
from hypothesis import strategies as st

from config import UserError
from tools import ToolError, python

ROOT = Path(__file__).parent.parent
NOBODY = 65534
PROGRAMS = (ROOT / "tests" / "attacks" / "programs.txt").read_text()
os.environ.pop("MARS_SANDBOX_URL", None)
UNAVAILABLE = python.available()
needs_jail = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))


# The attack suite -------------------------------------------------------------------------------------------

def python_for(user: int, folder: str) -> str | None:
    """A Python 3.11 or later that this user can start and that can read the folder."""
    check = "import sys; open(sys.argv[1] + '/harness.py'); sys.exit(sys.version_info < (3, 11))"
    for candidate in filter(None, (sys.executable, "/usr/bin/python3", shutil.which("python3"))):
        try:
            if subprocess.run([candidate, "-c", check, folder], user=user, group=user, extra_groups=[], cwd="/",
                              capture_output=True).returncode == 0:
                return candidate
        except OSError:
            continue
    return None


def start_harness(mode: str, user: int, programs: tuple[str, ...] = (), without: str = ""):
    """The harness at work on its own copy of the tool, as the given user; None where that user has no Python.

    `without`: a line of the jail that the copy leaves out."""
    folder = tempfile.mkdtemp(prefix="attacks-")
    shutil.copytree(ROOT / "tests" / "attacks", folder, dirs_exist_ok=True)
    os.mkdir(folder + "/tools")
    for name in ("__init__.py", "python.py", "jail.py"):
        shutil.copy(ROOT / "tools" / name, folder + "/tools")
    Path(folder, "config.py").write_text("class UserError(Exception):\n    pass\n")
    jail = Path(folder, "tools", "jail.py")
    assert f"    {without}\n" in jail.read_text() or not without
    jail.write_text(jail.read_text().replace(f"    {without}\n", "    pass\n") if without else jail.read_text())
    identity = {}
    if user != os.getuid():
        subprocess.run(["chown", "-R", f"{user}:{user}", folder], check=True)
        identity = {"user": user, "group": user, "extra_groups": []}
    executable = python_for(user, folder) if identity else sys.executable
    if executable is None:
        shutil.rmtree(folder)
        return None
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"),
                   "SERPER_API_KEY": secrets.token_hex(8)}
    with open(folder + "/report", "wb") as report:
        return subprocess.Popen([executable, "-B", "harness.py", mode, *programs], cwd=folder, env=environment,
                                stdout=report, stderr=subprocess.STDOUT, **identity), Path(folder)


def read_report(process, folder: Path) -> dict:
    process.wait()
    text = (folder / "report").read_text()
    shutil.rmtree(folder)
    assert process.returncode == 0, text
    return json.loads(text.strip().rpartition("\n")[2])


@pytest.fixture(scope="module")
def reports():
    """name -> report of a harness run, a reason to skip when there is none; all three run at the same time."""
    running = {"own user": start_harness("locked", os.getuid()), "no lock": start_harness("unlocked", os.getuid())}
    if os.getuid() == 0:
        running["ordinary user"] = start_harness("locked", NOBODY)
    results = {"ordinary user": "only root can become another user; the suite ran as this ordinary user"}
    for name, harness in running.items():
        results[name] = read_report(*harness) if harness else "an ordinary user can start no Python 3.11 here"
    return results


@needs_jail
@pytest.mark.parametrize("who", ["own user", "ordinary user"])
def test_no_program_reaches_a_witness(reports, who):
    report = reports[who]
    if isinstance(report, str):
        pytest.skip(report)
    assert report["unavailable"] is None
    assert len(report["reached"]) == PROGRAMS.count("\n### ") >= 60
    assert {name: hits for name, hits in report["reached"].items() if hits} == {}


@needs_jail
def test_the_witnesses_see_the_same_programs_when_nothing_holds_them(reports):
    """Otherwise the test above could pass because an attack is misspelt."""
    reached = reports["no lock"]["reached"]
    assert len(reached) == len(re.findall(r"\n### .* unlocked", PROGRAMS)) >= 60
    assert {name for name, hits in reached.items() if not hits and f"### {name} unlocked?" not in PROGRAMS} == set()


@needs_jail
@pytest.mark.parametrize("layer, program", [
    ("limit_resources(cpu_seconds, memory, output)", "memory_bomb"), ("seccomp()", "clone_raw"),
    ('check(libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0), "Landlock could not be switched on")', "read_secret")])
def test_each_layer_holds_something_that_the_others_do_not(layer, program):
    report = read_report(*start_harness("locked", os.getuid(), (program,), without=layer))
    assert report["unavailable"] is None and report["reached"][program] != []


# Fail closed ------------------------------------------------------------------------------------------------

WITHOUT_LANDLOCK = """
import ctypes, sys
from tools import ToolError, python
library = ctypes.CDLL("libseccomp.so.2")
library.seccomp_init.restype = ctypes.c_void_p
context = ctypes.c_void_p(library.seccomp_init(0x7FFF0000))                             # allow all
for call in (444, 445, 446):
    assert library.seccomp_rule_add_array(context, 0x00050026, call, 0, None) == 0      # but Landlock: no such call
assert library.seccomp_load(context) == 0
try:
    print("RAN", python.run("print(6 * 7)"))
except ToolError as error:
    print("REFUSED", error)
print("REASON", python.available())
sys.argv = ["python"]
sys.exit(python.main())
"""


@needs_jail
def test_without_landlock_nothing_runs():
    done = subprocess.run([sys.executable, "-c", WITHOUT_LANDLOCK], cwd=ROOT, input="print(6 * 7)", capture_output=True,
                          text=True)
    assert "RAN" not in done.stdout and "42" not in done.stdout
    assert done.stdout.count("Landlock") >= 2 and "REFUSED" in done.stdout
    assert "Landlock" in done.stderr and done.stderr.count("\n") == 1
    assert done.returncode == 2


@needs_jail
def test_without_libseccomp_nothing_runs(tmp_path, monkeypatch):
    text = python.JAIL.read_text()
    assert text.count('CDLL("libseccomp.so.2")') == 1
    monkeypatch.setattr(python, "JAIL", tmp_path / "jail.py")
    python.JAIL.write_text(text.replace('CDLL("libseccomp.so.2")', 'CDLL("libseccomp.so.none")'))
    with pytest.raises(ToolError, match="libseccomp2"):
        python.run("print(6 * 7)")
    assert "libseccomp2" in python.available() and "\n" not in python.available()


@pytest.mark.skipif(sys.platform != "linux", reason="the jail is Linux only")
@pytest.mark.parametrize("child", ["import sys; exec(sys.stdin.read())", "print('unlocked')\nprint('locked')",
                                   "", "1 / 0", "print('lock', end='')"])
def test_a_child_that_is_not_locked_is_not_believed(tmp_path, monkeypatch, child):
    monkeypatch.setattr(python, "JAIL", tmp_path / "jail.py")
    python.JAIL.write_text(child)
    with pytest.raises(ToolError, match="refuses"):
        python.run("print(6 * 7)")
    assert python.available() is not None


def test_elsewhere_than_on_linux_it_says_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux" in python.available() and "MARS_SANDBOX_URL" in python.available()


# Nothing is left behind -------------------------------------------------------------------------------------

def children(parent: int) -> set[int]:
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.add(int(pid))
        except OSError:
            continue
    return found


MIXED = {
    "print(sum(range(10)))": "45",
    "1 / 0": "ZeroDivisionError",
    "import os\nos.fork()": "PermissionError",
    "print('x' * 10**6)": "output cut",
    "bytearray(1 << 40)": "killed: memory",
    "import ctypes\nctypes.string_at(1)": "killed: SIGSEGV",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(0.05,)).start()\nprint('on')": "on",
    "open('/tmp/mars-leftover', 'w')": "PermissionError",
    "import sys\nsys.exit('bye')": "bye",
    "print('before', flush=True)\nimport time\ntime.sleep(60)": "before\ntimed out after 2 s",
}


@needs_jail
def test_many_runs_from_many_threads_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    programs = list(MIXED) * 16
    before = children(os.getpid()), sorted(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(16) as pool:
        outputs = list(pool.map(lambda code: python.run(code, timeout=2 if "sleep(60)" in code else 60), programs))
    assert (children(os.getpid()), sorted(os.listdir("/proc/self/fd"))) == before
    assert os.listdir(tmp_path) == [] and not os.path.exists("/tmp/mars-leftover")
    assert len(outputs) == 160
    assert [code for code, output in zip(programs, outputs) if MIXED[code] not in output] == []


@needs_jail
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_the_program_ends_with_its_parent(end):
    program = "from tools import python; python.run('import time; time.sleep(60)', timeout=60)"
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline, running = time.monotonic() + 20, set()
    while not running and time.monotonic() < deadline:
        running = {pid for pid in children(parent.pid) if "jail.py" in Path(f"/proc/{pid}/cmdline").read_text()}
        time.sleep(0.05)
    time.sleep(0.2)                                             # past its parent-death line
    assert running
    parent.send_signal(end)
    parent.wait(10)
    while any(os.path.exists(f"/proc/{pid}") for pid in running) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in running)


@needs_jail
def test_a_program_outlives_other_threads_than_its_own():
    """The parent-death signal is sent when the *thread* that started the child ends: it must hit no sibling's child."""
    with ThreadPoolExecutor(1) as slow:
        result = slow.submit(python.run, "import time\ntime.sleep(0.7)\nprint('done')")
        for _ in range(3):
            thread = threading.Thread(target=python.run, args=("1",))
            thread.start()
            thread.join()
        assert result.result() == "done"


# What a model sees ------------------------------------------------------------------------------------------

SHOWN = [
    ("print(1)\n2 + 3", "1\n5"),
    ("1980 - 1968", "12"),
    ("x = 4\nx", "4"),
    ("None", ""),
    ("x = 1", ""),
    ("", ""),
    ("'text'", "'text'"),
    ("import sys\nprint('to stderr', file=sys.stderr)\nprint('to stdout')", "to stderr\nto stdout"),
    ("def f():\n    return 1 / 0\n\nf()",
     'Traceback (most recent call last):\n  File "<code>", line 4, in <module>\n    f()\n'),
    ("x = (", "SyntaxError: '(' was never closed"),
    ("\0", "Error: source code string cannot contain null bytes"),
    ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("exit()", ""),
    ("import sys\nsys.exit('bye')", "bye"),
    ("input()", "EOFError"),
    ("print('é', '√', '\\U0001f600')", "é √ \U0001f600"),
    ("import os\nos.write(1, b'\\xff\\xfe') and None", "\ufffd\ufffd"),
    ("import os, sys\nos.getcwd(), sys.argv, __name__", "('/', [''], '__main__')"),
    ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nA(1)", "A(x=1)"),
    ("import json, re, math, decimal, fractions, statistics, itertools, collections, random, sqlite3, csv\n7", "7"),
    ("from concurrent.futures import ThreadPoolExecutor\nlist(ThreadPoolExecutor(2).map(abs, [-1, -2]))", "[1, 2]"),
    ("from datetime import datetime as d\n(d(2020, 3, 1) - d(2020, 2, 1)).days", "29"),
]


@needs_jail
@pytest.mark.parametrize("code, expected", SHOWN)
def test_shown(code, expected):
    output = python.run(code)
    failed = any(word in expected for word in ("Error", "Traceback", "Interrupt"))
    assert expected in output if failed else expected == output
    assert "jail" not in output


@needs_jail
@pytest.mark.parametrize("package, code, expected", [
    ("numpy", "import numpy as np\nnp.linalg.det(np.eye(3) * 2).round(3).item()", "8.0"),
    ("sympy", "import sympy\nx = sympy.symbols('x')\nsympy.integrate(x**2, x)", "x**3/3"),
    ("scipy", "import scipy.optimize\nround(scipy.optimize.brentq(lambda x: x**2 - 2, 0, 2), 6)", "1.414214"),
    ("pandas", "import pandas\nint(pandas.Series([1, 2, 3]).sum())", "6")])
def test_packages_of_the_trainer_can_be_used(package, code, expected):
    pytest.importorskip(package)
    assert python.run(code, timeout=30) == expected


@needs_jail
def test_limits_are_said_and_what_was_printed_before_is_kept():
    assert python.run("print('before')\nwhile True: pass", timeout=1.5) == "before\ntimed out after 1.5 s"
    assert python.run("print('before')\nx = 'x' * 10**11") == "before\nkilled: memory"
    assert python.run("x = bytearray(300 << 20)", memory=256 << 20) == "killed: memory"
    assert python.run("x = bytearray(300 << 20)\nlen(x)", memory=512 << 20) == str(300 << 20)
    lines = python.run("for i in range(10**6): print(i)").split("\n")
    assert lines[0] == "0" and lines[-1] == f"output cut after {python.OUTPUT} bytes"
    threads = "import threading, time\nfor _ in range(100): threading.Thread(target=time.sleep, args=(5,)).start()"
    assert "thread" in python.run(f"import threading\nthreading.stack_size(65536)\n{threads}", memory=64 << 30)


@needs_jail
def test_the_same_program_prints_the_same():
    code = "{str(i) for i in range(50)}"
    assert python.run(code) == python.run(code)


@needs_jail
@settings(max_examples=20, deadline=None)
@given(st.text(st.characters(), max_size=20))
def test_any_text_is_shown_as_it_is(text):
    code = ascii(text)
    assert python.run(f"print(ascii({code}))") == code


@needs_jail
@settings(max_examples=30, deadline=None)
@given(st.text(max_size=40) | st.sampled_from(["\ud800", "\0" * 9, "(" * 5000, "-" * 10**5 + "1", "'''"]))
def test_no_program_is_a_failure_of_the_tool(code):
    assert isinstance(python.run(code), str)


@needs_jail
def test_as_a_tool_it_returns_one_document():
    [document] = python.tool("40 + 2")
    assert (document.text, document.url) == ("42", "")
    assert python.tool("40 + 2") == [document] and python.tool("40 + 3")[0].id != document.id
    assert python.tool("x = 1")[0].text == python.NO_OUTPUT


@needs_jail
def test_command_line():
    command = [sys.executable, "-m", "tools.python"]
    done = subprocess.run(command, cwd=ROOT, input="print('hello')\n6 * 7", capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n42\n", "")
    done = subprocess.run(command + ["file.py"], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


# SandboxFusion ----------------------------------------------------------------------------------------------

class Sandbox(http.server.BaseHTTPRequestHandler):
    """A loopback server with SandboxFusion's wire format; a path before /run_code makes it misbehave."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["language"] == "python"
        behaviour, _, end = self.path.strip("/").rpartition("/")
        assert end == "run_code"
        body = json.dumps(self.answer(behaviour, request)).encode() if behaviour != "garbage" else b"<html>"
        self.send_response(500 if behaviour == "broken" else 200)
        self.send_header("Content-Length", str(len(body) + 10 * (behaviour == "cut")))
        self.end_headers()
        self.wfile.write(body)

    def answer(self, behaviour, request):
        if behaviour == "sandbox-error":
            return {"status": "SandboxError", "message": "no sandbox left", "run_result": None}
        if behaviour == "fields-missing":
            return {"status": "Success"}
        run = {"status": "TimeLimitExceeded", "stdout": "before\n", "stderr": "", "return_code": None}
        if behaviour != "late":
            done = subprocess.run([sys.executable, "-c", request["code"]], capture_output=True, text=True,
                                  timeout=request["run_timeout"])
            run = {"status": "Finished", "stdout": done.stdout, "stderr": done.stderr, "return_code": done.returncode}
        return {"status": "Success" if run["return_code"] == 0 else "Failed", "message": "", "run_result": run}

    def log_message(self, *arguments):
        pass


@pytest.fixture
def sandbox(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sandbox)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def use(behaviour=""):
        monkeypatch.setenv("MARS_SANDBOX_URL", f"http://127.0.0.1:{server.server_port}/{behaviour}")
    yield use
    server.shutdown()
    server.server_close()


def test_sandbox_server_shows_what_the_jail_shows(sandbox, monkeypatch):
    sandbox()
    assert python.available() is None
    for code, expected in SHOWN[:9]:
        output = python.run(code)
        same = expected in output if "Trace" in expected else sorted(expected) == sorted(output)    # streams come apart
        assert same, code
        assert "execute" not in output
    assert python.run("print('y' * 10**6)").endswith(f"output cut after {python.OUTPUT} bytes")
    assert python.run("import os; os.kill(os.getpid(), 11)") == "killed: SIGSEGV"
    sandbox("late")
    assert python.run("print('before')", timeout=3) == "before\ntimed out after 3 s"


@pytest.mark.parametrize("behaviour", ["sandbox-error", "broken", "garbage", "cut", "fields-missing"])
def test_a_failing_sandbox_server_is_a_tool_error(sandbox, behaviour):
    sandbox(behaviour)
    with pytest.raises(ToolError, match="sandbox server"):
        python.run("1")
    assert "\n" not in python.available()


def test_a_sandbox_server_that_is_not_there(monkeypatch):
    monkeypatch.setenv("MARS_SANDBOX_URL", "http://127.0.0.1:9")
    with pytest.raises(ToolError, match="127.0.0.1:9"):
        python.run("1")
    monkeypatch.setenv("MARS_SANDBOX_URL", "file:///etc/passwd")
    with pytest.raises(UserError, match="http"):
        python.run("1")
    assert "http" in python.available()
