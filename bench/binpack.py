"""Seconds of first-fit decreasing: our tournament tree beside the textbook's scan of all bins.

python -m bench.binpack            writes bench/results/binpack.json
"""

import random
import sys

from bench import common
from binpack import first_fit_decreasing


def scan(sizes, capacity):
    """The textbook: every item looks at every open bin, in order."""
    bins, rooms = [], []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        bin = next((b for b, room in enumerate(rooms) if room >= sizes[index]), None)
        if bin is None:
            bin = len(bins)
            bins.append([])
            rooms.append(capacity)
        bins[bin].append(index)
        rooms[bin] -= sizes[index]
    return bins


def main() -> None:
    rng, rows = random.Random(0), []
    for count in (1_000, 10_000, 100_000):
        for name, low, high in (
            ("1 to capacity", 1, 1000),
            ("small", 1, 50),
            ("about half", 400, 600),
        ):
            sizes = [rng.randint(low, high) for _ in range(count)]
            forms = {"tree": lambda: first_fit_decreasing(sizes, 1000)}
            if count <= 10_000:
                forms["scan"] = lambda: scan(sizes, 1000)
                assert scan(sizes, 1000) == first_fit_decreasing(sizes, 1000)
            times = common.interleaved(forms, rounds=5 if count < 100_000 else 7)
            tree = common.spread(times["tree"])
            rows.append(
                {
                    "items": count,
                    "sizes": name,
                    "tree s": tree["median"],
                    "min": tree["min"],
                    "max": tree["max"],
                    "scan s": common.spread(times["scan"])["median"]
                    if "scan" in times
                    else "not run",
                }
            )
    print(common.table(rows))
    print(common.save("binpack", "python -m bench.binpack", rows))


if __name__ == "__main__":
    sys.exit(main())
