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

import functools
import os
import random
from dataclasses import dataclass
from pathlib import Path

import torch

from rollout import Sample
from siblings import marsrl_toy
from siblings.marsrl_toy import Page, draw_page
from toy import base_model, language

TRACES = tuple(marsrl_toy.VALUES)  # birth, home, hobby, product
STEPS = 400


@dataclass(frozen=True)
class Habits:
    """How often a demonstrator does what its field says."""

    think: float = 0.6  # its trace names the wanted attribute, not any other
    follow: float = 0.9  # its answer is what the page tells of that attribute, not of any other
    guess: float = 0.35  # without a trace it answers rightly, not with any other value


HABITS = Habits()


@functools.cache
def ids() -> dict[str, int]:
    """word -> token id"""
    return language.make_tokenizer().get_vocab()


def sample(page: Page, answer: str, trace: str | None) -> Sample:
    """A page, and an answer behind a trace or, with None, behind none."""
    made = Sample("solver", 0, 0)
    given, said = words_of(page, answer, trace)
    made.append_given([ids()[word] for word in given.split()])
    tokens = [ids()[word] for word in said.split()]
    made.tokens += tokens
    made.mask += [True] * len(tokens)
    made.logprobs += [0.0] * len(tokens)
    return made


def words_of(page: Page, answer: str, trace: str | None) -> tuple[str, str]:
    """(the prompt, what is written)"""
    prompt = f"<doc> {page.text} <purpose> {page.question} <eot>"
    if trace is None:
        return f"{prompt} <answer>", f"{answer} <eot>"
    return prompt, f"{trace} <answer> {answer} <eot>"


@dataclass(frozen=True)
class Pair:
    """A page, its right answer y⁺ and a wrong one y⁻."""

    page: Page
    wrong: str

    def samples(self) -> list[Sample]:
        """y⁺ behind every trace, y⁻ behind every trace, then both without one."""
        answers = (self.page.answers[0], self.wrong)
        behind = [sample(self.page, answer, trace) for answer in answers for trace in TRACES]
        return behind + [sample(self.page, answer, None) for answer in answers]


def draw_pairs(split: str, seed: int, first: int, count: int) -> list[Pair]:
    """Pairs `first` and following of a split's endless stream."""
    pairs = []
    for index in range(first, first + count):
        page = draw_page(random.Random(f"bvpo {split} {seed} {index}"))
        wrong = random.Random(f"wrong {split} {seed} {index}").choice(page.answers[1:])
        pairs.append(Pair(page, wrong))
    return pairs


def trace_to(path: str) -> str:
    """The attribute that a page's path leads through: "labs birth 1968" -> "birth"."""
    return path.split()[1]


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
        trace = trace_to(path)
    given, said = words_of(page, answer, trace)
    return [(given, False), (said, True)]


def make_base(seed: int, steps: int) -> tuple:
    """(model, tokenizer). It draws from random numbers of its own only."""
    rng = random.Random(f"bvpo base {seed}")

    def batch() -> list:
        return [
            base_model.encode(demonstrate(draw_page(rng), rng, i % 2 == 0), ids())
            for i in range(48)
        ]

    tokenizer = language.make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = base_model.new_model(len(tokenizer))
        base_model.train(model, "base model", (batch,), steps, lr=5e-3, warmup=30)
    return model, tokenizer


def build(cache: str | os.PathLike, seed: int = 0, steps: int = STEPS) -> Path:
    """The base model's folder, as base_model.build makes it."""
    name = f"toy-bvpo-{base_model.recipe(seed, (steps, 0), marsrl_toy.__file__, __file__)}"
    return base_model.cached(Path(cache) / name, lambda: make_base(seed, steps))
