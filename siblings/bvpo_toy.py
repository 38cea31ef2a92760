"""A toy in which thinking is one word: name the wanted attribute, or answer at once.

The pages are those of marsrl_toy.py: five facts about one person, and a question that names her
employer. What is wanted is the fact that this employer cares for. Whoever thinks writes first which
attribute that is. A prompt that ends in <answer>, the paper's <think></think>, leaves no room.

    <doc> ada joined labs . ada born 1968 . ada enjoys chess . … <purpose> employer of ada <eot>
        birth <answer> 1968 <eot>
    <doc> … <purpose> employer of ada <eot> <answer>
        1968 <eot>

So a trace is one of four words, and whatever BVPO says of a random trace can be computed by going
through all of them. The base model learns from answers with the faults of HABITS.

Tests: pytest tests/test_bvpo.py
"""

import os
import random
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rollout import Sample, Trajectory
from siblings import marsrl_toy, solo
from siblings.marsrl_toy import Page, draw_page
from tasks.questions import Question
from toy import base_model, language

TRACES = tuple(marsrl_toy.VALUES)  # birth, home, hobby, product
ANSWERS = 2 * len(TRACES) + 2  # of a pair, see `answers`
KINDS = ("thinking", solo.AT_ONCE)
STEPS = 400


@dataclass(frozen=True)
class Habits:
    """How often a demonstrator does what its field says."""

    think: float = 0.6  # its trace names the wanted attribute, not any other
    follow: float = 0.9  # its answer is what the page tells of that attribute, not of any other
    guess: float = 0.35  # without a trace it answers rightly, not with any other value


HABITS = Habits()


@dataclass(frozen=True)
class Pair(Question):
    """A question to which y⁺ is the golden answer, and a wrong one, y⁻."""

    wrong: str


def pair(split: str, seed: int, index: int) -> Pair:
    """Pair `index` of a split's endless stream, with a page of its own."""
    page = draw_page(random.Random(f"bvpo {split} {seed} {index}"))
    wrong = random.Random(f"wrong {split} {seed} {index}").choice(page.answers[1:])
    text = f"{page.text} {page.question}"
    return Pair(f"{split}-{seed}-{index}", text, (page.answers[0],), KINDS[0], wrong)


def said(answer: str, trace: str | None) -> str:
    """An answer behind a trace, or behind the mark that the empty trace's prompt ends with."""
    return f"{answer} <eot>" if trace is None else f"{trace} <answer> {answer} <eot>"


def answers(chat, place: int, asked: Pair) -> list[Trajectory]:
    """y⁺ behind every trace, y⁻ behind every trace, then both without one."""
    at_once = replace(asked, source=solo.AT_ONCE)
    sides = ((asked.golden_answers[0], 1.0), (asked.wrong, 0.0))
    made = [(asked, answer, trace, right) for answer, right in sides for trace in TRACES]
    made += [(at_once, answer, None, right) for answer, right in sides]
    return [
        solo.written(chat, question, place, number, said(answer, trace), right)
        for number, (question, answer, trace, right) in enumerate(made)
    ]


def samples_of(trajectories: list[Trajectory]) -> list[Sample]:
    """The one sample of each trajectory."""
    return [trajectory.samples()[0] for trajectory in trajectories]


def questions(config, tools: list[str], training: bool) -> tuple:
    """Pairs to train on, and held-out questions, with room for a trace and without by turns."""
    held_out = [
        replace(pair("eval", config.seed, i), source=KINDS[i % 2])
        for i in range(config.eval_questions)
    ]
    return lambda i: pair("train", config.seed, i), held_out


def demonstrate(page: Page, rng: random.Random, thinks: bool) -> base_model.Pieces:
    """What a demonstrator reads and writes, with the faults of HABITS."""

    def one(right: str, others: list[str], share: float) -> str:
        return right if rng.random() < share else rng.choice(others)

    answer = one(page.answers[0], page.answers[1:], HABITS.guess)
    trace = None
    if thinks:
        path = one(page.paths[0], page.paths[1:], HABITS.think)
        found = path.split()[-1]
        answer = one(found, [other for other in page.answers if other != found], HABITS.follow)
        trace = path.split()[1]
    prompt = f"<doc> {page.text} <purpose> {page.question} <eot>"
    prompt += "" if thinks else " <answer>"
    return [(prompt, False), (said(answer, trace), True)]


def make_base(seed: int, steps: int) -> tuple:
    """(model, tokenizer). It draws from random numbers of its own only."""
    tokenizer = language.make_tokenizer()
    ids = tokenizer.get_vocab()
    rng = random.Random(f"bvpo base {seed}")

    def batch() -> list:
        texts = (demonstrate(draw_page(rng), rng, i % 2 == 0) for i in range(48))
        return [base_model.encode(text, ids) for text in texts]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = base_model.new_model(len(tokenizer))
        base_model.train(model, "base model", (batch,), steps, lr=5e-3, warmup=30)
    return model, tokenizer


def build(cache: str | os.PathLike, seed: int = 0, steps: int = STEPS) -> Path:
    """The base model's folder, as base_model.build makes it."""
    name = f"toy-bvpo-{base_model.recipe(seed, (steps, 0), marsrl_toy.__file__, __file__)}"
    return base_model.cached(Path(cache) / name, lambda: make_base(seed, steps))
