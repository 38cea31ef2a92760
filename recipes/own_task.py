"""A task of your own: questions by number, held-out questions, a reward.   python -m recipes.own_task --steps 20

These answers are invented and rarely true in the toy's world, so the reward stays low: put in your own.
"""
import sys

import mars
from plumbing.build import build
from config import from_command_line
from tasks.questions import Question


def question(i: int) -> Question:
    return Question(f"sum-{i}", f"how old was ada baker in {1970 + i % 25} ?", (str(i % 25),), "own")


if __name__ == "__main__":
    run = build(from_command_line(sys.argv[1:]), training=True)
    run.question = question                                 # an endless stream: called with 0, 1, 2, …
    run.eval_questions = [question(i) for i in range(1000, 1020)]
    run.grade = lambda question, answer: float(answer in question.golden_answers)
    mars.train(run)
