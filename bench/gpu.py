"""The measurements that need a GPU, one process each.

    python -m bench.gpu --out FOLDER                all steps, about nine minutes
    python -m bench.gpu --step decode requests      some of them

Each step writes its rows to FOLDER/gpu_STEP.json. The kernels' tests on a GPU are a command of
their own: `python -m pytest -m gpu tests/test_kernels_*.py tests/test_policy.py
tests/test_sampler.py`.

The machine needs torch ≥ 2.11, triton and transformers ≥ 5.17; a peer that it lacks becomes a row
that says so. docs/LOG.md (2026-11-26) says what ran and what failed. Several GPUs and long runs
have never been tried.

The exit code is 0 if all went well, 1 if a step failed, 2 if there is no CUDA device.
Tests: pytest tests/test_bench_gpu.py
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are defined

from bench import common, kernels, sampler, train_step  # noqa: E402

STEPS = {
    "loss": kernels.speed,
    "accuracy": kernels.accuracy,
    "attention": kernels.attention,
    "decode": sampler.decode,
    "requests": sampler.requests,
    "training_step": train_step.steps,
}


def run_step(name: str, out: Path, tiny: bool = False) -> list[dict]:
    """Measures one step in this process and writes OUT/gpu_NAME.json. Returns the rows that failed.

    A peer that is not installed is a row, and no failure.
    """
    bench = common.Bench(f"gpu_{name}", f"python -m bench.gpu --step {name}", out, tiny)
    STEPS[name](bench)
    print(common.table(bench.rows), flush=True)
    failures = [row for row in bench.rows if "failed" in row]
    return [row for row in failures if "No module named" not in row["failed"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--step", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="the folder of the rows")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "bench.gpu measures on a GPU; PyTorch sees no CUDA device here.\n")
    if len(options.step) == 1:
        return 1 if run_step(*options.step, options.out) else 0
    # Only a process's end gives back all the memory that a step took.
    line = [sys.executable, "-m", "bench.gpu", "--out", str(options.out.resolve()), "--step"]
    codes = [subprocess.run([*line, name], cwd=common.ROOT).returncode for name in options.step]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
