"""A run's states on disk: written whole or not at all, and the newest one is taken up again.

A state is the folder state/step_N: `model/` as Hugging Face writes it, with adapters (lora.py)
merged in and beside it, `optimizer.pt`, and at last `state.json` with the step. It gets its name
when all of it is on the disk (atomic.py), and only then old ones go. checkpoint/ is a link to the
newest state's model; where a kill left it one state behind, `link_checkpoint` mends it on resume.

frozen/ is a copy of the model that a run began with, made where it is needed to the end: it plays
frozen roles, stands below adapters, is the KL term's reference. A resumed run takes it for its
start, and evaluations read it: what --model named may have changed by then, or be gone.

Every rank must call what writes here, for shards are gathered; rank 0 writes. UserError on all
ranks if the disk does not take it.

Tests: `pytest tests/test_checkpoint.py tests/test_frozen.py tests/test_lora.py`.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from atomic import point, reason, write_folder
from config import UserError
from processes import from_first_rank, on_first_rank
from trainer.loading import load_model
from trainer.lora import ADAPTERS, adapter_weights, merged_weights
from trainer.policy import unwrap

STATE_FILES = "step_" + 6 * "[0-9]" + "/state.json"  # of whole states
STATES = 2  # so many stay, the newest
FROZEN = "frozen"  # the model that the run began with

# ------------------------------------------------------------------------------------------- states


def save(folder: Path, step: int, policy: nn.Module, optimizer, tokenizer) -> None:
    """Writes state/step_N, points checkpoint/ at its model, removes old states.

    UserError, with the former states left whole, if weights or moments are not finite.
    """
    if not all_finite(policy, optimizer):
        raise UserError(
            f"the weights are not finite after {step} steps, so they were not saved: begin a new "
            "run from the last state, with --model RUN/checkpoint and a lower --lr"
        )
    # Gathered on rank 0 and named as without shards.
    model = unwrap(policy).model
    weights = merged_weights(model)
    adapters = adapter_weights(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    moments = {}  # before the first update: both calls of PyTorch's would count one
    if optimizer.state:
        moments = get_optimizer_state_dict(policy, optimizer, options=options)

    def fill(path: Path) -> None:
        model.save_pretrained(path / "model", state_dict=weights)
        tokenizer.save_pretrained(path / "model")
        if adapters:
            save_file(adapters, path / ADAPTERS)
        with open(path / "optimizer.pt", "wb") as file:
            torch.save(moments, file)
        (path / "state.json").write_text(json.dumps({"step": step}), encoding="utf-8")

    def write() -> None:
        write_folder(folder / "state" / f"step_{step:06d}", fill)
        link_checkpoint(folder)
        for _, path in whole_states(folder)[:-STATES]:
            shutil.rmtree(path, ignore_errors=True)

    write_once(write, f"write the state of step {step} to {folder}")


def all_finite(policy: nn.Module, optimizer) -> bool:
    """Whether all weights and moments are numbers, on all ranks."""
    tensors = [parameter.detach() for parameter in policy.parameters()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]
    local = [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
    finite = all(bool(x.isfinite().all()) for x in local)
    if dist.is_initialized():
        lowest = torch.tensor(int(finite), device=local[0].device)
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        finite = bool(lowest)
    return finite


def whole_states(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of a run's whole states, the newest last."""
    paths = [file.parent for file in (folder / "state").glob(STATE_FILES)]
    return sorted((int(path.name.removeprefix("step_")), path) for path in paths)


def newest(folder: Path) -> tuple[int, Path] | None:
    """(step, folder) of a run's newest whole state, or None if it has none."""
    states = whole_states(folder)
    return states[-1] if states else None


def newest_model(folder: Path) -> Path | None:
    """The model of a run's newest whole state."""
    state = newest(folder)
    return state and state[1] / "model"


def link_checkpoint(folder: Path) -> None:
    """Points checkpoint/ at the newest state's model, unless it does so already."""
    model = newest_model(folder)
    link = folder / "checkpoint"
    if model and link.resolve() != model.resolve():
        point(link, model)


def load_optimizer(state: Path, policy: nn.Module, optimizer) -> None:
    """Puts a saved optimizer state back, sharded or not, on every rank. UserError if none fits.

    By mmap the ranks of a machine share one copy of the file in memory.
    """
    try:
        path = state / "optimizer.pt"
        moments = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        options = StateDictOptions(full_state_dict=True)
        if moments.get("state"):
            set_optimizer_state_dict(policy, optimizer, moments, options=options)
    except Exception as error:  # torch raises many kinds for a file of another run
        problem = f"cannot take up the optimizer of {state}: {reason(error)}"
        raise UserError(f"{problem}; remove that state to go on from the one before it") from None


# ------------------------------------------------------------------------------------------- models


def keep_frozen(folder: Path, start: Path | str, tokenizer) -> None:
    """Writes frozen/, a copy of the model that a run begins with. One that is there stays."""

    def copy(path: Path) -> None:
        load_model(start, "cpu", dtype="auto").save_pretrained(path)
        tokenizer.save_pretrained(path)

    def write() -> None:
        if not os.path.lexists(folder / FROZEN):
            write_folder(folder / FROZEN, copy)

    write_once(write, f"copy {start} to {folder / FROZEN}")


def write_model(folder: Path, model, dtype: torch.dtype) -> str:
    """Writes the weights as a new folder below `folder`, for servers; returns its full path.

    The newest two stay, since a server may still be reading the former one.
    """
    weights = {name: weight.to(dtype) for name, weight in merged_weights(model).items()}

    def write() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        older = sorted(path for path in folder.iterdir() if path.name.isdecimal())
        number = int(older[-1].name) + 1 if older else 1
        final = folder / f"{number:06d}"
        write_folder(final, lambda path: model.save_pretrained(path, state_dict=weights))
        for path in older[:-1]:
            shutil.rmtree(path, ignore_errors=True)
        return str(final.resolve())

    return write_once(write, f"write the weights to {folder}")


def write_once(write: Callable, what: str):
    """Calls `write` on rank 0; returns its result on every rank. `what` is named in errors."""

    def attempt():
        try:
            return write()
        except UserError:  # of load_model
            raise
        except Exception as error:  # safetensors and torch.save have errors of their own kind
            why = reason(error)
            if "inline_container" in why:  # torch.save on a full disk
                why = "the disk did not take all of it"
            advice = "mend that, or make room if the disk is full, and go on with --resume"
            raise UserError(f"cannot {what} ({why}): {advice}") from None

    return from_first_rank(on_first_rank(attempt))
