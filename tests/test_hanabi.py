"""Hanabi: the rules by properties, nobody sees its own cards, groups by seat, read-outs, a run."""

import json
import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_mars import metrics, records_of

from rollout import Sample, Trajectory
from siblings import hanabi, hanabi_toy
from siblings.hanabi import HanabiConfig
from siblings.hanabi_game import BEST, CARDS, HINTS, LIVES, Card, Game, deck
from siblings.hanabi_toy import play_script


@given(st.integers(0, 10**9), st.sampled_from([0.0, 0.5, 1.0]))
def test_no_card_is_lost_or_read_by_its_holder_and_a_game_ends_in_time(seed, skill):
    """After the last card is drawn each seat moves once more; a seat moves 12 times at most.

    A seat's text is the same whatever it holds, as long as it was told the same.
    """
    spent = 0  # cards that left a hand
    moves = 0
    empty = None  # the moves until the last card was drawn
    rng = random.Random(seed)
    game = Game(rng.sample(CARDS, len(CARDS)))
    for seat, told, move in play_script(game, rng, skill):
        held = len(game.deck) + sum(map(len, game.hands))
        assert held + spent == len(CARDS) == 12
        assert 0 <= game.hints <= HINTS and 0 < game.lives <= LIVES
        assert all(0 <= height <= 3 for height in game.stacks.values())
        spent += not move.startswith("hint")
        if not game.deck and empty is None:
            empty = moves
        moves += 1
        text = hanabi_toy.describe(game, seat, told)
        for card in game.hands[seat]:
            name = card.name
            card.name = random.Random(seed).choice([other for other in CARDS if other != name])
            assert hanabi_toy.describe(game, seat, told) == text
            card.name = name
    assert game.over and moves <= 24
    if empty is not None and game.lives and game.score < BEST:
        assert moves - empty == 2
    assert game.score == (sum(game.stacks.values()) if game.lives else 0)


def position(hands: str, deck: str = "red1 red1 red1", **fields) -> Game:
    """A game with these hands, the first seat's first, and no more cards but `deck`."""
    game = Game(CARDS.copy())
    game.deck = deck.split()
    game.hands = tuple([Card(name) for name in hand.split()] for hand in hands.split(" | "))
    for name, value in fields.items():
        setattr(game, name, value)
    return game


def test_a_hint_marks_every_card_that_it_is_about_and_no_other():
    game = position("red2 blue3 | red1 red3")
    game.move(0, "hint red")
    assert [card.known for card in game.hands[1]] == ["redx", "redx"]
    game.move(1, "hint 3")
    assert [card.known for card in game.hands[0]] == ["xx", "x3"]
    game.move(0, "hint 1")
    assert [card.known for card in game.hands[1]] == ["red1", "redx"]
    assert game.hints == 0 and not any("hint" in move for move in game.moves(1))


def test_plays_and_discards_change_stacks_lives_and_hints():
    game = position("red1 blue2 | red2 blue3", hints=1)
    game.move(0, "play first")
    assert game.stacks["red"] == 1 and game.lives == LIVES and game.needs() == ["red2", "blue1"]
    game.move(1, "play second")  # blue3 is too early
    assert game.lives == LIVES - 1 and game.score == 1
    game.move(0, "discard first")  # blue2 has moved to the front
    assert game.hints == 2
    game.move(1, "play second")  # a second red1
    assert game.over and game.score == 0, "who loses both lives has nothing"
    won = position("red3 blue3 | red1 red1", stacks={"red": 2, "blue": 3})
    won.move(0, "play first")
    assert won.over and won.score == BEST


def test_a_run_trains_both_seats_and_takes_read_outs_in_evaluations_only(tmp_path, monkeypatch):
    """Two steps on a base model that has hardly learned the game."""
    line = ["--cache", str(tmp_path), "--runs", str(tmp_path), "--name", "game"]
    line += "--steps 2 --questions 4 --group 2 --eval_questions 10 --eval_every 2".split()
    monkeypatch.setitem(hanabi_toy.build.keywords, "steps", (12, 2))
    assert hanabi.main(line) == 0
    run = tmp_path / "game"
    lines = metrics(run)
    assert len(lines) == 2
    for line in lines:
        assert line["mismatch_kl"] < 1e-9
        assert line["pages_in_use"] == 0
        assert line["eval_score"] == pytest.approx(6 * line["eval_accuracy"])
        assert line["seat0_tokens"] > 0 and line["seat1_tokens"] > 0
    records = records_of(run, 0) + records_of(run, 2)
    for split in ("train", "eval"):
        texts = [json.dumps(record) for record in records if record["split"] == split]
        with_read_outs = [text for text in texts if "<about>" in text and "<predict>" in text]
        assert bool(with_read_outs) == (split == "eval")


def test_a_table_counts_a_run_once_and_skips_what_is_no_record(tmp_path, capsys):
    numbers = [(1, 0.2, 0.1), (2, 0.4, 0.5), (3, 0.3, 0.2), (4, 0.8, 0.7)]
    lines = [dict(zip(("eval_score", "eval_first", "eval_second"), row)) for row in numbers]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '3\n{"eval_sc')
    assert hanabi.main(["table", str(tmp_path), f"{tmp_path}/"]) == 0
    assert "n = 4" in capsys.readouterr().out


def test_credit_compares_games_of_one_deck_and_trains_no_empty_seat():
    def game(index, attempt, reward, moved=True):
        trajectory = Trajectory(deck("t", 0, index), index, attempt, reward=reward)
        for seat in hanabi.SEATS:
            mask = [False, moved or seat == "seat0"]
            sample = Sample(seat, index, attempt, [1, 2], mask, [0.0, -1.0], reward=reward)
            trajectory.contexts.append(SimpleNamespace(sample=sample))
        return trajectory

    games = [game(0, 0, 0.0), game(0, 1, 1.0), game(1, 0, 0.5), game(1, 1, 0.5, moved=False)]
    terms = hanabi.credit(HanabiConfig(), games, step=0)
    assert [sample.advantage for sample in terms["seat0"]] == [-1, 1, 0, 0]
    assert [sample.role for sample in terms["seat1"]] == ["seat1"] * 3
    assert all(sample.loss_weight == 1 for samples in terms.values() for sample in samples)


HINTS_ABOUT = [
    ("red1 blue1", "hint red", [True, False]),  # one touched card can be played
    ("red2 red1", "hint red", [False, True]),
    ("red1 blue1", "hint 1", [None, None]),  # both can
    ("red2 blue3", "hint red", [None, None]),  # none can
]


@pytest.mark.parametrize("hand, hint, about", HINTS_ABOUT)
def test_what_a_hint_is_about(hand, hint, about):
    game = position(f"blue3 blue2 | {hand}")
    assert [hanabi.is_about(game, 1, hint, place) for place in ("first", "second")] == about
