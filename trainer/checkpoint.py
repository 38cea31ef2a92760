"""A run's states on disk: written whole or not at all, and only whole ones are taken up again.

A state is the folder state/step_N: `model/` as Hugging Face writes it, `optimizer.pt`, and
`state.json` with the step and the size of every file. It is written under a temporary name, each
file and folder is fsynced, then it is renamed. Whenever the process dies, the former states are
still there. Nothing is overwritten, and old states go only when the new one stands.

With adapters (lora.py) a state holds `adapter/` instead of `model/`, a few MB. The model with the
adapters merged in is written beside the states, to merged/step_N, of which only the newest stays.

A copy of the model that plays frozen roles lies in frozen/. A resumed run takes it for its start,
and evaluations read it: what --model named may have changed by then, or be gone.

Tests: `pytest tests/test_checkpoint.py tests/test_frozen.py tests/test_lora.py`.
"""

import errno
import functools
import json
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from config import UserError
from trainer.loading import load_model
from trainer.lora import adapter_weights, merged_weights, write_adapters
from trainer.policy import unwrap

STATE_NAME = re.compile(r"step_(\d{6,})")
WRITING = ".writing"  # the state or model under way
REPLACED = ".replaced"  # a damaged state whose step has been done again
FROZEN = "frozen"  # the model that plays the frozen roles
# What says of which kind a state's weights are.
DESCRIPTIONS = ("model/config.json", "adapter/adapter_config.json")


def save(folder: Path, step: int, policy: nn.Module, optimizer, tokenizer, keep: int = 2) -> None:
    """Writes state/step_N, points checkpoint/ at its model, keeps the `keep` newest whole states.

    Every rank must call it; rank 0 writes. UserError on all ranks, with the former states left
    whole, if weights or moments are not finite or if the disk does not take the state.
    """
    if not all_finite(policy, optimizer):
        raise UserError(
            f"the weights are not finite after {step} steps, so they were not saved: "
            "go on from the last state with --resume and a lower --lr"
        )
    # Gathered on rank 0 and named as without shards.
    model = unwrap(policy).model
    weights = merged_weights(model)
    adapters = adapter_weights(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    moments = get_optimizer_state_dict(policy, optimizer, options=options)
    problem = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            write_state(folder, step, model, weights, adapters, moments, tokenizer)
            remove_old(folder / "state", keep)
        except Exception as error:  # safetensors and torch.save have errors of their own kind
            shutil.rmtree(folder / "state" / WRITING, ignore_errors=True)
            problem = (
                f"cannot write the state of step {step} to {folder} ({reason(error, folder)}): "
                "the former states are whole, so make room and go on with --resume"
            )
    problem = from_first_rank(problem)
    if problem:
        raise UserError(problem)


def all_finite(policy: nn.Module, optimizer) -> bool:
    """Whether all weights and moments are numbers, on all ranks."""
    parameters = list(policy.parameters())
    tensors = [parameter.detach() for parameter in parameters]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]
    local = [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
    finite = all(bool(x.isfinite().all()) for x in local)
    if dist.is_initialized():
        lowest = torch.tensor(int(finite), device=local[0].device)
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        finite = bool(lowest)
    return finite


def from_first_rank(value):
    """What rank 0 holds, on every rank; they wait for it here."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def reason(error: Exception, folder: Path) -> str:
    """Why a state could not be written, in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if shutil.disk_usage(folder).free < 1 << 20:
        return "no space left on device"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def write_state(
    folder: Path, step: int, model, weights: dict, adapters: dict, moments: dict, tokenizer
) -> None:
    """Writes a whole state and points checkpoint/ at its model.

    If there are `adapters`, the state has these, and the model stands beside the states.
    """
    states = folder / "state"
    temporary = begin(states)
    final = states / f"step_{step:06d}"
    target = final / "model"
    if adapters:
        merged = folder / "merged"
        target = merged / final.name
        save_model(begin(merged), model, weights, tokenizer)
        sync_tree(merged / WRITING)
        finish(merged / WRITING, target)
        write_adapters(temporary / "adapter", model, adapters)
    else:
        save_model(temporary / "model", model, weights, tokenizer)
    with open(temporary / "optimizer.pt", "wb") as file:
        torch.save(moments, file)
    sizes = {
        str(path.relative_to(temporary)): path.stat().st_size
        for path in sorted(temporary.rglob("*"))
        if path.is_file()
    }
    description = json.dumps({"step": step, "sizes": sizes})
    (temporary / "state.json").write_text(description, encoding="utf-8")
    sync_tree(temporary)
    problem = damage(temporary, step)
    if problem:
        raise OSError(errno.EIO, f"{problem} right after it was written")
    finish(temporary, final)
    link = folder / ".checkpoint"
    link.unlink(missing_ok=True)
    link.symlink_to(target.relative_to(folder), target_is_directory=True)
    os.replace(link, folder / "checkpoint")
    sync(folder)
    if adapters:
        for path in set(merged.iterdir()) - {target}:
            shutil.rmtree(path, ignore_errors=True)


def begin(parent: Path) -> Path:
    """An empty folder for what will lie in `parent` when it is whole."""
    temporary = parent / WRITING
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def finish(temporary: Path, final: Path) -> None:
    """Gives a folder that is whole, and fsynced, its name."""
    replaced = final.with_name(REPLACED)
    if final.exists():
        # It was damaged, or the run would not have come here again. It is renamed before it is
        # removed, so that no folder is ever half removed under its own name.
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(final, replaced)
    os.replace(temporary, final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def save_model(folder: Path, model, weights: dict, tokenizer) -> None:
    """A folder that transformers and vLLM load."""
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)


def keep_frozen(folder: Path, start: Path | str, tokenizer) -> None:
    """Writes frozen/, a copy of the model that a run begins with. One that is there stays.

    Every rank must call it; rank 0 writes. UserError on all ranks if the disk does not take it, or
    if the start cannot be read.
    """
    problem = None
    final = folder / FROZEN
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first and not os.path.lexists(final):
        try:
            model = load_model(start, "cpu", dtype="auto", training=False)
            temporary = begin(folder)
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            sync_tree(temporary)
            finish(temporary, final)
        except UserError as error:  # of load_model
            problem = str(error)
        except Exception as error:  # safetensors has errors of its own kind
            shutil.rmtree(folder / WRITING, ignore_errors=True)
            problem = (
                f"cannot copy {start} to {final} ({reason(error, folder)}): make room, and go on "
                "with --resume"
            )
    problem = from_first_rank(problem)
    if problem:
        raise UserError(problem)


def write_model(folder: Path, model, dtype: torch.dtype) -> str:
    """Writes the weights as a new folder below `folder`, for servers; returns its full path.

    It holds a model, or adapters where there are some. Every rank must call it; rank 0 writes. The
    newest two stay, since a server may still be reading the former one. UserError on all ranks if
    the disk does not take it.
    """
    adapters = adapter_weights(model)
    weights = {} if adapters else merged_weights(model)
    path = ""
    problem = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        weights = {name: weight.to(dtype) for name, weight in weights.items()}
        try:
            path = write_next(folder, model, weights, adapters)
        except Exception as error:  # safetensors has errors of its own kind
            problem = f"cannot write the weights to {folder} ({reason(error, folder.parent)})"
    path, problem = from_first_rank((path, problem))
    if problem:
        raise UserError(f"{problem}: make room and go on with --resume")
    return path


def write_next(folder: Path, model, weights: dict, adapters: dict) -> str:
    """The next numbered folder with weights or adapters, whole before it has its name."""
    temporary = folder / WRITING
    shutil.rmtree(temporary, ignore_errors=True)
    if adapters:
        write_adapters(temporary, model, adapters)
    else:
        model.save_pretrained(temporary, state_dict=weights)
    sync_tree(temporary)
    older = sorted(path for path in folder.iterdir() if path.name.isdecimal())
    number = int(older[-1].name) + 1 if older else 1
    final = folder / f"{number:06d}"
    os.replace(temporary, final)
    sync(folder)
    for path in older[:-1]:
        shutil.rmtree(path, ignore_errors=True)
    return str(final.resolve())


def sync(path: Path) -> None:
    """Has the system write a file or a folder's names to the disk, now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """The same for all that lies below a folder, and for the folder."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def remove_old(states: Path, keep: int) -> None:
    """Removes all but the `keep` newest whole states, and damaged ones."""
    whole = []
    for step, path in sorted(listed(states), reverse=True):
        if len(whole) < keep and damage(path, step) is None:
            whole.append(path)
        else:
            shutil.rmtree(path, ignore_errors=True)


def listed(states: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything that is named like a state, whole or not."""
    if not states.is_dir():
        return []
    found = []
    for path in states.iterdir():
        match = STATE_NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return found


def damage(state: Path, step: int) -> str | None:
    """What is wrong with a state, in a few words; None if it is whole and can be loaded.

    Files are opened and measured, but not read through: a state of 8B parameters has 96 GB.
    """
    try:
        description = json.loads((state / "state.json").read_text(encoding="utf-8"))
        sizes = dict(description["sizes"])
        if description["step"] != step:
            return f"state.json is of step {description['step']}"
        for name, size in sizes.items():
            if (state / name).stat().st_size != size:
                return f"{name} is cut"
        weights = [name for name in sizes if name.endswith(".safetensors")]
        described = [name for name in DESCRIPTIONS if name in sizes]
        if not weights or "optimizer.pt" not in sizes or not described:
            return "state.json does not list a model and an optimizer"
        json.loads((state / described[0]).read_text(encoding="utf-8"))
        for name in weights:
            with safe_open(state / name, "pt") as file:
                file.keys()
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(state)} is missing"
    except Exception as error:  # whatever a stray file may hold
        return f"it cannot be read: {type(error).__name__}"
    if not zipfile.is_zipfile(state / "optimizer.pt"):
        return "optimizer.pt cannot be read"
    return None


def newest(folder: Path) -> tuple[int, Path] | None:
    """(step, folder) of a run's newest whole state, or None if it has none.

    Damaged states are passed over; standard error names them.
    """
    for step, path in sorted(listed(folder / "state"), reverse=True):
        problem = damage(path, step)
        if problem is None:
            return step, path
        if int(os.environ.get("RANK", 0)) == 0:
            say_once(f"the state {path} is damaged ({problem}): passed over")
    return None


@functools.cache
def say_once(line: str) -> None:
    """Prints a line on stderr, the first time that it is said."""
    print(line, file=sys.stderr, flush=True)


def load_optimizer(state: Path, policy: nn.Module, optimizer) -> None:
    """Puts a saved optimizer state back, sharded or not. UserError if the file does not fit.

    The ranks of a machine share the file's pages.
    """
    try:
        moments = torch.load(
            state / "optimizer.pt", map_location="cpu", weights_only=True, mmap=True
        )
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(policy, optimizer, moments, options=options)
    except Exception as error:  # torch raises many kinds for a file of another run
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"cannot take up the optimizer of {state}: {lines[0]}") from None
