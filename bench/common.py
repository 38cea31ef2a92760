"""Shared by every benchmark: who measured, ceilings of the card, interleaved timing, tables, files.

Results go to bench/results/NAME.json, or to the folder that MARS_BENCH_RESULTS names.
"""

import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from importlib import metadata
from pathlib import Path

from plumbing.folders import write_whole

FOLDER = Path(__file__).parent
RESULTS = Path(os.environ.get("MARS_BENCH_RESULTS") or FOLDER / "results")
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "bm25s",
    "liger_kernel",
    "cut-cross-entropy",
)


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
        result = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER)
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
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "commit": commit(),
        "versions": {package: version(package) for package in PACKAGES},
    }


# --- time -----------------------------------------------------------------------------------------


def interleaved(
    functions: dict, rounds: int = 5, clock=time.process_time, after_round=None
) -> dict:
    """Times each function once a round, in turn, so that a machine that drifts drifts for all.

    Returns name -> list of `rounds` durations in seconds of `clock` (CPU time by default). One
    uncounted warm-up round. `after_round` is called with the times so far after each other round.
    """
    times = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            start = clock()
            function()
            if turn:
                times[name].append(clock() - start)
        if turn and after_round is not None:
            after_round(times)
    return times


def gpu_clock() -> float:
    """For `interleaved`: seconds, when all that was launched on the GPU has ended."""
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def spread(values) -> dict:
    """Median, smallest and largest of some measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


# --- ceilings of the card at hand -----------------------------------------------------------------


def copy_rate(rounds: int = 7, size: int = 4 << 30) -> float:
    """Bytes a second, read and written, of a large copy on the GPU."""
    import torch

    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = interleaved({"copy": lambda: target.copy_(source)}, rounds, gpu_clock)["copy"]
    return 2 * size / statistics.median(seconds)


def matmul_rate(rounds: int = 7, n: int = 8192) -> float:
    """Operations a second of a large bf16 matrix product on the GPU."""
    import torch

    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)

    def ten_products():
        for _ in range(10):
            a @ b

    seconds = interleaved({"product": ten_products}, rounds, gpu_clock)["product"]
    return 10 * 2 * n**3 / statistics.median(seconds)


def ceilings() -> dict:
    """Both rates of the card at hand, for a bench's file and its shares."""
    return {"copy_bytes_per_second": copy_rate(), "matmul_flops_per_second": matmul_rate()}


def fits(needed: float, spare: float = 0.9) -> bool:
    """Whether `needed` bytes are free on the GPU, with a tenth of it left over."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    return needed <= spare * free


def why(error: Exception) -> str:
    """An error as a cell of a table: a peer that does not run is a row, not the end."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    return lines[0][:80]


# --- tables and files -----------------------------------------------------------------------------


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


def save(name: str, command: str, rows: list[dict], **more) -> Path:
    """Writes NAME.json whole: the rows with their command and provenance.

    Called again with more rows after each measurement, it leaves all of them where a run is cut.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"command": command, **provenance(), **more, "rows": rows}
    write_whole(path, (json.dumps(record, indent=1) + "\n").encode())
    return path
