"""A long run of the toy on CPU, watched from outside: memory, files, processes, KV pages, accuracy.

`python mars.py --steps 1000` at its default setting runs in a process of its own. After every few steps this program
reads from /proc its resident memory, open files, threads and children, and counts its temporary files. At the end:

    memory     slope of the resident set in MiB per 100 steps (least squares, after warm-up): flat if under 1 % of it
    pages      KV pages that a step's rollouts did not give back (`pages_in_use` in metrics.jsonl): 0 at every step
    left over  processes that outlived the run (orphans come to this process, a "subreaper"), temporary files
    collapse   held-out accuracy: the best evaluation minus the last (late collapse is what to look for)

    python -m bench.soak --steps 1000           goes on where it stopped; writes bench/results/soak.json and soak.png
    python -m bench.soak --steps 6 --every 1    a try; fewer than 100 steps write no results

A run stopped with ctrl-C goes on with the same command. Linux only. Tests: pytest tests/test_bench.py
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
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import view
from plumbing.files import read_lines, write_whole
from bench import common
from bench.ablations import ROOT, accuracies
from config import UserError, fail

FLAT = 0.01             # of the resident set per 100 steps: what counts as flat
PR_SET_CHILD_SUBREAPER = 36


# ---------------------------------------------------------------------------------------------- watching

def children(pid: int) -> list[int]:
    """The processes that a process started and that it has not waited for."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:                                     # a thread that has just ended
            continue
    return found


def look(pid: int, temporary: Path) -> dict | None:
    """What a process holds: resident MiB now and at most, open files, threads, children, temporary files."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        rss, peak = (int(status[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM"))
        return {"pid": pid, "rss": rss, "peak": peak,
                "open_files": len(os.listdir(f"/proc/{pid}/fd")), "threads": int(status["Threads"]),
                "children": len(children(pid)), "temporary_files": len(files(temporary))}
    except (OSError, KeyError):                             # it has ended
        return None


def files(folder: Path) -> list[str]:
    """Files below a folder. (PyTorch leaves an empty folder of its compiler there, which does not count.)"""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()]


def watch(process: subprocess.Popen, metrics: Path, samples: Path, every: int, temporary: Path) -> None:
    """Until the run ends: after every `every` steps one line in `samples`."""
    seen, size = -every, -1
    with open(samples, "a") as file:
        while process.poll() is None:
            time.sleep(0.1)
            now = metrics.stat().st_size if metrics.exists() else -1
            if now == size:
                continue
            size, step = now, last_step(metrics)
            if step is not None and step >= seen + every and (sample := look(process.pid, temporary)):
                seen = step
                file.write(json.dumps({"step": step, **sample}) + "\n")
                file.flush()


def last_step(metrics: Path) -> int | None:
    """The step of the last whole line."""
    with open(metrics, "rb") as file:
        file.seek(max(0, metrics.stat().st_size - 8192))
        lines = file.read().split(b"\n")[:-1]
    return json.loads(lines[-1])["step"] if lines else None


def run(options) -> dict:
    """Runs mars.py to its end; what it left behind. UserError if it fails."""
    folder = options.runs / options.name
    lines = read_lines(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    left, leftover = options.runs / f"{options.name}.left.json", {"processes": [], "temporary_files": []}
    if options.steps in accuracies(lines):
        return json.loads(left.read_text()) if left.exists() else leftover
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise UserError("the soak needs Linux 3.4 or later: it must become the parent of orphans")
    options.runs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "mars.py"), "--name", options.name, "--runs", str(options.runs),
               "--steps", str(options.steps), "--threads", "1", "--cache", str(options.cache),
               *["--resume"] * (folder / "config.json").exists()]
    with tempfile.TemporaryDirectory() as temporary, open(options.runs / f"{options.name}.log", "a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={
            **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": temporary})
        try:
            samples = options.runs / f"{options.name}.samples.jsonl"
            watch(process, folder / "metrics.jsonl", samples, options.every, Path(temporary))
        finally:
            process.terminate()
            process.wait()
        time.sleep(1)                                       # what is about to end may do so
        leftover = {"processes": orphans(), "temporary_files": files(Path(temporary))}
    if process.returncode:
        raise UserError(f"the run ended with exit code {process.returncode}, see {options.runs / options.name}.log")
    write_whole(left, json.dumps(leftover).encode())
    return leftover


def orphans() -> list[str]:
    """The command lines of our children that still run; those that have ended are waited for."""
    found = []
    for pid in children(os.getpid()):
        try:
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200])
        except OSError:                                     # it has just gone
            continue
    return found


# ---------------------------------------------------------------------------------------------- judging

def slope(samples: list[dict], warm: int) -> dict | None:
    """Growth of the resident set after step `warm`: {per_100_steps, start, end} in MiB, by least squares.

    Only the process that was watched longest counts: each one begins anew. None with fewer than 3 samples.
    """
    pids = [sample["pid"] for sample in samples]
    points = [(s["step"], s["rss"]) for s in samples if s["pid"] == max(pids, key=pids.count)]
    points = np.array([point for point in points if point[0] >= points[0][0] + warm])
    if len(points) < 3:
        return None
    rise, height = np.polyfit(points[:, 0], points[:, 1], 1)
    first, last = (float(height + rise * points[i, 0]) for i in (0, -1))
    growth = float(100 * rise)
    return {"per_100_steps": growth, "start": first, "end": last, "flat": abs(growth) < FLAT * first}


def judge(lines: list[dict], samples: list[dict], leftover: dict, steps: int) -> dict:
    """All findings of the docstring, as one record."""
    scores = accuracies(lines)
    final = {name: [score[i] for _, score in sorted(scores.items())] for i, name in enumerate(("sampled", "greedy"))}
    pages = [line["pages_in_use"] for line in lines if "pages_in_use" in line]
    return {"steps": len(lines), "memory": slope(samples, min(100, steps // 5)) if samples else None,
            "peak_mib": max((s["peak"] for s in samples), default=None),
            "open_files": [f(s["open_files"] for s in samples) for f in (min, max)] if samples else None,
            "threads": [f(s["threads"] for s in samples) for f in (min, max)] if samples else None,
            "steps_with_pages_in_use": sum(map(bool, pages)) if pages else None, "steps_with_pages_counted": len(pages),
            "processes_left": leftover["processes"], "temporary_files_left": leftover["temporary_files"],
            "temporary_files_most": max((s["temporary_files"] for s in samples), default=None),
            "accuracy": {name: {"best": max(values), "last": values[-1], "fall": max(values) - values[-1]}
                         for name, values in final.items() if values}}


KEYS = ("reward", "calls_per_question", "sys1_length", "sys2_length", "sys1_entropy", "sys2_entropy", "malformed_share",
        "zero_variance_share", "grad_norm", "seconds_rollout", "seconds_train")


def by_stretch(lines: list[dict], samples: list[dict], stretch: int) -> list[dict]:
    """One row a stretch of steps: means of what is logged, the resident set and the last evaluation in it."""
    rows = []
    for start in range(0, lines[-1]["step"] + 1, stretch):
        mine = [line for line in lines if start <= line["step"] < start + stretch]
        memory = [sample["rss"] for sample in samples if start <= sample["step"] < start + stretch]
        scores = sorted(accuracies(mine).items())
        if mine:
            sampled, greedy = scores[-1][1] if scores else (None, None)
            means = {key: float(np.mean([line[key] for line in mine])) for key in KEYS}
            rows.append({"steps": f"{start}-{mine[-1]['step']}", **means, "accuracy": sampled, "greedy": greedy,
                         "rss_mib": float(np.mean(memory)) if memory else None})
    return rows


def draw(lines: list[dict], samples: list[dict], path: Path) -> Path:
    """Accuracy, resident memory, and what should stay constant, over the steps."""
    figure = Figure(figsize=(10, 3.4), dpi=150, layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    numbers, scores = [line["step"] for line in lines], sorted(accuracies(lines).items())
    window = max(1, len(lines) // 50)
    reward = np.convolve([line["reward"] for line in lines], np.ones(window) / window, "valid")
    left.plot(numbers[window - 1:], reward, color=view.GREY, lw=1, label="training reward")
    for index, (label, colour) in enumerate((("temperature 1", view.BLUE), ("greedy", view.ORANGE))):
        left.plot([step for step, _ in scores], [score[index] for _, score in scores], color=colour, lw=1.7,
                  label=f"held out, {label}")
    left.set_ylim(0, 1.02)
    steps = [sample["step"] for sample in samples]
    middle.plot(steps, [sample["rss"] for sample in samples], color=view.BLUE, lw=1.2)
    middle.set_ylim(0, 1.15 * max((sample["rss"] for sample in samples), default=1))
    for key, label, colour in (("open_files", "open files", view.BLUE), ("threads", "threads", view.ORANGE),
                               ("temporary_files", "temporary files", view.GREY)):
        right.plot(steps, [sample[key] for sample in samples], color=colour, lw=1.2, label=label)
    pages = [line.get("pages_in_use", math.nan) for line in lines]
    right.plot(numbers, pages, ":", color="black", lw=1.2, label="KV pages held")
    right.set_ylim(bottom=-1)
    for ax, title in ((left, "Accuracy"), (middle, "Resident memory, MiB"), (right, "Held by the process")):
        ax.set_title(title, loc="left", fontsize=12, fontweight="bold")
        ax.set_xlabel("RL steps", fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", alpha=0.25)
        if ax is not middle:
            ax.legend(frameon=False, fontsize=9, loc="lower right" if ax is left else "best")
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))
    return path


def tell(found: dict) -> str:
    """The findings in sentences."""
    memory, facts = found["memory"], {"steps": found["steps"]}
    if memory:
        facts["resident memory"] = (
            f"{memory['per_100_steps']:+.2f} MiB per 100 steps, {memory['start']:.0f} -> {memory['end']:.0f} MiB after "
            f"warm-up (peak {found['peak_mib']:.0f}): {'flat' if memory['flat'] else 'NOT FLAT'}")
    facts |= {"KV pages held": f"after {found['steps_with_pages_in_use']} of {found['steps_with_pages_counted']} steps",
              "open files, threads": f"{found['open_files']}, {found['threads']} (least, most)",
              "left over": f"{len(found['processes_left'])} processes, {len(found['temporary_files_left'])} files"}
    for name, score in found["accuracy"].items():
        facts[f"accuracy, {name}"] = f"best {score['best']:.3f}, last {score['last']:.3f}: fell by {score['fall']:.3f}"
    return "\n".join(f"{name:<20} {fact}" for name, fact in facts.items())


# ---------------------------------------------------------------------------------------------- command

def main() -> int:
    reader = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    reader.add_argument("--steps", type=int, default=1000)
    reader.add_argument("--every", type=int, default=5, help="steps between two looks at the process")
    reader.add_argument("--name", default="soak")
    reader.add_argument("--runs", type=Path, default=ROOT / "runs")
    reader.add_argument("--cache", type=Path, default=ROOT / ".cache", help="folder of the base model")
    options = reader.parse_args()
    options.runs = options.runs.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # so that the run ends with this process
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
        print(draw(lines, samples, options.runs / f"{options.name}.png"))
    else:
        command = " ".join(["python -m bench.soak", *sys.argv[1:]])
        print(common.save("soak", command, rows, found=found, samples=samples))
        print(draw(lines, samples, common.RESULTS / "soak.png"))
    sound = not (leftover["processes"] or leftover["temporary_files"] or found["steps_with_pages_in_use"])
    return 0 if sound and (not found["memory"] or found["memory"]["flat"]) else 1


if __name__ == "__main__":
    sys.exit(main())
