"""Arms of a recipe on real models: runs that change one thing, asked the same questions.

bench/atlas.py and bench/almanac.py say which arms there are and what counts. An arm is a run in
RUNS/ARM-SEED. Its last and its first weights are asked the same held-out questions, both ways, in
RUNS/ARM-SEED-DECODING and RUNS/START-SEED-DECODING. Most arms begin with the same weights; those
that read in another way begin with a warm start of their own, so that nobody meets what it was
never shown.

What the table needs of an evaluation is kept in RECORDS/NAME.json, a few kilobytes: which questions
were right, counts by cell, what a step of the run took. An evaluation that has its record is not
made again, so arms may be run on several machines; half a run is resumed. Several benches may share
RUNS and RECORDS.

The table has a row for each arm, start and decoding, over its seeds: accuracy in each cell, and two
comparisons question by question (McNemar's exact test): with the arm's start, and with another arm.
A paired test finds smaller differences than two intervals do.

Tests: pytest tests/test_bench.py tests/test_almanac.py
"""

import argparse
import contextlib
import fcntl
import itertools
import json
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.common import RESULTS, ROOT, provenance, read_metrics, save, table
from plumbing.metrics import sign_test, wilson_interval

DECODING = ("sampled", "greedy")


@dataclass(frozen=True)
class Study:
    """The arms of one recipe."""

    recipe: str  # recipes/RECIPE.py
    arms: dict[str, list[str]]  # what each changes; the first one is what others are compared with
    starts: dict[str, str]  # arms with a warm start of their own -> its name
    # An evaluation's folder -> (cell, "right" or "asked") -> how often.
    cells: Callable[[Path], Counter]
    asked: str  # questions of an evaluation
    in_run: list[str] = field(default_factory=list)  # options of runs only
    commands: dict[str, list[str]] = field(default_factory=dict)  # arms run by a subcommand
    reads: tuple[str, ...] = ()  # settings of an arm that its own start needs too
    against: dict[str, str] = field(default_factory=dict)  # arms not compared with the first one

    def start(self, arm: str) -> str:
        """What an arm's start is called."""
        return self.starts.get(arm, "start")


def options_of(study: Study, description: str) -> argparse.Namespace:
    """The command line; what it does not know goes to the runs."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", default=list(study.arms), choices=study.arms)
    parser.add_argument("--eval_questions", default=study.asked, help="of the evaluations")
    parser.add_argument("--bf16", default="auto", help="of runs and evaluations")
    parser.add_argument("--threads", default="2", help="of runs and evaluations")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / f"{study.recipe}-bench")
    parser.add_argument("--records", type=Path, default=RESULTS / study.recipe / "records")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache", help="of the models")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options, options.more = parser.parse_known_args()
    return options


def carry_out(study: Study, options: argparse.Namespace, words: list[str], name: str) -> None:
    """One command of the recipe; its log lies beside its folder."""
    line = ["-m", f"recipes.{study.recipe}", *words, "--name", name, "--threads", options.threads]
    line += ["--runs", str(options.runs), "--cache", str(options.cache), "--bf16", options.bf16]
    print(f"python {' '.join(line)}", flush=True)
    with open(options.runs / f"{name}.log", "a") as log:
        subprocess.run([sys.executable, *line], cwd=ROOT, stdout=log, stderr=log, check=True)


@contextlib.contextmanager
def alone(options: argparse.Namespace, name: str) -> Iterator[Path]:
    """The folder of that name, while no other bench works on it."""
    with open(options.runs / f"{name}.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield options.runs / name


def is_finished(folder: Path) -> bool:
    """Whether a run was evaluated after its last step."""
    lines = read_metrics(folder)
    return bool(lines) and lines[-1].get("eval_step") == lines[-1]["step"] + 1


def run_missing(study: Study, options: argparse.Namespace) -> None:
    """Every run and evaluation that is missing, seed by seed; the greedy evaluations come last."""
    options.runs.mkdir(parents=True, exist_ok=True)
    options.records.mkdir(parents=True, exist_ok=True)
    for decoding, seed, arm in itertools.product(DECODING, options.seeds, options.arms):
        for model in (arm, study.start(arm)):
            name = f"{model}-{seed}-{decoding}"
            if not record_of(options, name).exists():
                run = finished_run(study, options, arm, seed)
                evaluate(study, options, arm, run, name)


def finished_run(study: Study, options: argparse.Namespace, arm: str, seed: int) -> Path:
    """The folder of an arm's run, which is made or resumed where it is not at its end."""
    with alone(options, f"{arm}-{seed}") as folder:
        if not is_finished(folder):
            begun = (folder / "config.json").exists()
            line = [*study.commands.get(arm, []), "--seed", str(seed), *study.arms[arm]]
            line += [*study.in_run, *options.more, *["--resume"] * begun]
            carry_out(study, options, line, folder.name)
    return folder


def evaluate(study: Study, options: argparse.Namespace, arm: str, run: Path, name: str) -> None:
    """Asks an arm's last weights or its first ones, as `name` says, and keeps the record."""
    made = json.loads((run / "config.json").read_text())
    line = [*study.commands.get(arm, []), "eval"]
    trained = name.startswith(f"{arm}-")
    if trained:
        line += [str(run)]
    else:  # the start, which reads as its arm does
        line += [made["model"], "--seed", str(made["seed"]), "--preset", made["preset"]]
        line += as_options(made, study.reads) if arm in study.starts else []
    temperature = "0" if name.endswith("greedy") else str(made["temperature"])
    line += ["--temperature", temperature, "--eval_questions", options.eval_questions]
    with alone(options, name) as folder:
        if not (folder / "table.json").exists():
            shutil.rmtree(folder, ignore_errors=True)  # the beginning of one that was cut
            carry_out(study, options, line, name)
        sums = study.cells(folder)
        record = {
            "made": {key: provenance()[key] for key in ("date", "cpu", "commit")},
            "settings": {key: made[key] for key in ("bf16", "steps", "questions", "group")},
            "cells": {
                cell: [sums[cell, "right"], asked]
                for (cell, counted), asked in sums.items()
                if counted == "asked"
            },
            "right": [one["question_id"] for one in rollouts(folder) if one["reward"] == 1],
            "of a step": costs(run) if trained else {},
        }
        unfinished = folder.with_name(f"{name}.unfinished")
        unfinished.write_text(json.dumps(record) + "\n")
        shutil.move(unfinished, record_of(options, name))


def record_of(options: argparse.Namespace, name: str) -> Path:
    """The file that keeps what the table needs of an evaluation."""
    return options.records / f"{name}.json"


def as_options(settings: dict, names: tuple[str, ...]) -> list[str]:
    """Settings of those names as a command line gives them."""
    line = []
    for name in names:
        value = settings[name]
        if isinstance(value, bool):
            line.append(f"--{name}" if value else f"--no-{name}")
        else:
            line += [f"--{name}", str(value)]
    return line


def rollouts(folder: Path) -> list[dict]:
    """An evaluation's trajectories."""
    lines = (folder / "rollouts" / "step_0.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


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
    }


def summarise(study: Study, options: argparse.Namespace) -> list[dict]:
    """A row for each start and arm, and decoding, over all seeds that have it."""
    made = {path.stem: json.loads(path.read_text()) for path in options.records.glob("*.json")}
    rows = []
    names = [*dict.fromkeys(["start", *study.starts.values()]), *study.arms]
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
            row[cell] = [right / asked, *wilson_interval(right, asked)]
        for cost in records[0]["of a step"]:
            row[cost] = statistics.mean(record["of a step"][cost] for record in records)
        if name in study.arms:
            first, *_ = study.arms
            others = {study.start(name), study.against.get(name, first)} - {name}
            for other in sorted(others):
                theirs = [made.get(other + place) for place in places]
                row |= compared(records, theirs, other)
        rows.append(row)
    return rows


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


def report(rows: list[dict]) -> str:
    """The table as text."""
    shown = []
    for row in rows:
        line = dict(row)
        for key, value in row.items():
            if isinstance(value, list):
                line[key] = "{:.0%} ({:.0%}–{:.0%})".format(*value)
        shown.append(line)
    return table(shown)


def main(study: Study, description: str) -> list[dict]:
    """Runs what is missing, prints and writes the table; returns its rows.

    Exits if a command fails or nothing was evaluated.
    """
    options = options_of(study, description)
    try:
        if not options.table:
            run_missing(study, options)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd)} failed: see its log in {options.runs}")
    rows = summarise(study, options)
    if not rows:
        sys.exit(f"nothing was evaluated in {options.runs}")
    print(report(rows))
    command = " ".join([f"python -m bench.{study.recipe}", *sys.argv[1:]])
    print(save(f"{study.recipe}/table", command, rows))
    return rows
