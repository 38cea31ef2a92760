"""The model that a run began with is kept with it: for frozen roles, adapters and the KL term."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from test_mars import SMALL, half, metrics
from test_mars import run as command

import train
from plumbing import models, start
from sampler import Sampler
from trainer import load_model

FROZEN = ["--system1", "frozen", "--kl_beta", "0.01", "--inner_steps", "1"]


update, load = train.update, Sampler.load_weights


def watched_update(run, *rest):
    """Each sampler lends its pool to the update and forgets its pages, also of the frozen role.

    Else a resumed run would have other bits.
    """
    trained, frozen = run.driver.samplers
    assert trained.pool is frozen.pool is None
    assert not frozen.pages.known
    return update(run, *rest)


def watched_load(self, model):
    """No gradient is left when the sampler makes its pool again."""
    assert all(parameter.grad is None for parameter in model.parameters())
    load(self, model)


@pytest.fixture(scope="module")
def trained(base, products_by, tmp_path_factory):
    """runs/x of two steps with System 1 frozen."""
    folder = tmp_path_factory.mktemp("runs")
    begin = shutil.copytree(base, folder / "start")
    line = ["--model", begin, "--runs", folder / "runs", "--name", "x", "--steps", 2, *SMALL]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "update", watched_update)
        patch.setattr(Sampler, "load_weights", watched_load)
        assert command(*line, *FROZEN, grade=half) == 0
    one, two = metrics(folder / "runs" / "x")
    assert one["kl"] == 0 < two["kl"], "the reference is the start, not the policy"
    shutil.rmtree(begin)  # an evaluation must not need it
    return folder / "runs" / "x"


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run that a test may change."""
    return shutil.copytree(trained, tmp_path / "runs" / "x", symlinks=True)


@pytest.fixture
def played(monkeypatch):
    """The models that samplers are made of: the trained role's, then the frozen role's."""
    models = []
    make = start.make_sampler

    def note(config, model, machine):
        models.append(model)
        return make(config, model, machine)

    monkeypatch.setattr(start, "make_sampler", note)
    return models


def same(model, folder: Path) -> bool:
    """Whether a model has the weights that lie in a folder."""
    weights = dict(load_model(folder, "cpu").named_parameters())
    return all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters())


@pytest.mark.parametrize("asked", ["", "best", "state/step_000002/model"])
def test_an_evaluation_plays_each_role_with_its_own_model(run, base, asked, played):
    """Whatever folder of the run is named."""
    assert command("eval", run / asked, "--runs", run.parent, "--name", "eval", grade=half) == 0
    system2, system1 = played
    assert same(system1, base) and same(system2, run / "checkpoint") and not same(system2, base)
    (run.parent / "link").symlink_to(run / "checkpoint")
    assert models.run_of(run.parent / "link") == run, "by where it lies, not by its name"
    assert models.run_of(run / "frozen") is None, "it is what the run began with"
    table = json.loads((run.parent / "eval" / "table.json").read_text())
    assert table[-1]["accuracy"] == metrics(run)[-1]["eval_accuracy"]


def test_a_run_without_its_frozen_model_says_what_to_do(run, base, played, capsys):
    """The trained model may play both roles."""
    assert command("ask", run, "when was ada baker born ?") == 0
    system2, system1 = played
    assert same(system1, base) and same(system2, run / "checkpoint")
    shutil.rmtree(run / "frozen")
    for line in (["eval", run], ["ask", run, "who is ada ?"]):
        assert command(*line) == 2
        assert f"{run}/frozen is missing" in capsys.readouterr().err
    played.clear()
    assert command("eval", run, "--runs", run.parent, "--system1", "train") == 0
    (both,) = played
    assert same(both, run / "checkpoint")
    (run / "frozen").symlink_to("nowhere")
    logs = [run / "metrics.jsonl", *(run / "rollouts").iterdir()]
    before = [path.read_bytes() for path in logs]
    assert resume(run, run / "nowhere", 3) == 2 and "frozen" in capsys.readouterr().err
    assert before == [path.read_bytes() for path in logs], "it is told before anything is changed"


def resume(run: Path, begin: Path, steps: int) -> int:
    """It goes on from a start that lies elsewhere by now; the exit code."""
    saved = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(saved | {"model": str(begin)}))
    line = ["--model", begin, "--runs", run.parent, "--name", "x", "--steps", steps, *SMALL]
    return command(*line, *FROZEN, "--resume", grade=half)


@pytest.mark.parametrize("states", [True, False], ids=["with a state", "before its first state"])
def test_a_resumed_run_goes_on_with_its_own_frozen_model(run, base, played, states):
    """Not with what the start has become, or although it is gone, as after a kill at first."""
    if not states:
        shutil.rmtree(run / "state")
        (run / "checkpoint").unlink()
    start, steps = (run / "checkpoint", 3) if states else (run / "nowhere", 1)
    assert resume(run, start, steps) == 0
    _, system1 = played
    assert same(system1, base)
    assert [line["step"] for line in metrics(run)] == [*range(steps)]


@pytest.mark.parametrize(
    "products_by, options",
    [
        ("products by oneDNN", "--lora_rank 4"),
        ("products by PyTorch", "--kl_beta 0.05"),
        ("products by PyTorch", ""),
    ],
    indirect=["products_by"],
)
def test_a_resumed_run_needs_no_start(products_by, options, base, tmp_path):
    """Adapters and the KL term go on beside what the run began with; else --model may be gone."""
    begin = shutil.copytree(base, tmp_path / "start")
    line = ["--model", begin, "--name", "x", "--steps", 2, *SMALL, *options.split(), "--lr", 1e-3]
    line += ["--eval_every", 1, "--eval_questions", 2]
    assert command(*line, "--runs", tmp_path / "whole", grade=half) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "cut", symlinks=True)
    shutil.rmtree(tmp_path / "cut/x/state/step_000002")
    other = load_model(begin, "cpu")
    shutil.rmtree(begin)
    if options:
        with torch.no_grad():
            other.model.layers[0].mlp.down_proj.weight.neg_()
        shutil.copytree(base, begin)
        other.save_pretrained(begin)
    assert command(*line, "--runs", tmp_path / "cut", "--resume", grade=half) == 0
    assert metrics(tmp_path / "cut/x") == metrics(tmp_path / "whole/x")
    assert same(load_model(tmp_path / "cut/x/checkpoint", "cpu"), tmp_path / "whole/x/checkpoint")
