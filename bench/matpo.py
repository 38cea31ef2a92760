"""What each part of MATPO contributes on its toy: an arm of siblings/matpo.py changes one thing.

    python -m bench.matpo                            every arm with seed 0, one run at a time
    python -m bench.matpo --arms matpo single --seeds 0 1 2
    python -m bench.matpo --table                    tabulates and plots what is there

The same command goes on where it stopped (bench/arms.py). Within a seed all arms start from the
same weights and meet the same questions in the same order.

Results: bench/results/matpo.json and .png. Tests: pytest tests/test_bench.py
"""

import argparse
import sys
from pathlib import Path
from statistics import mean

from bench import arms, common
from bench.ablations import COLOURS, accuracies, spread, text

# name: what the arm changes of the default setting
ARMS = {
    "matpo": [],
    "single": ["--no-delegate"],
    "single_wide": ["--no-delegate", "--sys2_context", "320"],
    "no_recap": ["--no-recap"],
    "no_summary": ["--no-summary"],
    "workers_frozen": ["--workers", "frozen"],
    "own_groups": ["--own_groups"],
    "own_groups_balanced": ["--own_groups", "--balance", "uniform"],
}
PANELS = {
    "Delegate?": {
        "matpo": "to workers",
        "single": "single agent",
        "single_wide": "the same, twice the context",
    },
    "What a worker is given and gives": {
        "matpo": "recap and summary",
        "no_recap": "no recap",
        "no_summary": "no summary",
        "workers_frozen": "workers frozen",
    },
    "A worker's advantage": {
        "matpo": "its planner's",
        "own_groups": "own group (MARS)",
        "own_groups_balanced": "own group, balanced",
    },
}
COSTS = ("worker_samples", "worker_tokens", "planner_tokens", "trained_tokens")


def summarise(options: argparse.Namespace) -> list[dict]:
    """One row an arm, over its complete runs."""
    rows = []
    for arm, changed in ARMS.items():
        folders = arms.complete(options, arm)
        if not folders:
            continue
        runs = [arms.finished(folder, options.steps) for folder in folders]
        row = {"arm": arm, "options": " ".join(changed), "seeds": len(runs)}
        scores = [accuracies(lines) for lines in runs]
        for index, name in enumerate(("accuracy", "greedy")):
            row[name] = {}
            for step in scores[0]:
                row[name][step] = spread([score[step][index] for score in scores])
        for key in COSTS:
            row[key] = mean(mean(line[key] for line in lines) for lines in runs)
        ended = [arms.how_ended(folder) for folder in folders]
        row["cpu_seconds"] = mean(how["cpu_seconds"] for how in ended)
        row["commits"] = sorted({how["commit"] for how in ended})
        rows.append(row)
    return rows


def report(rows: list[dict]) -> str:
    """The table: accuracy at temperature 1 while learning, greedy at the end, costs of a step."""
    shown = []
    for row in rows:
        steps = sorted(row["accuracy"])
        line = {"arm": row["arm"], "seeds": row["seeds"]}
        for step in steps:
            line[f"step {step}"] = text(row["accuracy"][step])
        line["greedy"] = text(row["greedy"][steps[-1]])
        line |= {key: f"{row[key]:.0f}" for key in (*COSTS, "cpu_seconds")}
        shown.append(line)
    return common.table(shown)


def plot(rows: list[dict], path: Path) -> None:
    """One panel a question, of held-out accuracy over the steps; bands from worst to best seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to load
    from matplotlib.figure import Figure

    found = {row["arm"]: row for row in rows}
    figure = Figure(figsize=(10, 4.4), dpi=150, layout="constrained")
    for ax, (question, labels) in zip(figure.subplots(1, 3, sharey=True), PANELS.items()):
        arms.prepare_panel(ax, question)
        for colour, (arm, label) in zip(COLOURS, labels.items()):
            if arm in found:
                arms.plot_arm(ax, found[arm]["accuracy"], label, colour)
        ax.legend(loc="upper left", bbox_to_anchor=(0, -0.16), frameon=False, fontsize=9)
    figure.supylabel("held-out accuracy")
    FigureCanvasAgg(figure).print_png(str(path))


def main() -> int:
    """The command line; returns the exit code."""
    options = arms.reader("matpo", __doc__, ARMS).parse_args()

    def train(options: argparse.Namespace) -> None:
        listed = [(arm, seed) for seed in options.seeds or [0] for arm in options.arms]
        arms.train(options, "siblings.matpo", "delegation", ARMS, listed)

    return arms.main("matpo", options, train, summarise, report, plot)


if __name__ == "__main__":
    sys.exit(main())
