"""Reads the questions of one or several sets, and splits off the held-out ones.

    load_questions("my.jsonl")                   your own file, see below
    load_questions("hub:OWNER/REPO/path.jsonl")  the same from a dataset repository on the hub
    load_questions("nq")                         one of the paper's seven QA sets (SETS)
    load_questions("nq/train")                   a split of it, as FlashRAG publishes it
    load_questions("frames")                     a benchmark (BENCHMARKS); hle and gaia need access
    load_questions("nq/train,hotpotqa/train,my.jsonl")     several sets, joined

A file has one JSON object per line, with the names of FlashRAG: a "question", its "golden_answers"
(a list) or one "answer", and optionally an "id". Only an evaluation takes questions without an
answer. Its table has a line for each "set" that they name. A benchmark is read in its published
form, without the questions that need a picture or a file.

Benchmarks ask that nobody publishes their questions and answers (docs/benchmark_sets.md). A run's
rollouts and pages contain both.

Test: pytest tests/test_questions.py
"""

import base64
import csv
import hashlib
import itertools
import json
import os
import random
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from atomic import reason
from config import UserError
from tools import web


@dataclass(frozen=True)
class Question:
    """One question, its right answers, and the set that it comes from."""

    id: str
    text: str
    golden_answers: tuple[str, ...]
    source: str


FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
# Short name: FlashRAG's folder, and the split for evaluation.
SETS = {
    "nq": ("nq", "test"),
    "triviaqa": ("triviaqa", "test"),
    "popqa": ("popqa", "test"),
    "hotpotqa": ("hotpotqa", "dev"),
    "2wiki": ("2wikimultihopqa", "dev"),
    "musique": ("musique", "dev"),
    "bamboogle": ("bamboogle", "test"),
}
# Short name: a file on the hub, and the names of question and answer in it.
BENCHMARKS = {
    "frames": ("google/frames-benchmark/test.tsv", "Prompt", "Answer"),
    "webwalkerqa": ("callanwu/WebWalkerQA/data/main-00000-of-00001.jsonl", "question", "answer"),
    "browsecomp": ("smolagents/browse_comp/data/test-00000-of-00001.parquet", "problem", "answer"),
    "gaia": ("gaia-benchmark/GAIA/2023/validation/metadata.parquet", "Question", "Final answer"),
    "hle": ("cais/hle/data/test-00000-of-00001.parquet", "question", "answer"),
}

# -------------------------------------------------------------------------- one set, or several


def load_questions(spec: str, *, limit: int | None = None, seed: int = 0) -> list[Question]:
    """The questions of "set", or of "set,set,..."; at most `limit`, drawn without replacement.

    Several sets are joined, each in its order, and an id is then "set/id". The draw depends only on
    `seed`. A smaller limit draws other questions, not a part of the same.
    """
    names = [spec] if os.path.isfile(spec) else [name.strip() for name in spec.split(",")]
    if len(set(names)) < len(names):
        raise UserError(f"{spec} names a set twice: give it once")
    questions = []
    for name in names:
        loaded = load_set(name)
        if len(names) > 1:
            loaded = [replace(q, id=f"{name}/{q.id}") for q in loaded]
        questions += loaded
    count = min(limit or len(questions), len(questions))
    indices = random.Random(f"{seed}").sample(range(len(questions)), count)
    return [questions[index] for index in sorted(indices)]


# ---------------------------------------------------------------------------------------- held out


def split(
    data: str, held_out_data: str, *, held_out: int | None, seed: int
) -> tuple[list[Question], list[Question]]:
    """(training questions, held-out questions).

    The held-out questions are `held_out` questions (None: all) of `held_out_data`, or of `data` if
    that is empty. Training leaves out every question with the text of a held-out one.
    """
    reserve = load_questions(held_out_data or data, limit=held_out, seed=seed)
    texts = {same_question(question.text) for question in reserve}
    questions = load_questions(data, seed=seed)
    for question in reserve + questions:
        if not question.golden_answers:
            raise UserError(
                f"question {question.id} of {question.source} has no golden answer, so nothing can "
                "be learned from it: leave it out (eval takes such questions)"
            )
    return [one for one in questions if same_question(one.text) not in texts], reserve


def same_question(text: str) -> str:
    """A question's text in a form without case, spacing and end mark, for comparisons."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(text.split()).rstrip(" ?.!")


# ------------------------------------------------------------------------------------ reading a set


def load_set(name: str) -> list[Question]:
    """All questions of a set: a short name, "hub:OWNER/REPO/path.jsonl" or a file."""
    is_file = os.path.isfile(name)
    if name in BENCHMARKS and not is_file:
        address, question, answer = BENCHMARKS[name]
        rows = read_rows(from_hub(address), name)
        rows = ((n, row) for n, row in rows if not row.get("image") and not row.get("file_name"))
        return read_questions(rows, name, question, answer)
    short, _, part = name.partition("/")
    if short in SETS and not is_file:
        folder, evaluation_part = SETS[short]
        path = from_hub(f"{FLASHRAG}/{folder}/{part or evaluation_part}.jsonl")
    elif name.startswith("hub:"):
        path = from_hub(name.removeprefix("hub:"))
    else:
        path = Path(name)
    return read_questions(read_rows(path, name), name, "question", "answer")


def from_hub(address: str) -> Path:
    """The file OWNER/REPO/path of a dataset repository, from the hub or its local cache."""
    import httpx2
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError

    *repository, file = address.split("/", 2)
    web.check_hub("/".join(repository), file, "dataset")
    try:
        return Path(hf_hub_download("/".join(repository), file, repo_type="dataset"))
    except (OSError, ValueError, EntryNotFoundError, httpx2.HTTPError) as error:
        advice = "check the name (OWNER/REPO/path) and the network"
        if isinstance(error, GatedRepoError):
            advice = "accept its terms on the hub and set HF_TOKEN"
        raise UserError(
            f"cannot get {address:.200} from the hub ({reason(error)}): {advice}"
        ) from error


def read_rows(path: Path, name: str) -> Iterator[tuple[int, dict]]:
    """(number from 1, row) for each JSON line, or each row of a benchmark's table."""
    # A run reads its questions twice, which a pipe does not allow.
    if not os.path.isfile(path):
        raise UserError(
            f"there is no file of questions {name!r:.100}: give a JSONL or parquet file, "
            f"hub:OWNER/REPO/path.jsonl, or one of {', '.join([*SETS, *BENCHMARKS])}"
        )
    try:
        if path.suffix == ".tsv":
            with open(path, encoding="utf-8-sig", newline="") as file:
                rows = list(csv.DictReader(file, delimiter="\t", strict=True))
        elif path.suffix == ".parquet":
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(path).to_pylist()
        else:
            rows = path.read_bytes().decode("utf-8-sig").split("\n")
    except ImportError as error:
        raise UserError(f"{name} is a parquet file: pip install pyarrow") from error
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"the questions in {name:.100} cannot be read ({error})") from error
    for number, row in enumerate(rows, 1):
        if isinstance(row, str):
            if not row.strip():
                continue
            try:
                row = {**json.loads(row)}
            except (ValueError, TypeError, RecursionError) as error:  # TypeError: no object
                raise UserError(f"{name}, line {number}: not a JSON object ({error})") from error
        yield number, row


def read_questions(
    rows: Iterable[tuple[int, dict]], source: str, question: str, answer: str
) -> list[Question]:
    """The questions in the rows. UserError names a bad line. A line number is the default id."""
    questions = {}
    for number, row in rows:
        try:
            parsed = read_row(row, source, number, question, answer)
        except ValueError as error:
            raise UserError(f"{source}, line {number}: {error}") from error
        while parsed.id in questions:  # merged sets may repeat ids, and draws depend on the id
            parsed = replace(parsed, id=f"{parsed.id}@{number}")
        questions[parsed.id] = parsed
    if not questions:
        raise UserError(f"{source} holds no question")
    return list(questions.values())


def read_row(row: dict, source: str, number: int, question: str, answer: str) -> Question:
    """One question. A null counts as a missing field. ValueError names the fault."""
    row = {name: value for name, value in row.items() if value is not None}
    id = str(row.get("id", row.get("task_id", number)))
    text = row.get(question)
    golds = row.get("golden_answers") or ([row[answer]] if answer in row else [])
    label = row.get("set", source)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'"{question}" is missing, empty or not a text')
    if not isinstance(golds, list) or not all(isinstance(gold, str) for gold in golds):
        raise ValueError(f'"golden_answers" is not a list of texts, nor "{answer}" a text')
    if source == "browsecomp" and question == "problem":  # not a file with the set's name
        text, *golds = [decrypt(part, row.get("canary", "")) for part in (text, *golds)]
    if not "".join(golds).strip():
        golds = []
    if not isinstance(label, str) or not label.isprintable() or label.strip() in ("", "all"):
        raise ValueError('"set" is not a printable name, or it is "all"')
    "".join([id, text, label, *golds]).encode()  # raises ValueError for a lone surrogate
    return Question(id, text, tuple(golds), label)


def decrypt(text: str, canary: str) -> str:
    """A text of BrowseComp: base64 of its UTF-8, XORed with the repeated SHA-256 of the canary.

    It stays in memory, because the set asks that its questions are never on the web in plain text.
    ValueError if the canary is wrong.
    """
    key = hashlib.sha256(canary.encode()).digest()
    secret = base64.b64decode(text, validate=True)
    return bytes(a ^ b for a, b in zip(secret, itertools.cycle(key))).decode()
