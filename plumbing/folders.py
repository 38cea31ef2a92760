"""Reads and writes the files of a run, most of them atomically, and locks its folder.

Tests: pytest tests/test_folders.py
"""

import fcntl
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import IO

from atomic import on_disk, reason, sync
from config import UserError

# ------------------------------------------------------------------------------------------- files

PART = re.compile(r".+\.\d+\.part")  # the name of a file while write_whole writes it


def read_lines(path: Path) -> list[dict]:
    """Records of a JSONL file. A line that a kill has cut is skipped, and stderr says so."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({reason(error)}): give the folder of a run that you may read"
        ) from error
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line:
            continue
        try:
            records.append({**json.loads(line)})
        except (ValueError, TypeError, RecursionError):  # TypeError: it is no object
            print(f"{path}: line {number} is not a whole record, skipped", file=sys.stderr)
    return records


def read_json(path: Path) -> dict:
    """The object in a JSON file, such as a run's config.json."""
    try:
        return {**json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError, RecursionError) as error:  # TypeError: no object
        raise UserError(f"cannot read {path} ({reason(error)}): it is missing or damaged") from None


def write_whole(path: Path, content: bytes) -> Path:
    """Writes and syncs a temporary file, then renames it: nobody ever opens half a file."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with on_disk(f"write {path}"):
        try:
            part.write_bytes(content)
            sync(part)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return path


def write_json(path: Path, value) -> Path:
    """A JSON file, written whole."""
    text = json.dumps(value, ensure_ascii=False, indent=1) + "\n"
    return write_whole(path, text.encode("utf-8", "replace"))


def as_lines(records: list[dict]) -> bytes:
    """The content of a JSONL file with these records."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    return "".join(lines).encode("utf-8", "replace")


def append_lines(path: Path, records: list[dict]) -> None:
    """Appends records to a JSONL file. Makes the file and its folder if they are missing."""
    with on_disk(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write(as_lines(records))
        sync(path)  # before a state that refers to these lines is on the disk


def rollout_files(run: Path) -> dict[int, Path]:
    """step -> the file of its trajectories, in the order of the steps."""
    paths = (run / "rollouts").glob("step_*.jsonl")
    files = {int(path.stem[5:]): path for path in paths if path.stem[5:].isdecimal()}
    return dict(sorted(files.items()))


# ------------------------------------------------------------------------------ a run's own folder


def resumable(folder: Path, evaluation: bool = False) -> bool:
    """Whether a run has begun there, or with `evaluation` an evaluation, which has a table."""
    table = os.path.exists(folder / "table.json")
    return os.path.exists(folder / "config.json") and table == evaluation


def vacant(folder: Path) -> bool:
    """Whether a run can begin there: it holds at most the files of a start that was killed."""
    if not os.path.lexists(folder):
        return True
    if not folder.is_dir():
        return False
    with on_disk(f"read {folder}"):
        names = {name for name in os.listdir(folder) if not PART.fullmatch(name)}
    return names <= {".lock", "method.json", "table.json"}


def refuse_run(runs: Path, name: str, evaluation: bool = False) -> None:
    """UserError if nothing can begin at runs/name. If `name` is empty, a free one will be taken."""
    folder = runs / name
    if name and not vacant(folder):
        more = "add --resume to go on with it, or " if resumable(folder, evaluation) else ""
        raise UserError(f"{folder} exists: {more}choose another --name")
    above = (runs.absolute(), *runs.absolute().parents)
    parent = next(path for path in above if os.path.lexists(path))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"cannot write to {parent}; choose another folder with --runs")


def make(folder: Path) -> bool:
    """Makes a folder and its parents; returns False if a run or something else has its name."""
    with on_disk(f"make {folder}"):
        if not vacant(folder):
            return False
        folder.mkdir(parents=True, exist_ok=True)
    return True


def lock(folder: Path) -> IO | None:
    """The lock of a run's folder, held until the process ends; None if another process has it."""
    with on_disk(f"write to {folder}"):
        file = open(folder / ".lock", "a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        # Killed processes may have left parts of files and of folders (atomic.write_folder).
        for part in folder.rglob("*.part"):
            if PART.fullmatch(part.name):
                part.unlink(missing_ok=True)
        for part in [*folder.rglob(".*.writing"), *folder.rglob(".*.former")]:
            shutil.rmtree(part, ignore_errors=True)
    return file
