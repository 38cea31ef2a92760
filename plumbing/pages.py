"""trajectories.html: what every role read and wrote, attempts at one question side by side.

The page has no script and needs no network: `<details>` folds, CSS (pages.css) does the rest, and a
content security policy forbids all else. A model or a stranger's web page wrote every text in it.
So the template (pages.html) can put out nothing that is not defused by `plain` and then escaped.

The records are those of rollouts/step_N.jsonl. A record is a context: it has `turns`, each a tool
call with its documents and with the contexts that read these (`chunks`). A chunk that has turns of
its own, such as a worker's that calls tools too, is drawn like the record itself, one level deeper.

Tests: pytest tests/test_view.py
"""

import unicodedata
from collections import Counter
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from config import UserError
from plumbing.folders import read_json, read_lines, rollout_files, write_whole

MAX_BYTES = 2_900_000  # of a page, so that a phone opens it at once
# Characters of a text that the model wrote, and of one that it was given.
LIMITS = {"WRITTEN": 6000, "GIVEN": 1500}
SIGNS = {"up": "▲", "down": "▼", "flat": "●"}


def of_run(run: Path, *, steps: list[int] | None = None, questions: int = 3) -> Path:
    """Writes RUN/trajectories.html: `questions` groups of each of `steps`.

    The default are the first, the middle and the last step recorded. UserError when there is
    nothing to show.
    """
    title = f"Trajectories of run {shorten(run.resolve().name, 60)}"
    return write(run / "trajectories.html", title, choose(run, steps, questions), roles_of(run))


def roles_of(run: Path) -> dict[str, str]:
    """role -> what it is called, of the method that made a run."""
    return read_json(run / "method.json")["roles"]


def write(path: Path, title: str, sections: list[tuple[str, list]], roles: dict[str, str]) -> Path:
    """Writes the page of some (heading, groups of records): as many groups as keep it small."""
    drawn = []
    room = MAX_BYTES
    left = 0
    for heading, groups in sections:
        parts = []
        for records in groups:
            part = TEMPLATE.group(records, roles, room == MAX_BYTES)
            size = len(part.encode())
            if room < MAX_BYTES and size > room:
                left += 1
                continue
            room -= size
            parts.append(part)
        drawn.append((heading, parts))
    return write_whole(path, TEMPLATE.page(title, roles, drawn, left).strip().encode())


# -------------------------------------------------------------------------- which records


def choose(run: Path, steps: list[int] | None, questions: int) -> list[tuple[str, list]]:
    """(heading, groups of records) of each step: by default the first, the middle and the last.

    In a step, training stands before held-out questions, then mixed rewards, then the most
    samples of the inner roles.
    """
    files = rollout_files(run)
    known = list(files)
    if known and not steps:
        steps = [known[0], known[len(known) // 2], known[-1]]

    def dullness(records: list[dict]) -> tuple:
        graded = {record["reward"] for record in records} - {None}
        samples = sum(len(chunks_of(record)) for record in records)
        return records[0]["split"] != "train", len(graded) < 2, -samples

    chosen = []
    for step in dict.fromkeys(steps or ()):
        if step not in files:
            raise UserError(f"{run} recorded no step {step}, but {known}")
        groups = sorted(group_records(read_lines(files[step])), key=dullness)[:questions]
        if groups:
            held_out = groups[0][0]["split"] == "eval"
            heading = f"Step {step}, held-out questions" if held_out else f"Step {step}"
            chosen.append((heading, groups))
    if not chosen:
        raise UserError(f"{run}/rollouts holds no trajectory: name a run that has trained a step")
    return chosen


def group_records(records: list[dict]) -> list[list[dict]]:
    """The attempts at each question."""
    groups: dict = {}
    for record in records:
        groups.setdefault((record["split"], record["question_id"]), []).append(record)
    return list(groups.values())


def chunks_of(record: dict) -> list[dict]:
    """All contexts below a trajectory, such as System 1's."""
    found = []
    for turn in record.get("turns", ()):
        for chunk in turn["chunks"]:
            found += [chunk, *chunks_of(chunk)]
    return found


def ordered(records: list[dict]) -> tuple[list[dict], list[dict]]:
    """(the best attempt and the worst, the others)

    Of equal rewards the attempt with the most samples in training; ungraded ones come last.
    """

    def rank(record: dict) -> tuple:
        reward = -1.0 if record["reward"] is None else record["reward"]
        return -reward, -sum(chunk["drawn"] for chunk in chunks_of(record))

    best, *others = sorted(records, key=rank)
    if not others:
        return [best], []
    worst = next(record for record in others if record["reward"] == others[-1]["reward"])
    return [best, worst], [r for r in records if r is not best and r is not worst]


# ---------------------------------------------------------------------- foreign text

# Control characters, invisible and direction-turning ones, lone surrogates, code points of nothing.
UNSEEN = {"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"}
LEFT_ALONE = "\t\n\u200c\u200d"  # the joiners, which several scripts and emoji need


def plain(text) -> str:
    """Foreign text made safe for a terminal: hidden and control characters are spelt out."""
    spelt = []
    for character in str(text).replace("\r\n", "\n"):
        hidden = unicodedata.category(character) in UNSEEN and character not in LEFT_ALONE
        spelt.append(f"⟦U+{ord(character):04X}⟧" if hidden else character)
    return "".join(spelt)


def cut(text, limit: int) -> str:
    """At most `limit` characters of a text, and a note where some are missing."""
    text = "" if text is None else str(text)
    left = len(text) - limit
    if left <= 0:
        return text
    return text[:limit] + ("…" if limit <= 60 else f" …[{left:,} more characters cut]")


def shorten(text, limit: int) -> str:
    """Plain text of at most about `limit` characters."""
    return plain(cut(text, limit))


def put_out(value):
    """What the template does with a value before it escapes it: only its own pieces are trusted."""
    return value if isinstance(value, Markup) else plain(value)


# ---------------------------------------------------------------- what the template asks for


def count(n: int, noun: str) -> str:
    """ "1 turn", "2 turns"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def push(advantage: float, learns: bool) -> str:
    """CSS classes of sampled text: sign and strength of its push on the model ("flat": none)."""
    if not learns or abs(advantage) <= 1e-6:
        return "flat"
    strength = min(3, 1 + int(abs(advantage)))
    return f"up w{strength}" if advantage > 0 else f"down w{strength}"


def mark(record: dict) -> str:
    """One character for a reward."""
    reward = record["reward"]
    if reward is None:
        return "–"
    if reward >= 1:
        return "✓"
    return "✗" if reward <= 0 else "◐"


def role_name(context: dict, roles: dict[str, str]) -> str:
    """What a context's role is called. A trajectory's is the first role."""
    role = context.get("role", next(iter(roles)))
    return cut(roles.get(role, role), 40)


def names_of(contexts: list[dict], roles: dict[str, str]) -> str:
    """The roles of some contexts, each once."""
    return ", ".join(dict.fromkeys(role_name(context, roles) for context in contexts))


def parts_of(context: dict) -> list[dict]:
    """A context's texts in order; one that was sampled has its turn, and all the turns so far."""
    turns = context["turns"]
    segments = context.get("segments") or [{"trained": True, "text": t["text"]} for t in turns]
    left = iter(turns)
    parts = []
    number = 0
    for segment in segments:
        turn = next(left, None) if segment["trained"] else None
        number += turn is not None
        if turn or not segment["trained"]:
            parts.append({"text": segment["text"], "turn": turn, "number": number})
    return parts


def blocks(chunk: dict, documents: list[dict]) -> list[tuple[int, float]]:
    """(number, percent of the chunk's capacity) of each document in it."""
    lengths = [documents[i]["tokens"] for i in chunk["documents"]]
    if chunk["truncated"]:
        lengths = [chunk["tokens"]]  # it is alone, and fills all that was used
    whole = max(1, chunk["capacity"], sum(lengths))
    return [(i + 1, 100 * n / whole) for i, n in zip(chunk["documents"], lengths)]


def attempt_facts(record: dict) -> str:
    """One line about a trajectory."""
    calls = Counter(cut(t["call"]["tool"], 20) for t in record["turns"] if t["call"])
    used = " + ".join(f"{tool} ×{n}" for tool, n in calls.items())
    facts = [count(len(record["turns"]), "turn"), used or "no tool"]
    if record["ended"] != "answer":
        facts.append(f"ended: {cut(record['ended'], 120)}")
    if not record["trained"]:
        facts.append("not trained on")
    return " · ".join(facts)


def group_facts(records: list[dict], roles: dict[str, str]) -> str:
    """One line about a group: mean reward, samples of the inner roles, the draw."""
    facts = []
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


def load_template():
    """The macros of pages.html."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=put_out,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"cut": cut, "number": lambda n: f"{n:,}"}
    asked = (count, push, mark, role_name, names_of, parts_of, blocks, ordered)
    asked += (attempt_facts, group_facts)
    made.globals |= {function.__name__: function for function in asked} | LIMITS
    made.globals["SIGNS"] = SIGNS
    return made.get_template("pages.html").module


TEMPLATE = load_template()
