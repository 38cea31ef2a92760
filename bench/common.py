"""Shared by every bench: time, what the machine can do, rows, tables, files.

A part of a bench is a function of a `Bench`, which takes its rows. A row is written as soon as it
is measured, so a run that is cut keeps what it had. What was predicted stands at the head of a
bench. Tests: pytest tests/test_bench.py
"""

import argparse
import contextlib
import datetime
import functools
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from plumbing.folders import read_lines, write_json
from plumbing.logbook import commit

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("torch", "triton", "transformers", "numpy", "liger_kernel")

# --- time and memory, on a GPU and on a CPU -------------------------------------------------------

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# What products are in; a CPU need not have units for bf16.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32


def clock() -> float:
    """CPU seconds; on a GPU wall seconds, when all that was launched there has ended."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def timed(function: Callable, rounds: int = 5) -> list[float]:
    """Seconds of `rounds` calls, after one that warms up."""
    times = []
    for _ in range(rounds + 1):
        start = clock()
        function()
        times.append(clock() - start)
    return times[1:]


def spread(unit: str, values: list[float]) -> dict:
    """Three columns: median, smallest and largest of some measurements."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {f"{unit}, {key}": value for key, value in found.items()}


def added_bytes(function: Callable) -> float:
    """What a call adds to the GPU memory that is allocated, at its peak; NaN on a CPU."""
    if not torch.cuda.is_available():
        return math.nan
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


@functools.cache
def rates() -> dict:
    """What the machine can do: bytes a second of a copy, FLOP/s of a matrix product.

    The copy counts each byte as read and written. On a CPU both sizes are small.
    """
    size, n, rounds = (4 << 30, 8192, 7) if torch.cuda.is_available() else (64 << 20, 1024, 3)
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    a, b = torch.randn(2, n, n, device=DEVICE, dtype=DTYPE)
    copy = statistics.median(timed(lambda: target.copy_(source), rounds))
    product = statistics.median(timed(lambda: a @ b, rounds))
    return {"copy": 2 * size / copy, "product": 2 * n**3 / product}


# --- rows, tables, files --------------------------------------------------------------------------


@dataclass
class Bench:
    """The rows of one part, and how it is measured."""

    name: str = ""  # of the file
    command: str = ""
    folder: Path | None = None  # where NAME.json is written; None: nowhere
    tiny: bool = False  # sizes that take seconds on any CPU
    peers: list[str] = field(default_factory=list)  # Pythons: see bench/peers.py
    rows: list[dict] = field(default_factory=list)

    def measure(self, name: dict, function: Callable[[], dict]) -> dict:
        """One row: `name`, and what `function` returns or why it failed.

        A failure is a cell, not the end: the next row may be the one that was wanted.
        """
        rates()  # measured once, while there is memory for it
        torch.cuda.empty_cache()  # of the row before
        try:
            row = name | function()
        except Exception as error:
            row = name | {"failed": f"{type(error).__name__}: {error}".partition("\n")[0][:100]}
        row = {name: x for name, x in row.items() if x == x}  # a NaN was not measured here
        self.rows.append(row)
        if self.folder:
            save(self.name, self.command, self.rows, self.folder, rates=rates())
        return row


def table(rows: list[dict]) -> str:
    """Rows (dicts) as an aligned text table; a column that a row lacks stays empty there."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns]
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        lines.append([f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells])
    widths = [max(map(len, column)) for column in zip(*lines)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def provenance() -> dict:
    """Date, machine, library versions and commit: what a reader needs to judge a figure."""
    cpus = Path("/proc/cpuinfo")
    found = cpus.exists() and re.search(r"model name\s*: (.*)", cpus.read_text())
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": found[1] if found else platform.machine(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "commit": commit(),
        "versions": versions,
    }


def save(name: str, command: str, rows: list[dict], folder: Path = RESULTS, **more) -> Path:
    """Writes NAME.json in one go: the rows with their command and provenance."""
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_json(path, {"command": command, **provenance(), **more, "rows": rows})


def read_metrics(folder: Path) -> list[dict]:
    """A run's metrics, a line a step; none before its first."""
    path = folder / "metrics.jsonl"
    return read_lines(path) if path.exists() else []


# --- the command ----------------------------------------------------------------------------------


def main(name: str, description: str, parts: dict[str, Callable[[Bench], None]]) -> None:
    """`python -m bench.NAME`: measures the parts on a CPU, prints and writes their rows."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--tiny", action="store_true", help="small sizes; writes no file")
    about = "interpreters of environments with peers: bench/peers.py"
    parser.add_argument("--peers", nargs="+", default=[], metavar="PYTHON", help=about)
    options = parser.parse_args()
    if torch.cuda.is_available():
        parser.exit(2, f"bench.{name} measures a CPU; on a GPU: python -m bench.gpu\n")
    torch.set_num_threads(1)
    for part in options.only:
        command = f"python -m bench.{name} --only {part}" + " --peers …" * bool(options.peers)
        folder = None if options.tiny else RESULTS
        bench = Bench(f"{name}_{part}", command, folder, options.tiny, options.peers)
        parts[part](bench)
        print(f"\n{part}\n{table(bench.rows)}", flush=True)
