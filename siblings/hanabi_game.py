"""A small Hanabi: the rules, and a scripted player.

There are two colours with the ranks 1 (three cards), 2 (two) and 3 (one), hands of two cards, three
hints and two lives. The score is the number of cards in the stacks, at most 6, or 0 if both lives
are lost. Unlike in the official rules, cards may be discarded while all hints are left. The
scripted player takes a hint as an order to play, and does not count the cards that are left.
Tests: pytest tests/test_hanabi.py
"""

import random
from dataclasses import dataclass, field

from tasks.questions import Question

COLOURS = ("red", "blue")
COPIES = {1: 3, 2: 2, 3: 1}  # cards of each rank in a colour
CARDS = [f"{colour}{rank}" for colour in COLOURS for rank, n in COPIES.items() for _ in range(n)]
BEST = len(COLOURS) * len(COPIES)  # the highest score
HINTS = 3
LIVES = 2
SLOTS = ("first", "second")
SEATS = ("seat0", "seat1")


@dataclass
class Card:
    """A card in a hand, and its holder's knowledge of it: "x" is unknown."""

    name: str
    colour: str = "x"
    rank: str = "x"

    @property
    def clues(self) -> tuple[str, str]:
        """Its rank and its colour: a hint names one of them."""
        return self.name[-1], self.name[:-1]

    def touched(self, clue: str) -> bool:
        """Whether a hint is about this card."""
        return clue in self.clues

    @property
    def known(self) -> str:
        """The card as its holder knows it, such as red1, redx, x1, xx."""
        return self.colour + self.rank


@dataclass
class Game:
    """The state of a game. Moves are "play first", "discard second", "hint red", "hint 1", …"""

    deck: list[str]  # drawn from its end
    hands: tuple[list[Card], list[Card]] = ()
    stacks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLOURS, 0))
    hints: int = HINTS
    lives: int = LIVES
    turns_left: int | None = None  # counted once the deck is empty

    def __post_init__(self):
        self.hands = tuple([Card(self.deck.pop()) for _ in SLOTS] for _ in SEATS)

    @property
    def over(self) -> bool:
        """Whether the game has ended."""
        return not self.lives or self.turns_left == 0 or sum(self.stacks.values()) == BEST

    @property
    def score(self) -> int:
        """Cards in the stacks; 0 when both lives are lost."""
        return sum(self.stacks.values()) if self.lives else 0

    def needs(self) -> list[str]:
        """The next card of each stack; the colour and 4 if the stack is complete."""
        return [f"{colour}{height + 1}" for colour, height in self.stacks.items()]

    def playable(self, card: Card) -> bool:
        """Whether the card can go on its stack."""
        return card.name in self.needs()

    def moves(self, seat: int) -> list[str]:
        """The moves that are allowed to a seat."""
        slots = SLOTS[: len(self.hands[seat])]
        moves = [f"{act} {slot}" for act in ("play", "discard") for slot in slots]
        if self.hints:
            clues = [clue for card in self.hands[1 - seat] for clue in card.clues[::-1]]
            moves += [f"hint {clue}" for clue in dict.fromkeys(clues)]
        return moves

    def move(self, seat: int, move: str) -> None:
        """Plays one of `moves`."""
        act, target = move.split()
        if self.turns_left is not None:
            self.turns_left -= 1
        if act == "hint":
            self.hints -= 1
            for card in self.hands[1 - seat]:
                if card.touched(target):
                    if target in COLOURS:
                        card.colour = target
                    else:
                        card.rank = target
            return
        card = self.hands[seat].pop(SLOTS.index(target))
        if act == "discard":
            self.hints = min(HINTS, self.hints + 1)
        elif self.playable(card):
            self.stacks[card.name[:-1]] += 1
        else:
            self.lives -= 1
        if self.deck:
            self.hands[seat].append(Card(self.deck.pop()))
            if not self.deck:
                self.turns_left = len(SEATS)  # one more turn for each seat


def deal(question: Question) -> Game:
    """The game of a question, whose text is the order of the deck."""
    return Game(question.text.split())


def deck(split: str, seed: int, index: int) -> Question:
    """Deck `index` of a split's endless stream."""
    cards = random.Random(f"deck {split} {seed} {index}").sample(CARDS, len(CARDS))
    return Question(f"{split}-{seed}-{index}", " ".join(cards), (str(BEST),), "hanabi")


def could_be_played(game: Game, card: Card) -> bool:
    """Whether the holder's knowledge allows that a stack needs this card."""
    return any(
        card.colour in ("x", need[:-1]) and card.rank in ("x", need[-1]) for need in game.needs()
    )


def advise(game: Game, seat: int, last: str) -> str:
    """The scripted player's move. `last` is the partner's last move."""
    mine, theirs = game.hands[seat], game.hands[1 - seat]
    clue = last.removeprefix("hint ") if last.startswith("hint") else None
    for slot, card in zip(SLOTS, mine, strict=False):
        known = "x" not in card.known and game.playable(card)
        if known or (clue and card.touched(clue) and could_be_played(game, card)):
            return f"play {slot}"
    if game.hints:
        for card in theirs:
            others = [other for other in theirs if other is not card]
            clear = [c for c in card.clues if not any(other.touched(c) for other in others)]
            if game.playable(card) and clear and "x" in card.known:
                return f"hint {clear[0]}"
    return f"discard {SLOTS[min(range(len(mine)), key=lambda i: mine[i].known != 'xx')]}"
