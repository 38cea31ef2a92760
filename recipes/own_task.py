"""A task of your own: questions by number, held-out questions, a reward.

    python -m recipes.own_task --steps 20

These answers are made up: the toy's world rarely agrees, so the reward stays low. Write your own.
"""

import dataclasses
import sys

import mars
import train
from tasks.questions import Question


def question(i: int) -> Question:
    """Question i of an endless stream; i is 0, 1, 2, …"""
    return about(1970 + i % 25)


def about(year: int) -> Question:
    """A question about somebody's age in a year."""
    text = f"how old was ada baker in {year} ?"
    return Question(f"year-{year}", text, (str(year - 1970),), "own")


def questions(config, tools, training):
    """The stream of training questions, and the held-out questions, about other years."""
    return question, [about(year) for year in range(1995, 2010)]


def grade(question: Question, answer: str) -> float:
    """1 if the answer is one of the golden answers, else 0."""
    return float(answer in question.golden_answers)


if __name__ == "__main__":
    # The name keeps MARS from resuming such a run with other questions.
    method = dataclasses.replace(mars.METHOD, name="own-task")
    sys.exit(train.main(method, sys.argv[1:], __doc__, questions=questions, grade=grade))
