"""Does README's first run end alike on every processor? Seeds 0 to 4 under four arithmetics.

    python -m bench.toy                                   all 20 runs, some five CPU minutes each
    python -m bench.toy --seeds 0 1 --arithmetics avx2    some of them; another terminal may do more
    python -m bench.toy --table                           tabulates what is there

One machine imitates others: PyTorch, oneDNN and MKL can be held down to older instructions, and the
rule of kernels/products.py can be forced. "mixed" on an Intel processor is what an AMD one with
AVX-512 does: MKL stops at AVX2, and oneDNN multiplies. Each arithmetic rounds in its own way, and
after a few steps every run has other draws. The base model is made anew under each. What is
complete is not made again.

Results: bench/results/toy.json. Tests: pytest tests/test_bench.py
"""

import argparse
import itertools
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from bench.common import ROOT, read_metrics, save, table
from kernels import products
from plumbing.folders import read_json, write_json


def held_down(pytorch: str, onednn: str, mkl: str) -> dict[str, str]:
    """The environment variables that choose older instructions than the processor's."""
    return {
        "ATEN_CPU_CAPABILITY": pytorch,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
    }


# arithmetic -> its environment, and whether oneDNN makes the fp32 products of training
NATIVE = products.onednn_is_faster()
ARITHMETICS = {
    "native": ({}, NATIVE),
    "mixed": ({"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, not NATIVE),
    "avx2": (held_down("avx2", "AVX2", "AVX2"), False),
    "plain": (held_down("default", "SSE41", "SSE4_2"), False),
}
PROGRAM = """
import sys
from kernels import products
products.onednn_is_faster = lambda: {onednn}
import mars
sys.exit(mars.main(sys.argv[1:]))
"""


def run(arithmetic: str, seed: int, runs: Path, more: list[str]) -> None:
    """One run with its base model, unless it is complete: RUNS/ARITHMETIC-SEED and a .json."""
    variables, onednn = ARITHMETICS[arithmetic]
    name = f"{arithmetic}-{seed}"
    if (runs / f"{name}.json").exists():
        return
    cache = runs / "cache" / name
    options = ["--name", name, "--runs", str(runs), "--cache", str(cache), "--seed", str(seed)]
    program = PROGRAM.format(onednn=onednn)
    runs.mkdir(parents=True, exist_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(runs / f"{name}.log", "w") as log:
        line = [sys.executable, "-c", program, *options, *more]
        environment = os.environ | variables
        done = subprocess.run(line, cwd=ROOT, env=environment, stdout=log, stderr=log)
    if done.returncode:
        sys.exit(f"it failed: see {runs / name}.log; remove {runs / name} before the next try")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    last = read_metrics(runs / name)[-1]
    first = read_metrics(runs / name)[0]
    row = {"arithmetic": arithmetic, "seed": seed}
    for score in ("eval_accuracy", "eval_greedy"):
        row |= {f"{score}, before": first[score], score: last[score]}
    write_json(runs / f"{name}.json", row | {"CPU seconds": seconds})


def summarise(rows: list[dict]) -> list[str]:
    """Range and median of what the runs end at."""
    lines = []
    for score in ("eval_accuracy", "eval_greedy", "CPU seconds"):
        values = [row[score] for row in rows]
        median = statistics.median(values)
        lines.append(f"{score}: {min(values):.4g} to {max(values):.4g}, median {median:.4g}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--arithmetics", nargs="+", choices=ARITHMETICS, default=list(ARITHMETICS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "toy-bench")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options, more = parser.parse_known_args()
    if not options.table:
        for seed, arithmetic in itertools.product(options.seeds, options.arithmetics):
            run(arithmetic, seed, options.runs, more)
    rows = [read_json(path) for path in options.runs.glob("*.json")]
    if not rows:
        sys.exit(f"no complete run in {options.runs}")
    rows.sort(key=lambda row: (list(ARITHMETICS).index(row["arithmetic"]), row["seed"]))
    print(table(rows))
    print("\n".join(summarise(rows)))
    print(save("toy", " ".join(["python -m bench.toy", *more]), rows))


if __name__ == "__main__":
    main()
