"""trajectories.html: what every role read and wrote, attempts at one question side by side.

The page has no script and needs no network: `<details>` folds, CSS (pages.css) does the rest, and a
content security policy forbids all else. A model or a stranger's web page wrote every text in it,
so all of them pass through `show`, which cuts, defuses and escapes.

The records are those of rollouts/step_N.jsonl. A record is a context: it has `turns`, each a tool
call with its documents and with the contexts that read these (`chunks`). A chunk that has turns of
its own, such as a worker's that calls tools too, is drawn like the record itself, one level deeper.

Tests: pytest tests/test_view.py
"""

import html
import unicodedata
from collections import Counter
from pathlib import Path

from config import UserError
from plumbing.folders import read_json, read_lines, write_whole

MAX_BYTES = 2_900_000  # of a page, so that a phone opens it at once
WRITTEN = 6000  # characters of a text that the model wrote
GIVEN = 1500  # characters of a text that it was given
ENTRIES = 40  # entries of a list
TOLD = 8  # attempts of a group that are told in full


def of_run(run: Path, *, steps: list[int] | None = None, questions: int = 3) -> Path:
    """Writes RUN/trajectories.html: `questions` groups of each of `steps`.

    The default are the first, the middle and the last step recorded. UserError when there is
    nothing to show or no place to write.
    """
    title = f"Trajectories of run {shorten(run.resolve().name, 60)}"
    return write(run / "trajectories.html", title, choose(run, steps, questions), roles_of(run))


def roles_of(run: Path) -> dict[str, str]:
    """role -> what it is called, of the method that made a run."""
    return read_json(run / "method.json")["roles"]


# -------------------------------------------------------------------------- which records


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
        graded = {record["reward"] for record in records} - {None}
        samples = sum(len(chunks_of(record)) for record in records)
        return records[0]["split"] != "train", len(graded) < 2, -samples

    chosen = []
    for step in dict.fromkeys(steps):
        groups = sorted(group_records(read_lines(files[step])), key=dullness)[:questions]
        if groups:
            held_out = groups[0][0]["split"] == "eval"
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
        key = record["split"], record["question_id"]
        groups.setdefault(key, {})[record["trajectory"]] = record
    return [list(group.values()) for group in groups.values()]


def chunks_of(record: dict) -> list[dict]:
    """All contexts below a trajectory, such as System 1's."""
    found = []
    for turn in record.get("turns", ()):
        for chunk in turn["chunks"]:
            found += [chunk, *chunks_of(chunk)]
    return found


# ---------------------------------------------------------------------- foreign text

# Blanks that pass for letters, and marks that nobody sees.
BLANKS = "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
# Control characters, invisible and direction-turning ones, lone surrogates, code points of nothing.
UNSEEN = {"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"}


def is_hidden(character: str, before: str) -> bool:
    """Whether a reader does not see a character, or it changes how the others are shown.

    Variation selectors can carry a hidden text, but one behind a character is left alone, for emoji
    have it. So are tab, line feed, and the joiners U+200C and U+200D, which several scripts need.
    """
    if character in "\t\n\u200c\u200d":
        return False
    if "\ufe00" <= character <= "\ufe0f":
        return "\ufe00" <= before <= "\ufe0f"
    blank = character in BLANKS or "\U000e0000" <= character <= "\U000e0fff"
    return blank or unicodedata.category(character) in UNSEEN


def plain(text) -> str:
    """Foreign text made safe for a terminal: hidden and control characters are spelt out."""
    spelt = []
    before = ""
    for character in str(text).replace("\r\n", "\n"):
        hidden = is_hidden(character, before)
        spelt.append(f"⟦U+{ord(character):04X}⟧" if hidden else character)
        before = character
    return "".join(spelt)


def shorten(text, limit: int) -> str:
    """Plain text of at most `limit` characters, and a note where some are missing."""
    text = "" if text is None else str(text)
    left = len(text) - limit
    if left <= 0:
        return plain(text)
    if limit <= 60:
        return plain(text[:limit]) + "…"
    return plain(text[:limit]) + f" …[{left:,} more characters cut]"


def show(text, limit: int = 300) -> str:
    """Foreign text made safe for the page: cut at `limit` characters with a note, and escaped."""
    return html.escape(shorten(text, limit))


# -------------------------------------------------------------------- small pieces


def count(n: int, noun: str) -> str:
    """ "1 turn", "2 turns"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def push_class(advantage: float, learns: bool) -> str:
    """CSS classes of sampled text: sign and strength of its push on the model ("flat": none)."""
    if not learns or abs(advantage) <= 1e-6:
        return "flat"
    strength = min(3, 1 + int(abs(advantage)))
    return f"up w{strength}" if advantage > 0 else f"down w{strength}"


SIGNS = {"up": "▲", "down": "▼", "flat": "●"}


def badge(advantage: float, learns: bool) -> str:
    """The advantage as a sign and a number, so that nothing hangs on colour alone."""
    pushes = abs(advantage) > 1e-6
    if not learns and not pushes:
        return ""
    value = f"{advantage:+.2f}".replace("-", "−") if pushes else "0"
    kind = push_class(advantage, learns)
    return f'<b class="badge {kind}">{SIGNS[kind.split()[0]]} {value}</b>'


def reward_mark(reward: float | None) -> str:
    """One character for a reward."""
    if reward is None:
        return "–"
    if reward >= 1:
        return "✓"
    return "✗" if reward <= 0 else "◐"


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


def given_text(text: str, label: str, limit: int, *, folded: bool = False) -> str:
    """Text that the model read but did not write; folded when long, or when told so."""
    body = f'<pre class="given">{show(text, limit)}</pre>'
    if folded or len(text) > 280:
        return fold(f"{label} ({len(text):,} characters)", body)
    return dim(label) + body


def written_text(text: str, advantage: float, learns: bool) -> str:
    """Text that the model wrote, tinted by the push on it."""
    body = show(text, WRITTEN) or "(nothing)"
    return f'<pre class="{push_class(advantage, learns)}">{body}</pre>'


# ------------------------------------------------------------------------- contexts


def role_name(context: dict, roles: dict[str, str]) -> str:
    """What a context's role is called. A trajectory's is the first role."""
    role = context.get("role", next(iter(roles)))
    return show(roles.get(role, role), 40)


def story(context: dict, learns: bool, roles: dict[str, str]) -> str:
    """A context in order: what it was given, what it wrote, what its calls brought about."""
    turns = context["turns"]
    segments = context.get("segments") or [{"trained": True, "text": t["text"]} for t in turns]
    name = role_name(context, roles)
    parts = []
    done = 0
    for segment in segments[: 2 * ENTRIES]:
        if not segment["trained"]:
            label = f"{name} reads" if done else f"{name} starts from"
            parts.append(given_text(segment["text"], label, WRITTEN))
        elif done < len(turns):
            title = f"<span>{name} · turn {done + 1}</span> {badge(context['advantage'], learns)}"
            parts.append(f'<p class="who">{title}</p>')
            parts.append(written_text(segment["text"], context["advantage"], learns))
            parts.append(tool_use(turns[done], learns, roles))
            done += 1
    parts.append(head_of(turns, done, "turn")[1])
    return "".join(parts)


def tool_use(turn: dict, learns: bool, roles: dict[str, str]) -> str:
    """The call of a turn, the raw documents (folded), and each context that read some of them."""
    documents = turn["documents"]
    chunks = turn["chunks"]
    call = turn["call"]
    parts = []
    if call:
        tool = show(call["tool"], 40)
        argument = show(call["argument"], WRITTEN)
        purpose = show(call["purpose"], WRITTEN) or "(none)"
        parts.append(
            f"<dl><dt>calls</dt><dd><b>{tool}</b> <code>{argument}</code></dd>"
            f"<dt>purpose</dt><dd>{purpose}</dd></dl>"
        )
    if turn["error"]:
        parts.append(f'<p class="error">⚠ {show(turn["error"], WRITTEN)}</p>')
    elif call and not documents and not chunks:
        parts.append(dim("The tool ran and found nothing."))
    if documents:
        shown, left = head_of(documents, ENTRIES, "document")
        listed = "".join(raw_document(document) for document in shown)
        summary = f"{count(len(documents), 'raw document')} in {turn['seconds_tool']:.2g} s"
        parts.append(fold(summary, f"<ol>{listed}</ol>{left}"))
    if chunks:
        names = dict.fromkeys(role_name(chunk, roles) for chunk in chunks)
        packed = any("capacity" in chunk for chunk in chunks)
        what = f"packed into {count(len(chunks), 'chunk')} for" if packed else "goes on with"
        parts.append(dim(f"{what} {', '.join(names)}"))
        shown, left = head_of(chunks, ENTRIES, "chunk")
        for index, chunk in enumerate(shown, 1):
            parts.append(inner_context(chunk, index, documents, learns, roles))
        parts.append(left)
    return "".join(parts)


def raw_document(document: dict) -> str:
    """One document as the tool returned it."""
    title = show(document["title"]) or "(no title)"
    where = f"<bdi>{show(document['id'])}</bdi> · <bdi>{show(document['url'])}</bdi>"
    return (
        f'<li><b>{title}</b> <span class="dim">{document["tokens"]:,} tokens · {where}</span>'
        f'<pre class="given">{show(document["text"], GIVEN)}</pre></li>'
    )


def inner_context(
    chunk: dict, index: int, documents: list[dict], learns: bool, roles: dict[str, str]
) -> str:
    """A context below the trajectory: what it was given, what it wrote, how often it was drawn."""
    drawn = chunk["drawn"]
    fate = ""
    if learns:
        fate = f"drawn {drawn}×" if drawn else "not drawn"
    learns = learns and drawn > 0
    noun = "chunk" if "capacity" in chunk else "context"
    parts = [
        f'<p class="who"><span>{role_name(chunk, roles)} · {noun} {index}</span> '
        f'{badge(chunk["advantage"], learns)} <span class="dim">{fate}</span></p>'
    ]
    if "capacity" in chunk:
        parts.append(chunk_bar(chunk, documents))
    told = given_text(chunk["prompt"], "all it was given", GIVEN, folded=True)
    if "turns" in chunk:
        parts += [told, story(chunk, learns, roles)]
    else:
        parts += [written_text(chunk["note"], chunk["advantage"], learns), told]
    return f'<div class="note">{"".join(parts)}</div>'


def chunk_bar(chunk: dict, documents: list[dict]) -> str:
    """A chunk as a picture: its documents in proportion to their tokens, the free room hatched."""
    held = chunk["documents"]
    lengths = [documents[i]["tokens"] for i in held]
    words = " + ".join(
        f"<b>{i + 1}</b> <bdi>{show(documents[i]['title'], 40)}</bdi> ({length:,})"
        for i, length in zip(held, lengths)
    )
    if chunk["truncated"]:
        words += ", ✂ cut to fit"
        lengths = [chunk["tokens"]]  # it is alone, and fills all that was used
    whole = max(1, chunk["capacity"], sum(lengths))
    blocks = ""
    for i, length in zip(held, lengths):
        blocks += f'<i style="width:{100 * length / whole:.2f}%">{i + 1}</i>'
    room = f"{chunk['tokens']:,} of {chunk['capacity']:,} tokens"
    return f'<div class="bar" aria-hidden="true">{blocks}</div>{dim(f"{words}: {room}")}'


# --------------------------------------------------------------------------- groups


def card(record: dict, roles: dict[str, str], *, opened: bool, told: bool = True) -> str:
    """One trajectory, foldable. Unless `told` it is its head alone, enough to compare it."""
    learns = record["trained"]
    calls = Counter(show(t["call"]["tool"], 20) for t in record["turns"] if t["call"])
    used = " + ".join(f"{tool} ×{n}" for tool, n in calls.items())
    facts = [count(len(record["turns"]), "turn"), used or "no tool"]
    if record["ended"] != "answer":
        facts.append(f"ended: {show(record['ended'], 120)}")
    if not learns:
        facts.append("not trained on")
    reward = record["reward"]
    grade = "not graded" if reward is None else f"reward {reward:g}"
    answer = "no answer"
    if record["answer"] is not None:
        answer = f"answer <b>{show(record['answer'], 200)}</b>"
    body = dim("left out, to keep this page small")
    if told:
        body = story(record, learns, roles)
    return (
        f'<details class="card"{" open" if opened else ""}><summary>'
        f"<b>#{record['trajectory']}</b> "
        f'<b class="grade">{reward_mark(reward)} {grade}</b> '
        f'{badge(record["advantage"], learns)} <span class="answer">{answer}</span>'
        f'<span class="dim">{" · ".join(facts)}</span></summary>{body}</details>'
    )


def group_facts(records: list[dict], roles: dict[str, str]) -> str:
    """One line about a group: right answer, mean reward, samples of the inner roles, the draw."""
    facts = []
    if records[0]["gold"]:
        answers = " | ".join(map(str, records[0]["gold"]))
        facts.append(f"right answer: <bdi>{show(answers, 200)}</bdi>")
    graded = [record["reward"] for record in records if record["reward"] is not None]
    if graded:
        facts.append(f"mean reward {sum(graded) / len(graded):.2f}")
    chunks = [chunk for record in records for chunk in chunks_of(record)]
    samples = Counter(role_name(chunk, roles) for chunk in chunks)
    facts += [count(n, f"{name} sample") for name, n in samples.items()]
    if chunks and any(record["trained"] for record in records):
        facts.append(f"{sum(chunk['drawn'] for chunk in chunks)} drawn for training")
    if len(graded) > 1 and len(set(graded)) == 1:
        facts.append("all alike, nothing to learn")
    return " · ".join(facts)


def group(records: list[dict], roles: dict[str, str], *, opened: bool) -> str:
    """All trajectories of one question: the best and the worst stand open side by side."""

    def rank(record: dict) -> tuple:
        """The best reward first, then the most samples in training. Ungraded ones come last."""
        reward = -1.0 if record["reward"] is None else record["reward"]
        return -reward, -sum(chunk["drawn"] for chunk in chunks_of(record))

    best, *others = sorted(records, key=rank)
    pair = [best]
    if others:
        worst = next(record for record in others if record["reward"] == others[-1]["reward"])
        pair.append(worst)
        others = [record for record in records if record is not best and record is not worst]
    marks = "".join(reward_mark(record["reward"]) for record in records)
    swipe = '<p class="dim swipe">swipe sideways to compare →</p>' if len(pair) > 1 else ""
    compared = "".join(card(record, roles, opened=True) for record in pair)
    rest = ""
    for place, record in enumerate(others):
        rest += card(record, roles, opened=False, told=place < TOLD)
    if rest:
        rest = f'<div class="rest">{rest}</div>'
    return (
        f'<details class="group"{" open" if opened else ""}><summary>'
        f'<span class="question">{show(records[0]["question"], 600)}</span>'
        f'<span class="marks" title="one mark an attempt">{marks}</span>'
        f'<span class="dim">{group_facts(records, roles)}</span></summary>'
        f'{swipe}<div class="pair">{compared}</div>{rest}</details>'
    )


# ------------------------------------------------------------------------- the page


def write(path: Path, title: str, sections: list[tuple[str, list]], roles: dict[str, str]) -> Path:
    """Writes the page of some (heading, groups of records): as many groups as keep it small."""
    parts = []
    room = MAX_BYTES
    left = 0
    for heading, groups in sections:
        if heading:
            parts.append(f"<h2>{html.escape(heading)}</h2>")
        for records in groups:
            part = group(records, roles, opened=room == MAX_BYTES)
            if room < MAX_BYTES and len(part.encode()) > room:
                left += 1
                continue
            room -= len(part.encode())
            parts.append(part)
    if left:
        parts.append(dim(f"{count(left, 'question')} left out, to keep this page small."))
    named = ", ".join(f"<b>{show(name, 40)}</b>" for name in roles.values())
    page = PAGE.format(
        title=html.escape(title),
        style=Path(__file__).with_name("pages.css").read_text(encoding="utf-8"),
        legend=LEGEND.format(roles=f"{count(len(roles), 'role')}: {named}"),
        body="".join(parts),
    )
    return write_whole(path, page.encode())


LEGEND = """\
<p>One language model plays {roles}. Where it calls a tool, the <i>raw documents</i> that come back
are folded away; a reader's <i>chunk</i> shows those that it was given.</p>
<p>Several attempts at the same question are a <i>group</i>. Each earns a reward: 1 if its answer is
right, 0 if wrong. The <i>advantage</i> says how far that lies above or below the group's average;
training makes the text of better attempts likelier. A reader's notes share the reward of their
attempt; <i>drawn</i> says how often a note stands in the loss.</p>
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
