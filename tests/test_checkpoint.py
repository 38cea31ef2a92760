"""States on disk are whole or absent, whatever happens while one is written."""

import functools
import itertools
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.launch import launch
from helpers.tiny import CPU, Tokenizer, model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import atomic
import trainer
from config import UserError
from plumbing import folders


@pytest.fixture
def run():
    """(policy, optimizer) of a tiny model that has done a step."""
    policy = trainer.Policy(model("qwen3"), bf16=False)
    optimizer = trainer.make_optimizer(policy, 1e-3)
    move(policy, optimizer)
    return policy, optimizer


def move(policy, optimizer):
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()


def save(folder, step, run, accuracies=()):
    trainer.save(folder, step, *run, Tokenizer())
    trainer.remove_states(folder, dict(accuracies), 0)


def names(folder):
    return sorted(path.name for path in (folder / "state").iterdir())


def test_only_a_state_with_its_last_file_counts(run, tmp_path):
    """What has another name stays, and is nobody's."""
    assert trainer.newest(tmp_path) is None and trainer.newest_model(tmp_path) is None
    for step in (1, 2):
        save(tmp_path, step, run)
    states = tmp_path / "state"
    (states / "step_000002" / "state.json").unlink()
    shutil.copytree(states / "step_000001", states / "step_000009.bak")
    assert trainer.newest(tmp_path)[0] == 1
    save(tmp_path, 2, run)  # it takes the damaged one's place
    assert trainer.newest(tmp_path) == (2, states / "step_000002")
    inode = (states / "step_000002").stat().st_ino
    save(tmp_path, 2, run)  # no moment without it
    assert (states / "step_000002").stat().st_ino == inode
    assert names(tmp_path) == ["step_000001", "step_000002", "step_000009.bak"]


@settings(max_examples=40)
@given(
    scores=st.dictionaries(st.integers(1, 30), st.sampled_from([0.1, 0.5, 0.9])),
    steps=st.sets(st.integers(1, 30), min_size=1),
    every=st.integers(0, 7),
)
def test_the_newest_the_best_and_every_nth_state_stay(scores, steps, every):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for count, step in enumerate(sorted(steps), 1):
            state = folder / "state" / f"step_{step:06d}"
            (state / "model").mkdir(parents=True)
            (state / "state.json").touch()
            earlier = {s: score for s, score in scores.items() if s < step}
            (folder / "state" / ".step_000031.former").mkdir()  # of a process that was killed
            trainer.remove_states(folder, earlier, every)
            former = sorted(steps)[:count]
            best = max(((earlier[s], s) for s in former if s in earlier), default=(0, None))[1]
            kept = {*former[-2:], best, *(s for s in former if every and s % every == 0)} - {None}
            assert names(folder) == [f"step_{s:06d}" for s in sorted(kept)]
            if best:
                link = (folder / "best").resolve(strict=True)
                assert link.parent.name == f"step_{best:06d}"


@pytest.mark.parametrize("where, bad", [("weights", float("nan")), ("moments", float("inf"))])
def test_what_is_not_finite_is_never_saved(where, bad, run, tmp_path):
    """Else --resume would fail for ever."""
    policy, optimizer = run
    save(tmp_path, 1, run)
    parameter = next(policy.parameters())
    broken = parameter if where == "weights" else optimizer.state[parameter]["exp_avg"]
    with torch.no_grad():
        broken.flatten()[0] = bad
    with pytest.raises(UserError, match="not finite after 2 steps"):
        save(tmp_path, 2, run)
    assert names(tmp_path) == ["step_000001"]


def test_a_state_from_before_the_first_update_counts_none(tmp_path):
    """As where it was skipped: with its gradients still there, or without."""
    for step in (1, 2, 3):
        policy = trainer.Policy(model("qwen3"), bf16=False)
        optimizer = trainer.make_optimizer(policy, 1e-3)
        if step > 1:
            trainer.load_optimizer(trainer.newest(tmp_path)[1], policy, optimizer)
        if step == 1:
            for parameter in policy.parameters():
                parameter.grad = torch.zeros_like(parameter)
        save(tmp_path, step, (policy, optimizer))
    move(policy, optimizer)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


class Killed(BaseException):
    """As if the process had died: nothing after it runs but `finally`."""


# The calls through which a save touches the disk.
TOUCHES = {"save": torch, "rmtree": shutil}
TOUCHES |= dict.fromkeys(("fsync", "rename", "replace", "unlink"), os)


def weights_in(folder):
    return load_file(folder / "model.safetensors")


def before_each_touch(patch, act):
    def touched(real, *args, **options):
        act()
        return real(*args, **options)

    for name, holder in TOUCHES.items():
        patch.setattr(holder, name, functools.partial(touched, getattr(holder, name)))


def test_a_kill_between_any_two_touches_of_the_disk_leaves_a_whole_state(
    run, tmp_path, monkeypatch
):
    """The save is killed before its first touch, before its second, and so on.

    A resume, even of a finished run, mends the link; the next save goes on.
    """
    prepared = tmp_path / "prepared"
    save(prepared, 0, run)
    save(prepared, 1, run, {0: 0.5})
    ends = []
    stale = 0
    for place in range(99):
        folder = shutil.copytree(prepared, tmp_path / str(place), symlinks=True)
        touches = itertools.count()

        def touch(touches=touches, place=place):
            if next(touches) >= place:  # nothing of a dead process touches the disk
                raise Killed

        try:
            with monkeypatch.context() as patch:
                before_each_touch(patch, touch)
                save(folder, 2, run, {0: 0.5, 1: 0.9})
        except Killed:
            pass
        else:
            break  # this one was not killed any more
        step, _ = trainer.newest(folder)
        ends.append(step)
        assert weights_in(folder / "checkpoint") and weights_in(folder / "best")
        for state in (folder / "state").glob("step_*"):
            assert torch.load(state / "optimizer.pt"), "a state is complete or absent"
        newest = trainer.newest_model(folder).resolve()
        stale += (folder / "checkpoint").resolve() != newest
        trainer.link_checkpoint(folder)
        assert (folder / "checkpoint").resolve() == newest
        assert weights_in(newest)
        folders.lock(folder).close()
        assert not [name for name in names(folder) if name[0] == "."], "the next start cleans up"
        save(folder, 2, run, {0: 0.5, 1: 0.9})
        assert trainer.newest(folder)[0] == 2
        assert names(folder) == ["step_000001", "step_000002"]
        shutil.rmtree(folder)
    assert len(ends) > 12 and ends == sorted(ends) and set(ends) == {1, 2}
    assert stale, "a kill between the last rename and the link"


def test_a_run_that_was_copied_without_its_links_is_named(run, tmp_path):
    save(tmp_path, 1, run, {1: 0.5})
    for name in ("checkpoint", "best"):
        link = tmp_path / name
        link.unlink()
        shutil.copytree(trainer.newest_model(tmp_path), link)
        with pytest.raises(UserError, match=f"{name} is a folder.*copied without links: remove"):
            trainer.link_checkpoint(tmp_path)
        shutil.rmtree(link)
    trainer.link_checkpoint(tmp_path)
    assert weights_in(tmp_path / "checkpoint")


def test_everything_is_fsynced_before_the_state_gets_its_name(run, tmp_path, monkeypatch):
    synced = []
    real = {"sync": atomic.sync, "rename": os.rename}

    def sync(path):
        synced.append(path)
        real["sync"](path)

    def rename(source, target):
        assert {source, *Path(source).rglob("*")} <= set(synced)
        real["rename"](source, target)

    monkeypatch.setattr(atomic, "sync", sync)
    monkeypatch.setattr(os, "rename", rename)
    save(tmp_path, 1, run)
    assert synced[-2:] == [tmp_path / "state", tmp_path]


class FullDisk:
    """A tokenizer that cannot be saved."""

    def save_pretrained(self, folder):
        raise OSError(28, "No space left on device")


def write_on_ranks(folder: Path) -> None:
    """What each of two ranks does."""
    policy = trainer.parallel(trainer.Policy(model("qwen3"), bf16=False), fsdp=False, device=CPU)
    optimizer = trainer.make_optimizer(policy, 1e-3)
    path = trainer.write_model(folder / "w", trainer.unwrap(policy).model, torch.float32)
    told = [None, None]
    dist.all_gather_object(told, path)
    assert told[0] == told[1] and Path(path).is_dir()
    with pytest.raises(UserError, match="No space left"):
        trainer.save(folder, 1, policy, optimizer, FullDisk())


def test_all_ranks_hear_what_the_first_wrote_or_could_not_write(tmp_path):
    """Else they would wait for it."""
    assert launch(write_on_ranks, tmp_path, log=tmp_path / "log") == 0
