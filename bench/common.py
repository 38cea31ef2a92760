"""Shared by every benchmark: who measured (machine, versions, commit), interleaved timing, a table, a JSON file."""
import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def provenance() -> dict:
    """Date, machine, library versions and commit: what a reader needs to judge a figure."""
    import torch

    def version(name):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            model = next((line.split(":")[1].strip() for line in f if line.startswith("model name")), model)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent)
    return {"date": datetime.date.today().isoformat(), "cpu": model, "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None, "threads": torch.get_num_threads(),
            "python": platform.python_version(), "commit": git.stdout.strip() or None,
            "versions": {n: version(n) for n in ("torch", "triton", "transformers", "numpy", "bm25s", "liger_kernel", "cut-cross-entropy")}}


def interleaved(functions: dict, rounds: int = 5, clock=time.process_time) -> dict:
    """Times each function once a round, all of them in turn, so that a machine that drifts drifts for all.

    Returns name -> list of `rounds` durations in seconds of `clock` (CPU time by default). One uncounted warm-up round.
    """
    times = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            start = clock()
            function()
            if turn:
                times[name].append(clock() - start)
    return times


def gpu_clock() -> float:
    """For `interleaved`: seconds, when all that was launched on the GPU has ended."""
    import torch
    torch.cuda.synchronize()
    return time.perf_counter()


def spread(values) -> dict:
    """Median, smallest and largest of some measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(rows: list[dict]) -> str:
    """Rows (dicts with the same keys) as an aligned text table."""
    head = list(rows[0])
    cells = [head] + [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    width = [max(len(line[i]) for line in cells) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, width)).rstrip() for line in cells)


def save(name: str, command: str, rows: list[dict], **more) -> Path:
    """Writes bench/results/NAME.json: the rows with their command and provenance."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"command": command, **provenance(), **more, "rows": rows}, indent=1) + "\n")
    return path
