"""Two kinds of questions about one page: RL can learn one kind, and only SFT the other.

    <doc> ada joined labs . ada born 1968 . ada enjoys chess . … <purpose> birth of ada <eot>
        1968 <eot>
    <doc> … <purpose> employer of ada <eot>
        labs birth <answer> 1968 <eot>

A direct question names the wanted fact. A share HABIT of the base model's answers is right, so RL
can select them. An indirect question wants the fact that her employer cares for (CARES of
marsrl_toy.py). The base model answers at once and is almost never right, so RL has nothing to
select. The teacher thinks before it answers, in a style that the base model has never seen: this
teaches a new skill and may overwrite the old one.

Tests: pytest tests/test_mifo.py
"""

import functools
import random
from dataclasses import dataclass

from siblings import marsrl_toy
from siblings.marsrl_toy import Page, draw_page
from tasks.questions import Question
from toy import base_model, language
from toy.base_model import Pieces

KINDS = ("direct", "indirect")
HABIT = 0.6  # the base model's share of right answers to direct questions
LUCK = 0.03  # the same for indirect questions
SKILL_STEPS = 300
HABIT_STEPS = 60


@dataclass(frozen=True)
class Task(Question):
    """A question, the page's other values, and the teacher's answer."""

    others: tuple[str, ...]
    solution: str


def task_of(page: Page, rng: random.Random, kind: str, name: str = "") -> Task:
    """A question of a kind about a page."""
    request, path = page.question, page.paths[0]
    if kind == "direct":
        path = rng.choice(page.paths)
        request = f"{path.split()[1]} {page.question.removeprefix('employer ')}"
    firm, attribute, right = path.split()
    solution = right if kind == "direct" else f"{firm} {attribute} <answer> {right}"
    others = tuple(value for value in page.answers if value != right)
    return Task(name, f"{page.text} {request}", (right,), kind, others, f"{solution} <eot>")


def question(split: str, seed: int, index: int) -> Task:
    """Question `index` of a split's endless stream, in which the kinds alternate."""
    rng = random.Random(f"mifo {split} {seed} {index}")
    return task_of(draw_page(rng), rng, KINDS[index % 2], f"{split}-{seed}-{index}")


def questions(config, tools: list[str], training: bool) -> tuple:
    """The stream of training questions and the held-out ones."""
    held_out = [question("eval", config.seed, i) for i in range(config.eval_questions)]
    return lambda i: question("train", config.seed, i), held_out


def as_prompt(task: Task) -> str:
    """The prompt, as solo.Language writes it."""
    page, stop, request = task.text.rpartition(" . ")
    return f"<doc> {page}{stop}<purpose> {request} <eot>"


def skill_text(rng: random.Random) -> Pieces:
    """A text of stage A: a page and five direct questions with right answers."""
    page = draw_page(rng)
    pieces = [(f"<doc> {page.text}", False)]
    for task in (task_of(page, rng, "direct") for _ in range(5)):
        request = as_prompt(task).partition("<purpose>")[2]
        pieces += [(f"<purpose>{request}", False), (task.solution, True)]
    return pieces


def habit_text(rng: random.Random) -> Pieces:
    """A text of stage B: a page and one question, with an answer that is often wrong."""
    page = draw_page(rng)
    task = task_of(page, rng, rng.choice(KINDS))
    right = rng.random() < (HABIT if task.source == "direct" else LUCK)
    answer = task.golden_answers[0] if right else rng.choice(task.others)
    return [(as_prompt(task), False), (f"{answer} <eot>", True)]


def make_base(seed: int, skill_steps: int, habit_steps: int) -> tuple:
    """(model, tokenizer) after both stages, from random generators of its own."""
    tokenizer = language.make_tokenizer()
    rng = random.Random(f"mifo base {seed}")
    skills, habits = (
        base_model.batches(48, functools.partial(make_text, rng), tokenizer.get_vocab())
        for make_text in (skill_text, habit_text)
    )
    stages = ((skills,), (habits,))
    return base_model.two_stages(tokenizer, seed, stages, (skill_steps, habit_steps)), tokenizer


build = functools.partial(
    base_model.build,
    name="mifo",
    make=make_base,
    steps=(SKILL_STEPS, HABIT_STEPS),
    files=(__file__, marsrl_toy.__file__),
)
