"""Shared by every bench: who measured, time, rates of the machine, predictions, tables, files.

Results go to bench/results/NAME.json. A row is written as soon as it is measured, and its
prediction before: whoever reads it sees who was right, and a run that is cut keeps what it had.
Tests: pytest tests/test_bench.py
"""

import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import time
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
SMALL_RATES = {"size": 1 << 20, "n": 64, "rounds": 1}  # of `rates`, in a rehearsal
PACKAGES = ("torch", "triton", "transformers", "numpy", "liger_kernel", "flash_attn")

# --- who measured ---------------------------------------------------------------------------------


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checked-out commit; None outside a repository and on a machine without git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except FileNotFoundError:
        return None
    return result.stdout.strip() or None


def processor() -> str:
    """The CPU's name."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def provenance() -> dict:
    """Date, machine, library versions and commit: what a reader needs to judge a figure."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "commit": commit(),
        "versions": {package: version(package) for package in PACKAGES},
    }


# --- time and memory, on a GPU and in a rehearsal on a CPU ----------------------------------------


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def clock() -> float:
    """Wall seconds, when all that was launched on the GPU has ended."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def interleaved(functions: dict, rounds: int = 5, clock=time.process_time) -> dict:
    """Times each function once a round, in turn, so that a machine that drifts drifts for all.

    Returns name -> list of `rounds` durations in seconds of `clock` (CPU time by default). One
    uncounted warm-up round.
    """
    times = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            start = clock()
            function()
            if turn:
                times[name].append(clock() - start)
    return times


def spread(values) -> dict:
    """Median, smallest and largest of some measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def free_bytes() -> float:
    """Free memory of the GPU; a CPU's is not looked at."""
    if not torch.cuda.is_available():
        return math.inf
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def peak_bytes(function) -> float:
    """What a call adds to the GPU memory that is allocated, at its peak; NaN on a CPU."""
    if not torch.cuda.is_available():
        function()
        return math.nan
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


def rates(size: int = 4 << 30, n: int = 8192, rounds: int = 7) -> dict:
    """What the machine can do: bytes a second of a copy, FLOP/s of a bf16 matrix product.

    size: bytes of the copy, each of which is read and written; n: of the n × n matrices.
    """
    where = device()
    source = torch.empty(size, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    a, b = torch.randn(2, n, n, device=where, dtype=torch.bfloat16)
    calls = {"copy": lambda: target.copy_(source), "product": lambda: a @ b}
    times = interleaved(calls, rounds, clock)
    return {
        "copy": 2 * size / statistics.median(times["copy"]),
        "product": 2 * n**3 / statistics.median(times["product"]),
    }


# --- rows, tables, files --------------------------------------------------------------------------


def why(error: Exception) -> str:
    """An error as a cell of a table."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    return lines[0][:100]


def measure(rows: list[dict], write, name: dict, predicted: dict, function) -> dict:
    """One row: `name`, its prediction, and what `function` returns (a dict) or why it failed.

    The row is in `rows` and written before it is measured, and again after. A failure is a cell,
    not the end: the next row may be the one that was wanted.
    """
    row = name | {f"predicted {key}": value for key, value in predicted.items()}
    rows.append(row)
    write(rows)
    try:
        row |= function()
    except Exception as error:
        row["failed"] = why(error)
    write(rows)
    return row


def table(rows: list[dict]) -> str:
    """Rows (dicts) as an aligned text table; a column that a row lacks stays empty there."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns]
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        lines.append([f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    text = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def save(name: str, command: str, rows: list[dict], folder: Path | None = None, **more) -> Path:
    """Writes NAME.json in one go: the rows with their command and provenance."""
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    record = {"command": command, **provenance(), **more, "rows": rows}
    unfinished = folder / f"{name}.json.unfinished"
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    return unfinished.rename(folder / f"{name}.json")
