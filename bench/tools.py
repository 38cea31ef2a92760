"""What the lock costs: programs a second through tools.python.run, and through a plain subprocess.

    python -m bench.tools [--quick]
    python -m bench.tools --rollout RUN [--quick]

Both ways start `sys.executable` on the same program with the same environment. The plain one is
`python -I -c` with its output in a pipe; it locks nothing. The CPU column counts parent and child.

With `--rollout RUN` (a toy run): what the tools cost end to end. The same rollouts run once with
the real tools and once with their answers remembered; the difference is what the tools take.
"""

import argparse
import dataclasses
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import common
from tools import Tool, python

PROGRAMS = {
    "print": "print(6 * 7)",
    "numpy": "import numpy\nprint(numpy.arange(7).sum() * 2)",
}
ATTEMPTS = 4  # trajectories per question


def run_plainly(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-I", "-c", code],
        env=python.ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    return done.stdout


def cpu_seconds() -> float:
    """CPU seconds of this process and of the children it has waited for."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def measure(run, code: str, threads: int, runs: int) -> tuple[float, float]:
    """Executions a second (wall clock) and CPU milliseconds an execution."""
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        cpu_start = cpu_seconds()
        outputs = list(pool.map(run, [code] * runs))
        seconds = time.perf_counter() - start
        cpu = cpu_seconds() - cpu_start
    assert {output.strip() for output in outputs} == {"42"}, outputs[0]
    return runs / seconds, cpu / runs * 1000


def measure_ways(code: str, threads: int, runs: int, rounds: int) -> dict[str, list]:
    """way -> a measurement for each round. The ways take turns; the first round warms up."""
    ways = {"plain subprocess": run_plainly, "jail": python.run}
    results = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, run in ways.items():
            result = measure(run, code, threads, runs)
            if turn > 0:
                results[way].append(result)
    return results


def jail(runs: int, rounds: int) -> list[dict]:
    """A row for each program, number of threads and way of running; medians over the rounds."""
    rows = []
    for program, code in PROGRAMS.items():
        for threads in (1, 8):
            for way, results in measure_ways(code, threads, runs, rounds).items():
                rates, cpus = zip(*results, strict=True)
                rate = common.spread(rates)
                row = {
                    "program": program,
                    "threads": threads,
                    "way": way,
                    "runs/s": rate["median"],
                    "lowest": rate["min"],
                    "highest": rate["max"],
                    "CPU ms/run": common.spread(cpus)["median"],
                }
                rows.append(row)
    return rows


def remember(tool: Tool, answers: dict) -> Tool:
    """The tool, with its answers kept in `answers`."""

    def call(argument):
        if (tool.name, argument) not in answers:
            answers[tool.name, argument] = tool.call(argument)
        return answers[tool.name, argument]

    return dataclasses.replace(tool, call=call)


def rollout(checkpoint: str, questions: int, rounds: int) -> list[dict]:
    """Seconds of toy rollouts with real and with remembered tools, and the difference a call."""
    from plumbing.start import build

    import mars
    from plumbing import evaluation

    given = {"checkpoint": checkpoint, "eval_questions": questions}
    config = evaluation.settings(mars.METHOD, given, asking=False)
    run = build(mars.METHOD, config, training=False, folder=Path(checkpoint))
    answers = {}
    remembered = [remember(tool, answers) for tool in run.eval_tools]

    def play(tools):
        batch = list(enumerate(run.eval_questions))
        return run.rollouts(batch, ATTEMPTS, step="bench", tools=tools)

    # The first rollouts fill the memory and tell how many calls there are.
    trajectories = play(remembered)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    calls = sum(turn.action.call is not None for turn in turns)
    times = common.interleaved(
        {
            "real tools": lambda: play(run.eval_tools),
            "remembered answers": lambda: play(remembered),
        },
        rounds,
        clock=time.perf_counter,
    )
    pairs = zip(times["real tools"], times["remembered answers"], strict=True)
    saved = [1000 * (real - remembered) / calls for real, remembered in pairs]
    rows = []
    for name, seconds in times.items():
        row = {"tools": name, "trajectories": ATTEMPTS * questions, "calls": calls}
        row |= common.spread(seconds)
        row["ms a call"] = 0.0
        if name == "real tools":
            row["ms a call"] = common.spread(saved)["median"]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few runs, nothing saved")
    parser.add_argument("--rollout", metavar="RUN", help="a toy run: the tools' part of rollouts")
    options = parser.parse_args()
    rounds = 1 if options.quick else 5
    reason = python.available()
    if reason:
        sys.exit(reason)
    if options.rollout:
        name = "tools_rollout"
        command = f"python -m bench.tools --rollout {options.rollout}"
        rows = rollout(options.rollout, questions=8 if options.quick else 32, rounds=rounds)
    else:
        name = "tools_python"
        command = "python -m bench.tools"
        rows = jail(runs=8 if options.quick else 64, rounds=rounds)
    print(common.table(rows))
    if not options.quick:
        print(common.save(name, command, rows))


if __name__ == "__main__":
    main()
