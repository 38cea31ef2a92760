"""Atomic writing of folders: under a temporary name, synced to the disk, then renamed.

If the process dies or the power fails, there is no half-written folder under the final name.
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
    """Why something failed, in one line: the system's text, or else the error's own."""
    text = getattr(error, "strerror", None) or str(error).strip()
    if not text or isinstance(error, KeyError):  # the text of a KeyError is the key alone
        text = repr(error)
    return " ".join(text.split())


@contextlib.contextmanager
def on_disk(what: str) -> Iterator[None]:
    """Tries to do `what`, such as "write runs/x"; UserError if the system refuses."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # Writing weights on a full disk raises the second.
        raise UserError(
            f"cannot {what} ({reason(error)}): make room, or name a folder that you may write to"
        ) from error


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Returns `folder` from the cache; if it is missing, `make` fills an empty folder first.

    One process makes the folder while others wait. The folder gets its name when all its files are
    on the disk. The next process removes what a killed one left. UserError if it cannot be written.
    """
    with on_disk(f"write {folder}"):
        if folder.exists():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f"{folder.name}.lock"), "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not folder.exists():  # another process may have made it while this one waited
                write_folder(folder, make)
    return folder


def write_folder(final: Path, fill: Callable[[Path], None]) -> None:
    """Replaces the folder `final` by one that `fill` writes.

    Raises the errors of `fill` and of the disk. If `fill` raises, the former `final` is unchanged.
    """
    temporary = final.with_name(f".{final.name}.writing")
    former = final.with_name(f".{final.name}.former")
    shutil.rmtree(temporary, ignore_errors=True)  # from a killed process
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        for path in temporary.rglob("*"):
            sync(path)
        sync(temporary)
        if final.exists():  # first renamed, so that no half-removed folder has the final name
            shutil.rmtree(former, ignore_errors=True)
            os.rename(final, former)
        os.rename(temporary, final)
        sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(former, ignore_errors=True)


def point(link: Path, target: Path) -> None:
    """Makes `link` a relative symbolic link to `target`, in one atomic step."""
    temporary = link.with_name(f".{link.name}.writing")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
    os.replace(temporary, link)
    sync(link.parent)


def sync(path: Path) -> None:
    """Flushes a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
