"""Does README's first run end alike on every processor? Seeds 0 to 4 under four arithmetics.

    python -m bench.toy                                   all 20 runs, some five CPU minutes each
    python -m bench.toy --seeds 0 1 --arithmetics avx2    some runs; another terminal may do others
    python -m bench.toy --table                           only tabulates the complete runs

One machine imitates others: environment variables limit PyTorch, oneDNN and MKL to older
instructions, and the rule of kernels/products.py is forced. On an Intel processor "mixed" does what
an AMD processor with AVX-512 does: MKL stops at AVX2, and oneDNN multiplies. Other arithmetic
rounds otherwise, which soon changes the draws. Each run makes its own base model. A complete run is
not repeated.

Results: bench/results/toy.json. Tests: pytest tests/test_bench.py
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from pathlib import Path

from bench.arms import SCORES, is_complete
from bench.common import ROOT, publish, read_metrics
from kernels import products

VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
NATIVE = products.onednn_is_faster()
# arithmetic -> environment variables, and whether oneDNN makes the fp32 products of training
ARITHMETICS = {
    "native": ({}, NATIVE),
    "mixed": ({"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, not NATIVE),
    "avx2": (dict(zip(VARIABLES, ("avx2", "AVX2", "AVX2"))), False),
    "plain": (dict(zip(VARIABLES, ("default", "SSE41", "SSE4_2"))), False),
}
PROGRAM = """
import sys
from kernels import products
products.onednn_is_faster = lambda: {onednn}
import mars
sys.exit(mars.main(sys.argv[1:]))
"""


def train(arithmetic: str, seed: int, runs: Path, more: list[str]) -> None:
    """Trains RUNS/ARITHMETIC-SEED from a new base model, unless it is complete."""
    run = runs / f"{arithmetic}-{seed}"
    if is_complete(run):
        return
    variables, onednn = ARITHMETICS[arithmetic]
    cache = runs / "cache" / run.name
    options = ["--name", run.name, "--runs", str(runs), "--cache", str(cache), "--seed", str(seed)]
    command = [sys.executable, "-c", PROGRAM.format(onednn=onednn), *options, *more]
    runs.mkdir(parents=True, exist_ok=True)
    with open(f"{run}.log", "w") as log:
        environment = os.environ | variables
        if subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log).returncode:
            sys.exit(f"it failed: see {log.name}; remove {run} before the next try")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--arithmetics", nargs="+", choices=ARITHMETICS, default=list(ARITHMETICS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "toy-bench")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options, more = parser.parse_known_args()
    if not options.table:
        for seed, arithmetic in itertools.product(options.seeds, options.arithmetics):
            train(arithmetic, seed, options.runs, more)
    rows = []
    for arithmetic in ARITHMETICS:
        for run in filter(is_complete, sorted(options.runs.glob(f"{arithmetic}-[0-9]*/"))):
            scores = {score: read_metrics(run)[-1][score] for score in SCORES["mars"]}
            rows.append({"run": run.name, **scores})
    publish("toy", rows)
    for score in SCORES["mars"]:
        values = [row[score] for row in rows]
        median = statistics.median(values)
        print(f"{score}: {min(values):.4g} to {max(values):.4g}, median {median:.4g}")


if __name__ == "__main__":
    main()
