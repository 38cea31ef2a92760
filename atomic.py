"""A folder is there whole, or it is not there: written under a temporary name, synced, renamed.

Whenever the process dies or the power goes, no half of a folder stands under its own name.
Tests: pytest tests/test_checkpoint.py tests/test_folders.py
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from config import UserError


def reason(error: BaseException) -> str:
    """Why something failed, in one line: as the system says it, or as its error does."""
    text = getattr(error, "strerror", None) or str(error).strip()
    if not text or isinstance(error, KeyError):  # the text of a KeyError is the key alone
        text = repr(error)
    return " ".join(text.split())


@contextlib.contextmanager
def on_disk(what: str) -> Iterator[None]:
    """Tries to do `what`, such as "write runs/x"; UserError if the system refuses."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # the latter from weights on a full disk
        raise UserError(
            f"cannot {what} ({reason(error)}): make room, or name a folder that you may write to"
        ) from error


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder` as the cache holds it, or else filled by `make`, which is given an empty folder.

    One process makes the folder, and others wait for it. It gets its name when all its files are on
    the disk; what a killed process left is removed by the next. UserError if it cannot be written.
    """
    with on_disk(f"write {folder}"):
        if folder.exists():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f"{folder.name}.lock"), "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not folder.exists():  # else somebody made it while we waited
                write_folder(folder, make)
    return folder


def write_folder(final: Path, fill: Callable[[Path], None]) -> None:
    """`fill` writes into an empty folder, which then takes the place of the folder `final`.

    Raises what `fill` and the disk raise; if `fill` does, the former `final` stays as it was.
    """
    temporary = final.with_name(f".{final.name}.writing")
    former = final.with_name(f".{final.name}.former")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        for path in temporary.rglob("*"):
            sync(path)
        sync(temporary)
        if final.exists():  # renamed before it is removed: never half removed under its own name
            shutil.rmtree(former, ignore_errors=True)
            os.rename(final, former)
        os.rename(temporary, final)
        sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(former, ignore_errors=True)


def point(link: Path, target: Path) -> None:
    """Makes `link` a symbolic link to `target`, relative to where it stands, in one move."""
    temporary = link.with_name(f".{link.name}.writing")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
    os.replace(temporary, link)
    sync(link.parent)


def sync(path: Path) -> None:
    """Has the system write a file or a folder's names to the disk, now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
