"""Ways to give credit to agents that share one model, side by side on one task.

The task is that of siblings/marsrl.py, for there all rules can be told apart: attempts are of
several agents (MARS, MATPO), an agent's own reward is known (MarsRL), and inputs can be repeated
(groups by input). Where an attempt has one planner and its workers, as in MARS's and MATPO's own
tasks, nobody can say what a worker's own reward would be.

    role       the system's reward, a group per role                   MARS
    attempt    the system's reward, among attempts, inherited          MATPO
    pooled     the system's reward, among all samples of the question  the pooled mean
    own        an agent's own reward, a group per stage
    input      the same, a group per input, inputs chosen              MarsRL

Dr. MAS (arXiv 2602.08847) argues against `pooled`; its remedy is `role`. Only the advantages
differ: in every arm the loss is one mean over all agents' samples, and nothing is balanced.

`replica` is `role` with a learning rate that is one thousandth higher. That is nothing, but its
draws soon differ, and so it shows how far two runs of one setting lie apart. (Sums in another order
are too little here: all draws stay the same for 60 steps.) Within a seed all arms start from the
same weights and meet the same questions in the same order. All but `input` play 16 whole systems a
question, which is about as many samples as `input` has; the table gives the tokens. The other arms
change one option of `input`.

    python -m bench.credit                         the rules with seeds 0 1 2, the others with 0
    python -m bench.credit --arms role input --seeds 0
    python -m bench.credit --table                 tabulates and plots what is there

The same command goes on where it stopped (bench/arms.py).

Results: bench/results/credit.json and .png. Tests: pytest tests/test_bench.py
"""

import argparse
import sys
from pathlib import Path
from statistics import mean

from bench import arms, common
from bench.ablations import spread, text

WHOLE = ["--rollouts", "linear", "--group", "16", "--credit"]
RULES = {
    "role": [*WHOLE, "role"],
    "replica": [*WHOLE, "role", "--lr", "0.0005005"],
    "attempt": [*WHOLE, "attempt"],
    "pooled": [*WHOLE, "pooled"],
    "own": [*WHOLE, "own"],
    "input": [],
}
# With seed 0 only, unless --seeds says otherwise.
OTHERS = {
    "input_random": ["--choice", "random"],
    "input_balanced": ["--choice", "balanced"],
    "pipelined": ["--rollouts", "pipelined"],
    "only_solver": ["--learners", "solver"],
    "only_checkers": ["--learners", "checkers"],
}
ARMS = RULES | OTHERS
SCORES = {
    "eval_system": "system",
    "eval_solver": "solver",
    "eval_verifier_accuracy": "verifier",
    "eval_recall": "recall",
    "eval_false_alarm_share": "false alarms",
}
ROLES = ("solver", "verifier", "corrector")
# Okabe and Ito's. An arm without a colour is not drawn.
COLOURS = {
    "role": "#0072b2",
    "attempt": "#56b4e9",
    "pooled": "#777777",
    "own": "#d55e00",
    "input": "#009e73",
}


def scores(lines: list[dict]) -> dict[int, dict[str, float]]:
    """Steps done -> the evaluation then. The last line holds two: before its step, and after."""
    found = {}
    for line in lines:
        for when in ("_before", ""):
            if "eval_step" + when in line:
                values = {name: line[key + when] for key, name in SCORES.items()}
                found[line["eval_step" + when]] = values
    return found


def train(options: argparse.Namespace) -> None:
    """The rules with every seed, then the other arms, unless --seeds says otherwise."""
    rules = [arm for arm in options.arms if arm in RULES]
    others = [arm for arm in options.arms if arm in OTHERS]
    listed = [(arm, seed) for seed in options.seeds or [0, 1, 2] for arm in rules]
    listed += [(arm, seed) for seed in options.seeds or [0] for arm in others]
    arms.train(options, "siblings.marsrl", "verification", ARMS, listed)


def summarise(options: argparse.Namespace) -> list[dict]:
    """One row an arm, over its complete runs."""
    rows = []
    for arm, changed in ARMS.items():
        folders = arms.complete(options, arm)
        if folders:
            row = {"arm": arm, "options": " ".join(changed)}
            rows.append(row | results(folders, options.steps))
    return rows


def results(folders: list[Path], steps: int) -> dict:
    """What some runs of one arm came to: evaluations by step, and the cost of a step."""
    runs = [arms.finished(folder, steps) for folder in folders]
    evaluations = [scores(lines) for lines in runs]
    row = {"seeds": [int(folder.name.rpartition("-")[2]) for folder in folders]}
    for name in SCORES.values():
        row[name] = {}
        for step in sorted(evaluations[0]):
            row[name][step] = spread([found[step][name] for found in evaluations])
    for what in ("samples", "tokens"):
        row[what] = mean(
            mean(sum(line[f"{role}_{what}"] for role in ROLES) for line in lines) for lines in runs
        )
    row["trained tokens"] = mean(mean(line["trained_tokens"] for line in lines) for lines in runs)
    norms = [[line["grad_norm"] for line in lines] for lines in runs]
    row["gradient norm"] = spread([mean(values) for values in norms])
    row["largest norm"] = spread([max(values) for values in norms])
    ended = [arms.how_ended(folder) for folder in folders]
    row["cpu seconds"] = mean(how["cpu_seconds"] for how in ended)
    row["commits"] = sorted({how["commit"] for how in ended})
    return row


def report(rows: list[dict]) -> str:
    """The tables: before and after, and what a step costs."""
    shown = []
    costs = []
    for row in rows:
        steps = sorted(row["system"])
        line = {"arm": row["arm"], "seeds": len(row["seeds"])}
        for name in SCORES.values():
            line[name] = text(row[name][steps[-1]])
        shown.append(line)
        cost = {"arm": row["arm"]}
        cost |= {
            key: f"{row[key]:.0f}" for key in ("samples", "tokens", "trained tokens", "cpu seconds")
        }
        for key in ("gradient norm", "largest norm"):
            cost[key] = f"{row[key]['mean']:.2f} ({row[key]['min']:.2f} … {row[key]['max']:.2f})"
        costs.append(cost)
    first = {"arm": "before training"}
    for name in SCORES.values():
        first[name] = text(rows[0][name][min(rows[0][name])])
    return "\n\n".join(
        [
            "Held out, sampled at temperature 1, at the end: %, mean (min … max) of the seeds\n"
            + common.table([first, *shown]),
            "Cost of a step, and the gradient's norm before clipping\n" + common.table(costs),
        ]
    )


def plot(rows: list[dict], path: Path) -> None:
    """The rules over the steps: mean of the seeds, with a band from the least to the greatest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to load
    from matplotlib.figure import Figure

    panels = {
        "system": "The system is right",
        "solver": "The solver is right",
        "verifier": "The verifier is right",
        "false alarms": "Right solutions flagged",
    }
    figure = Figure(figsize=(11, 3.4), dpi=150, layout="constrained")
    for ax, (name, title) in zip(figure.subplots(1, len(panels), sharey=True), panels.items()):
        arms.prepare_panel(ax, title)
        for row in rows:
            if row["arm"] in COLOURS:
                arms.plot_arm(ax, row[name], row["arm"], COLOURS[row["arm"]])
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncol=len(labels), frameon=False)
    figure.supylabel("share, held out")
    FigureCanvasAgg(figure).print_png(str(path))


def main() -> int:
    """The command line; returns the exit code."""
    options = arms.reader("credit", __doc__, ARMS).parse_args()
    return arms.main("credit", options, train, summarise, report, plot)


if __name__ == "__main__":
    sys.exit(main())
