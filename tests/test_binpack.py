"""First-fit decreasing: laws, the textbook's form as reference, the 11/9 bound.

The laws are checked by hypothesis, the bound against exact search.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from binpack import first_fit_decreasing

cases = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(0, capacity), max_size=40), st.just(capacity))
)


def textbook(sizes, capacity):
    """First-fit decreasing as it is written in books: scan all bins for each item."""
    bins = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        for bin in bins:
            if sum(sizes[i] for i in bin) + sizes[index] <= capacity:
                bin.append(index)
                break
        else:
            bins.append([index])
    return bins


def fewest_bins(sizes, capacity, rooms=()):
    """Exact: puts the first item into every bin that it fits, and into a new one."""
    if not sizes:
        return len(rooms)
    size, *later = sizes
    counts = [fewest_bins(later, capacity, (*rooms, capacity - size))]
    for place, room in enumerate(rooms):
        if room >= size:
            left = (*rooms[:place], room - size, *rooms[place + 1 :])
            counts.append(fewest_bins(later, capacity, left))
    return min(counts)


@given(cases)
def test_equals_the_textbook(case):
    assert first_fit_decreasing(*case) == textbook(*case)


@settings(max_examples=60)
@given(
    st.integers(4, 30).flatmap(
        lambda c: st.tuples(st.lists(st.integers(1, c), max_size=7), st.just(c))
    )
)
def test_never_more_than_11_9_of_the_fewest_plus_6_9(case):
    assert 9 * len(first_fit_decreasing(*case)) <= 11 * fewest_bins(*case) + 6


@pytest.mark.parametrize("sizes, item", [([3, -1], 1), ([11, 2], 0), ([1, 2, 10, 12], 3)])
def test_a_negative_or_oversized_item_is_named(sizes, item):
    with pytest.raises(ValueError, match=f"item {item} "):
        first_fit_decreasing(sizes, 10)
