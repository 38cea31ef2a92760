"""Runs that change one option of a method ("arms"): on the method's toy, or on the almanac.

    python -m bench.arms mars                            every arm with seeds 0 1 2: hours
    python -m bench.arms marsrl --table                  only tabulates the complete runs
    python -m bench.arms mars --steps 80 --runs FOLDER   other options are those of the runs
    python -m bench.arms almanac --arms mars frozen      two arms, seed 0

The run of an arm and a seed is RUNS/ARM-SEED, with a log beside it. The same command resumes runs
and skips complete ones. So other options need other --runs, and on the almanac other --records.

**On a toy** the arms of a seed have the same world, questions and base model. `replica` shows how
much two runs of one setting differ: its change is too small to matter, but other draws follow.
Results: bench/results/arms_METHOD.json.

**On the almanac** the last and the first weights of each run answer the same held-out questions,
sampled and greedily. The arms of a seed start from the same weights, except OTHER_READING.
RECORDS/NAME.json keeps which questions were right, counts by cell (whether RL has seen the country
and the attribute; how good the notes are) and the costs of a step. Beside RECORDS, table.json
compares each arm, question by question, with its start and with MARS, and arms.png shows the
sampled answers. An arm takes some four minutes on an H100, and 3 GB on disk.

Tests: pytest tests/test_bench.py tests/test_almanac.py
"""

import argparse
import contextlib
import io
import itertools
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from atomic import made_once
from bench.common import RESULTS, ROOT, provenance, publish, read_metrics
from plumbing import curves, folders
from plumbing.metrics import sign_test, with_interval
from recipes import almanac, almanac_world
from trainer.checkpoint import newest

PROGRAMS = {
    "mars": ["mars.py"],
    "matpo": ["-m", "siblings.matpo"],
    "marsrl": ["-m", "siblings.marsrl"],
    "almanac": ["-m", "recipes.almanac"],
}
WHOLE_SYSTEMS = ["--rollouts", "linear", "--group", "16", "--credit"]
# method -> arm -> the options that it changes
ARMS = {
    "mars": {
        "full": [],
        "replica": ["--lr", "0.0005005"],  # other rounding soon leads to other draws
        "system1_frozen": ["--system1", "frozen"],
        "balance_off": ["--balance", "none"],
        "packing_off": ["--no-packing"],
        "purpose_off": ["--no-purpose"],
        "no_search": ["--tools", "scholar,python"],
        "group_8": ["--group", "8"],
    },
    "matpo": {
        "matpo": [],
        "single": ["--no-delegate"],
        "single_wide": ["--no-delegate", "--sys2_context", "320"],
        "no_recap": ["--no-recap"],
        "own_groups": ["--own_groups"],
        "own_groups_balanced": ["--own_groups", "--balance", "uniform"],
    },
    # `role` is MARS's rule of credit, `attempt` is MATPO's and `input` MarsRL's. With 16 whole
    # systems for each question, the first five arms have about as many samples as `input`.
    "marsrl": {
        "role": [*WHOLE_SYSTEMS, "role"],
        "replica": [*WHOLE_SYSTEMS, "role", "--lr", "0.0005005"],
        "attempt": [*WHOLE_SYSTEMS, "attempt"],
        "pooled": [*WHOLE_SYSTEMS, "pooled"],
        "own": [*WHOLE_SYSTEMS, "own"],
        "input": [],
        "only_solver": ["--learners", "solver"],
    },
    "almanac": {
        "mars": [],
        "frozen": ["--system1", "frozen"],
        "candid": ["--credit", "candid"],
        # A page's 12 sections share half of the context: `none` reads 42 tokens of each section,
        # `one-agent` up to 341, which is all of it.
        "none": ["--system1", "none"],
        "one-agent": ["--system1", "none", "--sys2_context", "8192"],
        "passages": ["--preset", "almanac-passages"],
        "balanced": ["--balance", "uniform"],  # the paper's rule: as many notes as attempts
        "inherited": ["--shared_group"],
        "pooled": ["--credit", "pooled"],
        "own": ["--credit", "own"],
        "group-16": ["--group", "16"],
        "group-32": ["--group", "32"],
        "no-purpose": ["--no-purpose"],
        "no-packing": ["--no-packing"],
    },
}
# These arms have contexts of another form, so each has a warm start of its own.
OTHER_READING = ("none", "one-agent", "passages", "no-purpose", "no-packing")
DECODING = ("sampled", "greedy")
# The settings of a run with which its first weights are evaluated, beside its arm's.
OF_A_START = "preset seed bf16 page_fields sys2_context step_tokens max_turns".split()
OF_A_START += ["sys1_prompt", "sys1_response"]
# The scores of an evaluation.
SYSTEM = "eval_system eval_solver eval_verifier_accuracy eval_recall eval_false_alarm_share".split()
SCORES = dict.fromkeys(("mars", "matpo"), ["eval_accuracy", "eval_greedy"]) | {"marsrl": SYSTEM}
# column of the table -> metric of a step
COSTS = {"read tokens an attempt": "tokens_read", "trained tokens": "trained_tokens"}


# --- runs -----------------------------------------------------------------------------------------


def call_python(options: argparse.Namespace, arguments: list[str], name: str) -> None:
    """Runs `python ARGUMENTS` with a log in RUNS/NAME.log. Exits if it fails."""
    arguments = [*arguments, "--cache", str(options.cache)]
    print(f"python {' '.join(arguments)}", flush=True)
    options.runs.mkdir(parents=True, exist_ok=True)
    line = [sys.executable, *arguments]
    with open(options.runs / f"{name}.log", "a") as log:
        if subprocess.run(line, cwd=ROOT, stdout=log, stderr=log).returncode:
            sys.exit(f"it failed: see {log.name}")


def is_complete(run: Path) -> bool:
    """Whether a run's last step was evaluated and its state saved. A full disk may prevent that."""
    lines = read_metrics(run)
    steps = lines[-1]["step"] + 1 if lines else 0
    saved_steps, _ = newest(run) or (steps, None)
    return bool(lines) and lines[-1].get("eval_step") == steps == saved_steps


def complete_run(options: argparse.Namespace, method: str, arm: str, seed: int, *more: str) -> Path:
    """The folder of an arm's run, which is started or resumed if it is not complete."""
    run = options.runs / f"{arm}-{seed}"
    if not is_complete(run):
        arguments = [*PROGRAMS[method], *ARMS[method][arm], *more, "--seed", str(seed)]
        arguments += ["--runs", str(options.runs), "--name", run.name, *options.more]
        arguments += ["--resume"] if (run / "config.json").exists() else []
        call_python(options, arguments, run.name)
    return run


def summarise_toy(method: str, runs: Path) -> list[dict]:
    """A row for each arm that has a complete run: its scores at the end, in percent."""
    rows = []
    for arm, changes in ARMS[method].items():
        complete = [run for run in sorted(runs.glob(f"{arm}-[0-9]*/")) if is_complete(run)]
        if complete:
            seeds = " ".join(run.name.rpartition("-")[2] for run in complete)
            row = {"arm": arm, "options": " ".join(changes), "seeds": seeds}
            for score in SCORES[method]:
                values = [100 * read_metrics(run)[-1][score] for run in complete]
                row[score] = f"{mean(values):.1f} ({' '.join(f'{value:.1f}' for value in values)})"
            rows.append(row)
    return rows


# --- the almanac ----------------------------------------------------------------------------------


def start_of(arm: str) -> str:
    """The name of the weights that an arm starts from."""
    return f"start-{arm}" if arm in OTHER_READING else "start"


def run_missing(options: argparse.Namespace) -> None:
    """Does each run and evaluation that has no record: the sampled ones first, seed by seed."""
    todo = itertools.product(options.decodings, options.seeds, options.arms)
    for decoding, seed, arm in todo:
        for model in (arm, start_of(arm)):
            path = options.records / f"{model}-{seed}-{decoding}.json"
            if not path.exists():
                # Few questions during the run: the evaluations below have the questions that count.
                run = complete_run(options, "almanac", arm, seed, "--eval_questions", "12")
                record = evaluate(options, arm, run, model, decoding)
                options.records.mkdir(parents=True, exist_ok=True)
                folders.write_whole(path, json.dumps(record).encode())


def weights_of(run: Path, start: bool) -> tuple[str, dict]:
    """The checkpoint of a run's first weights if `start`, else of its last, and its options."""
    saved = folders.read_json(run / "config.json")
    if not start:
        return str(run), {}
    return saved["model"], {name: saved[name] for name in OF_A_START}


def evaluate(options: argparse.Namespace, arm: str, run: Path, model: str, decoding: str) -> dict:
    """The record of a run's last weights if `model` is the arm's name, else of its first ones."""
    config = folders.read_json(run / "config.json")
    checkpoint, settings = weights_of(run, start=model != arm)
    settings["temperature"] = 0 if decoding == "greedy" else config["temperature"]
    settings["eval_questions"] = options.eval_questions
    arguments = [*PROGRAMS["almanac"], "eval", checkpoint]
    if model != arm and arm in OTHER_READING:  # the start reads as its arm does
        arguments += ARMS["almanac"][arm]
    for setting, value in settings.items():  # those of the run, which were handed on to it, win
        arguments += [f"--{setting}", str(value)]
    name = f"{model}-{config['seed']}-{decoding}"

    def ask(folder: Path) -> None:
        call_python(options, [*arguments, "--runs", str(folder), "--name", "eval"], name)

    folder = made_once(options.runs / name, ask) / "eval"
    right = "".join(str(int(one["reward"] == 1)) for one in trajectories(folder))
    lines = read_metrics(run) if model == arm else []
    costs = {name: mean(x.get(key, 0) for x in lines) for name, key in COSTS.items() if lines}
    counts = cells(folder, config["page_fields"])
    return {"made": provenance(), "cells": counts, "right": right, "of a step": costs}


def trajectories(folder: Path) -> list[dict]:
    """The trajectories of an evaluation."""
    return folders.read_lines(folder / "rollouts" / "step_0.jsonl")


def recorded_seeds(records: Path) -> list[int]:
    """The seeds that have a record."""
    names = [path.stem.rsplit("-", 2) for path in records.glob("*-[0-9]*-*.json")]
    return sorted({int(seed) for _, seed, _ in names})


def summarise(options: argparse.Namespace) -> list[dict]:
    """A row for each start, arm and decoding, over all of `options.seeds` that have a record.

    Intervals and p take the answers of several seeds to one question as independent.
    """
    all_records = {path.stem: folders.read_json(path) for path in options.records.glob("*.json")}
    rows = []
    names = ["start", *map(start_of, OTHER_READING), *ARMS["almanac"]]
    for name, decoding in itertools.product(names, DECODING):
        suffixes = [f"-{seed}-{decoding}" for seed in options.seeds]
        suffixes = [suffix for suffix in suffixes if name + suffix in all_records]
        if not suffixes:
            continue
        records = [all_records[name + suffix] for suffix in suffixes]
        marks = "".join(record["right"] for record in records)
        row = {"arm": name, "decoding": decoding, "seeds": len(records)}
        row |= {"right": marks.count("1"), "asked": len(marks)}
        for cell in dict.fromkeys(cell for record in records for cell in record["cells"]):
            counts = [record["cells"].get(cell, (0, 0)) for record in records]
            row[cell] = with_interval(*map(sum, zip(*counts)))
        if costs := [record["of a step"] for record in records if record["of a step"]]:
            row |= {name: mean(cost[name] for cost in costs) for name in COSTS}
        others = {start_of(name), "mars"} if name in ARMS["almanac"] else set()
        for other in sorted(others - {name}):
            row |= compare(records, [all_records.get(other + suffix) for suffix in suffixes], other)
        rows.append(row)
    return rows


@contextlib.contextmanager
def percent_axes(path: Path, axis: str) -> Iterator[Axes]:
    """Axes whose `axis`, "x" or "y", is in percent. They are drawn into the file `path`."""
    with matplotlib.rc_context(curves.LOOK | {"axes.grid.axis": axis, "axes.axisbelow": True}):
        figure = Figure(figsize=(6, 3.4), dpi=150, layout="constrained")
        axes = figure.subplots()
        yield axes
        getattr(axes, f"{axis}axis").set_major_formatter(PercentFormatter(1, decimals=0))
        image = io.BytesIO()
        figure.savefig(image)
        folders.write_whole(path, image.getvalue())


def draw(options: argparse.Namespace, path: Path) -> None:
    """Draws right answers, sampled: each arm's mean (bar), each seed (dot), its start (ring)."""
    shares = {}
    for record in options.records.glob("*-sampled.json"):
        marks = folders.read_json(record)["right"]
        shares[record.stem.removesuffix("-sampled")] = marks.count("1") / len(marks)
    with percent_axes(path, "x") as axes:
        axes.set_title("Right answers: mean (bar), each seed (dot), its start (ring)")
        for arm in ARMS["almanac"]:
            seeds = [seed for seed in options.seeds if f"{arm}-{seed}" in shares]
            if seeds:
                axes.barh(arm, mean(shares[f"{arm}-{seed}"] for seed in seeds), color="#dddddd")
            for seed in seeds:
                colour = curves.COLOURS[seed % len(curves.COLOURS)]
                axes.scatter(shares[f"{arm}-{seed}"], arm, 20, colour)
                start = f"{start_of(arm)}-{seed}"
                if start in shares:
                    axes.scatter(shares[start], arm, 20, "none", edgecolors=colour)
        axes.invert_yaxis()


def compare(records: list[dict], others: list[dict | None], name: str) -> dict:
    """The questions that only an arm has right, those that only the other model has, and p.

    records, others: one of each seed. Returns nothing where the other model lacks a seed.
    """
    if None in others:
        return {}
    pairs = [pair for a, b in zip(records, others) for pair in zip(a["right"], b["right"])]
    gains, losses = pairs.count(("1", "0")), pairs.count(("0", "1"))
    return {f"against {name}": f"+{gains} −{losses}", f"p {name}": sign_test(gains, losses)}


def cells(folder: Path, page_fields: int) -> dict[str, list[int]]:
    """The counts of an evaluation, each as [right, all]: of its answers by cell, of its notes."""
    counts = defaultdict(list)  # name -> whether each answer or note counts as right
    world = almanac_world.make_world(page_fields)
    held_out = {question.id: question for question in almanac_world.held_out(world)}
    for record in trajectories(folder):
        question = held_out[record["question_id"]]
        fact = question.fact
        for name in (question.source, "all"):
            counts[name].append(record["reward"] == 1)
        for turn in record["turns"]:
            statements = set()
            for chunk in turn["chunks"]:
                holds = almanac.holds_fact(chunk["prompt"], fact)
                text = chunk["note"].replace("<|im_end|>", "").strip()
                note = almanac.Note(text, fact, holds)
                if not note.silent:
                    statements.add(text)
                counts[f"read {fact.group}" if holds else "rightly silent"].append(note.right)
                if holds:
                    counts["wrongly silent"].append(note.silent)
            if turn["chunks"]:
                counts["different notes"].append(len(statements) > 1)
    return {name: [sum(values), len(values)] for name, values in counts.items()}


# --- the command ----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    methods = parser.add_subparsers(dest="method", required=True)
    for method, arms in ARMS.items():
        own = methods.add_parser(method, allow_abbrev=False)
        real = method == "almanac"
        own.add_argument("--arms", nargs="+", metavar="ARM", choices=arms, default=list(arms))
        own.add_argument("--seeds", type=int, nargs="+", default=[0] if real else [0, 1, 2])
        own.add_argument("--runs", type=Path, default=ROOT / "runs" / f"arms-{method}")
        own.add_argument("--cache", type=Path, default=ROOT / ".cache", help="of the models")
        own.add_argument("--table", action="store_true", help="run nothing")
        if real:
            own.add_argument("--eval_questions", default="240", help="of the evaluations")
            own.add_argument("--records", type=Path, default=RESULTS / "almanac" / "records")
    options, options.more = parser.parse_known_args()
    options.decodings = DECODING
    if options.method != "almanac":
        for seed, arm in itertools.product(options.seeds, () if options.table else options.arms):
            complete_run(options, options.method, arm, seed)
        return publish(f"arms_{options.method}", summarise_toy(options.method, options.runs))
    if not options.table:
        run_missing(options)
    options.seeds = recorded_seeds(options.records)
    publish("table", summarise(options), options.records.parent)
    draw(options, options.records.parent / "arms.png")


if __name__ == "__main__":
    main()
