"""A long run of the toy on CPU, watched from outside.

`python mars.py --steps 1000` runs at its default setting in a process of its own. After every few
steps this program reads from /proc its resident memory, open files, threads and children, and
counts its temporary files. At the end it tells

    memory      slope of the resident set after warm-up, by least squares; flat is under 1 % of it
                per 100 steps
    pages       KV pages that a step's rollouts did not give back: 0 at every step
    left over   processes that outlived the run, temporary files
    collapse    held-out accuracy, the best evaluation minus the last

    python -m bench.soak --steps 1000           writes bench/results/soak.json and soak.png
    python -m bench.soak --steps 6 --every 1    a try; fewer than 100 steps write no results

A run stopped with ctrl-C goes on with the same command. Linux only.
Tests: pytest tests/test_bench.py
"""

import argparse
import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench import common
from bench.ablations import ROOT, accuracies
from config import UserError, fail
from plumbing.folders import read_lines, write_whole

FLAT = 0.01  # of the resident set per 100 steps
PR_SET_CHILD_SUBREAPER = 36  # of prctl: orphans below this process become its children


# ------------------------------------------------------------------------- watching


def children(pid: int) -> list[int]:
    """The processes that a process started and that it has not waited for."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # the thread has just ended
    return found


def look(pid: int, temporary: Path) -> dict | None:
    """What a process holds: memory, open files, threads, children, temporary files.

    Memory is in MiB, resident now and at most. None when the process has ended.
    """
    try:
        status = {}
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            key, _, value = line.partition(":")
            status[key] = value
        return {
            "pid": pid,
            "rss": int(status["VmRSS"].split()[0]) / 1024,
            "peak": int(status["VmHWM"].split()[0]) / 1024,
            "open_files": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": int(status["Threads"]),
            "children": len(children(pid)),
            "temporary_files": len(files(temporary)),
        }
    except (OSError, KeyError):
        return None


def files(folder: Path) -> list[str]:
    """Files below a folder. PyTorch leaves an empty folder of its compiler, which is not one."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()]


def watch(
    process: subprocess.Popen, metrics: Path, samples: Path, every: int, temporary: Path
) -> None:
    """Until the run ends: after every `every` steps one line in `samples`."""
    seen = -every
    size = -1
    with open(samples, "a") as file:
        while process.poll() is None:
            time.sleep(0.1)
            now = metrics.stat().st_size if metrics.exists() else -1
            if now == size:
                continue
            size = now
            step = last_step(metrics)
            if step is None or step < seen + every:
                continue
            sample = look(process.pid, temporary)
            if sample:
                seen = step
                file.write(json.dumps({"step": step, **sample}) + "\n")
                file.flush()


def last_step(metrics: Path) -> int | None:
    """The step of the last whole line."""
    with open(metrics, "rb") as file:
        file.seek(max(0, metrics.stat().st_size - 8192))
        lines = file.read().split(b"\n")[:-1]
    if not lines:
        return None
    return json.loads(lines[-1])["step"]


def run(options: argparse.Namespace) -> dict:
    """Runs mars.py to its end; what it left behind. UserError if it fails."""
    folder = options.runs / options.name
    left = options.runs / f"{options.name}.left.json"
    lines = []
    if (folder / "metrics.jsonl").exists():
        lines = read_lines(folder / "metrics.jsonl")
    if options.steps in accuracies(lines):
        if left.exists():
            return json.loads(left.read_text())
        return {"processes": [], "temporary_files": []}

    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise UserError("the soak needs Linux 3.4 or later: it must become the parent of orphans")
    options.runs.mkdir(parents=True, exist_ok=True)
    log = options.runs / f"{options.name}.log"
    samples = options.runs / f"{options.name}.samples.jsonl"
    with tempfile.TemporaryDirectory() as temporary:
        process = start(options, log, temporary)
        try:
            watch(process, folder / "metrics.jsonl", samples, options.every, Path(temporary))
        finally:
            process.terminate()
            process.wait()
        time.sleep(1)  # for what is about to end
        leftover = {"processes": orphans(), "temporary_files": files(Path(temporary))}
    if process.returncode:
        raise UserError(f"the run ended with exit code {process.returncode}, see {log}")
    write_whole(left, json.dumps(leftover).encode())
    return leftover


def start(options: argparse.Namespace, log: Path, temporary: str) -> subprocess.Popen:
    """mars.py in a process of its own, resumed if something of the run is there."""
    command = [sys.executable, str(ROOT / "mars.py"), "--threads", "1"]
    command += ["--name", options.name, "--runs", str(options.runs)]
    command += ["--steps", str(options.steps), "--cache", str(options.cache)]
    if (options.runs / options.name / "config.json").exists():
        command.append("--resume")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": temporary,
    }
    with open(log, "a") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)


def orphans() -> list[str]:
    """The command lines of our children that still run. Those that have ended are waited for."""
    found = []
    for pid in children(os.getpid()):
        try:
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                found.append(words[:200])
        except OSError:
            continue  # it has just gone
    return found


# -------------------------------------------------------------------------- judging


def slope(samples: list[dict], warm: int) -> dict | None:
    """Growth of the resident set from `warm` steps on: {per_100_steps, start, end} in MiB.

    Only the process that was watched longest counts, because each one begins anew. None with
    fewer than 3 samples.
    """
    pids = [sample["pid"] for sample in samples]
    longest = max(pids, key=pids.count)
    mine = [sample for sample in samples if sample["pid"] == longest]
    late = [sample for sample in mine if sample["step"] >= mine[0]["step"] + warm]
    if len(late) < 3:
        return None
    steps = np.array([sample["step"] for sample in late])
    memory = np.array([sample["rss"] for sample in late])
    rise, height = np.polyfit(steps, memory, 1)
    first = float(height + rise * steps[0])
    last = float(height + rise * steps[-1])
    growth = float(100 * rise)
    flat = abs(growth) < FLAT * first
    return {"per_100_steps": growth, "start": first, "end": last, "flat": flat}


def judge(lines: list[dict], samples: list[dict], leftover: dict, steps: int) -> dict:
    """All findings of the docstring, as one record."""
    pages = [line["pages_in_use"] for line in lines if "pages_in_use" in line]
    found = {
        "steps": len(lines),
        "memory": None,
        "peak_mib": None,
        "open_files": None,
        "threads": None,
        "steps_with_pages_in_use": None,
        "steps_with_pages_counted": len(pages),
        "processes_left": leftover["processes"],
        "temporary_files_left": leftover["temporary_files"],
        "temporary_files_most": None,
        "accuracy": {},
    }
    if samples:
        found["memory"] = slope(samples, min(100, steps // 5))
        found["peak_mib"] = max(sample["peak"] for sample in samples)
        found["temporary_files_most"] = max(sample["temporary_files"] for sample in samples)
        for key in ("open_files", "threads"):
            values = [sample[key] for sample in samples]
            found[key] = [min(values), max(values)]
    if pages:
        found["steps_with_pages_in_use"] = sum(held > 0 for held in pages)
    scores = [score for _, score in sorted(accuracies(lines).items())]
    for index, name in enumerate(("sampled", "greedy")):
        values = [score[index] for score in scores]
        if values:
            best, last = max(values), values[-1]
            found["accuracy"][name] = {"best": best, "last": last, "fall": best - last}
    return found


KEYS = (
    "reward",
    "calls_per_question",
    "sys1_length",
    "sys2_length",
    "sys1_entropy",
    "sys2_entropy",
    "malformed_share",
    "zero_variance_share",
    "grad_norm",
    "seconds_rollout",
    "seconds_train",
)


def by_stretch(lines: list[dict], samples: list[dict], stretch: int) -> list[dict]:
    """One row a stretch of steps: means of what is logged, resident memory, the last evaluation."""
    rows = []
    for start in range(0, lines[-1]["step"] + 1, stretch):
        steps = range(start, start + stretch)
        mine = [line for line in lines if line["step"] in steps]
        if not mine:
            continue
        row = {"steps": f"{start}-{mine[-1]['step']}"}
        for key in KEYS:
            row[key] = mean_of([line.get(key) for line in mine])
        scores = sorted(accuracies(mine).items())
        row["accuracy"], row["greedy"] = scores[-1][1] if scores else (None, None)
        row["rss_mib"] = mean_of([sample["rss"] for sample in samples if sample["step"] in steps])
        rows.append(row)
    return rows


def mean_of(values: list) -> float | None:
    """The mean of what is not None; None if nothing is."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def tell(found: dict) -> str:
    """The findings in sentences."""
    facts = {"steps": found["steps"]}
    memory = found["memory"]
    if memory:
        verdict = "flat" if memory["flat"] else "NOT FLAT"
        facts["resident memory"] = (
            f"{memory['per_100_steps']:+.2f} MiB per 100 steps, {memory['start']:.0f} -> "
            f"{memory['end']:.0f} MiB after warm-up (peak {found['peak_mib']:.0f}): {verdict}"
        )
    held, counted = found["steps_with_pages_in_use"], found["steps_with_pages_counted"]
    facts["KV pages held"] = f"after {held} of {counted} steps"
    facts["open files, threads"] = f"{found['open_files']}, {found['threads']} (least, most)"
    processes, forgotten = len(found["processes_left"]), len(found["temporary_files_left"])
    facts["left over"] = f"{processes} processes, {forgotten} files"
    for name, score in found["accuracy"].items():
        facts[f"accuracy, {name}"] = (
            f"best {score['best']:.3f}, last {score['last']:.3f}: fell by {score['fall']:.3f}"
        )
    return "\n".join(f"{name:<20} {fact}" for name, fact in facts.items())


# --------------------------------------------------------------------------- figure


def plot(lines: list[dict], samples: list[dict], path: Path) -> Path:
    """Accuracy, resident memory, and what should stay constant, over the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to load
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), dpi=150, layout="constrained")
    accuracy, memory, held = figure.subplots(1, 3)
    plot_accuracy(accuracy, lines)
    plot_memory(memory, samples)
    plot_held(held, lines, samples)
    for ax in (accuracy, memory, held):
        ax.set_xlabel("RL steps", fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", alpha=0.25)
    accuracy.legend(frameon=False, fontsize=9, loc="lower right")
    held.legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))
    return path


def plot_accuracy(ax, lines: list[dict]) -> None:
    """The training reward, and the two evaluations."""
    from plumbing.curves import BLUE, GREY, ORANGE

    steps = [line["step"] for line in lines]
    window = max(1, len(lines) // 50)
    weights = np.ones(window) / window
    reward = np.convolve([line["reward"] for line in lines], weights, "valid")
    ax.plot(steps[window - 1 :], reward, color=GREY, lw=1, label="training reward")
    scores = sorted(accuracies(lines).items())
    evaluated = [step for step, _ in scores]
    sampled = [score[0] for _, score in scores]
    greedy = [score[1] for _, score in scores]
    ax.plot(evaluated, sampled, color=BLUE, lw=1.7, label="held out, temperature 1")
    ax.plot(evaluated, greedy, color=ORANGE, lw=1.7, label="held out, greedy")
    ax.set_ylim(0, 1.02)
    ax.set_title("Accuracy", loc="left", fontsize=12, fontweight="bold")


def plot_memory(ax, samples: list[dict]) -> None:
    """The resident set."""
    from plumbing.curves import BLUE

    memory = [sample["rss"] for sample in samples]
    ax.plot([sample["step"] for sample in samples], memory, color=BLUE, lw=1.2)
    ax.set_ylim(0, 1.15 * max(memory, default=1))
    ax.set_title("Resident memory, MiB", loc="left", fontsize=12, fontweight="bold")


def plot_held(ax, lines: list[dict], samples: list[dict]) -> None:
    """Open files, threads, temporary files, KV pages."""
    from plumbing.curves import BLUE, GREY, ORANGE

    steps = [sample["step"] for sample in samples]
    looks = {"open_files": BLUE, "threads": ORANGE, "temporary_files": GREY}
    for key, colour in looks.items():
        values = [sample[key] for sample in samples]
        ax.plot(steps, values, color=colour, lw=1.2, label=key.replace("_", " "))
    pages = [line.get("pages_in_use", math.nan) for line in lines]
    numbers = [line["step"] for line in lines]
    ax.plot(numbers, pages, ":", color="black", lw=1.2, label="KV pages held")
    ax.set_ylim(bottom=-1)
    ax.set_title("Held by the process", loc="left", fontsize=12, fontweight="bold")


# -------------------------------------------------------------------------- command


def main() -> int:
    """The command line; returns the exit code: 1 if something leaked."""
    reader = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    reader.add_argument("--steps", type=int, default=1000)
    reader.add_argument("--every", type=int, default=5, help="steps between two looks")
    reader.add_argument("--name", default="soak")
    reader.add_argument("--runs", type=Path, default=ROOT / "runs")
    reader.add_argument("--cache", type=Path, default=ROOT / ".cache", help="of the base model")
    options = reader.parse_args()
    options.runs = options.runs.resolve()
    # The run ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        leftover = run(options)
        lines = read_lines(options.runs / options.name / "metrics.jsonl")
        samples = read_lines(options.runs / f"{options.name}.samples.jsonl")
    except UserError as error:
        return fail(error)
    except KeyboardInterrupt:
        return fail("interrupted; the same command goes on where it stopped")

    found = judge(lines, samples, leftover, options.steps)
    rows = by_stretch(lines, samples, max(1, options.steps // 10))
    print(f"{common.table(rows)}\n\n{tell(found)}")
    if options.steps < 100:
        print(plot(lines, samples, options.runs / f"{options.name}.png"))
    else:
        line = " ".join(["python -m bench.soak", *sys.argv[1:]])
        print(common.save("soak", line, rows, found=found, samples=samples))
        print(plot(lines, samples, common.RESULTS / "soak.png"))
    leaks = [leftover["processes"], leftover["temporary_files"], found["steps_with_pages_in_use"]]
    growing = found["memory"] and not found["memory"]["flat"]
    return 1 if any(leaks) or growing else 0


if __name__ == "__main__":
    sys.exit(main())
