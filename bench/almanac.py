"""The almanac's arms from one start, on the same questions: does it matter that System 1 learns?

    python -m bench.almanac --arms mars frozen --seeds 0         runs, evaluates, tabulates
    python -m bench.almanac --seeds 0 1 2                        every arm: a day on two cores
    python -m bench.almanac --seeds 0 1 2 --table                tabulates what is there

An arm is a run of recipes.almanac in RUNS/ARM-SEED. Its end and its start are asked the same
held-out questions, sampled and greedily, in RUNS/ARM-SEED-DECODING and RUNS/start-… . Arms that
change only credit, balance or what is frozen begin with the same weights; those that read in
another way begin with a warm start of their own (START), so that nobody meets what it was never
shown. What is there is not made again; half a run is resumed. Options that the bench lacks are the
runs'.

The table has a row for each arm and decoding, over its seeds: accuracy in each cell (country seen
by RL or new; attribute taught by demonstrations, trained by RL, or unseen), what the notes are
worth, what it costs, and two comparisons question by question (McNemar's exact test): with the
arm's start and with `mars`.

Results: bench/results/almanac/table.json and arms.png. Tests: pytest tests/test_almanac.py
"""

import argparse
import contextlib
import fcntl
import itertools
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench.ablate import read_metrics
from bench.atlas import answers, is_finished, report
from bench.common import RESULTS, ROOT, save
from plumbing.metrics import sign_test, wilson_interval
from recipes import almanac, almanac_world

WHOLE_GROUP = ["--balance", "none", "--credit"]
ARMS = {
    "mars": [],
    "frozen": ["--system1", "frozen"],
    "none": ["--system1", "none"],  # the page's sections, each cut to a small part of 1,024 tokens
    # Sections have equal shares of the room, so it takes 12,288 tokens to read 1,600 whole.
    "one-agent": ["--system1", "none", "--sys2_context", "12288"],
    "passages": [],  # the command `passages`
    "balanced": ["--balance", "uniform"],  # the paper's: as many notes as steps of System 2
    "inherited": ["--shared_group"],
    "pooled": [*WHOLE_GROUP, "pooled"],
    "own": [*WHOLE_GROUP, "own"],
    "even": [*WHOLE_GROUP, "even"],
    "twins": [*WHOLE_GROUP, "twins"],
    "group-16": ["--group", "16"],
    "no-purpose": ["--no-purpose"],
    "no-packing": ["--no-packing"],
}
# Arms with a warm start of their own.
START = {name: f"start-{name}" for name in ("none", "one-agent", "passages", "no-purpose")}
START |= {"no-packing": "start-no-packing"}
DECODING = {"sampled": "1", "greedy": "0"}
IN_RUN = ["--eval_questions", "12"]  # of a run itself: what counts is asked here


def carry_out(options: argparse.Namespace, words: list[str], name: str) -> None:
    """One command of recipes.almanac; its log lies beside its folder."""
    line = ["-m", "recipes.almanac", *words, "--name", name, "--threads", options.threads]
    line += ["--runs", str(options.runs), "--cache", str(options.cache), "--bf16", options.bf16]
    print(f"python {' '.join(line)}", flush=True)
    with open(options.runs / f"{name}.log", "a") as log:
        subprocess.run([sys.executable, *line], cwd=ROOT, stdout=log, stderr=log, check=True)


@contextlib.contextmanager
def alone(options: argparse.Namespace, name: str) -> Iterator[Path]:
    """The folder of that name, while no other bench works on it: several may share RUNS."""
    with open(options.runs / f"{name}.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield options.runs / name


def run_missing(options: argparse.Namespace) -> None:
    """Every run and evaluation that is missing, seed by seed."""
    options.runs.mkdir(parents=True, exist_ok=True)
    for seed, arm in itertools.product(options.seeds, options.arms):
        command = [arm] if arm == "passages" else []
        changed = ["--seed", str(seed), *ARMS[arm]]
        with alone(options, f"{arm}-{seed}") as folder:
            if not is_finished(folder):
                begun = (folder / "config.json").exists()
                line = [*command, *changed, *IN_RUN, *options.more, *["--resume"] * begun]
                carry_out(options, line, folder.name)
        made = json.loads((folder / "config.json").read_text())
        reads = {name: made[name] for name in ("system1", "sys2_context", "purpose", "packing")}
        asked = {f"{arm}-{seed}": [str(folder)], f"{START.get(arm, 'start')}-{seed}": None}
        for (name, line), decoding in itertools.product(asked.items(), DECODING):
            with alone(options, f"{name}-{decoding}") as target:
                if (target / "table.json").exists():
                    continue
                shutil.rmtree(target, ignore_errors=True)  # the beginning of one that was cut
                if line is None:  # the start, which reads as its arm does
                    line = [made["model"], "--seed", str(seed)]
                    line += as_options(reads) if arm in START else []
                line = [*command, "eval", *line, "--temperature", DECODING[decoding]]
                line += ["--eval_questions", options.eval_questions]
                carry_out(options, line, target.name)


def as_options(settings: dict) -> list[str]:
    """Settings as a command line gives them."""
    line = []
    for name, value in settings.items():
        if isinstance(value, bool):
            line.append(f"--{name}" if value else f"--no-{name}")
        else:
            line += [f"--{name}", str(value)]
    return line


def cells(folder: Path, asked: dict) -> Counter:
    """What an evaluation adds up to: (name, "right" or "asked") -> how often.

    A name is a cell, "all", or a kind of note. `asked`: the questions by id.
    """
    sums = Counter()

    def count(name: str, right: bool) -> None:
        sums[name, "right"] += right
        sums[name, "asked"] += 1

    for record in records(folder):
        question = asked[record["question_id"]]
        fact = question.fact
        for name in (question.source, "all"):
            count(name, record["reward"] == 1)
        for turn in record["turns"]:
            stated = set()
            for chunk in turn["chunks"]:
                read = chunk["prompt"]
                holds = fact.line in read and f"{fact.title}\n" in read
                text = chunk["note"].replace("<|im_end|>", "").strip()
                note = almanac.Note(text, fact, holds)
                stated |= set() if note.silent else {text}
                count(f"read {fact.group}" if holds else "rightly silent", note.right)
                if holds:
                    count("wrongly silent", note.silent)
            if turn["chunks"]:
                count("contradicted", len(stated) > 1)  # two notes state different things
    return sums


def records(folder: Path) -> list[dict]:
    """An evaluation's trajectories."""
    lines = (folder / "rollouts" / "step_0.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def summarise(runs: Path, seeds: list[int]) -> list[dict]:
    """A row for each arm or start, and decoding, over all seeds that have it."""
    held_out = almanac_world.held_out(almanac_world.make_world())
    questions = {question.id: question for question in held_out}
    rows = []
    starts = dict.fromkeys(["start", *START.values()])
    for name, decoding in itertools.product([*starts, *ARMS], DECODING):
        folders = {seed: runs / f"{name}-{seed}-{decoding}" for seed in seeds}
        folders = {s: folder for s, folder in folders.items() if (folder / "table.json").exists()}
        if not folders:
            continue
        sums = sum((cells(folder, questions) for folder in folders.values()), Counter())
        row = {"arm": name, "decoding": decoding, "seeds": len(folders)}
        names = [*sorted({question.source for question in held_out}), "all"]
        kinds = [*(f"read {group}" for group in almanac_world.GROUPS), "rightly silent"]
        for cell in [*names, *kinds, "wrongly silent", "contradicted"]:
            right, asked = sums[cell, "right"], sums[cell, "asked"]
            if asked:
                row[cell] = [right / asked, *wilson_interval(right, asked)]
        if name in ARMS:
            row |= costs(runs, name, list(folders))
            row |= compared(runs, folders, START.get(name, "start"), decoding, "start")
            row |= compared(runs, folders, "mars", decoding, "mars") if name != "mars" else {}
        rows.append(row)
    return rows


def costs(runs: Path, arm: str, seeds: list[int]) -> dict:
    """Of a step of training, as a mean over its steps and seeds."""
    steps = [line for seed in seeds for line in read_metrics(runs / f"{arm}-{seed}")]
    if not steps:
        return {}

    def mean(of) -> float:
        return sum(of(line) for line in steps) / len(steps)

    return {
        "calls": mean(lambda line: line["calls_per_question"]),
        "read tokens an attempt": mean(lambda line: line.get("tokens_read", 0)),
        "trained tokens": mean(lambda line: line["trained_tokens"]),
        "seconds": mean(lambda line: line["seconds_rollout"] + line["seconds_train"]),
    }


def compared(runs: Path, folders: dict, other: str, decoding: str, called: str) -> dict:
    """Questions that an arm has right and `other` has not, the reverse, and p, seed by seed."""
    gained = lost = 0
    for seed, folder in folders.items():
        against = runs / f"{other}-{seed}-{decoding}"
        if not (against / "table.json").exists():
            return {}
        mine, theirs = answers(folder), answers(against)
        gained += sum(mine[question] > theirs[question] for question in mine)
        lost += sum(mine[question] < theirs[question] for question in mine)
    return {f"against {called}": f"+{gained} −{lost}", f"p {called}": sign_test(gained, lost)}


def plot(rows: list[dict], path: Path) -> None:
    """Right answers, and what the notes are worth, of each arm: sampled, with 95 % intervals."""
    from matplotlib.figure import Figure  # slow to load

    rows = [row for row in rows if row["decoding"] == "sampled"][::-1]
    titles = {"all": "right answers", "read trained": "fact there: told (attributes of RL)"}
    titles |= {"rightly silent": "no fact there: “Nothing here.”"}
    figure = Figure(figsize=(11, 1 + 0.3 * len(rows)), dpi=120, layout="constrained")
    axes = figure.subplots(1, len(titles), sharey=True)
    for ax, (name, title) in zip(axes, titles.items()):
        for place, row in enumerate(rows):
            if name in row:
                share, low, high = row[name]
                colour = "#777777" if row["arm"].startswith("start") else "#0072b2"
                ax.errorbar(share, place, xerr=[[share - low], [high - share]], fmt="o", c=colour)
        ax.set(title=title, xlim=(0, 1))
    axes[0].set_yticks(range(len(rows)), [row["arm"] for row in rows])
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--eval_questions", default="240", help="of the evaluations")
    parser.add_argument("--bf16", default="auto", help="of runs and evaluations")
    parser.add_argument("--threads", default="2", help="of runs and evaluations")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "almanac-bench")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache", help="of the models")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options, options.more = parser.parse_known_args()
    if not options.table:
        try:
            run_missing(options)
        except subprocess.CalledProcessError as error:
            parser.exit(1, f"{' '.join(error.cmd)} failed: see its log in {options.runs}\n")
    rows = summarise(options.runs, options.seeds)
    if not rows:
        parser.exit(1, f"nothing was evaluated in {options.runs}\n")
    print(report(rows))
    print(save("almanac/table", " ".join(["python -m bench.almanac", *sys.argv[1:]]), rows))
    plot(rows, RESULTS / "almanac" / "arms.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
