"""What each part of MATPO contributes on its toy: recipes/matpo.py with one thing changed an arm.

    python -m bench.matpo                            every arm with seed 0, one run at a time
    python -m bench.matpo --arms matpo single --seeds 0 1 2
    python -m bench.matpo --table                    tabulates and plots what is there

A run is `python -m recipes.matpo …` in RUNS/ARM-SEED, one thread, with its log beside it. The same
command goes on where it stopped: a complete run is skipped, half a run is resumed. Within a seed
all arms start from the same weights and meet the same questions in the same order.

Results: bench/results/matpo.json and .png. Tests: pytest tests/test_matpo.py
"""

import argparse
import signal
import sys
from pathlib import Path
from statistics import mean

from bench import common
from bench.ablations import COLOURS, ROOT, Ended, accuracies, pool, remember, spread, text
from config import UserError, fail
from plumbing.files import read_json, read_lines

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
    "Whose advantage has a worker?": {
        "matpo": "its planner's",
        "own_groups": "own group (MARS)",
        "own_groups_balanced": "own group, balanced",
    },
}
COSTS = ("worker_samples", "worker_tokens", "planner_tokens", "trained_tokens")


def finished(folder: Path, steps: int) -> list[dict]:
    """The metrics of a run's first `steps` steps if it has them all, else nothing."""
    if not (folder / "metrics.jsonl").exists():
        return []
    lines = [line for line in read_lines(folder / "metrics.jsonl") if line["step"] < steps]
    return lines if steps in accuracies(lines) else []


def train(options: argparse.Namespace) -> None:
    """Every run that is not complete, one after the other."""
    options.runs.mkdir(parents=True, exist_ok=True)
    commands = []
    for seed in options.seeds:
        for arm in options.arms:
            name = f"{arm}-{seed}"
            if finished(options.runs / name, options.steps):
                continue
            line = ["-m", "recipes.matpo", "--name", name, "--runs", str(options.runs)]
            line += ["--cache", str(options.cache), "--seed", str(seed), "--threads", "1"]
            line += ["--steps", str(options.steps)]
            if (options.runs / name / "config.json").exists():
                line.append("--resume")
            commands.append((name, line + ARMS[arm] + options.more))
    print(f"{len(commands)} runs to do", flush=True)

    def on_end(ended: Ended) -> None:
        remember(options.runs / ended.name, ended)
        outcome = f"failed, exit {ended.code}" if ended.code else "ok"
        print(f"{ended.name}: {outcome}, {ended.cpu_seconds:.0f} CPU s", flush=True)

    pool(commands, options.runs, 1, on_end)


def summarise(options: argparse.Namespace) -> list[dict]:
    """One row an arm, over its complete runs."""
    rows = []
    for arm, changed in ARMS.items():
        folders = sorted(options.runs.glob(f"{arm}-[0-9]*"))
        folders = [folder for folder in folders if finished(folder, options.steps)]
        runs = [finished(folder, options.steps) for folder in folders]
        if not runs:
            continue
        row = {"arm": arm, "options": " ".join(changed), "seeds": len(runs)}
        scores = [accuracies(lines) for lines in runs]
        for index, name in enumerate(("accuracy", "greedy")):
            row[name] = {
                step: spread([score[step][index] for score in scores]) for step in scores[0]
            }
        for key in COSTS:
            row[key] = mean(mean(line[key] for line in lines) for lines in runs)
        ended = [read_json(folder.with_name(f"{folder.name}.run.json")) for folder in folders]
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
    figure = Figure(figsize=(10, 3.6), dpi=150, layout="constrained")
    for ax, (question, arms) in zip(figure.subplots(1, 3, sharey=True), PANELS.items()):
        ax.set_title(question, loc="left", fontsize=11, fontweight="bold")
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_ylim(0, 1)
        ax.set_xlabel("RL steps")
        ax.grid(axis="y", alpha=0.25)
        for colour, (arm, label) in zip(COLOURS, arms.items()):
            if arm not in found:
                continue
            steps = sorted(found[arm]["accuracy"])
            values = [found[arm]["accuracy"][step] for step in steps]
            low = [value["min"] for value in values]
            high = [value["max"] for value in values]
            ax.fill_between(steps, low, high, color=colour, alpha=0.18, lw=0)
            middle = [value["mean"] for value in values]
            ax.plot(steps, middle, color=colour, marker="o", markersize=3, label=label)
        ax.legend(loc="lower right", frameon=False, fontsize=9)
    figure.supylabel("held-out accuracy")
    FigureCanvasAgg(figure).print_png(str(path))


def main() -> int:
    """The command line; returns the exit code."""
    reader = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    reader.add_argument("--seeds", type=int, nargs="+", default=[0])
    reader.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    reader.add_argument("--steps", type=int, default=60)
    reader.add_argument("--runs", type=Path, default=ROOT / "runs" / "matpo")
    reader.add_argument("--cache", type=Path, default=ROOT / ".cache", help="of the base models")
    reader.add_argument("--table", action="store_true", help="run nothing")
    options, options.more = reader.parse_known_args()
    options.runs = options.runs.resolve()
    options.cache = options.cache.resolve()
    # The run that is going on ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if not options.table:
            train(options)
        rows = summarise(options)
        if not rows:
            raise UserError(f"no complete run in {options.runs}")
        print(report(rows))
        command = " ".join(["python -m bench.matpo", *sys.argv[1:]])
        print(common.save("matpo", command, rows))
        plot(rows, common.RESULTS / "matpo.png")
        return 0
    except UserError as error:
        return fail(error)
    except KeyboardInterrupt:
        return fail("interrupted; the same command goes on where it stopped")


if __name__ == "__main__":
    sys.exit(main())
