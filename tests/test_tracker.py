"""Trackers: the real packages where they are installed, and stand-ins for what goes wrong."""

import json
import sys
import types

import pytest

from config import Config, UserError
from plumbing import tracker

LINE = {"step": 0, "reward": 0.25, "judge_failures": 0, "sys1_entropy": None, "loss": float("nan")}


def line(step):
    return {**LINE, "step": step, "reward": step / 4}


def keep(folder, steps):
    """metrics.jsonl, as a run leaves it."""
    lines = [json.dumps({"step": step}) + "\n" for step in steps]
    (folder / "metrics.jsonl").write_text("".join(lines))


class Service:
    """A stand-in for trackio and wandb that fails from step `fails` on."""

    def __init__(self, fails=99):
        self.fails = fails
        self.opened = []
        self.sent = []
        self.calls = 0

    def init(self, **options):
        self.opened.append(options)
        return self

    def log(self, numbers, step):
        self.calls += 1
        if step >= self.fails:
            raise ConnectionError("the network is away\nand more")
        self.sent.append((step, numbers))

    def finish(self):
        self.calls += 1


def put(monkeypatch, name, service):
    module = types.ModuleType(name)
    module.init = service.init
    monkeypatch.setitem(sys.modules, name, module)


def start(name, folder, first=0):
    return tracker.start(Config(name="toy", track=name), "mars", folder, first)


# -------------------------------------------------------------------------- what is not installed


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_missing_package_is_one_sentence_with_its_install_line(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(UserError, match=f"^--track {name} needs its package: pip install {name}$"):
        tracker.library(name)


def test_a_package_that_breaks_on_import_is_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "wandb.py").write_text("raise RuntimeError('an old protobuf')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="^--track wandb: its package breaks .*an old protobuf"):
        tracker.library("wandb")


def test_a_package_that_ends_the_program_only_ends_itself(monkeypatch, tmp_path, capsys):
    def leave(*_):
        raise SystemExit(3)

    broken = tracker.Tracker("wandb", leave, leave)
    broken.log({"step": 0, "reward": 1.0})
    assert broken.failed and "the run goes on without it" in capsys.readouterr().out
    monkeypatch.setattr(tracker, "library", lambda name: lambda **options: leave())
    with pytest.raises(UserError, match="--track wandb cannot start"):
        tracker.start(Config(name="toy", track="wandb"), "mars", tmp_path, 0)


def test_a_folder_of_the_name_is_no_package(monkeypatch):
    """wandb leaves a folder of its name where it runs, and Python imports folders."""
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    with pytest.raises(UserError, match="pip install wandb"):
        tracker.library("wandb")


def test_nothing_is_tracked_unless_asked(tmp_path):
    assert start("none", tmp_path) is None
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------- what goes wrong


def test_only_numbers_are_sent(monkeypatch, tmp_path):
    service = Service()
    put(monkeypatch, "trackio", service)
    run = start("trackio", tmp_path)
    run.log(line(3))
    run.close()
    assert service.sent == [(3, {"reward": 0.75, "judge_failures": 0})]
    (options,) = service.opened
    assert options["project"] == "mars" and options["name"].startswith("toy-")
    assert options["config"]["track"] == "trackio"


def test_a_tracker_that_fails_is_left_with_one_sentence(monkeypatch, tmp_path, capsys):
    service = Service(fails=2)
    put(monkeypatch, "wandb", service)
    run = start("wandb", tmp_path)
    for step in range(5):
        run.log(line(step))
    run.close()
    assert [step for step, _ in service.sent] == [0, 1]
    assert service.calls == 3, "after its first failure it is called no more"
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "--track wandb failed (the network is away): the run goes on without it" in said


def test_a_tracker_that_fails_to_end_fails_alone(monkeypatch, tmp_path, capsys):
    service = Service()
    monkeypatch.setattr(service, "finish", lambda: 1 / 0)
    put(monkeypatch, "trackio", service)
    start("trackio", tmp_path).close()
    assert "--track trackio failed (division by zero)" in capsys.readouterr().out


def test_a_tracker_that_cannot_start_stops_the_run_before_its_first_step(monkeypatch, tmp_path):
    def init(**options):
        raise RuntimeError("no API key\nlong advice")

    module = types.ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(UserError, match=r"--track wandb cannot start \(no API key\); mend that or"):
        start("wandb", tmp_path)
    assert not list(tmp_path.iterdir()), "the folder stays free for the next try"


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_resumed_run_goes_on_in_the_same_tracker_run(monkeypatch, tmp_path, name):
    service = Service()
    put(monkeypatch, name, service)
    run = start(name, tmp_path)
    for step in range(4):
        run.log(line(step))
    keep(tmp_path, range(4))  # killed after 4 steps; the last state is that of 2
    run = start(name, tmp_path, first=2)
    for step in range(2, 6):
        run.log(line(step))
    assert [step for step, _ in service.sent] == [0, 1, 2, 3, 4, 5]
    assert [options["resume"] for options in service.opened] == ["allow", "allow"]
    assert service.opened[0]["name"] == service.opened[1]["name"]
    assert (name == "wandb") == (service.opened[1].get("id") == service.opened[0]["name"])
    # Another folder of the same name, such as after the first was removed, is another run.
    other = tmp_path / "other"
    other.mkdir()
    start(name, other)
    assert service.opened[2]["name"] != service.opened[0]["name"]


# ------------------------------------------------------------------------------- the real packages


def test_tensorboard(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = start("tensorboard", tmp_path)
    for step in range(4):
        run.log(line(step))
    read = events.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert len(read.Scalars("reward")) == 4, "a kill costs no step, though nothing was closed"
    again = start("tensorboard", tmp_path, first=2)
    for step in range(2, 6):
        again.log({**line(step), "reward": -step})
    again.close()
    assert not again.failed
    read = events.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert set(read.Tags()["scalars"]) == {"reward", "judge_failures"}
    values = [(event.step, event.value) for event in read.Scalars("reward")]
    assert values == [(0, 0.0), (1, 0.25), (2, -2.0), (3, -3.0), (4, -4.0), (5, -5.0)]


def test_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "kept"))
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    run = start("trackio", tmp_path)
    for step in range(4):
        run.log(line(step))
    run.close()
    keep(tmp_path, range(4))
    again = start("trackio", tmp_path, first=2)
    for step in range(2, 6):
        again.log(line(step))
    again.close()
    assert not (run.failed or again.failed)
    name = json.loads((tmp_path / "tracker.json").read_text())["name"]
    kept = storage.get_logs("mars", name)
    assert [(one["step"], one["reward"]) for one in kept] == [(i, i / 4) for i in range(6)]
    assert "sys1_entropy" not in kept[0] and "loss" not in kept[0]
