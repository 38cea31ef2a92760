"""Who owns a run's folder: one process, from the moment in which that process looks for it."""

import os
from pathlib import Path

import torch.distributed as dist

import trainer
from config import MAY_CHANGE, Config, UserError
from plumbing import files
from plumbing.files import Claim


def claim_folder(config: Config, rank: int, base: str) -> tuple[Path, Claim | None]:
    """runs/NAME/, ours from this moment on, and the claim that holds it; rank 0 claims it for all.

    Without --name it is called after `base`. UserError if another process has it, if it exists and
    --resume was not given, if it does not exist and --resume was given, or if settings differ.
    """
    claimed = [None, None]  # the name, or what is wrong
    claim = None
    if rank == 0:
        try:
            claim = claim_name(config, base)
            claimed = [config.name, None]
        except UserError as error:
            claimed = [None, str(error)]
    if dist.is_initialized():
        dist.broadcast_object_list(claimed)
    name, problem = claimed
    if problem:
        raise UserError(problem)
    config.name = name
    return Path(config.runs) / name, claim


def claim_name(config: Config, base: str) -> Claim:
    """Claims the folder of config.name, or else the first free one of base, base-2, base-3, …"""
    runs = Path(config.runs)
    if config.resume:
        if not config.name:
            raise UserError("--resume needs the run's --name")
        return claim_again(config, runs / config.name)
    if config.name:
        folder = runs / config.name
        check_writable(folder)
        claim = claim_new(folder)
        if claim is None:
            raise UserError(
                f"{folder} exists: add --resume to go on with it, or choose another --name"
            )
        return claim
    check_writable(runs / base)
    for number in range(1, 100_000):
        config.name = base if number == 1 else f"{base}-{number}"
        claim = claim_new(runs / config.name)
        if claim:
            return claim
    raise UserError(f"{runs} holds 100,000 runs of this name; choose one with --name")


def claim_new(folder: Path) -> Claim | None:
    """The claim of a folder that holds nothing yet, or None."""
    if folder.exists() and (not folder.is_dir() or set(os.listdir(folder)) - {".lock"}):
        return None
    claim = files.claim(folder)
    if claim and set(os.listdir(folder)) != {".lock"}:  # another start was here in between
        claim.file.close()
        return None
    return claim


def claim_again(config: Config, folder: Path) -> Claim:
    """The claim of the run that is resumed."""
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
    claim = files.claim(folder)
    if claim is None:
        raise UserError(f"another process works on {folder}; wait until it has ended")
    state = trainer.newest(folder)
    if state and state[0] > config.steps:
        claim.file.close()
        raise UserError(
            f"the run at {folder} has done {state[0]} steps already; "
            f"give --steps {state[0]} or more"
        )
    return claim


def check_writable(folder: Path) -> None:
    """UserError if the folder cannot be made or written."""
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"cannot write to {parent}; choose another folder with --runs")
