"""curves.png and diagnostics.png: what a run logged, over its steps.

The first has the two panels that everybody looks at, held-out accuracy and reward. The second has
all others. A quantity that was never logged leaves a panel that says so.

Whoever needs it imports it when a picture is drawn: matplotlib is slow to load.
Tests: pytest tests/test_view.py
"""

import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from config import UserError
from plumbing.folders import read_lines, write_whole
from plumbing.pages import count, roles_of, shorten

# Colours of Okabe and Ito, which colour-blind readers tell apart.
BLUE = "#0072b2"
ORANGE = "#d55e00"
GREY = "#777777"
GREEN = "#009e73"
# What tells the roles of a method apart, in their order.
ROLE_STYLES = [(BLUE, "-"), (ORANGE, "--"), (GREEN, ":"), (GREY, "-.")]


@dataclass(frozen=True)
class Line:
    """One quantity of a panel: its key in metrics.jsonl, its label (may be empty), its look."""

    key: str
    label: str = ""
    colour: str = BLUE
    style: str = "-"


@dataclass(frozen=True)
class Panel:
    """A title and lines. A `share` has the whole range from 0 to 1; `stacked` lines add up."""

    title: str
    lines: list[Line]
    share: bool = False
    stacked: bool = False


HEADLINE = [
    Panel(
        "Held-out accuracy",
        [Line("eval_accuracy", "temperature 1"), Line("eval_greedy", "greedy", ORANGE, "--")],
        share=True,
    ),
    Panel("Reward in training", [Line("reward", "each step")], share=True),
]


def diagnostics(roles: dict[str, str]) -> list[Panel]:
    """The other panels. `roles`: a method's roles and what each is called."""
    return [
        Panel("Tool calls per trajectory", [Line("calls_per_question")]),
        Panel("Tokens per sample", by_role("length", roles)),
        Panel("Entropy, nats per token", by_role("entropy", roles)),
        Panel("Log-prob per token, right attempts", by_role("logprob_right", roles)),
        Panel("Log-prob per token, wrong attempts", by_role("logprob_wrong", roles)),
        Panel("Sampler–trainer mismatch, KL", [Line("mismatch_kl")]),
        Panel("Share of clipped tokens", [Line("clip_share")]),
        Panel(
            "Warning signs, shares",
            [
                Line("zero_variance_share", "zero variance", GREY),
                Line("malformed_share", "malformed", ORANGE, "--"),
                Line("tool_error_share", "tool failed", BLUE, ":"),
                Line("unaided_share", "no call", GREEN, "-."),
                Line("repeated_share", "repeated", "#cc79a7", "-"),
            ],
            share=True,
        ),
        Panel(
            "Seconds per step",
            [
                Line("seconds_rollout", "rollout", BLUE),
                Line("seconds_train", "train", ORANGE),
                Line("seconds_eval", "evaluate", GREY),
            ],
            stacked=True,
        ),
    ]


def by_role(quantity: str, roles: dict[str, str]) -> list[Line]:
    """A line for each role."""
    lines = []
    for index, (role, name) in enumerate(roles.items()):
        colour, style = ROLE_STYLES[index % len(ROLE_STYLES)]
        lines.append(Line(f"{role}_{quantity}", literal(name), colour, style))
    return lines


def literal(text: str) -> str:
    """Text in which matplotlib sees no formula."""
    return text.replace("$", r"\$")


def of_run(run: Path) -> Path:
    """Draws RUN/metrics.jsonl into RUN/curves.png and RUN/diagnostics.png; returns the first.

    UserError when there is nothing to draw or no place to write. Of a repeated step (a resumed run)
    the later line counts.
    """
    lines = read_lines(run / "metrics.jsonl")
    rows = {line["step"]: line for line in lines if "step" in line}
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
    figure.suptitle(literal(title), fontsize=12)
    grid = figure.subplots(height, columns, squeeze=False).flat
    for ax in grid[len(panels) :]:
        ax.set_axis_off()
    for ax, panel in zip(grid, panels, strict=False):
        values = {}
        for line in panel.lines:
            column = np.array([rows[step].get(line.key) for step in steps], dtype=float)
            if np.isfinite(column).any():
                values[line.key] = column
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
    drawn = [line for line in panel.lines if line.key in values]
    if panel.stacked:
        lowest = 0.0
        highest = draw_stack(ax, drawn, steps, values)
    else:
        for line in drawn:
            draw_line(ax, line, steps, values[line.key])
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
    if any(line.label for line in drawn):
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
    ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", color=GREY)


def draw_line(ax: Axes, line: Line, steps: np.ndarray, values: np.ndarray) -> None:
    """A line over the steps that logged it. The reward is noisy, so it gets a running mean."""
    logged = np.isfinite(values)
    x = steps[logged]
    y = values[logged]
    marker = "o" if len(y) <= 15 else None
    if line.key != "reward" or len(y) < 10:
        ax.plot(
            x,
            y,
            line.style,
            color=line.colour,
            label=line.label,
            lw=1.7,
            marker=marker,
            markersize=3.5,
            clip_on=False,
        )
        return
    ax.plot(x, y, line.style, color=line.colour, label=line.label, lw=1, alpha=0.4)
    window = max(5, len(y) // 15)
    mean = np.convolve(y, np.ones(window) / window, "valid")
    ax.plot(x[window - 1 :], mean, color=line.colour, lw=2, label=f"mean of last {window}")


def draw_stack(
    ax: Axes, lines: list[Line], steps: np.ndarray, values: dict[str, np.ndarray]
) -> float:
    """Bars on top of each other, one a step. Returns the height of the highest."""
    edges = np.append(steps, steps[-1] + 1) - 0.5
    base = np.zeros(len(steps))
    for line in lines:
        top = base + np.nan_to_num(values[line.key], nan=0.0)
        ax.stairs(top, edges, baseline=base, fill=True, color=line.colour, label=line.label)
        base = top
    return float(base.max())
