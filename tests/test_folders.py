"""What lies on the disk is whole: cut short, or made by several at once."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from atomic import made_once, reason
from config import UserError
from plumbing import folders
from plumbing.start import new_folder


def fill(folder: Path) -> None:
    (folder / "file").write_text("whole")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_fails_is_not_there_and_is_made_anew_once(tmp_path):
    def fail(folder):
        fill(folder)
        raise OSError(28, "No space left")

    folder = tmp_path / "deep" / "thing"
    with pytest.raises(UserError, match="No space left"):
        made_once(folder, fail)
    assert names(folder.parent) == {"thing.lock"}
    assert made_once(folder, fill) == folder
    assert made_once(folder, lambda unfinished: pytest.fail("made again")) == folder
    assert names(folder) == {"file"} and names(folder.parent) == {"thing", "thing.lock"}


def test_a_reason_is_one_line_and_whole():
    assert reason(ValueError("it is invalid:\n- one\n- two")) == "it is invalid: - one - two"
    assert reason(OSError(28, "No space left")) == "No space left"
    assert reason(ValueError()) == "ValueError()"
    assert reason(KeyError("data")) == "KeyError('data')"


def test_of_many_one_makes_it_and_the_others_wait(tmp_path):
    """And nobody sees half of it meanwhile."""
    folder = tmp_path / "thing"
    made = []

    def make(unfinished):
        made.append(unfinished)
        (unfinished / "first").write_text("half")
        time.sleep(0.2)
        (unfinished / "last").write_text("whole")

    with ThreadPoolExecutor(8) as pool:
        all_ = [pool.submit(made_once, folder, make) for _ in range(8)]
        while not all(one.done() for one in all_):
            assert not folder.exists() or names(folder) == {"first", "last"}
            time.sleep(0.01)
    assert [one.result() for one in all_] == [folder] * 8 and len(made) == 1


def test_of_many_that_claim_a_folder_one_gets_it(tmp_path):
    """And nobody goes on with it meanwhile."""
    folder = tmp_path / "runs" / "x"
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda _: folders.make(folder) and folders.lock(folder), range(8)))
    (held,) = [lock for lock in got if lock]
    assert folders.lock(folder) is None
    held.close()
    assert folders.lock(folder)


def test_who_takes_a_run_removes_what_the_killed_left_of_files(tmp_path):
    (tmp_path / "rollouts").mkdir()
    for name in ("step_1.jsonl.7.part", "film.part"):
        (tmp_path / "rollouts" / name).write_text("half")
    folders.lock(tmp_path).close()
    assert names(tmp_path / "rollouts") == {"film.part"}, "which somebody else put there"


def test_a_start_that_was_killed_does_not_block_its_name(tmp_path):
    for name in (".lock", "table.json", "method.json", "method.json.7.part", "thesis.tex"):
        folders.refuse_run(tmp_path, "x")
        new_folder(SimpleNamespace(runs=tmp_path, name="x"), "").close()
        assert not (tmp_path / "x/table.json").exists(), "it would mark an evaluation"
        (tmp_path / "x" / name).touch()
    assert not folders.make(tmp_path / "x")
    with pytest.raises(UserError, match="choose another --name"):
        folders.refuse_run(tmp_path, "x")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, call):
    path = folders.write_json(tmp_path / "a.json", {"a": 1})
    monkeypatch.setattr(folders.os, call, Mock(side_effect=OSError(28, "No space left")))
    with pytest.raises(UserError, match="No space left"):
        folders.write_json(path, {"a": 2})
    assert folders.read_json(path) == {"a": 1} and names(tmp_path) == {"a.json"}


def test_a_line_cut_by_a_kill_is_skipped_and_told(tmp_path, capsys):
    path = tmp_path / "lines.jsonl"
    folders.append_lines(path, [{"a": 1}, {"b": 2}])
    path.write_text(path.read_text() + 'null\n{"cut')
    assert folders.read_lines(path) == [{"a": 1}, {"b": 2}]
    assert capsys.readouterr().err.count("is not a whole record, skipped") == 2
