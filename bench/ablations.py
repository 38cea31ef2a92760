"""What each part of MARS contributes on the toy: the ablations that the paper does not have, and its tool ablation.

Every arm changes one thing of the default setting and trains for 80 steps with each seed. A seed names a world, its
questions and a base model of its own; within a seed all arms start from the same weights and meet the same questions
in the same order, so an arm is compared with `full` seed by seed. `replica` is `full` with its sums in another order:
the last bits differ, soon the draws do, and so it shows how far two runs of one setting lie apart. An arm without a
tool keeps the questions that need it, in training (all trajectories fail: no advantage, no gradient) and held out: what
the tool was worth is seen.

    python -m bench.ablations                      all arms, seeds 0 1 2, two runs at a time; goes on where it stopped
    python -m bench.ablations --arms full balance_off --seeds 0
    python -m bench.ablations --table              only tabulates and draws what is there
    python -m bench.ablations --quick              4 steps, few questions; results stay in the folder of the runs

A run is `python mars.py …` in RUNS/ARM-SEED, its log (.log) and how it ended (.run.json) beside it. A complete one is
skipped (of a longer one the first `--steps` count), half of one resumed, a failed one tried again and, if it fails again,
listed as failed.
Results: bench/results/ablations.json and .png. Tests: pytest tests/test_bench.py
"""
import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from plumbing.files import read_lines, write_whole
from bench import common
from config import MAY_CHANGE, UserError, fail, parser, resolve

ROOT = Path(__file__).parent.parent
ARMS = {    # name: what it changes of the default setting
    "full": [],
    "replica": ["--micro_tokens", "4096"],
    "system1_frozen": ["--system1", "frozen"],
    "system1_none": ["--system1", "none"],
    "balance_off": ["--balance", "off"],
    "packing_off": ["--packing", "off"],
    "purpose_off": ["--purpose", "off"],
    "shared_group": ["--shared_group"],
    "no_search": ["--tools", "scholar,python"],
    "no_scholar": ["--tools", "search,python"],
    "no_python": ["--tools", "search,scholar"],
    "group_4": ["--group", "4"],
    "group_16": ["--group", "16"],
    "inner_steps_4": ["--inner_steps", "4"],
    "kl_0.01": ["--kl_beta", "0.01"],
}
PANELS = [  # question, {arm: label}
    ("System 1: who plays it?", {"full": "the policy", "system1_frozen": "frozen start", "system1_none": "nobody"}),
    ("Balance the two roles?", {"full": "yes", "balance_off": "no"}),
    ("Pack documents?", {"full": "FFD", "packing_off": "one per chunk"}),
    ("Tell System 1 the purpose?", {"full": "yes", "purpose_off": "no"}),
    ("System 1's advantage", {"full": "own group", "shared_group": "System 2's"}),
    ("A tool left out", {"full": "none", "no_search": "search", "no_scholar": "scholar", "no_python": "python"}),
    ("Trajectories per question, G", {"full": "8", "group_4": "4", "group_16": "16"}),
    ("Optimiser steps per batch", {"full": "1", "inner_steps_4": "4"}),
    ("KL term, λ", {"full": "0", "kl_0.01": "0.01", "replica": "0, other rounding"})]
COLOURS = ["#777777", "#0072b2", "#d55e00", "#009e73"]     # full is the grey one everywhere; Okabe and Ito
COSTS = ("sys1_samples", "sys1_tokens", "sys2_tokens", "trained_tokens")


# ---------------------------------------------------------------------------------------------- what is there

def accuracies(lines: list[dict]) -> dict[int, tuple[float, float]]:
    """Metrics lines -> {steps done: (held-out accuracy at temperature 1, greedy)}."""
    return {line["eval_step" + when]: (line["eval_accuracy" + when], line["eval_greedy" + when])
            for line in lines for when in ("_before", "") if "eval_step" + when in line}


def arguments(arm: str, seed: int, options) -> list[str]:
    """mars.py's arguments for a run, which is evaluated before step 0 and after every 20 (its default)."""
    return ["--name", f"{arm}-{seed}", "--runs", str(options.runs), "--cache", str(options.cache), "--seed", str(seed),
            "--steps", str(options.steps), "--threads", "1",
            *["--eval_every", "1", "--eval_questions", "16", "--questions", "4"] * options.quick, *ARMS[arm]]


def look(arm: str, seed: int, options) -> dict:
    """A run as its files tell: {arm, seed, state, why, lines, accuracies}. state: complete | part | missing | failed."""
    folder, run = options.runs / f"{arm}-{seed}", {"arm": arm, "seed": seed, "why": "", "lines": [], "accuracies": {}}
    if not (folder / "config.json").exists():
        run["state"] = "missing"
    else:
        saved = json.loads((folder / "config.json").read_text())
        wanted = vars(resolve(vars(parser("").parse_args(arguments(arm, seed, options)))))
        others = [f"{key} {saved.get(key)}" for key in sorted(wanted.keys() - MAY_CHANGE) if saved.get(key) != wanted[key]]
        if others:
            return run | {"state": "failed", "why": f"made with other settings ({', '.join(others)}): remove {folder}"}
        lines = read_lines(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
        scores = {step: score for step, score in accuracies(lines).items() if step <= options.steps}
        run |= {"lines": [line for line in lines if line["step"] < options.steps], "accuracies": scores,
                "state": "complete" if options.steps in scores else "part"}
    how = json.loads(recorded.read_text()) if (recorded := options.runs / f"{arm}-{seed}.run.json").exists() else {}
    if run["state"] != "complete" and how.get("exit"):
        run |= {"state": "failed", "why": how["why"]}
    return run | {key: how.get(key) for key in ("commit", "cpu", "cpu_seconds")}


# ---------------------------------------------------------------------------------------------- running

def start(command: list[str], log: Path) -> subprocess.Popen:
    """A command in a process of its own, one thread, its output appended to `log`."""
    with open(log, "a") as file:
        return subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})


def pool(commands: list[tuple[str, list[str]]], folder: Path, jobs: int, ended) -> None:
    """Runs (name, command) `jobs` at a time. After each: ended(name, exit code, CPU seconds with those of its children,
    provenance when it was started)."""
    waiting, running = list(commands), {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name, command = waiting.pop(0)
                process = start(command, folder / f"{name}.log")
                running[process.pid] = name, process, common.provenance()
            pid, status, used = os.wait4(-1, 0)
            if pid in running:
                name, process, where = running.pop(pid)
                process.returncode = os.waitstatus_to_exitcode(status)
                ended(name, process.returncode, used.ru_utime + used.ru_stime, where)
    finally:
        for _, process, _ in running.values():
            process.terminate()
        for _, process, _ in running.values():
            process.wait()


def train(options) -> None:
    """Makes the seeds' base models, then every run that is not complete."""
    options.runs.mkdir(parents=True, exist_ok=True)
    with open(options.runs / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another bench.ablations is at work in {options.runs}") from None
        bases = [(f"base-{seed}", ["-c", f"from toy import base_model; base_model.build({str(options.cache)!r}, {seed}, threads=1)"])
                 for seed in options.seeds]

        def made(name, code, seconds, where):
            if code:
                raise UserError(f"{name} could not be made, see {options.runs / name}.log")
        pool(bases, options.runs, options.jobs, made)
        runs = [look(arm, seed, options) for seed in options.seeds for arm in options.arms]
        todo = [run for run in runs if run["state"] != "complete" and "other settings" not in run["why"]]
        print(f"{len(runs) - len(todo)} of {len(runs)} runs are there, {len(todo)} to do", flush=True)
        begun = time.time()

        def ended(name, code, seconds, where):
            remember(options.runs / name, code, seconds, where)
            done.append(name)
            outcome = "ok" if code == 0 else f"failed, exit {code}"
            print(f"{len(done)}/{len(todo)}  {name}: {outcome}, {seconds:.0f} CPU s; "
                  f"{time.time() - begun:.0f} s since the start", flush=True)
        done = []
        pool([command(run, options) for run in todo], options.runs, options.jobs, ended)


def command(run: dict, options) -> tuple[str, list[str]]:
    """(name, mars.py's command line) of a run, resumed if something of it is there."""
    name = f"{run['arm']}-{run['seed']}"
    resume = ["--resume"] * (options.runs / name / "config.json").exists()
    return name, ["mars.py", *arguments(run["arm"], run["seed"], options), *resume]


def remember(run: Path, code: int, seconds: float, where: dict) -> None:
    """Writes how a run ended, and where and from which commit it was started; the CPU seconds of its parts add up."""
    path, log = run.with_name(run.name + ".run.json"), run.with_name(run.name + ".log").read_text(errors="replace")
    before = json.loads(path.read_text())["cpu_seconds"] if path.exists() else 0.0
    last = ["no output", *(line for line in log.split("\n") if line.strip())][-1]
    how = {"exit": code, "why": f"exit {code}: {last[:200]}" if code else "", "cpu_seconds": before + seconds,
           **{key: where[key] for key in ("commit", "cpu", "date")}}
    write_whole(path, json.dumps(how, indent=1).encode())


# ---------------------------------------------------------------------------------------------- tables

def spread(values: list[float]) -> dict:
    return {"mean": mean(values), "min": min(values), "max": max(values)}


def summarise(runs: list[dict]) -> list[dict]:
    """One row an arm, over its complete runs: accuracies by step, costs a step, difference to `full` seed by seed."""
    complete = [run for run in runs if run["state"] == "complete"]
    scores = {(run["arm"], run["seed"]): run["accuracies"] for run in complete}

    def learned(key) -> tuple[float, float]:                # at the end; on average over the evaluations after step 0
        points = sorted(scores[key].items())
        return points[-1][1][0], mean(score[0] for step, score in points if step)
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        mine = [run for run in complete if run["arm"] == arm]
        row = {"arm": arm, "options": " ".join(ARMS[arm]), "seeds": [run["seed"] for run in mine],
               "not there": [f"{run['seed']}: {run['why'] or run['state']}" for run in runs
                             if run["arm"] == arm and run["state"] != "complete"]}
        if mine:
            for index, name in enumerate(("accuracy", "greedy")):
                row[name] = {step: spread([scores[arm, run["seed"]][step][index] for run in mine])
                             for step in sorted(scores[arm, mine[0]["seed"]])}
            row |= {key: mean(mean(line[key] for line in run["lines"]) for run in mine) for key in COSTS}
            row["seconds"] = mean(mean(line["seconds_rollout"] + line["seconds_train"] for line in run["lines"])
                                  for run in mine)
            shared = [seed for seed in row["seeds"] if ("full", seed) in scores and arm != "full"]
            pairs = [(learned((arm, seed)), learned(("full", seed))) for seed in shared]
            for index, name in enumerate(("end", "average")):
                row[f"difference {name}"] = spread([a[index] - b[index] for a, b in pairs]) if pairs else None
        rows.append(row)
    return rows


def text(value: dict | None, sign: str = "") -> str:
    """mean (min … max), in percent."""
    if not value:
        return "–"
    middle, low, high = (f"{100 * value[key]:{sign}.1f}" for key in ("mean", "min", "max"))
    return f"{middle} ({low} … {high})"


def report(rows: list[dict], steps: int) -> str:
    """The tables: accuracy while learning, beside full MARS, what an arm costs; and what is not there."""
    there = [row for row in rows if row["seeds"]]

    def accuracy(row, name):
        return {"arm": row["arm"], "seeds": len(row["seeds"]), **{str(step): text(v) for step, v in row[name].items()}}

    def beside(row):
        return {"arm": row["arm"], **{when: text(row[f"difference {when}"], "+") for when in ("end", "average")}}

    def costs(row):
        return {"arm": row["arm"], **{key: f"{row[key]:.0f}" for key in COSTS}, "seconds": f"{row['seconds']:.2f}"}
    parts = [("Held-out accuracy, sampled at temperature 1, after … steps: %, mean (min … max) of the seeds",
              [accuracy(row, "accuracy") for row in there]),
             ("The same, greedy", [accuracy(row, "greedy") for row in there]),
             (f"Points above or below full MARS with the same seed, temperature 1: after {steps} steps, and on average "
              "over all evaluations but the first", [beside(row) for row in there]),
             ("Cost of a step: System 1's calls (samples), sampled tokens by role, tokens in the loss, seconds",
              [costs(row) for row in there])]
    missing = "\n".join(f"NOT THERE: {row['arm']}, seed {entry}" for row in rows for entry in row["not there"])
    return "\n\n".join([*(f"{title}\n{common.table(cells)}" for title, cells in parts), *[missing] * bool(missing)])


# ---------------------------------------------------------------------------------------------- figure

def draw(rows: list[dict], path: Path) -> Path:
    """One panel a question: mean held-out accuracy at temperature 1, a band from the worst seed to the best, and at the
    right edge the greedy accuracy at the end."""
    found = {row["arm"]: row for row in rows if row["seeds"]}
    figure = Figure(figsize=(10, 9.4), dpi=150, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.08)
    for index, (ax, (question, arms)) in enumerate(zip(figure.subplots(3, 3, sharey=True).flat, PANELS)):
        ax.set_title(question, loc="left", fontsize=12, fontweight="bold", pad=22)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=10)
        for colour, (arm, label) in zip(COLOURS, arms.items()):
            if arm in found:
                draw_arm(ax, found[arm], label, colour)
        if missing := [label for arm, label in arms.items() if arm not in found]:
            ax.text(0.03, 0.03, f"not there: {', '.join(missing)}", transform=ax.transAxes, fontsize=9)
        ax.set_ylim(0, 1)
        ax.grid(axis="y", alpha=0.25)
        if index >= 6:
            ax.set_xlabel("RL steps", fontsize=10)
        if index % 3 == 0:
            ax.set_ylabel("held-out accuracy", fontsize=10)
        if ax.lines:
            legend = ax.legend(loc="lower left", bbox_to_anchor=(-0.04, 1.0), ncol=4, frameon=False, fontsize=10,
                               borderaxespad=0, handlelength=1.1, columnspacing=0.8, handletextpad=0.4)
            legend.set_in_layout(False)                     # a long one must not move the panels apart
    seeds = max((len(row["seeds"]) for row in found.values()), default=0)
    figure.supxlabel(f"Lines: mean of {seeds} seed(s), sampled at temperature 1; bands: worst to best seed; diamonds: "
                     "greedy at the end. Grey: full MARS.", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))
    return path


def draw_arm(ax, row: dict, label: str, colour: str) -> None:
    """One arm's line, band and diamond."""
    steps = list(row["accuracy"])
    values = [row["accuracy"][step] for step in steps]
    ax.fill_between(steps, [v["min"] for v in values], [v["max"] for v in values], color=colour, alpha=0.18, lw=0)
    ax.plot(steps, [v["mean"] for v in values], color=colour, lw=1.9, marker="o", markersize=3.5, label=label)
    ax.plot([1.06 * steps[-1]], [row["greedy"][steps[-1]]["mean"]], "D", color=colour, markersize=4.5, clip_on=False)


# ---------------------------------------------------------------------------------------------- command

def tabulate(options) -> int:
    """Prints the tables, writes JSON and PNG. 0 if every run asked for is complete, else 1; 2 if none is."""
    asked = [(arm, seed) for arm in options.arms for seed in options.seeds]
    names = [path.parent.name.rpartition("-") for path in options.runs.glob("*-*/config.json")]
    others = [(arm, int(seed)) for arm, _, seed in names if arm in ARMS and seed.isdigit()]
    order = list(ARMS)
    listed = sorted({*asked, *others}, key=lambda run: (order.index(run[0]), run[1]))
    runs = [look(arm, seed, options) for arm, seed in listed]
    rows = summarise(runs)
    if not any(row["seeds"] for row in rows):
        why = "; ".join(f"{row['arm']} {row['not there'][0]}" for row in rows)
        raise UserError(f"no complete run in {options.runs}: {why}")
    print(report(rows, options.steps))
    commits, cpus = ({run[key] for run in runs if run.get(key)} for key in ("commit", "cpu"))
    print(f"\nruns of commit {', '.join(sorted(commits))} on {', '.join(sorted(cpus))}")
    ended = [{key: run.get(key) for key in ("arm", "seed", "state", "why", "commit", "cpu", "cpu_seconds", "accuracies")}
             for run in runs]
    if options.quick:
        print(draw(rows, options.runs / "ablations.png"))
    else:
        command = " ".join(["python -m bench.ablations", *sys.argv[1:]])
        print(common.save("ablations", command, rows, steps=options.steps, runs=ended))
        print(draw(rows, common.RESULTS / "ablations.png"))
    return 0 if all(run["state"] == "complete" for run in runs) else 1


def main() -> int:
    reader = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    reader.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    reader.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    reader.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    reader.add_argument("--steps", type=int, default=80)
    reader.add_argument("--runs", type=Path, default=None, help="folder of the runs [runs/ablations]")
    reader.add_argument("--cache", type=Path, default=ROOT / ".cache", help="folder of the base models")
    reader.add_argument("--table", action="store_true", help="run nothing")
    reader.add_argument("--quick", action="store_true", help="4 steps of 4 questions, 16 held-out ones: a try")
    options = reader.parse_args()
    options.runs = (options.runs or ROOT / "runs" / ("ablations-quick" if options.quick else "ablations")).resolve()
    options.steps = 4 if options.quick else options.steps
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # so that the runs end with this process
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
