"""What the benches share: time and memory, the machine's rates, rows, tables, files.

A part of a bench yields pairs: a row's first columns, and a function that measures the others. With
`tiny` it has sizes that take seconds on any CPU. Tests: pytest tests/test_bench.py
"""

import contextlib
import datetime
import functools
import gc
import math
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
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
# The type of matrix products: a CPU may be slow in bf16.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32


def clock() -> float:
    """CPU seconds; with a GPU wall seconds, after the GPU has finished its work."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def timed(function: Callable, rounds: int = 5) -> list[float]:
    """The seconds of `rounds` calls, after one call that warms up."""
    times = []
    for _ in range(rounds + 1):
        start = clock()
        function()
        times.append(clock() - start)
    return times[1:]


def spread(unit: str, values: list[float]) -> dict:
    """Three columns of a row: median, minimum and maximum of some measurements."""
    columns = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {f"{unit}, {name}": value for name, value in columns.items()}


def peak_bytes(function: Callable) -> float:
    """The peak of the allocated GPU memory during a call; NaN on a CPU."""
    if not torch.cuda.is_available():
        return math.nan
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated()


@functools.cache
def rates() -> dict:
    """The machine's rates: bytes per second of a copy, FLOP/s of a matrix product.

    A copied byte counts twice, because it is read and written. A CPU gets small sizes.
    """
    size, n, rounds = (4 << 30, 8192, 7) if torch.cuda.is_available() else (64 << 20, 1024, 3)
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    a, b = torch.randn(2, n, n, device=DEVICE, dtype=DTYPE)
    copy = statistics.median(timed(lambda: target.copy_(source), rounds))
    product = statistics.median(timed(lambda: a @ b, rounds))
    return {"copy": 2 * size / copy, "product": 2 * n**3 / product}


# --- rows, tables, files --------------------------------------------------------------------------

Rows = Iterator[tuple[dict, Callable[[], dict]]]
Part = Callable[[bool], Rows]


def measure(part: Part, tiny: bool = False) -> Iterator[dict]:
    """The rows of a part. If a measurement fails, its row says why, and the next one follows."""
    rates()  # measured once, while the memory is free
    for columns, function in part(tiny):
        gc.collect()  # a policy refers to itself
        torch.cuda.empty_cache()  # the previous row has filled it
        try:
            row = columns | function()
        except Exception as error:
            row = columns | {"failed": f"{type(error).__name__}: {error}".partition("\n")[0][:100]}
        yield {name: x for name, x in row.items() if x == x}  # NaN: not measured on this machine


def table(rows: list[dict]) -> str:
    """The rows as an aligned text table. A cell that a row lacks is empty."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns]
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        lines.append([f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells])
    widths = [max(map(len, column)) for column in zip(*lines)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def provenance() -> dict:
    """Date, machine, library versions and commit, so that a reader can judge a number."""
    cpus = Path("/proc/cpuinfo")
    model = cpus.exists() and re.search(r"model name\s*: (.*)", cpus.read_text())
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "commit": commit(),
        "versions": versions,
    }


def save(name: str, rows: list[dict], folder: Path, **more) -> Path:
    """Writes FOLDER/NAME.json atomically: the rows, the command of this process, provenance."""
    command = " ".join([f"python -m bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    command = re.sub(r" /\S+", " …", command)  # without a machine's paths
    folder.mkdir(parents=True, exist_ok=True)
    content = {"command": command, **provenance(), **more, "rows": rows}
    return write_json(folder / f"{name}.json", content)


def publish(name: str, rows: list[dict], folder: Path = RESULTS) -> None:
    """Prints the rows and saves them. Exits if there are none."""
    if not rows:
        sys.exit("there is nothing to tabulate: no run is complete")
    print(table(rows))
    print(save(name, rows, folder))


def read_metrics(folder: Path) -> list[dict]:
    """A run's metrics: a dict for each step that is done."""
    path = folder / "metrics.jsonl"
    return read_lines(path) if path.exists() else []


def run(name: str, part: Part, folder: Path = RESULTS) -> None:
    """Measures a part's rows, saves them after each one, and prints them at the end."""
    rows = []
    for row in measure(part):
        rows.append(row)
        save(name, rows, folder, rates=rates())
    print(f"\n{name}\n{table(rows)}", flush=True)
