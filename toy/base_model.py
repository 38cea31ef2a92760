"""The toy's base model: a tiny Qwen3 that speaks the toy's language, imperfectly.

It plays the part of the pretrained instruct model that the paper starts from; the RL on top is "zero RL" as in the
paper. Random weights are trained in two stages on texts of invented worlds that no run asks about:
  A  skills: right use of the language, dense in targets (six requests on each chunk, many of them not in it: "none .");
  B  habits: demonstrations with the faults of HABITS: every good move and many bad ones are in the policy's reach.
RL then selects among these modes; it could not build the skill of copying a fact in minutes. Stage B alone never learns
to copy, and a fault that stage A has not practised comes out as noise that RL cannot tell from a mistake in copying.

`build` caches the result as a Hugging Face folder (model and tokenizer). Tests: pytest tests/test_toy.py
"""
import hashlib
import math
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

from toy import world as toy
from binpack import pack_documents
from config import UserError
from tools import search

CAPACITY = 64                   # tokens of documents in a System 1 chunk
DOCUMENTS = 3                   # results of a search
SKILL_STEPS, HABIT_STEPS = 500, 200


# ------------------------------------------------------------------------------------------------- demonstrations


@dataclass(frozen=True)
class Habits:
    """How often a demonstrator does the right thing; the defaults are flawless."""
    guess: float = 0.0          # answers at once, without looking anything up
    specific: float = 1.0       # states what it is looking for, instead of "anything about …"
    second_hop: float = 1.0     # goes on to the second look-up
    compute: float = 1.0        # calls Python for the sum
    faithful: float = 1.0       # answers what it found
    distil: float = 1.0         # as System 1: notes what was asked for, instead of the chunk's first sentence


FLAWLESS = Habits()
HABITS = Habits(guess=0.15, specific=0.6, second_hop=0.75, compute=0.75, faithful=0.9, distil=0.85)
DISTIL = 0.5                    # the same in the demonstrations that System 1 itself is trained on
MISHAP = 0.03                   # share of calls that meet an "error" and are made again
VAGUE = 0.15                    # share of stage A's requests that say no more than "anything about …"


class Library:
    """An invented world with its searches; looking up a name gives the chunks that System 1 would see, as text."""

    def __init__(self, name: str):
        self.world = toy.make_world(f"library {name}", 60, 25)
        self.search = {corpus: search.local(pages, k=DOCUMENTS) for corpus, pages in self.world.documents.items()}
        self.chunks_of = {}
        self.told_by = {self.world.sentence(*fact): fact for fact in self.world.facts if fact[1] in toy.VERBS}

    def chunks(self, name: str, attribute: str) -> list[list[str]]:
        """What looking up this fact finds: the packed chunks, each a list of pages' texts."""
        corpus = toy.corpus_of(attribute)
        if (corpus, name) not in self.chunks_of:
            texts = [document.text for document in self.search[corpus](name)]
            bins = pack_documents([1 + len(text.split()) for text in texts], CAPACITY)
            self.chunks_of[corpus, name] = [[texts[i] for i in chunk] for chunk in bins]
        return self.chunks_of[corpus, name]


def as_text(chunk: list[str]) -> str:
    """A chunk's pages as they stand in System 1's prompt."""
    return " ".join(f"<doc> {text}" for text in chunk)


def sentences_of(chunk: list[str]) -> list[str]:
    return [f"{sentence} ." for text in chunk for sentence in text.removesuffix(" .").split(" . ")]


def note_on(chunk: list[str], fact: str, right: bool) -> str:
    """What System 1 writes about a chunk: the fact or "none .", or (not right) whatever the chunk begins with."""
    sentences = sentences_of(chunk)
    return (fact if fact in sentences else "none .") if right else sentences[0]


def purpose_of(name: str, attribute: str, specific: bool) -> str:
    return f"{attribute} of {name}" if specific else f"anything about {name}"


def trajectory(library: Library, rng, habits: Habits):
    """One episode of System 2 as pieces (text, sampled by System 2?)."""
    plan, world = toy.draw_plan(library.world, rng), library.world
    pieces = [(f"<s2> {plan.text} <eot>", False)]

    def call(request: str, response: str):
        if rng.random() < MISHAP:
            pieces.extend([(f"<call> {request} <eot>", True), ("<resp> error <eot>", False)])
        pieces.extend([(f"<call> {request} <eot>", True), (f"<resp> {response} <eot>", False)])

    found = rng.random() >= habits.guess
    for hop, (corpus, name, attribute) in enumerate(plan.hops if found else ()):
        if hop > 0 and rng.random() >= habits.second_hop:
            found = False
            break
        fact = world.sentence(name, attribute)
        for _ in range(3):                                      # a look-up that found nothing is sometimes repeated
            specific = rng.random() < habits.specific
            notes = [note_on(chunk, fact, specific and rng.random() < habits.distil)
                     for chunk in library.chunks(name, attribute)]
            call(f"{corpus} {name} <purpose> {purpose_of(name, attribute, specific)}", " ".join(notes))
            found = fact in notes
            if found or rng.random() < 0.7:
                break
        if not found:
            break
    if found and plan.sum:
        found = rng.random() < habits.compute
        if found:
            call(f"python {plan.sum}", plan.answer)
    right = found and rng.random() < habits.faithful
    return pieces + [(f"<answer> {plan.answer if right else wild_guess(plan, world, rng)} <eot>", True)]


def wild_guess(plan: toy.Plan, world: toy.World, rng) -> str:
    """A random answer of the right sort."""
    if plan.sum:
        return str(rng.randint(1, 24))
    for values in (toy.CITIES, toy.PRODUCTS, toy.HOBBIES, toy.YEARS):
        if plan.answer in values:
            return rng.choice(values)
    return rng.choice(world.companies)


ATTRIBUTES = tuple(toy.VERBS)


def random_request(world: toy.World, rng, attributes=ATTRIBUTES) -> tuple[str, str]:
    """A (name, attribute) that has a value in this world."""
    attribute = rng.choice(attributes)
    return rng.choice(world.companies if attribute in toy.CORPORATE else world.people), attribute


def found_chunk(library: Library, rng) -> tuple[list[str], str]:
    """A chunk as a search returns it, and the name that was looked up."""
    name, attribute = random_request(library.world, rng)
    return rng.choice(library.chunks(name, attribute)), name


def made_up_chunk(library: Library, rng) -> tuple[list[str], str]:
    """One page with many facts of different names, half of the time of two attributes only: easily confused."""
    world = library.world
    attributes = rng.sample(ATTRIBUTES, 2 if rng.random() < 0.5 else len(ATTRIBUTES))
    told = [random_request(world, rng, attributes) for _ in range(rng.randint(4, 11))]
    sentences = [world.sentence(*request) for request in told]
    for _ in range(rng.randint(0, 3)):
        mention = rng.choice(toy.MENTIONS).format(rng.choice(world.people), rng.choice(world.people))
        sentences.append(rng.choice([rng.choice(toy.FILLER), mention]))
    rng.shuffle(sentences)
    return [" ".join(sentences)], rng.choice(told)[0]


def skill_chunk(library: Library, rng):
    """Stage A for System 1: a chunk and six requests about it; pieces as in `trajectory`. Each is answered rightly; what a
    vague one asks for is the chunk's first sentence."""
    chunk, name = rng.choice([found_chunk, made_up_chunk])(library, rng)
    told = [library.told_by[sentence] for sentence in sentences_of(chunk) if sentence in library.told_by]
    its_attributes = toy.CORPORATE if name in library.world.companies else (*toy.PERSONAL, "study")
    pieces = [(f"<s1> {as_text(chunk)}", False)]
    for _ in range(6):
        if rng.random() < VAGUE:
            pieces += [(f"<purpose> anything about {name} <eot>", False), (f"{sentences_of(chunk)[0]} <eot>", True)]
            continue
        if told and rng.random() < 0.5:
            request = rng.choice(told)
        elif rng.random() < 0.7:                                # the right name, any of its attributes, told or not
            request = name, rng.choice(its_attributes)
        else:
            request = random_request(library.world, rng)
        note = library.world.sentence(*request) if request in told else "none ."
        pieces += [(f"<purpose> {purpose_of(*request, True)} <eot>", False), (f"{note} <eot>", True)]
    return pieces


def habit_chunk(library: Library, rng):
    """Stage B for System 1: a chunk as a search returns it, a purpose that may be vague, a note that is often wrong."""
    name, attribute = random_request(library.world, rng)
    fact, chunks = library.world.sentence(name, attribute), library.chunks(name, attribute)
    holding = [chunk for chunk in chunks if fact in sentences_of(chunk)]
    chunk = rng.choice(holding if holding and rng.random() < 0.5 else chunks)
    specific = rng.random() < 0.75
    purpose = purpose_of(name, attribute, specific)
    if not specific and rng.random() < 0.2:
        purpose = ""                                            # so that --purpose off is a prompt that it knows
    note = note_on(chunk, fact, specific and rng.random() < DISTIL)
    return [(f"<s1> {as_text(chunk)} <purpose> {purpose} <eot>", False), (f"{note} <eot>", True)]


# ------------------------------------------------------------------------------------------------- training


def encode(pieces, ids: dict[str, int]) -> tuple[list[int], list[bool]]:
    """Pieces (text, trained) as token ids and their mask."""
    tokens = [(ids[word], trained) for text, trained in pieces for word in text.split()]
    return [token for token, _ in tokens], [trained for _, trained in tokens]


def loss_of(model, samples) -> torch.Tensor:
    """Mean cross-entropy of the trained tokens of some samples (token ids, mask), padded to one length T."""
    tokens, mask = (torch.nn.utils.rnn.pad_sequence([torch.tensor(sample[i]) for sample in samples], batch_first=True)
                    for i in (0, 1))            # [B, T]; the padding is on the right, where a causal model never looks
    hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    return F.cross_entropy(model.lm_head(hidden[mask[:, 1:]]), tokens[:, 1:][mask[:, 1:]])


def train(model, title: str, sources, steps: int, lr: float, warmup: int):
    """AdamW with cosine decay. A source makes a batch when called; a step's loss sums the sources' mean losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / warmup) *
                                                 (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))))
    progress = tqdm(range(steps), desc=title, disable=None)             # None: no bar when the output is not a terminal
    for step in progress:
        losses = [loss_of(model, source()) for source in sources]
        sum(losses).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 50 == 49 or step == steps - 1:
            line = "loss " + " + ".join(f"{loss.item():.3f}" for loss in losses)
            if progress.disable:
                print(f"{title}: step {step + 1}/{steps}, {line}", flush=True)
            progress.set_postfix_str(line)


def new_model(vocabulary_size: int) -> Qwen3ForCausalLM:
    """474k parameters. Two layers learned to copy sooner than three or four did."""
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=vocabulary_size, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.06, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=toy.CONTROL.index("<pad>"), eos_token_id=toy.CONTROL.index("<eot>"), bos_token_id=None))


def make_base(seed: int, skill_steps: int, habit_steps: int):
    """Both stages from random weights: (model, tokenizer). Draws from its own random numbers only."""
    tokenizer, rng = toy.make_tokenizer(), random.Random(f"base {seed}")
    ids, libraries = tokenizer.get_vocab(), [Library(f"{seed} {i}") for i in range(30)]

    def batch(size, demonstrate, *habits):
        return lambda: [encode(demonstrate(rng.choice(libraries), rng, *habits), ids) for _ in range(size)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = new_model(len(tokenizer))
        skills = batch(24, skill_chunk), batch(6, trajectory, FLAWLESS)
        habits = batch(16, habit_chunk), batch(16, trajectory, HABITS)
        train(model, "base model 1/2, skills", skills, skill_steps, lr=5e-3, warmup=30)
        train(model, "base model 2/2, habits", habits, habit_steps, lr=2e-3, warmup=10)
    return model, tokenizer


def build(cache_dir, seed: int = 0, threads: int | None = None, steps=(SKILL_STEPS, HABIT_STEPS)) -> Path:
    """The base model's Hugging Face folder, from the cache or made now (about 2 minutes on one core).

    The cache's key is the recipe: this file, toy.py, seed and steps (of the two stages). A build that is cut short
    leaves no folder of that name. threads: for PyTorch while building; None leaves its setting. Raises UserError when
    cache_dir cannot be written.
    """
    sources = [Path(file).read_bytes() for file in (toy.__file__, __file__)]
    recipe = hashlib.sha256(repr((sources, seed, steps)).encode()).hexdigest()[:12]
    folder = Path(cache_dir) / f"toy-base-{recipe}"
    if folder.exists():
        return folder
    unfinished = folder.with_name(f"{folder.name}.unfinished-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the cache folder {cache_dir} cannot be written ({error.strerror}): name another one")
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        model, tokenizer = make_base(seed, *steps)
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        if not folder.exists():                                         # another process may have been faster
            os.rename(unfinished, folder)
    finally:
        torch.set_num_threads(before)
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
