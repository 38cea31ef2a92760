"""Hanabi: two seats of one model play a game in which each sees the other's cards only.

LLM-Hanabi (arXiv 2510.04980) lets language models play it and has a judge score what they say of
each other's minds: what a hint means (first order), and what the partner will make of it (second
order). The first goes along with the score more than the second, r = 0.76 and 0.58 over 14 models.
We read abstract and reviews; its repository is empty. So this is its subject, not its benchmark:
nothing was trained there, and here is no judge. Ours are

  the game       a small one: siblings/hanabi_game.py. A move that is not allowed ends it
  the training   self-play: both seats are one model, the reward is score / 6, and an advantage
                 compares games of one deck, each seat in a group and a mean of its own. Since both
                 seats share the reward, the two groups have the same advantages
  the read-outs  in evaluations, after each hint, beside the game: the hinted seat names the card
                 that the hint is about, and the hinting seat the move that will follow. The truth
                 is the program's: the touched card, if just one of the touched can be played, and
                 the move that then came. RL trains neither; the base model has seen both

    python -m siblings.hanabi                        metrics: eval_score, eval_first, eval_second
    python -m siblings.hanabi table runs/hanabi runs/two    correlations over runs' evaluations

What it does not show: that a language model has a theory of mind. The read-outs are habits of a
tiny model, which self-play may improve or wear away. The game's words and the base model:
siblings/hanabi_toy.py. Tests: pytest tests/test_hanabi.py
"""

import json
import math
import random
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import mars
import train
from config import Config, UserError, fail, option
from rollout import Context, Env, Method, Sample, Trajectory, Turn
from siblings import hanabi_toy
from siblings.hanabi_game import BEST, CARDS, SEATS, SLOTS, Game, deal, deck
from siblings.solo import NO_TOOL
from tasks.questions import Question
from tools import Tool

# -------------------------------------------------------------------------------------- the episode


@dataclass(kw_only=True)
class Readout(Turn):
    """What a seat says of the other's mind, and whether it is so; None: there is no truth."""

    order: str  # "first" or "second"
    said: str
    right: bool | None = None


async def episode(env: Env, trajectory: Trajectory) -> None:
    """Both seats move in turn. A move that is not allowed ends the game."""
    game = deal(trajectory.question)
    async with Context(env, trajectory, SEATS[0]) as one, Context(env, trajectory, SEATS[1]) as two:
        contexts = one, two
        move = ""  # the last one
        turn = 0
        waiting = None  # a second-order read-out whose truth is the next move
        while not game.over:
            seat = turn % 2
            given = env.chat.view(game, seat, move)
            written = await contexts[seat].write(given, env.config.move_tokens, turn)
            action = env.chat.parse(written.tokens)
            contexts[seat].turns.append(Turn(written.tokens, action))
            move = action.answer
            if waiting:
                waiting.right = waiting.said == move
            if move not in game.moves(seat):
                contexts[seat].turns[-1].problem = "malformed: not a move that is allowed"
                break
            game.move(seat, move)
            waiting = None
            if move.startswith("hint") and env.step == "eval" and not game.over:
                waiting = await read_out(env, trajectory, game, contexts, turn, move)
            turn += 1
    one.turns[0].readers.insert(0, two)  # on pages the second seat stands below the first
    trajectory.answer = str(game.score)
    trajectory.ended = "answer" if game.over else "no answer"


async def read_out(env, trajectory, game: Game, contexts, turn: int, hint: str) -> Readout:
    """Asks both seats about a hint, each behind what it has read so far."""
    other = 1 - turn % 2
    hinting, hinted = contexts[turn % 2], contexts[other]
    view = env.chat.view(game, other, hint)
    asked = {
        "first": (hinted, [*hinted.sample.tokens, *view, env.chat.control["<about>"]]),
        "second": (hinting, [*hinting.sample.tokens, env.chat.control["<predict>"]]),
    }
    said = {}
    for order, (asking, given) in asked.items():
        async with Context(env, trajectory, asking.role) as beside:
            written = await beside.write(given, env.config.move_tokens, turn, order == "second")
            action = env.chat.parse(written.tokens)
            said[order] = Readout(written.tokens, action, order=order, said=action.answer or "")
            beside.turns.append(said[order])
            hinting.turns[-1].readers.append(beside)
    said["first"].right = is_about(game, other, hint, said["first"].said)
    return said["second"]


def is_about(game: Game, seat: int, hint: str, said: str) -> bool | None:
    """Whether a hint to a seat is about the card `said`; None if the hint does not tell."""
    cards = zip(SLOTS, game.hands[seat], strict=False)
    meant = [slot for slot, card in cards if card.touched(hint.split()[1]) and game.playable(card)]
    return said == meant[0] if len(meant) == 1 else None


# ------------------------------------------------------------------------------- credit and metrics


@dataclass
class HanabiConfig(Config):
    """Options with defaults for this game."""

    steps: int = 60
    questions: int = option(16, "deals a step")
    group: int = option(8, "games with each deal")
    eval_questions: int = option(200, "held-out deals")
    eval_every: int = 10
    tools: str = ""  # nobody calls one
    move_tokens: int = option(3, "of one move", heading="the game")

    def longest(self) -> int:
        """Tokens of the longest sample: a seat moves at most 12 times."""
        return 364 + 12 * self.move_tokens


def credit(
    config: HanabiConfig, trajectories: list[Trajectory], step: int
) -> dict[str, list[Sample]]:
    """Games of one deck are compared, a group and a term of the loss for each seat."""
    terms = {}
    for seat in SEATS:
        samples = [sample for trajectory in trajectories for sample in trajectory.samples(seat)]
        mars.set_advantages(config, samples)
        for sample in samples:
            sample.loss_weight = 1
        terms[seat] = [sample for sample in samples if any(sample.mask)]
    return terms


def own_metrics(trajectories: list[Trajectory]) -> dict[str, tuple[float, float]]:
    """Mean score, and how often both read-outs are right."""
    part = Counter()
    whole = Counter()
    played = [one for one in trajectories if one.reward is not None]  # the servers answered
    for trajectory in played:
        part["score"] += float(trajectory.answer)
        whole["score"] += 1
        for context in trajectory.contexts[len(SEATS) :]:
            turn = context.turns[0]
            if turn.right is not None:
                part[turn.order] += turn.right
                whole[turn.order] += 1
    return {name: (part[name], whole[name]) for name in whole}


def grade(question: Question, answer: str) -> float:
    """The share of the highest score."""
    return float(answer) / BEST


# ---------------------------------------------------------------------------------------- the table


def table(folders: list[str]) -> None:
    """Scores of scripted players, and correlations over all evaluations of some runs."""
    decks = [deck("eval", 0, i) for i in range(1000)]
    for name, skill in (("random", 0.0), ("rule-based", 1.0)):
        scores = [hanabi_toy.scripted_score(d, random.Random(d.id), skill) for d in decks]
        error = 1.96 * statistics.stdev(scores) / len(scores) ** 0.5
        print(f"{name:12} {statistics.mean(scores):.2f} ± {error:.2f} of {BEST}")
    rows = []
    for folder in folders:
        for line in (Path(folder) / "metrics.jsonl").read_text().splitlines():
            values = json.loads(line)
            if "eval_first" in values and "eval_second" in values:
                rows.append([values[f"eval_{name}"] for name in ("score", "first", "second")])
    for row in rows:
        print("score {:.2f}  first {:.2f}  second {:.2f}".format(*row))
    for column, name in ((1, "first"), (2, "second")):
        r = statistics.correlation([row[0] for row in rows], [row[column] for row in rows])
        error = 1.96 / math.sqrt(len(rows) - 3)  # of artanh r, were the evaluations independent
        low, high = (math.tanh(math.atanh(r) + sign * error) for sign in (-1, 1))
        print(f"score and {name}: r = {r:.2f} ({low:.2f} to {high:.2f}), n = {len(rows)}")


# -------------------------------------------------------------------------------------- the command


def words(config: HanabiConfig, tools: list[Tool]):
    """There are none for chat models."""
    raise UserError("Hanabi is played in its toy's language: leave --model out")


def fits(config: HanabiConfig, chat, question: Question) -> None:
    """UserError if a question is no deck; every deck leaves room."""
    if sorted(question.text.split()) != sorted(CARDS):
        raise UserError(f"a question of Hanabi is a deck in some order: {' '.join(CARDS)}")


METHOD = Method(
    name="hanabi",
    roles={"seat0": "Seat 0", "seat1": "Seat 1"},
    config=HanabiConfig,
    episode=episode,
    credit=credit,
    words=words,
    fits=fits,
    metrics=own_metrics,
)


def questions(config: HanabiConfig, tools: list[str], training: bool) -> tuple:
    """Decks to train on, and decks that are held out."""
    if config.data != "toy" or config.move_tokens < 1:
        raise UserError("decks are made here and a move takes tokens: mend --data or --move_tokens")
    held_out = [deck("eval", config.seed, i) for i in range(config.eval_questions)]
    return lambda i: deck("train", config.seed, i), held_out


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    if arguments[:1] == ["table"]:
        try:
            table(arguments[1:])
        except (OSError, ArithmeticError, ValueError) as error:
            return fail(UserError(f"name folders of runs with four evaluations or more ({error})"))
        return 0
    return train.main(
        METHOD,
        arguments,
        __doc__,
        base_model=hanabi_toy.build,
        language=hanabi_toy.Language,
        questions=questions,
        grade=grade,
        more_tools=[NO_TOOL],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
