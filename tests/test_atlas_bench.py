"""The bench of the atlas: each command once, every one accepted, and a table of what they wrote."""

import argparse
import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from test_documented_commands import accept  # noqa: F401

from bench import ablations, atlas, common
from config import UserError, resolve
from plumbing import files
from recipes.atlas import PRESETS, AtlasConfig

MORE = "--bf16 on --eval_questions 20 --steps 3 --temperature 0.7".split()
ENDING = {"commit": "abc", "cpu": "a CPU", "date": "today"}
PARTS = ("one", "two", "all")


def part(name: str, accuracy: float = 0.5) -> dict:
    """A line of an evaluation's table."""
    shares = {"accuracy": accuracy, "low": 0.4, "high": 0.6, "calls": 1.5, "malformed": 0.1}
    return {"set": name, "questions": 20, **shares, "sys2_tokens": 80.0, "sys1_tokens": 60.0}


def answers(folder: Path, right: range) -> None:
    """An evaluation's rollouts and table, as far as the bench reads them.

    right: numbers of the questions with right answers.
    """
    table = [part(name, len(right) / 20) for name in PARTS]
    (folder / "table.json").write_text(json.dumps(table))
    records = [{"question_id": f"q{n}", "reward": float(n in right)} for n in range(20)]
    (folder / "rollouts").mkdir(exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "rollouts" / "step_0.jsonl").write_text(lines)


def made(folder: Path, line: list[str]) -> None:
    """What a command leaves behind, as far as the bench reads it."""
    folder.mkdir(exist_ok=True)
    folder.with_name(f"{folder.name}.log").write_text(f"written to {folder}\n")
    if "eval" in line or "closed" in line:
        (folder / "trajectories.html").write_text(f"a page in {folder}")
        answers(folder, range(0, 20, 2))
        return
    given = {"preset": "atlas"} | atlas.typed(line[2:])
    config = resolve(AtlasConfig, given, presets=PRESETS)
    config.model = "cache/warm/atlas"
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    seconds = {"seconds_rollout": 2.0, "seconds_train": 3.0}
    lines = [{"step": step, "reward": 0.5, **seconds} for step in range(config.steps)]
    lines[-1] |= {"seconds_eval": 1.0, "eval_step": config.steps}
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
    return argparse.Namespace(**options, more=MORE, arms=[], table=False, results=None), commands


def go(options):
    atlas.train(0, "rl", options)
    atlas.evaluate(0, options)
    atlas.train(0, "frozen", options)
    atlas.evaluate_arm(0, "frozen", options)


def test_every_command_is_run_once_and_accepted(bench, accept):  # noqa: F811
    options, commands = bench
    Path("runs").mkdir(exist_ok=True)
    go(options)
    assert len(commands) == 2 + (len(atlas.MODELS) + 1) * len(atlas.DECODING)
    asked = [accept(f"python {shlex.join(line)}") for line in commands]
    assert [config.temperature for config in asked[1:-3]] == [0.7, 0.0] * len(atlas.MODELS)
    evaluations = asked[1:-3] + asked[-2:]
    assert {config.eval_questions for config in evaluations} == {200}
    assert [config.eval_questions for config in (asked[0], asked[-3])] == [20, 20]
    assert {config.bf16 for config in asked} >= {"on"}
    assert [config.model for config in asked[1:-3:2]] == [
        "runs/rl-0",
        "cache/warm/atlas",
        "smollm2",
        "smollm2",
    ]
    assert asked[-3].system1 == "frozen"
    assert [config.model for config in asked[-2:]] == ["runs/frozen-0"] * 2
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
    arguments = f"bench.atlas --arms {arm} --runs runs --cache cache"
    monkeypatch.setattr(atlas.sys, "argv", arguments.split() + MORE)
    assert atlas.main() == 0
    names = [line[line.index("--name") + 1] for line in commands]
    lines = [commands[names.index(name)] for name in ("rl-0", f"{arm}-0")]
    plain, changed = (accept(f"python {shlex.join(line)}") for line in lines)
    differing = {
        field.name
        for field in dataclasses.fields(plain)
        if getattr(plain, field.name) != getattr(changed, field.name)
    }
    assert "name" in differing
    assert len(differing) - 1 == (2 if arm == "balance-advantage" else 1)
    record = json.loads((common.RESULTS / "atlas" / "table.json").read_text())
    name = f"after RL, {atlas.ARMS[arm][1]}"
    told = [row for row in record["rows"] if row["model"] == name]
    assert [row["decoding"] for row in told] == ["sampled", "greedy"]
    assert [part["set"] for part in told[0]["sets"]] == list(PARTS)
    assert atlas.main() == 0
    assert len(commands) == len(names)  # all is there


def test_an_arm_is_evaluated_by_itself(bench, accept, monkeypatch):  # noqa: F811
    _, commands = bench
    arguments = "bench.atlas --arms no-purpose inherited --runs runs --cache cache"
    monkeypatch.setattr(atlas.sys, "argv", arguments.split() + MORE)
    assert atlas.main() == 0
    runs = Path.cwd() / "runs"
    start = "cache/warm/atlas"
    for model, asked in (
        (f"{runs}/no-purpose-0", commands[-7:-5]),
        (start, commands[-5:-3]),
        (f"{runs}/inherited-0", commands[-2:]),
    ):
        assert [line[line.index("eval") + 1] for line in asked] == [model, model]
        configs = [accept(f"python {shlex.join(line)}") for line in asked]
        assert [config.temperature for config in configs] == [0.7, 0.0]
        assert [config.eval_questions for config in configs] == [200, 200]
        assert {config.purpose for config in configs} == {model != start}
    record = json.loads((common.RESULTS / "atlas" / "table.json").read_text())
    changes = {row["model"]: row["change"]["from"] for row in record["rows"] if "change" in row}
    assert changes["warm start, no purpose"] == "warm start"
    assert changes["after RL, no purpose"] == "after RL"


def test_results_may_be_kept_beside_the_presets(bench, monkeypatch, capsys):
    arguments = "bench.atlas --runs runs --cache cache --results atlas-arms".split()
    monkeypatch.setattr(atlas.sys, "argv", arguments + MORE)
    assert atlas.main() == 0
    assert [path.name for path in common.RESULTS.iterdir()] == ["atlas-arms"]
    record = json.loads((common.RESULTS / "atlas-arms" / "table.json").read_text())
    assert "--results atlas-arms" in record["command"]
    assert (common.RESULTS / "atlas-arms" / "rl-0" / "metrics.jsonl").exists()
    for wrong in ("", "..", "a/b", "-a"):
        monkeypatch.setattr(atlas.sys, "argv", [*arguments[:-2], f"--results={wrong}", *MORE])
        assert atlas.main() == 2
        assert "plain name" in capsys.readouterr().err


def test_an_arm_that_failed_is_not_evaluated(bench, monkeypatch):
    options, commands = bench
    atlas.train(0, "inherited", options)
    record = Path("runs/inherited-0.run.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"exit": 2}))
    atlas.evaluate_arm(0, "inherited", options)
    assert len(commands) == 1


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
    other = row(1, 30, 100)
    other["sets"][0]["set"] = "one"
    with pytest.raises(UserError, match="after RL, greedy: the seeds were asked different sets"):
        atlas.pooled([row(0, 150, 200), other])


def test_models_are_compared_question_by_question(bench):
    options, _ = bench
    arms = ("inherited", "sample-mean", "balance-advantage")
    go(options)
    for arm in arms:
        atlas.train(0, arm, options)
        atlas.evaluate_arm(0, arm, options)
    answers(Path("runs/warm-start-sampled-0"), range(4))
    answers(Path("runs/after-RL-sampled-0"), range(1, 10))
    answers(Path("runs/after-frozen-sampled-0"), range(3, 10))
    answers(Path("runs/after-inherited-sampled-0"), range(1, 10))
    answers(Path("runs/after-sample-mean-sampled-0"), range(8))
    answers(Path("runs/after-balance-advantage-sampled-0"), range(2, 8))
    rows = {
        row["model"]: row for row in atlas.summarise(0, options) if row["decoding"] == "sampled"
    }
    changes = {model: row.get("change") for model, row in rows.items()}
    assert changes == {
        "untaught": None,
        "from memory": None,
        "warm start": None,
        "after RL": {"from": "warm start", "gained": 6, "lost": 1, "p": 0.125},
        "after RL, advantage inherited": {"from": "after RL", "gained": 0, "lost": 0, "p": 1.0},
        "after RL, mean over samples": {"from": "after RL", "gained": 1, "lost": 2, "p": 1.0},
        "after RL, mean over samples, balanced by advantage": {
            "from": "after RL, mean over samples",
            "gained": 0,
            "lost": 2,
            "p": 0.5,
        },
        "after RL, System 1 frozen": {"from": "after RL", "gained": 0, "lost": 2, "p": 0.5},
    }
    assert "+6 -1 from warm start, p 0.12" in atlas.report(list(rows.values()))


def test_changes_are_pooled_over_seeds():
    def row(seed, gained, lost):
        sets = [part("all")]
        change = {"from": "warm start", "gained": gained, "lost": lost, "p": 1.0}
        made = {"seed": seed, "model": "after RL", "decoding": "greedy", "sets": sets}
        return made | ({"change": change} if gained is not None else {})

    (made,) = atlas.pooled([row(0, 5, 1), row(1, 4, 0)])
    assert made["change"] == {"from": "warm start", "gained": 9, "lost": 1, "p": 0.021484375}
    (made,) = atlas.pooled([row(0, 5, 1), row(1, None, None)])
    assert "change" not in made


@pytest.mark.parametrize("fault", ["missing", "cut", "twice", "others", "odd", "wrong"])
def test_an_evaluation_without_its_answers_is_refused(bench, fault):
    options, _ = bench
    go(options)
    path = Path("runs/after-RL-greedy-0/rollouts/step_0.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    if fault == "missing":
        path.unlink()
    if fault == "cut":
        path.write_text("".join(lines)[:-9])
    if fault == "twice":
        path.write_text("".join(lines + lines[:1]))
    if fault == "others":
        path.write_text("".join(lines).replace('"q3"', '"p3"'))
    if fault == "odd":
        path.write_text("".join(lines).replace('"q3"', '["q3"]').replace('"q4"', "null"))
    if fault == "wrong":
        path.write_text("".join(lines).replace("0.0", "1.0", 1))
    said = {
        "missing": "cannot read",
        "others": "warm start were asked different questions",
        "odd": "warm start were asked different questions",
    }
    with pytest.raises(UserError, match=said.get(fault, "does not hold what the table tells")):
        atlas.summarise(0, options)


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
    monkeypatch.setattr(atlas.sys, "argv", arguments + MORE)
    assert atlas.main() == 2
    assert "failed: after-RL-greedy-0; see the logs in" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rl-0", "frozen-0", "inherited-0"])
def test_a_training_that_failed_or_was_cut_has_no_row(bench, name):
    """Its evaluations may be there from before."""
    options, _ = bench
    go(options)
    atlas.train(0, "inherited", options)
    atlas.evaluate_arm(0, "inherited", options)
    row = {"rl": "after RL", "frozen": "after RL, System 1 frozen"}
    row = row.get(name[:-2], "after RL, advantage inherited")
    assert row in {made["model"] for made in atlas.summarise(0, options)}
    record = Path(f"runs/{name}.run.json")
    kept = record.read_text()
    record.write_text(json.dumps(json.loads(kept) | {"exit": 2}))
    assert row not in {made["model"] for made in atlas.summarise(0, options)}
    record.write_text(kept)
    metrics = Path(f"runs/{name}/metrics.jsonl")
    metrics.write_text(metrics.read_text().splitlines()[0] + "\n")
    assert row not in {made["model"] for made in atlas.summarise(0, options)}


def test_limits_reach_every_model(bench, accept, monkeypatch):  # noqa: F811
    """The untaught model and the warm-started one are asked under the limits of the run."""
    _, commands = bench
    limits = "--top_k 2 --no-purpose".split()
    monkeypatch.setattr(atlas.sys, "argv", "bench.atlas --runs runs --cache c".split() + limits)
    assert atlas.main() == 0
    # The run itself is asked with its own settings.
    asked = [line for line in commands[1:] if not line[3].endswith("rl-0")]
    configs = [accept(f"python {shlex.join(line)}") for line in [commands[0], *asked]]
    assert len(configs) == 7
    assert {(config.top_k, config.purpose) for config in configs} == {(2, False)}


@pytest.mark.parametrize(
    "given, reason",
    [
        ("--seed 5", "--seed is this bench's own: give --seeds"),
        ("--seed=5", "--seed is this bench's own: give --seeds"),
        ("--name x", "--name is this bench's own: leave it out"),
        ("--resume", "--resume is this bench's own: leave it out"),
        ("--model x", "--model is this bench's own: leave it out"),
        ("--data x", "--data is this bench's own: leave it out"),
        ("--table --lr 1", "--table runs nothing: leave --lr out"),
        ("--arms frozen --system1 frozen", "--system1 is what the arm frozen changes"),
        ("--arms no-purpose --purpose", "--purpose is what the arm no-purpose changes"),
        ("--bogus 1", "unrecognized arguments: --bogus 1"),
        ("--arms nonsense", "invalid choice: 'nonsense'"),
        ("--runs a-file", "cannot make"),
    ],
)
def test_what_the_bench_refuses(given, reason, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("a-file").write_text("somebody's")
    monkeypatch.setattr(atlas.sys, "argv", ["bench.atlas", *given.split()])
    monkeypatch.setattr(atlas, "run_all", lambda options: pytest.fail("it ran"))
    try:
        code = atlas.main()
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    assert code == 2 and reason in said and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


@pytest.mark.parametrize(
    "more, reason",
    [
        ("--preset atlas-long", "rl-0 was made with --preset atlas, not atlas-long"),
        ("--lr 1e-3", "rl-0 was made with --lr 7e-06, not 0.001"),
        ("--steps 4", "rl-0 was made with --steps 3, not 4"),
        ("--no-purpose", "rl-0 was made with --purpose True, not False"),
    ],
)
def test_runs_of_two_settings_are_not_mixed(bench, more, reason, monkeypatch, capsys):
    options, commands = bench
    go(options)
    count = len(commands)
    line = [*"bench.atlas --runs runs --cache cache --seeds 0 1".split(), *MORE, *more.split()]
    monkeypatch.setattr(atlas.sys, "argv", line)
    assert atlas.main() == 2
    assert reason in capsys.readouterr().err and len(commands) == count
    # A second seed of another setting came there by hand.
    options.more = [*MORE, *more.split()]
    atlas.train(1, "rl", options)
    monkeypatch.setattr(atlas.sys, "argv", "bench.atlas --table --runs runs --seeds 0 1".split())
    assert atlas.main() == 2
    assert "name another --runs" in capsys.readouterr().err
    assert not common.RESULTS.exists()


def test_an_arm_that_does_not_change_what_it_says_is_refused(bench, monkeypatch, capsys):
    options, _ = bench
    go(options)
    config = Path("runs/frozen-0/config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"system1": "train"}))
    monkeypatch.setattr(atlas.sys, "argv", "bench.atlas --table --runs runs".split())
    assert atlas.main() == 2
    assert "frozen-0 was made with --system1 train, not frozen" in capsys.readouterr().err


def test_a_run_does_not_count_as_two_seeds(bench, monkeypatch, capsys):
    options, _ = bench
    go(options)
    shutil.copytree("runs/rl-0", "runs/rl-1")
    monkeypatch.setattr(atlas.sys, "argv", "bench.atlas --table --runs runs --seeds 0 1".split())
    assert atlas.main() == 2
    assert "rl-1 was made with --seed 0, not 1" in capsys.readouterr().err


@pytest.mark.parametrize("arm", ["rl", "inherited"])
def test_evaluations_of_a_run_that_is_gone_are_no_other_runs(bench, arm, monkeypatch, capsys):
    """Another model would be trained, and have the old one's rows."""
    _, commands = bench
    line = "bench.atlas --arms inherited --runs runs --cache cache".split() + MORE
    monkeypatch.setattr(atlas.sys, "argv", line)
    assert atlas.main() == 0
    count = len(commands)
    shutil.rmtree(f"runs/{arm}-0")
    Path(f"runs/{arm}-0.run.json").unlink()
    assert atlas.main() == 2
    assert f"asked a model whose run {arm}-0 is gone" in capsys.readouterr().err
    assert len(commands) == count


def test_an_arms_own_start_is_no_other_arms(bench, monkeypatch, capsys):
    line = "bench.atlas --arms no-purpose --runs runs --cache cache".split() + MORE
    monkeypatch.setattr(atlas.sys, "argv", line)
    assert atlas.main() == 0
    shutil.rmtree("runs/no-purpose-0")
    Path("runs/no-purpose-0.run.json").unlink()
    for decoding in atlas.DECODING:
        Path(f"runs/after-no-purpose-{decoding}-0.run.json").unlink()
    assert atlas.main() == 2
    told = capsys.readouterr().err
    assert "warm-start-no-purpose-sampled-0 asked a model whose run no-purpose-0 is gone" in told


def test_a_cut_run_with_a_damaged_record_is_refused_before_its_rest(bench, monkeypatch, capsys):
    options, commands = bench
    go(options)
    count = len(commands)
    lines = Path("runs/rl-0/metrics.jsonl").read_text().splitlines(keepends=True)
    Path("runs/rl-0/metrics.jsonl").write_text(lines[0])
    line = "bench.atlas --runs runs --cache cache".split() + MORE
    monkeypatch.setattr(atlas.sys, "argv", line)
    for content in ("{", '{"exit": 2}', "\udcff"):
        Path("runs/rl-0.run.json").write_bytes(content.encode("utf-8", "surrogateescape"))
        assert atlas.main() == 2
        said = capsys.readouterr().err
        assert "rl-0.run.json" in said and said.count("\n") == 1 and len(commands) == count


ALL = part("all")


@pytest.mark.parametrize(
    "content",
    [
        "[",
        "[" * 100_000,
        "[]",
        "{}",
        '[{"set": "all"}]',
        "[3]",
        json.dumps([part("one")]),
        json.dumps([ALL, ALL]),
        *(json.dumps([ALL | {"accuracy": wrong}]) for wrong in (None, "x", 2.5, -1, float("nan"))),
        *(json.dumps([ALL | {"questions": wrong}]) for wrong in (0, -1, 2.5, "x", None)),
        *(json.dumps([ALL | {"calls": wrong}]) for wrong in (None, -1, float("inf"))),
        json.dumps([ALL | {"seconds": float("nan")}]),
    ],
)
def test_a_damaged_table_is_one_sentence(bench, content):
    options, _ = bench
    go(options)
    Path("runs/after-RL-greedy-0/table.json").write_text(content)
    with pytest.raises(UserError, match="after-RL-greedy-0 holds no whole table: delete it"):
        atlas.keep(options)


def test_a_damaged_record_is_one_sentence(bench):
    options, _ = bench
    go(options)
    record = Path("runs/after-RL-greedy-0.run.json")
    whole = json.loads(record.read_text())
    wrong = ({"exit": None}, {"exit": "x"}, {"cpu_seconds": float("nan")}, {"commit": 3})
    for content in ("{", "{}", "3", '{"exit": 0}', *(json.dumps(whole | part) for part in wrong)):
        record.write_text(content)
        with pytest.raises(UserError, match="greedy-0.run.json.*(damaged|not hold)"):
            atlas.keep(options)


def cut_first_line(lines: list[dict]) -> None:
    del lines[0]


@pytest.mark.parametrize(
    "damage",
    [
        cut_first_line,
        lambda lines: lines[0].update(reward=None),
        lambda lines: lines[1].update(seconds_rollout="x"),
        lambda lines: lines[-1].update(seconds_eval="x"),
    ],
)
def test_damaged_metrics_are_one_sentence(bench, damage):
    options, _ = bench
    go(options)
    atlas.keep(options)
    kept = {path: path.read_bytes() for path in common.RESULTS.rglob("*") if path.is_file()}
    path = Path("runs/frozen-0/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    damage(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="frozen-0/metrics.jsonl is damaged"):
        atlas.keep(options)
    assert kept == {path: path.read_bytes() for path in kept}


@pytest.mark.parametrize("name", ["rl-0.log", "rl-0/curves.png"])
def test_a_missing_file_is_one_sentence(bench, name, monkeypatch, capsys):
    options, _ = bench
    go(options)
    Path("runs", name).unlink()
    monkeypatch.setattr(atlas.sys, "argv", "bench.atlas --table --runs runs".split())
    assert atlas.main() == 2
    said = capsys.readouterr().err
    assert f"{name}: No such file" in said and said.count("\n") == 1


def test_a_write_that_fails_leaves_what_was_kept(bench, monkeypatch):
    options, _ = bench
    go(options)
    atlas.keep(options)
    kept = {path: path.read_bytes() for path in common.RESULTS.rglob("*") if path.is_file()}
    for path in Path("runs").rglob("*.*"):
        if path.suffix in (".log", ".png", ".html"):
            path.write_bytes(path.read_bytes() * 2)

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        atlas.keep(options)
    assert kept == {path: path.read_bytes() for path in common.RESULTS.rglob("*") if path.is_file()}


def test_a_log_with_broken_bytes_is_kept(bench):
    options, _ = bench
    go(options)
    with open("runs/rl-0.log", "ab") as log:
        log.write(b"\xff\n")
    atlas.keep(options)
    assert (common.RESULTS / "atlas" / "rl-0" / "rl-0.log").read_text().endswith("\ufffd\n")


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


KEPT_TABLES = ["atlas", "atlas-long", "atlas-arms"]


@pytest.mark.parametrize("kept", KEPT_TABLES)
def test_the_page_tells_what_was_measured(kept):
    """Every accuracy of the kept table stands on the page, with its interval."""
    page = (REPO / "docs" / "atlas.md").read_text()
    rows = json.loads((MEASURED.with_name(kept) / "table.json").read_text())["rows"]
    assert "after RL" in {row["model"] for row in rows}
    for row in rows:
        for line in row["sets"]:
            share, low, high = (round(100 * line[key]) for key in ("accuracy", "low", "high"))
            assert f"{share} ({low}–{high})" in page, (row["model"], row["decoding"], line["set"])
    words = " ".join(page.split())
    several = any(row["seed"] == "all" for row in rows)
    for row in rows:
        if "change" in row and (row["model"] != "after RL" or kept == "atlas-arms"):
            assert "+{gained} −{lost}".format(**row["change"]) in page
            continue
        # Of several seeds the page tells the sum.
        if row["model"] != "after RL" or several != (row["seed"] == "all"):
            continue
        gained, lost = row["change"]["gained"], row["change"]["lost"]
        told = f"greedily {gained} and {lost}"
        if row["decoding"] == "sampled":
            told = f"made {gained} right that the warm start had wrong, and {lost} wrong"
        assert told in words


@pytest.mark.parametrize(
    "kept, parts",
    [
        ("atlas-long/inherited-0/table.json", 5),
        ("atlas-long/no-purpose-0/table.json", 5),
        ("atlas-long/no-purpose-0/table-of-its-start.json", 5),
        ("atlas-arms/bf16-mask-3/table.json", 1),
    ],
)
def test_the_page_tells_what_single_evaluations_gave(kept, parts):
    """They were made after the bench's table; of the last one only the total is told."""
    page = (REPO / "docs" / "atlas.md").read_text()
    rows = json.loads((MEASURED.parent / kept).read_text())
    assert {row["set"] for row in rows} >= {"one", "two", "all"}
    for row in rows[-parts:]:
        share, low, high = (round(100 * row[key]) for key in ("accuracy", "low", "high"))
        assert f"{share} ({low}–{high})" in page, (kept, row["set"])


@pytest.mark.parametrize("kept", KEPT_TABLES)
def test_what_is_kept_is_small_and_of_no_machine(kept):
    files = [path for path in MEASURED.with_name(kept).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_000_000
    for path in files:
        assert b"/tmp/" not in path.read_bytes(), path


@pytest.mark.parametrize(
    "line, why",
    [
        ("--balance none --arms frozen", "frozen cannot have these options: --balance draws"),
        ("--kl_beta 0.05 --arms balance-advantage", "balance-advantage cannot .* --kl_beta"),
    ],
)
def test_an_arm_that_contradicts_the_options_is_refused_before_anything_runs(
    bench, monkeypatch, capsys, line, why
):
    _, commands = bench
    monkeypatch.setattr(atlas.sys, "argv", f"bench.atlas --runs runs --cache c {line}".split())
    assert atlas.main() == 2
    assert re.search(why, capsys.readouterr().err)
    assert not commands


def test_a_frozen_run_asks_its_warm_start_without_a_frozen_role(bench, accept, monkeypatch):  # noqa: F811
    _, commands = bench
    line = "bench.atlas --system1 frozen --runs runs --cache c"
    monkeypatch.setattr(atlas.sys, "argv", line.split())
    assert atlas.main() == 0
    configs = [accept(f"python {shlex.join(line)}") for line in commands]
    assert [config.system1 for config in configs] == ["frozen"] + ["train"] * 8


def test_a_run_of_before_an_option_counts_as_its_default(bench, monkeypatch, capsys):
    options, _ = bench
    go(options)
    config = Path("runs/rl-0/config.json")
    made = json.loads(config.read_text())
    del made["beta1"]  # 0.9 by default, 0.5 in the preset
    config.write_text(json.dumps(made))
    line = ["bench.atlas", "--runs", "runs", "--cache", "cache", *MORE]
    monkeypatch.setattr(atlas.sys, "argv", line)
    assert atlas.main() == 2
    assert "rl-0 was made with --beta1 0.9, not 0.5" in capsys.readouterr().err


def test_evaluations_of_the_untaught_model_outlive_a_run(bench, monkeypatch):
    options, commands = bench
    go(options)
    for name in (
        "rl-0",
        *(f"{model}-{how}-0" for model in ("warm-start", "after-RL") for how in atlas.DECODING),
    ):
        shutil.rmtree(f"runs/{name}")
        Path(f"runs/{name}.run.json").unlink()
    before = len(commands)
    line = ["bench.atlas", "--runs", "runs", "--cache", "cache", *MORE]
    monkeypatch.setattr(atlas.sys, "argv", line)
    assert atlas.main() == 0
    assert len(commands) - before == 5
