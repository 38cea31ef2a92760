"""The atlas before and after RL: the warm start, the trained model, and arms that change one thing.

    python -m bench.atlas --bf16 on                                  seed 0
    python -m bench.atlas --bf16 on --seeds 0 1 2 --arms frozen      also with System 1 frozen
    python -m bench.atlas --seeds 0 1 2 --table                      tabulates what is there

A seed is a run of `python -m recipes.atlas` in RUNS/rl-SEED, an arm one in RUNS/ARM-SEED. Options
that the bench lacks are the runs'. Held-out questions are put to each trained model and to the warm
start, sampled and greedily. The column "gained" compares two models question by question (McNemar's
exact test): the trained one with its warm start, an arm with the run. A paired test finds smaller
differences than two intervals do. What is there is not made again; half a run is resumed.

Results: bench/results/PRESET/table.json. Tests: pytest tests/test_bench.py
"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

from bench.ablate import read_metrics
from bench.common import ROOT, save, table
from plumbing.metrics import sign_test, wilson_interval

ARMS = {
    "frozen": ["--system1", "frozen"],
    "no-purpose": ["--no-purpose"],  # a warm start of its own: purposes are taught there
    "balance-none": ["--balance", "none"],
    "sample-mean": ["--loss_mean", "sample"],
    # Only a mean over samples lets this balancing be unbiased, so it is compared with that one.
    "balance-advantage": ["--loss_mean", "sample", "--balance", "advantage"],
    "inherited": ["--shared_group"],
}
# A row of the table -> the row that it is compared with.
MODELS = {
    "start-rl": None,
    "after-rl": "start-rl",
    "start-no-purpose": "start-rl",
    **{f"after-{arm}": "after-rl" for arm in ARMS},
    "after-balance-advantage": "after-sample-mean",
}
DECODING = ("sampled", "greedy")
HELD_OUT = "200"


def carry_out(options: argparse.Namespace, name: str, arguments: list[str]) -> None:
    """One command of recipes.atlas; its log lies beside its folder."""
    line = ["-m", "recipes.atlas", *arguments, "--name", name]
    line += ["--runs", str(options.runs), "--cache", str(options.cache)]
    print(f"python {' '.join(line)}", flush=True)
    with open(options.runs / f"{name}.log", "a") as log:
        subprocess.run([sys.executable, *line], cwd=ROOT, stdout=log, stderr=log, check=True)


def is_finished(folder: Path) -> bool:
    """Whether a run was evaluated after its last step."""
    lines = read_metrics(folder)
    return bool(lines) and lines[-1].get("eval_step") == lines[-1]["step"] + 1


def run_missing(options: argparse.Namespace) -> None:
    """Every run and evaluation that is missing, seed by seed."""
    options.runs.mkdir(parents=True, exist_ok=True)
    for seed, arm in itertools.product(options.seeds, ("rl", *options.arms)):
        folder = options.runs / f"{arm}-{seed}"
        changed = ARMS.get(arm, [])
        begun = (folder / "config.json").exists()
        if not is_finished(folder):
            line = ["--seed", str(seed), *options.both, *options.more, *changed]
            carry_out(options, folder.name, line + ["--resume"] * begun)
        made = json.loads((folder / "config.json").read_text())
        asked = {f"after-{arm}": [str(folder)]}
        if f"start-{arm}" in MODELS:
            asked[f"start-{arm}"] = [made["model"], "--seed", str(seed), *options.both, *changed]
        for (name, line), decoding in itertools.product(asked.items(), DECODING):
            target = options.runs / f"{name}-{decoding}-{seed}"
            if (target / "table.json").exists():
                continue
            shutil.rmtree(target, ignore_errors=True)  # the beginning of one that was cut short
            temperature = str(made["temperature"]) if decoding == "sampled" else "0"
            line = [*line, "--temperature", temperature, "--eval_questions", HELD_OUT]
            carry_out(options, target.name, ["eval", *line])


def answers(folder: Path) -> dict[str, bool]:
    """Of an evaluation: question id -> whether its answer is right."""
    lines = (folder / "rollouts" / "step_0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["question_id"]: record["reward"] == 1 for record in records}


def summarise(runs: Path, seeds: list[int]) -> list[dict]:
    """A row for each model and decoding, over all seeds that have it."""
    rows = []
    for (model, reference), decoding in itertools.product(MODELS.items(), DECODING):
        folders = [runs / f"{model}-{decoding}-{seed}" for seed in seeds]
        folders = [folder for folder in folders if (folder / "table.json").exists()]
        if not folders:
            continue
        row = {"model": model, "decoding": decoding, "seeds": len(folders)}
        parts = [part for f in folders for part in json.loads((f / "table.json").read_text())]
        for name in dict.fromkeys(part["set"] for part in parts):
            same = [part for part in parts if part["set"] == name]
            asked = sum(part["questions"] for part in same)
            right = sum(round(part["accuracy"] * part["questions"]) for part in same)
            row[name] = [right / asked, *wilson_interval(right, asked)]
        rows.append(row | compare(folders, model, reference))
    return rows


def compare(folders: list[Path], model: str, reference: str | None) -> dict:
    """Questions that `model` has right and its reference has not, the reverse, and p."""
    gained = lost = 0
    for folder in folders:
        other = folder.with_name(folder.name.replace(model, str(reference), 1))
        if not (other / "table.json").exists():
            return {}
        mine, theirs = answers(folder), answers(other)
        gained += sum(mine[question] > theirs[question] for question in mine)
        lost += sum(mine[question] < theirs[question] for question in mine)
    return {"gained": gained, "lost": lost, "p": sign_test(gained, lost)}


def report(rows: list[dict]) -> str:
    shown = []
    for row in rows:
        line = dict(row)
        for key, value in row.items():
            if isinstance(value, list):
                line[key] = "{:.0%} ({:.0%}–{:.0%})".format(*value)
        shown.append(line)
    return table(shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", default=[], choices=ARMS)
    parser.add_argument("--preset", default="atlas", help="of runs and evaluations")
    parser.add_argument("--bf16", default="auto", help="of runs and evaluations")
    parser.add_argument("--threads", default="2", help="of runs and evaluations")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "atlas-bench")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache", help="of the models")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options, options.more = parser.parse_known_args()
    options.both = [
        "--preset",
        options.preset,
        "--bf16",
        options.bf16,
        "--threads",
        options.threads,
    ]
    if not options.table:
        try:
            run_missing(options)
        except subprocess.CalledProcessError as error:
            parser.exit(1, f"{' '.join(error.cmd)} failed: see its log in {options.runs}\n")
    rows = summarise(options.runs, options.seeds)
    if not rows:
        parser.exit(1, f"nothing was evaluated in {options.runs}\n")
    print(report(rows))
    command = " ".join(["python -m bench.atlas", *sys.argv[1:]])
    print(save(f"{options.preset}/table", command, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
