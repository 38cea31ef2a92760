"""What each part of MARS contributes on the toy.

Every arm changes one thing of the default setting and trains for 80 steps with each seed. A seed
names a world, its questions and a base model. Within a seed all arms start from the same weights
and meet the same questions in the same order, so an arm is compared with `full` seed by seed.

`replica` is `full` with its sums in another order. Its last bits differ, soon its draws do, and so
it shows how far two runs of one setting lie apart. An arm without a tool keeps the questions that
need it, in training and held out, so that its accuracy shows what the tool was worth.

    python -m bench.ablations                      all arms, seeds 0 1 2, two runs at a time
    python -m bench.ablations --arms full balance_off --seeds 0
    python -m bench.ablations --table              tabulates and plots what is there
    python -m bench.ablations --quick              4 steps, few questions; a try

A run is `python mars.py …` in RUNS/ARM-SEED. Beside it lie its log (.log) and how it ended
(.run.json). The same command goes on where it stopped:

  - a complete run is skipped; of one with more steps the first `--steps` count
  - half a run is resumed
  - a failed run is tried again, and listed as failed if it fails again

Results: bench/results/ablations.json and .png, or other names with --out; with --quick in RUNS.
Tests: pytest tests/test_bench.py
"""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import mars
from bench import common
from config import Config, UserError, fail, parse, parser, resolve
from plumbing.folders import read_lines, write_whole

ROOT = Path(__file__).parent.parent
# name: what the arm changes of the default setting
ARMS = {
    "full": [],
    "replica": ["--micro_tokens", "4096"],
    "system1_frozen": ["--system1", "frozen"],
    "system1_none": ["--system1", "none"],
    "balance_off": ["--balance", "none"],
    "balance_advantage": ["--balance", "advantage"],
    "advantage_mean": ["--advantage", "mean"],
    "loss_mean_token": ["--loss_mean", "token"],
    "refill_1": ["--refill", "1"],
    "packing_off": ["--no-packing"],
    "purpose_off": ["--no-purpose"],
    "shared_group": ["--shared_group"],
    "no_search": ["--tools", "scholar,python"],
    "no_scholar": ["--tools", "search,python"],
    "no_python": ["--tools", "search,scholar"],
    "group_4": ["--group", "4"],
    "group_16": ["--group", "16"],
    "inner_steps_4": ["--inner_steps", "4"],
    "kl_0.01": ["--kl_beta", "0.01"],
}
# The figure: a question a panel, and what its arms are called there.
PANELS = {
    "System 1: who plays it?": {
        "full": "the policy",
        "system1_frozen": "frozen start",
        "system1_none": "nobody",
    },
    "Balance the two roles?": {
        "full": "uniform",
        "balance_advantage": "by advantage",
        "balance_off": "no",
    },
    "Pack documents?": {"full": "FFD", "packing_off": "one per chunk"},
    "Tell System 1 the purpose?": {"full": "yes", "purpose_off": "no"},
    "System 1's advantage": {"full": "own group", "shared_group": "System 2's"},
    "A tool left out": {
        "full": "none",
        "no_search": "search",
        "no_scholar": "scholar",
        "no_python": "python",
    },
    "Attempts per question, G": {"full": "8", "group_4": "4", "group_16": "16"},
    "Advantage": {"full": "(r − mean) / std", "advantage_mean": "r − mean"},
    "A role's loss is a mean over": {"full": "samples", "loss_mean_token": "tokens"},
    "Questions that teach nothing": {"full": "stay", "refill_1": "replaced once"},
    "Optimizer steps per batch": {"full": "1", "inner_steps_4": "4"},
    "KL term, λ": {"full": "0", "kl_0.01": "0.01"},
    "The ruler: chance alone": {"full": "once", "replica": "again, other rounding"},
}
# Of Okabe and Ito. The first is the colour of `full` in every panel.
COLOURS = ["#777777", "#0072b2", "#d55e00", "#009e73"]
COSTS = ("sys1_samples", "sys1_tokens", "sys2_tokens", "trained_tokens")

Accuracies = dict[int, tuple[float, float]]  # steps done -> (at temperature 1, greedy)


# -------------------------------------------------------------------- what is there


@dataclass
class ArmRun:
    """A run as its files tell it. `lines`: those of metrics.jsonl up to the steps asked for."""

    arm: str
    seed: int
    state: str = "missing"  # complete, part, missing or failed
    why: str = ""
    lines: list[dict] = field(default_factory=list)
    accuracies: Accuracies = field(default_factory=dict)
    commit: str | None = None
    cpu: str | None = None
    cpu_seconds: float | None = None

    def about(self) -> dict:
        """All but the lines, for the results."""
        known = dict(vars(self))
        del known["lines"]
        return known


def accuracies(lines: list[dict]) -> Accuracies:
    """The evaluations in metrics lines. The last step's line has one before it and one after."""
    found = {}
    for line in lines:
        for when in ("_before", ""):
            if "eval_step" + when in line:
                score = line["eval_accuracy" + when], line["eval_greedy" + when]
                found[line["eval_step" + when]] = score
    return found


def arguments(arm: str, seed: int, options: argparse.Namespace) -> list[str]:
    """mars.py's arguments for a run. It is evaluated before step 0 and after every 20."""
    given = ["--name", f"{arm}-{seed}", "--runs", str(options.runs), "--cache", str(options.cache)]
    given += ["--seed", str(seed), "--steps", str(options.steps), "--threads", "1"]
    if options.quick:
        given += ["--eval_every", "1", "--eval_questions", "16", "--questions", "4"]
    return given + ARMS[arm]


def settings(given: list[str]) -> Config:
    """The settings that mars.py makes of its arguments."""
    parsed = parse(parser(mars.MarsConfig, ""), given)
    return resolve(mars.MarsConfig, parsed, presets=mars.METHOD.presets)


def look(arm: str, seed: int, options: argparse.Namespace) -> ArmRun:
    """A run, as far as it is there."""
    run = ArmRun(arm, seed)
    folder = options.runs / f"{arm}-{seed}"
    if (folder / "config.json").exists():
        saved = json.loads((folder / "config.json").read_text())
        wanted = dataclasses.asdict(settings(arguments(arm, seed, options)))
        # A run of an older version did what the default of a newer option does.
        saved = dataclasses.asdict(mars.MarsConfig()) | saved
        others = []
        for key in sorted(wanted.keys() - Config.may_change):
            if saved[key] != wanted[key]:
                others.append(f"{key} {saved[key]}")
        if others:
            run.state = "failed"
            run.why = f"made with other settings ({', '.join(others)}): remove {folder}"
            return run
        lines = []
        if (folder / "metrics.jsonl").exists():
            lines = read_lines(folder / "metrics.jsonl")
        run.lines = [line for line in lines if line.get("step", options.steps) < options.steps]
        for step, score in accuracies(lines).items():
            if step <= options.steps:
                run.accuracies[step] = score
        run.state = "complete" if options.steps in run.accuracies else "part"

    ended = options.runs / f"{arm}-{seed}.run.json"
    if ended.exists():
        how = json.loads(ended.read_text())
        run.commit = how.get("commit")
        run.cpu = how.get("cpu")
        run.cpu_seconds = how.get("cpu_seconds")
        if run.state != "complete" and how.get("exit"):
            run.state = "failed"
            run.why = how["why"]
    return run


# -------------------------------------------------------------------------- running


def start(command: list[str], log: Path) -> subprocess.Popen:
    """A Python command in a process of its own, one thread, its output appended to `log`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(log, "a") as file:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )


@dataclass
class Ended:
    """How a command ended, and where it was started."""

    name: str
    code: int
    cpu_seconds: float  # with those of its children
    provenance: dict


def pool(
    commands: list[tuple[str, list[str]]],
    folder: Path,
    jobs: int,
    on_end: Callable[[Ended], None],
) -> None:
    """Runs (name, command) `jobs` at a time; their logs go to the folder."""
    waiting = list(commands)
    running = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name, command = waiting.pop(0)
                process = start(command, folder / f"{name}.log")
                running[process.pid] = (name, process, common.provenance())
            pid, status, used = os.wait4(-1, 0)
            if pid not in running:
                continue
            name, process, provenance = running.pop(pid)
            process.returncode = os.waitstatus_to_exitcode(status)
            seconds = used.ru_utime + used.ru_stime
            on_end(Ended(name, process.returncode, seconds, provenance))
    finally:
        for _, process, _ in running.values():
            process.terminate()
        for _, process, _ in running.values():
            process.wait()


@contextlib.contextmanager
def alone_in(folder: Path):
    """Refuses a second bench in the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = open(folder / ".lock", "w")
    except OSError as error:
        raise UserError(f"cannot write {folder / '.lock'} ({error.strerror})") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another bench is at work in {folder}") from None
        yield


def train(options: argparse.Namespace) -> None:
    """Makes the seeds' base models, then every run that is not complete."""
    with alone_in(options.runs):
        make_base_models(options)
        todo = []
        for seed in options.seeds:
            for arm in options.arms:
                run = look(arm, seed, options)
                if run.state != "complete" and "other settings" not in run.why:
                    todo.append(run)
        asked = len(options.seeds) * len(options.arms)
        print(f"{asked - len(todo)} of {asked} runs are there, {len(todo)} to do", flush=True)

        begun = time.time()
        done = []

        def on_end(ended: Ended) -> None:
            remember(options.runs / ended.name, ended)
            done.append(ended.name)
            outcome = f"failed, exit {ended.code}" if ended.code else "ok"
            print(
                f"{len(done)}/{len(todo)}  {ended.name}: {outcome}, "
                f"{ended.cpu_seconds:.0f} CPU s; {time.time() - begun:.0f} s since the start",
                flush=True,
            )

        commands = [command(run, options) for run in todo]
        pool(commands, options.runs, options.jobs, on_end)


def make_base_models(options: argparse.Namespace) -> None:
    """The base model of each seed, so that no two runs make the same one."""

    def on_end(ended: Ended) -> None:
        if ended.code:
            raise UserError(f"{ended.name} could not be made, see {options.runs / ended.name}.log")

    commands = []
    for seed in options.seeds:
        build = f"base_model.build({str(options.cache)!r}, {seed}, threads=1)"
        commands.append((f"base-{seed}", ["-c", f"from toy import base_model; {build}"]))
    pool(commands, options.runs, options.jobs, on_end)


def command(run: ArmRun, options: argparse.Namespace) -> tuple[str, list[str]]:
    """(name, command line) of a run, which is resumed if something of it is there."""
    name = f"{run.arm}-{run.seed}"
    line = ["mars.py", *arguments(run.arm, run.seed, options)]
    if (options.runs / name / "config.json").exists():
        line.append("--resume")
    return name, line


def remember(run: Path, ended: Ended) -> None:
    """Writes how a run ended, and where it was started. The CPU seconds of its parts add up."""
    path = run.with_name(run.name + ".run.json")
    seconds = ended.cpu_seconds
    if path.exists():
        seconds += json.loads(path.read_text())["cpu_seconds"]
    why = ""
    if ended.code:
        log = run.with_name(run.name + ".log").read_text(errors="replace")
        said = [line for line in log.split("\n") if line.strip()] or ["no output"]
        why = f"exit {ended.code}: {said[-1][:200]}"
    how = {"exit": ended.code, "why": why, "cpu_seconds": seconds}
    for key in ("commit", "cpu", "date"):
        how[key] = ended.provenance[key]
    write_whole(path, json.dumps(how, indent=1).encode())


# --------------------------------------------------------------------------- tables


def spread(values: list[float]) -> dict:
    """Mean, smallest and largest."""
    return {"mean": mean(values), "min": min(values), "max": max(values)}


def summarise(runs: list[ArmRun]) -> list[dict]:
    """One row an arm, over its complete runs."""
    complete = {(run.arm, run.seed): run for run in runs if run.state == "complete"}
    rows = []
    for arm in dict.fromkeys(run.arm for run in runs):
        mine = [run for run in complete.values() if run.arm == arm]
        absent = [run for run in runs if run.arm == arm and run.state != "complete"]
        row = {
            "arm": arm,
            "options": " ".join(ARMS[arm]),
            "seeds": [run.seed for run in mine],
            "not there": [f"{run.seed}: {run.why or run.state}" for run in absent],
        }
        if mine:
            row |= results(mine)
            if arm != "full":
                row |= differences(mine, complete)
        rows.append(row)
    return rows


def results(runs: list[ArmRun]) -> dict:
    """Accuracies by step and costs a step of one arm's runs."""
    row = {}
    for index, name in enumerate(("accuracy", "greedy")):
        row[name] = {}
        for step in sorted(runs[0].accuracies):
            row[name][step] = spread([run.accuracies[step][index] for run in runs])
    for key in COSTS:
        row[key] = mean(mean(line[key] for line in run.lines) for run in runs)
    seconds = []
    for run in runs:
        steps = [line["seconds_rollout"] + line["seconds_train"] for line in run.lines]
        seconds.append(mean(steps))
    row["seconds"] = mean(seconds)
    row["difference end"] = None
    row["difference average"] = None
    return row


def differences(runs: list[ArmRun], complete: dict[tuple[str, int], ArmRun]) -> dict:
    """An arm's runs minus `full` with the same seed: at the end, and on average after step 0."""
    at_end, on_average = [], []
    for run in runs:
        full = complete.get(("full", run.seed))
        if full is None:
            continue
        mine, theirs = learned(run), learned(full)
        at_end.append(mine[0] - theirs[0])
        on_average.append(mine[1] - theirs[1])
    if not at_end:
        return {}
    return {"difference end": spread(at_end), "difference average": spread(on_average)}


def learned(run: ArmRun) -> tuple[float, float]:
    """Accuracy at temperature 1: at the end, and on average over all evaluations but the first."""
    later = [score[0] for step, score in sorted(run.accuracies.items()) if step]
    return later[-1], mean(later)


def text(value: dict | None, sign: str = "") -> str:
    """mean (min … max), in percent."""
    if not value:
        return "–"
    middle, low, high = (f"{100 * value[key]:{sign}.1f}" for key in ("mean", "min", "max"))
    return f"{middle} ({low} … {high})"


def report(rows: list[dict], steps: int) -> str:
    """The tables: accuracy while learning, beside full MARS, what an arm costs, what is missing."""
    there = [row for row in rows if row["seeds"]]

    def accuracy(row: dict, name: str) -> dict:
        cells = {"arm": row["arm"], "seeds": len(row["seeds"])}
        return cells | {str(step): text(value) for step, value in row[name].items()}

    def beside(row: dict) -> dict:
        cells = {when: text(row[f"difference {when}"], "+") for when in ("end", "average")}
        return {"arm": row["arm"]} | cells

    def costs(row: dict) -> dict:
        cells = {key: f"{row[key]:.0f}" for key in COSTS}
        return {"arm": row["arm"]} | cells | {"seconds": f"{row['seconds']:.2f}"}

    parts = [
        "Held-out accuracy, sampled at temperature 1, after … steps: %, mean (min … max) of the "
        "seeds\n" + common.table([accuracy(row, "accuracy") for row in there]),
        "The same, greedy\n" + common.table([accuracy(row, "greedy") for row in there]),
        f"Points above or below full MARS with the same seed, temperature 1: after {steps} steps, "
        "and on average over all evaluations but the first\n"
        + common.table([beside(row) for row in there]),
        "Cost of a step: System 1's calls (samples), sampled tokens by role, tokens in the loss, "
        "seconds\n" + common.table([costs(row) for row in there]),
    ]
    missing = []
    for row in rows:
        missing += [f"NOT THERE: {row['arm']}, seed {entry}" for entry in row["not there"]]
    if missing:
        parts.append("\n".join(missing))
    return "\n\n".join(parts)


# --------------------------------------------------------------------------- figure


def plot(rows: list[dict], path: Path) -> Path:
    """One panel a question, of held-out accuracy over the steps.

    A line is the mean at temperature 1, with a band from the worst seed to the best. The diamond at
    the right edge is the greedy accuracy at the end.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to load
    from matplotlib.figure import Figure

    found = {row["arm"]: row for row in rows if row["seeds"]}
    panels = [panel for panel in PANELS.items() if found.keys() & panel[1].keys() - {"full"}]
    lines = max(1, math.ceil(len(panels) / 3))
    figure = Figure(figsize=(10, 0.4 + 3 * lines), dpi=150, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.08)
    axes = figure.subplots(lines, 3, sharey=True, squeeze=False)
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_axis_off()
    for ax, (question, arms) in zip(axes.flat, panels, strict=False):
        plot_panel(ax, question, arms, found)
    for ax in axes[-1]:
        ax.set_xlabel("RL steps", fontsize=10)
    for ax in axes[:, 0]:
        ax.set_ylabel("held-out accuracy", fontsize=10)
    seeds = max((len(row["seeds"]) for row in found.values()), default=0)
    figure.supxlabel(
        f"Lines: mean of {seeds} seed(s), sampled at temperature 1; bands: worst to best seed; "
        "diamonds: greedy at the end. Grey: full MARS.",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))
    return path


def plot_panel(ax, question: str, arms: dict[str, str], found: dict[str, dict]) -> None:
    """The arms that answer one question."""
    ax.set_title(question, loc="left", fontsize=12, fontweight="bold", pad=22)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=10)
    ax.set_ylim(0, 1)
    ax.grid(axis="y", alpha=0.25)
    missing = []
    for colour, (arm, label) in zip(COLOURS, arms.items(), strict=False):
        if arm in found:
            plot_arm(ax, found[arm], label, colour)
        else:
            missing.append(label)
    if missing:
        words = f"not there: {', '.join(missing)}"
        ax.text(0.03, 0.03, words, transform=ax.transAxes, fontsize=9)
    if not ax.lines:
        return
    legend = ax.legend(
        loc="lower left",
        bbox_to_anchor=(-0.04, 1.0),
        ncol=4,
        frameon=False,
        fontsize=10,
        borderaxespad=0,
        handlelength=1.1,
        columnspacing=0.8,
        handletextpad=0.4,
    )
    # A long legend must not move the panels apart.
    legend.set_in_layout(False)


def plot_arm(ax, row: dict, label: str, colour: str) -> None:
    """One arm's line, band and diamond."""
    steps = list(row["accuracy"])
    values = list(row["accuracy"].values())
    low = [value["min"] for value in values]
    high = [value["max"] for value in values]
    middle = [value["mean"] for value in values]
    ax.fill_between(steps, low, high, color=colour, alpha=0.18, lw=0)
    ax.plot(steps, middle, color=colour, lw=1.9, marker="o", markersize=3.5, label=label)
    greedy = row["greedy"][steps[-1]]["mean"]
    ax.plot([1.06 * steps[-1]], [greedy], "D", color=colour, markersize=4.5, clip_on=False)


# -------------------------------------------------------------------------- command


def tabulate(options: argparse.Namespace) -> int:
    """Prints the tables, writes JSON and PNG. 0 if every run asked for is complete, else 1.

    Raises UserError when no run is.
    """
    listed = {(arm, seed) for arm in options.arms for seed in options.seeds}
    for path in options.runs.glob("*-*/config.json"):
        arm, _, seed = path.parent.name.rpartition("-")
        if arm in ARMS and seed.isdigit():
            listed.add((arm, int(seed)))
    order = list(ARMS)
    listed = sorted(listed, key=lambda run: (order.index(run[0]), run[1]))
    runs = [look(arm, seed, options) for arm, seed in listed]
    rows = summarise(runs)
    if not any(row["seeds"] for row in rows):
        why = "; ".join(f"{row['arm']} {row['not there'][0]}" for row in rows)
        raise UserError(f"no complete run in {options.runs}: {why}")

    print(report(rows, options.steps))
    commits = sorted({run.commit for run in runs if run.commit})
    cpus = sorted({run.cpu for run in runs if run.cpu})
    print(f"\nruns of commit {', '.join(commits)} on {', '.join(cpus)}")
    if options.quick:
        print(plot(rows, options.runs / "ablations.png"))
    else:
        line = " ".join(["python -m bench.ablations", *sys.argv[1:]])
        about = [run.about() for run in runs]
        print(common.save(options.out, line, rows, steps=options.steps, runs=about))
        print(plot(rows, common.RESULTS / f"{options.out}.png"))
    return 0 if all(run.state == "complete" for run in runs) else 1


def main() -> int:
    """The command line; returns the exit code."""
    reader = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    reader.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    reader.add_argument(
        "--arms",
        nargs="+",
        choices=ARMS,
        default=list(ARMS),
        metavar="ARM",
        help=", ".join(ARMS),
    )
    reader.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    reader.add_argument("--steps", type=int, default=80)
    reader.add_argument("--runs", type=Path, help="folder of the runs [runs/ablations]")
    reader.add_argument("--cache", type=Path, default=ROOT / ".cache", help="of the base models")
    reader.add_argument("--out", default="ablations", help="name of the results' files")
    reader.add_argument("--table", action="store_true", help="run nothing")
    reader.add_argument("--quick", action="store_true", help="4 steps of 4 questions: a try")
    options = reader.parse_args()
    if options.quick:
        options.steps = 4
    name = "ablations-quick" if options.quick else "ablations"
    options.runs = (options.runs or ROOT / "runs" / name).resolve()
    # The runs end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if not options.table:
            train(options)
        return tabulate(options)
    except UserError as error:
        return fail(error)
    except KeyboardInterrupt:
        return fail("interrupted; the same command goes on where it stopped")


if __name__ == "__main__":
    sys.exit(main())
