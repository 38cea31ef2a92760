"""What the lock costs: programs a second through tools.python.run, against a plain subprocess that locks nothing.

Both start `sys.executable` on the same program with the same environment; the plain one is `python -I -c`, output in a
pipe. Rounds are interleaved; the CPU column counts parent and child. `python -m bench.tools [--quick]`

With `--rollout RUN` (a toy run) instead: what the tools cost end to end. The same rollouts with the real tools and with their
answers remembered from the round before; the difference is theirs.
"""
import argparse
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import common
from tools import python

PROGRAMS = {"print": "print(6 * 7)", "numpy": "import numpy\nprint(numpy.arange(7).sum() * 2)"}


def plain(code: str) -> str:
    done = subprocess.run([sys.executable, "-I", "-c", code], env=python.ENVIRONMENT, capture_output=True, text=True)
    return done.stdout


def cpu_seconds() -> float:
    """Of this process and of the children it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(it.ru_utime + it.ru_stime for it in used)


def measure(run, code: str, threads: int, runs: int) -> tuple[float, float]:
    """Executions a second (wall clock) and CPU milliseconds an execution."""
    with ThreadPoolExecutor(threads) as pool:
        start, cpu = time.perf_counter(), cpu_seconds()
        outputs = list(pool.map(run, [code] * runs))
        assert {output.strip() for output in outputs} == {"42"}, outputs[0]
        return runs / (time.perf_counter() - start), (cpu_seconds() - cpu) / runs * 1000


def jail(runs: int, rounds: int) -> list[dict]:
    """A row for each program, number of threads and way of running; medians over the rounds after one warm-up round."""
    ways = {"plain subprocess": plain, "jail": python.run}
    rows = []
    for program, code in PROGRAMS.items():
        for threads in (1, 8):
            results = {way: [] for way in ways}
            for turn in range(rounds + 1):
                for way, run in ways.items():
                    result = measure(run, code, threads, runs)
                    if turn:
                        results[way].append(result)
            for way, pairs in results.items():
                rate, cpu = (common.spread(values) for values in zip(*pairs))
                rows.append({"program": program, "threads": threads, "way": way, "runs/s": rate["median"],
                             "lowest": rate["min"], "highest": rate["max"], "CPU ms/run": cpu["median"]})
    return rows


def rollout(checkpoint: str, questions: int, rounds: int) -> list[dict]:
    """Seconds of a batch of toy rollouts with real and with remembered tools, and the difference a call."""
    import evaluate
    from build import build
    config = evaluate.settings({"checkpoint": checkpoint, "eval_questions": questions}, asking=False)
    run = build(config, training=False, folder=Path(checkpoint))
    answers = {}

    def remember(name, tool):
        def call(argument):
            if (name, argument) not in answers:
                answers[name, argument] = tool(argument)
            return answers[name, argument]
        return call
    remembered = {name: remember(name, tool) for name, tool in run.eval_tools.items()}
    calls = []

    def play(tools):
        trajectories = run.rollouts(list(enumerate(run.eval_questions)), 4, step="bench", tools=tools)
        calls.append(sum(turn.step.call is not None for t in trajectories for turn in t.turns))
    play(remembered)
    times = common.interleaved({"real tools": lambda: play(run.eval_tools), "remembered answers": lambda: play(remembered)},
                               rounds, clock=time.perf_counter)
    saved = [1000 * (a - b) / calls[0] for a, b in zip(times["real tools"], times["remembered answers"])]
    return [{"tools": name, "trajectories": 4 * questions, "calls": calls[0], **common.spread(seconds),
             "ms a call": common.spread(saved)["median"] if name == "real tools" else 0.0} for name, seconds in times.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few runs, nothing saved")
    parser.add_argument("--rollout", metavar="RUN", help="a toy run: end-to-end overhead in its rollouts")
    options = parser.parse_args()
    quick = options.quick
    if reason := python.available():
        sys.exit(reason)
    if options.rollout:
        rows = rollout(options.rollout, questions=8 if quick else 32, rounds=1 if quick else 5)
        print(common.table(rows))
        if not quick:
            print(common.save("tools_rollout", f"python -m bench.tools --rollout {options.rollout}", rows))
        return
    rows = jail(runs=8 if quick else 64, rounds=1 if quick else 5)
    print(common.table(rows))
    if not quick:
        print(common.save("tools_python", "python -m bench.tools", rows))


if __name__ == "__main__":
    main()
