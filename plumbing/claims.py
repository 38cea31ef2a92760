"""Who owns a run's folder: one process, from the moment in which that process looks for it."""

import os
from pathlib import Path
from typing import IO

import torch.distributed as dist

import trainer
from config import MAY_CHANGE, Config, UserError
from plumbing import files


def claim_folder(config: Config, rank: int, base: str) -> tuple[Path, IO | None]:
    """runs/NAME/, ours from this moment on, and the lock that holds it; rank 0 claims it for all.

    Without --name it is called after `base`. UserError if another process has it, if it exists and
    --resume was not given, if it does not exist and --resume was given, or if settings differ.
    """
    claimed = [None, None]  # the name, or what is wrong
    lock = None
    if rank == 0:
        try:
            lock = claim_name(config, base)
            claimed = [config.name, None]
        except UserError as error:
            claimed = [None, str(error)]
    if dist.is_initialized():
        dist.broadcast_object_list(claimed)
    name, problem = claimed
    if problem:
        raise UserError(problem)
    config.name = name
    return Path(config.runs) / name, lock


def claim_name(config: Config, base: str) -> IO:
    """Claims the folder of config.name, or else the first free one of base, base-2, base-3, …"""
    runs = Path(config.runs)
    if config.resume:
        if not config.name:
            raise UserError("--resume needs the run's --name")
        return claim_again(config, runs / config.name)
    if config.name:
        folder = runs / config.name
        check_writable(folder)
        lock = claim_new(folder)
        if lock is None:
            raise UserError(
                f"{folder} exists: add --resume to go on with it, or choose another --name"
            )
        return lock
    check_writable(runs / base)
    for number in range(1, 100_000):
        config.name = base if number == 1 else f"{base}-{number}"
        lock = claim_new(runs / config.name)
        if lock:
            return lock
    raise UserError(f"{runs} holds 100,000 runs of this name; choose one with --name")


def claim_new(folder: Path) -> IO | None:
    """The lock of a folder that holds nothing yet, or None."""
    if folder.exists() and (not folder.is_dir() or set(os.listdir(folder)) - {".lock"}):
        return None
    lock = files.claim(folder)
    if lock and set(os.listdir(folder)) != {".lock"}:  # another start was here in between
        lock.close()
        return None
    return lock


def claim_again(config: Config, folder: Path) -> IO:
    """The lock of the run that is resumed."""
    if not (folder / "config.json").exists():
        raise UserError(f"nothing to resume: there is no run at {folder}")
    saved = files.read_json(folder / "config.json")
    changed = [
        f"{name} ({saved.get(name)} -> {value})"
        for name, value in vars(config).items()
        if name not in MAY_CHANGE and saved.get(name) != value
    ]
    if changed:
        raise UserError(
            f"the run at {folder} was started with other settings: {', '.join(changed)}; "
            "resume with the same ones"
        )
    check_writable(folder)
    lock = files.claim(folder)
    if lock is None:
        raise UserError(f"another process works on {folder}; wait until it has ended")
    state = trainer.newest(folder)
    if state and state[0] > config.steps:
        lock.close()
        raise UserError(
            f"the run at {folder} has done {state[0]} steps already; "
            f"give --steps {state[0]} or more"
        )
    return lock


def check_writable(folder: Path) -> None:
    """UserError if the folder cannot be made or written."""
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"cannot write to {parent}; choose another folder with --runs")
