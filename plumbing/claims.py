"""Who owns a run's folder: one process, from the moment in which that process looks for it."""

import os
from pathlib import Path

import torch.distributed as dist

import trainer
from config import MAY_CHANGE, Config, UserError
from plumbing import files
from plumbing.files import Claim


def claim_folder(config: Config, method: str, rank: int, base: str) -> tuple[Path, Claim | None]:
    """runs/NAME/, ours from this moment on, and the claim that holds it; rank 0 claims it for all.

    Without --name it is called after `base`. UserError if another process has it, if it exists and
    --resume was not given, if it does not exist and --resume was given, or if settings differ.
    """
    claimed = [None, None]  # the name, or what is wrong
    claim = None
    if rank == 0:
        try:
            claim = claim_name(config, method, base)
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


def claim_name(config: Config, method: str, base: str) -> Claim:
    """Claims the folder of config.name, or else the first free one of base, base-2, base-3, …"""
    runs = Path(config.runs)
    if config.resume:
        if not config.name:
            raise UserError("--resume needs the run's --name")
        return claim_again(config, method, runs / config.name)
    if config.name:
        refuse_taken(config)
        claim = claim_new(runs / config.name)
        if claim is None:
            raise UserError(
                f"{runs / config.name} exists by now: another process has just begun it; "
                "choose another --name"
            )
        return claim
    check_writable(runs / base)
    for number in range(1, 100_000):
        config.name = base if number == 1 else f"{base}-{number}"
        claim = claim_new(runs / config.name)
        if claim:
            return claim
    raise UserError(f"{runs} holds 100,000 runs of this name; choose one with --name")


def refuse_taken(config: Config) -> None:
    """UserError if a new run cannot have the folder of config.name; without one, if none can."""
    folder = Path(config.runs) / config.name
    check_writable(folder)
    if config.name and not is_free(folder):
        raise UserError(f"{folder} exists: add --resume to go on with it, or choose another --name")


def claim_new(folder: Path) -> Claim | None:
    """The claim of a folder that holds nothing yet, or None."""
    if not is_free(folder):
        return None
    claim = files.claim(folder)
    if claim and not is_free(folder):  # another start was here in between
        claim.file.close()
        return None
    return claim


def is_free(folder: Path) -> bool:
    """Whether no run lies there.

    A lock and unfinished files do not count: a process left them that ended before its run began.
    """
    try:
        inside = set(os.listdir(folder))
    except FileNotFoundError:
        return True
    except OSError:  # a file, or not ours to read
        return False
    return all(name == ".lock" or name.endswith(".part") for name in inside)


def claim_again(config: Config, method: str, folder: Path) -> Claim:
    """The claim of the run that is resumed."""
    if not (folder / "config.json").exists():
        raise UserError(f"nothing to resume: there is no run at {folder}")
    # An option that the older version did not have counts as its default.
    saved = vars(type(config)()) | files.read_json(folder / "config.json")
    changed = [
        f"{name} ({saved[name]} -> {value})"
        for name, value in vars(config).items()
        if name not in MAY_CHANGE and saved[name] != value
    ]
    if changed:
        raise UserError(
            f"the run at {folder} was started with other settings: {', '.join(changed)}; "
            "resume with the same ones"
        )
    made_by = method
    if (folder / "method.json").exists():
        made_by = files.read_json(folder / "method.json").get("name")
    if made_by != method:
        raise UserError(f"{folder} was made by the method {made_by}: resume it with its own file")
    if (folder / "table.json").exists():
        raise UserError(f"{folder} is an evaluation, not a run to resume")
    check_writable(folder)
    claim = files.claim(folder)
    if claim is None:
        raise UserError(f"another process works on {folder}; wait until it has ended")
    state = trainer.newest(folder)
    # `checkpoint` is linked with the first saved state and never removed.
    if state is None and os.path.lexists(folder / "checkpoint"):
        claim.file.close()
        raise UserError(
            f"{folder} holds results but no whole state to go on from; start a new run with "
            "another --name"
        )
    if state and state[0] > config.steps:
        claim.file.close()
        raise UserError(
            f"the run at {folder} has done {state[0]} steps already; "
            f"give --steps {state[0]} or more"
        )
    return claim


def check_writable(folder: Path) -> None:
    """UserError if the folder cannot be made or written."""
    try:
        # A dangling link is there and is no folder.
        ancestors = (folder, *folder.absolute().parents)
        parent = next(path for path in ancestors if os.path.lexists(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"--runs cannot be used ({reason}); choose another folder") from None
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"cannot write to {parent}; choose another folder with --runs")
