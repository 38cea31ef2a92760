"""The measurements that need a GPU.

    python -m bench.gpu --step decode requests      whole steps (about ten minutes for all)
    python -m bench.gpu --part speed --out FOLDER   what is open, beside predictions (four minutes)
    python -m bench.gpu --part almanac --seconds 300 --out FOLDER      three experiments at once

Each step writes its rows to FOLDER/gpu_STEP.json as soon as they are measured. Two rows of the part
`speed` need flash-attn 4 (requirements-gpu.txt). The part `almanac` trains 14 runs of
recipes/almanac.py side by side. Its runs and records are in FOLDER, so the same command continues
where the time was up. A package that the machine lacks becomes a row that says so.

The tests that need a GPU are another command:
`python -m pytest -m gpu tests/test_kernels_*.py tests/test_policy.py tests/test_sampler.py`.

Tests: pytest tests/test_bench_gpu.py
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

from bench import common, kernels, pages, sampler, train_step
from sampler import Sampler


def lend(tiny: bool) -> common.Rows:
    """A row: seconds to lend the KV pool to a training step, and to make it and its graphs again.

    The pool and the step's activations (57 GB at most) do not fit together.
    """
    size, samples, capacity = train_step.setting(tiny)
    tokens = 1024 if tiny else 45 * 2**30 // sampler.token_bytes(size)

    def run() -> dict:
        form = {"packed": True, "recompute": False, "compiled": False}
        model, step = train_step.make_step(size, samples, capacity, **form)
        lender = Sampler(model, max_tokens=tokens, dtype=common.DTYPE)
        sample = partial(lender.generate, [[1, 2, 3]], max_new_tokens=4)
        sample()  # The first step makes the pool and captures the graphs.
        seconds, peaks = [], []
        for _ in range(5):
            start = common.clock()
            lender.lend_pool()
            seconds.append(common.clock() - start)
            peaks.append(common.peak_bytes(step) / 1e9)
            start = common.clock()
            lender.load_weights(model)
            sample()
            seconds[-1] += common.clock() - start
        return common.spread("s", seconds) | {"peak GB": max(peaks)}

    yield {"form": "pool of 45 GiB"}, run


STEPS = {
    "loss": kernels.speed,
    "accuracy": kernels.accuracy,
    "attention": kernels.attention,
    "decode": sampler.decode,
    "prefill": sampler.prefill,
    "requests": sampler.requests,
    "training_step": train_step.steps,
    "lend": lend,
}
PARTS = {"speed": partial(train_step.steps, forms=train_step.OPEN)}


# --- the almanac ----------------------------------------------------------------------------------


STEPS_OF_A_RUN = "12"  # of the recipe's 16, so that all fit into the time
Job = tuple[list[str], list[Path]]  # arguments of Python, and the files that it needs to start


def almanac_jobs(out: Path) -> list[Job]:
    """The three experiments. Swaps and the credit's fidelity use runs on the shortest pages."""
    runs, records = out / "runs", out / "records"
    short = min(fields for fields in pages.LENGTHS if fields)

    def train(fields: int, arm: str, seed: int) -> Job:
        options = f"--lengths {fields} --arms {arm} --seeds {seed} --recompute_activations".split()
        options += f"--steps {STEPS_OF_A_RUN} --eval_every {STEPS_OF_A_RUN}".split()
        return ["-m", "bench.pages", "--runs", str(runs), "--records", str(records), *options], []

    def swap(rule: str, seeds: tuple) -> Job:
        names = [f"fields-{short}/{rule}-{seed}" for seed in seeds]
        options = ["--records", str(out / "swap"), "--out", str(out), "--name", rule]
        needed = [records / f"{name}-sampled.json" for name in names]
        return ["-m", "bench.swap", *(str(runs / name) for name in names), *options], needed

    def fidelity(name: str, needed: Path, *options: str) -> Job:
        run = runs / f"fields-{short}/mars-0"
        options = ["--out", str(out), "--name", name, *options]
        return ["-m", "bench.fidelity", str(run), *options], [needed]

    jobs = [train(short, arm, seed) for seed in (0, 1) for arm in ("candid", "mars")]
    jobs.append(fidelity("start", runs / f"fields-{short}/mars-0/config.json", "--start"))
    jobs.append(fidelity("end", records / f"fields-{short}/mars-0-sampled.json"))
    # Both orders share the pairs' records, so two processes play them.
    jobs += [swap(rule, seeds) for rule in ("candid", "mars") for seeds in ((0, 1), (1, 0))]
    jobs += [train(short, arm, 0) for arm in ("one-agent", "passages")]
    jobs += [train(fields, arm, 0) for fields in (2, 6) for arm in pages.ARMS]
    return jobs


def run_jobs(out: Path, seconds: float, jobs: list[Job]) -> None:
    """Runs jobs side by side for at most `seconds`. Each job's output is OUT/job_N.log."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    waiting, running = list(range(len(jobs))), {}

    def report(outcome: str, number: int) -> None:
        print(f"{outcome}: job {number}, {' '.join(jobs[number][0])}", flush=True)

    try:
        while time.monotonic() < end:
            for number in [n for n, process in running.items() if process.poll() is not None]:
                report(f"exit {running.pop(number).returncode}", number)
            for number in [n for n in waiting if all(path.exists() for path in jobs[n][1])]:
                waiting.remove(number)
                command = [sys.executable, *jobs[number][0]]
                with open(out / f"job_{number}.log", "w") as log:
                    options = {"stdout": log, "stderr": log, "start_new_session": True}
                    running[number] = subprocess.Popen(command, cwd=common.ROOT, **options)
            if not running:
                break  # what the waiting jobs need will never exist
            time.sleep(0.5)
    finally:  # Ctrl-C does not reach a session of its own.
        for number, process in running.items():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            report("cut", number)
    for number in waiting:
        report("not begun", number)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--step", nargs="+", choices=STEPS)
    parser.add_argument("--part", choices=[*PARTS, "almanac"])
    parser.add_argument("--seconds", type=float, default=840, help="of the part almanac")
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="folder of the rows")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "bench.gpu measures a GPU, and PyTorch sees no CUDA device here\n")
    if options.part == "almanac":
        run_jobs(options.out, options.seconds, almanac_jobs(options.out))
    else:
        for name in options.step or (PARTS if options.part else STEPS):
            common.run(f"gpu_{name}", (STEPS | PARTS)[name], options.out)
