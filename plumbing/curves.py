"""curves.png and diagnostics.png: what a run logged, over its steps.

The first file has the two most important panels. A quantity that was never logged leaves its panel
empty. Import this file only where something is drawn, because matplotlib is slow to load.
Tests: pytest tests/test_view.py
"""

import io
from pathlib import Path

import matplotlib
from matplotlib import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from config import UserError
from plumbing.folders import read_lines, write_whole
from plumbing.pages import count, cut, plain, roles_of

# Colours of Okabe and Ito, which colour-blind readers distinguish.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#777777", "#cc79a7", "#56b4e9"]
LOOK = {
    "axes.formatter.limits": (-3, 5),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.prop_cycle": cycler(color=COLOURS, linestyle=["-", "--", ":", "-.", "-", "--"]),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.alpha": 0.25,
    "text.parse_math": False,  # a "$" in a name is no formula
}

# Title -> key in metrics.jsonl -> label, which may be empty.
Panels = dict[str, dict[str, str]]
HEADLINE: Panels = {
    "Held-out accuracy": {"eval_accuracy": "sampled", "eval_greedy": "greedy"},
    "Reward in training": {"reward": ""},
}
WARNINGS = {
    "zero_variance_share": "zero variance",
    "malformed_share": "malformed",
    "tool_error_share": "tool failed",
    "unaided_share": "no call",
    "repeated_share": "repeated",
}
SECONDS = {"seconds_rollout": "rollout", "seconds_train": "train", "seconds_eval": "evaluate"}


def diagnostics(roles: dict[str, str]) -> Panels:
    """The other panels. `roles`: a method's roles and what each is called."""

    def by_role(quantity: str) -> dict[str, str]:
        return {f"{role}_{quantity}": name for role, name in roles.items()}

    return {
        "Tool calls per trajectory": {"calls_per_question": ""},
        "Tokens per sample": by_role("length"),
        "Entropy, nats per token": by_role("entropy"),
        "Log-prob per token, right attempts": by_role("logprob_right"),
        "Log-prob per token, wrong attempts": by_role("logprob_wrong"),
        "Sampler–trainer mismatch, KL": {"mismatch_kl": ""},
        "Share of clipped tokens": {"clip_share": ""},
        "Warning signs, shares": WARNINGS,
        "Seconds per step": SECONDS,
    }


def of_run(run: Path) -> Path:
    """Draws RUN/metrics.jsonl into RUN/curves.png and RUN/diagnostics.png; returns the first.

    UserError when there is nothing to draw.
    """
    lines = read_lines(run / "metrics.jsonl")
    if not lines:
        raise UserError(f"{run} holds no finished step: name a run that has trained at least one")
    title = f"Run {plain(cut(run.resolve().name, 60))}: {count(len(lines), 'step')}"
    others = draw(title, lines, diagnostics(roles_of(run)), shape=(3, 3))
    write_whole(run / "diagnostics.png", others)
    return write_whole(run / "curves.png", draw(title, lines, HEADLINE, shape=(1, 2), top=1.0))


def draw(
    title: str, lines: list[dict], panels: Panels, *, shape: tuple[int, int], top: float = 0.0
) -> bytes:
    """A PNG of panels in `shape`, (rows, columns); their y-axes reach to `top` at least."""
    rows, columns = shape
    picture = io.BytesIO()
    with matplotlib.rc_context(LOOK):
        size = (4.2 * columns, 0.6 + 2.7 * rows)
        figure = Figure(figsize=size, dpi=150, layout="constrained")
        figure.suptitle(title, fontsize=12)
        figure.supxlabel("step")
        axes = figure.subplots(rows, columns, sharex=True).flat
        for ax, (name, labels) in zip(axes, panels.items(), strict=True):
            ax.set_title(name, loc="left", fontsize=11, fontweight="bold")
            draw_panel(ax, lines, labels, top)
        figure.savefig(picture, format="png")
    return picture.getvalue()


def points(lines: list[dict], key: str) -> list[tuple[int, float]]:
    """(x, value) wherever a key was logged; x is the number of steps done before it was measured.

    A line may hold an evaluation from before its step. The last line holds the final one as well.
    """
    if not key.startswith("eval_"):
        return [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    measured = [(line["step"], line.get(f"{key}_before")) for line in lines]
    measured += [(line.get("eval_step"), line.get(key)) for line in lines]
    return sorted(point for point in measured if point[1] is not None)


def draw_panel(ax: Axes, lines: list[dict], labels: dict[str, str], top: float) -> None:
    """Draws a panel: a line for each key of `labels` that was logged."""
    for key, label in labels.items():
        logged = points(lines, key)
        if logged:
            marker = "o" if len(logged) <= 15 else None
            ax.plot(*zip(*logged), label=label, marker=marker, markersize=3.5)
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, 0), max(high, top))
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if ax.lines and any(labels.values()):
        ax.legend(fontsize=8)
