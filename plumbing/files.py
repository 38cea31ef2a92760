"""Files that are read record by record and written whole; a folder that a run claims."""

import contextlib
import fcntl
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from config import UserError


def read_lines(path: Path) -> list[dict]:
    """Records of a JSONL file.

    A line that is not whole (a killed run leaves one) is skipped, and stderr says so.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror}): give the folder of a run that you may read"
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
        raise UserError(
            f"cannot read {path} ({type(error).__name__}): it is missing or damaged"
        ) from None
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
            f"cannot write {path} ({error.strerror}): name a folder that you may write to"
        ) from error
    return path


def write_json(path: Path, value) -> Path:
    """A JSON file, written whole."""
    text = json.dumps(value, ensure_ascii=False, indent=1) + "\n"
    return write_whole(path, text.encode("utf-8", "replace"))


def make_folder(folder: Path) -> None:
    """Makes a folder with its parents."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot make {folder} ({reason}): name another one with --runs") from None


def append_lines(path: Path, records: list[dict]) -> None:
    """Appends records to a JSONL file.

    A number that is not finite is written as null, for JSON has no NaN.
    """
    lines = [json.dumps(without_nan(record), ensure_ascii=False) + "\n" for record in records]
    try:
        with open(path, "a", encoding="utf-8", errors="replace") as file:
            file.writelines(lines)
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}): make room or choose another --runs, then "
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


@dataclass
class Claim:
    """A folder that is ours: the lock on its file .lock, held until the process ends."""

    folder: Path
    file: IO
    made: list[Path]  # folders that did not exist before, the deepest first

    def release(self) -> None:
        """Gives the folder back; folders that were made for it go, if nothing was written."""
        if not set(os.listdir(self.folder)) - {".lock"}:
            (self.folder / ".lock").unlink()
            with contextlib.suppress(OSError):  # somebody else is in there already
                for folder in self.made:
                    folder.rmdir()
        self.file.close()


def claim(folder: Path) -> Claim | None:
    """Makes a folder ours; None if another process has it."""
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a")
    except FileNotFoundError:  # another start has just given the folder back
        return None
    except OSError as error:
        # mkdir met a folder that another start gave back before mkdir could look at it.
        gone = not os.path.lexists(folder) or folder.is_dir()
        if isinstance(error, FileExistsError) and gone:
            return None
        raise UserError(
            f"cannot write to {folder} ({error.strerror}); choose another folder with --runs"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and lock another start may have released the folder, and this file with it.
        ours = os.path.samestat(os.fstat(file.fileno()), os.stat(folder / ".lock"))
    except OSError:
        ours = False
    if not ours:
        file.close()
        return None
    return Claim(folder, file, made)
