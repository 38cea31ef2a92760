"""Samples change ranks: none is lost, the work is even, and what is even already stays."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.launch import launch
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


def sample(question: int, role: str, tokens: list[int]) -> SimpleNamespace:
    return SimpleNamespace(question_index=question, role=role, tokens=tokens)


@pytest.mark.parametrize(("pack", "count"), [(True, 4 + 2 + 2), (False, 4 + 5 + 2)])
def test_shared_beginnings_are_counted_once_where_they_are_computed_once(pack, count):
    assert exchange.added_tokens([[1, 2, 3, 9, 9], [5, 5], [1, 2, 3, 4]], pack) == count


def exchange_groups() -> None:
    """The work of each of three ranks. The first has six questions of two attempts in two roles.

    The second has none, and the third one, which it keeps; it receives others.
    """
    rank = dist.get_rank()
    questions = [range(6), [], [6]][rank]
    groups = [(question, role) for question in questions for role in ("sys1", "sys2")]
    samples = [sample(*group, [group[0], attempt] * 5) for group in groups for attempt in (7, 8)]
    # Each weight tells its sample.
    weights = [torch.full((10,), float(sum(one.tokens))) for one in samples]
    samples, weights = exchange.even_out(samples, weights, pack=False)
    assert all((weight == sum(one.tokens)).all() for one, weight in zip(samples, weights))
    mine = [(one.question_index, one.role, one.tokens[1]) for one in samples]
    assert all((q, role, 15 - attempt) in mine for q, role, attempt in mine), "groups are whole"
    gathered = [None] * 3
    dist.all_gather_object(gathered, mine)
    assert sorted(map(len, gathered)) == [8, 10, 10]
    every = [(q, role, n) for q in range(7) for role in ("sys1", "sys2") for n in (7, 8)]
    assert sorted(sum(gathered, [])) == every
    split = [q for q in range(6) if mine.count((q, "sys1", 7)) != mine.count((q, "sys2", 7))]
    dist.all_gather_object(gathered, split)
    assert any(gathered), "a question's roles may part"


def test_samples_arrive_with_their_weights_and_groups_stay_whole(tmp_path):
    assert launch(exchange_groups, log=tmp_path / "log", world=3) == 0
