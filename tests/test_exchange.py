"""Samples change ranks: the work is even, and what is even already stays.

That none is lost, and each keeps its weights: tests/test_policy.py.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import exchange

SIZES = st.lists(st.dictionaries(st.integers(0, 9), st.integers(1, 1000)), min_size=1, max_size=8)


@given(SIZES)
def test_groups_move_until_no_rank_has_more_than_the_mean_plus_one_group(sizes):
    loads = [sum(own.values()) for own in sizes]
    moves = list(exchange.plan_moves(sizes))
    moved = {(group, source) for group, source, _ in moves}
    assert len(moved) == len(moves), "no group moves twice"
    for group, source, target in moves:
        assert source != target
        loads[source] -= sizes[source][group]
        loads[target] += sizes[source][group]
    largest = max((size for own in sizes for size in own.values()), default=0)
    assert max(loads) <= sum(loads) / len(sizes) + largest


@given(st.lists(st.integers(1, 1000)), st.integers(1, 8))
def test_even_work_stays_where_it_is(groups, ranks):
    assert not list(exchange.plan_moves([dict(enumerate(groups))] * ranks))


def test_a_rank_with_more_than_the_mean_gives_groups_away_unless_no_rank_has_less():
    assert list(exchange.plan_moves([{"a": 3, "b": 2, "c": 5}, {}])) == [("a", 0, 1), ("b", 0, 1)]
    assert not list(exchange.plan_moves([{"b": 4}, {"a": 6}]))


@pytest.mark.parametrize(("pack", "count"), [(True, 4 + 2 + 2), (False, 4 + 5 + 2)])
def test_shared_beginnings_are_counted_once_where_they_are_computed_once(pack, count):
    assert exchange.added_tokens([[1, 2, 3, 9, 9], [5, 5], [1, 2, 3, 4]], pack) == count
