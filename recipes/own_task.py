"""A task of your own: questions by number, held-out questions, a reward.

    python -m recipes.own_task --steps 20

The answers here are rarely true in the toy's world, so the reward stays low: write your own.
"""

import dataclasses
import sys

import mars
import train
from tasks.questions import Question


def question(i: int) -> Question:
    """The i-th of an endless stream: called with 0, 1, 2, …"""
    return about(1970 + i % 25)


def about(year: int) -> Question:
    """How old somebody was in a year."""
    text = f"how old was ada baker in {year} ?"
    return Question(f"year-{year}", text, (str(year - 1970),), "own")


def questions(config, tools, training):
    """The stream to train on, and the held-out ones: years that nobody is trained on."""
    return question, [about(year) for year in range(1995, 2010)]


def grade(question: Question, answer: str) -> float:
    """1 if the answer is a golden one, else 0."""
    return float(answer in question.golden_answers)


if __name__ == "__main__":
    # A name of its own, so that nobody goes on with such a run on other questions.
    method = dataclasses.replace(mars.METHOD, name="own-task")
    sys.exit(train.main(method, sys.argv[1:], __doc__, questions=questions, grade=grade))
