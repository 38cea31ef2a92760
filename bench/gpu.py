"""Everything that needs a GPU, in one command: the tests that are skipped elsewhere, then every bench.

    python -m bench.gpu                           all of it
    python -m bench.gpu --only tests attention    some of it
    python -m bench.gpu --minutes 9               what has no time left is cut short or not run
    python -m bench.gpu --quick                   benches with small shapes (they write no file)

Each step's output is shown as it comes; a table at the end says how each went. The benches write bench/results/*.json.
Exit: 0 all went well, 1 a step failed or had no time, 2 there is no CUDA device.
"""

import argparse
import math
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from bench.common import table

ROOT = Path(__file__).parent.parent
STEPS = {  # most wanted first, so that a short session has them
    "tests": ["pytest", "-m", "gpu", "-rs"],  # skipped on every other machine
    "kernel tests": [
        "pytest",
        "tests/test_kernels_decode.py",
        "tests/test_kernels_loss.py",
        "-m",
        "not gpu",
    ],
    "attention": ["bench.attention"],
    "kernels": ["bench.kernels"],
    "sampler": ["bench.sampler"],
    "train_step": ["bench.train_step"],
}


def run(command, seconds):
    """Runs `python -m command`, shows its output, and returns (outcome, seconds taken, last line that is no blank)."""
    start, last = time.time(), ""
    deadline = f"after {seconds:.0f} s" if seconds < math.inf else ""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", *command],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), process.kill)
    timer.start()
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last
    code = process.wait()
    cut = not timer.is_alive()
    timer.cancel()
    outcome = f"cut {deadline}" if cut else "ok" if code == 0 else f"failed, exit {code}"
    return outcome, time.time() - start, last[:100]


def main():
    parser = argparse.ArgumentParser(description="All GPU tests and benches.")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=STEPS,
        default=list(STEPS),
        metavar="STEP",
        help=", ".join(STEPS),
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="for all steps together")
    parser.add_argument("--quick", action="store_true", help="benches with small shapes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "bench.gpu measures on a GPU; PyTorch sees no CUDA device here.\n")
    end, rows = time.time() + 60 * options.minutes, []
    for name in options.only:
        command = STEPS[name] + ["--quick"] * (options.quick and STEPS[name][0] != "pytest")
        print(f"\n=== {name}: python -m {' '.join(command)}", flush=True)
        left = end - time.time()
        outcome, seconds, last = (
            run(command, left) if left > 0 else ("not run: no time left", 0.0, "")
        )
        rows.append({"step": name, "outcome": outcome, "seconds": seconds, "last line": last})
    print(f"\n=== {torch.cuda.get_device_name()}, torch {torch.__version__}\n" + table(rows))
    return 0 if all(row["outcome"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
