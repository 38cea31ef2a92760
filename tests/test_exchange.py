"""Samples change ranks: none is lost, the work is even, and what is even already stays."""

import textwrap
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers.launch import launch
from hypothesis import given
from hypothesis import strategies as st

from config import UserError
from plumbing import outside
from trainer import exchange

SIZES = st.lists(st.dictionaries(st.integers(0, 9), st.integers(1, 1000)), min_size=1, max_size=8)


@given(SIZES)
def test_lots_move_until_no_rank_has_more_than_the_mean_plus_one_lot(sizes):
    loads = [sum(own.values()) for own in sizes]
    moved = list(exchange.moves(sizes))
    assert len({(lot, source) for lot, source, _ in moved}) == len(moved), "no lot moves twice"
    for lot, source, target in moved:
        assert source != target
        loads[source] -= sizes[source][lot]
        loads[target] += sizes[source][lot]
    largest = max((size for own in sizes for size in own.values()), default=0)
    assert max(loads) <= sum(loads) / len(sizes) + largest


@given(st.lists(st.integers(1, 1000)), st.integers(1, 8))
def test_even_work_stays_where_it_is(lots, ranks):
    assert not list(exchange.moves([dict(enumerate(lots))] * ranks))


def test_the_only_rank_with_work_gives_half_away():
    assert list(exchange.moves([{"a": 3, "b": 2, "c": 5}, {}])) == [("a", 0, 1), ("b", 0, 1)]


def test_a_lot_above_the_mean_stays_if_no_rank_has_less():
    assert not list(exchange.moves([{"b": 4}, {"a": 6}]))


def sample(question: int, role: str, tokens: list[int]) -> SimpleNamespace:
    return SimpleNamespace(question_index=question, role=role, tokens=tokens)


@pytest.mark.parametrize(("pack", "count"), [(True, 4 + 2), (False, 4 + 5)])
def test_shared_beginnings_are_counted_once_where_they_are_computed_once(pack, count):
    assert exchange.added_tokens([[1, 2, 3, 9, 9], [1, 2, 3, 4]], pack) == count


RANKS = """
    import torch
    import torch.distributed as dist
    from processes import leave
    from test_exchange import sample
    from trainer import even_out

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Questions of two attempts in two roles: six on the first of three ranks, none on the second,
    # one on the third, which keeps it and receives others.
    questions = [range(6), [], [6]][rank]
    lots = [(question, role) for question in questions for role in ("sys1", "sys2")]
    samples = [sample(*lot, [lot[0], attempt] * 5) for lot in lots for attempt in (7, 8)]
    # Each weight tells its sample.
    weights = [torch.full((10,), float(sum(one.tokens))) for one in samples]
    samples, weights = even_out(samples, weights, pack=False)
    assert all((weight == sum(one.tokens)).all() for one, weight in zip(samples, weights))
    mine = [(one.question_index, one.role, one.tokens[1]) for one in samples]
    assert all((q, role, 15 - attempt) in mine for q, role, attempt in mine), "lots are whole"
    gathered = [None] * 3
    dist.all_gather_object(gathered, mine)
    assert sorted(map(len, gathered)) == [8, 10, 10]
    every = [(q, role, n) for q in range(7) for role in ("sys1", "sys2") for n in (7, 8)]
    assert sorted(sum(gathered, [])) == every
    split = [q for q in range(6) if mine.count((q, "sys1", 7)) != mine.count((q, "sys2", 7))]
    dist.all_gather_object(gathered, split)
    assert any(gathered), "a question's roles may part"
    leave(7)
"""


def test_samples_arrive_with_their_weights_and_lots_stay_whole(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(RANKS))
    assert launch(script, log=tmp_path / "log", world=3) == 7


def test_on_gpus_objects_go_by_way_of_the_cpu(monkeypatch):
    """Samples would take the memory that the plan leaves to the pool. And NCCL opens at once."""
    gpu = outside.Machine(torch.device("cuda", 0), rank=0, ranks=8, bf16=True)
    monkeypatch.setattr(outside, "place", lambda config: gpu)
    monkeypatch.setattr(outside.sys, "excepthook", None)
    calls = Mock()
    monkeypatch.setattr(outside, "dist", calls)
    monkeypatch.setattr(outside.torch, "zeros", Mock())
    calls.is_initialized.return_value = False
    outside.join(SimpleNamespace())
    assert calls.init_process_group.call_args.args == ("cpu:gloo,cuda:nccl",)
    calls.all_reduce.assert_called_once()


def test_machines_that_cannot_reach_each_other_are_one_sentence(monkeypatch):
    two = outside.Machine(torch.device("cpu"), rank=0, ranks=2, bf16=False)
    monkeypatch.setattr(outside, "place", lambda config: two)
    monkeypatch.setattr(outside.sys, "excepthook", None)
    begin = Mock(side_effect=RuntimeError("Gloo connectFullMesh failed\nat a line"))
    monkeypatch.setattr(outside.dist, "init_process_group", begin)
    with pytest.raises(UserError, match=r"connectFullMesh failed\).*GLOO_SOCKET_IFNAME"):
        outside.join(SimpleNamespace())
