"""Intervals and calibration."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plumbing.statistics import (
    average_interval,
    calibration_error,
    pass_at,
    sign_test,
    wilson_interval,
)


def test_wilson_interval():
    # Figures of the textbook formula, worked out by hand.
    assert wilson_interval(176, 2154) == pytest.approx((0.0709, 0.094), abs=5e-5)
    assert wilson_interval(0, 0) == (0.0, 1.0)
    low, high = wilson_interval(0, 10)
    assert low == 0.0
    assert high == pytest.approx(0.2775, abs=1e-4)
    for bad in ((-1, 5), (6, 5)):
        with pytest.raises(ValueError):
            wilson_interval(*bad)


@given(st.integers(0, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_contains_the_share(pair):
    correct, total = pair
    low, high = wilson_interval(correct, total)
    if total == 0:
        assert (low, high) == (0, 1)
        return
    assert 0 <= low <= correct / total <= high <= 1
    mirrored_low, mirrored_high = wilson_interval(total - correct, total)
    assert (low, high) == pytest.approx((1 - mirrored_high, 1 - mirrored_low))


def test_wilson_covers_as_often_as_it_says():
    rng = random.Random(0)
    inside = 0
    for _ in range(2000):
        low, high = wilson_interval(sum(rng.random() < 0.3 for _ in range(50)), 50)
        inside += low <= 0.3 <= high
    assert 0.93 < inside / 2000 < 0.97


def test_attempts_that_agree_are_worth_one_a_question_and_independent_ones_all():
    always_agree = [4] * 30 + [0] * 70
    assert average_interval(always_agree, 4) == pytest.approx(wilson_interval(30, 100))
    as_alike_as_can_be = [2] * 100
    assert average_interval(as_alike_as_can_be, 4) == pytest.approx(wilson_interval(200, 400))
    assert average_interval([1] * 30 + [0] * 70, 1) == pytest.approx(wilson_interval(30, 100))
    # Nothing right, or all of it, says nothing about how much attempts depend on each other.
    assert average_interval([0] * 50, 8) == wilson_interval(0, 50)
    assert average_interval([8] * 50, 8) == wilson_interval(50, 50)


attempts_made = st.integers(1, 6).flatmap(
    lambda k: st.tuples(st.lists(st.integers(0, k), min_size=1, max_size=40), st.just(k))
)


@given(attempts_made)
def test_average_interval_lies_between_both_extremes(made):
    right, k = made
    low, high = average_interval(right, k)
    share = sum(right) / (k * len(right))
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1
    narrow = wilson_interval(sum(right), k * len(right))
    wide = wilson_interval(share * len(right), len(right))
    assert wide[0] - 1e-9 <= low <= narrow[0] + 1e-9
    assert narrow[1] - 1e-9 <= high <= wide[1] + 1e-9


def test_average_interval_covers_as_often_as_it_says():
    """Questions differ in how hard they are. As if all attempts were independent: 64 %."""
    rng = random.Random(0)
    inside = 0
    inside_if_independent = 0
    for _ in range(1000):
        hard = [rng.betavariate(0.5, 0.5) for _ in range(50)]
        right = [sum(rng.random() < share for _ in range(8)) for share in hard]
        low, high = average_interval(right, 8)
        inside += low <= 0.5 <= high
        low, high = wilson_interval(sum(right), 400)
        inside_if_independent += low <= 0.5 <= high
    assert 0.93 < inside / 1000 < 0.98
    assert inside_if_independent / 1000 < 0.75


@given(attempts_made, st.data())
def test_pass_at_is_the_mean_over_all_choices_of_attempts(made, data):
    right, k = made
    draws = data.draw(st.integers(1, k))
    shares = []
    for count in right:
        rewards = [1] * count + [0] * (k - count)
        chosen = list(itertools.combinations(rewards, draws))
        shares.append(sum(map(max, chosen)) / len(chosen))
    assert pass_at(right, k, draws) == pytest.approx(sum(shares) / len(right))
    assert pass_at(right, k, 1) == pytest.approx(sum(right) / (k * len(right)))
    assert pass_at(right, k, k) == pytest.approx(sum(count > 0 for count in right) / len(right))


def test_calibration_error():
    assert calibration_error([1.0] * 4, [True] * 4) == 0.0
    assert calibration_error([0.9] * 10, [True] * 5 + [False] * 5) == pytest.approx(0.4)
    # two bins of 2 and one of 3 (what is left over joins the last bin): sorted, (.1 .2) (.3 .4 .9)
    error = calibration_error(
        [0.9, 0.1, 0.3, 0.4, 0.2], [True, False, True, False, False], bin_size=2
    )
    assert error == pytest.approx(((2 * 0.15**2 + 3 * (1.6 / 3 - 2 / 3) ** 2) / 5) ** 0.5)
    # equal confidences must not be sorted by what came out
    assert calibration_error([1.0] * 200, [True, False] * 100) == pytest.approx(0.5)
    for bad in (([], []), ([0.5], []), ([80.0], [True]), ([float("nan")], [True])):
        with pytest.raises(ValueError):
            calibration_error(*bad)


@given(st.integers(0, 6), st.integers(0, 6))
def test_the_sign_test_counts_the_coins_that_fall_as_unevenly(gained, lost):
    uneven = abs(gained - lost)
    coins = list(itertools.product((1, -1), repeat=gained + lost))
    share = sum(abs(sum(coin)) >= uneven for coin in coins) / len(coins)
    assert sign_test(gained, lost) == pytest.approx(share)


def test_the_sign_test_of_known_counts():
    # 2 · (1 + 10) / 2^10, and 1000 of 1000 coins.
    assert sign_test(9, 1) == sign_test(1, 9) == pytest.approx(0.021484375)
    assert sign_test(1000, 0) == pytest.approx(2.0**-999, rel=1e-9, abs=0)
    assert sign_test(0, 0) == 1
    with pytest.raises(ValueError, match="no counts"):
        sign_test(3, -1)
