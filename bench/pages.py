"""From which page length on does a reader pay? Arms of the almanac at several page lengths.

    python -m bench.pages                             four lengths, four arms, seed 0
    python -m bench.pages --lengths 1 6 --arms candid one-agent
    python -m bench.pages --table                     only tabulates the complete runs

Every arm is trained and evaluated anew at each length (--page_fields of the recipe). A single agent
gives a page at most half of its context, 4,096 tokens, so it must cut longer pages; BM25's passages
and readers see all of them. The runs are those of bench.arms: a stopped command goes on where it
was. Results: pages.json and pages.png, in bench/results/almanac (the folder above --records).

Tests: pytest tests/test_almanac.py
"""

import argparse
import copy
from pathlib import Path

from bench import arms
from bench.common import RESULTS, ROOT, publish
from plumbing.metrics import wilson_interval

# --page_fields -> the median length of a page, in tokens of SmolLM2
LENGTHS = {1: 1500, 2: 2900, 6: 6000, 0: 8600}
ARMS = ("candid", "mars", "one-agent", "passages")


def at_length(options: argparse.Namespace, fields: int) -> argparse.Namespace:
    """The options of bench.arms for one length. Documents of longer pages need a wider prompt."""
    own = copy.copy(options)
    own.runs = options.runs / f"fields-{fields}"
    own.records = options.records / f"fields-{fields}"
    own.decodings = ("sampled",)
    own.more = ["--page_fields", str(fields), "--sys1_prompt", "1000", *options.more]
    return own


def draw(rows: list[dict], path: Path) -> None:
    """Draws the share of right answers (sampled) by page length, a curve for each arm."""
    with arms.percent_axes(path, "y") as axes:
        for arm in dict.fromkeys(row["arm"] for row in rows):
            own = [row for row in rows if row["arm"] == arm]
            tokens = [row["tokens"] for row in own]
            shares = [row["right"] / row["asked"] for row in own]
            (line,) = axes.plot(tokens, shares, marker="o", label=arm)
            bounds = [wilson_interval(row["right"], row["asked"]) for row in own]
            axes.vlines(tokens, *zip(*bounds), color=line.get_color())
        axes.set_title("Right answers, sampled, with 95 % intervals")
        axes.set_xlabel("tokens of a page (median)")
        axes.set_ylim(0, 1)
        axes.legend(loc="upper center", ncols=4)


def tabulate(options: argparse.Namespace) -> list[dict]:
    """A row for each length and arm that has sampled records, over all their seeds."""
    rows = []
    for fields, tokens in LENGTHS.items():
        own = at_length(options, fields)
        own.seeds = arms.recorded_seeds(own.records)
        for row in arms.summarise(own):
            if row["arm"] in ARMS and row["decoding"] == "sampled":
                rows.append({"fields": fields, "tokens": tokens} | row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--lengths", type=int, nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--eval_questions", default="240")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "pages")
    parser.add_argument("--records", type=Path, default=RESULTS / "almanac" / "pages")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache", help="of the models")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options, options.more = parser.parse_known_args()
    for fields in () if options.table else options.lengths:
        arms.run_missing(at_length(options, fields))
    rows = tabulate(options)
    publish("pages", rows, options.records.parent)
    draw(rows, options.records.parent / "pages.png")


if __name__ == "__main__":
    main()
