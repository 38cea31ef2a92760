"""The toy for a planner and its workers: its questions, its language, its base model.

The world is the toy's (world.py), and every question needs two steps: two look-ups, or a look-up
and a subtraction. The planner's only tool is a worker:

    <s2> where is the employer of ada baker based ? <eot> <call> work employer of ada baker <eot>
    <resp> ada baker joined acro corp . <eot> <call> work base of acro corp <eot> …

A worker sees the question and its subtask, and reads whole documents:

    <s1> where is … ? <purpose> employer of ada baker <eot> <call> search ada baker <eot>
    <resp> <doc> … <doc> … <eot> <answer> … <eot> <resp> <eot> <answer> ada baker joined acro corp .

The last <answer> is part of the prompt: it demands the summary, the only turn that the planner
sees. A single agent (`<s2> <s1> question <eot>`) has the workers' tools and reads all documents.

The base model knows all three roles, with the faults of HABITS. A subtask is often vague
("anything about ada baker"). A worker that knows the question can still find the wanted fact; one
without it reports its documents' first sentence.

Tests: pytest tests/test_matpo.py
"""

import functools
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tokenizers import AddedToken

from tasks.format import Action, Call
from tasks.questions import Question
from toy import base_model, language, world
from toy.base_model import Library, Pieces
from toy.language import ToyFormat

# ------------------------------------------------------------------------- questions


def draw_plan(place: world.World, rng: random.Random, python: bool = True) -> world.Plan:
    """A random question of two steps; three in ten end in a subtraction."""
    person = rng.choice(place.people)
    if python and rng.random() < 0.3:
        return world.draw_age(place, rng, person)
    return world.draw_two(place, rng, person)


def question(split: str, seed: int, index: int, tools: Collection[str] = world.TOOLS) -> Question:
    """Question `index` of a split's endless stream. It depends on the arguments only."""
    rng = random.Random(f"delegation {split} {seed} {index}")
    plan = draw_plan(world.world(split, seed), rng, "python" in tools)
    return Question(f"{split}-{seed}-{index}", plan.text, (plan.answer,), f"toy-{plan.kind}")


# -------------------------------------------------------------------------- language


def make_tokenizer():
    """The toy's tokenizer with one more word: the name of the planner's tool."""
    tokenizer = language.make_tokenizer()
    tokenizer.add_tokens([AddedToken("work", single_word=True)])
    return tokenizer


class Language(ToyFormat):
    """How planner, worker and single agent speak. A step may begin with a thought."""

    def prompt(self, role: str, *, question: str, task: str = "") -> list[int]:
        """A role's first prompt."""
        if role == "worker":
            return super().prompt("sys1", chunk=question, purpose=task)
        prompt = super().prompt("sys2", question=question)
        if role == "agent":
            prompt.insert(1, self.control["<s1>"])
        return prompt

    def parse(self, tokens: list[int], *, final: bool = False) -> Action:
        """One step. The words before <call> or <answer> are a thought, also after a demand."""
        answer = self.control["<answer>"]
        if final:
            begin = tokens.index(answer) + 1 if answer in tokens else 0
        else:
            starts = [self.control["<call>"], answer]
            begin = next((i for i, token in enumerate(tokens) if token in starts), 0)
        return super().parse(tokens[begin:], final=final)

    def read_call(self, words: list[str]) -> Action:
        """The words after <call>: a tool and its argument, without a purpose."""
        if not words or words[0] not in self.tools:
            return Action(error=f"unknown tool; the tools are {', '.join(self.tools)}")
        tool, *argument = words
        if not self.is_plain(argument):
            return Action(error="the argument is empty or has a control word")
        return Action(call=Call(tool, " ".join(argument)))


# -------------------------------------------------------------------- demonstrations


@dataclass(frozen=True)
class Habits:
    """How often a demonstrator does what the field says.

    The defaults make no mistake: vague subtasks and second searches are allowed.
    """

    guess: float = 0.0  # the planner answers at once
    specific: float = 0.7  # its subtask names the attribute, not "anything about …"
    go_on: float = 1.0  # it goes on to the second step
    faithful: float = 1.0  # its answer is what it found
    look_again: float = 0.2  # a worker searches once more before it reports
    summary: float = 1.0  # its summary is the wanted fact, not the first sentence


FLAWLESS = Habits()
HABITS = Habits(guess=0.15, specific=0.15, go_on=0.7, faithful=0.9, look_again=0.3, summary=0.4)
RECAP = 0.75  # share of the workers that see the question


@dataclass(frozen=True)
class Subtask:
    """One step of a plan."""

    tool: str
    argument: str
    specific: str  # the subtask in the planner's words
    vague: str
    right: str  # the right summary


def subtasks(place: world.World, plan: world.Plan) -> list[Subtask]:
    """The steps of a plan."""
    steps = []
    for tool, name, attribute in plan.hops:
        specific = base_model.purpose_of(name, attribute, True)
        vague = base_model.purpose_of(name, attribute, False)
        steps.append(Subtask(tool, name, specific, vague, place.sentence(name, attribute)))
    if plan.expression:
        term = plan.expression
        steps.append(Subtask("python", term, term, term, f"{plan.answer} ."))
    return steps


@functools.cache
def raw(library: Library, subtask: Subtask) -> tuple[str, list[str]]:
    """The result of a subtask's tool: as text of a context, and as sentences."""
    if subtask.tool == "python":
        return f"<doc> {subtask.right.removesuffix(' .')}", [subtask.right]
    texts = [document.text for document in library.search["search"](subtask.argument)]
    return base_model.as_text(texts), base_model.sentences_of(texts)


def planner(library: Library, rng: random.Random, habits: Habits, alone: bool = False) -> Pieces:
    """One episode of the planner.

    With `alone` it is one of a single agent, which writes what it found as a thought.
    """
    plan = draw_plan(library.world, rng)
    pieces = [(f"<s2> {'<s1> ' if alone else ''}{plan.text} <eot>", False)]
    on_track = rng.random() >= habits.guess
    thought = ""
    for number, subtask in enumerate(subtasks(library.world, plan)):
        if number > 0:
            on_track = on_track and rng.random() < habits.go_on
        if not on_track:
            break
        documents, sentences = raw(library, subtask)
        call = f"{subtask.tool} {subtask.argument}"
        if not alone:
            specific = rng.random() < habits.specific
            call = f"work {subtask.specific if specific else subtask.vague}"
        faithful = subtask.tool == "python" or rng.random() < habits.summary
        report = subtask.right if faithful else sentences[0]
        pieces.append((f"{thought} <call> {call} <eot>".strip(), True))
        pieces.append((f"<resp> {documents if alone else report} <eot>", False))
        if alone:
            thought = report
        on_track = report == subtask.right
    answer = plan.answer
    if not on_track or rng.random() >= habits.faithful:
        answer = base_model.wild_guess(plan, library.world, rng)
    return [*pieces, (f"{thought} <answer> {answer} <eot>".strip(), True)]


def worker(library: Library, rng: random.Random, habits: Habits, more: int = 0) -> Pieces:
    """One worker. `more` requests about the same documents follow, for practice."""
    plan = draw_plan(library.world, rng)
    subtask = rng.choice(subtasks(library.world, plan))
    has_recap = rng.random() < RECAP
    specific = rng.random() < habits.specific
    recap = plan.text if has_recap else ""
    request = subtask.specific if specific else subtask.vague
    documents, sentences = raw(library, subtask)
    clear = has_recap or specific or subtask.tool == "python"
    fitting = subtask.right if clear else sentences[0]  # the wanted fact, as far as it can know
    pieces = [(f"<s1> {recap} <purpose> {request} <eot>", False)]
    pieces.append((f"<call> {subtask.tool} {subtask.argument} <eot>", True))
    pieces.append((f"<resp> {documents} <eot>", False))
    if rng.random() < habits.look_again:
        pieces.append((f"<call> {subtask.tool} {subtask.argument} <eot>", True))
        pieces.append((f"<resp> {' '.join(documents.split()[:20])}", False))
    else:
        # A report that nobody has demanded may be about anything.
        message = rng.choice([fitting, sentences[0], rng.choice(sentences)])
        pieces.append((f"<answer> {message} <eot>", True))
        pieces.append(("<resp>", False))
    summary = fitting
    if subtask.tool != "python" and rng.random() >= habits.summary:
        summary = sentences[0]
    pieces.append(("<eot> <answer>", False))
    pieces.append((f"{summary} <eot>", True))
    if subtask.tool == "search":
        pieces += practice(library, rng, subtask.argument, sentences, more)
    return pieces


def practice(
    library: Library, rng: random.Random, name: str, sentences: list[str], more: int
) -> Pieces:
    """`more` requests with correct notes: most about these sentences, some about other facts."""
    facts = [library.fact_of[sentence] for sentence in sentences if sentence in library.fact_of]
    pieces = []
    for _ in range(more):
        request = rng.choice(facts) if facts else base_model.random_request(library.world, rng)
        if rng.random() < 0.3:
            request = base_model.random_request(library.world, rng)
        note = library.world.sentence(*request) if request in facts else "none ."
        pieces.append((f"<purpose> {base_model.purpose_of(*request, True)} <eot>", False))
        pieces.append((f"{note} <eot>", True))
    return pieces


# ------------------------------------------------------------------------ base model

STEPS = (320, 150)  # training steps of both stages


def make_base(seed: int, skill_steps: int, habit_steps: int) -> tuple:
    """(model, tokenizer) after both stages, from random generators of its own."""
    tokenizer = make_tokenizer()
    ids = tokenizer.get_vocab()
    libraries = [Library(f"delegation {seed} {i}") for i in range(30)]
    rng = random.Random(f"delegation base {seed}")

    def batches(size: int, demonstrate: Callable, *more) -> Callable:
        return base_model.batches(size, lambda: demonstrate(rng.choice(libraries), rng, *more), ids)

    skills = (
        batches(16, base_model.skill_chunk),
        batches(10, worker, FLAWLESS, 4),
        batches(6, planner, FLAWLESS),
        batches(4, planner, FLAWLESS, True),
    )
    habits = batches(12, worker, HABITS), batches(12, planner, HABITS)
    habits = *habits, batches(6, planner, HABITS, True)
    steps = (skill_steps, habit_steps)
    return base_model.two_stages(tokenizer, seed, (skills, habits), steps), tokenizer


build = functools.partial(
    base_model.build, name="matpo", make=make_base, steps=STEPS, files=(__file__,)
)
