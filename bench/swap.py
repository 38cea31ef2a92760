"""Does training make a better reader, or a pair that fits? Runs swap their System 1.

    python -m bench.swap runs/mars-0 runs/mars-1 --name mars      runs of the almanac, two seeds

System 2 is a run's warm start or its last weights. With each System 1 it answers the same held-out
questions, sampled. System 1 is one of the same two, or the last weights of another run. If readers
help only the System 2 that they were trained with, the pair has co-evolved.

A pair's answers are kept in --records, so the same command goes on where it was stopped. Columns
compare a pair, question by question, with the same System 2 and its own System 1.
Results: swap-NAME.json in --out. Tests: pytest tests/test_almanac.py
"""

import argparse
import sys
from pathlib import Path

from bench.arms import compare, weights_of
from bench.common import RESULTS, publish
from bench.fidelity import open_run
from config import UserError, fail
from plumbing import folders
from plumbing.metrics import with_interval
from rollout import play_batch


def answers(run: Path, start: bool, system1: Path | None, questions: int) -> dict:
    """Which of the first `questions` held-out questions a pair has right.

    System 2 has the run's first weights if `start`, else its last. system1: the folder of the other
    weights; None: both systems have the same.
    """
    checkpoint, options = weights_of(run, start)
    options["eval_questions"] = questions
    if system1:
        options["system1"] = "frozen"
    pair = open_run(checkpoint, options, system1)
    batch = list(enumerate(pair.eval_questions))
    trajectories = play_batch(pair, batch, 1, pair.eval_tools, step="eval")
    return {"right": "".join(str(int(t.reward == 1)) for t in trajectories)}


def pairs(runs: list[Path]) -> list[tuple[Path, str, str, Path | None]]:
    """(run, name of System 2, name of System 1, `system1` of `answers`) for each pair."""
    trained = {run.name: (run / "checkpoint").resolve() for run in runs}  # the last weights
    rows = []
    for run in runs:
        models = {"start": Path(folders.read_json(run / "config.json")["model"])} | trained
        for system2 in ("start", run.name):
            systems1 = models | {system2: None}
            rows += [(run, system2, name, model) for name, model in systems1.items()]
    return rows


def measure(options: argparse.Namespace) -> list[dict]:
    """Plays the pairs that have no record. Returns a row for each pair."""
    records = {}
    for run, system2, system1, model in pairs(options.run):
        path = options.records / f"{run.name}, {system2}, {system1}.json"
        key = [str((run / "checkpoint").resolve()), str(model), options.questions]
        if not path.exists() or folders.read_json(path).get("key") != key:
            record = answers(run, system2 == "start", model, options.questions)
            options.records.mkdir(parents=True, exist_ok=True)
            folders.write_json(path, record | {"key": key})
        records[run.name, system2, system1] = folders.read_json(path)
    rows = []
    for (run, system2, system1), record in records.items():
        count = record["right"].count("1")
        row = {"run": run, "System 2": system2, "System 1": system1}
        row["right"] = with_interval(count, len(record["right"]))
        if system1 != system2:
            row |= compare([record], [records[run, system2, system2]], "own")
        rows.append(row)
    return rows


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, nargs="+")
    parser.add_argument("--name", required=True, help="of the results' file")
    parser.add_argument("--questions", type=int, default=240)
    parser.add_argument("--records", type=Path, default=Path("runs/swap"))
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "almanac", help="folder of the results' file"
    )
    options = parser.parse_args(arguments)
    if len({run.name for run in options.run}) < len(options.run):
        parser.error("the rows are named after the runs' folders: give folders of other names")
    try:
        rows = measure(options)
    except UserError as error:
        return fail(str(error))
    publish(f"swap-{options.name}", rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
