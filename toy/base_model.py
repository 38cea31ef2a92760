"""The toy's base model: a tiny Qwen3 that speaks the toy's language, imperfectly.

The paper starts from a pretrained instruct model. This model takes its place, so that a run is RL
alone. Random weights are trained in two stages, on texts of invented worlds that no run asks about:

  A, skills: correct use of the language. Each chunk has six requests, and many of these ask for a
     fact that the chunk does not tell ("none .").
  B, habits: demonstrations with the faults of HABITS, so that the policy sometimes makes every good
     move and many bad ones. A few texts of stage A stay, or the model would unlearn copying.

RL then selects among these moves. RL cannot teach the copying of a fact in minutes, and stage B
alone never teaches it. A fault that stage A has not practised comes out as noise, which RL cannot
tell from a mistake in copying.

Tests: pytest tests/test_toy.py
"""

import functools
import hashlib
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

import binpack
from atomic import made_once
from tools import bm25, search
from toy import language, world

CAPACITY = 64  # tokens of documents in a demonstration's chunk; a run's chunk holds about 69
DOCUMENTS = 3  # results of each search
STEPS = (600, 120)  # training steps in stage A and in stage B

Pieces = list[tuple[str, bool]]  # words, and whether the model is trained on them
Encoded = tuple[list[int], list[bool]]  # token ids and their mask
Source = Callable[[], list[Encoded]]  # returns a new batch at each call


# ------------------------------------------------------------------- demonstrations


@dataclass(frozen=True)
class Habits:
    """How often a demonstrator does what the field says. The defaults make no mistake."""

    guess: float = 0.0  # it answers at once, without a look-up
    specific: float = 1.0  # it says which attribute it wants, not "anything about …"
    second_hop: float = 1.0  # it makes the second look-up
    compute: float = 1.0  # it calls Python for the subtraction
    faithful: float = 1.0  # its answer is what it found
    distil: float = 1.0  # as System 1 it notes the fact, not the chunk's first sentence


FLAWLESS = Habits()
HABITS = Habits(guess=0.15, specific=0.6, second_hop=0.75, compute=0.75, faithful=0.9, distil=0.85)
# System 1's demonstrations in stage B use this instead of HABITS.distil. At 0.5 System 1 learned
# in some runs to say "none ." about facts in its chunk, since most chunks lack the wanted fact.
DISTIL = 0.7
SPECIFIC = 0.75  # used in the same place instead of HABITS.specific
# Share of stage A's questions that ask for an employer, beside those of world.draw_plan. Only 6 %
# of those do, and one base model then gave the right firm a probability of 0.04 (seed 4).
EMPLOYERS = 0.2
MISHAP = 0.03  # share of calls that return "error" and are repeated
VAGUE = 0.15  # share of stage A's requests that ask for "anything about …"


class Library:
    """An invented world with its searches. `fact_of` maps a sentence to the fact that it states."""

    def __init__(self, name: str):
        self.world = world.make_world(f"library {name}", 60, 25)
        self.search = {
            corpus: functools.cache(search.local(documents, k=DOCUMENTS))
            for corpus, documents in self.world.documents.items()
        }
        facts = (fact for fact in self.world.facts if fact[1] in world.VERBS)
        self.fact_of = {self.world.sentence(*fact): fact for fact in facts}

    def chunks(self, name: str, attribute: str) -> list[list[str]]:
        """The chunks that System 1 reads after a look-up of this fact, each a list of texts.

        A search is by name; the attribute only decides which corpus is searched.
        """
        corpus = "scholar" if attribute == "study" else "search"
        texts = [document.text for document in self.search[corpus](name)]
        lengths = [1 + len(text.split()) for text in texts]  # 1 for <doc>
        return [[texts[i] for i in chunk] for chunk in binpack.pack_documents(lengths, CAPACITY)]


def as_text(chunk: list[str]) -> str:
    """A chunk's documents as System 1's prompt has them."""
    return " ".join(f"<doc> {text}" for text in chunk)


def sentences_of(chunk: list[str]) -> list[str]:
    """All sentences of a chunk, each with its full stop."""
    return [f"{bare} ." for text in chunk for bare in text.removesuffix(" .").split(" . ")]


def note_on(chunk: list[str], fact: str, distil: bool) -> str:
    """System 1's note: the fact or "none ."; without `distil` the chunk's first sentence."""
    sentences = sentences_of(chunk)
    if not distil:
        return sentences[0]
    return fact if fact in sentences else "none ."


def purpose_of(name: str, attribute: str, specific: bool) -> str:
    """The purpose of System 2's look-up."""
    return f"{attribute} of {name}" if specific else f"anything about {name}"


def skill_trajectory(library: Library, rng: random.Random) -> Pieces:
    """A text of stage A for System 2: an episode without a fault."""
    if rng.random() >= EMPLOYERS:
        return trajectory(library, world.draw_plan(library.world, rng), rng, FLAWLESS)
    plan = world.plan_one(library.world, rng.choice(library.world.people), "employer")
    return trajectory(library, plan, rng, FLAWLESS)


def habit_trajectory(library: Library, rng: random.Random) -> Pieces:
    """A text of stage B for System 2: an episode with faults."""
    return trajectory(library, world.draw_plan(library.world, rng), rng, HABITS)


def trajectory(library: Library, plan: world.Plan, rng: random.Random, habits: Habits) -> Pieces:
    """System 2's episode with this question. The model is trained on System 2's own words."""
    pieces = [(f"<s2> {plan.text} <eot>", False)]
    knows = rng.random() >= habits.guess and look_up(library, rng, habits, plan, pieces)
    if knows and plan.expression:
        knows = rng.random() < habits.compute
        if knows:
            add_call(pieces, rng, f"python {plan.expression}", plan.answer)
    answer = plan.answer
    if not knows or rng.random() >= habits.faithful:
        answer = wild_guess(plan, library.world, rng)
    pieces.append((f"<answer> {answer} <eot>", True))
    return pieces


def look_up(
    library: Library, rng: random.Random, habits: Habits, plan: world.Plan, pieces: Pieces
) -> bool:
    """Adds the look-ups of a plan to the pieces. Returns whether all of them found their fact."""
    for hop, (corpus, name, attribute) in enumerate(plan.hops):
        if hop > 0 and rng.random() >= habits.second_hop:
            return False
        fact = library.world.sentence(name, attribute)
        for _ in range(3):
            specific = rng.random() < habits.specific
            notes = [
                note_on(chunk, fact, specific and rng.random() < habits.distil)
                for chunk in library.chunks(name, attribute)
            ]
            purpose = purpose_of(name, attribute, specific)
            add_call(pieces, rng, f"{corpus} {name} <purpose> {purpose}", " ".join(notes))
            if fact in notes:
                break
            if rng.random() < 0.7:  # else the look-up is repeated
                return False
        else:
            return False
    return True


def add_call(pieces: Pieces, rng: random.Random, request: str, response: str) -> None:
    """Adds a call and its response; a MISHAP comes first in a few calls."""
    responses = ["error", response] if rng.random() < MISHAP else [response]
    for text in responses:
        pieces.append((f"<call> {request} <eot>", True))
        pieces.append((f"<resp> {text} <eot>", False))


def wild_guess(plan: world.Plan, place: world.World, rng: random.Random) -> str:
    """A random answer of the right kind."""
    if plan.expression:
        return str(rng.randint(1, 24))
    kinds = (world.CITIES, world.PRODUCTS, world.HOBBIES, world.YEARS, place.companies)
    return rng.choice(next(values for values in kinds if plan.answer in values))


ALL_ATTRIBUTES = tuple(world.ATTRIBUTES)


def random_request(
    place: world.World, rng: random.Random, attributes: Sequence[str] = ALL_ATTRIBUTES
) -> tuple[str, str]:
    """A (name, attribute) that has a value in this world."""
    attribute = rng.choice(attributes)
    names = place.companies if attribute in world.CORPORATE else place.people
    return rng.choice(names), attribute


def searched_chunk(library: Library, rng: random.Random) -> tuple[list[str], str]:
    """A chunk of a search, and the name that was searched for."""
    name, attribute = random_request(library.world, rng)
    return rng.choice(library.chunks(name, attribute)), name


def dense_chunk(library: Library, rng: random.Random) -> tuple[list[str], str]:
    """One document with many facts about different names, and one of these names.

    In half of the chunks the facts have two attributes only, which are easily confused.
    """
    place = library.world
    attributes = rng.sample(ALL_ATTRIBUTES, 2 if rng.random() < 0.5 else len(ALL_ATTRIBUTES))
    facts = [random_request(place, rng, attributes) for _ in range(rng.randint(4, 11))]
    sentences = [place.sentence(*fact) for fact in facts]
    for _ in range(rng.randint(0, 3)):
        template = rng.choice(world.MENTIONS)
        mention = template.format(rng.choice(place.people), rng.choice(place.people))
        sentences.append(rng.choice([rng.choice(world.FILLER), mention]))
    rng.shuffle(sentences)
    return [" ".join(sentences)], rng.choice(facts)[0]


def skill_chunk(library: Library, rng: random.Random) -> Pieces:
    """A text of stage A for System 1: a chunk and six requests about it, with correct notes.

    The correct note on a vague request is the chunk's first sentence.
    """
    make_chunk = rng.choice([searched_chunk, dense_chunk])
    chunk, name = make_chunk(library, rng)
    facts = [library.fact_of[one] for one in sentences_of(chunk) if one in library.fact_of]
    attributes_of_name = (*world.PERSONAL, "study")
    if name in library.world.companies:
        attributes_of_name = world.CORPORATE

    pieces = [(f"<s1> {as_text(chunk)}", False)]
    for _ in range(6):
        vague = rng.random() < VAGUE
        if vague:
            request = name, ""
        elif facts and rng.random() < 0.5:
            request = rng.choice(facts)
        elif rng.random() < 0.7:
            # The chunk may lack this attribute of its name.
            request = name, rng.choice(attributes_of_name)
        else:
            request = random_request(library.world, rng)
        fact = "" if vague else library.world.sentence(*request)
        pieces.append((f"<purpose> {purpose_of(*request, not vague)} <eot>", False))
        pieces.append((f"{note_on(chunk, fact, not vague)} <eot>", True))
    return pieces


def habit_chunk(library: Library, rng: random.Random) -> Pieces:
    """A text of stage B for System 1: a searched chunk, a purpose, and a note with faults."""
    name, attribute = random_request(library.world, rng)
    fact = library.world.sentence(name, attribute)
    chunks = library.chunks(name, attribute)
    holding = [chunk for chunk in chunks if fact in sentences_of(chunk)]
    if holding and rng.random() < 0.5:
        chunks = holding
    chunk = rng.choice(chunks)
    specific = rng.random() < SPECIFIC
    purpose = purpose_of(name, attribute, specific)
    if not specific and rng.random() < 0.2:
        purpose = ""  # the prompt of --no-purpose
    note = note_on(chunk, fact, specific and rng.random() < DISTIL)
    prompt = f"<s1> {as_text(chunk)} <purpose> {purpose} <eot>"
    return [(prompt, False), (f"{note} <eot>", True)]


# ------------------------------------------------------------------------- training


def encode(pieces: Pieces, ids: dict[str, int]) -> Encoded:
    """The token ids of the pieces, and the mask of those that the model is trained on."""
    words = [(word, trained) for text, trained in pieces for word in text.split()]
    return [ids[word] for word, _ in words], [trained for _, trained in words]


PART = 6  # samples in one forward pass


def backward(model: Qwen3ForCausalLM, samples: list[Encoded]) -> float:
    """Returns the mean cross-entropy of the samples' trained tokens, and adds its gradient.

    Samples of similar length go together: they need little padding, and the activations of a small
    part fit into a core's cache.
    """
    samples = sorted(samples, key=lambda sample: len(sample[0]))
    count = sum(sum(mask) for _, mask in samples)
    mean = 0.0
    for begin in range(0, len(samples), PART):
        part = samples[begin : begin + PART]
        # A causal model never attends to padding on the right: [B, T] and [B, T - 1].
        tokens = pad_sequence([torch.tensor(tokens) for tokens, _ in part], batch_first=True)
        trained = pad_sequence([torch.tensor(mask) for _, mask in part], batch_first=True)[:, 1:]
        output = model.model(input_ids=tokens[:, :-1], use_cache=False)
        logits = model.lm_head(output.last_hidden_state[trained])  # [N, V]
        loss = F.cross_entropy(logits, tokens[:, 1:][trained], reduction="sum") / count
        loss.backward()
        mean += loss.item()
    return mean


def train(
    model: Qwen3ForCausalLM,
    title: str,
    sources: Sequence[Source],
    steps: int,
    lr: float,
    warmup: int,
) -> None:
    """Trains with AdamW and a cosine decay to a tenth of `lr`.

    The loss of a step is the sum of the sources' mean losses.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        decay = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = lr * (min(1, (step + 1) / warmup) * decay)
        losses = [backward(model, source()) for source in sources]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 49 or step == steps - 1:
            text = " + ".join(f"{loss:.3f}" for loss in losses)
            print(f"{title}: step {step + 1}/{steps}, loss {text}", flush=True)


def new_model(vocabulary_size: int) -> Qwen3ForCausalLM:
    """Random weights: 474k in two layers, which learn to copy sooner than three or four layers."""
    config = Qwen3Config(
        vocab_size=vocabulary_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=language.CONTROL.index("<pad>"),
        eos_token_id=language.CONTROL.index("<eot>"),
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def make_base(seed: int, skill_steps: int, habit_steps: int) -> tuple:
    """(model, tokenizer) after both stages, from random generators of its own."""
    tokenizer = language.make_tokenizer()
    ids = tokenizer.get_vocab()
    libraries = [Library(f"{seed} {i}") for i in range(30)]
    rng = random.Random(f"base {seed}")

    def demonstrations(size: int, make: Callable[[Library, random.Random], Pieces]) -> Source:
        return batches(size, lambda: make(rng.choice(libraries), rng), ids)

    skills = demonstrations(24, skill_chunk), demonstrations(6, skill_trajectory)
    habits = demonstrations(16, habit_chunk), demonstrations(16, habit_trajectory)
    habits += (demonstrations(6, skill_chunk),)
    return two_stages(tokenizer, seed, (skills, habits), (skill_steps, habit_steps)), tokenizer


def batches(size: int, demonstrate: Callable[[], Pieces], ids: dict[str, int]) -> Source:
    """A source of batches for `train`."""
    return lambda: [encode(demonstrate(), ids) for _ in range(size)]


def two_stages(tokenizer, seed: int, stages: tuple, steps: tuple[int, int]):
    """A new model after both stages. `stages` are the sources of skills and of habits.

    The global random generator is as before afterwards.
    """
    skills, habits = stages
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = new_model(len(tokenizer))
        train(model, "base model 1/2, skills", skills, steps[0], lr=5e-3, warmup=30)
        train(model, "base model 2/2, habits", habits, steps[1], lr=2e-3, warmup=10)
    return model


# ---------------------------------------------------------------------------- cache


def build(
    cache: str | os.PathLike,
    seed: int = 0,
    steps: tuple[int, int] = STEPS,
    *,
    name: str = "base",
    make: Callable[..., tuple] = make_base,
    files: tuple[str, ...] = (),
) -> Path:
    """The base model's Hugging Face folder, from the cache; else it is made in three CPU minutes.

    steps: training steps of both stages. Another method's toy passes its name, its `make` (seed,
    *steps -> model, tokenizer) and its files. Raises UserError if the cache cannot be written.
    """
    folder = Path(cache) / f"toy-{name}-{recipe(seed, steps, *files)}"
    return cached(folder, lambda: make(seed, *steps))


def cached(folder: Path, make: Callable[[], tuple]) -> Path:
    """The folder of a (model, tokenizer); `make` is called if the folder does not exist."""

    def fill(unfinished: Path) -> None:
        for part in make():
            part.save_pretrained(unfinished)

    return made_once(folder, fill)


def recipe(seed: int, steps: tuple[int, int], *more: str) -> str:
    """A hash of the seed, the steps, and our files that the model follows from, `more` included."""
    digest = hashlib.sha256(repr((seed, steps)).encode())
    modules = binpack.__file__, bm25.__file__, world.__file__, language.__file__, __file__
    for file in (*modules, *more):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:12]
