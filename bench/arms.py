"""Arms: runs that change one thing. What bench/ablate.py, atlas.py and almanac.py share.

An arm with a seed is a run RUNS/ARM-SEED, with its log beside it. The same command goes on where it
stopped: a complete run is skipped, half a run is resumed. Options that a bench does not know go to
its runs. What is complete stays as it was made: for other options give another --runs, and to a
recipe's bench another --records too.

The recipes on real models (a `Study`): a run's last and its first weights are asked the same
held-out questions, sampled and greedily, in RUNS/ARM-SEED-DECODING and RUNS/START-SEED-DECODING.
Most arms of a seed begin with the same weights, where they share --cache and a commit; those that
read in another way begin with a warm start of their own, so that nobody meets what it was never
shown. What the table needs of an evaluation is kept in RECORDS/NAME.json, a few kilobytes: which
questions were right, counts by cell, what a step of the run took. An evaluation that has its record
is not made again. Commands with other --arms may share RUNS and RECORDS.

Beside RECORDS: table.json, with accuracy in each cell and, question by question, what an arm gained
and lost against its start and the first arm (McNemar's exact test, which sees smaller differences
than two overlapping intervals do; over several seeds its p knows nothing of how seeds differ); and
arms.png.

Tests: pytest tests/test_bench.py tests/test_almanac.py
"""

import argparse
import io
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from bench.common import RESULTS, ROOT, provenance, read_metrics, save, table
from plumbing import curves, folders
from plumbing.metrics import sign_test, wilson_interval, with_interval
from trainer.checkpoint import newest
from whole import made_once

DECODING = ("sampled", "greedy")

# --- runs -----------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser, arms: dict, runs: str, seeds: list, threads: str):
    """What all these benches understand, with the defaults of one of them."""
    parser.add_argument("--arms", nargs="+", metavar="ARM", choices=arms, default=list(arms))
    parser.add_argument("--seeds", type=int, nargs="+", default=seeds)
    parser.add_argument("--threads", default=threads)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / runs)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache", help="of the models")
    parser.add_argument("--table", action="store_true", help="run nothing")


def carry_out(options: argparse.Namespace, line: list[str], name: str) -> None:
    """`python LINE` with a log in RUNS/NAME.log. Exits if it fails."""
    line = [*line, "--cache", str(options.cache), "--threads", options.threads]
    print(f"python {' '.join(line)}", flush=True)
    options.runs.mkdir(parents=True, exist_ok=True)
    path = options.runs / f"{name}.log"
    with open(path, "a") as log:
        done = subprocess.run([sys.executable, *line], cwd=ROOT, stdout=log, stderr=log)
    if done.returncode:
        sys.exit(f"it failed: see {path}")


def is_complete(run: Path) -> bool:
    """Whether a run was evaluated after its last step, and has no state that is older.

    A full disk may have refused the last one.
    """
    lines = read_metrics(run)
    done = lines[-1]["step"] + 1 if lines else 0
    steps, _ = newest(run) or (done, None)
    return bool(lines) and lines[-1].get("eval_step") == done == steps


def complete_run(options: argparse.Namespace, line: list[str], arm: str, seed: int) -> Path:
    """The folder of an arm's run, which `python LINE` makes or resumes if it is not complete."""
    run = options.runs / f"{arm}-{seed}"
    if not is_complete(run):
        line = [*line, "--seed", str(seed), "--runs", str(options.runs), "--name", run.name]
        line += options.more
        line += ["--resume"] if (run / "config.json").exists() else []
        carry_out(options, line, run.name)
    return run


# --- recipes on real models -----------------------------------------------------------------------


@dataclass(frozen=True)
class Study:
    """The arms of one recipe."""

    recipe: str  # recipes/RECIPE.py
    arms: dict[str, list[str]]  # what each changes; the first one is what others are compared with
    own_start: tuple[str, ...]  # arms with a warm start of their own
    cells: Callable[[Path], dict]  # an evaluation's folder -> cell -> [how many right, of how many]
    asked: str  # questions of an evaluation
    in_run: list[str] = field(default_factory=list)  # options of runs only
    command: dict[str, list[str]] = field(default_factory=dict)  # arms run by a subcommand

    def start(self, arm: str) -> str:
        """What an arm's start is called."""
        return f"start-{arm}" if arm in self.own_start else "start"


def run_missing(study: Study, options: argparse.Namespace) -> None:
    """Every run and evaluation that is missing, seed by seed; the greedy evaluations come last."""
    for decoding, seed, arm in itertools.product(DECODING, options.seeds, options.arms):
        for model in (arm, study.start(arm)):
            path = options.records / f"{model}-{seed}-{decoding}.json"
            if not path.exists():
                program = ["-m", f"recipes.{study.recipe}", *study.command.get(arm, [])]
                line = [*program, *study.arms[arm], *study.in_run, "--bf16", options.bf16]
                run = complete_run(options, line, arm, seed)
                record = evaluate(study, options, program, arm, run, model, decoding)
                options.records.mkdir(parents=True, exist_ok=True)
                folders.write_whole(path, json.dumps(record).encode())


def evaluate(study: Study, options, program, arm: str, run: Path, model: str, decoding) -> dict:
    """The record of an arm's last weights, or of its first ones if `model` is a start's name."""
    made = folders.read_json(run / "config.json")
    line = [*program, "eval"]
    if model == arm:
        line += [str(run)]
    else:  # the start, which reads as its arm does
        line += [made["model"], "--seed", str(made["seed"]), "--preset", made["preset"]]
        line += study.arms[arm] if arm in study.own_start else []
    temperature = "0" if decoding == "greedy" else str(made["temperature"])
    line += ["--temperature", temperature, "--eval_questions", options.eval_questions]
    line += ["--bf16", options.bf16]
    name = f"{model}-{made['seed']}-{decoding}"

    def ask(folder: Path) -> None:
        carry_out(options, [*line, "--runs", str(folder), "--name", "eval"], name)

    folder = made_once(options.runs / name, ask) / "eval"
    origin = provenance()
    return {
        "made": {key: origin[key] for key in ("date", "cpu", "gpu", "commit")},
        "cells": study.cells(folder),
        "right": [one["question_id"] for one in rollouts(folder) if one["reward"] == 1],
        "of a step": costs(run) if model == arm else {},
    }


def rollouts(folder: Path) -> list[dict]:
    """An evaluation's trajectories."""
    return folders.read_lines(folder / "rollouts" / "step_0.jsonl")


def costs(run: Path) -> dict:
    """Of a step of training, as a mean over the run's steps."""
    steps = read_metrics(run)
    columns = {
        "calls": ("calls_per_question",),
        "read tokens an attempt": ("tokens_read",),
        "trained tokens": ("trained_tokens",),
        "seconds": ("seconds_rollout", "seconds_train"),
    }
    return {
        name: sum(line.get(key, 0) for line in steps for key in keys) / len(steps)
        for name, keys in columns.items()
        if any(key in steps[0] for key in keys)
    }


def summarise(study: Study, options: argparse.Namespace) -> list[dict]:
    """A row for each start and arm, and decoding, over all seeds that have it."""
    made = {path.stem: folders.read_json(path) for path in options.records.glob("*.json")}
    first, *_ = study.arms
    rows = []
    names = ["start", *map(study.start, study.own_start), *study.arms]
    for name, decoding in itertools.product(names, DECODING):
        places = [f"-{seed}-{decoding}" for seed in options.seeds]
        places = [place for place in places if name + place in made]
        if not places:
            continue
        records = [made[name + place] for place in places]
        row = {"arm": name, "decoding": decoding, "seeds": len(records)}
        for cell in dict.fromkeys(cell for record in records for cell in record["cells"]):
            counts = [record["cells"].get(cell, (0, 0)) for record in records]
            right, asked = map(sum, zip(*counts))
            row[cell] = with_interval(right, asked)
        machines = {(record["made"]["cpu"], record["made"]["gpu"]) for record in records}
        for cost in records[0]["of a step"]:
            if cost != "seconds" or len(machines) == 1:
                row[cost] = statistics.mean(record["of a step"][cost] for record in records)
        others = {study.start(name), first} if name in study.arms else set()
        for other in sorted(others - {name}):
            theirs = [made.get(other + place) for place in places]
            row |= compared(records, theirs, other)
        rows.append(row)
    return rows


def picture(study: Study, options: argparse.Namespace) -> bytes:
    """A PNG of right answers, sampled: a dot with its interval by arm and seed, starts hollow."""

    def answers(name: str, seed: int) -> list[int] | None:
        path = options.records / f"{name}-{seed}-sampled.json"
        return folders.read_json(path)["cells"]["all"] if path.exists() else None

    arms = [arm for arm in study.arms if any(answers(arm, seed) for seed in options.seeds)]
    png = io.BytesIO()
    with matplotlib.rc_context(curves.LOOK | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(6, 0.8 + 0.4 * len(arms)), dpi=150, layout="constrained")
        axes = figure.subplots()
        for row, arm in enumerate(arms):
            for place, seed in enumerate(options.seeds):
                began, ended = answers(study.start(arm), seed), answers(arm, seed)
                if ended is None:
                    continue
                height = row + (place - (len(options.seeds) - 1) / 2) / 8
                look = {"ms": 4, "color": curves.COLOURS[seed % len(curves.COLOURS)]}
                if began:
                    axes.plot(began[0] / began[1], height, "o", mfc="white", **look)
                share = ended[0] / ended[1]
                low, high = wilson_interval(*ended)
                interval = [[share - low], [high - share]]
                axes.errorbar(share, height, xerr=interval, fmt="o", **look)
        axes.set_yticks(range(len(arms)), arms)
        axes.invert_yaxis()
        axes.margins(y=0.05)
        axes.set_xlim(left=-0.01)
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        title = "right of the held-out questions, starts hollow; from above, seeds "
        axes.set_title(title + ", ".join(map(str, options.seeds)), fontsize=9)
        figure.savefig(png, format="png")
    return png.getvalue()


def compared(mine: list[dict], theirs: list[dict | None], other: str) -> dict:
    """Questions that an arm has right and `other` has not, the reverse, and p, over the seeds.

    Nothing where `other` lacks a seed.
    """
    if None in theirs:
        return {}
    pairs = [(set(a["right"]), set(b["right"])) for a, b in zip(mine, theirs)]
    gained = sum(len(a - b) for a, b in pairs)
    lost = sum(len(b - a) for a, b in pairs)
    return {f"against {other}": f"+{gained} −{lost}", f"p {other}": sign_test(gained, lost)}


def main(study: Study, description: str) -> None:
    """Runs what is missing; table and picture are of all records. Exits if there are none."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0], allow_abbrev=False)
    add_options(parser, study.arms, f"{study.recipe}-bench", seeds=[0], threads="2")
    parser.add_argument("--eval_questions", default=study.asked, help="of the evaluations")
    parser.add_argument("--bf16", default="auto", help="of runs and evaluations")
    parser.add_argument("--records", type=Path, default=RESULTS / study.recipe / "records")
    options, options.more = parser.parse_known_args()
    if not options.table:
        run_missing(study, options)
    names = [path.stem.rsplit("-", 2) for path in options.records.glob("*-[0-9]*-*.json")]
    options.seeds = sorted({int(seed) for _, seed, _ in names})
    rows = summarise(study, options)
    if not rows:
        sys.exit(f"there is no record of an evaluation in {options.records}")
    print(table(rows))
    command = " ".join([f"python -m bench.{study.recipe}", *sys.argv[1:]])
    print(save("table", command, rows, options.records.parent))
    print(folders.write_whole(options.records.parent / "arms.png", picture(study, options)))
