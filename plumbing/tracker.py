"""A live view of a run's metrics: --track tensorboard, trackio or wandb.

The package is optional, and metrics.jsonl stays the record: if a tracker fails in mid-run, one line
says so and the run goes on without it. Rank 0 tracks for all ranks. A resumed run continues the
tracker's run, and a step that is repeated after a kill appears there once.

Test: pytest tests/test_tracker.py
"""

import dataclasses
import importlib
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from config import Config, UserError
from plumbing import files


def library(name: str) -> Callable:
    """What opens a run of the tracker; UserError if its package is not there."""
    try:
        if name == "tensorboard":
            return importlib.import_module("torch.utils.tensorboard").SummaryWriter
        return importlib.import_module(name).init
    except (ImportError, AttributeError):  # a folder of the name is an empty module
        raise UserError(f"--track {name} needs its package: pip install {name}") from None
    except Exception as error:
        raise UserError(f"--track {name}: its package breaks ({reason(error)})") from None


@dataclass
class Tracker:
    """An open run of a tracker, until it fails."""

    name: str
    send: Callable[[dict[str, float], int], None]
    finish: Callable[[], None]
    failed: bool = False

    def log(self, metrics: dict) -> None:
        """Sends the numbers of a line of metrics.jsonl."""
        numbers = {key: value for key, value in metrics.items() if is_number(value)}
        step = numbers.pop("step")
        self.attempt(self.send, numbers, step)

    def close(self) -> None:
        self.attempt(self.finish)

    def attempt(self, function: Callable, *arguments) -> None:
        """Calls the tracker; its first failure is its last call."""
        if self.failed:
            return
        try:
            function(*arguments)
        except (Exception, SystemExit) as error:
            self.failed = True
            print(
                f"--track {self.name} failed ({reason(error)}): the run goes on without it, and "
                "metrics.jsonl holds everything",
                flush=True,
            )


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def reason(error: Exception) -> str:
    """The first line of what went wrong."""
    said = str(error).strip() or type(error).__name__
    return said.splitlines()[0]


def start(config: Config, method: str, folder: Path, first: int) -> Tracker | None:
    """The tracker's run, of which steps from `first` on will follow; None without --track.

    UserError if it cannot be opened: nothing is lost yet, so nobody needs to go on without it.
    """
    name = config.track
    if name == "none":
        return None
    opens = library(name)
    try:
        if name == "tensorboard":
            return in_tensorboard(opens, folder, first)
        return in_service(opens, config, method, folder)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"--track {name} cannot start ({reason(error)}); mend that or leave --track out"
        ) from error


def in_tensorboard(opens: Callable, folder: Path, first: int) -> Tracker:
    """Files in the run's folder. What an earlier process wrote from `first` on is hidden."""
    writer = opens(str(folder / "tensorboard"), purge_step=first)

    def send(numbers: dict[str, float], step: int) -> None:
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    return Tracker("tensorboard", send, writer.close)


def in_service(opens: Callable, config: Config, method: str, folder: Path) -> Tracker:
    """trackio and wandb: a run in the project that is called after the method.

    Its name is the folder's and a random suffix, so that an earlier folder of the same name stays
    apart.
    """
    kept = folder / "tracker.json"
    name = f"{config.name}-{secrets.token_hex(4)}"
    sent = -1  # the last step that an earlier process sent
    if kept.exists():
        name = files.read_json(kept)["name"]
        sent = max(
            (line["step"] for line in files.read_lines(folder / "metrics.jsonl")), default=-1
        )
    options = {
        "project": method,
        "name": name,
        "config": dataclasses.asdict(config),
        "resume": "allow",
    }
    if config.track == "wandb":
        # wandb writes files, and must accept what a resumed run may change, such as --steps.
        options |= {"id": name, "dir": config.cache, "allow_val_change": True}
    opened = opens(**options)
    files.write_json(kept, {"name": name})

    def send(numbers: dict[str, float], step: int) -> None:
        if step > sent:
            opened.log(numbers, step=step)

    return Tracker(config.track, send, opened.finish)
