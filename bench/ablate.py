"""What each part of a method contributes on its toy: an arm changes one thing of the default.

    python -m bench.ablate mars                        every arm with seeds 0 1 2: hours
    python -m bench.ablate matpo --arms matpo single --seeds 0
    python -m bench.ablate marsrl --table              tabulates what is there
    python -m bench.ablate mars --steps 80 --runs FOLDER      other options go to the runs

A seed names a world, its questions and a base model. Within a seed all arms start from the same
weights and meet the same questions in the same order, so an arm is compared with the first one seed
by seed. `replica` changes nothing that should matter; its draws soon differ, and so it shows how
far two runs of one setting lie apart.

How runs are made and resumed: bench/arms.py. Results: bench/results/ablate_METHOD.json.
Tests: pytest tests/test_bench.py
"""

import argparse
import itertools
import sys
from pathlib import Path
from statistics import mean

from bench import arms
from bench.common import read_metrics, save, table

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
}
OF_CHECKS = ("eval_verifier_accuracy", "eval_recall", "eval_false_alarm_share")
# Evaluations, the one that is compared first.
SCORES = {
    "mars": ("eval_accuracy", "eval_greedy"),
    "matpo": ("eval_accuracy", "eval_greedy"),
    "marsrl": ("eval_system", "eval_solver", *OF_CHECKS),
}


def evaluations(run: Path, method: str) -> dict[int, dict[str, float]]:
    """Steps done -> scores then. The last line holds two: before its step, and after."""
    return {
        line[f"eval_step{when}"]: {name: line[name + when] for name in SCORES[method]}
        for line in read_metrics(run)
        for when in ("_before", "")
        if f"eval_step{when}" in line
    }


def summarise(method: str, runs: Path) -> list[dict]:
    """A row for each arm with a complete run: its seeds, and every score by steps done and seed."""
    rows = []
    for arm, changed in ARMS[method].items():
        found = [run for run in sorted(runs.glob(f"{arm}-[0-9]*/")) if arms.is_complete(run)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    methods = parser.add_subparsers(dest="method", required=True)
    for method, known in ARMS.items():
        own = methods.add_parser(method, allow_abbrev=False)
        arms.add_options(own, known, f"ablate-{method}", seeds=[0, 1, 2], threads="1")
    options, options.more = parser.parse_known_args()
    method = options.method
    program = ["mars.py"] if method == "mars" else ["-m", f"siblings.{method}"]
    if not options.table:
        for seed, arm in itertools.product(options.seeds, options.arms):
            arms.complete_run(options, [*program, *ARMS[method][arm]], arm, seed)
    rows = summarise(method, options.runs)
    if not rows:
        sys.exit(f"no complete run in {options.runs}")
    print(report(rows, method))
    print(save(f"ablate_{method}", " ".join(["python -m bench.ablate", *sys.argv[1:]]), rows))


if __name__ == "__main__":
    main()
