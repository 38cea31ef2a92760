"""What a run did, in pictures: curves.png (logged quantities over the steps), trajectories.html (groups, turn by turn).

The page has no script and needs no network: `<details>` folds, CSS does the rest, a content security policy forbids all
else. A model or a stranger's web page wrote every text in it: all pass through `show`, which cuts, defuses and escapes.

Run: `python view.py runs/NAME`. Tests: `pytest tests/test_view.py`.
"""
import argparse
import html
import io
import math
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from config import UserError
from plumbing.files import read_lines, write_whole

MAX_BYTES = 2_900_000     # of a page: a phone opens it at once


class Detail(NamedTuple):
    """How much a page tells: characters of a text that the model wrote, of one it was given; entries of a list; and how
    many attempts of a group are told beside the two that start unfolded (of the others, only the outcome)."""
    written: int
    given: int
    entries: int
    attempts: int


DETAILS = [Detail(8000, 4000, 60, 62), Detail(6000, 1500, 40, 14), Detail(4000, 600, 30, 6), Detail(3000, 300, 24, 2),
           Detail(2000, 150, 16, 0), Detail(300, 100, 8, 0), Detail(60, 60, 4, 0)]    # tried until a page fits


# ------------------------------------------------------------------------------------------------ reading and writing
def number(value) -> float:
    """A JSON value as a float; nan for anything that is not a number one could draw."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e15 else math.nan


def size(record: dict, key: str) -> float:
    """A count that must be drawn; 0 where it is missing or makes no sense."""
    value = number(record.get(key))
    return value if value > 0 else 0.0


def entries(record: dict, key: str) -> list[dict]:
    """The dicts of the list under `key`; [] when the record is older or damaged and has none."""
    value = record.get(key)
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def samples(record: dict) -> list[dict]:
    """All System 1 samples of a trajectory."""
    return [chunk for turn in entries(record, "turns") for chunk in entries(turn, "chunks")]


# ------------------------------------------------------------------------------------------------ curves.png
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#777777"     # of Okabe and Ito: colour-blind readers tell them apart
PANELS = [   # title, {metrics key: (label, colour, line style)}
    ("Reward in training", {"reward": ("each step", BLUE, "-")}),
    ("Held-out accuracy", {"eval_accuracy": ("temperature 1", BLUE, "-"), "eval_greedy": ("greedy", ORANGE, "--")}),
    ("Tool calls per trajectory", {"calls_per_question": ("", BLUE, "-")}),
    ("Tokens per sample", {"sys2_length": ("System 2", BLUE, "-"), "sys1_length": ("System 1", ORANGE, "--")}),
    ("Entropy, nats per token", {"sys2_entropy": ("System 2", BLUE, "-"), "sys1_entropy": ("System 1", ORANGE, "--")}),
    ("Sampler–trainer mismatch, KL", {"mismatch_kl": ("", BLUE, "-")}),
    ("Share of clipped tokens", {"clip_share": ("", BLUE, "-")}),
    ("Warning signs, shares", {"zero_variance_share": ("zero variance", GREY, "-"),
                               "malformed_share": ("malformed", ORANGE, "--"),
                               "tool_error_share": ("tool failed", BLUE, ":")}),
    ("Seconds per step", {"seconds_rollout": ("rollout", BLUE, ""), "seconds_train": ("train", ORANGE, ""),
                          "seconds_eval": ("evaluate", GREY, "")})]


def curves(run: Path) -> Path:
    """Draws RUN/metrics.jsonl into RUN/curves.png. A key that was never logged leaves a panel that says so.

    Raises UserError when there is nothing to draw or no place to write.
    """
    path = Path(run) / "metrics.jsonl"
    lines = read_lines(path) if path.exists() else []
    rows = {line["step"]: line for line in lines if math.isfinite(number(line.get("step")))}   # a resumed run repeats
    if not rows:
        raise UserError(f"{path} holds no finished step: give the folder of a run that has trained at least one")
    steps = np.array(sorted(rows), dtype=float)
    figure = Figure(figsize=(10, 8), dpi=150, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.08)
    name = show(Path(run).resolve().name, 60, escape=False).replace("$", r"\$")
    figure.suptitle(f"Run {name}: {count(len(steps), 'step')}", fontsize=12)
    for ax, (title, series) in zip(figure.subplots(3, 3).flat, PANELS):
        values = {key: np.array([number(rows[step].get(key)) for step in steps]) for key in series}
        ax.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=20)
        draw_panel(ax, series, steps, {key: y for key, y in values.items() if np.isfinite(y).any()})
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return write_whole(Path(run) / "curves.png", picture.getvalue())


def draw_panel(ax, series: dict, steps: np.ndarray, values: dict[str, np.ndarray]) -> None:
    """One small multiple: lines over the steps, or seconds stacked. Each value is [steps], nan where unlogged."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=9)
    if not values:
        ax.text(0.5, 0.5, "not logged", transform=ax.transAxes, ha="center", va="center", color=GREY)
        ax.set(xticks=[], yticks=[])
        return
    base = np.zeros(len(steps))
    for key, y in values.items():
        (label, colour, style), drawn = series[key], np.isfinite(y)
        if key.startswith("seconds"):
            top = base + np.where(drawn, y, 0)
            ax.stairs(top, np.append(steps, steps[-1] + 1) - 0.5, baseline=base, fill=True, color=colour, label=label)
            base = top
            continue
        smooth, window = key == "reward" and drawn.sum() >= 10, max(5, drawn.sum() // 15)
        ax.plot(steps[drawn], y[drawn], style, color=colour, label=label, lw=1 if smooth else 1.7,
                alpha=0.4 if smooth else 1, marker="o" if drawn.sum() <= 15 else None, markersize=3.5)
        if smooth:
            mean = np.convolve(y[drawn], np.ones(window) / window, "valid")
            ax.plot(steps[drawn][window - 1:], mean, color=colour, lw=2, label=f"mean of last {window}")
    low, high = min(0, *map(np.nanmin, values.values())), max(base.max(), *map(np.nanmax, values.values()), 0)
    if low == high == 0:
        ax.text(0.5, 0.5, "0 at every step", transform=ax.transAxes, ha="center", va="center", color=GREY)
    span = 1 if high <= 1 and {"reward", "eval_accuracy", "malformed_share"} & set(values) else (high - low) or 1
    ax.set_ylim(low - 0.02 * span, low + 1.05 * span)
    ax.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5))
    ax.grid(axis="y", alpha=0.25)
    ax.set_xlabel("step", fontsize=9)
    if any(series[key][0] for key in values):     # above the data, never on it
        ax.legend(loc="lower left", bbox_to_anchor=(-0.03, 1.0), ncol=3, frameon=False, fontsize=8.5, borderaxespad=0,
                  handlelength=1.4, columnspacing=0.9, handletextpad=0.4)


# ------------------------------------------------------------------------------------------------ trajectories.html
HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
                    r"\ufffe\uffff\ud800-\udfff]")    # control, invisible, direction-turning; lone surrogates


def show(text, limit: int = 300, *, escape: bool = True) -> str:
    """Foreign text made safe to print: cut at `limit` characters with a note, hidden marks spelt out, HTML escaped."""
    text = "" if text is None else str(text)
    kept = HIDDEN.sub(lambda m: "" if m[0] == "\r" else f"⟦U+{ord(m[0]):04X}⟧", text[:limit])
    if len(text) > limit:
        kept += "…" if limit <= 60 else f" …[{len(text) - limit:,} more characters cut]"
    return html.escape(kept) if escape else kept


def count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def push(advantage, learns: bool = True) -> str:
    """CSS classes of sampled text: sign and strength of its push on the model ('flat': none)."""
    a = number(advantage)
    if not learns or not abs(a) > 1e-6:
        return "flat"
    return f"{'up' if a > 0 else 'down'} w{min(3, 1 + int(abs(a)))}"


def badge(advantage, learns: bool = True) -> str:
    """The advantage as a sign and a number, so that nothing hangs on colour alone."""
    a, kind = number(advantage), push(advantage, learns)
    if not learns and not abs(a) > 1e-6:
        return ""
    value = f"{a:+.2f}".replace("-", "−") if abs(a) > 1e-6 else "0" if a == a else "none"
    return f'<b class="badge {kind}">{dict(u="▲", d="▼", f="●")[kind[0]]} {value}</b>'


def mark(reward) -> str:
    r = number(reward)
    return "–" if r != r else "✓" if r >= 1 else "✗" if r <= 0 else "◐"


def first(things: list, limit: int, noun: str) -> tuple[list, str]:
    """At most `limit` of a list, and a sentence about what was left out."""
    left = len(things) - limit
    return things[:limit], f'<p class="dim">…and {count(left, f"more {noun}")} not shown</p>' if left > 0 else ""


def fold(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>{body}</details>"


def given(text, label: str, limit: int, *, folded: bool = False) -> str:
    """Text that the model read but did not write; folded when long, or when told so."""
    body, length = f'<pre class="given">{show(text, limit)}</pre>', len(str(text or ""))
    if folded or length > 280:
        return fold(f"{label} ({length:,} characters)", body)
    return f'<p class="dim">{label}</p>{body}'


def bar(chunk: dict, documents: list[dict]) -> str:
    """A chunk as a picture: its documents as blocks in proportion to their tokens, the free room hatched."""
    held = chunk.get("documents") if isinstance(chunk.get("documents"), list) else []
    held = [i for i in held if isinstance(i, int) and 0 <= i < len(documents)]
    used, capacity, cut = size(chunk, "tokens"), size(chunk, "capacity"), bool(chunk.get("truncated"))
    sizes = [used] if cut else [size(documents[i], "tokens") for i in held]
    whole = max(1.0, capacity, sum(sizes))
    blocks = "".join(f'<i style="width:{100 * n / whole:.2f}%">{i + 1}</i>' for i, n in zip(held, sizes))
    names = " + ".join(f"<b>{i + 1}</b> <bdi>{show(documents[i].get('title'), 40)}</bdi> "
                       f"({size(documents[i], 'tokens'):,.0f})" for i in held)
    return (f'<div class="bar" aria-hidden="true">{blocks}</div><p class="dim">{names or "documents unknown"}'
            f'{", ✂ cut to fit" * cut}: {used:,.0f} of {capacity:,.0f} tokens</p>')


def distillation(chunk: dict, index: int, documents: list[dict], learns: bool, detail: Detail) -> str:
    """A chunk's bar, what System 1 made of it, and whether balancing let that into the training batch."""
    drawn = size(chunk, "drawn")
    fate = "" if not learns else f"drawn {drawn:.0f}×" if drawn else "not drawn"
    advantage, learns = chunk.get("advantage"), learns and drawn > 0
    return (f'<div class="note"><p class="who"><span>System 1 · chunk {index + 1}</span> '
            f'{badge(advantage, learns)} <span class="dim">{fate}</span></p>{bar(chunk, documents)}'
            f'<pre class="{push(advantage, learns)}">{show(chunk.get("note"), detail.written) or "(empty note)"}</pre>'
            f'{given(chunk.get("prompt"), "all it was given", detail.given, folded=True)}</div>')


def tool_use(turn: dict, learns: bool, detail: Detail) -> str:
    """The call of a turn, the raw documents (folded), and each chunk with its note."""
    call, documents, chunks = turn.get("call"), entries(turn, "documents"), entries(turn, "chunks")
    error = f'<p class="error">⚠ {show(turn.get("error"), detail.written)}</p>' if turn.get("error") else ""
    if not isinstance(call, dict):
        return error
    out = (f'<dl><dt>calls</dt><dd><b>{show(call.get("tool"), 40)}</b> '
           f'<code>{show(call.get("argument"), detail.written)}</code></dd>'
           f'<dt>purpose</dt><dd>{show(call.get("purpose"), detail.written) or "(none)"}</dd></dl>{error}')
    if not documents:
        return out if error else out + '<p class="dim">The tool ran and found nothing.</p>'
    shown, left = first(documents, detail.entries, "document")
    raw = "".join(f'<li><b>{show(d.get("title")) or "(no title)"}</b> <span class="dim">'
                  f'{size(d, "tokens"):,.0f} tokens · <bdi>{show(d.get("id"))}</bdi> · '
                  f'<bdi>{show(d.get("url"))}</bdi></span>'
                  f'<pre class="given">{show(d.get("text"), detail.given)}</pre></li>' for d in shown)
    seconds = f'{size(turn, "seconds_tool"):.2g} s'
    out += fold(f'{count(len(documents), "raw document")} in {seconds}', f"<ol>{raw}</ol>{left}")
    shown, left = first(chunks, detail.entries, "chunk")
    out += f'<p class="dim">packed into {count(len(chunks), "chunk")} for System 1</p>' if chunks else ""
    return out + "".join(distillation(c, i, documents, learns, detail) for i, c in enumerate(shown)) + left


def story(record: dict, detail: Detail) -> str:
    """System 2's context in order: what it was given, what it wrote, and what its calls brought about."""
    turns, segments, learns = entries(record, "turns"), entries(record, "segments"), bool(record.get("trained"))
    sampled = [{"trained": True, "text": turn.get("text")} for turn in turns]
    matched = sum(bool(segment.get("trained")) for segment in segments) == len(turns)
    parts, done, advantage = [], 0, record.get("advantage")
    for segment in segments if matched else sampled + segments:
        if segment.get("trained") and done < min(detail.entries, len(turns)):
            text = show(segment.get("text"), detail.written) or "(nothing)"
            parts += [f'<p class="who"><span>System 2 · turn {done + 1}</span> {badge(advantage, learns)}</p>'
                      f'<pre class="{push(advantage, learns)}">{text}</pre>',
                      tool_use(turns[done], learns, detail)]
            done += 1
        elif not segment.get("trained") and done < detail.entries:
            parts += [given(segment.get("text"), "System 2 reads" if done else "System 2 starts from", detail.written)]
    return "".join(parts) + first(turns, detail.entries, "turn")[1]


def card(record: dict, detail: Detail | None, opened: bool) -> str:
    """One trajectory, foldable; without a detail its head alone, which is enough to compare it with the others."""
    turns, learns = entries(record, "turns"), bool(record.get("trained"))
    tools = Counter(show(turn["call"].get("tool"), 20) for turn in turns if isinstance(turn.get("call"), dict))
    facts = [count(len(turns), "turn"), " + ".join(f"{tool} ×{n}" for tool, n in tools.items()) or "no tool"]
    facts += [] if record.get("ended") in (None, "answer") else [f'ended: {show(record.get("ended"), 120)}']
    facts += [] if learns else ["not trained on"]
    reward = number(record.get("reward"))
    answer = "no answer" if record.get("answer") is None else f'answer <b>{show(record.get("answer"), 200)}</b>'
    name = "" if record.get("trajectory") is None else f'<b>#{show(record.get("trajectory"), 12)}</b> '
    body = story(record, detail) if detail else '<p class="dim">left out, to keep this page small</p>'
    grade = f'<b class="grade">{mark(reward)} {f"reward {reward:g}" if reward == reward else "not graded"}</b>'
    return (f'<details class="card"{" open" * opened}><summary>{name}{grade} '
            f'{badge(record.get("advantage"), learns)} <span class="answer">{answer}</span>'
            f'<span class="dim">{" · ".join(facts)}</span></summary>{body}</details>')


def group_facts(records: list[dict], rewards: list[float]) -> str:
    """One line about a group: the right answer, the mean reward, how many System 1 samples and what balancing did."""
    gold, graded = records[0].get("gold"), [r for r in rewards if r == r]
    chunks = [chunk for record in records for chunk in samples(record)]
    gold = " | ".join(map(str, gold)) if isinstance(gold, list) else ""
    facts = [f"right answer: <bdi>{show(gold, 200)}</bdi>"] if gold else []
    facts += [f"mean reward {sum(graded) / len(graded):.2f}"] if graded else []
    facts += [count(len(chunks), "System 1 sample")]
    if chunks and any(record.get("trained") for record in records):
        facts[-1] += f', {sum(size(chunk, "drawn") for chunk in chunks):.0f} drawn for training'
    facts += ["all alike, nothing to learn"] if len(graded) > 1 and len(set(graded)) == 1 else []
    return " · ".join(facts)


def group(records: list[dict], detail: Detail, opened: bool) -> str:
    """All trajectories of one question: the best and the worst opened side by side, the others folded below."""
    rewards = [number(record.get("reward")) for record in records]
    drawn = [sum(size(chunk, "drawn") for chunk in samples(record)) for record in records]
    order = sorted(range(len(records)), key=lambda i: (-np.nan_to_num(rewards[i], nan=-1), -drawn[i]))
    worst = next(i for i in order if i == order[-1] or rewards[i] == rewards[order[-1]] and i != order[0])
    pair = list(dict.fromkeys([order[0], worst]))
    rest, left = first([i for i in range(len(records)) if i not in pair], 62, "attempt")
    marks = "".join(map(mark, rewards)) if any(r == r for r in rewards) else ""
    swipe = '<p class="dim swipe">swipe sideways to compare →</p>' if len(pair) > 1 else ""
    others = "".join(card(records[i], detail if n < detail.attempts else None, False) for n, i in enumerate(rest))
    return (f'<details class="group"{" open" * opened}><summary>'
            f'<span class="question">{show(records[0].get("question"), 600) or "(no question recorded)"}</span>'
            f'<span class="marks" title="one mark an attempt">{marks}</span>'
            f'<span class="dim">{group_facts(records, rewards)}</span></summary>{swipe}'
            f'<div class="pair">{"".join(card(records[i], detail, True) for i in pair)}</div>'
            f'{f"""<div class="rest">{others}</div>""" if others else ""}{left}</details>')


def choose(run: Path, steps: list[int] | None, questions: int) -> list[tuple[str, list[list[dict]]]]:
    """(heading, groups) of each step: training before held-out, mixed rewards first, then the most System 1 samples."""
    files = {int(path.stem[5:]): path for path in (run / "rollouts").glob("step_*.jsonl") if path.stem[5:].isdecimal()}
    known = sorted(files)
    if not known:
        raise UserError(f"{run} has no rollouts/step_N.jsonl: give the folder of a run that has trained a step")
    if missing := sorted(set(steps or ()) - set(known)):
        raise UserError(f"{run} recorded no step {missing[0]}: choose from {known[0]} to {known[-1]}")

    def dullness(group: list[dict]) -> tuple:
        rewards = {r for record in group if (r := number(record.get("reward"))) == r}
        return group[0].get("split") != "train", len(rewards) < 2, -sum(len(samples(record)) for record in group)
    chosen = []
    for step in dict.fromkeys(steps or (known[0], known[len(known) // 2], known[-1])):
        groups: dict = {}
        for record in read_lines(files[step]):   # keyed: of a repeated trajectory (a resumed run) the later counts
            key = str(record.get("split")), str(record.get("question_id"))
            groups.setdefault(key, {})[str(record.get("trajectory"))] = record
        best = sorted((list(group.values()) for group in groups.values()), key=dullness)[:questions]
        held_out = ", held-out questions" if best and best[0][0].get("split") == "eval" else ""
        chosen += [(f"Step {step}{held_out}", best)] if best else []
    if not chosen:
        raise UserError(f"{run}/rollouts holds no whole trajectory yet: wait until the first step has ended")
    return chosen


def page(run: Path, *, steps: list[int] | None = None, questions: int = 3) -> Path:
    """Writes RUN/trajectories.html: `questions` groups of each of `steps` (default: first, middle, last recorded).

    Raises UserError when there is nothing to show or no place to write.
    """
    title = f"Trajectories of run {show(Path(run).resolve().name, 60, escape=False)}"
    return write_whole(Path(run) / "trajectories.html", render(title, choose(Path(run), steps, questions)))


def trajectory_page(records: list[dict], path: Path) -> Path:
    """Writes the same page for records at hand (`mars.py ask`); what they lack is left out. Raises UserError."""
    groups: dict = {}
    for record in records:
        groups.setdefault(str(record.get("question_id")), []).append(record)
    title = "One trajectory" if len(records) == 1 else "Trajectories"
    return write_whole(Path(path), render(title, [("", list(groups.values()))]))


def render(title: str, sections: list[tuple[str, list[list[dict]]]]) -> bytes:
    """The whole page; less of every text until it fits MAX_BYTES, at last fewer questions."""
    for detail in DETAILS:
        parts, left = fill(sections, detail)
        if not left:
            break
    parts += [f'<p class="dim">{count(left, "question")} left out, to keep this page small.</p>'] if left else []
    return PAGE.format(title=html.escape(title), style=STYLE, body="".join(parts)).encode()


def fill(sections: list[tuple[str, list[list[dict]]]], detail: Detail) -> tuple[list[str], int]:
    """The groups up to the first that finds no room, and how many were left out. The very first starts unfolded."""
    parts, taken, room = [], 0, MAX_BYTES - 20_000
    for heading, groups in sections:
        parts += [f"<h2>{html.escape(heading)}</h2>"] if heading else []
        for records in groups:
            part = group(records, detail, opened=taken == 0)
            room -= len(part.encode())
            if room < 0:
                return parts, sum(len(groups) for _, groups in sections) - taken
            parts, taken = [*parts, part], taken + 1
    return parts, 0


STYLE = """
:root{--bg:#fff;--ink:#1b1f24;--dim:#5a636e;--line:#d5dae0;--soft:#f4f6f8;
--up:#00795a;--down:#b84a00;--doc:#3b6ea5;--docink:#fff}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--ink:#e4e8ec;--dim:#9aa5b1;--line:#363d46;--soft:#1d2228;
--up:#3ccf9f;--down:#ff9a57;--doc:#7fb0e6;--docink:#10151b}}
*{box-sizing:border-box}html{-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:1rem;max-width:88rem;background:var(--bg);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:.2em 0}h2{font-size:1.1rem;margin:1.6em 0 .5em}p{margin:.4em 0}
b,bdi,dd,.question,.answer{unicode-bidi:isolate}
pre,code{font:.84rem/1.5 ui-monospace,"DejaVu Sans Mono",monospace;white-space:pre-wrap;margin:.3em 0;
unicode-bidi:plaintext}pre{padding:.4em .6em;border-radius:4px;max-height:28em;overflow:auto}
summary{cursor:pointer;color:var(--dim);font-size:.85rem}summary:focus-visible{outline:2px solid var(--doc)}
.dim,dt{color:var(--dim);font-size:.85rem}.error{color:var(--down);font-weight:600}
.given{color:var(--dim);background:var(--soft)}
pre.flat{border-left:4px dotted var(--dim)}pre.up{border-left:4px solid var(--up)}
pre.down{border-left:4px dashed var(--down)}
.up.w1{background:rgb(0 158 115/.10)}.up.w2{background:rgb(0 158 115/.20)}.up.w3{background:rgb(0 158 115/.32)}
.down.w1{background:rgb(213 94 0/.10)}.down.w2{background:rgb(213 94 0/.20)}.down.w3{background:rgb(213 94 0/.32)}
.badge,.grade{font-size:.85rem;white-space:nowrap;padding:.05em .45em;border-radius:4px}
.grade{border:1px solid var(--line)}
.badge.up{color:var(--up)}.badge.down{color:var(--down)}.badge.flat{color:var(--dim)}
.group,.legend{border:1px solid var(--line);border-radius:8px;padding:.6rem .8rem;margin:.6rem 0}
.group>summary,.card>summary,.legend>summary{color:inherit;font-size:1rem}
.question{font-weight:600;margin-right:.8em}.marks{letter-spacing:.1em;white-space:nowrap;margin-right:.8em}
.group>summary>.dim,.card>summary>.dim,.answer{display:block}
.pair,.rest{display:grid;gap:.8rem;align-items:start;margin-top:.7rem;
grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr))}
.rest{grid-template-columns:repeat(auto-fill,minmax(min(100%,24rem),1fr))}
.card{border:1px solid var(--line);border-radius:8px;padding:.6rem .8rem;min-width:0}
.card[open]>summary{border-bottom:1px solid var(--line);padding-bottom:.5em;margin-bottom:.5em}
.who{margin-top:1em;font-size:.9rem}.who>span:first-child{font-weight:600}
.note{margin:.6rem 0 .6rem .6rem;padding:.1rem .7rem .4rem;border:1px solid var(--line);border-radius:6px}
.note .who{margin-top:.3em}
dl{display:grid;grid-template-columns:auto 1fr;gap:.1em .8em;margin:.5em 0}dd{margin:0}
ol{padding-left:1.6em}li{margin:.5em 0}
.bar{display:flex;height:1.35em;border:1px solid var(--doc);border-radius:4px;overflow:hidden;
background:repeating-linear-gradient(135deg,transparent 0 5px,var(--line) 5px 6px)}
.bar i{flex:none;overflow:hidden;min-width:2px;background:var(--doc);color:var(--docink);
font:600 .75rem/1.6 system-ui,sans-serif;text-align:center;border-right:2px solid var(--bg)}
.swipe{display:none}
@media(max-width:40rem){body{padding:.6rem}.swipe{display:block}.group{padding:.5rem}
.pair{display:flex;overflow-x:auto;scroll-snap-type:x mandatory}.pair .card{flex:none;width:92%;scroll-snap-align:start}
.pair .card:only-child{width:100%}}
"""

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">
<title>{title}</title><style>{style}</style></head><body><h1>{title}</h1>
<details class="legend" open><summary>How to read this page</summary>
<p>One language model plays two roles. <b>System 2</b> answers a question over several turns: it may call a tool, and
says for what <i>purpose</i>. The <i>raw documents</i> that come back would flood it. So they are <i>packed</i> into as
few chunks as fit (first-fit decreasing), and <b>System 1</b>, the same model with no memory, reads each chunk with the
purpose and writes a short note. Only the notes go back to System 2.</p>
<p>Several attempts at the same question are a <i>group</i>. Each earns a reward: 1 if its answer is right, 0 if wrong.
The <i>advantage</i> says how far that lies above or below the group's average; training makes the text of better
attempts likelier. System 1's notes share the reward of their attempt, but are compared among themselves. As they
outnumber System 2's samples, <i>balancing</i> draws just as many at random (some twice, if there are too few); the
others are left out.</p>
<pre class="up w2">▲ +1.29  solid edge: written by the model, made likelier (deeper tint: stronger push)</pre>
<pre class="down w1">▼ −0.77  dashed edge: written by the model, made less likely</pre>
<pre class="flat">●  dotted edge: written by the model, no push (rewards alike, not drawn, or not in training)</pre>
<pre class="given">no edge: given to the model to read, never trained on</pre>
<div class="bar" aria-hidden="true"><i style="width:42%">1</i><i style="width:30%">3</i></div>
<p class="dim">a chunk: documents 1 and 3 side by side, the hatched part is room that stayed free</p></details>
{body}</body></html>
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw curves.png and trajectories.html of a run.")
    parser.add_argument("run", type=Path, help="a run's folder, such as runs/toy")
    parser.add_argument("--steps", type=int, nargs="+", help="steps on the page (default: first, middle, last)")
    parser.add_argument("--questions", type=int, default=3, help="questions a step (default 3)")
    args = parser.parse_args()
    try:
        if not args.run.is_dir():
            raise UserError(f"{args.run} is no folder: give a run's folder, such as runs/toy")
        if args.questions < 1:
            raise UserError("--questions must be at least 1")
        print(curves(args.run))
        print(page(args.run, steps=args.steps, questions=args.questions))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
