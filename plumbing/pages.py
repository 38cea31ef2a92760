"""trajectories.html: what every role read and wrote, attempts at one question side by side.

The page has no script and needs no network: `<details>` folds, CSS (pages.css) does the rest, and a
content security policy forbids all else. A model or a foreign web page wrote every text in it, so
the template (pages.html) makes each text harmless by `plain` and then escapes it.

The records are those of rollouts/step_N.jsonl. A record is a context. Each of its `turns` has a
tool call, its documents, and the contexts that read these documents (`chunks`). A chunk with turns
of its own, such as a worker that calls tools too, is drawn like the record, one level deeper.

Tests: pytest tests/test_view.py
"""

import unicodedata
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from config import UserError
from plumbing.folders import read_json, read_lines, rollout_files, write_whole

MAX_BYTES = 2_900_000  # of a page, so that a phone opens it at once
# For the template. The numbers: characters of a text that the model wrote, or was given.
CONSTANTS = {"WRITTEN": 6000, "GIVEN": 1500, "SIGNS": {"up": "▲", "down": "▼", "flat": "●"}}


def of_run(run: Path, *, steps: list[int] | None = None, questions: int = 3) -> Path:
    """Writes RUN/trajectories.html from the records that `choose` picks; UserError without any."""
    title = f"Trajectories of run {cut(run.resolve().name, 60)}"
    return write(run / "trajectories.html", title, choose(run, steps, questions), roles_of(run))


def roles_of(run: Path) -> dict[str, str]:
    """role -> its name in words, for the method that made the run."""
    return read_json(run / "method.json")["roles"]


def write(path: Path, title: str, groups: list[list[dict]], roles: dict[str, str]) -> Path:
    """Writes a page of the first groups of records: at least one, and at most MAX_BYTES of them."""
    parts = []
    size = 0
    for records in groups:
        part = TEMPLATE.group(records, roles, opened=not parts)
        if not parts or size + len(part.encode()) < MAX_BYTES:
            parts.append(part)
            size += len(part.encode())
    left_out = len(groups) - len(parts)
    return write_whole(path, TEMPLATE.page(title, roles, parts, left_out).strip().encode())


# -------------------------------------------------------------------------- which records


def choose(run: Path, steps: list[int] | None, questions: int) -> list[list[dict]]:
    """All attempts at `questions` questions of each of `steps`, by default first, middle, last.

    In a step, training questions come first, and among them those whose rewards differ.
    """
    files = rollout_files(run)
    known = list(files)
    steps = steps or [known[i] for i in (0, len(known) // 2, -1) if known]

    def order(records: list[dict]) -> tuple:
        rewards = {record["reward"] for record in records} - {None}
        return records[0]["split"] != "train", len(rewards) < 2

    choices = []
    for step in dict.fromkeys(steps):
        if step not in files:
            raise UserError(f"{run} recorded no step {step}, but {known}")
        groups: dict[tuple, list[dict]] = {}
        for record in read_lines(files[step]):
            groups.setdefault((record["split"], record["question_id"]), []).append(record)
        choices += sorted(groups.values(), key=order)[:questions]
    if not choices:
        raise UserError(f"{run}/rollouts holds no trajectory: name a run that has trained a step")
    return choices


def best_and_worst(records: list[dict]) -> tuple[list[dict], list[dict]]:
    """([the best attempt, the worst], the others). Ungraded attempts come last."""
    best, *others = sorted(records, key=lambda one: 1 if one["reward"] is None else -one["reward"])
    return [best, *others[-1:]], others[:-1]


# ---------------------------------------------------------------------- foreign text

# Control characters, invisible and direction-changing ones, lone surrogates, unassigned codes.
UNSEEN = {"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"}
ALLOWED = "\t\n\u200c\u200d"  # the last two join characters in several scripts and in emoji


def plain(text) -> str:
    """Foreign text made safe for a terminal: hidden and control characters are spelt out."""
    characters = []
    for character in str(text).replace("\r\n", "\n"):
        hidden = unicodedata.category(character) in UNSEEN and character not in ALLOWED
        characters.append(f"⟦U+{ord(character):04X}⟧" if hidden else character)
    return "".join(characters)


def cut(text, limit: int) -> str:
    """At most `limit` characters of a text, and a note where some are missing."""
    text = "" if text is None else str(text)
    return text if len(text) <= limit else f"{text[:limit]} …[cut]"


# ---------------------------------------------------------------- what the template asks for


def count(n: int, noun: str) -> str:
    """A number with its noun: 1 turn, 2 turns."""
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


def parts_of(context: dict) -> list[dict]:
    """A context's texts in order. A sampled text has its turn; `number` counts the turns so far."""
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
        lengths = [chunk["tokens"]]  # its only document was cut to this length
    return [(i + 1, 100 * n / chunk["capacity"]) for i, n in zip(chunk["documents"], lengths)]


ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    # This runs before a value is escaped. Only the template's own pieces are trusted.
    finalize=lambda value: value if isinstance(value, Markup) else plain(value),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters |= {"cut": cut, "number": lambda n: f"{n:,}"}
FUNCTIONS = (count, push, mark, parts_of, blocks, best_and_worst)
ENVIRONMENT.globals |= CONSTANTS | {function.__name__: function for function in FUNCTIONS}
TEMPLATE = ENVIRONMENT.get_template("pages.html").module  # its macros
