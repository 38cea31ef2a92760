"""Intervals and calibration."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbing.statistics import calibration_error, wilson_interval


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
