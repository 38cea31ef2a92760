"""Arms of a recipe as runs in a folder: what bench.matpo and bench.credit share.

A run is `python -m recipes.NAME …` in RUNS/ARM-SEED, one thread, with its log (.log) and how it
ended (.run.json) beside it. A complete run is skipped, half a run is resumed, and the base model of
each seed is made first, so that no run's seconds count it.

Tests: pytest tests/test_bench.py
"""

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from bench import common
from bench.ablations import ROOT, Ended, accuracies, alone_in, pool, remember
from config import UserError, fail
from plumbing.folders import read_json, read_lines

STEPS = 60  # of the published tables; others are saved under a name of their own


def reader(name: str, description: str, arms: dict[str, list[str]]) -> argparse.ArgumentParser:
    """The options of such a bench."""
    made = argparse.ArgumentParser(description=description.partition("\n")[0])
    made.add_argument("--seeds", type=int, nargs="+")
    made.add_argument("--arms", nargs="+", choices=arms, default=list(arms), metavar="ARM")
    made.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    made.add_argument("--steps", type=int, default=STEPS)
    made.add_argument("--runs", type=Path, default=ROOT / "runs" / name)
    made.add_argument("--cache", type=Path, default=ROOT / ".cache", help="of the base models")
    made.add_argument("--table", action="store_true", help="tabulate and plot what is there")
    return made


def finished(folder: Path, steps: int) -> list[dict]:
    """The metrics of a run of so many steps, or nothing if it is not complete."""
    if not (folder / "metrics.jsonl").exists():
        return []
    lines = read_lines(folder / "metrics.jsonl")
    if len(lines) > steps:
        raise UserError(f"{folder} has more than --steps {steps}: name other --runs")
    return lines if steps in accuracies(lines) else []


def complete(options: argparse.Namespace, arm: str) -> list[Path]:
    """The folders of an arm's complete runs, by seed."""
    folders = sorted(options.runs.glob(f"{arm}-[0-9]*"))
    return [folder for folder in folders if finished(folder, options.steps)]


def how_ended(folder: Path) -> dict:
    """CPU seconds and commit of a run."""
    return read_json(folder.with_name(f"{folder.name}.run.json"))


def train(
    options: argparse.Namespace,
    recipe: str,
    toy: str,
    arms: dict[str, list[str]],
    listed: list[tuple[str, int]],
) -> None:
    """Every run of `listed` (arm, seed) that is not complete, with the base models before."""
    with alone_in(options.runs):
        make_base_models(options, toy, sorted({seed for _, seed in listed}))
        commands = []
        for arm, seed in listed:
            name = f"{arm}-{seed}"
            if finished(options.runs / name, options.steps):
                continue
            line = ["-m", recipe, "--name", name, "--runs", str(options.runs)]
            line += ["--cache", str(options.cache), "--seed", str(seed), "--threads", "1"]
            line += ["--steps", str(options.steps), *arms[arm]]
            if (options.runs / name / "config.json").exists():
                line.append("--resume")
            commands.append((name, line))
        print(f"{len(commands)} runs to do", flush=True)

        def on_end(ended: Ended) -> None:
            remember(options.runs / ended.name, ended)
            outcome = f"failed, exit {ended.code}" if ended.code else "ok"
            print(f"{ended.name}: {outcome}, {ended.cpu_seconds:.0f} CPU s", flush=True)

        pool(commands, options.runs, options.jobs, on_end)


def make_base_models(options: argparse.Namespace, toy: str, seeds: list[int]) -> None:
    """The base model of each seed."""

    def on_end(ended: Ended) -> None:
        if ended.code:
            raise UserError(f"{ended.name} could not be made, see {options.runs / ended.name}.log")

    commands = []
    for seed in seeds:
        build = f"{toy}.build({str(options.cache)!r}, {seed}, threads=1)"
        commands.append((f"base-{seed}", ["-c", f"from toy import {toy}; {build}"]))
    pool(commands, options.runs, options.jobs, on_end)


def plot_arm(ax, by_step: dict[int, dict], label: str, colour: str) -> None:
    """One line: the mean of the seeds, with a band from the least to the greatest."""
    steps = sorted(by_step)
    values = [by_step[step] for step in steps]
    low = [value["min"] for value in values]
    high = [value["max"] for value in values]
    ax.fill_between(steps, low, high, color=colour, alpha=0.16, lw=0)
    middle = [value["mean"] for value in values]
    ax.plot(steps, middle, color=colour, marker="o", markersize=3, label=label)


def prepare_panel(ax, title: str) -> None:
    """A panel of shares over steps."""
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_ylim(0, 1)
    ax.set_xlabel("RL steps")
    ax.grid(axis="y", alpha=0.25)


def main(
    name: str,
    options: argparse.Namespace,
    train: Callable,
    summarise: Callable[[argparse.Namespace], list[dict]],
    report: Callable[[list[dict]], str],
    plot: Callable[[list[dict], Path], None],
) -> int:
    """Runs, table, results and figure; returns the exit code."""
    options.runs = options.runs.resolve()
    options.cache = options.cache.resolve()
    # `pool` ends the run under way on sys.exit; a bare SIGTERM would leave it behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if not options.table:
            train(options)
        rows = summarise(options)
        if not rows:
            raise UserError(f"no complete run in {options.runs}")
        print(report(rows))
        command = " ".join([f"python -m bench.{name}", *sys.argv[1:]])
        saved = name if options.steps == STEPS else f"{name}_{options.steps}"
        print(common.save(saved, command, rows, steps=options.steps))
        plot(rows, common.RESULTS / f"{saved}.png")
        return 0
    except UserError as error:
        return fail(error)
    except KeyboardInterrupt:
        return fail("interrupted; the same command goes on where it stopped")
