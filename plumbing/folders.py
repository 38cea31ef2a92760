"""Files and folders that are there whole or not at all, and the claim of a run's folder.

    read_lines, read_json              what a run has written
    write_whole, write_json            a file: written beside its place, then renamed
    made_once                          a folder of the cache, likewise; others wait for it
    make, claim, lock, give_back       runs/NAME belongs to one process

Tests: pytest tests/test_folders.py
"""

import fcntl
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from config import UserError
from whole import write_folder


def reason(error: Exception) -> str:
    """Why the system refused, in a few words."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# ------------------------------------------------------------------------------------------- files


def read_lines(path: Path) -> list[dict]:
    """Records of a JSONL file.

    A line that is not whole (a killed run leaves one) is skipped, and stderr says so.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({reason(error)}): give the folder of a run that you may read"
        ) from error
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            print(f"{path}: line {number} is not a whole record, skipped", file=sys.stderr)
    return records


def read_json(path: Path) -> dict:
    """The object in a JSON file, such as a run's config.json."""
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path} ({reason(error)}): it is missing or damaged") from None
    if not isinstance(made, dict):
        raise UserError(f"cannot read {path}: it does not hold a JSON object")
    return made


def write_whole(path: Path, content: bytes) -> Path:
    """Writes beside the target, to the disk, then renames: nobody ever opens half a file."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        try:
            part.unlink(missing_ok=True)
        except OSError:
            pass  # a read-only folder refuses this as well
        raise UserError(
            f"cannot write {path} ({reason(error)}): make room, or name a folder that you may "
            "write to"
        ) from error
    return path


def write_json(path: Path, value) -> Path:
    """A JSON file, written whole."""
    text = json.dumps(value, ensure_ascii=False, indent=1) + "\n"
    return write_whole(path, text.encode("utf-8", "replace"))


def remove(path: Path) -> None:
    """Removes a file if it is there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot remove {path} ({reason(error)}): make its folder one that you may write to"
        ) from error


def append_lines(path: Path, records: list[dict]) -> None:
    """Appends records to a JSONL file, whose folder is made if need be.

    A number that is not finite is written as null, for JSON has no NaN.
    """
    lines = [json.dumps(without_nan(record), ensure_ascii=False) + "\n" for record in records]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8", errors="replace") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())  # a state that counts on these lines is on the disk as well
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({reason(error)}): make room or choose another --runs, then "
            "--resume"
        ) from error


def without_nan(value):
    """`value` with None for every float that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, list):
        return [without_nan(part) for part in value]
    return value


# ------------------------------------------------------------------------- folders of the cache


def made_once(folder: Path, make: Callable[[Path], None], option: str = "--cache") -> Path:
    """`folder` as the cache holds it, or else filled by `make`, which is given an empty folder.

    One process makes the folder, and others wait for it. It gets its name when all its files are on
    the disk; what a killed process left is removed by the next. UserError if it cannot be written;
    `option` is what the message tells the caller to change.
    """
    try:
        if folder.exists():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f"{folder.name}.lock"), "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not folder.exists():  # else somebody made it while we waited
                write_folder(folder, make)
    except (OSError, SafetensorError) as error:  # the latter from weights on a full disk
        raise UserError(
            f"{folder} cannot be written ({reason(error)}): make room, or name another folder "
            f"with {option}"
        ) from None
    return folder


# ------------------------------------------------------------------------------ a run's own folder


def resumable(folder: Path) -> bool:
    """Whether a run has begun there: its options are written. An evaluation has a table."""
    begun, evaluated = (os.path.lexists(folder / name) for name in ("config.json", "table.json"))
    return begun and not evaluated


def refuse_run(runs: Path, name: str) -> None:
    """UserError if no new run can be made below `runs`: of this name, or with none of any."""
    folder = runs / name
    if name and resumable(folder):
        raise UserError(f"{folder} exists: add --resume to go on with it, or choose another --name")
    if name and is_there(folder):
        raise UserError(f"{folder} exists, and it is no run to go on with: choose another --name")
    parent = next(path for path in (runs.absolute(), *runs.absolute().parents) if is_there(path))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"cannot write to {parent}; choose another folder with --runs")


def is_there(path: Path) -> bool:
    """Whether something has this name; UserError if nothing can, such as one that is too long."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UserError(f"{path} cannot be made ({reason(error)})") from None
    return True


def make(folder: Path) -> bool:
    """Makes a folder, and what it lies in; False if something has its name already."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.lexists(folder):
            return False
        raise UserError(
            f"cannot make {folder} ({reason(error)}); choose another folder with --runs"
        ) from None
    return True


def claim(folder: Path) -> IO | None:
    """Makes a folder, and so makes it ours: its lock, as of `lock`. None if it exists."""
    return lock(folder) if make(folder) else None


def give_back(folder: Path) -> None:
    """Removes a folder that was claimed and in which nothing was written."""
    (folder / ".lock").unlink()
    folder.rmdir()


def lock(folder: Path) -> IO | None:
    """The lock of a run's folder, held until the process ends; None if another process has it."""
    try:
        file = open(folder / ".lock", "a")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({reason(error)})") from None
    return file
