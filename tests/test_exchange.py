"""Samples change ranks: none is lost, the work is even, and what is even already stays."""

import textwrap
from types import SimpleNamespace
from unittest.mock import Mock

import torch
from helpers.launch import launch
from hypothesis import given
from hypothesis import strategies as st

from plumbing import outside
from trainer import exchange

SIZES = st.lists(st.dictionaries(st.integers(0, 9), st.integers(1, 1000)), min_size=1, max_size=8)


@given(SIZES)
def test_lots_move_until_no_rank_has_more_than_the_mean_and_one_lot(sizes):
    loads = [sum(own.values()) for own in sizes]
    moved = list(exchange.moves(sizes))
    assert len({(key, source) for key, source, _ in moved}) == len(moved)
    for key, source, target in moved:
        assert source != target
        loads[source] -= sizes[source][key]
        loads[target] += sizes[source][key]
    largest = max((size for own in sizes for size in own.values()), default=0)
    assert sum(loads) == sum(sum(own.values()) for own in sizes)
    assert max(loads) <= sum(loads) / len(sizes) + largest


@given(st.lists(st.integers(1, 1000)), st.integers(1, 8))
def test_even_work_stays_where_it_is(lots, ranks):
    assert not list(exchange.moves([dict(enumerate(lots))] * ranks))


def test_one_rank_left_with_everything_keeps_half():
    halves = {"system 2's": 3, "its readers'": 2, "another's": 5}
    assert list(exchange.moves([halves, {}])) == [("system 2's", 0, 1), ("its readers'", 0, 1)]


def sample(question: int, tokens: list[int]) -> SimpleNamespace:
    return SimpleNamespace(question_index=question, role="sys1", tokens=tokens)


def test_shared_beginnings_are_counted_once():
    lot = [(sample(0, [1, 2, 3, 4]), None), (sample(0, [1, 2, 3, 9, 9]), None)]
    assert exchange.added_tokens(lot) == 6


RANKS = """
    import torch
    import torch.distributed as dist
    from processes import leave
    from test_exchange import sample
    from trainer import exchange

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Six questions of two attempts on the first of three ranks, none on the others.
    questions = range(6) if rank == 0 else []
    samples = [sample(q, [q, attempt] * 5) for q in questions for attempt in (7, 8)]
    weights = [torch.full((10,), float(sum(one.tokens))) for one in samples]
    samples, weights = exchange.even_out(samples, weights)
    assert all((weight == sum(one.tokens)).all() for one, weight in zip(samples, weights))
    mine = [(one.question_index, one.tokens[1]) for one in samples]
    gathered = [None] * 3
    dist.all_gather_object(gathered, mine)
    assert [len(got) for got in gathered] == [4, 4, 4]
    assert sorted(sum(gathered, [])) == [(q, attempt) for q in range(6) for attempt in (7, 8)]
    assert all(mine.count((q, 7)) == mine.count((q, 8)) for q in range(6))
    leave(7)
"""


def test_samples_arrive_with_their_weights_and_questions_stay_whole(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(RANKS))
    assert launch(script, log=tmp_path / "log", world=3) == 7


def test_on_gpus_objects_go_by_way_of_the_cpu(monkeypatch):
    """Rollouts and samples would take the memory that the plan leaves to the pool."""
    gpu = outside.Machine(torch.device("cuda", 0), rank=0, ranks=8, bf16=True)
    monkeypatch.setattr(outside, "place", lambda config: gpu)
    monkeypatch.setattr(outside.sys, "excepthook", None)
    begin = Mock()
    monkeypatch.setattr(outside.dist, "init_process_group", begin)
    outside.join(SimpleNamespace())
    assert begin.call_args.args == ("cpu:gloo,cuda:nccl",)
