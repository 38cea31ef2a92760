"""When an answer counts as right: exact match.

Exact match compares two texts after the usual normalisation of open-domain QA (SQuAD, FlashRAG):
lower-case, no ASCII punctuation, no articles, single spaces. That alone would take 3.5 for 35, 9/11
for 911 and -5 for 5, which a reward must not. So there are four departures; for any other text
figures compare with everybody's:

- A sign between two digits stays (3.5, 9/11, 2010-12), as does one that begins a number (-5, .5).
- A comma between thousands goes: 1,000 is 1000.
- Unicode's minus and dashes are hyphens: 2010–12 is 2010-12.
- Articles alone stay (A is an option), and an answer of which nothing is left is never right.

Test: pytest tests/test_grading.py
"""

import re
import string
from collections.abc import Callable, Sequence

from tasks.judge import judge_from_environment
from tasks.questions import Question

DASHES = str.maketrans(dict.fromkeys("−‐‑‒–—―", "-"))
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
ANY = f"[{re.escape(string.punctuation)}]"
# A sign that stays is found as the group. A bracket before a minus makes it a subtraction's.
PUNCTUATION = re.compile(rf"((?<=\d){ANY}(?=\d)|(?<![\w.)\]])-(?=\.?\d)|(?<![\w.])\.(?=\d))|{ANY}")
ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """The words that two equal answers have in common, joined by single spaces."""
    text = THOUSANDS.sub("", text.lower().translate(DASHES))
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
