"""What the options name in the world outside: tools, questions, and how the roles speak.

It chooses between the toy and the real world; build.py does so for the model.
"""

import functools
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from config import Config, UserError
from rollout import Method
from tasks import questions
from tasks.chat import ChatFormat
from tasks.format import Format
from tasks.questions import Question, same_question
from tools import KNOWN, Tool, python, search
from toy import world


@dataclass
class Questions:
    """Training questions 0, 1, 2, …: each once an epoch, every epoch in an order of its own."""

    loaded: list[Question]
    seed: int

    def __post_init__(self):
        self.sizes = Counter(question.source for question in self.loaded)
        # A step may need two epochs, and its refills two more.
        self.kept_order = functools.lru_cache(maxsize=4)(self.order)

    def __call__(self, i: int) -> Question:
        epoch, place = divmod(i, len(self.loaded))
        return self.loaded[self.kept_order(epoch)[place]]

    def order(self, epoch: int) -> list[int]:
        """An epoch's order, in which every stretch has about the sets' shares.

        By chance, a step of the atlas once had six questions of one kind in eight, and its update
        taught that kind's habits to the other. A set's questions stand at equal distances, the
        first of them at random, so that a set of one question may come anywhere.
        """
        drawn = Counter()
        first = {
            source: random.Random(f"{self.seed} {epoch} {source}").random() for source in self.sizes
        }

        def position(index: int) -> float:
            source = self.loaded[index].source
            drawn[source] += 1
            return (drawn[source] - first[source]) / self.sizes[source]

        return sorted(epoch_order(len(self.loaded), self.seed, epoch), key=position)

    def fingerprints(self, held_out: list[Question]) -> dict[str, list[str]]:
        """What a run's questions.json holds, so that nobody is asked what it was trained on."""
        return {"trained": fingerprints(self.loaded), "held_out": fingerprints(held_out)}


def fingerprints(questions: list[Question]) -> list[str]:
    """A short hash of each question's text, as tasks.questions compares texts."""
    texts = [same_question(question.text) for question in questions]
    return [hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in texts]


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(count)."""
    number = seed * 1_000_003 + epoch
    if number >= 2**32:
        # The generator reads no more than 32 bits of its seed.
        number = random.Random(number).getrandbits(32)
    generator = torch.Generator().manual_seed(number)
    return torch.randperm(count, generator=generator).tolist()


def load_tokenizer(start: Path | str):
    """The model's tokenizer. UserError if it cannot be read."""
    try:
        return AutoTokenizer.from_pretrained(start, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for damaged files
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"cannot load a tokenizer from {start} ({reason}): it needs a tokenizer's files beside "
            "its weights"
        ) from None


def check_vocabulary(tokenizer, model, name: Path | str) -> None:
    """UserError if the tokenizer has tokens that the model does not know."""
    known = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > known:
        raise UserError(
            f"{name} has {len(tokenizer)} tokens in its tokenizer and {known} in its model: use "
            "two that belong together"
        )


def check_same_vocabulary(base, base_name: Path | str, model, name: Path | str) -> None:
    """UserError if a run's start and what became of it differ in their number of tokens."""
    sizes = [m.get_input_embeddings().num_embeddings for m in (base, model)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"{base_name} has {sizes[0]} tokens and {name} {sizes[1]}, so the one did not begin "
            "with the other: put back the model that the run began with"
        )


def make_format(
    method: Method,
    config: Config,
    tokenizer,
    tools: list[Tool],
    toy_language: Callable[[object, list[str]], Format],
) -> Format:
    """How the roles speak: a toy's language if the tokenizer knows it, else a chat template."""
    if "<s2>" in tokenizer.get_vocab():
        return toy_language(tokenizer, [tool.name for tool in tools])
    return ChatFormat(tokenizer, method.words(config, tools), tools)


def usable_tools(config: Config, rank: int, more_tools: Sequence[Tool] = ()) -> list[str]:
    """The names of --tools that are not among `more_tools`; UserError for one that nobody knows.

    Where Python can't be jailed the toy goes on without it; a real run is refused.
    """
    added = [tool.name for tool in more_tools]
    names = list(dict.fromkeys(name for name in config.tools.split(",") if name))
    distilled = getattr(config, "distill", "").split(",")
    for option, given in (("tools", names), ("distill", distilled)):
        known = [*KNOWN, *added]
        unknown = [name for name in given if name and name not in known]
        if unknown:
            raise UserError(
                f"--{option}: unknown tool '{unknown[0]}'; choose from {', '.join(known)}, "
                "separated by commas"
            )
    names = [name for name in names if name not in added]
    if not names and not added:
        raise UserError("--tools is empty: at least one of search, scholar, python is needed")
    reason = python.available() if "python" in names else None
    others = ",".join(name for name in names if name != "python")
    if reason and (config.data != "toy" or not others):
        advice = f"leave it out with --tools {others}" if others else "name others with --tools"
        raise UserError(f"{reason}; {advice}")
    if reason and rank == 0:
        print(f"{reason}; going on without Python and its questions", flush=True)
    return [name for name in names if name != "python" or not reason]


def searches_toy(config: Config) -> bool:
    """Whether search and scholar look into the toy's world."""
    return config.data == "toy" and not config.docs and config.search == "local"


def make_tools(config: Config, split: str, names: list[str]) -> list[Tool]:
    """The tools of --tools. The toy searches the world of `split`; everything else its backend."""
    return [Tool(name, *KNOWN[name], make_call(config, split, name)) for name in names]


def make_call(config: Config, split: str, name: str) -> Callable:
    """The function behind a tool. `split`: whose world the toy's search knows."""
    if name == "python":
        return python.tool
    if searches_toy(config):
        return search.local(world.world(split, config.seed).documents[name], config.top_k)
    docs = config.docs
    if split == "eval" and config.eval_docs:
        docs = config.eval_docs
    return search.make(
        config.search,
        scholar=name == "scholar",
        k=config.top_k,
        docs=docs or None,
        cache=config.cache,
        pages=config.pages,
        passage_words=config.passage_words,
        # A page may fill what is read at once, at about 0.6 words a token.
        page_words=max(1, int(0.6 * config.reading())),
        block=config.block.split(","),
    )


def training_and_held_out(
    config: Config, names: list[str], training: bool
) -> tuple[Callable[[int], Question] | None, list[Question]]:
    """The endless stream of training questions, and the held-out ones.

    Held out are --eval_data, or else questions drawn from --data, whose others are trained on.
    Without training there are only the held-out ones.
    """
    if config.data == "toy":
        # --tools takes tools away and leaves the questions, so an arm shows what it loses. Where
        # Python cannot be jailed, its questions go as well.
        kinds = world.TOOLS
        if "python" not in names and python.available() is not None:
            kinds = ("search", "scholar")
        numbers = range(config.eval_questions)
        held_out = [world.question("eval", config.seed, i, kinds) for i in numbers]
        return lambda i: world.question("train", config.seed, i, kinds), held_out
    if not config.data:
        raise UserError(
            "no questions: name them with --data (a JSONL file, hub:OWNER/REPO/file.jsonl, or a "
            "mix like nq/train:2,own.jsonl:1)"
        )
    limit = config.eval_questions or None
    if not training:
        source = config.eval_data or config.data
        return None, questions.load_questions(source, limit=limit, seed=config.seed)
    loaded, held_out = questions.split(
        config.data, config.eval_data, held_out=limit, seed=config.seed
    )
    if len(loaded) < config.questions:
        raise UserError(
            f"{config.data} leaves {len(loaded)} training questions, fewer than --questions "
            f"{config.questions} a step; give more, or lower --eval_questions or --questions"
        )
    return Questions(loaded, config.seed), held_out
