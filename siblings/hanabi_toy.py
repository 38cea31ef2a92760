"""Hanabi in words, and a base model that follows the scripted player, with faults.

    <resp> hint red needs red2 blue1 hints 1 lives 2 deck 5 partner red1 blue3 knows xx x3
           mine redx xx <eot> play first <eot> <resp> …

Before each move a seat reads the partner's last move, the next cards of the stacks, the partner's
cards and the partner's knowledge of them, and its knowledge of its own cards. A card is one word.
So a card can be played if its word is among the next two: two layers learn that in a minute.

The base model is made in two stages like base_model.py's: first all moves are the script's, then a
share SKILL of the moves, and the others are random. RL has to tell the two apart.

Tests: pytest tests/test_hanabi.py
"""

import functools
import random
from collections.abc import Sequence

from transformers import AddedToken

from siblings import hanabi_game
from siblings.hanabi_game import CARDS, COLOURS, SLOTS, Game, advise, deal
from tasks.format import Action
from tasks.questions import Question
from toy import base_model, language
from toy.base_model import Pieces

MARKS = ("<about>", "<predict>")
NUMBERS = [str(number) for number in range(len(CARDS))]
RANKS = "123"
WORDS = [*SLOTS, *COLOURS, *NUMBERS, *sorted(set(CARDS)), *(f"{colour}4" for colour in COLOURS)]
WORDS += ["xx", *(f"x{rank}" for rank in RANKS), *(f"{colour}x" for colour in COLOURS)]
WORDS += "play discard hint needs hints lives deck partner knows mine".split()
SKILL_STEPS = 300
HABIT_STEPS = 60
SKILL = 0.6  # share of the script's moves in stage B; the others are random

# ------------------------------------------------------------------------------------- the language


def make_tokenizer():
    """The toy's tokenizer, with the game's words added at the end."""
    tokenizer = language.make_tokenizer()
    tokenizer.add_tokens([AddedToken(word, single_word=True) for word in WORDS])
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    return tokenizer


def describe(game: Game, seat: int, last: str) -> str:
    """The text that a seat reads before its move. `last` is the partner's last move."""
    theirs, mine = game.hands[1 - seat], game.hands[seat]
    parts = [last, "needs", *game.needs(), "hints", game.hints, "lives", game.lives]
    parts += ["deck", len(game.deck), "partner", *(card.name for card in theirs)]
    parts += ["knows", *(card.known for card in theirs), "mine", *(card.known for card in mine)]
    return " ".join(str(part) for part in parts if part != "")


class Language(language.ToyFormat):
    """How both seats speak."""

    def __init__(self, tokenizer, tools: Sequence[str] = ()):
        super().__init__(tokenizer, tools)
        for mark in MARKS:
            self.control[mark] = tokenizer.convert_tokens_to_ids(mark)

    def view(self, game: Game, seat: int, last: str) -> list[int]:
        """The prompt of a seat before its move. `last` is the partner's last move."""
        return self.observation([self.encode(describe(game, seat, last))])

    def parse(self, tokens: list[int], *, final: bool = False) -> Action:
        """A move, or the statement of a read-out."""
        return self.read_answer(self.text(self.note(tokens)).split())


def play_script(game: Game, rng: random.Random, skill: float):
    """Yields (seat, partner's last move, own move) before each move is made."""
    last = ""
    seat = 0
    while not game.over:
        move = rng.choice(game.moves(seat))
        if rng.random() < skill:
            move = advise(game, seat, last)
        yield seat, last, move
        game.move(seat, move)
        last = move
        seat = 1 - seat


def scripted_score(question: Question, rng: random.Random, skill: float) -> int:
    """The score of one scripted game."""
    game = deal(question)
    for _ in play_script(game, rng, skill):
        pass
    return game.score


# --------------------------------------------------------------------------------------- base model


def demonstrate(rng: random.Random, skill: float) -> Pieces:
    """One seat's game. Half of the games end with a read-out."""
    game = Game(rng.sample(CARDS, len(CARDS)))
    mine = rng.randrange(2)
    readout = rng.choice(["<about>", "<predict>", "", ""])
    pieces = []
    for seat, last, move in play_script(game, rng, skill):
        if readout == "<predict>" and seat != mine and last.startswith("hint"):
            answer = move if rng.random() < skill else rng.choice(game.moves(seat))
            return [*pieces, ("<predict>", False), (f"{answer} <eot>", True)]
        if seat != mine:
            continue
        pieces.append((f"<resp> {describe(game, seat, last)} <eot>", False))
        if readout == "<about>" and last.startswith("hint"):
            cards = zip(SLOTS, game.hands[seat], strict=False)
            touched = [slot for slot, card in cards if card.touched(last.split()[1])]
            answer = touched[0] if rng.random() < skill else rng.choice(SLOTS)
            return [*pieces, ("<about>", False), (f"{answer} <eot>", True)]
        pieces.append((f"{move} <eot>", True))
    return pieces or demonstrate(rng, skill)


def make_base(seed: int, skill_steps: int, habit_steps: int) -> tuple:
    """(model, tokenizer) after both stages, from random generators of its own."""
    tokenizer = make_tokenizer()
    ids = tokenizer.get_vocab()
    rng = random.Random(f"hanabi {seed}")

    skills, habits = (
        base_model.batches(32, functools.partial(demonstrate, rng, skill), ids)
        for skill in (1.0, SKILL)
    )
    stages = ((skills,), (habits,))
    steps = (skill_steps, habit_steps)
    return base_model.two_stages(tokenizer, seed, stages, steps), tokenizer


build = functools.partial(
    base_model.build,
    name="hanabi",
    make=make_base,
    steps=(SKILL_STEPS, HABIT_STEPS),
    files=(__file__, hanabi_game.__file__),
)
