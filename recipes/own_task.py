"""A task of your own: questions by number, held-out questions, a reward.

    python -m recipes.own_task --steps 20

These answers are invented and rarely true in the toy's world, so the reward stays low: put in
your own.
"""

import sys

import mars
import train
from tasks.questions import Question


def question(i: int) -> Question:
    """The i-th of an endless stream: called with 0, 1, 2, …"""
    return Question(
        f"sum-{i}", f"how old was ada baker in {1970 + i % 25} ?", (str(i % 25),), "own"
    )


def grade(question: Question, answer: str) -> float:
    """1 if the answer is a golden one, else 0."""
    return float(answer in question.golden_answers)


if __name__ == "__main__":
    held_out = [question(i) for i in range(1000, 1020)]
    task = {"question": question, "eval_questions": held_out, "grade": grade}
    sys.exit(train.main(mars.METHOD, sys.argv[1:], __doc__, **task))
