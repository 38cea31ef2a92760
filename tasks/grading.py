"""When an answer counts as right: exact match.

Exact match compares two texts after the usual normalisation of open-domain QA (SQuAD, FlashRAG):
lower-case, no ASCII punctuation, no articles, single spaces. That alone would take 3.5 for 35, 9/11
for 911 and -5 for 5, which a reward must not. So there are five departures; for any other text
figures compare with everybody's:

- Signs between two digits stay (3.5, 9/11, 10**-6), as does one that begins a number (-5, -$5, .5),
  and the minus of an exponent (1e-5).
- A comma between thousands goes: 1,000 is 1000.
- Typographic twins are one: composed and decomposed letters, wide ones, digits of any script, the
  dashes and quotes of Unicode (2010–12 is 2010-12), marks that nobody sees. 10² is not 102.
- LaTeX's words around an answer go: \\boxed{42} is 42.
- Articles alone stay (A is an option), and an answer of which nothing is left is never right.

Test: pytest tests/test_grading.py
"""

import re
import string
import unicodedata
from collections.abc import Callable, Sequence

from tasks.judge import judge_from_environment
from tasks.questions import Question

TWINS = {"-": "−‐‑‒–—―", "'": "‘’‚‛′ʻʼ´", '"': "“”„‟″«»", ".": "。٫", ",": "、٬", "/": "⁄∕"}
TWINS = str.maketrans({twin: plain for plain, twins in TWINS.items() for twin in twins})
INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]"
)
NOT_RAISED = re.compile("[^¹²³⁰-₟¼-¾⅐-⅟↉]+")  # NFKC would make 102 of 10², and 51⁄2 of 5½
LATEX = re.compile(r"\\(boxed|fbox|text\w*|math\w*)(?=\s*\{)|(?<=\^)\{")
THOUSANDS = re.compile(r"(?<=\d)(?:\\?,|\{,\})(?=\d{3}(?!\d))")
ANY = f"[{re.escape(string.punctuation)}]"
CURRENCY = "".join(c for c in map(chr, range(0xD800)) if unicodedata.category(c) == "Sc")
CODES = "usd|eur|gbp|jpy|cny|rmb|inr|chf|aud|cad|hkd|sgd|krw|sek|nok|dkk|pln|brl|rub|try|zar|kr|rs"
MONEY = rf"(?:(?:[a-z]{{0,3}}\\?[{CURRENCY}]|{CODES}) ?)?"
# A sign that stays is found as the group. A bracket before a minus makes it a subtraction's.
PUNCTUATION = re.compile(
    rf"((?<=\d){ANY}+(?=\d)|(?:(?<=\de)|(?<=\d\.e)|(?<![\w.)\]]))-(?={MONEY}\.?\d)"
    rf"|(?<![\w.])\.(?=\d))|{ANY}"
)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """The words that two equal answers have in common, joined by single spaces."""
    text = INVISIBLE.sub("", text).translate(TWINS)
    text = NOT_RAISED.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    text = re.sub(r"\d", lambda match: str(int(match[0])), text.translate(TWINS)).lower()
    text = THOUSANDS.sub("", LATEX.sub("", text))
    text = PUNCTUATION.sub(lambda match: match[1] or "", text)
    words = ARTICLES.sub(" ", text).split() or text.split()
    return " ".join(words)


def exact_match(answer: str | None, golds: Sequence[str]) -> bool:
    """Whether the answer equals any gold answer after normalisation. No answer (None) is wrong."""
    said = normalise(answer or "")
    return said != "" and any(said == normalise(gold) for gold in golds)


def grader(name: str) -> Callable[[Question, str], float]:
    """The reward of an answer, 0 or 1: "em" is exact match, "judge" asks the environment's judge.

    The judge's may raise ToolError: then there is no reward, not 0.
    """
    if name == "em":
        return lambda question, answer: float(exact_match(answer, question.golden_answers))
    judge = judge_from_environment()
    return lambda question, answer: float(judge(question, answer))
