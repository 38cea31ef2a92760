"""When an answer counts as right: exact match.

Exact match compares two texts after the usual normalisation of open-domain QA (SQuAD, FlashRAG):
lower-case, no ASCII punctuation, no articles, single spaces. These rules alone would take 3.5 for
35, 9/11 for 911 and -5 for 5. So there are five departures. They change no other text's score:

- A sign between two digits stays (3.5, 9/11), and so do a sign that begins a number (-5, -$5, .5)
  and the minus of an exponent (1e-5).
- A comma between thousands is removed: 1,000 is 1000.
- Letters with accents are composed, full-width characters, dashes and quotes become their ASCII
  forms (2010–12 is 2010-12), and invisible characters are removed.
- LaTeX's \\boxed and \\text are removed: \\boxed{42} is 42.
- An answer that is only an article stays (A is an option), and an empty one is never right.

Test: pytest tests/test_grading.py
"""

import re
import string
import unicodedata
from collections.abc import Callable, Sequence

from tasks.judge import judge_from_environment
from tasks.questions import Question

# NFKC would turn 10² into 102, so only full-width characters and these are replaced.
PLAIN = {0xFEE0 + code: code for code in range(0x21, 0x7F)}
PLAIN |= str.maketrans("−‐‑‒–—―‘’ʼ′“”„«»。", '-------\'\'\'\'""""".')
INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
LATEX = re.compile(r"\\(boxed|text)(?=\{)")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
ANY = f"[{re.escape(string.punctuation)}]"
BETWEEN_DIGITS = rf"(?<=\d){ANY}(?=\d)"
# After a word or a closing bracket a minus subtracts, except in an exponent.
MINUS = r"(?:(?<=\de)|(?<=\d\.e)|(?<![\w.)\]]))-(?=[$£€¥₹]?\.?\d)"
POINT = r"(?<![\w.])\.(?=\d)"
PUNCTUATION = re.compile(f"({BETWEEN_DIGITS}|{MINUS}|{POINT})|{ANY}")  # the group is kept
ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """A text's normal form, which is the same for equal answers: words with a space between."""
    text = unicodedata.normalize("NFC", INVISIBLE.sub("", text)).translate(PLAIN).lower()
    text = THOUSANDS.sub("", LATEX.sub("", text))
    text = PUNCTUATION.sub(lambda match: match[1] or "", text)
    words = ARTICLES.sub(" ", text).split() or text.split()
    return " ".join(words)


def exact_match(answer: str | None, golds: Sequence[str]) -> bool:
    """Whether the answer equals any gold answer after normalisation. No answer (None) is wrong."""
    normal = normalise(answer or "")
    return normal != "" and any(normal == normalise(gold) for gold in golds)


def grader(name: str) -> Callable[[Question, str], float]:
    """The reward of an answer, 0 or 1: "em" is exact match, "judge" asks the environment's judge.

    The judge may raise ToolError: then the answer has no reward. A question without golden answers,
    which only an evaluation has, gets 0 without a call.
    """
    if name == "em":
        return lambda question, answer: float(exact_match(answer, question.golden_answers))
    judge = judge_from_environment()
    return lambda question, answer: float(bool(question.golden_answers) and judge(question, answer))
