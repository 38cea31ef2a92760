"""Arms: runs that change one thing of a method on its toy, or of the almanac.

    python -m bench.arms mars                            every arm with seeds 0 1 2: hours
    python -m bench.arms matpo --arms matpo single --seeds 0
    python -m bench.arms marsrl --table                  tabulates what is there
    python -m bench.arms mars --steps 80 --runs FOLDER   other options go to the runs
    python -m bench.arms almanac --arms mars frozen      two arms, seed 0

An arm with a seed is a run RUNS/ARM-SEED, with its log beside it. The same command goes on where it
stopped: a complete run is skipped, half a run is resumed. What is complete stays as it was made:
for other options give another --runs, and for the almanac another --records too.

**On a toy** a seed names a world, its questions and a base model: within a seed all arms start from
the same weights and meet the same questions. `replica` changes nothing that should matter; its
draws soon differ, and so it shows how far two runs of one setting lie apart. Results:
bench/results/arms_METHOD.json.

**The almanac**: a run's last and its first weights are asked the same held-out questions, sampled
and greedily, in RUNS/ARM-SEED-DECODING and RUNS/START-SEED-DECODING. Most arms of a seed begin with
the same weights; those that read in another way begin with a warm start of their own. What the
table needs of an evaluation is kept in RECORDS/NAME.json: which questions were right, counts by
cell (what RL has seen of country and attribute, or what notes are worth), what a step took. An
evaluation that has its record is not made again. Commands with other --arms may share RUNS and
RECORDS. Beside RECORDS: table.json, with, question by question, what an arm gained and lost against
its start and the first arm (McNemar's exact test; over several seeds its p knows nothing of how
seeds differ), and arms.png. On an H100 seven arms side by side (--arms ARM --seeds SEED --threads
1) take some four minutes; a run keeps 3 GB.

Tests: pytest tests/test_bench.py tests/test_almanac.py
"""

import argparse
import io
import itertools
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from atomic import made_once
from bench.common import RESULTS, ROOT, provenance, read_metrics, save, table
from plumbing import curves, folders
from plumbing.metrics import sign_test, wilson_interval, with_interval
from recipes import almanac, almanac_world
from trainer.checkpoint import newest

PROGRAMS = {
    "mars": ["mars.py"],
    "matpo": ["-m", "siblings.matpo"],
    "marsrl": ["-m", "siblings.marsrl"],
    "almanac": ["-m", "recipes.almanac"],
}
WHOLE = ["--rollouts", "linear", "--group", "16", "--credit"]
# method -> arm -> what it changes; the first arm changes nothing
ARMS = {
    "mars": {
        "full": [],
        "replica": ["--lr", "0.0005005"],  # so soon other draws
        "system1_frozen": ["--system1", "frozen"],
        "system1_none": ["--system1", "none"],
        "balance_off": ["--balance", "none"],
        "advantage_mean": ["--advantage", "mean"],
        "loss_mean_token": ["--loss_mean", "token"],
        "packing_off": ["--no-packing"],
        "purpose_off": ["--no-purpose"],
        "shared_group": ["--shared_group"],
        "no_search": ["--tools", "scholar,python"],
        "no_scholar": ["--tools", "search,python"],
        "no_python": ["--tools", "search,scholar"],
        "group_4": ["--group", "4"],
        "group_16": ["--group", "16"],
        "inner_steps_1": ["--inner_steps", "1"],
        "kl_0.01": ["--kl_beta", "0.01"],
    },
    "matpo": {
        "matpo": [],
        "single": ["--no-delegate"],
        "single_wide": ["--no-delegate", "--sys2_context", "320"],
        "no_recap": ["--no-recap"],
        "no_summary": ["--no-summary"],
        "workers_frozen": ["--workers", "frozen"],
        "own_groups": ["--own_groups"],
        "own_groups_balanced": ["--own_groups", "--balance", "uniform"],
    },
    # Rules of credit, and MarsRL's own arms. Whole systems: 16 a question, about as many samples as
    # `input` has. `role` is MARS's rule, `attempt` MATPO's, `input` MarsRL's.
    "marsrl": {
        "role": [*WHOLE, "role"],
        "replica": [*WHOLE, "role", "--lr", "0.0005005"],
        "attempt": [*WHOLE, "attempt"],
        "pooled": [*WHOLE, "pooled"],
        "own": [*WHOLE, "own"],
        "input": [],
        "input_random": ["--choice", "random"],
        "input_balanced": ["--choice", "balanced"],
        "pipelined": ["--rollouts", "pipelined"],
        "only_solver": ["--learners", "solver"],
        "only_checkers": ["--learners", "checkers"],
    },
    "almanac": {
        "mars": [],
        "frozen": ["--system1", "frozen"],
        "candid": ["--credit", "candid"],
        # A page's 12 sections share half of the context: cut to 42 tokens each, or whole (512).
        "none": ["--system1", "none"],
        "one-agent": ["--system1", "none", "--sys2_context", "12288"],
        "passages": ["--preset", "almanac-passages"],
        "balanced": ["--balance", "uniform"],  # the paper's: as many notes as attempts
        "inherited": ["--shared_group"],
        "pooled": ["--credit", "pooled"],
        "own": ["--credit", "own"],
        "group-16": ["--group", "16"],
        "group-32": ["--group", "32"],
        "no-purpose": ["--no-purpose"],
        "no-packing": ["--no-packing"],
    },
}
OWN_START = ("none", "one-agent", "passages", "no-purpose", "no-packing")
DECODING = ("sampled", "greedy")
OF_CHECKS = ("eval_verifier_accuracy", "eval_recall", "eval_false_alarm_share")
# Evaluations, the one that is compared first.
SCORES = {
    "mars": ("eval_accuracy", "eval_greedy"),
    "matpo": ("eval_accuracy", "eval_greedy"),
    "marsrl": ("eval_system", "eval_solver", *OF_CHECKS),
}


# --- runs -----------------------------------------------------------------------------------------


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


# --- toys -----------------------------------------------------------------------------------------


def evaluations(run: Path, method: str) -> dict[int, dict[str, float]]:
    """Steps done -> scores then. The last line holds two: before its step, and after."""
    return {
        line[f"eval_step{when}"]: {name: line[name + when] for name in SCORES[method]}
        for line in read_metrics(run)
        for when in ("_before", "")
        if f"eval_step{when}" in line
    }


def summarise_toy(method: str, runs: Path) -> list[dict]:
    """A row for each arm with a complete run: its seeds, and every score by steps done and seed."""
    rows = []
    for arm, changed in ARMS[method].items():
        found = [run for run in sorted(runs.glob(f"{arm}-[0-9]*/")) if is_complete(run)]
        seeds = {int(run.name.rpartition("-")[2]): evaluations(run, method) for run in found}
        if seeds:
            rows.append({"arm": arm, "options": " ".join(changed), "seeds": seeds})
    return rows


def text(values: list[float], sign: str = "") -> str:
    """mean (min … max), in percent."""
    if not values:
        return "–"
    shown = (f"{100 * value:{sign}.1f}" for value in (mean(values), min(values), max(values)))
    return "{} ({} … {})".format(*shown)


def differences(row: dict, first: dict, score: str) -> list[float]:
    """Seed by seed: a row minus the first one, on average over all evaluations after step 0."""

    def average(seed: dict) -> float:
        return mean(values[score] for step, values in seed.items() if step)

    both = row["seeds"].keys() & first["seeds"].keys()
    return [average(row["seeds"][seed]) - average(first["seeds"][seed]) for seed in sorted(both)]


def report(rows: list[dict], method: str) -> str:
    """The table: each score at the end, and the first one's difference to the first arm."""
    compared, *_ = SCORES[method]
    shown = []
    for row in rows:
        seeds = row["seeds"].values()
        line = {"arm": row["arm"], "seeds": len(seeds)}
        for score in SCORES[method]:
            line[score] = text([seed[max(seed)][score] for seed in seeds])
        if row is not rows[0]:
            line[f"against {rows[0]['arm']}"] = text(differences(row, rows[0], compared), "+")
        shown.append(line)
    head = "At the end, in %: mean (min … max) of the seeds; differences seed by seed, "
    return f"{head}averaged over the evaluations after step 0\n{table(shown)}"


# --- the almanac ----------------------------------------------------------------------------------


def start_of(arm: str) -> str:
    """What an arm's start is called."""
    return f"start-{arm}" if arm in OWN_START else "start"


def run_missing(options: argparse.Namespace) -> None:
    """Every run and evaluation that is missing, seed by seed; the greedy evaluations come last."""
    for decoding, seed, arm in itertools.product(DECODING, options.seeds, options.arms):
        for model in (arm, start_of(arm)):
            path = options.records / f"{model}-{seed}-{decoding}.json"
            if not path.exists():
                # A run itself is asked few questions: what counts is asked afterwards.
                line = [*PROGRAMS["almanac"], *ARMS["almanac"][arm], "--eval_questions", "12"]
                run = complete_run(options, [*line, "--bf16", options.bf16], arm, seed)
                record = evaluate(options, arm, run, model, decoding)
                options.records.mkdir(parents=True, exist_ok=True)
                folders.write_whole(path, json.dumps(record).encode())


def evaluate(options: argparse.Namespace, arm: str, run: Path, model: str, decoding: str) -> dict:
    """The record of an arm's last weights, or of its first ones if `model` is a start's name."""
    made = folders.read_json(run / "config.json")
    line = [*PROGRAMS["almanac"], "eval"]
    if model == arm:
        line += [str(run)]
    else:  # the start, which reads as its arm does
        line += [made["model"], "--seed", str(made["seed"])]
        for name in ("preset", "page_fields", "sys1_prompt"):
            line += [f"--{name}", str(made[name])]
        line += ARMS["almanac"][arm] if arm in OWN_START else []
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
        "cells": cells(folder),
        "right": "".join(str(int(one["reward"] == 1)) for one in rollouts(folder)),
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


def summarise(options: argparse.Namespace) -> list[dict]:
    """A row for each start and arm, and decoding, over all seeds that have it."""
    made = {path.stem: folders.read_json(path) for path in options.records.glob("*.json")}
    first, *_ = ARMS["almanac"]
    rows = []
    names = ["start", *map(start_of, OWN_START), *ARMS["almanac"]]
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
                row[cost] = mean(record["of a step"][cost] for record in records)
        others = {start_of(name), first} if name in ARMS["almanac"] else set()
        for other in sorted(others - {name}):
            theirs = [made.get(other + place) for place in places]
            row |= compared(records, theirs, other)
        rows.append(row)
    return rows


def picture(options: argparse.Namespace) -> bytes:
    """A PNG of right answers, sampled: a dot with its interval by arm and seed, starts hollow."""

    def answers(name: str, seed: int) -> list[int] | None:
        path = options.records / f"{name}-{seed}-sampled.json"
        return folders.read_json(path)["cells"]["all"] if path.exists() else None

    arms = [arm for arm in ARMS["almanac"] if any(answers(arm, seed) for seed in options.seeds)]
    png = io.BytesIO()
    with matplotlib.rc_context(curves.LOOK | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(6, 0.8 + 0.4 * len(arms)), dpi=150, layout="constrained")
        axes = figure.subplots()
        for row, arm in enumerate(arms):
            for place, seed in enumerate(options.seeds):
                began, ended = answers(start_of(arm), seed), answers(arm, seed)
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
    pairs = [pair for a, b in zip(mine, theirs) for pair in zip(a["right"], b["right"])]
    gained, lost = pairs.count(("1", "0")), pairs.count(("0", "1"))
    return {f"against {other}": f"+{gained} −{lost}", f"p {other}": sign_test(gained, lost)}


def cells(folder: Path) -> dict[str, list[int]]:
    """Right answers by cell and in all, and what the notes are worth."""
    counts = defaultdict(lambda: [0, 0])
    world = almanac_world.make_world()
    held_out = {asked.id: asked for asked in almanac_world.held_out(world)}

    def count(name: str, right: bool) -> None:
        counts[name][0] += right
        counts[name][1] += 1

    for record in rollouts(folder):
        question = held_out[record["question_id"]]
        fact = question.fact
        for name in (question.source, "all"):
            count(name, record["reward"] == 1)
        for turn in record["turns"]:
            stated = set()
            for chunk in turn["chunks"]:
                read = chunk["prompt"]
                holds = almanac.holds_fact(read, fact)
                text = chunk["note"].replace("<|im_end|>", "").strip()
                note = almanac.Note(text, fact, holds)
                if not note.silent:
                    stated.add(text)
                count(f"read {fact.group}" if holds else "rightly silent", note.right)
                if holds:
                    count("wrongly silent", note.silent)
            if turn["chunks"]:
                count("different notes", len(stated) > 1)
    return counts


# --- the command ----------------------------------------------------------------------------------


def on_toy(options: argparse.Namespace) -> None:
    """Runs what is missing; the table is of all complete runs. Exits if there are none."""
    method = options.method
    for seed, arm in itertools.product(options.seeds, () if options.table else options.arms):
        complete_run(options, [*PROGRAMS[method], *ARMS[method][arm]], arm, seed)
    rows = summarise_toy(method, options.runs)
    if not rows:
        sys.exit(f"no complete run in {options.runs}")
    print(report(rows, method))
    print(save(f"arms_{method}", command(), rows))


def of_almanac(options: argparse.Namespace) -> None:
    """Runs what is missing; table and picture are of all records. Exits if there are none."""
    if not options.table:
        run_missing(options)
    names = [path.stem.rsplit("-", 2) for path in options.records.glob("*-[0-9]*-*.json")]
    options.seeds = sorted({int(seed) for _, seed, _ in names})
    rows = summarise(options)
    if not rows:
        sys.exit(f"there is no record of an evaluation in {options.records}")
    print(table(rows))
    print(save("table", command(), rows, options.records.parent))
    print(folders.write_whole(options.records.parent / "arms.png", picture(options)))


def command() -> str:
    return " ".join(["python -m bench.arms", *sys.argv[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    methods = parser.add_subparsers(dest="method", required=True)
    for method, known in ARMS.items():
        own = methods.add_parser(method, allow_abbrev=False)
        real = method == "almanac"
        own.add_argument("--arms", nargs="+", metavar="ARM", choices=known, default=list(known))
        own.add_argument("--seeds", type=int, nargs="+", default=[0] if real else [0, 1, 2])
        own.add_argument("--threads", default="2" if real else "1")
        own.add_argument("--runs", type=Path, default=ROOT / "runs" / f"arms-{method}")
        own.add_argument("--cache", type=Path, default=ROOT / ".cache", help="of the models")
        own.add_argument("--table", action="store_true", help="run nothing")
        own.set_defaults(carry=of_almanac if real else on_toy)
        if real:
            own.add_argument("--eval_questions", default="240", help="of the evaluations")
            own.add_argument("--bf16", default="auto", help="of runs and evaluations")
            own.add_argument("--records", type=Path, default=RESULTS / "almanac" / "records")
    options, options.more = parser.parse_known_args()
    options.carry(options)


if __name__ == "__main__":
    main()
