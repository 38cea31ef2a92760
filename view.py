"""What a run did, in pictures.

    python view.py runs/NAME

writes into the run's folder
    curves.png          held-out accuracy and reward over the steps
    diagnostics.png     all other quantities that were logged
    trajectories.html   attempts at some questions side by side, turn by turn

The drawing is in plumbing/curves.py and plumbing/trajectories.py. The names of the roles are those
of the run's method.json. Tests: pytest tests/test_view.py
"""

import argparse
import json
import math
import sys
from pathlib import Path

from config import UserError
from plumbing import trajectories
from plumbing.files import read_lines, write_whole
from plumbing.trajectories import MARS, Method, number, plain

__all__ = ["Method", "curves", "page", "plain", "read_method", "trajectory_page"]


def read_method(run: Path) -> Method:
    """The method of a run, from its method.json: {"name": …, "roles": {role: its caption}}.

    A run without the file is one of MARS. A damaged file is reported on standard error, and the
    roles are called as MARS's are.
    """
    path = Path(run) / "method.json"
    if not path.exists():
        return MARS
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        name = saved["name"]
        roles = saved["roles"]
        whole = bool(roles) and all(isinstance(word, str) for word in (name, *roles.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        print(f"{path} names no method and roles; the roles are called MARS's", file=sys.stderr)
        return MARS
    return Method(name, roles)


def curves(run: Path) -> Path:
    """Draws RUN/metrics.jsonl into RUN/curves.png and RUN/diagnostics.png; returns the first.

    Raises UserError when there is nothing to draw or no place to write.
    """
    run = Path(run)
    path = run / "metrics.jsonl"
    rows = read_steps(path) if path.exists() else {}
    if not rows:
        raise UserError(
            f"{path} holds no finished step: give the folder of a run that has trained at least one"
        )
    from plumbing import curves as drawing  # loads matplotlib

    name = trajectories.shorten(run.resolve().name, 60)
    title = f"Run {name}: {trajectories.count(len(rows), 'step')}"
    others = drawing.diagnostics(read_method(run).roles)
    write_whole(run / "diagnostics.png", drawing.draw(title, rows, others, columns=3))
    return write_whole(run / "curves.png", drawing.draw(title, rows, drawing.HEADLINE, columns=2))


def read_steps(path: Path) -> dict[float, dict]:
    """step -> its metrics. Of a repeated step (a resumed run) the later line counts."""
    rows = {}
    skipped = 0
    for line in read_lines(path):
        step = number(line.get("step"))
        if math.isnan(step):
            skipped += 1
            continue
        rows[step] = line
    if skipped:
        lines = trajectories.count(skipped, "line")
        print(f"{path}: {lines} without a step, skipped", file=sys.stderr)
    return rows


def page(run: Path, *, steps: list[int] | None = None, questions: int = 3) -> Path:
    """Writes RUN/trajectories.html: `questions` groups of each of `steps`.

    The default are the first, the middle and the last step recorded. Raises UserError when there
    is nothing to show or no place to write.
    """
    run = Path(run)
    title = f"Trajectories of run {trajectories.shorten(run.resolve().name, 60)}"
    sections = trajectories.choose(run, steps, questions)
    return trajectories.write(run / "trajectories.html", title, sections, read_method(run))


def trajectory_page(records: list[dict], path: Path, method: Method = MARS) -> Path:
    """Writes the same page for records at hand (`mars.py ask`). Raises UserError."""
    groups: dict = {}
    for record in records:
        groups.setdefault(str(record.get("question_id")), []).append(record)
    title = "One trajectory" if len(records) == 1 else "Trajectories"
    return trajectories.write(Path(path), title, [("", list(groups.values()))], method)


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Draws the pictures of a run.")
    parser.add_argument("run", type=Path, help="a run's folder, such as runs/toy")
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        help="steps on the page (default: first, middle, last)",
    )
    parser.add_argument("--questions", type=int, default=3, help="questions a step (default 3)")
    given = parser.parse_args()
    try:
        if not given.run.is_dir():
            raise UserError(f"{given.run} is no folder: give a run's folder, such as runs/toy")
        if given.questions < 1:
            raise UserError("--questions must be at least 1")
        print(curves(given.run))
        print(page(given.run, steps=given.steps, questions=given.questions))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
