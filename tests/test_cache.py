"""What the cache holds is whole: cut short, killed, or made by two processes at once."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from plumbing.cache import made_once
from safetensors import SafetensorError

from config import UserError

REPO = Path(__file__).parent.parent
MAKER = """
    import sys, time
    from pathlib import Path
    from plumbing.cache import made_once

    def make(folder):
        (folder / "first").write_text("half")
        print("half", flush=True)
        time.sleep(float(sys.argv[2]))
        (folder / "last").write_text("whole")
        print("made", flush=True)

    made_once(Path(sys.argv[1]), make)
    print("there", sorted(path.name for path in Path(sys.argv[1]).iterdir()), flush=True)
"""


def maker(folder: Path, seconds: float) -> subprocess.Popen:
    """A process that makes `folder` in two halves, with a pause between them."""
    code = textwrap.dedent(MAKER)
    command = [sys.executable, "-c", code, str(folder), str(seconds)]
    return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)


def fill(folder: Path) -> None:
    (folder / "file").write_text("whole")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_it_is_made_once(tmp_path):
    folder = tmp_path / "deep" / "thing"
    assert made_once(folder, fill) == folder
    assert made_once(folder, lambda unfinished: pytest.fail("made again")) == folder
    assert names(folder) == {"file"}


def test_a_folder_of_somebody_elses_is_not_taken_for_a_leftover(tmp_path):
    theirs = tmp_path / "thing.unfinished"
    theirs.mkdir()
    fill(theirs)
    with pytest.raises(UserError, match="thing.unfinished is in the way: .* another --out"):
        made_once(tmp_path / "thing", fill, option="--out")
    assert names(theirs) == {"file"} and names(tmp_path) == {"thing.unfinished"}


def test_what_fails_leaves_nothing(tmp_path):
    def fail(folder):
        fill(folder)
        raise UserError("no more words")

    with pytest.raises(UserError, match="no more words"):
        made_once(tmp_path / "thing", fail)
    assert names(tmp_path) == {"thing.lock"}
    made_once(tmp_path / "thing", fill)
    assert names(tmp_path / "thing") == {"file"}


def test_what_was_killed_is_not_there_and_is_made_anew(tmp_path):
    folder = tmp_path / "thing"
    killed = maker(folder, 60)
    assert killed.stdout.readline() == "half\n"
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not folder.exists()
    made_once(folder, fill)
    assert names(folder) == {"file"}
    assert names(tmp_path) == {"thing", "thing.lock"}


def test_of_two_processes_one_makes_it_and_the_other_waits(tmp_path):
    folder = tmp_path / "thing"
    first = maker(folder, 1)
    assert first.stdout.readline() == "half\n"
    second = maker(folder, 0)
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert sum("made" in output for output in outputs) == 1
    assert all("there ['first', 'last']" in output for output in outputs)


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written.*--cache"):
        made_once(tmp_path / "file" / "thing", fill)
    with pytest.raises(UserError, match="cannot be written.*--out$"):
        made_once(tmp_path / "file" / "thing", fill, option="--out")


def test_nobody_sees_half_a_folder(tmp_path):
    folder = tmp_path / "thing"
    process = maker(folder, 0.3)
    seen = set()
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if folder.exists():
            seen.add(frozenset(names(folder)))
        time.sleep(0.01)
    assert process.wait() == 0
    assert seen <= {frozenset({"first", "last"})}


def test_weights_that_find_no_room_are_one_sentence(tmp_path):
    """safetensors raises an error of its own kind there, which is no OSError."""

    def make(folder):
        raise SafetensorError("No space left on device")

    with pytest.raises(UserError, match="No space left on device.*make room"):
        made_once(tmp_path / "thing", make)
    assert not (tmp_path / "thing").exists()
