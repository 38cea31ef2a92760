"""Ways to give credit to agents that share one model, side by side on one task.

The task is that of recipes/marsrl.py, for there all rules can be told apart: attempts are of
several agents (MARS, MATPO), an agent's own reward is known (MarsRL), and inputs can be repeated
(groups by input). Where an attempt has one planner and its workers, as in MARS's and MATPO's own
tasks, nobody can say what a worker's own reward would be.

    role       the system's reward, a group per role                   MARS; Dr. MAS's remedy
    attempt    the system's reward, among attempts, inherited          MATPO
    pooled     the system's reward, among all samples of the question  what Dr. MAS argues against
    own        an agent's own reward, a group per stage
    input      the same, a group per input, inputs chosen              MarsRL

`replica` is `role` with a learning rate that is one thousandth higher. That is nothing, but its
draws soon differ, and so it shows how far two runs of one setting lie apart. (Sums in another order
are too little here: all draws stay the same for 60 steps.) Within a seed all arms start from the
same weights and meet the same questions in the same order. The first four rules play 16 whole
systems a question, which is about as many samples as `input` has; the table has the tokens. The
other arms are MarsRL's own.

    python -m bench.credit                         the rules with seeds 0 1 2, the others with 0
    python -m bench.credit --arms role input --seeds 0
    python -m bench.credit --table                 tabulates and plots what is there

A run is `python -m recipes.marsrl …` in RUNS/ARM-SEED, one thread, with its log beside it. The same
command goes on where it stopped: a complete run is skipped, half a run is resumed.

Results: bench/results/credit.json and .png. Tests: pytest tests/test_marsrl.py
"""

import argparse
import sys
from pathlib import Path
from statistics import mean

from bench import common
from bench.ablations import ROOT, Ended, alone_in, pool, remember, spread, text
from bench.matpo import finished
from config import UserError, fail
from plumbing.files import read_json

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
# Of Okabe and Ito.
COLOURS = {
    "role": "#0072b2",
    "attempt": "#56b4e9",
    "pooled": "#777777",
    "own": "#d55e00",
    "input": "#009e73",
}


def scores(lines: list[dict]) -> dict[int, dict[str, float]]:
    """Steps done -> the evaluation after them. The last line has one before it and one after."""
    found = {}
    for line in lines:
        for when in ("_before", ""):
            if "eval_step" + when in line:
                values = {name: line[key + when] for key, name in SCORES.items()}
                found[line["eval_step" + when]] = values
    return found


def train(options: argparse.Namespace) -> None:
    """Every run that is not complete, one after the other."""
    with alone_in(options.runs):
        make_base_models(options)
        commands = []
        for arm, seed in options.listed:
            name = f"{arm}-{seed}"
            if finished(options.runs / name, options.steps):
                continue
            line = ["-m", "recipes.marsrl", "--name", name, "--runs", str(options.runs)]
            line += ["--cache", str(options.cache), "--seed", str(seed), "--threads", "1"]
            line += ["--steps", str(options.steps), "--eval_every", "15", *ARMS[arm]]
            if (options.runs / name / "config.json").exists():
                line.append("--resume")
            commands.append((name, line))
        print(f"{len(commands)} runs to do", flush=True)

        def on_end(ended: Ended) -> None:
            remember(options.runs / ended.name, ended)
            outcome = f"failed, exit {ended.code}" if ended.code else "ok"
            print(f"{ended.name}: {outcome}, {ended.cpu_seconds:.0f} CPU s", flush=True)

        pool(commands, options.runs, options.jobs, on_end)


def make_base_models(options: argparse.Namespace) -> None:
    """The base model of each seed, so that no run's seconds count it."""

    def on_end(ended: Ended) -> None:
        if ended.code:
            raise UserError(f"{ended.name} could not be made, see {options.runs / ended.name}.log")

    commands = []
    for seed in sorted({seed for _, seed in options.listed}):
        build = f"verification.build({str(options.cache)!r}, {seed}, threads=1)"
        commands.append((f"base-{seed}", ["-c", f"from toy import verification; {build}"]))
    pool(commands, options.runs, options.jobs, on_end)


def summarise(options: argparse.Namespace) -> list[dict]:
    """One row an arm, over its complete runs."""
    rows = []
    for arm, changed in ARMS.items():
        folders = sorted(options.runs.glob(f"{arm}-[0-9]*"))
        folders = [folder for folder in folders if finished(folder, options.steps)]
        if folders:
            rows.append(
                {"arm": arm, "options": " ".join(changed)} | results(folders, options.steps)
            )
    return rows


def results(folders: list[Path], steps: int) -> dict:
    """What some runs of one arm came to: evaluations by step, and the cost of a step."""
    runs = [finished(folder, steps) for folder in folders]
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
    ended = [read_json(folder.with_name(f"{folder.name}.run.json")) for folder in folders]
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
        ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_ylim(0, 1)
        ax.set_xlabel("RL steps")
        ax.grid(axis="y", alpha=0.25)
        for row in rows:
            if row["arm"] not in COLOURS:
                continue
            colour = COLOURS[row["arm"]]
            steps = sorted(row[name])
            values = [row[name][step] for step in steps]
            low = [value["min"] for value in values]
            high = [value["max"] for value in values]
            ax.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
            middle = [value["mean"] for value in values]
            ax.plot(steps, middle, color=colour, marker="o", markersize=3, label=row["arm"])
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncol=len(labels), frameon=False)
    figure.supylabel("share, held out")
    FigureCanvasAgg(figure).print_png(str(path))


def main() -> int:
    """The command line; returns the exit code."""
    reader = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    reader.add_argument("--seeds", type=int, nargs="+")
    reader.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    reader.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    reader.add_argument("--steps", type=int, default=60)
    reader.add_argument("--runs", type=Path, default=ROOT / "runs" / "credit")
    reader.add_argument("--cache", type=Path, default=ROOT / ".cache", help="of the base models")
    reader.add_argument("--table", action="store_true", help="run nothing")
    options = reader.parse_args()
    options.runs = options.runs.resolve()
    options.cache = options.cache.resolve()
    rules = [arm for arm in options.arms if arm in RULES]
    others = [arm for arm in options.arms if arm in OTHERS]
    options.listed = [(arm, seed) for seed in options.seeds or [0, 1, 2] for arm in rules]
    options.listed += [(arm, seed) for seed in options.seeds or [0] for arm in others]
    try:
        if not options.table:
            train(options)
        rows = summarise(options)
        if not rows:
            raise UserError(f"no complete run in {options.runs}")
        print(report(rows))
        command = " ".join(["python -m bench.credit", *sys.argv[1:]])
        print(common.save("credit", command, rows, steps=options.steps))
        plot(rows, common.RESULTS / "credit.png")
        return 0
    except UserError as error:
        return fail(error)
    except KeyboardInterrupt:
        return fail("interrupted; the same command goes on where it stopped")


if __name__ == "__main__":
    sys.exit(main())
