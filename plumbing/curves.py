"""curves.png and diagnostics.png: what a run logged, over its steps.

The first has the two panels that everybody looks at, held-out accuracy and reward. The second has
all others. A quantity that was never logged leaves a panel that says so.

Whoever needs it imports it when a picture is drawn: matplotlib is slow to load.
Tests: pytest tests/test_view.py
"""

import io
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from config import UserError
from plumbing.folders import read_lines, write_whole
from plumbing.pages import count, roles_of, shorten

# What tells lines apart: colours of Okabe and Ito, which colour-blind readers distinguish.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#777777", "#cc79a7")
STYLES = [*zip(COLOURS, ("-", "--", ":", "-.", "-"))]
matplotlib.rcParams["text.parse_math"] = False  # a "$" in a name is no formula


@dataclass(frozen=True)
class Panel:
    """One small multiple. A `share` has the whole range from 0 to 1; `stacked` lines add up."""

    title: str
    lines: dict[str, str]  # key in metrics.jsonl -> label (may be empty)
    share: bool = False
    stacked: bool = False


HEADLINE = [
    Panel(
        "Held-out accuracy",
        {"eval_accuracy": "temperature 1", "eval_greedy": "greedy"},
        share=True,
    ),
    Panel("Reward in training", {"reward": "each step"}, share=True),
]
WARNINGS = {
    "zero_variance_share": "zero variance",
    "malformed_share": "malformed",
    "tool_error_share": "tool failed",
    "unaided_share": "no call",
    "repeated_share": "repeated",
}
SECONDS = {"seconds_rollout": "rollout", "seconds_train": "train", "seconds_eval": "evaluate"}


def diagnostics(roles: dict[str, str]) -> list[Panel]:
    """The other panels. `roles`: a method's roles and what each is called."""

    def by_role(quantity: str) -> dict[str, str]:
        return {f"{role}_{quantity}": name for role, name in roles.items()}

    return [
        Panel("Tool calls per trajectory", {"calls_per_question": ""}),
        Panel("Tokens per sample", by_role("length")),
        Panel("Entropy, nats per token", by_role("entropy")),
        Panel("Log-prob per token, right attempts", by_role("logprob_right")),
        Panel("Log-prob per token, wrong attempts", by_role("logprob_wrong")),
        Panel("Sampler–trainer mismatch, KL", {"mismatch_kl": ""}),
        Panel("Share of clipped tokens", {"clip_share": ""}),
        Panel("Warning signs, shares", WARNINGS, share=True),
        Panel("Seconds per step", SECONDS, stacked=True),
    ]


def of_run(run: Path) -> Path:
    """Draws RUN/metrics.jsonl into RUN/curves.png and RUN/diagnostics.png; returns the first.

    UserError when there is nothing to draw.
    """
    rows = {line["step"]: line for line in read_lines(run / "metrics.jsonl")}
    if not rows:
        raise UserError(f"{run} holds no finished step: name a run that has trained at least one")
    title = f"Run {shorten(run.resolve().name, 60)}: {count(len(rows), 'step')}"
    others = draw(title, rows, diagnostics(roles_of(run)), columns=3)
    write_whole(run / "diagnostics.png", others)
    return write_whole(run / "curves.png", draw(title, rows, HEADLINE, columns=2))


def draw(title: str, rows: dict[float, dict], panels: list[Panel], columns: int) -> bytes:
    """A PNG of some panels. `rows`: step -> the step's metrics."""
    steps = sorted(rows)
    height = math.ceil(len(panels) / columns)
    size = (4.2 * columns, 0.6 + 2.7 * height)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.08)
    figure.suptitle(title, fontsize=12)
    grid = figure.subplots(height, columns, squeeze=False).flat
    for ax in grid[len(panels) :]:
        ax.set_axis_off()
    for ax, panel in zip(grid, panels, strict=False):
        values = {}
        for key in panel.lines:
            column = np.array([rows[step].get(key) for step in steps], dtype=float)
            if np.isfinite(column).any():
                values[key] = column
        ax.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", pad=20)
        draw_panel(ax, panel, np.array(steps, dtype=float), values)
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()


def draw_panel(ax: Axes, panel: Panel, steps: np.ndarray, values: dict[str, np.ndarray]) -> None:
    """One small multiple. `values`: key -> [steps], nan where a step did not log it."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=9)
    if not values:
        say(ax, "not logged")
        ax.set(xticks=[], yticks=[])
        return
    looks = dict(zip(panel.lines, itertools.cycle(STYLES)))
    if panel.stacked:
        lowest = 0.0
        top = np.zeros(len(steps))
        for key, y in values.items():
            height = np.nan_to_num(y)
            ax.bar(steps, height, 1.0, bottom=top, color=looks[key][0], label=panel.lines[key])
            top = top + height
        highest = float(top.max())
    else:
        for key, y in values.items():
            draw_line(ax, steps, y, panel.lines[key], *looks[key], smooth=key == "reward")
        lowest = min(0.0, *(np.nanmin(y) for y in values.values()))
        highest = max(0.0, *(np.nanmax(y) for y in values.values()))
    if lowest == highest == 0:
        say(ax, "0 at every step")
    span = (highest - lowest) or 1.0
    if panel.share and highest <= 1:
        span = 1.0
    ax.set_ylim(lowest - 0.02 * span, lowest + 1.05 * span)
    ax.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5))
    ax.grid(axis="y", alpha=0.25)
    ax.set_xlabel("step", fontsize=9)
    if any(panel.lines.values()):
        # It stands above the data, never on it.
        ax.legend(
            loc="lower left",
            bbox_to_anchor=(-0.03, 1.0),
            ncol=4,
            frameon=False,
            fontsize=8.5,
            borderaxespad=0,
            handlelength=1.4,
            columnspacing=0.9,
            handletextpad=0.4,
        )


def say(ax: Axes, words: str) -> None:
    """Words in the middle of a panel."""
    ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", color=COLOURS[3])


def draw_line(ax: Axes, steps, values, label: str, colour: str, style: str, smooth: bool) -> None:
    """A line over the steps that logged it. A noisy one gets a running mean beside it."""
    logged = np.isfinite(values)
    x = steps[logged]
    y = values[logged]
    marker = "o" if len(y) <= 15 else None
    smooth = smooth and len(y) >= 10
    look = {"color": colour, "label": label, "alpha": 0.4 if smooth else 1.0, "clip_on": False}
    ax.plot(x, y, style, lw=1 if smooth else 1.7, marker=marker, markersize=3.5, **look)
    if smooth:
        window = max(5, len(y) // 15)
        mean = np.convolve(y, np.ones(window) / window, "valid")
        ax.plot(x[window - 1 :], mean, color=colour, lw=2, label=f"mean of last {window}")
