"""This checkout's sampler against another checkout's, in turn, on the work of bench.sampler.

    python -m bench.sampler_pair FOLDER [--rounds 9]

Each checkout has a process of its own, and the two take turns, so that a machine that drifts drifts
for both. The file bench/results/sampler_pair.json has seconds of each round and their ratios.
"""

import argparse
import json
import os
import subprocess
import sys

from bench.common import FOLDER, save, spread, table

WORKER = """
import json, random, sys, time
import torch
torch.set_num_threads(1)
from bench.sampler import SMALL, make_model, random_tokens
from sampler import Sampler

rng = random.Random(0)
prompts = [random_tokens(rng, rng.randint(16, 256), SMALL["vocab_size"]) for _ in range(64)]
wanted = [(16, 32, 64, 128)[i % 4] for i in range(64)]
sampler = Sampler(make_model(SMALL), max_tokens=32768)
sampler.generate(prompts, max_new_tokens=wanted, temperature=0)
for line in sys.stdin:
    cpu, wall = time.process_time(), time.perf_counter()
    done = sampler.generate(prompts, max_new_tokens=wanted, temperature=0)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    answers = [[c.tokens, c.logprobs] for c in done]
    print(json.dumps({"cpu": cpu, "wall": wall, "answers": answers}), flush=True)
"""


def start(folder: str) -> subprocess.Popen:
    """A worker of a checkout, which measures once for each line that it is sent."""
    return subprocess.Popen(
        [sys.executable, "-c", WORKER],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "."},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def measure(worker: subprocess.Popen) -> dict:
    worker.stdin.write("\n")
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())


def largest_difference(theirs: list, ours: list) -> float:
    """Of log-probs, over rows whose tokens are equal."""
    largest = 0.0
    for (tokens, logprobs), (own_tokens, own_logprobs) in zip(theirs, ours, strict=True):
        if tokens == own_tokens:
            pairs = zip(logprobs, own_logprobs, strict=True)
            largest = max(largest, *(abs(a - b) for a, b in pairs))
    return largest


def main():
    parser = argparse.ArgumentParser(description="Two checkouts' samplers, in turn.")
    parser.add_argument("folder", help="the other checkout")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    workers = {"other": start(options.folder), "this": start(str(FOLDER.parent))}
    runs = {name: [] for name in workers}
    for _ in range(options.rounds):
        for name, worker in workers.items():
            runs[name].append(measure(worker))
    for worker in workers.values():
        worker.stdin.close()

    rows = []
    for clock in ("cpu", "wall"):
        seconds = {name: [run[clock] for run in runs[name]] for name in runs}
        ratios = [a / b for a, b in zip(seconds["other"], seconds["this"], strict=True)]
        for name, values in {**seconds, "other / this": ratios}.items():
            rounded = {key: round(value, 3) for key, value in spread(values).items()}
            rows.append({"clock": clock, "checkout": name, **rounded})
    theirs = runs["other"][0]["answers"]
    ours = runs["this"][0]["answers"]
    equal = sum(a[0] == b[0] for a, b in zip(theirs, ours, strict=True))
    difference = largest_difference(theirs, ours)
    print(table(rows))
    print(f"rows with equal tokens: {equal} of {len(ours)}; log-probs differ by {difference:.1e}")
    more = {"rows_equal": equal, "largest_logprob_difference": difference}
    print("written:", save("sampler_pair", "python -m bench.sampler_pair FOLDER", rows, **more))


if __name__ == "__main__":
    main()
