"""States on disk are whole or absent, whatever happens while one is written."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import ranks
from helpers.tiny import CPU, Tokenizer, model
from transformers import AutoModelForCausalLM

import trainer
from config import UserError
from trainer import checkpoint

TESTS = Path(__file__).parent


@pytest.fixture
def run():
    """(policy, optimizer) of a tiny model that has done a step."""
    policy = trainer.Policy(model("qwen3"), bf16=False)
    optimizer = trainer.make_optimizer(policy, 1e-3, 0.0)
    move(policy, optimizer)
    return policy, optimizer


def move(policy, optimizer):
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def save(folder, step, run, **options):
    trainer.save(folder, step, *run, Tokenizer(), **options)


def names(folder):
    return sorted(path.name for path in (folder / "state").iterdir())


def test_states_are_named_by_their_step_and_only_the_newest_stay(run, tmp_path):
    assert trainer.newest(tmp_path) is None
    for step in (1, 2, 3):
        save(tmp_path, step, run)
    assert names(tmp_path) == ["step_000002", "step_000003"]
    assert trainer.newest(tmp_path) == (3, tmp_path / "state" / "step_000003")
    found = (tmp_path / "checkpoint").resolve()
    assert found == (tmp_path / "state" / "step_000003" / "model").resolve()
    save(tmp_path, 4, run, keep=1)
    assert names(tmp_path) == ["step_000004"]


def test_a_state_brings_weights_and_moments_back(run, tmp_path):
    policy, optimizer = run
    save(tmp_path, 1, run)
    _, state = trainer.newest(tmp_path)
    again = trainer.Policy(trainer.load_model(state / "model", CPU), bf16=False)
    other = trainer.make_optimizer(again, 1e-3, 0.0)
    trainer.load_optimizer(state, again, other)
    move(policy, optimizer)
    move(again, other)
    assert all(map(torch.equal, policy.parameters(), again.parameters()))


DAMAGE = {
    "optimizer gone": lambda state: (state / "optimizer.pt").unlink(),
    "optimizer cut": lambda state: os.truncate(state / "optimizer.pt", 100),
    "optimizer of zeros": lambda state: zero(state / "optimizer.pt"),
    "model gone": lambda state: shutil.rmtree(state / "model"),
    "weights gone": lambda state: (state / "model" / "model.safetensors").unlink(),
    "weights cut": lambda state: os.truncate(state / "model" / "model.safetensors", 5000),
    "weights of zeros": lambda state: zero(state / "model" / "model.safetensors"),
    "config gone": lambda state: (state / "model" / "config.json").unlink(),
    "config of zeros": lambda state: zero(state / "model" / "config.json"),
    "state.json gone": lambda state: (state / "state.json").unlink(),
    "state.json empty": lambda state: (state / "state.json").write_text(""),
    "state.json broken": lambda state: (state / "state.json").write_text('{"step": 2, "si'),
    "state.json a list": lambda state: (state / "state.json").write_text("[2]"),
    "state.json of another step": lambda state: other_step(state),
    "empty": lambda state: (shutil.rmtree(state), state.mkdir()),
}


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def other_step(state):
    description = json.loads((state / "state.json").read_text())
    (state / "state.json").write_text(json.dumps(description | {"step": 7}))


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_state_is_passed_over_for_the_older_whole_one(kind, run, tmp_path, capsys):
    save(tmp_path, 1, run)
    save(tmp_path, 2, run)
    DAMAGE[kind](tmp_path / "state" / "step_000002")
    assert trainer.newest(tmp_path) == (1, tmp_path / "state" / "step_000001")
    (line,) = capsys.readouterr().err.splitlines()
    assert "step_000002 is damaged" in line
    # The step is done again, and takes the damaged one's place.
    save(tmp_path, 2, run)
    assert trainer.newest(tmp_path)[0] == 2
    assert names(tmp_path) == ["step_000001", "step_000002"]
    assert capsys.readouterr().err == ""


def test_damaged_states_do_not_count_among_those_that_are_kept(run, tmp_path):
    for step in (1, 2):
        save(tmp_path, step, run)
    (tmp_path / "state" / "step_000002" / "optimizer.pt").unlink()
    save(tmp_path, 3, run)
    assert names(tmp_path) == ["step_000001", "step_000003"]


def test_stray_names_are_ignored(run, tmp_path):
    save(tmp_path, 1, run)
    states = tmp_path / "state"
    (states / "step_final").mkdir()
    (states / "step_000009.bak").mkdir()
    (states / "step_000010").write_text("a file")
    (states / "notes.txt").write_text("mine")
    shutil.copytree(states / "step_000001", states / ".writing")
    assert trainer.newest(tmp_path)[0] == 1
    for step in (2, 3):
        save(tmp_path, step, run)
    assert {"step_final", "step_000009.bak", "step_000010", "notes.txt"} < set(names(tmp_path))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["weights", "moments"])
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


# ---------------------------------------------------------------- ends in the middle


def calls_of_a_save(run, folder, monkeypatch) -> list[str]:
    """The names of the calls through which a save touches the disk, in order."""
    made = []
    with monkeypatch.context() as patch:
        for name, holder in TOUCHES.items():
            real = getattr(holder, name)

            def noted(*args, name=name, real=real, **options):
                made.append(name)
                return real(*args, **options)

            patch.setattr(holder, name, noted)
        save(folder, 2, run)
    return made


class Killed(BaseException):
    """As if the process had died: nothing after it runs but `finally`."""


TOUCHES = {
    "save": torch,
    "fsync": os,
    "replace": os,
    "rmtree": shutil,
    "damage": checkpoint,
    "sync_tree": checkpoint,
}


@pytest.mark.parametrize("again", [False, True], ids=["new step", "damaged step"])
def test_a_kill_between_any_two_touches_of_the_disk_leaves_a_whole_state(
    again, run, tmp_path, monkeypatch
):
    """The save is killed before its first touch, before its second, and so on."""

    def prepare(folder):
        save(folder, 0, run)
        save(folder, 1, run)
        if again:
            save(folder, 2, run)
            (folder / "state" / "step_000002" / "state.json").unlink()

    prepare(tmp_path / "whole")
    count = len(calls_of_a_save(run, tmp_path / "whole", monkeypatch))
    assert count > 12
    ends = set()
    for place in range(count):
        folder = tmp_path / str(place)
        prepare(folder)
        left = place

        def killed(*args, real, **options):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return real(*args, **options)

        with monkeypatch.context() as patch:
            for name, holder in TOUCHES.items():
                real = getattr(holder, name)
                patch.setattr(holder, name, lambda *a, real=real, **o: killed(*a, real=real, **o))
            with pytest.raises(Killed):
                save(folder, 2, run)
        step, state = trainer.newest(folder)
        ends.add(step)
        AutoModelForCausalLM.from_pretrained(state / "model")
        if not again:  # else checkpoint/ points at the damaged one until the new one stands
            AutoModelForCausalLM.from_pretrained(folder / "checkpoint")
        save(folder, 2, run)  # and the next start goes on
        assert trainer.newest(folder)[0] == 2
        assert names(folder) == ["step_000001", "step_000002"]
    assert ends == {1, 2}


def test_old_states_go_only_when_the_new_one_is_whole(run, tmp_path, monkeypatch):
    save(tmp_path, 1, run)
    real = checkpoint.remove_old

    def watched(states, keep):
        assert checkpoint.damage(states / "step_000002", 2) is None
        assert (states / "step_000001").exists()
        real(states, keep)

    monkeypatch.setattr(checkpoint, "remove_old", watched)
    save(tmp_path, 2, run, keep=1)
    assert names(tmp_path) == ["step_000002"]


def test_everything_is_fsynced_before_the_state_gets_its_name(run, tmp_path, monkeypatch):
    synced = []
    real_sync = checkpoint.sync
    real_replace = os.replace

    def replaced(source, target):
        if Path(source).name == checkpoint.WRITING:
            below = [p.name for p in Path(source).rglob("*")]
            assert set(below) <= set(synced)
            assert checkpoint.WRITING in synced
        real_replace(source, target)

    def sync(path):
        synced.append(path.name)
        real_sync(path)

    monkeypatch.setattr(checkpoint, "sync", sync)
    monkeypatch.setattr(os, "replace", replaced)
    save(tmp_path, 1, run)
    assert synced[-2:] == ["state", tmp_path.name]


FULL_DISK = """
    import resource, signal, sys
    from pathlib import Path
    import torch
    from helpers.tiny import Tokenizer, model
    import trainer
    from config import UserError

    policy = trainer.Policy(model("qwen3"), bf16=False)
    optimizer = trainer.make_optimizer(policy, 1e-3, 0.0)
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    folder = Path(sys.argv[1])
    trainer.save(folder, 1, policy, optimizer, Tokenizer())
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is an error
    for limit in 100, 40_000, 100_000:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            trainer.save(folder, 2, policy, optimizer, Tokenizer())
        except UserError as error:
            assert trainer.newest(folder)[0] == 1
            print(error)
"""


def test_a_disk_that_takes_no_more_is_one_sentence(tmp_path):
    """Files may be no longer than a limit: the config, the weights, the optimizer fail."""
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert "cannot write the state of step 2" in line
        assert "the former states are whole" in line
    assert names(tmp_path) == ["step_000001"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")


RANKS = """
    import os
    import sys
    from pathlib import Path
    import torch.distributed as dist
    from helpers.tiny import CPU, Tokenizer, model
    import trainer
    from config import UserError

    dist.init_process_group("gloo")
    policy = trainer.Policy(model("qwen3"), bf16=False)
    policy = trainer.parallel(policy, fsdp=False, device=CPU)
    optimizer = trainer.make_optimizer(policy, 1e-3, 0.0)
    if dist.get_rank() == 0:
        class Tokenizer:
            def save_pretrained(self, folder):
                raise OSError(28, "No space left on device")
    try:
        trainer.save(Path(sys.argv[1]), 1, policy, optimizer, Tokenizer())
    except UserError as error:
        assert "No space left" in str(error)
        dist.barrier()  # a peer that has gone would abort this process
        os._exit(7)
"""


def test_all_ranks_hear_that_the_first_could_not_write(tmp_path):
    """Else they would wait for it for two hours."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(RANKS))
    children = ranks.start(script, tmp_path)
    assert [child.wait(timeout=60) for child in children] == [7, 7]


def test_an_optimizer_that_does_not_fit_is_one_sentence(run, tmp_path):
    save(tmp_path, 1, run)
    other = trainer.Policy(model("llama"), bf16=False)
    optimizer = trainer.make_optimizer(other, 1e-3, 0.0)
    with pytest.raises(UserError, match="cannot take up the optimizer"):
        trainer.load_optimizer(tmp_path / "state" / "step_000001", other, optimizer)
