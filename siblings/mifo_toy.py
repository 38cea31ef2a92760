"""Two kinds of questions about one page: RL can learn one of them, only a teacher the other.

The pages are those of marsrl_toy.py: five facts about one person.

    <doc> ada joined labs . ada born 1968 . ada enjoys chess . … <purpose> birth of ada <eot>
        1968 <eot>
    <doc> … <purpose> employer of ada <eot>
        labs birth <answer> 1968 <eot>

The first kind is direct: the fact is named. The base model is right in HABIT of its answers, so RL
finds what to keep. The second is indirect: wanted is the fact that her employer cares for (CARES).
The base model answers at once and hardly ever rightly, so RL finds nothing. The teacher thinks
before it answers, in a style that nobody has used before: so it teaches a skill, and it may
overwrite another.

Tests: pytest tests/test_mifo.py
"""

import os
import random
from dataclasses import dataclass
from pathlib import Path

import torch

from rollout import Sample
from siblings import marsrl_toy
from siblings.marsrl_toy import draw_page
from toy import base_model, language

KINDS = ("direct", "indirect")
HABIT = 0.6  # how often the base model answers a direct question rightly
LUCK = 0.03  # and an indirect one
STEPS = 400
TOKENIZER = language.make_tokenizer()
IDS = TOKENIZER.get_vocab()
EOT = IDS["<eot>"]


@dataclass(frozen=True)
class Task:
    """A question, its answer, other values of the page, and how the teacher answers."""

    kind: str
    prompt: str
    answer: str
    others: tuple[str, ...]
    solution: str

    def tokens(self) -> list[int]:
        """The prompt as ids."""
        return [IDS[word] for word in self.prompt.split()]

    def grade(self, tokens: list[int]) -> float:
        """1 if the last word before the end is the answer."""
        words = TOKENIZER.decode(tokens).split()
        return float(words[-2:] == [self.answer, "<eot>"])


def draw_task(rng: random.Random, kind: str) -> Task:
    """A random question of a kind."""
    page = draw_page(rng)
    if kind == "indirect":
        asked, solution = page.question, page.paths[0].split()
        right = page.answers[0]
        said = f"{' '.join(solution[:2])} <answer> {right}"
    else:
        path = rng.choice(page.paths)
        _, attribute, right = path.split()
        asked = f"{attribute} {page.question.removeprefix('employer ')}"
        said = right
    prompt = f"<doc> {page.text} <purpose> {asked} <eot>"
    others = tuple(value for value in page.answers if value != right)
    return Task(kind, prompt, right, others, f"{said} <eot>")


def draw_tasks(split: str, seed: int, first: int, count: int) -> list[Task]:
    """Tasks `first` and following of a split's endless stream, both kinds in turn."""
    return [
        draw_task(random.Random(f"mifo {split} {seed} {i}"), KINDS[i % 2])
        for i in range(first, first + count)
    ]


def sample(task: Task, tokens: list[int], logprobs: list[float], index: int) -> Sample:
    """What was written for a task, as a sample."""
    made = Sample("solver", index, 0)
    made.append_given(task.tokens())
    made.tokens += tokens
    made.mask += [True] * len(tokens)
    made.logprobs += logprobs
    return made


def demonstrate(rng: random.Random) -> base_model.Pieces:
    """What the base model learns from: it answers at once, often wrongly."""
    task = draw_task(rng, rng.choice(KINDS))
    right = rng.random() < (HABIT if task.kind == "direct" else LUCK)
    said = task.answer if right else rng.choice(task.others)
    return [(task.prompt, False), (f"{said} <eot>", True)]


def make_base(seed: int, steps: int) -> tuple:
    """(model, tokenizer). It draws from random numbers of its own only."""
    rng = random.Random(f"mifo base {seed}")

    def batch() -> list:
        return [base_model.encode(demonstrate(rng), IDS) for _ in range(48)]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = base_model.new_model(len(TOKENIZER))
        base_model.train(model, "base model", (batch,), steps, lr=5e-3, warmup=30)
    return model, TOKENIZER


def build(cache: str | os.PathLike, seed: int = 0, steps: int = STEPS) -> Path:
    """The base model's folder, as base_model.build makes it."""
    name = f"toy-mifo-{base_model.recipe(seed, (steps, 0), marsrl_toy.__file__, __file__)}"
    return base_model.cached(Path(cache) / name, lambda: make_base(seed, steps))
