"""The almanac's arms from one start, on the same questions: does it matter that System 1 learns?

    python -m bench.almanac --arms mars frozen --seeds 0         runs, evaluates, tabulates
    python -m bench.almanac --seeds 0 1 2                        every arm: a day on two cores
    python -m bench.almanac --seeds 0 1 2 --table                tabulates what is there

How arms are run and compared: bench/arms.py. A cell is what RL has seen (country seen or new;
attribute taught by demonstrations, trained by RL, or unseen), or what the notes are worth.

Results: bench/results/almanac/table.json and arms.png. Tests: pytest tests/test_almanac.py
"""

import functools
import sys
from collections import Counter
from pathlib import Path

from bench import arms
from bench.common import RESULTS
from recipes import almanac, almanac_world


@functools.cache
def held_out() -> dict[str, almanac_world.Asked]:
    """The held-out questions by id."""
    return {asked.id: asked for asked in almanac_world.held_out(almanac_world.make_world())}


def cells(folder: Path) -> Counter:
    """Right answers by cell and in all, and what the notes are worth."""
    sums = Counter()

    def count(name: str, right: bool) -> None:
        sums[name, "right"] += right
        sums[name, "asked"] += 1

    for record in arms.rollouts(folder):
        question = held_out()[record["question_id"]]
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
                if not note.silent:
                    stated.add(text)
                count(f"read {fact.group}" if holds else "rightly silent", note.right)
                if holds:
                    count("wrongly silent", note.silent)
            if turn["chunks"]:
                count("contradicted", len(stated) > 1)  # two notes state different things
    return sums


STUDY = arms.Study(
    recipe="almanac",
    arms={
        "mars": [],
        "frozen": ["--system1", "frozen"],
        "none": ["--system1", "none"],  # the page's sections, each cut to a part of 1,024 tokens
        # Sections have equal shares of the room, so it takes 12,288 tokens to read 1,600 whole.
        "one-agent": ["--system1", "none", "--sys2_context", "12288"],
        "passages": [],
        "balanced": ["--balance", "uniform"],  # the paper's: as many notes as steps of System 2
        "inherited": ["--shared_group"],
        "group-16": ["--group", "16"],
        "no-purpose": ["--no-purpose"],
        "no-packing": ["--no-packing"],
    },
    starts={
        name: f"start-{name}"
        for name in ("none", "one-agent", "passages", "no-purpose", "no-packing")
    },
    cells=cells,
    asked="240",
    in_run=["--eval_questions", "12"],  # few: what counts is asked afterwards
    commands={"passages": ["passages"]},
    reads=("system1", "sys2_context", "purpose", "packing"),
)


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


if __name__ == "__main__":
    plot(arms.main(STUDY, __doc__), RESULTS / "almanac" / "arms.png")
    sys.exit(0)
