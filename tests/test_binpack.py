"""First-fit decreasing beside the textbook's form, from which the bound of 11/9 follows."""

import pytest
from hypothesis import given
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


@given(cases)
def test_equals_the_textbook(case):
    assert first_fit_decreasing(*case) == textbook(*case)


@pytest.mark.parametrize("sizes, item", [([3, -1], 1), ([11, 2], 0), ([1, 2, 10, 12], 3)])
def test_a_negative_or_oversized_item_is_named(sizes, item):
    with pytest.raises(ValueError, match=f"item {item} "):
        first_fit_decreasing(sizes, 10)
