"""Hanabi: two seats of one model play a game in which each sees only the other's cards.

In LLM-Hanabi (arXiv 2510.04980) language models play it, and a judge scores their statements about
each other's minds: what a hint means (first order), and how the partner will understand it (second
order). Over 14 models the first order correlates with the score (r = 0.76) more than the second
(0.58). We have read the abstract and reviews; its repository is empty. It trains nothing. Our game,
training and read-outs differ, and there is no judge, so this file studies its subject, not its
benchmark.

  the game       is small: siblings/hanabi_game.py. A forbidden move ends it
  the training   is self-play: both seats are one model, and the reward is score / 6. Games of one
                 deck are compared, each seat in a group and a mean of its own. Both seats share the
                 reward, so the two groups have the same advantages
  the read-outs  happen in evaluations, after each hint, outside the game. The hinted seat names the
                 card that the hint is about, the hinting seat the move that will follow. The true
                 card is the only touched one that can be played, if there is just one; the true
                 move is the next one. RL does not train read-outs; the base model knows them

    python -m siblings.hanabi                        metrics: eval_score, eval_first, eval_second
    python -m siblings.hanabi table runs/hanabi runs/two    correlations over runs' evaluations

It does not show that a language model has a theory of mind. The read-outs are habits of a tiny
model, which self-play may improve or destroy. siblings/hanabi_toy.py has the game's words and the
base model. Tests: pytest tests/test_hanabi.py
"""

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
from plumbing.folders import read_lines
from rollout import Context, Env, Method, Sample, Trajectory, Turn
from siblings import hanabi_toy
from siblings.hanabi_game import BEST, CARDS, SEATS, SLOTS, Game, deal, deck
from siblings.solo import NO_TOOL, UNREAD, refuse_others
from tasks.questions import Question
from tools import Tool

# -------------------------------------------------------------------------------------- the episode


@dataclass(kw_only=True)
class Readout(Turn):
    """A seat's statement about the other's mind, and whether it is true (None: nobody can tell)."""

    order: str  # "first" or "second"
    statement: str
    right: bool | None = None


async def episode(env: Env, trajectory: Trajectory) -> None:
    """Both seats move in turn. A forbidden move ends the game."""
    game = deal(trajectory.question)
    async with Context(env, trajectory, SEATS[0]) as one, Context(env, trajectory, SEATS[1]) as two:
        contexts = one, two
        move = ""  # the last one
        turn = 0
        waiting = None  # a second-order read-out, which the next move confirms or refutes
        while not game.over:
            seat = turn % 2
            view = env.chat.view(game, seat, move)
            completion = await contexts[seat].write(view, env.config.move_tokens, turn)
            action = env.chat.parse(completion.tokens)
            contexts[seat].turns.append(Turn(completion.tokens, action))
            move = action.answer
            if waiting:
                waiting.right = waiting.statement == move
            if move not in game.moves(seat):
                contexts[seat].turns[-1].problem = "malformed: a forbidden move"
                break
            game.move(seat, move)
            waiting = None
            if move.startswith("hint") and env.step == "eval" and not game.over:
                waiting = await read_out(env, trajectory, game, contexts, turn, move)
            turn += 1
    one.turns[0].readers.insert(0, two)  # pages show the second seat below the first
    trajectory.answer = str(game.score)
    trajectory.ended = "answer" if game.over else "forbidden move"


async def read_out(env, trajectory, game: Game, contexts, turn: int, hint: str) -> Readout:
    """Asks both seats about a hint, each after all that it has read so far."""
    other = 1 - turn % 2
    hinting, hinted = contexts[turn % 2], contexts[other]
    view = env.chat.view(game, other, hint)
    prompts = {
        "first": (hinted, [*hinted.sample.tokens, *view, env.chat.control["<about>"]]),
        "second": (hinting, [*hinting.sample.tokens, env.chat.control["<predict>"]]),
    }
    readouts = {}
    for order, (context, prompt) in prompts.items():
        async with Context(env, trajectory, context.role) as copy:
            text = await copy.write(prompt, env.config.move_tokens, turn, order == "second")
            action = env.chat.parse(text.tokens)
            statement = action.answer or ""
            readouts[order] = Readout(text.tokens, action, order=order, statement=statement)
            copy.turns.append(readouts[order])
            hinting.turns[-1].readers.append(copy)
    readouts["first"].right = is_about(game, other, hint, readouts["first"].statement)
    return readouts["second"]


def is_about(game: Game, seat: int, hint: str, named: str) -> bool | None:
    """Whether a hint to a seat is about the card in the slot `named`; None if it is ambiguous."""
    cards = zip(SLOTS, game.hands[seat], strict=False)
    slots = [slot for slot, card in cards if card.touched(hint.split()[1]) and game.playable(card)]
    return named == slots[0] if len(slots) == 1 else None


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
    move_tokens: int = option(3, "tokens of one move", heading="the game")

    def longest(self) -> int:
        """Room for a sample: a seat moves at most 12 times, and a view has fewer than 30 tokens."""
        return 364 + 12 * self.move_tokens

    def check(self, training: bool) -> None:
        """Refuses tools and a judge: the score is the reward."""
        super().check(training)
        refuse_others(self, UNREAD | {"grader": "em"} if training else {})


def credit(
    config: HanabiConfig, trajectories: list[Trajectory], step: int
) -> dict[str, list[Sample]]:
    """Compares the games of one deck: each seat has a group and a term of the loss."""
    terms = {}
    for seat in SEATS:
        samples = [sample for trajectory in trajectories for sample in trajectory.samples(seat)]
        mars.set_advantages(config, samples)
        for sample in samples:
            sample.loss_weight = 1
        terms[seat] = [sample for sample in samples if any(sample.mask)]
    return terms


def own_metrics(trajectories: list[Trajectory]) -> dict[str, tuple[float, float]]:
    """name -> (sum, count): the score, and the read-outs that are right."""
    sums, counts = Counter(), Counter()
    for trajectory in trajectories:
        if trajectory.reward is None:
            continue  # no server answered
        sums["score"] += float(trajectory.answer)
        counts["score"] += 1
        for context in trajectory.contexts[len(SEATS) :]:
            turn = context.turns[0]
            if turn.right is not None:
                sums[turn.order] += turn.right
                counts[turn.order] += 1
    return {name: (sums[name], counts[name]) for name in counts}


def grade(question: Question, answer: str) -> float:
    """The score, divided by the highest score."""
    return float(answer) / BEST


# ---------------------------------------------------------------------------------------- the table


def table(folders: list[str]) -> None:
    """Prints scores of scripted players, and correlations over the evaluations of some runs."""
    decks = [deck("eval", 0, i) for i in range(1000)]
    for name, skill in (("random", 0.0), ("rule-based", 1.0)):
        scores = [hanabi_toy.scripted_score(d, random.Random(d.id), skill) for d in decks]
        error = 1.96 * statistics.stdev(scores) / len(scores) ** 0.5
        print(f"{name:12} {statistics.mean(scores):.2f} ± {error:.2f} of {BEST}")
    rows = []
    for folder in dict.fromkeys(Path(name).resolve() for name in folders):  # each run counts once
        for values in read_lines(folder / "metrics.jsonl"):
            if "eval_first" in values and "eval_second" in values:
                rows.append([values[f"eval_{name}"] for name in ("score", "first", "second")])
    for row in rows:
        print("score {:.2f}  first {:.2f}  second {:.2f}".format(*row))
    for column, name in ((1, "first"), (2, "second")):
        r = statistics.correlation([row[0] for row in rows], [row[column] for row in rows])
        error = 1.96 / math.sqrt(len(rows) - 3)  # of artanh r, if the evaluations were independent
        low, high = (math.tanh(math.atanh(r) + sign * error) for sign in (-1, 1))
        print(f"score and {name}: r = {r:.2f} ({low:.2f} to {high:.2f}), n = {len(rows)}")


# -------------------------------------------------------------------------------------- the command


def words(config: HanabiConfig, tools: list[Tool]):
    """Refuses chat models."""
    raise UserError("Hanabi is played in its toy's language: leave --model out")


def fits(config: HanabiConfig, chat, question: Question) -> None:
    """Raises UserError if a question is no deck. All decks fit."""
    if sorted(question.text.split()) != sorted(CARDS):
        raise UserError(f"a question of Hanabi is one order of these cards: {' '.join(CARDS)}")


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
    """The stream of training decks, and the held-out decks."""
    if config.data != "toy" or config.move_tokens < 1:
        raise UserError(
            "leave --data out, since decks are made here, and give --move_tokens at least 1"
        )
    held_out = [deck("eval", config.seed, i) for i in range(config.eval_questions)]
    return lambda i: deck("train", config.seed, i), held_out


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    if arguments[:1] == ["table"]:
        try:
            table(arguments[1:])
        except (UserError, ArithmeticError, ValueError) as error:
            return fail(f"name folders of runs with at least four evaluations ({error})")
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
