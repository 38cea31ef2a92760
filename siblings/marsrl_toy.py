"""A toy for solver, verifier and corrector: answer a question about a page, check it, correct it.

A page has five shuffled facts about one person. The question names her employer, and the answer is
the fact that this employer cares for: "foods" and "works" care for homes, "labs" and "group" for
births, and so on (CARES). The employer itself is never the answer. So one fact decides which other
fact is wanted. The solver answers at once, in one word. It has never learned to take two steps at
once, and says the hobby, which is usually wanted. The verifier first writes both steps down, then
its verdict. The corrector reads both.

    <doc> ada joined labs . ada born 1968 . ada enjoys chess . … <solve> employer of ada <eot>
        chess <eot>
    <doc> … <verify> employer of ada <answer> chess <eot>
        labs birth 1968 wrong <eot>
    <doc> … <correct> employer of ada <answer> chess <resp> labs birth 1968 wrong <eot>
        1968 <eot>

The system needs this gap between solving and checking: a solver that learns everything leaves
nothing to correct. The solver must also be right in more than half of its answers. Otherwise the
adaptive choice gives the verifier only wrong solutions, and it learns to call all of them wrong.

Two layers learn within a minute to find a word by its kind. In five minutes they did not learn to
tell two facts of one kind apart by the names before them, so a page is about one person. The base
model is made in two stages like base_model.py's: skills, then the faults of HABITS.

Tests: pytest tests/test_marsrl.py
"""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import AddedToken

from tasks.format import Action
from tasks.questions import Question
from toy import base_model, language, world
from toy.base_model import Pieces

MARKS = {"solver": "<solve>", "verifier": "<verify>", "corrector": "<correct>"}
VALUES = {
    "birth": world.YEARS,
    "home": world.CITIES,
    "hobby": world.HOBBIES,
    "product": world.PRODUCTS,
}
# firm -> the attribute that it cares for, which no page tells
CARES = {
    "labs": "birth",
    "group": "birth",
    "foods": "home",
    "works": "home",
    "media": "hobby",
    "corp": "hobby",
    "motors": "product",
    "systems": "product",
}
USUAL = "hobby"
USUAL_SHARE = 0.7  # share of the pages whose firm cares for the usual attribute
SKILL_STEPS = 300
HABIT_STEPS = 80


@dataclass(frozen=True)
class Habits:
    """How often a demonstrator does what the field says."""

    solve: float = 1.0  # the solver says the usual attribute's value, not any other
    find: float = 1.0  # the verifier writes down the right path, not another
    judge: float = 1.0  # its verdict agrees with that path
    follow: float = 1.0  # the corrector's answer is that of the report
    keep: float = 0.0  # otherwise it repeats the old answer, not any value


FLAWLESS = Habits()
HABITS = Habits(solve=0.93, find=0.8, judge=0.75, follow=0.3, keep=0.3)


# ------------------------------------------------------------------- pages and questions


@dataclass(frozen=True)
class Page:
    """Facts about one person, and the question about them.

    A path is "firm attribute value". There is one to each of the values, the right one first.
    """

    text: str
    question: str
    paths: list[str]
    usual: str  # the value of the usual attribute

    @property
    def answers(self) -> list[str]:
        """The values at the ends of the paths."""
        return [path.split()[-1] for path in self.paths]


def draw_page(rng: random.Random) -> Page:
    """A random page."""
    person = rng.choice(world.FIRST_NAMES)
    usual = rng.random() < USUAL_SHARE
    firm = rng.choice([firm for firm, wanted in CARES.items() if (wanted == USUAL) == usual])
    facts = {attribute: rng.choice(values) for attribute, values in VALUES.items()}
    lines = [f"{person} {world.VERBS[name]} {value} ." for name, value in facts.items()]
    lines.append(f"{person} {world.VERBS['employer']} {firm} .")
    rng.shuffle(lines)
    others = [attribute for attribute in VALUES if attribute != CARES[firm]]
    order = [CARES[firm], *rng.sample(others, len(others))]
    paths = [f"{firm} {attribute} {facts[attribute]}" for attribute in order]
    return Page(" ".join(lines), f"employer of {person}", paths, facts[USUAL])


def question(split: str, seed: int, index: int) -> Question:
    """Question `index` of a split's endless stream. It depends on the arguments only."""
    page = draw_page(random.Random(f"page {split} {seed} {index}"))
    text = f"{page.text} {page.question}"
    return Question(f"{split}-{seed}-{index}", text, (page.answers[0],), "toy-page")


# ------------------------------------------------------------------------------ language


def make_tokenizer():
    """The toy's tokenizer, with the two verdicts and the roles' marks added at the end."""
    tokenizer = language.make_tokenizer()
    tokenizer.add_tokens([AddedToken(word, single_word=True) for word in ("right", "wrong")])
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS.values())})
    return tokenizer


class Language(language.ToyFormat):
    """How the three roles speak."""

    def __init__(self, tokenizer, tools: Sequence[str] = ()):
        super().__init__(tokenizer, tools)
        for mark in MARKS.values():
            self.control[mark] = tokenizer.convert_tokens_to_ids(mark)
        self.stop = self.encode(".")[0]

    def prompt(
        self,
        role: str,
        *,
        question: str,
        answer: Sequence[int] | None = None,
        report: Sequence[int] | None = None,
    ) -> list[int]:
        """The page, the role's mark, the question, then the solution and the report."""
        tokens = self.encode(question)
        end = 0  # of the page: the question comes after the last full stop
        if self.stop in tokens:
            end = len(tokens) - tokens[::-1].index(self.stop)
        prompt = [self.control["<doc>"], *tokens[:end], self.control[MARKS[role]], *tokens[end:]]
        if role != "solver":
            prompt += [self.control["<answer>"], *answer]
        if role == "corrector":
            prompt += [self.control["<resp>"], *report]
        return [*prompt, self.eot]

    def parse(self, tokens: list[int], *, final: bool = False) -> Action:
        """An output is an answer as a whole."""
        return self.read_answer(self.text(self.note(tokens)).split())


# ---------------------------------------------------------------------------- base model


def demonstrate(page: Page, role: str, rng: random.Random, habits: Habits) -> Pieces:
    """A role's prompt after the page, and a demonstrator's output."""

    def does(habit: str) -> bool:
        return rng.random() < getattr(habits, habit)

    right, *others = page.answers
    prompt = f"{MARKS[role]} {page.question}"
    if role == "solver":
        answer = page.usual if does("solve") else rng.choice(page.answers)
        return [(f"{prompt} <eot>", False), (f"{answer} <eot>", True)]

    solution = right if rng.random() < 0.5 else rng.choice(others)
    number = 0 if does("find") else rng.randrange(1, len(page.paths))
    path = page.paths[number]
    finding = page.answers[number]
    if role == "verifier":
        verdict = "right" if (solution == finding) == does("judge") else "wrong"
        prompt += f" <answer> {solution} <eot>"
        return [(prompt, False), (f"{path} {verdict} <eot>", True)]

    answer = finding
    if not does("follow"):
        answer = solution if does("keep") else rng.choice(page.answers)
    prompt += f" <answer> {solution} <resp> {path} wrong <eot>"
    return [(prompt, False), (f"{answer} <eot>", True)]


def skill_text(rng: random.Random) -> Pieces:
    """A text of stage A: a page and four turns without a fault, half of them the verifier's."""
    page = draw_page(rng)
    pieces = [(f"<doc> {page.text}", False)]
    for role in rng.choices(list(MARKS), [1, 2, 1], k=4):
        pieces += demonstrate(page, role, rng, FLAWLESS)
    return pieces


def habit_text(rng: random.Random) -> Pieces:
    """A text of stage B: a page and one role's turn, with the faults of HABITS."""
    page = draw_page(rng)
    role = rng.choice(list(MARKS))
    return [(f"<doc> {page.text}", False), *demonstrate(page, role, rng, HABITS)]


def make_base(seed: int, skill_steps: int, habit_steps: int) -> tuple:
    """(model, tokenizer) after both stages, from random generators of its own."""
    tokenizer = make_tokenizer()
    ids = tokenizer.get_vocab()
    rng = random.Random(f"verification {seed}")

    skills, habits = (
        base_model.batches(48, functools.partial(make_text, rng), ids)
        for make_text in (skill_text, habit_text)
    )
    stages = ((skills,), (habits,))
    steps = (skill_steps, habit_steps)
    return base_model.two_stages(tokenizer, seed, stages, steps), tokenizer


build = functools.partial(
    base_model.build,
    name="marsrl",
    make=make_base,
    steps=(SKILL_STEPS, HABIT_STEPS),
    files=(__file__,),
)
