"""The almanac's arms on the same questions: does it matter that System 1 learns?

    python -m bench.almanac --arms mars frozen --seeds 0         runs, evaluates, tabulates
    python -m bench.almanac --seeds 0 1 2                        every arm: days on two cores
    python -m bench.almanac --table                              tabulates what is there

On an H100 seven arms side by side (--arms ARM --seeds SEED --threads 1) take some four minutes.
How arms are run and compared: bench/arms.py; a run keeps 3 GB. A cell is what RL has seen (country
seen or new; attribute taught by demonstrations, trained by RL, or unseen), or what notes are worth.

Results: bench/results/almanac/table.json; rules of credit that began with other warm starts have
bench/results/almanac/credit (--records FOLDER/records). Tests: pytest tests/test_almanac.py
"""

from collections import defaultdict
from pathlib import Path

from bench import arms
from recipes import almanac, almanac_world


def cells(folder: Path) -> dict[str, list[int]]:
    """Right answers by cell and in all, and what the notes are worth."""
    counts = defaultdict(lambda: [0, 0])
    world = almanac_world.make_world()
    held_out = {asked.id: asked for asked in almanac_world.held_out(world)}

    def count(name: str, right: bool) -> None:
        counts[name][0] += right
        counts[name][1] += 1

    for record in arms.rollouts(folder):
        question = held_out[record["question_id"]]
        fact = question.fact
        for name in (question.source, "all"):
            count(name, record["reward"] == 1)
        for turn in record["turns"]:
            stated = set()
            for chunk in turn["chunks"]:
                read = chunk["prompt"]
                holds = almanac.holds_fact(read, fact)
                text = chunk["note"].replace("<|im_end|>", "").strip()
                note = almanac.Note(text, fact, holds)
                if not note.silent:
                    stated.add(text)
                count(f"read {fact.group}" if holds else "rightly silent", note.right)
                if holds:
                    count("wrongly silent", note.silent)
            if turn["chunks"]:
                count("different notes", len(stated) > 1)
    return counts


STUDY = arms.Study(
    recipe="almanac",
    arms={
        "mars": [],
        "frozen": ["--system1", "frozen"],
        "candid": ["--credit", "candid"],
        # A page's 12 sections share half of the context: cut to 42 tokens each, or whole (512).
        "none": ["--system1", "none"],
        "one-agent": ["--system1", "none", "--sys2_context", "12288"],
        "passages": [],
        "balanced": ["--balance", "uniform"],  # the paper's: as many notes as attempts
        "inherited": ["--shared_group"],
        "pooled": ["--credit", "pooled"],
        "own": ["--credit", "own"],
        "group-16": ["--group", "16"],
        "group-32": ["--group", "32"],
        "no-purpose": ["--no-purpose"],
        "no-packing": ["--no-packing"],
    },
    own_start=("none", "one-agent", "passages", "no-purpose", "no-packing"),
    cells=cells,
    asked="240",
    in_run=["--eval_questions", "12"],  # few: what counts is asked afterwards
    command={"passages": ["passages"]},
)


if __name__ == "__main__":
    arms.main(STUDY, __doc__)
