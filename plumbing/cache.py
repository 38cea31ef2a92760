"""What is made once and kept in the cache: a folder is there whole, or it is not there.

Tests: pytest tests/test_cache.py
"""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from config import UserError


def made_once(folder: Path, make: Callable[[Path], None], option: str = "--cache") -> Path:
    """`folder` as the cache holds it, or else filled by `make`, which is given an empty folder.

    One process makes the folder, and others wait for it. It gets its name when all its files are on
    the disk; what a killed process left is removed by the next. UserError if it cannot be written;
    `option` is what the message tells the caller to change.
    """
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    try:
        if folder.exists():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        path = folder.with_name(f"{folder.name}.lock")
        if unfinished.exists() and not path.exists():  # we leave none without its lock
            raise UserError(f"{unfinished} is in the way: rename it, or choose another {option}")
        lock = open(path, "a")
    except OSError as error:
        raise UserError(
            f"the folder {folder.parent} cannot be written ({error.strerror}): name another one "
            f"with {option}"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # somebody made it while we waited
            return folder
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir()
            make(unfinished)
            sync(unfinished)
            os.rename(unfinished, folder)
        except (OSError, SafetensorError) as error:  # how a model's weights fail on a full disk
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"{folder} cannot be written ({reason}): make room, or name "
                f"another folder with {option}"
            ) from None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def sync(folder: Path) -> None:
    """Has the system write a folder and all below it to the disk, now."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
