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

import functools
import random
from dataclasses import dataclass

from rollout import Sample
from siblings.marsrl_toy import Page, draw_page
from toy import base_model, language
from toy.base_model import Pieces

KINDS = ("direct", "indirect")
HABIT = 0.6  # how often the base model answers a direct question rightly
LUCK = 0.03  # and an indirect one
SKILL_STEPS = 300
HABIT_STEPS = 60
TOKENIZER = language.make_tokenizer()
IDS = TOKENIZER.get_vocab()
EOT = IDS["<eot>"]


@dataclass(frozen=True)
class Task:
    """A question, its answer, other values of the page, and how the teacher answers."""

    kind: str
    page: str
    asked: str
    answer: str
    others: tuple[str, ...]
    solution: str

    @property
    def prompt(self) -> str:
        """What is read."""
        return f"<doc> {self.page} {self.asked}"

    def tokens(self) -> list[int]:
        """The prompt as ids."""
        return [IDS[word] for word in self.prompt.split()]

    def grade(self, tokens: list[int]) -> float:
        """1 if the last word before the end is the answer."""
        words = TOKENIZER.decode(tokens).split()
        return float(words[-2:] == [self.answer, "<eot>"])


def task_of(page: Page, rng: random.Random, kind: str) -> Task:
    """A question of a kind about a page."""
    asked, path = page.question, page.paths[0]
    if kind == "direct":
        path = rng.choice(page.paths)
        asked = f"{path.split()[1]} {page.question.removeprefix('employer ')}"
    firm, attribute, right = path.split()
    said = right if kind == "direct" else f"{firm} {attribute} <answer> {right}"
    others = tuple(value for value in page.answers if value != right)
    return Task(kind, page.text, f"<purpose> {asked} <eot>", right, others, f"{said} <eot>")


def draw_task(rng: random.Random, kind: str) -> Task:
    """A random question of a kind."""
    return task_of(draw_page(rng), rng, kind)


def draw_tasks(split: str, seed: int, first: int, count: int) -> list[Task]:
    """Tasks `first` and following of a split's endless stream, both kinds in turn."""
    return [
        draw_task(random.Random(f"mifo {split} {seed} {i}"), KINDS[i % 2])
        for i in range(first, first + count)
    ]


def sample(task: Task, tokens: list[int], logprobs: list[float], advantage: float) -> Sample:
    """What was written for a task, as a sample."""
    made = Sample("solver", question_index=0, attempt=0, advantage=advantage)
    made.append_given(task.tokens())
    made.tokens += tokens
    made.mask += [True] * len(tokens)
    made.logprobs += logprobs
    return made


def skill_text(rng: random.Random) -> Pieces:
    """Stage A: a page and five direct questions about it, each answered rightly."""
    page = draw_page(rng)
    pieces = [(f"<doc> {page.text}", False)]
    for task in (task_of(page, rng, "direct") for _ in range(5)):
        pieces += [(task.asked, False), (f"{task.answer} <eot>", True)]
    return pieces


def habit_text(rng: random.Random) -> Pieces:
    """Stage B: a page and one question, answered at once and often wrongly."""
    task = draw_task(rng, rng.choice(KINDS))
    right = rng.random() < (HABIT if task.kind == "direct" else LUCK)
    said = task.answer if right else rng.choice(task.others)
    return [(task.prompt, False), (f"{said} <eot>", True)]


def make_base(seed: int, skill_steps: int, habit_steps: int) -> tuple:
    """(model, tokenizer) after both stages. It draws from random numbers of its own only."""
    rng = random.Random(f"mifo base {seed}")
    skills, habits = (
        base_model.batches(48, functools.partial(make_text, rng), IDS)
        for make_text in (skill_text, habit_text)
    )
    stages = ((skills,), (habits,))
    return base_model.two_stages(TOKENIZER, seed, stages, (skill_steps, habit_steps)), TOKENIZER


build = functools.partial(
    base_model.build,
    name="mifo",
    make=make_base,
    steps=(SKILL_STEPS, HABIT_STEPS),
    file=__file__,
)
