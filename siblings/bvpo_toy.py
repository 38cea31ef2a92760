"""A toy in which a trace is one word, the name of the wanted attribute.

The pages are those of marsrl_toy.py: five facts about one person, and a question that names her
employer. The wanted fact is the one that this employer cares for. A thinking answer first names the
attribute. A prompt that ends in <answer>, like the paper's <think></think>, forces an empty trace.

    <doc> ada joined labs . ada born 1968 . ada enjoys chess . … <purpose> employer of ada <eot>
        birth <answer> 1968 <eot>
    <doc> … <purpose> employer of ada <eot> <answer>
        1968 <eot>

So every mean over traces is a sum over four words. The base model learns from answers with the
faults of HABITS.

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
ANSWERS = 2 * len(TRACES) + 2  # for each pair, see `answers`
KINDS = ("thinking", solo.AT_ONCE)
STEPS = 400


@dataclass(frozen=True)
class Habits:
    """How often a demonstrator does what the field says."""

    think: float = 0.6  # its trace names the wanted attribute, not any other
    follow: float = 0.9  # its answer is the value of that attribute, not of any other
    guess: float = 0.35  # without a trace it gives the right answer, not any other value


HABITS = Habits()


@dataclass(frozen=True)
class Pair(Question):
    """A question with its golden answer, y⁺, and a wrong answer, y⁻."""

    wrong: str


def pair(split: str, seed: int, index: int) -> Pair:
    """Pair `index` of a split's endless stream, with a page of its own."""
    page = draw_page(random.Random(f"bvpo {split} {seed} {index}"))
    wrong = random.Random(f"wrong {split} {seed} {index}").choice(page.answers[1:])
    text = f"{page.text} {page.question}"
    return Pair(f"{split}-{seed}-{index}", text, (page.answers[0],), KINDS[0], wrong)


def completion(answer: str, trace: str | None) -> str:
    """The text of a trace and an answer; without a trace the prompt has ended with <answer>."""
    return f"{answer} <eot>" if trace is None else f"{trace} <answer> {answer} <eot>"


def answers(chat, place: int, question: Pair) -> list[Trajectory]:
    """y⁺ after every trace, y⁻ after every trace, then y⁺ and y⁻ without a trace."""
    at_once = replace(question, source=solo.AT_ONCE)
    sides = ((question.golden_answers[0], 1.0), (question.wrong, 0.0))
    plans = [(question, answer, trace, right) for answer, right in sides for trace in TRACES]
    plans += [(at_once, answer, None, right) for answer, right in sides]
    return [
        solo.written(chat, question, place, number, completion(answer, trace), right)
        for number, (question, answer, trace, right) in enumerate(plans)
    ]


def samples_of(trajectories: list[Trajectory]) -> list[Sample]:
    """The one sample of each trajectory."""
    return [trajectory.samples()[0] for trajectory in trajectories]


def questions(config, tools: list[str], training: bool) -> tuple:
    """Pairs to train on, and held-out questions, every second one without a trace."""
    held_out = [
        replace(pair("eval", config.seed, i), source=KINDS[i % 2])
        for i in range(config.eval_questions)
    ]
    return lambda i: pair("train", config.seed, i), held_out


def demonstrate(page: Page, rng: random.Random, thinks: bool) -> base_model.Pieces:
    """A prompt and a demonstrator's answer, with the faults of HABITS."""

    def one(right: str, others: list[str], share: float) -> str:
        return right if rng.random() < share else rng.choice(others)

    answer = one(page.answers[0], page.answers[1:], HABITS.guess)
    trace = None
    if thinks:
        path = one(page.paths[0], page.paths[1:], HABITS.think)
        value = path.split()[-1]
        answer = one(value, [other for other in page.answers if other != value], HABITS.follow)
        trace = path.split()[1]
    prompt = f"<doc> {page.text} <purpose> {page.question} <eot>"
    prompt += "" if thinks else " <answer>"
    return [(prompt, False), (completion(answer, trace), True)]


def make_base(seed: int, steps: int) -> tuple:
    """(model, tokenizer), from random generators of its own."""
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
