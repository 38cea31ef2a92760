"""trajectories.html: what every role read and wrote, attempts at one question side by side.

The page has no script and needs no network: `<details>` folds, CSS (trajectories.css) does the
rest, and a content security policy forbids all else. A model or a stranger's web page wrote every
text in it, so all of them pass through `show`, which cuts, defuses and escapes.

The records are those of rollouts/step_N.jsonl. They may be damaged: what is missing or makes no
sense is left out. A record is a context: it has `turns`, each a tool call with its documents and
with the contexts that read these (`chunks`). A chunk that has turns of its own, such as a worker's
that calls tools too, is drawn like the record itself, one level deeper.

view.py is the door to this file. Tests: pytest tests/test_view.py
"""

import html
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from config import UserError
from plumbing.files import read_lines, write_whole

MAX_BYTES = 2_900_000  # of a page, so that a phone opens it at once
DEEPEST = 3  # contexts within contexts that are drawn


@dataclass(frozen=True)
class Method:
    """A method's name, and what its roles are called. The first role holds a trajectory."""

    name: str = "mars"
    roles: dict[str, str] = field(default_factory=lambda: {"sys2": "System 2", "sys1": "System 1"})


MARS = Method()


@dataclass(frozen=True)
class Detail:
    """How much a page tells."""

    written: int  # characters of a text that the model wrote
    given: int  # characters of a text that it was given
    entries: int  # entries of a list
    attempts: int  # attempts of a group told in full, beside the two that start unfolded


# They are tried in this order until a page fits.
DETAILS = [
    Detail(8000, 4000, 60, 62),
    Detail(6000, 1500, 40, 14),
    Detail(4000, 600, 30, 6),
    Detail(3000, 300, 24, 2),
    Detail(2000, 150, 16, 0),
    Detail(300, 100, 8, 0),
    Detail(60, 60, 4, 0),
]


@dataclass(frozen=True)
class Layout:
    """What every drawing function needs to know beside its record."""

    detail: Detail
    method: Method


# ------------------------------------------------------------------ damaged records


def number(value) -> float:
    """A JSON value as a float; nan for anything that is not a number one could draw."""
    if isinstance(value, (int, float)) and abs(value) < 1e15:
        return float(value)
    return math.nan


def quantity(record: dict, key: str) -> float:
    """A count that must be drawn; 0 where it is missing or makes no sense."""
    value = number(record.get(key))
    return value if value > 0 else 0.0


def entries(record: dict, key: str) -> list[dict]:
    """The dicts of the list under `key`; none when the record is damaged there."""
    value = record.get(key)
    if not isinstance(value, list):
        return []
    return [entry for entry in value if isinstance(entry, dict)]


def chunks_of(record: dict, depth: int = 0) -> list[dict]:
    """All contexts below a trajectory, such as System 1's."""
    found = []
    for turn in entries(record, "turns"):
        for chunk in entries(turn, "chunks"):
            found.append(chunk)
            if depth < DEEPEST:
                found += chunks_of(chunk, depth + 1)
    return found


# ---------------------------------------------------------------------- foreign text

# Characters that a reader does not see, or that change how the others are shown: control
# characters (but tab and line feed), invisible and direction-turning ones, blanks that pass for
# letters, tags and variation selectors that can carry a hidden text, lone surrogates.
# One variation selector behind a character is left alone, for emoji have it. So are the joiners
# U+200C and U+200D, which several scripts need.
HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    r"\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ufeff\uffa0\ufff0-\ufffb"
    r"\ufffe\uffff\U000e0000-\U000e0fff\ud800-\udfff]"
    r"|(?<=[\ufe00-\ufe0f])[\ufe00-\ufe0f]"
)


def plain(text) -> str:
    """Foreign text made safe for a terminal: hidden and control characters are spelt out."""

    def spelt(match: re.Match) -> str:
        if match[0] == "\r":
            return ""
        return f"⟦U+{ord(match[0]):04X}⟧"

    return HIDDEN.sub(spelt, str(text))


def show(text, limit: int = 300) -> str:
    """Foreign text made safe for the page: cut at `limit` characters with a note, and escaped."""
    return html.escape(shorten(text, limit))


def shorten(text, limit: int) -> str:
    """Plain text of at most `limit` characters, and a note where some are missing."""
    if text is None:
        return ""
    text = str(text)
    left = len(text) - limit
    if left <= 0:
        return plain(text)
    if limit <= 60:
        return plain(text[:limit]) + "…"
    return plain(text[:limit]) + f" …[{left:,} more characters cut]"


# -------------------------------------------------------------------- small pieces


def count(n: int, noun: str) -> str:
    """ "1 turn", "2 turns"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def push_class(advantage, learns: bool) -> str:
    """CSS classes of sampled text: sign and strength of its push on the model ("flat": none)."""
    a = number(advantage)
    if not learns or not abs(a) > 1e-6:
        return "flat"
    strength = min(3, 1 + int(abs(a)))
    return f"up w{strength}" if a > 0 else f"down w{strength}"


SIGNS = {"up": "▲", "down": "▼", "flat": "●"}


def badge(advantage, learns: bool) -> str:
    """The advantage as a sign and a number, so that nothing hangs on colour alone."""
    a = number(advantage)
    pushes = abs(a) > 1e-6
    if not learns and not pushes:
        return ""
    value = "0"
    if math.isnan(a):
        value = "none"
    elif pushes:
        value = f"{a:+.2f}".replace("-", "−")
    kind = push_class(advantage, learns)
    return f'<b class="badge {kind}">{SIGNS[kind.split()[0]]} {value}</b>'


def reward_mark(reward) -> str:
    """One character for a reward."""
    r = number(reward)
    if math.isnan(r):
        return "–"
    if r >= 1:
        return "✓"
    return "✗" if r <= 0 else "◐"


def head_of(things: list, limit: int, noun: str) -> tuple[list, str]:
    """At most `limit` of a list, and a sentence about what was left out."""
    left = len(things) - limit
    if left <= 0:
        return things, ""
    return things[:limit], dim(f"…and {count(left, f'more {noun}')} not shown")


def dim(words: str) -> str:
    return f'<p class="dim">{words}</p>'


def fold(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>{body}</details>"


def given_text(text, label: str, limit: int, *, folded: bool = False) -> str:
    """Text that the model read but did not write; folded when long, or when told so."""
    body = f'<pre class="given">{show(text, limit)}</pre>'
    length = len(str(text or ""))
    if folded or length > 280:
        return fold(f"{label} ({length:,} characters)", body)
    return dim(label) + body


def written_text(text, advantage, learns: bool, limit: int, if_empty: str) -> str:
    """Text that the model wrote, tinted by the push on it."""
    body = show(text, limit) or if_empty
    return f'<pre class="{push_class(advantage, learns)}">{body}</pre>'


# ------------------------------------------------------------------------- contexts


def role_name(context: dict, method: Method, depth: int) -> str:
    """What a context's role is called. Records without a role have the method's first two."""
    roles = list(method.roles)
    role = context.get("role")
    if role is None and roles:
        role = roles[min(depth, len(roles) - 1)]
    name = method.roles.get(role, role) if isinstance(role, str) else None
    return show(name or "the model", 40)


def story(context: dict, learns: bool, layout: Layout, depth: int = 0) -> str:
    """A context in order: what it was given, what it wrote, what its calls brought about."""
    turns = entries(context, "turns")
    segments = entries(context, "segments")
    written = sum(bool(segment.get("trained")) for segment in segments)
    if written != len(turns):
        # Without segments that fit, the turns are told first and what was given behind them.
        sampled = [{"trained": True, "text": turn.get("text")} for turn in turns]
        segments = sampled + segments
    name = role_name(context, layout.method, depth)
    advantage = context.get("advantage")
    detail = layout.detail
    parts = []
    done = 0
    for segment in segments:
        text = segment.get("text")
        if not segment.get("trained"):
            if done < detail.entries:
                label = f"{name} reads" if done else f"{name} starts from"
                parts.append(given_text(text, label, detail.written))
        elif done < min(detail.entries, len(turns)):
            title = f"<span>{name} · turn {done + 1}</span> {badge(advantage, learns)}"
            parts.append(f'<p class="who">{title}</p>')
            parts.append(written_text(text, advantage, learns, detail.written, "(nothing)"))
            parts.append(tool_use(turns[done], learns, layout, depth))
            done += 1
    parts.append(head_of(turns, detail.entries, "turn")[1])
    return "".join(parts)


def tool_use(turn: dict, learns: bool, layout: Layout, depth: int) -> str:
    """The call of a turn, the raw documents (folded), and each context that read some of them."""
    detail = layout.detail
    documents = entries(turn, "documents")
    chunks = entries(turn, "chunks")
    call = turn.get("call")
    parts = []
    if isinstance(call, dict):
        tool = show(call.get("tool"), 40)
        argument = show(call.get("argument"), detail.written)
        purpose = show(call.get("purpose"), detail.written) or "(none)"
        parts.append(
            f"<dl><dt>calls</dt><dd><b>{tool}</b> <code>{argument}</code></dd>"
            f"<dt>purpose</dt><dd>{purpose}</dd></dl>"
        )
    if turn.get("error"):
        parts.append(f'<p class="error">⚠ {show(turn.get("error"), detail.written)}</p>')
    elif isinstance(call, dict) and not documents and not chunks:
        parts.append(dim("The tool ran and found nothing."))
    if documents:
        shown, left = head_of(documents, detail.entries, "document")
        listed = "".join(raw_document(document, detail) for document in shown)
        summary = count(len(documents), "raw document")
        seconds = quantity(turn, "seconds_tool")
        if seconds:
            summary += f" in {seconds:.2g} s"
        parts.append(fold(summary, f"<ol>{listed}</ol>{left}"))
    if chunks:
        names = dict.fromkeys(role_name(chunk, layout.method, depth + 1) for chunk in chunks)
        packed = documents and any(quantity(chunk, "capacity") for chunk in chunks)
        what = f"packed into {count(len(chunks), 'chunk')} for" if packed else "goes on with"
        parts.append(dim(f"{what} {', '.join(names)}"))
        shown, left = head_of(chunks, detail.entries, "chunk")
        for index, chunk in enumerate(shown):
            parts.append(inner_context(chunk, index, documents, learns, layout, depth + 1))
        parts.append(left)
    return "".join(parts)


def raw_document(document: dict, detail: Detail) -> str:
    """One document as the tool returned it."""
    title = show(document.get("title")) or "(no title)"
    tokens = f"{quantity(document, 'tokens'):,.0f} tokens"
    places = f"<bdi>{show(document.get('id'))}</bdi> · <bdi>{show(document.get('url'))}</bdi>"
    text = show(document.get("text"), detail.given)
    return (
        f'<li><b>{title}</b> <span class="dim">{tokens} · {places}</span>'
        f'<pre class="given">{text}</pre></li>'
    )


def inner_context(
    chunk: dict, index: int, documents: list[dict], learns: bool, layout: Layout, depth: int
) -> str:
    """A context below the trajectory: what it was given, what it wrote, how often it was drawn."""
    detail = layout.detail
    drawn = quantity(chunk, "drawn")
    fate = ""
    if learns:
        fate = f"drawn {drawn:.0f}×" if drawn else "not drawn"
    learns = learns and drawn > 0
    advantage = chunk.get("advantage")
    name = role_name(chunk, layout.method, depth)
    noun = "chunk" if documents else "context"
    parts = [
        f'<p class="who"><span>{name} · {noun} {index + 1}</span> '
        f'{badge(advantage, learns)} <span class="dim">{fate}</span></p>'
    ]
    if documents:
        parts.append(chunk_bar(chunk, documents))
    told = given_text(chunk.get("prompt"), "all it was given", detail.given, folded=True)
    if entries(chunk, "turns") and depth <= DEEPEST:
        if not entries(chunk, "segments"):
            parts.append(told)
        parts.append(story(chunk, learns, layout, depth))
    else:
        note = chunk.get("note")
        parts.append(written_text(note, advantage, learns, detail.written, "(empty note)"))
        parts.append(told)
    return f'<div class="note">{"".join(parts)}</div>'


def chunk_bar(chunk: dict, documents: list[dict]) -> str:
    """A chunk as a picture: its documents in proportion to their tokens, the free room hatched."""
    held = chunk.get("documents")
    if not isinstance(held, list):
        held = []
    held = [i for i in held if isinstance(i, int) and 0 <= i < len(documents)]
    used = quantity(chunk, "tokens")
    capacity = quantity(chunk, "capacity")
    lengths = [quantity(documents[i], "tokens") for i in held]
    names = [
        f"<b>{i + 1}</b> <bdi>{show(documents[i].get('title'), 40)}</bdi> ({length:,.0f})"
        for i, length in zip(held, lengths, strict=True)
    ]
    words = " + ".join(names) or "documents unknown"
    if chunk.get("truncated"):
        words += ", ✂ cut to fit"
        if held:
            # The document was longer than the chunk, so it fills all that was used.
            held = held[:1]
            lengths = [used]
    whole = max(1.0, capacity, sum(lengths))
    blocks = ""
    for i, length in zip(held, lengths, strict=True):
        blocks += f'<i style="width:{100 * length / whole:.2f}%">{i + 1}</i>'
    room = f"{used:,.0f} of {capacity:,.0f} tokens"
    return f'<div class="bar" aria-hidden="true">{blocks}</div>{dim(f"{words}: {room}")}'


# --------------------------------------------------------------------------- groups


def card(record: dict, layout: Layout, *, opened: bool, told: bool = True) -> str:
    """One trajectory, foldable. Unless `told` it is its head alone, enough to compare it."""
    turns = entries(record, "turns")
    learns = bool(record.get("trained"))
    tools = Counter()
    for turn in turns:
        if isinstance(turn.get("call"), dict):
            tools[show(turn["call"].get("tool"), 20)] += 1
    used = " + ".join(f"{tool} ×{n}" for tool, n in tools.items())
    facts = [count(len(turns), "turn"), used or "no tool"]
    if record.get("ended") not in (None, "answer"):
        facts.append(f"ended: {show(record.get('ended'), 120)}")
    if not learns:
        facts.append("not trained on")

    name = ""
    if record.get("trajectory") is not None:
        name = f"<b>#{show(record.get('trajectory'), 12)}</b> "
    reward = number(record.get("reward"))
    grade = "not graded" if math.isnan(reward) else f"reward {reward:g}"
    answer = "no answer"
    if record.get("answer") is not None:
        answer = f"answer <b>{show(record.get('answer'), 200)}</b>"
    body = dim("left out, to keep this page small")
    if told:
        body = story(record, learns, layout)
    return (
        f'<details class="card"{" open" if opened else ""}><summary>{name}'
        f'<b class="grade">{reward_mark(reward)} {grade}</b> '
        f'{badge(record.get("advantage"), learns)} <span class="answer">{answer}</span>'
        f'<span class="dim">{" · ".join(facts)}</span></summary>{body}</details>'
    )


def group_facts(records: list[dict], method: Method) -> str:
    """One line about a group: right answer, mean reward, samples of the inner roles, the draw."""
    facts = []
    gold = records[0].get("gold")
    if isinstance(gold, list) and gold:
        answers = " | ".join(map(str, gold))
        facts.append(f"right answer: <bdi>{show(answers, 200)}</bdi>")
    rewards = [number(record.get("reward")) for record in records]
    graded = [reward for reward in rewards if not math.isnan(reward)]
    if graded:
        facts.append(f"mean reward {sum(graded) / len(graded):.2f}")
    chunks = [chunk for record in records for chunk in chunks_of(record)]
    samples = Counter(role_name(chunk, method, 1) for chunk in chunks)
    if not samples:
        samples[role_name({}, method, 1)] = 0
    counted = ", ".join(count(n, f"{name} sample") for name, n in samples.items())
    if chunks and any(record.get("trained") for record in records):
        counted += f", {sum(quantity(chunk, 'drawn') for chunk in chunks):.0f} drawn for training"
    facts.append(counted)
    if len(graded) > 1 and len(set(graded)) == 1:
        facts.append("all alike, nothing to learn")
    return " · ".join(facts)


def group(records: list[dict], layout: Layout, *, opened: bool) -> str:
    """All trajectories of one question: the best and the worst stand open side by side."""
    rewards = [number(record.get("reward")) for record in records]

    def rank(i: int) -> tuple:
        """The best reward first, then the most samples in training. Ungraded ones come last."""
        reward = -1.0 if math.isnan(rewards[i]) else rewards[i]
        return -reward, -sum(quantity(chunk, "drawn") for chunk in chunks_of(records[i]))

    order = sorted(range(len(records)), key=rank)
    best = order[0]
    lowest = [i for i in order if i != best and rewards[i] == rewards[order[-1]]]
    worst = lowest[0] if lowest else order[-1]
    pair = list(dict.fromkeys([best, worst]))
    rest, left = head_of([i for i in range(len(records)) if i not in pair], 62, "attempt")

    question = show(records[0].get("question"), 600) or "(no question recorded)"
    marks = ""
    if not all(math.isnan(reward) for reward in rewards):
        marks = "".join(reward_mark(reward) for reward in rewards)
    swipe = ""
    if len(pair) > 1:
        swipe = '<p class="dim swipe">swipe sideways to compare →</p>'
    compared = "".join(card(records[i], layout, opened=True) for i in pair)
    others = ""
    for place, i in enumerate(rest):
        others += card(records[i], layout, opened=False, told=place < layout.detail.attempts)
    if others:
        others = f'<div class="rest">{others}</div>'
    return (
        f'<details class="group"{" open" if opened else ""}><summary>'
        f'<span class="question">{question}</span>'
        f'<span class="marks" title="one mark an attempt">{marks}</span>'
        f'<span class="dim">{group_facts(records, layout.method)}</span></summary>'
        f'{swipe}<div class="pair">{compared}</div>{others}{left}</details>'
    )


# ------------------------------------------------------------------------- the page


def choose(run: Path, steps: list[int] | None, questions: int) -> list[tuple[str, list]]:
    """(heading, groups of records) of each step: by default the first, the middle and the last.

    In a step, training stands before held-out questions, then mixed rewards, then the most
    samples of the inner roles.
    """
    files = {}
    for path in (run / "rollouts").glob("step_*.jsonl"):
        if path.stem[5:].isdecimal():
            files[int(path.stem[5:])] = path
    known = sorted(files)
    if not known:
        raise UserError(
            f"{run} has no rollouts/step_N.jsonl: give the folder of a run that has trained a step"
        )
    missing = sorted(set(steps or ()) - set(known))
    if missing:
        raise UserError(
            f"{run} recorded no step {missing[0]}: choose from {known[0]} to {known[-1]}"
        )
    if not steps:
        steps = [known[0], known[len(known) // 2], known[-1]]

    def dullness(records: list[dict]) -> tuple:
        rewards = {number(record.get("reward")) for record in records}
        graded = [reward for reward in rewards if not math.isnan(reward)]
        samples = sum(len(chunks_of(record)) for record in records)
        return records[0].get("split") != "train", len(graded) < 2, -samples

    chosen = []
    for step in dict.fromkeys(steps):
        groups = sorted(group_records(read_lines(files[step])), key=dullness)[:questions]
        if groups:
            held_out = groups[0][0].get("split") == "eval"
            heading = f"Step {step}, held-out questions" if held_out else f"Step {step}"
            chosen.append((heading, groups))
    if not chosen:
        raise UserError(
            f"{run}/rollouts holds no whole trajectory yet: wait until the first step has ended"
        )
    return chosen


def group_records(records: list[dict]) -> list[list[dict]]:
    """The attempts at each question. Of a repeated one (a resumed run) the later counts."""
    groups: dict = {}
    for record in records:
        key = str(record.get("split")), str(record.get("question_id"))
        groups.setdefault(key, {})[str(record.get("trajectory"))] = record
    return [list(group.values()) for group in groups.values()]


def write(path: Path, title: str, sections: list[tuple[str, list]], method: Method) -> Path:
    """Writes the page of some (heading, groups of records). UserError when it cannot."""
    return write_whole(path, render(title, sections, method))


def render(title: str, sections: list[tuple[str, list]], method: Method = MARS) -> bytes:
    """The whole page. Texts get shorter until it fits MAX_BYTES, then questions are left out."""
    for detail in DETAILS:
        parts, left = fill(sections, Layout(detail, method))
        if left == 0:
            break
    if left:
        parts.append(dim(f"{count(left, 'question')} left out, to keep this page small."))
    style = Path(__file__).with_name("trajectories.css").read_text(encoding="utf-8")
    page = PAGE.format(
        title=html.escape(title), style=style, legend=legend(method), body="".join(parts)
    )
    return page.encode()


def fill(sections: list[tuple[str, list]], layout: Layout) -> tuple[list[str], int]:
    """The groups up to the first that finds no room, and how many questions were left out."""
    parts = []
    taken = 0
    room = MAX_BYTES - 20_000
    questions = sum(len(groups) for _, groups in sections)
    for heading, groups in sections:
        if heading:
            parts.append(f"<h2>{html.escape(heading)}</h2>")
        for records in groups:
            part = group(records, layout, opened=taken == 0)
            room -= len(part.encode())
            if room < 0:
                return parts, questions - taken
            parts.append(part)
            taken += 1
    return parts, 0


def legend(method: Method) -> str:
    """What the reader has to know: the method's story, then the signs."""
    if method.name == "mars":
        return MARS_STORY + GROUP_STORY + BALANCE_STORY + SIGNS_STORY
    roles = [f"<b>{show(name, 40)}</b>" for name in method.roles.values()]
    words = f"One language model plays {count(len(roles), 'role')}: {', '.join(roles)}."
    return f"<p>{words}</p>\n" + GROUP_STORY + SIGNS_STORY


MARS_STORY = """\
<p>One language model plays two roles. <b>System 2</b> answers a question over several turns: it may
call a tool, and says for what <i>purpose</i>. The <i>raw documents</i> that come back would flood
it. So they are <i>packed</i> into as few chunks as fit (first-fit decreasing), and <b>System 1</b>,
the same model with no memory, reads each chunk with the purpose and writes a short note. Only the
notes go back to System 2.</p>
"""

GROUP_STORY = """\
<p>Several attempts at the same question are a <i>group</i>. Each earns a reward: 1 if its answer is
right, 0 if wrong. The <i>advantage</i> says how far that lies above or below the group's average;
training makes the text of better attempts likelier.</p>
"""

BALANCE_STORY = """\
<p>System 1's notes share the reward of their attempt, but are compared among themselves. As they
outnumber System 2's samples, <i>balancing</i> draws just as many at random (some twice, if there
are too few); the others are left out.</p>
"""

SIGNS_STORY = """\
<pre class="up w2">▲ +1.29  solid edge: written by the model, made likelier (more tint: more)</pre>
<pre class="down w1">▼ −0.77  dashed edge: written by the model, made less likely</pre>
<pre class="flat">●  dotted edge: written by the model, no push (rewards alike, or not drawn)</pre>
<pre class="given">no edge: given to the model to read, never trained on</pre>
<div class="bar" aria-hidden="true"><i style="width:42%">1</i><i style="width:30%">3</i></div>
<p class="dim">a chunk: documents 1 and 3 side by side; the hatched part stayed free</p>
"""

PAGE = """\
<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title><style>{style}</style></head><body><h1>{title}</h1>
<details class="legend" open><summary>How to read this page</summary>
{legend}</details>
{body}</body></html>
"""
