"""The atlas before and after RL, and arms that change one thing.

    python -m bench.atlas --bf16 on --arms rl                        seed 0
    python -m bench.atlas --bf16 on --seeds 0 1 2 --arms rl frozen   also with System 1 frozen
    python -m bench.atlas --table                                    tabulates what is there

How arms are run and compared: bench/arms.py. Results: bench/results/atlas/table.json.
Tests: pytest tests/test_bench.py
"""

import json
from pathlib import Path

from bench import arms


def cells(folder: Path) -> dict[str, list[int]]:
    """Right answers by the kind of question."""
    counts = {}
    for row in json.loads((folder / "table.json").read_text()):
        asked = row["questions"]
        counts[row["set"]] = [round(row["accuracy"] * asked), asked]
    return counts


STUDY = arms.Study(
    recipe="atlas",
    arms={
        "rl": [],
        "frozen": ["--system1", "frozen"],
        "no-purpose": ["--no-purpose"],  # purposes are taught in the warm start
        "balance-none": ["--balance", "none"],
        "sample-mean": ["--loss_mean", "sample"],
        "inherited": ["--shared_group"],
    },
    own_start=("no-purpose",),
    cells=cells,
    asked="200",
)


if __name__ == "__main__":
    arms.main(STUDY, __doc__)
