"""The bench of the atlas: each command once, every one accepted, and a table of what they wrote."""

import argparse
import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from test_documented_commands import accept  # noqa: F401

from bench import ablations, atlas, common
from config import UserError

ENDING = {"commit": "abc", "cpu": "a CPU", "date": "today"}
PARTS = ("one", "two", "all")


def part(name: str) -> dict:
    """A line of an evaluation's table."""
    shares = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "calls": 1.5, "malformed": 0.1}
    return {"set": name, "questions": 20, **shares, "sys2_tokens": 80.0, "sys1_tokens": 60.0}


def made(folder: Path, line: list[str]) -> None:
    """What a command leaves behind, as far as the bench reads it."""
    folder.mkdir(exist_ok=True)
    folder.with_name(f"{folder.name}.log").write_text(f"written to {folder}\n")
    if "eval" in line or "closed" in line:
        (folder / "table.json").write_text(json.dumps([part(name) for name in PARTS]))
        (folder / "trajectories.html").write_text(f"a page in {folder}")
        return
    config = {"model": "cache/warm/atlas", "preset": "atlas", "bf16": "on", "threads": 2}
    config |= {"steps": 3, "eval_questions": 20, "temperature": 0.7, "runs": str(folder.parent)}
    (folder / "config.json").write_text(json.dumps(config))
    scores = {"eval_step": 3, "eval_accuracy": 0.35, "eval_greedy": 0.9}
    seconds = {"seconds_rollout": 2.0, "seconds_train": 3.0}
    lines = [{"step": step, "reward": 0.5, **seconds} for step in range(3)]
    lines[-1] |= {"seconds_eval": 1.0, **scores}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "curves.png").write_bytes(b"a picture")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """(the options, the commands that were run)"""
    commands = []

    def pool(given, folder, jobs, on_end):
        ((name, line),) = given
        commands.append(line)
        made(folder / name, line)
        on_end(ablations.Ended(name, 0, 7.0, ENDING))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(atlas, "pool", pool)
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    Path("runs").mkdir()
    options = {
        "seeds": [0],
        "runs": Path("runs"),
        "cache": Path("cache"),
        "failed": [],
    }
    options["more"] = ["--bf16", "on", "--eval_questions", "20"]
    return argparse.Namespace(**options), commands


def go(options):
    atlas.train(0, "rl", options)
    atlas.evaluate(0, options)
    atlas.train(0, "frozen", options)


def test_every_command_is_run_once_and_accepted(bench, accept):  # noqa: F811
    options, commands = bench
    Path("runs").mkdir(exist_ok=True)
    go(options)
    assert len(commands) == 2 + len(atlas.MODELS) * len(atlas.DECODING)
    asked = [accept(f"python {shlex.join(line)}") for line in commands]
    assert [config.temperature for config in asked[1:-1]] == [0.7, 0.0] * len(atlas.MODELS)
    assert [config.eval_questions for config in asked] == [20, *[200] * (len(asked) - 1)]
    assert {config.bf16 for config in asked[:-1]} >= {"on"}
    assert [config.model for config in asked[1:-1:2]] == [
        "runs/rl-0",
        "cache/warm/atlas",
        "smollm2",
        "smollm2",
    ]
    assert asked[-1].system1 == "frozen"
    go(options)
    assert len(commands) == len(asked)


def test_a_seed_that_is_given_twice_runs_once(bench, monkeypatch):
    options, commands = bench
    arguments = ["bench.atlas", "--seeds", "1", "1", "--runs", "runs", "--cache", "cache"]
    monkeypatch.setattr(atlas.sys, "argv", arguments)
    assert atlas.main() == 0
    record = json.loads((common.RESULTS / "atlas" / "table.json").read_text())
    rows = [(row["seed"], row["model"], row["decoding"]) for row in record["rows"]]
    assert len(rows) == len(set(rows)) == len(atlas.MODELS) * len(atlas.DECODING)


@pytest.mark.parametrize("arm", atlas.ARMS)
def test_an_arm_changes_what_it_says_and_has_a_row(bench, accept, arm, monkeypatch):  # noqa: F811
    _, commands = bench
    arguments = f"bench.atlas --arms {arm} --runs runs --cache cache --eval_questions 20"
    monkeypatch.setattr(atlas.sys, "argv", arguments.split())
    assert atlas.main() == 0
    names = [line[line.index("--name") + 1] for line in commands]
    lines = [commands[names.index(name)] for name in ("rl-0", f"{arm}-0")]
    plain, changed = (accept(f"python {shlex.join(line)}") for line in lines)
    differing = {
        field.name
        for field in dataclasses.fields(plain)
        if getattr(plain, field.name) != getattr(changed, field.name)
    }
    itself = {"eval_every", "eval_questions"} if arm == "frozen" else set()
    assert differing >= itself | {"name"}
    assert len(differing - itself) - 1 == (2 if arm == "balance-advantage" else 1)
    record = json.loads((common.RESULTS / "atlas" / "table.json").read_text())
    name = f"after RL, {atlas.ARMS[arm][1]}"
    told = [row for row in record["rows"] if row["model"] == name]
    assert [row["decoding"] for row in told] == ["sampled", "greedy"]
    kinds = ["all"] if arm == "frozen" else list(PARTS)
    assert [part["set"] for part in told[0]["sets"]] == kinds
    assert atlas.main() == 0
    assert len(commands) == len(names)  # all is there


def test_an_arm_is_evaluated_by_itself(bench, accept, monkeypatch):  # noqa: F811
    _, commands = bench
    arguments = "bench.atlas --arms no-purpose inherited --runs runs --cache cache"
    monkeypatch.setattr(atlas.sys, "argv", arguments.split())
    assert atlas.main() == 0
    for arm, asked in (("no-purpose", commands[-5:-3]), ("inherited", commands[-2:])):
        run = str(Path.cwd() / "runs" / f"{arm}-0")
        assert [line[line.index("eval") + 1] for line in asked] == [run, run]
        configs = [accept(f"python {shlex.join(line)}") for line in asked]
        assert [config.temperature for config in configs] == [0.7, 0.0]
        assert [config.eval_questions for config in configs] == [200, 200]


def test_an_arm_that_failed_is_not_evaluated(bench, monkeypatch):
    options, commands = bench
    atlas.train(0, "inherited", options)
    record = Path("runs/inherited-0.run.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"exit": 2}))
    atlas.evaluate_arm(0, "inherited", options)
    assert len(commands) == 1


def test_a_frozen_run_asks_no_more_questions_than_there_are(bench):
    options, commands = bench
    go(options)
    config = json.loads(Path("runs/frozen-0/config.json").read_text()) | {"eval_questions": 500}
    Path("runs/frozen-0/config.json").write_text(json.dumps(config))
    rows = atlas.summarise(0, options)
    assert [row["sets"][0]["questions"] for row in rows if "frozen" in row["model"]] == [200, 200]


def test_what_nobody_taught_is_asked_once(bench):
    options, commands = bench
    options.seeds = [0, 1]
    for seed in options.seeds:
        atlas.train(seed, "rl", options)
        atlas.evaluate(seed, options)
    asked = [line for line in commands if "smollm2" in line]
    assert len(asked) == 2 * len(atlas.DECODING)
    assert all(line[line.index("--seed") + 1] == "0" for line in asked)


def test_seeds_are_pooled_by_their_questions():
    def row(seed, right, questions):
        part = {"set": "all", "questions": questions, "accuracy": right / questions}
        return {"seed": seed, "model": "after RL", "decoding": "greedy", "sets": [part]}

    alone = row(0, 5, 10) | {"model": "untaught"}
    (made,) = atlas.pooled([alone, row(0, 150, 200), row(1, 30, 100)])
    (part,) = made["sets"]
    assert made["seed"] == "all" and made["model"] == "after RL"
    assert part["questions"] == 300 and part["accuracy"] == 0.6
    assert part["low"] == pytest.approx(0.544, abs=1e-3)
    assert part["high"] == pytest.approx(0.654, abs=1e-3)


def test_a_cut_run_is_resumed(bench):
    options, commands = bench
    atlas.train(0, "rl", options)
    metrics = Path("runs/rl-0/metrics.jsonl")
    metrics.write_text(metrics.read_text().splitlines()[0] + "\n")
    atlas.train(0, "rl", options)
    assert "--resume" not in commands[0] and "--resume" in commands[1]


def test_the_table_has_intervals_and_no_place_of_this_machine(bench, tmp_path, capsys):
    options, _ = bench
    go(options)
    options.runs, options.cache = tmp_path / "runs", tmp_path / "cache"
    record = json.loads(atlas.keep(options).read_text())
    assert "50.0% (40.0%–60.0%)" in capsys.readouterr().out
    frozen = [row["sets"][0] for row in record["rows"] if "frozen" in row["model"]]
    assert [row["accuracy"] for row in frozen] == [0.35, 0.9]
    assert frozen[1]["low"] == pytest.approx(0.699, abs=1e-3)
    assert [run["seconds_of_steps"] for run in record["runs"]] == [16.0, 16.0]
    kept = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert len(kept) == 2 + 2 * 3 + 2  # table, figure; two runs; the first one's curves and page
    assert (tmp_path / "results" / "atlas" / "rl-0" / "trajectories.html").exists()
    for path in kept:
        assert str(tmp_path).encode() not in path.read_bytes(), path


def test_only_the_first_seed_keeps_its_curves_and_page(bench, tmp_path):
    """They are large, and a repository has to hold them."""
    options, _ = bench
    options.seeds = [1, 0]
    for seed in options.seeds:
        atlas.train(seed, "rl", options)
        atlas.evaluate(seed, options)
    atlas.keep(options)
    for name in ("trajectories.html", "curves.png"):
        kept = (tmp_path / "results").rglob(name)
        assert [path.parent.name for path in kept] == ["rl-1"]


def test_the_figure_shows_the_rows(bench):
    options, _ = bench
    go(options)
    rows = atlas.summarise(0, options)
    for row in rows:
        part = row["sets"][-1]
        if (row["model"], row["decoding"]) == ("after RL", "greedy"):
            part |= {"accuracy": 0.8, "low": 0.7, "high": 0.95}
    ax = Figure().subplots()
    atlas.plot_pair(ax, rows, 0, "greedy", 0.0, "C0")
    (drawn,) = ax.containers
    points, _, (bars,) = drawn.lines
    assert points.get_ydata().tolist() == [0.5, 0.8]
    ends = [[end for _, end in bar] for bar in bars.get_segments()]
    assert ends == [pytest.approx([0.4, 0.6]), pytest.approx([0.7, 0.95])]


def test_half_an_evaluation_is_made_again(bench):
    """It was cut after its table, or before it; how it ended was never written."""
    options, commands = bench
    go(options)
    count = len(commands)
    Path("runs/after-RL-greedy-0.run.json").unlink()
    Path("runs/warm-start-sampled-0/table.json").unlink()
    go(options)
    again = [line[line.index("--name") + 1] for line in commands[count:]]
    assert again == ["after-RL-greedy-0", "warm-start-sampled-0"]
    assert atlas.keep(options).exists()


@pytest.mark.parametrize("name", ["rl-0", "warm-start-greedy-0"])
def test_what_failed_is_not_taken_for_finished(bench, name):
    """Though its files are there: a disk may be full at the last one."""
    options, commands = bench
    go(options)
    count = len(commands)
    record = Path(f"runs/{name}.run.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"exit": 2}))
    table = json.loads(atlas.keep(options).read_text())
    told = {run["run"] for run in table["runs"]}
    told |= {f"{row['model'].replace(' ', '-')}-{row['decoding']}-0" for row in table["rows"]}
    assert name not in told and len(told) > 5
    go(options)
    assert [line[line.index("--name") + 1] for line in commands[count:]] == [name]
    assert json.loads(record.read_text())["exit"] == 0


def test_a_failure_is_told_at_the_end(bench, monkeypatch, capsys):
    options, _ = bench
    go(options)
    monkeypatch.setattr(
        atlas, "evaluate", lambda seed, options: options.failed.append("after-RL-greedy-0")
    )
    arguments = ["bench.atlas", "--runs", str(options.runs), "--cache", str(options.cache)]
    monkeypatch.setattr(atlas.sys, "argv", arguments)
    assert atlas.main() == 2
    assert "failed: after-RL-greedy-0; see the logs in" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["--seed 5", "--seed=5", "--name x", "--resume", "--model x"])
def test_options_that_are_the_benchs_own_are_refused(given, monkeypatch, capsys):
    monkeypatch.setattr(atlas.sys, "argv", ["bench.atlas", *given.split()])
    assert atlas.main() == 2
    assert f"{re.split('[ =]', given)[0]} is this bench's own" in capsys.readouterr().err


def test_two_benches_in_one_folder_are_refused(bench, monkeypatch, capsys):
    options, commands = bench
    monkeypatch.setattr(atlas.sys, "argv", ["bench.atlas", "--runs", "runs", "--cache", "cache"])
    with ablations.alone_in(options.runs):
        assert atlas.main() == 2
    assert "another bench is at work" in capsys.readouterr().err and not commands


def test_a_seed_that_has_not_run_is_left_out(bench):
    options, _ = bench
    go(options)
    options.seeds = [3, 0]
    rows = json.loads(atlas.keep(options).read_text())["rows"]
    assert {row["seed"] for row in rows} == {0}


def test_nothing_to_tabulate_is_one_sentence(bench):
    options, _ = bench
    with pytest.raises(UserError, match="nothing was evaluated"):
        atlas.keep(options)


# ---------------------------------------------------------------- what was measured

REPO = Path(__file__).parent.parent
MEASURED = REPO / "bench" / "results" / "atlas"


def test_the_page_tells_what_was_measured():
    """Every accuracy of the kept table stands on the page, with its interval."""
    page = (REPO / "docs" / "atlas.md").read_text()
    rows = json.loads((MEASURED / "table.json").read_text())["rows"]
    assert "after RL" in {row["model"] for row in rows}
    for row in rows:
        for line in row["sets"]:
            share, low, high = (round(100 * line[key]) for key in ("accuracy", "low", "high"))
            assert f"{share} ({low}–{high})" in page, (row["model"], row["decoding"], line["set"])


def test_what_is_kept_is_small_and_of_no_machine():
    files = [path for path in MEASURED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_000_000
    for path in files:
        assert b"/tmp/" not in path.read_bytes(), path
