"""The states of a run on disk. A state is complete or absent, and --resume loads the newest one.

A state is the folder state/step_N. It has `model/` in Hugging Face's format, `optimizer.pt`, and
`state.json` with the step. LoRA adapters are merged into the model, and model/adapter/ has them
too (lora.py). The folder gets its name when all files are on the disk (atomic.py). Then old states
are removed. checkpoint/ is a link to the newest state's model. If a run was killed before it
changed the link, `link_checkpoint` changes it on resume. best/ is a link to the model with the best
evaluation.

frozen/ is a copy of the model that a run began with. It exists only if a run needs that model until
its end: for frozen roles, as the base of adapters, or as the reference of the KL term. A resumed
run and its evaluations load this copy, because --model may have changed or be deleted.

Every rank must call the functions that write, because they gather shards. Rank 0 writes. UserError
on all ranks if writing fails.

Tests: `pytest tests/test_checkpoint.py tests/test_frozen.py tests/test_lora.py`.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from atomic import on_disk, point, reason, write_folder
from config import UserError
from family import gather_full
from processes import from_first_rank, on_first_rank, sum_over_ranks
from trainer.loading import load_model
from trainer.lora import ADAPTER, adapters, merged_weights, write_adapters
from trainer.policy import unwrap

STATE_FILES = "step_" + 6 * "[0-9]" + "/state.json"  # a pattern for the files of complete states
STATES = 2  # how many of the newest states are never removed
FROZEN = "frozen"  # the folder of the model that the run began with

# ------------------------------------------------------------------------------------------- states


def save(folder: Path, step: int, policy: nn.Module, optimizer, tokenizer) -> None:
    """Writes state/step_N and changes the link checkpoint/ to its model.

    UserError, without any change, if weights or moments are not finite.
    """
    if not all_finite(policy, optimizer):
        raise UserError(
            f"weights or moments are not finite after {step} steps, so they were not saved: begin "
            f"a new run from the last state, with --model {folder}/checkpoint and a lower --lr"
        )
    # Weights and moments are gathered on rank 0, with the names of an unsharded model.
    model = unwrap(policy).model
    weights = merged_weights(model)
    adapter_weights = {name: gather_full(p).cpu() for name, p in adapters(model).items()}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    moments = {}  # To get some, PyTorch's function would make an update.
    if optimizer.state:
        moments = get_optimizer_state_dict(policy, optimizer, options=options)

    def fill(path: Path) -> None:
        model.save_pretrained(path / "model", state_dict=weights)
        tokenizer.save_pretrained(path / "model")
        if adapter_weights:
            write_adapters(path / "model" / ADAPTER, model, adapter_weights)
        with open(path / "optimizer.pt", "wb") as file:
            torch.save(moments, file)
        (path / "state.json").write_text(json.dumps({"step": step}), encoding="utf-8")

    def write() -> None:
        final = folder / "state" / f"step_{step:06d}"
        if not (final / "state.json").exists():  # A step that failed may save the same state again.
            write_folder(final, fill)
        link_checkpoint(folder)

    write_once(write, f"write the state of step {step} to {folder}")


def remove_states(folder: Path, accuracies: Mapping[int, float], every: int) -> None:
    """Removes all states but the newest ones, the best one, and those of each `every`-th step.

    accuracies: step -> held-out accuracy of its weights; of equal ones the newest is the best.
    best/ becomes a link to the best state's model. Only rank 0 calls this.
    """
    states = dict(whole_states(folder))
    steps_to_keep = list(states)[-STATES:]
    with on_disk(f"remove old states of {folder}"):
        if scores := [(accuracies[step], step) for step in states if step in accuracies]:
            best = max(scores)[1]
            steps_to_keep.append(best)
            point(folder / "best", states[best] / "model")
        for step, path in states.items():
            if step not in steps_to_keep and not (every and step % every == 0):
                # It is renamed first, so that no half-removed folder counts as a state.
                path.rename(path.with_name(f".{path.name}.former"))
        for former in (folder / "state").glob(".*.former"):  # a killed process may have left one
            shutil.rmtree(former, ignore_errors=True)


def all_finite(policy: nn.Module, optimizer) -> bool:
    """Whether all weights and moments on all ranks are finite numbers."""
    tensors = [parameter.detach() for parameter in policy.parameters()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]
    local = [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
    damaged = any(not x.isfinite().all() for x in local)
    return not sum_over_ranks({"damaged": damaged})["damaged"]


def whole_states(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of each complete state of a run, the newest last."""
    paths = [file.parent for file in (folder / "state").glob(STATE_FILES)]
    return sorted((int(path.name.removeprefix("step_")), path) for path in paths)


def newest(folder: Path) -> tuple[int, Path] | None:
    """(step, folder) of a run's newest complete state, or None without one."""
    states = whole_states(folder)
    return states[-1] if states else None


def newest_model(folder: Path) -> Path | None:
    """The model's folder in a run's newest complete state, or None without one."""
    state = newest(folder)
    return state and state[1] / "model"


def link_checkpoint(folder: Path) -> None:
    """Makes checkpoint/ a link to the newest state's model. UserError if a link is a folder."""
    for link in (folder / "checkpoint", folder / "best"):
        if link.is_dir() and not link.is_symlink():
            raise UserError(
                f"{link} is a folder and not a link, so the run was copied without links: remove "
                "its folders checkpoint and best, and go on with --resume"
            )
    if model := newest_model(folder):
        point(folder / "checkpoint", model)


def load_optimizer(state: Path, policy: nn.Module, optimizer) -> None:
    """Loads a saved optimizer state on every rank, sharded or not. UserError if it does not fit.

    With mmap the ranks of a machine share one copy of the file in memory.
    """
    try:
        path = state / "optimizer.pt"
        moments = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        options = StateDictOptions(full_state_dict=True)
        if moments.get("state"):
            set_optimizer_state_dict(policy, optimizer, moments, options=options)
    except Exception as error:  # torch raises many types for a file of another run.
        problem = f"cannot load the optimizer of {state}: {reason(error)}"
        raise UserError(f"{problem}; remove this state to resume from the one before") from None


# ------------------------------------------------------------------------------------------- models


def keep_frozen(folder: Path, start: Path | str, tokenizer) -> None:
    """Writes frozen/, a copy of the model that a run begins with, unless it exists already."""

    def copy(path: Path) -> None:
        load_model(start, "cpu", dtype="auto").save_pretrained(path)
        tokenizer.save_pretrained(path)

    def write() -> None:
        if not os.path.lexists(folder / FROZEN):
            write_folder(folder / FROZEN, copy)

    write_once(write, f"copy {start} to {folder / FROZEN}")


def write_model(folder: Path, model, dtype: torch.dtype) -> str:
    """Writes the weights into a new subfolder of `folder`, for servers; returns its full path.

    The newest two subfolders are not removed, since a server may still read the former one.
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


def write_once(write: Callable, task: str):
    """Calls `write` on rank 0; returns its result on every rank. Errors begin "cannot `task`"."""

    def write_or_explain():
        try:
            return write()
        except UserError:  # from load_model
            raise
        except Exception as error:  # safetensors and torch.save raise their own types.
            problem = reason(error)
            if "inline_container" in problem:  # torch.save's error on a full disk
                problem = "the disk is full"
            advice = "repair this, or make room if the disk is full, and go on with --resume"
            raise UserError(f"cannot {task} ({problem}): {advice}") from None

    return from_first_rank(on_first_rank(write_or_explain))
