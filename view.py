"""Draws a run's pictures into its folder: curves.png, diagnostics.png, trajectories.html.

python view.py runs/NAME
"""

import sys
from pathlib import Path

from config import OneLineParser, UserError, fail
from plumbing import curves, pages
from tools import show


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder, such as runs/toy")
    parser.add_argument("--steps", type=int, nargs="+", help="default: first, middle, last")
    options = parser.parse_args(arguments)
    try:
        show(str(curves.of_run(options.run)))
        show(str(pages.of_run(options.run, steps=options.steps)))
    except UserError as error:
        return fail(error)
    except KeyboardInterrupt:
        fail("interrupted; each picture is the new one or the old one, so start again")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
