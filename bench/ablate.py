"""What each part of a method contributes on its toy: an arm changes one thing of the default.

    python -m bench.ablate mars                        every arm with seeds 0 1 2: hours
    python -m bench.ablate matpo --arms matpo single --seeds 0
    python -m bench.ablate marsrl --table              tabulates what is there

A seed names a world, its questions and a base model. Within a seed all arms start from the same
weights and meet the same questions in the same order, so an arm is compared with the first one seed
by seed. `replica` changes nothing that should matter; its draws soon differ, and so it shows how
far two runs of one setting lie apart.

A run is RUNS/ARM-SEED, with its log beside it. The same command goes on where it stopped: a
complete run is skipped, half a run is resumed. Commands with other seeds or arms may run beside it.

Results: bench/results/ablate_METHOD.json. Tests: pytest tests/test_bench.py
"""

import argparse
import itertools
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

from bench.common import ROOT, read_metrics, save, table

WHOLE = ["--rollouts", "linear", "--group", "16", "--credit"]
# method -> arm -> what it changes; the first arm changes nothing
ARMS = {
    "mars": {
        "full": [],
        "replica": ["--lr", "0.0005005"],  # so soon other draws
        "system1_frozen": ["--system1", "frozen"],
        "system1_none": ["--system1", "none"],
        "balance_off": ["--balance", "none"],
        "balance_advantage": ["--balance", "advantage"],
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
}
COMMANDS = {
    "mars": ["mars.py"],
    "matpo": ["-m", "siblings.matpo"],
    "marsrl": ["-m", "siblings.marsrl"],
}
STEPS = {"mars": 40, "matpo": 60, "marsrl": 60}
# Evaluations by column, the one that is compared first.
SCORES = {
    "mars": {"sampled": "eval_accuracy", "greedy": "eval_greedy"},
    "matpo": {"sampled": "eval_accuracy", "greedy": "eval_greedy"},
    "marsrl": {
        "system": "eval_system",
        "solver": "eval_solver",
        "verifier": "eval_verifier_accuracy",
        "recall": "eval_recall",
        "false alarms": "eval_false_alarm_share",
    },
}


def evaluations(lines: list[dict], method: str) -> dict[int, dict[str, float]]:
    """Steps done -> scores then. The last line holds two: before its step, and after."""
    found = {}
    for line in lines:
        for when in ("_before", ""):
            if f"eval_step{when}" in line:
                values = {name: line[key + when] for name, key in SCORES[method].items()}
                found[line[f"eval_step{when}"]] = values
    return found


def run_missing(method: str, options: argparse.Namespace) -> None:
    """Runs what is not complete. subprocess.CalledProcessError where a run fails."""
    options.runs.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for seed, arm in itertools.product(options.seeds, options.arms):
        folder = options.runs / f"{arm}-{seed}"
        if options.steps in evaluations(read_metrics(folder), method):
            continue
        line = [*COMMANDS[method], "--name", folder.name, "--runs", str(options.runs)]
        line += ["--cache", str(options.cache), "--seed", str(seed), "--threads", "1"]
        line += ["--steps", str(options.steps), *ARMS[method][arm]]
        if (folder / "config.json").exists():
            line.append("--resume")
        print(f"python {' '.join(line)}", flush=True)
        with open(f"{folder}.log", "a") as log:
            streams = {"stdout": log, "stderr": log, "check": True}
            subprocess.run([sys.executable, *line], cwd=ROOT, env=environment, **streams)


def summarise(method: str, runs: Path, steps: int) -> list[dict]:
    """A row for each arm with a complete run: its seeds, and every score by steps done and seed."""
    rows = []
    for arm, changed in ARMS[method].items():
        seeds = {}
        for folder in sorted(runs.glob(f"{arm}-[0-9]*/")):
            found = evaluations(read_metrics(folder), method)
            if steps in found:
                shown = {step: found[step] for step in sorted(found) if step <= steps}
                seeds[int(folder.name.rpartition("-")[2])] = shown
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


def report(rows: list[dict], method: str, steps: int) -> str:
    """The table: each score at the end, and the first one's difference to the first arm."""
    compared, *_ = SCORES[method]
    shown = []
    for row in rows:
        line = {"arm": row["arm"], "seeds": len(row["seeds"])}
        for score in SCORES[method]:
            line[score] = text([seed[steps][score] for seed in row["seeds"].values()])
        if row is not rows[0]:
            line[f"against {rows[0]['arm']}"] = text(differences(row, rows[0], compared), "+")
        shown.append(line)
    head = f"After {steps} steps, in %: mean (min … max) of the seeds; differences seed by seed, "
    return f"{head}averaged over the evaluations after step 0\n{table(shown)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("method", choices=ARMS)
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="all, unless named")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of RL, when other than the published ones")
    parser.add_argument("--runs", type=Path, help="folder of the runs")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache", help="of the base models")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    method = options.method
    options.arms = options.arms or list(ARMS[method])
    if unknown := set(options.arms) - set(ARMS[method]):
        parser.error(f"{method} has no arm {min(unknown)}: choose from {', '.join(ARMS[method])}")
    options.steps = options.steps or STEPS[method]
    options.runs = (options.runs or ROOT / "runs" / f"ablate-{method}").resolve()
    options.cache = options.cache.resolve()
    try:
        if not options.table:
            run_missing(method, options)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd)} failed: see its log in {options.runs}")
    rows = summarise(method, options.runs, options.steps)
    if not rows:
        sys.exit(f"no complete run in {options.runs}")
    print(report(rows, method, options.steps))
    command = " ".join(["python -m bench.ablate", *sys.argv[1:]])
    print(save(f"ablate_{method}", command, rows, steps=options.steps))


if __name__ == "__main__":
    main()
