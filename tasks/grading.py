"""When an answer counts as right: exact match, and F1 and cover match beside it.

Exact match compares two texts after the usual normalisation of open-domain QA (SQuAD, FlashRAG):
lower-case, no punctuation, no articles, single spaces. That normalisation also calls 3.5 and 35
equal, or C++ and C. The departures from it:

- Punctuation stays where it changes the meaning: -5, 3.5, 1/2, 10^6, C++, Ca2+, A-, > 5, f(x).
- Ways of writing are made equal: 1.000.000 and 1,000,000; 3,5 and 3.5; 12.05.1990 and 12/05/1990;
  3.30 pm and 3:30 pm; Unicode's many dashes, quotes, widths, accents and invisible characters.
- Two plain numbers are equal if one ends in .0, or in zeros after 0.5. But 3.10 is not 3.1
  (they may be versions, sections or days), and 007 is not 7.
- "a" as the last word is no article (Vitamin A), nor are words that are all articles (The The).
- An answer that normalises to nothing is never right.

So figures agree with other papers' up to these cases. The table in tests/test_grading.py shows
pairs on which ours is right wherever the usual normalisation is.

Test: pytest tests/test_grading.py
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

from tasks.judge import Judge
from tasks.questions import Question

# ------------------------------------------------------------------------------- ways of writing

PLAIN = str.maketrans(
    {
        **dict.fromkeys("−‐‑‒–—―", "-"),
        **dict.fromkeys("‘’‚‛′", "'"),
        **dict.fromkeys("“”„‟″«»", '"'),
        **dict.fromkeys("‹›「」『』【】《》〈〉¿¡•…。、", " "),
        # The soft hyphen, zero-width spaces and joiners, and the byte order mark are invisible.
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\ufeff"),
        "⁄": "/",
        "≤": "<=",
        "≥": ">=",
    }
)
FULL_WIDTH_OR_SUBSCRIPT = re.compile("[\uff01-\uff5e₀-₉]")
SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹⁻]+")


def without(sign: str) -> Callable[[re.Match], str]:
    return lambda match: match[0].replace(sign, "")


# Applied in this order, so that a later one sees what an earlier one wrote.
WRITINGS = [
    # A word in angle brackets is no comparison.
    (r"<(/?\w+)>", r"\1"),
    # Times: 3.30 p.m. and 3:30pm
    (r"(?<![\d.:])([1-9]\d?):(\d\d)(?![.:]?\d)", r"\1.\2"),
    (r"(\d) ?([ap])\.?m\b", r"\1 \2m"),
    # Thousands: 1,000 and 1,00,000; 1.000,50 and 1.000.000; 1'000
    (r"(?<![\d,.])\d{1,3}(,\d{2,3})*,\d{3}(?!,?\d)", without(",")),
    (r"(?<![\d,.])\d{1,3}(\.\d{3})+(?=,\d)", without(".")),
    (r"(?<![\d,.])\d{1,3}(\.\d{3}){2,}(?!\.?\d)", without(".")),
    (r"(?<![\d'])\d{1,3}('\d{3})+(?!'?\d)", without("'")),
    # A decimal comma
    (r"(?<=\d),(?=\d)", "."),
    # Dates: day, month and year in either order
    (r"(?<![\d./-])(\d\d?)[./-](\d\d?)[./-](\d{4}|\d\d)(?![./-]?\d)", r"\1-\2-\3"),
    (r"(?<![\d./-])(\d{4})[./-](\d\d?)[./-](\d\d?)(?![./-]?\d)", r"\1-\2-\3"),
    # Scores, ratios and seasons: 2:1 and 2-1, 1990/91 and 1990-91
    (r"(?<=\d)[:/](?=\d)", "-"),
    # Phone numbers and ISBNs are often written without hyphens. Spans of years are this long too.
    (r"(?<![\w-])(?=(-?\d){7})\d+(-\d+)+(?![\w-])", without("-")),
    # Powers and exponents
    (r"\*\*", "^"),
    (r"(?<=\de)\+(?=\d)", ""),
    # Comparisons: >5 and > 5
    (r" ?([<>]=?) ?", r" \1 "),
]
WRITINGS = [(re.compile(pattern), replacement) for pattern, replacement in WRITINGS]


def plain_form(match: re.Match) -> str:
    return unicodedata.normalize("NFKC", match[0])


def one_writing(text: str) -> str:
    """The text in lower case, with one way of writing for what Unicode and countries vary."""
    text = FULL_WIDTH_OR_SUBSCRIPT.sub(plain_form, text)
    text = SUPERSCRIPT.sub(lambda match: "^" + plain_form(match), text)
    text = unicodedata.normalize("NFC", text.casefold()).translate(PLAIN)
    text = re.sub(r"\d", lambda match: str(unicodedata.decimal(match[0])), text)
    text = " ".join(text.split())
    for pattern, replacement in WRITINGS:
        text = pattern.sub(replacement, text)
    return text


# --------------------------------------------------------------------------------- normalisation

MEANINGFUL = re.compile(
    r"""
      (?<![\w)\]])-(?=\.?\d)                # a minus before a number: -5
    | (?<![\w)\]])-(?=[a-z](?![^\W\d_]))    # or before a name of one letter: -x
    | (?<=\d)-(?=\d) | (?<=\de)-(?=\d)      # between digits: 3-4, 1e-5
    | \b[a-z]{1,2}-(?!\w)                   # a grade, a blood group, an ion: A-, AB-, Cl-
    | \b[a-z]+\d+-(?!\w)                    # an ion: HCO3-
    | (?<![^\W\d])\.(?=\d)                  # a decimal point: 3.5, .5
    | (?<=\w)\++                            # 2+2, Ca2+, C++, Disney+
    | (?<=[^\W\d_])\#+(?!\w)                # C#
    | (?<=\d)[*'](?=\d)                     # 2*3, 5'11
    | (?<=[\w)])\^(?=[\w(-])                # 10^6, x^2
    | [<>]=?(?=\ [-+]?\.?\d)                # > 5
    | [<>]=?(?=\ [a-z](?![^\W\d_]))         # x < y
    | \b[a-z]\((?=\w)                       # f(x)
    """,
    re.VERBOSE,
)
ARTICLES = ("a", "an", "the")
NUMBER = re.compile(r"(-?)(\d*)(?:\.(\d*))?")


def normalise(text: str) -> str:
    """The words that two equal answers have in common, joined by single spaces."""
    text = one_writing(text)
    kept = set()
    for match in MEANINGFUL.finditer(text):
        kept.update(range(*match.span()))
    characters = [
        character
        for place, character in enumerate(text)
        if character not in string.punctuation or place in kept
    ]
    words = "".join(characters).split()
    return plain_number(" ".join(without_articles(words)))


def without_articles(words: list[str]) -> list[str]:
    """The words that are no articles. A last "a" is a letter, and articles alone are a name."""
    content = [word for word in words[:-1] if word not in ARTICLES]
    if words and (words[-1] not in ARTICLES or words[-1] == "a"):
        content.append(words[-1])
    return content or words


def plain_number(text: str) -> str:
    """One form for numbers of equal value: 5.0 -> 5, .50 -> 0.5. Any other text is left alone."""
    match = NUMBER.fullmatch(text)
    if not match or not re.search(r"\d", text):
        return text
    sign, whole, fraction = match.groups(default="")
    if whole in ("", "0") or not fraction.strip("0"):
        fraction = fraction.rstrip("0")
    whole = whole or "0"
    if whole == "0" and not fraction:
        return "0"
    if not fraction:
        return f"{sign}{whole}"
    return f"{sign}{whole}.{fraction}"


# --------------------------------------------------------------------------------------- graders


def exact_match(answer: str | None, golds: Sequence[str]) -> bool:
    """Whether the answer equals any gold answer after normalisation. No answer (None) is wrong."""
    if answer is None:
        return False
    said = normalise(answer)
    return said != "" and any(said == normalise(gold) for gold in golds)


def f1(answer: str | None, golds: Sequence[str]) -> float:
    """The harmonic mean of precision and recall over words, for the best gold answer; in [0, 1].

    Words are counted as multisets after normalisation. As in HotpotQA and FlashRAG, "yes", "no" and
    "noanswer" are answers of their own: beside any other text they score 0.
    """
    if answer is None:
        return 0.0
    said = normalise(answer)
    return max((f1_of_normalised(said, normalise(gold)) for gold in golds), default=0.0)


def f1_of_normalised(said: str, right: str) -> float:
    closed = ("yes", "no", "noanswer")
    if said != right and (said in closed or right in closed):
        return 0.0
    said_words = Counter(said.split())
    right_words = Counter(right.split())
    common = said_words & right_words
    if not common:
        return 0.0
    return 2 * common.total() / (said_words.total() + right_words.total())


def cover_match(answer: str | None, golds: Sequence[str]) -> bool:
    """Whether the answer contains a gold answer as whole words. A list of guesses passes.

    It is shown and never a reward. FlashRAG's "acc" looks for any substring instead, so that its
    figures are higher (gold 5 in answer 15) and the two cannot be compared.
    """
    if answer is None:
        return False
    said = normalise(answer)
    for gold in golds:
        right = normalise(gold)
        if right and f" {right} " in f" {said} ":
            return True
    return False


def grader(name: str) -> Callable[[Question, str], float]:
    """The reward of an answer, 0 or 1: "em" is exact match, "judge" asks the environment's judge.

    The callable is thread-safe. The judge's may raise ToolError: then there is no reward, not 0.
    """
    if name == "em":
        return lambda question, answer: float(exact_match(answer, question.golden_answers))
    judge = Judge.from_environment()
    return lambda question, answer: float(judge(question, answer).correct)
