"""Questions and graders: where a question comes from, and when an answer counts as right."""
import re
import string
from dataclasses import dataclass
from decimal import Decimal

# -------------------------------------------------------------------------------------------- questions


@dataclass(frozen=True)
class Question:
    """One question with every answer that counts as right; `source` names the set that it came from."""
    id: str
    text: str
    golden_answers: tuple[str, ...]
    source: str


# ---------------------------------------------------------------------------------- grading without a model

TYPOGRAPHY = str.maketrans({"−": "-", "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"'})
NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)?(\.\d*)?")
# Punctuation that carries meaning and stays: a minus before a number, a decimal point, the tail of C++, C#, Disney+.
KEPT = re.compile(r"(?<![\w)\]])-(?=\.?\d) | (?<![^\W\d])\.(?=\d) | (?<=[^\W\d_])[+\#]+(?!\w)", re.VERBOSE)


def normalise(text: str) -> str:
    """The usual normalisation of open-domain QA (lower-case, no punctuation, no articles, single spaces), repaired:
    the punctuation of KEPT survives, and words that are all articles ("A", "The The") stay."""
    text = text.translate(TYPOGRAPHY).lower()
    kept = {place for match in KEPT.finditer(text) for place in range(*match.span())}
    words = "".join(c for place, c in enumerate(text) if place in kept or c not in string.punctuation).split()
    return " ".join([word for word in words if word not in ("a", "an", "the")] or words)


def plain_number(text: str) -> Decimal | None:
    """The value of a text that is one number and nothing else ("-5", "1,000", ".50"), else None."""
    text = text.translate(TYPOGRAPHY).strip()
    return Decimal(text.replace(",", "")) if re.search(r"\d", text) and NUMBER.fullmatch(text) else None


def same_answer(answer: str, gold: str) -> bool:
    """Exact match with one gold answer. Two plain numbers are compared as numbers; an answer that normalises to nothing
    is never right."""
    numbers = plain_number(answer), plain_number(gold)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return bool(normalise(answer)) and normalise(answer) == normalise(gold)


def exact_match(answer: str | None, golds) -> bool:
    """Is the answer equal to any gold answer, after normalisation? No answer (None) is wrong."""
    return answer is not None and any(same_answer(answer, gold) for gold in golds)
