"""A role that the start's weights play: its model is kept with the run, for eval and ask."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch

import mars
from config import UserError
from plumbing import build, evaluation
from recipes import matpo
from trainer import checkpoint

SMALL = "--questions 8 --group 8 --steps 2 --save_every 1 --eval_questions 12 --eval_every 2"
SMALL += " --threads 1 --kv_tokens 16384 --warmup 1 --lr 3e-4"


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """runs/x of two steps at a rate that changes the weights much, with System 1 frozen."""
    folder = tmp_path_factory.mktemp("runs")
    start = folder / "start"
    shutil.copytree(base, start)
    line = ["--model", str(start), "--runs", str(folder / "runs"), "--name", "x", *SMALL.split()]
    assert mars.main([*line, "--system1", "frozen"]) == 0
    shutil.rmtree(start)  # an evaluation must not need it
    return folder / "runs" / "x"


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run that a test may change."""
    return shutil.copytree(trained, tmp_path / "runs" / "x", symlinks=True)


def evaluated(run: Path, *options: str) -> float:
    """The accuracy that `eval` says."""
    name = "_".join(options).replace("-", "") or "plain"
    runs = evaluation.run_of(run).parent
    line = ["eval", str(run), "--runs", str(runs), "--name", name, *options]
    assert mars.main(line) == 0
    return json.loads((runs / name / "table.json").read_text())[-1]["accuracy"]


@pytest.mark.parametrize("asked", ["", "checkpoint", "state/step_000002/model"])
def test_eval_plays_each_role_with_its_own_model(run, base, asked, monkeypatch):
    """Whatever folder of the run is named."""
    roles = []
    make = build.make_sampler
    monkeypatch.setattr(
        build,
        "make_sampler",
        lambda config, model, machine: roles.append(model) or make(config, model, machine),
    )
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert evaluated(run / asked) == last["eval_accuracy"]
    system2, system1 = (dict(model.named_parameters()) for model in roles)
    start = dict(build.trainer.load_model(base, "cpu", training=False).named_parameters())
    newest = dict(
        build.trainer.load_model(run / "checkpoint", "cpu", training=False).named_parameters()
    )
    assert all(torch.equal(system1[name], start[name]) for name in start)
    assert all(torch.equal(system2[name], newest[name]) for name in start)
    assert not all(torch.equal(start[name], newest[name]) for name in start)


def test_one_model_may_play_both_roles_all_the_same(run):
    shutil.rmtree(run / "frozen")
    assert evaluated(run, "--system1", "train") >= 0


def test_ask_plays_the_frozen_role(run, capsys):
    assert mars.main(["ask", str(run), "when was ada baker born ?"]) == 0
    assert "answer |" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["eval"], ["ask"]])
def test_a_run_without_its_frozen_model_says_what_to_do(run, command, capsys):
    shutil.rmtree(run / "frozen")
    question = ["who is ada ?"] if command == ["ask"] else []
    assert mars.main([*command, str(run), *question]) == 2
    said = capsys.readouterr().err
    assert f"{run}/frozen is missing" in said and "--system1 train" in said


def test_what_was_not_trained_frozen_is_not_evaluated_so(run, capsys):
    saved = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(saved | {"system1": "train"}))
    assert mars.main(["eval", str(run), "--system1", "frozen"]) == 2
    assert "was not trained with --system1 frozen: leave it out" in capsys.readouterr().err
    assert not list(run.parent.glob("eval-*"))


def test_a_run_called_frozen_is_no_frozen_run(run):
    assert evaluated(run, "--system1", "none") >= 0
    line = ["eval", str(run), "--runs", str(run.parent), "--name", "frozen"]
    assert mars.main(line) == 0


def test_the_frozen_model_is_copied_once_and_whole(run, base, monkeypatch):
    kept = {path: path.stat().st_mtime_ns for path in (run / "frozen").iterdir()}
    tokenizer = build.surroundings.load_tokenizer(base)
    checkpoint.keep_frozen(run, "nowhere", tokenizer)
    assert kept == {path: path.stat().st_mtime_ns for path in (run / "frozen").iterdir()}
    shutil.rmtree(run / "frozen")
    (run / ".writing").mkdir()
    (run / ".writing" / "half").write_text("of a copy that was killed")
    checkpoint.keep_frozen(run, base, tokenizer)
    assert sorted(path.name for path in (run / "frozen").iterdir()) == sorted(p.name for p in kept)
    assert not (run / ".writing").exists()


def test_a_full_disk_leaves_no_half_of_a_frozen_model(run, base, monkeypatch):
    shutil.rmtree(run / "frozen")

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "sync_tree", full)
    with pytest.raises(UserError, match="No space left on device.*go on with --resume"):
        checkpoint.keep_frozen(run, base, build.surroundings.load_tokenizer(base))
    assert not (run / "frozen").exists() and not (run / ".writing").exists()


def test_a_run_of_an_older_version_gets_its_frozen_model_when_it_goes_on(run, base):
    shutil.rmtree(run / "frozen")
    saved = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(saved | {"model": str(base)}))
    line = ["--model", str(base), "--runs", str(run.parent), "--name", "x", *SMALL.split()]
    line += ["--system1", "frozen", "--steps", "3", "--resume"]
    assert mars.main(line) == 0
    assert (run / "frozen" / "config.json").exists()


def test_with_adapters_the_frozen_model_is_the_start(base, tmp_path):
    line = ["--model", str(base), "--runs", str(tmp_path), "--name", "x", *SMALL.split()]
    assert mars.main([*line, "--system1", "frozen", "--lora_rank", "4"]) == 0
    last = json.loads((tmp_path / "x" / "metrics.jsonl").read_text().splitlines()[-1])
    assert evaluated(tmp_path / "x") == last["eval_accuracy"]


def test_matpos_frozen_workers_are_evaluated_too(base, tmp_path, capsys):
    line = ["--model", str(base), "--runs", str(tmp_path), "--name", "x", *SMALL.split()]
    assert matpo.main([*line, "--workers", "frozen"]) == 0
    assert matpo.main(["eval", str(tmp_path / "x"), "--runs", str(tmp_path)]) == 0
    shutil.rmtree(tmp_path / "x" / "frozen")
    assert matpo.main(["eval", str(tmp_path / "x"), "--runs", str(tmp_path)]) == 2
    assert "--workers train" in capsys.readouterr().err


def test_frozen_is_asked_for_by_the_option_that_means_it(run):
    config = mars.MarsConfig(name="frozen", system1="frozen")
    assert evaluation.frozen_model(config, run) == run / "frozen"
