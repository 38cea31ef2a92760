"""Does training make a better reader, or a pair that fits? Both roles of a run, swapped.

    python -m bench.swap runs/mars-0 runs/mars-1           runs of the almanac, each its own seed

Every System 2 (of a run's warm start, and of its last weights) answers the same held-out questions
with every System 1 (of the same two, and of the other runs' last weights), sampled. If trained
readers help a System 2 that was not trained with them as much as their own, training made better
readers. If they help their own only, the pair has co-evolved.

A pair's answers are kept in --records, so the same command goes on where it was stopped. Columns
compare a pair, question by question, with the same System 2 and its own System 1 (McNemar's exact
test). Results: bench/results/almanac/swap.json. Tests: pytest tests/test_almanac.py
"""

import argparse
import sys
from itertools import product
from pathlib import Path

from bench.arms import compare
from bench.common import RESULTS, save, table
from bench.fidelity import open_run
from config import UserError, fail
from plumbing import folders
from plumbing.metrics import with_interval
from rollout import play_batch

PAPERS_RULE = {"credit": "mars"}  # other rules refuse a frozen reader, and nothing is trained here


def answers(run: Path, system2: str, system1: Path | None, questions: int) -> dict:
    """Which questions a pair has right. system2: a model or run; system1: another one, or None."""
    saved = folders.read_json(run / "config.json")
    given = {name: saved[name] for name in ("page_fields", "sys1_prompt", "bf16")}
    if system2 != str(run):  # a model's folder brings no settings
        given |= {"preset": saved["preset"], "seed": saved["seed"]}
    given |= {"eval_questions": questions} | PAPERS_RULE
    if system1:
        given["system1"] = "frozen"
    pair = open_run(system2, given, system1)
    batch = list(enumerate(pair.eval_questions))
    trajectories = play_batch(pair, batch, 1, pair.eval_tools, step="eval")
    return {"right": "".join(str(int(t.reward == 1)) for t in trajectories)}


def pairs(runs: list[Path]) -> list[tuple[Path, str, str, Path | None]]:
    """(run, name of System 2, name of System 1, the model that plays System 1 if it is another)."""
    found = []
    for run, trained in product(runs, (False, True)):
        start = Path(folders.read_json(run / "config.json")["model"])
        own = (run.name, newest(run)) if trained else ("start", start)
        found.append((run, own[0], own[0], None))
        others = [("start", start)] if trained else []
        others += [(r.name, newest(r)) for r in runs if not (trained and r == run)]
        found += [(run, own[0], name, model) for name, model in others]
    return found


def newest(run: Path) -> Path:
    """The last weights of a run."""
    return (run / "checkpoint").resolve()


def measure(options: argparse.Namespace) -> list[dict]:
    """Answers what is missing; a row for each pair."""
    records = {}
    for run, system2, system1, model in pairs(options.run):
        path = options.records / f"{run.name}, {system2}, {system1}.json"
        if not path.exists():
            start = folders.read_json(run / "config.json")["model"]
            record = answers(
                run, start if system2 == "start" else str(run), model, options.questions
            )
            options.records.mkdir(parents=True, exist_ok=True)
            folders.write_json(path, record)
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
    parser.add_argument("--questions", type=int, default=240)
    parser.add_argument("--records", type=Path, default=Path("runs/swap"))
    options = parser.parse_args(arguments)
    try:
        rows = measure(options)
    except UserError as error:
        return fail(str(error))
    print(table(rows))
    command = f"python -m bench.swap {' '.join(arguments)}"
    print(save("swap", command, rows, RESULTS / "almanac"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
