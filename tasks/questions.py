"""Questions: where they come from, and which of them are held out.

    load_questions("my.jsonl")                   a file of yours, see below
    load_questions("hub:OWNER/REPO/path.jsonl")  the same from a dataset repository on the hub
    load_questions("nq")                         one of the paper's seven QA sets (SETS)
    load_questions("nq/train")                   a split of it, as FlashRAG publishes it
    load_questions("frames")                     a benchmark (BENCHMARKS); hle and gaia need access
    load_questions("nq/train:2,hotpotqa/train:1.5,my.jsonl")     a mix

A file holds one JSON object a line, or one JSON array of them, or it is a .csv, .tsv or .parquet
table. A row has a question, one golden answer or several, and an id if it wants one. With a "set"
a file's rows are told apart in an evaluation's table. Names are those of FlashRAG ("id",
"question", "golden_answers") or of the benchmarks (QUESTION_NAMES, ANSWER_NAMES). Pictures and
files that belong to a question are not read; a benchmark is read without the questions that have
any.

Benchmarks ask that their questions and answers are not published: docs/benchmark_sets.md. A run's
rollouts and pages hold both.

Test: pytest tests/test_questions.py
"""

import base64
import csv
import hashlib
import io
import itertools
import json
import os
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from config import UserError


@dataclass(frozen=True)
class Question:
    """One question, every answer that counts as right, and the set that it came from."""

    id: str
    text: str
    golden_answers: tuple[str, ...]
    source: str


FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
# Short name: FlashRAG's folder and its splits. The first split is for evaluation.
SETS = {
    "nq": ("nq", ("test", "dev", "train")),
    "triviaqa": ("triviaqa", ("test", "dev", "train")),
    "popqa": ("popqa", ("test",)),
    "hotpotqa": ("hotpotqa", ("dev", "train")),
    "2wiki": ("2wikimultihopqa", ("dev", "train")),
    "musique": ("musique", ("dev", "train")),
    "bamboogle": ("bamboogle", ("test",)),
}

# Short name: a dataset repository on the hub and its file.
BENCHMARKS = {
    "frames": ("google/frames-benchmark", "test.tsv"),
    "webwalkerqa": ("callanwu/WebWalkerQA", "data/main-00000-of-00001.jsonl"),
    "browsecomp": ("smolagents/browse_comp", "data/test-00000-of-00001.parquet"),
    "gaia": ("gaia-benchmark/GAIA", "2023/validation/metadata.parquet"),
    "hle": ("cais/hle", "data/test-00000-of-00001.parquet"),
}

# ------------------------------------------------------------------------ one set, or a mix of them


def load_questions(
    spec: str,
    *,
    limit: int | None = None,
    seed: int = 0,
    hub_endpoint: str | None = None,
) -> list[Question]:
    """The questions of one set, in its order, or of a mix; at most `limit` of them.

    One set with a limit: a draw without replacement, in the set's order.

    A mix is "set:weight,set:weight,...": each set gives its share of the total, drawn without
    replacement, then all are shuffled. The total is the largest that no set is too small for, and
    at most `limit`. A missing weight is 1. When no set has a weight, the sets are joined whole
    instead, and a limit draws from all of them. In a mix an id is "set/id".

    All draws depend on `seed` only. A smaller limit draws other questions, not fewer of the same:
    for a part of what a run held out, load that and `draw` from it. UserError, one sentence, if
    anything is wrong.
    """
    if limit is not None and limit < 1:
        raise UserError(f"the limit of questions must be at least 1, not {limit}")
    parts = [spec]
    if not os.path.isfile(spec):
        parts = spec.split(",")
    items = [read_item(part) for part in parts]
    names = [name for name, _ in items]
    weights = [weight for _, weight in items]
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(
                f"{name} is named twice in the mix {spec}; "
                "give it once, with the sum of the weights"
            )
    sets = [load_set(name, hub_endpoint) for name in names]
    if len(sets) > 1:
        sets = [
            [replace(q, id=f"{name}/{q.id}") for q in questions]
            for name, questions in zip(names, sets)
        ]
    if len(sets) == 1 or all(weight is None for weight in weights):
        joined = [question for questions in sets for question in questions]
        return draw(joined, min(limit or len(joined), len(joined)), f"{seed}")
    return mix(names, sets, [weight or Fraction(1) for weight in weights], limit, seed)


def read_item(item: str) -> tuple[str, Fraction | None]:
    """One item of a mix: (the set's name, its weight or None)."""
    name, colon, weight = item.strip().rpartition(":")
    is_weight = re.fullmatch(r"\d+(\.\d+)?", weight)
    if not colon or not is_weight or os.path.isfile(item):
        name = item.strip()
        weight = None
    if not name or (weight is not None and not Fraction(weight)):
        raise UserError(
            f"'{item}' is no part of a mix: write NAME:WEIGHT, the weight above 0, "
            "parts joined by commas"
        )
    if weight is None:
        return name, None
    return name, Fraction(weight)


def mix(
    names: list[str],
    sets: list[list[Question]],
    weights: list[Fraction],
    limit: int | None,
    seed: int,
) -> list[Question]:
    """A share of each set in proportion to its weight, shuffled."""
    counts = shares([len(questions) for questions in sets], weights, limit)
    mixed = []
    for name, questions, count in zip(names, sets, counts, strict=True):
        mixed += draw(questions, count, f"{seed}/{name}")
    random.Random(f"{seed}").shuffle(mixed)
    return mixed


def shares(sizes: list[int], weights: list[Fraction], limit: int | None) -> list[int]:
    """How many questions each set gives, in proportion to the weights.

    The total is as large as the sizes and `limit` allow. What is left over by rounding down goes to
    the largest remainders, and to the first set among equals.
    """
    total = min(size * sum(weights) // weight for size, weight in zip(sizes, weights, strict=True))
    total = min(total, limit or total)
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


def draw(questions: list[Question], count: int, seed: str) -> list[Question]:
    """`count` of the questions, without replacement, in their order."""
    chosen = random.Random(seed).sample(range(len(questions)), count)
    return [questions[index] for index in sorted(chosen)]


# ---------------------------------------------------------------------------------------- held out


def split(
    data: str, held_out_data: str, *, held_out: int | None, seed: int
) -> tuple[list[Question], list[Question]]:
    """(training questions, held-out questions).

    The held-out ones are `held_out` of `held_out_data`, or of `data` if that is empty; None takes
    all. What asks the same as a held-out question is not trained on, whatever its id or set.
    """
    reserved = load_questions(held_out_data or data, limit=held_out, seed=seed)
    questions = load_questions(data, seed=seed)
    twins = {question.id for question in overlap(questions, reserved)}
    return [question for question in questions if question.id not in twins], reserved


def overlap(train: list[Question], held_out: list[Question]) -> list[Question]:
    """The training questions that ask the same as a held-out one, under whatever id."""
    asked = {same_question(question.text) for question in held_out}
    return [question for question in train if same_question(question.text) in asked]


def same_question(text: str) -> str:
    """What two writings of one question have in common: no case, no spacing, no last mark."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(text.split()).rstrip(" ?.!")


# ------------------------------------------------------------------------------------ reading a set


def load_set(name: str, hub_endpoint: str | None) -> list[Question]:
    """One set, whole: a short name, "hub:OWNER/REPO/path.jsonl" or a file."""
    short, slash, split_name = name.partition("/")
    if name in BENCHMARKS:
        repository, file = BENCHMARKS[name]
        path = from_hub(repository, file, hub_endpoint)
    elif short in SETS:
        folder, splits = SETS[short]
        if slash and split_name not in splits:
            raise UserError(f"{short} has no split '{split_name}': choose from {', '.join(splits)}")
        file = f"{folder}/{split_name or splits[0]}.jsonl"
        path = from_hub(FLASHRAG, file, hub_endpoint)
    elif name.startswith("hub:"):
        path = from_own_repository(name, hub_endpoint)
    else:
        path = Path(name)
    content = read_bytes(path, name)
    if path.suffix == ".parquet":
        return read_parquet(content, name)
    if path.suffix in (".csv", ".tsv"):
        return read_csv(content, name, "\t" if path.suffix == ".tsv" else ",")
    return read_file(content, name)


def read_bytes(path: Path, name: str) -> bytes:
    """The content of an ordinary file. A pipe or a device could be read for ever."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise UserError(f"cannot read the questions in {name}: it is not an ordinary file")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise UserError(
            f"cannot read the questions in {name or 'a set without a name'} ({reason}): give a "
            f"JSONL file, hub:OWNER/REPO/path.jsonl, or one of {', '.join([*SETS, *BENCHMARKS])}"
        ) from error


def read_file(content: bytes, source: str) -> list[Question]:
    """The questions of a file: a JSON array, or JSON lines. UserError names the bad ones."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{source} is UTF-16: save it as UTF-8")
    if content.lstrip().startswith(b"["):
        try:
            rows = read_json(content)
        except (ValueError, RecursionError):
            rows = None  # it may still be JSON lines, whose errors have line numbers
        if isinstance(rows, list):
            return read_rows(rows, source, "entry", "entries", lambda row: row)
    return read_jsonl(content, source)


def read_jsonl(content: bytes, source: str) -> list[Question]:
    """Every line of a JSONL file. Blank lines are allowed at the end only."""
    content = content.removeprefix(b"\xef\xbb\xbf").rstrip()
    lines = []
    if content:
        lines = content.split(b"\n")
    return read_rows(lines, source, "line", "lines", read_json)


def read_json(content: bytes):
    """One JSON value; ValueError if it is none. Python would let NaN pass, which is not JSON."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    if not content.strip():
        raise ValueError("blank")
    try:
        return json.loads(content.decode("utf-8-sig"), parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, character {error.pos + 1})") from error


def read_csv(content: bytes, source: str, separator: str) -> list[Question]:
    """Every row of a table whose first line names the columns. FRAMES is a .tsv."""
    try:
        lines = io.StringIO(content.decode("utf-8-sig"), newline="")
        rows = list(csv.DictReader(lines, restkey="", delimiter=separator))
    except (ValueError, csv.Error) as error:
        raise UserError(f"{source} is not a table in UTF-8 ({error})") from error
    return read_rows(rows, source, "row", "rows", lambda row: row)


def read_parquet(content: bytes, source: str) -> list[Question]:
    """Every row of a parquet file, of which only the columns are read that a question has."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{source} is a parquet file: pip install pyarrow") from error
    known = {*ID_NAMES, *QUESTION_NAMES, *ANSWER_NAMES, *ATTACHMENTS, CANARY}
    try:
        file = pyarrow.parquet.ParquetFile(io.BytesIO(content))
        columns = [name for name in file.schema_arrow.names if plain(name) in known]
        rows = file.read(columns=columns).to_pylist()
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{source} is not a parquet file ({reason})") from error
    return read_rows(rows, source, "row", "rows", lambda row: row)


def read_rows(rows: list, source: str, unit: str, units: str, parse: Callable) -> list[Question]:
    """Questions from rows, or a UserError that names the first bad ones and counts them all.

    A row without an id is named by its number, from 1.
    """
    questions = []
    wrong = []
    places = {}
    for number, row in enumerate(rows, 1):
        try:
            row = parse(row)
            if source in BENCHMARKS and has_attachment(row):
                continue
            question = read_row(row, source, number)
            if question.id in places:
                raise ValueError(
                    f"the id {question.id!r} stands in {unit} {places[question.id]} already"
                )
        except (ValueError, RecursionError) as error:
            wrong.append(f"{unit} {number}: {error}")
            continue
        places[question.id] = number
        questions.append(question)
    if wrong:
        listed = "; ".join(wrong[:5])
        if len(wrong) > 5:
            listed += f"; and {len(wrong) - 5} more"
        raise UserError(f"{source}: {len(wrong)} of {len(rows)} {units} are malformed: {listed}")
    if not questions:
        raise UserError(f"{source} holds no question")
    return questions


# ------------------------------------------------------------------------------------ reading a row

# Of several names the first that a row has is read. Capitals and blanks do not matter.
ID_NAMES = ("id", "task_id")
QUESTION_NAMES = ("question", "problem", "prompt")
ANSWER_NAMES = ("golden_answers", "answer", "answers", "final_answer", "ground_truth")
LISTS = ("golden_answers", "answers")  # the others hold one text
ATTACHMENTS = ("image", "file_name")
CANARY = "canary"


def read_row(row, source: str, number: int) -> Question:
    """One question from a JSON object; ValueError says what is wrong with it."""
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    _, name = find(row, ID_NAMES, number)
    if isinstance(name, bool) or not isinstance(name, (int, str)) or name == "":
        raise ValueError('"id" is neither a text nor a whole number')
    _, text = find(row, QUESTION_NAMES)
    if not isinstance(text, str) or not text.strip():
        raise ValueError('"question" is missing, empty or not a text')
    kind, golds = find(row, ANSWER_NAMES)
    if kind not in LISTS:
        golds = [golds]
    if not isinstance(golds, list) or not all(isinstance(gold, str) for gold in golds):
        raise ValueError('"golden_answers" is not a list of texts, and there is no text "answer"')
    _, canary = find(row, (CANARY,))
    if isinstance(canary, str) and canary and is_base64(text):
        text, *golds = [decrypt(part, canary) for part in (text, *golds)]
    # A blank one among others does no harm. GAIA writes "?" where the answer is kept secret.
    if all(gold.strip() in ("", "?") for gold in golds):
        raise ValueError("there is no golden answer")
    named = row.get("set")
    if not isinstance(named, str) or not named.strip():
        named = source
    elif named.strip() == "all" or not named.isprintable():
        raise ValueError(f'"set" is {named!r}: give it a printable name, and not "all"')
    for part in (str(name), text, named, *golds):
        part.encode("utf-8")  # half a surrogate pair raises UnicodeEncodeError, a ValueError
    return Question(str(name), text, tuple(golds), named)


def find(row: dict, names: tuple[str, ...], default=None) -> tuple[str, object]:
    """(the first of the names that the row has, its value), or ("", default)."""
    written = {plain(key): key for key in row}
    for name in names:
        if name in row:
            return name, row[name]
        if name in written:
            return name, row[written[name]]
    return "", default


def plain(name: str) -> str:
    return name.strip().lower().replace(" ", "_")


def has_attachment(row) -> bool:
    """Whether a picture or a file belongs to the question."""
    return isinstance(row, dict) and any(find(row, (name,))[1] for name in ATTACHMENTS)


def is_base64(text: str) -> bool:
    return len(text) % 4 == 0 and bool(re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", text))


def decrypt(text: str, canary: str) -> str:
    """A text of BrowseComp: base64 of its UTF-8, XORed with the canary's SHA-256 over and over.

    It stays in memory: the set asks that its questions never stand on the web in plain text.
    """
    try:
        key = hashlib.sha256(canary.encode()).digest()
        secret = base64.b64decode(text, validate=True)
        return bytes(a ^ b for a, b in zip(secret, itertools.cycle(key))).decode()
    except ValueError:
        raise ValueError("its canary does not decrypt it") from None


# ------------------------------------------------------------------------------------------ the hub


def from_own_repository(name: str, endpoint: str | None) -> Path:
    """The file that "hub:OWNER/REPO/path.jsonl" names."""
    parts = name.removeprefix("hub:").split("/", 2)
    if len(parts) < 3 or not all(parts):
        raise UserError(f"'{name}' is not of the form hub:OWNER/REPO/path.jsonl")
    owner, repository, file = parts
    return from_hub(f"{owner}/{repository}", file, endpoint)


def from_hub(repo: str, filename: str, endpoint: str | None) -> Path:
    """A file of a dataset repository, from the hub or its local cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError

    try:
        return Path(hf_hub_download(repo, filename, repo_type="dataset", endpoint=endpoint))
    except GatedRepoError as error:
        raise UserError(
            f"access to {repo} was not granted: accept its terms on the hub and set HF_TOKEN"
        ) from error
    except (OSError, ValueError, EntryNotFoundError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"cannot get {filename} of {repo} from the hub ({reason}): check the name, the network "
            "and, for a private set, HF_TOKEN"
        ) from error
