"""Arms of a recipe on real models: runs that change one thing, asked the same questions.

bench/atlas.py and bench/almanac.py say which arms there are and what counts. An arm is a run in
RUNS/ARM-SEED. Its last and its first weights are asked the same held-out questions, both ways, in
RUNS/ARM-SEED-DECODING and RUNS/START-SEED-DECODING. Most arms begin with the same weights; those
that read in another way begin with a warm start of their own, so that nobody meets what it was
never shown. What is there is not made again; half a run is resumed. Several benches may share RUNS.

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
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.ablate import read_metrics
from bench.common import ROOT, save, table
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
    commands: dict[str, str] = field(default_factory=dict)  # arms run by a subcommand
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
    """Every run and evaluation that is missing, seed by seed."""
    options.runs.mkdir(parents=True, exist_ok=True)
    for seed, arm in itertools.product(options.seeds, options.arms):
        command = [study.commands[arm]] if arm in study.commands else []
        changed = ["--seed", str(seed), *study.arms[arm]]
        with alone(options, f"{arm}-{seed}") as folder:
            if not is_finished(folder):
                begun = (folder / "config.json").exists()
                line = [*command, *changed, *study.in_run, *options.more, *["--resume"] * begun]
                carry_out(study, options, line, folder.name)
        made = json.loads((folder / "config.json").read_text())
        models = {f"{arm}-{seed}": [str(folder)], f"{study.start(arm)}-{seed}": None}
        for (name, model), decoding in itertools.product(models.items(), DECODING):
            with alone(options, f"{name}-{decoding}") as target:
                if (target / "table.json").exists():
                    continue
                shutil.rmtree(target, ignore_errors=True)  # the beginning of one that was cut
                if model is None:  # the start, which reads as its arm does
                    model = [made["model"], "--seed", str(seed), "--preset", made["preset"]]
                    model += as_options(made, study.reads) if arm in study.starts else []
                temperature = str(made["temperature"]) if decoding == "sampled" else "0"
                line = [*command, "eval", *model, "--temperature", temperature]
                line += ["--eval_questions", options.eval_questions]
                carry_out(study, options, line, target.name)


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


def records(folder: Path) -> list[dict]:
    """An evaluation's trajectories."""
    lines = (folder / "rollouts" / "step_0.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def answers(folder: Path) -> dict[str, bool]:
    """Of an evaluation: question id -> whether its answer is right."""
    return {record["question_id"]: record["reward"] == 1 for record in records(folder)}


def summarise(study: Study, options: argparse.Namespace) -> list[dict]:
    """A row for each start and arm, and decoding, over all seeds that have it."""
    rows = []
    names = [*dict.fromkeys(["start", *study.starts.values()]), *study.arms]
    for name, decoding in itertools.product(names, DECODING):
        folders = {s: options.runs / f"{name}-{s}-{decoding}" for s in options.seeds}
        folders = {s: folder for s, folder in folders.items() if (folder / "table.json").exists()}
        if not folders:
            continue
        sums = sum((study.cells(folder) for folder in folders.values()), Counter())
        row = {"arm": name, "decoding": decoding, "seeds": len(folders)}
        for cell in dict.fromkeys(cell for cell, _ in sums):
            right, asked = sums[cell, "right"], sums[cell, "asked"]
            row[cell] = [right / asked, *wilson_interval(right, asked)]
        if name in study.arms:
            row |= costs(options.runs, name, list(folders))
            first, *_ = study.arms
            others = {study.start(name), study.against.get(name, first)} - {name}
            for other in sorted(others):
                row |= compared(folders, name, other)
        rows.append(row)
    return rows


def compared(folders: dict[int, Path], name: str, other: str) -> dict:
    """Questions that an arm has right and `other` has not, the reverse, and p, over the seeds."""
    gained = lost = 0
    for folder in folders.values():
        against = folder.with_name(other + folder.name.removeprefix(name))
        if not (against / "table.json").exists():
            return {}
        mine, theirs = answers(folder), answers(against)
        gained += sum(mine[question] > theirs[question] for question in mine)
        lost += sum(mine[question] < theirs[question] for question in mine)
    return {f"against {other}": f"+{gained} −{lost}", f"p {other}": sign_test(gained, lost)}


def costs(runs: Path, arm: str, seeds: list[int]) -> dict:
    """Of a step of training, as a mean over its steps and seeds."""
    steps = [line for seed in seeds for line in read_metrics(runs / f"{arm}-{seed}")]
    columns = {
        "calls": ("calls_per_question",),
        "read tokens an attempt": ("tokens_read",),
        "trained tokens": ("trained_tokens",),
        "seconds": ("seconds_rollout", "seconds_train"),
    }
    return {
        name: sum(line.get(key, 0) for line in steps for key in keys) / len(steps)
        for name, keys in columns.items()
        if steps
    }


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
