"""What a method may bring beside words, episode and credit."""

import dataclasses
from typing import get_args
from unittest.mock import Mock, call

import pytest
import torch.distributed as dist
from helpers.launch import launch
from test_almanac import two_attempts
from test_mars import SMALL, metrics, records_of, run

import mars
import processes
import train
from config import TRAIN, UserError, fields_with
from plumbing import evaluation
from plumbing.metrics import method_metrics
from recipes import almanac
from siblings import bvpo, hanabi, marsrl, matpo, mifo
from toy.language import ToyFormat


def test_a_method_brings_numbers_a_model_a_language_and_rollouts_of_its_own(base, tmp_path, capsys):
    """All of them reach the run's folder."""
    seen = []

    def own_metrics(trajectories):
        answered = sum(t.answer is not None for t in trajectories)
        return {"answered_share": (answered, len(trajectories))}

    def make(cache, seed):
        seen.append((cache, seed))
        return base

    class Language(ToyFormat):
        def prompt(self, role, **slots):
            seen.append(role)
            return super().prompt(role, **slots)

    def rollouts(run, step):
        return train.play_groups(run, step)[:-1]

    method = dataclasses.replace(mars.METHOD, name="own", metrics=own_metrics, play_step=rollouts)
    line = ["--runs", tmp_path, "--name", "x", "--steps", 1, "--cache", tmp_path, *SMALL]
    assert run(*line, method=method, base_model=make, language=Language) == 0
    assert {(str(tmp_path), 0), "sys1", "sys2"} <= set(seen)
    (line,) = metrics(tmp_path / "x")
    assert 0 <= line["answered_share"] <= 1 and 0 <= line["eval_answered_share"] <= 1
    assert sum(r["split"] == "train" for r in records_of(tmp_path / "x", 0)) == 15
    assert run("--runs", tmp_path, "--name", "x", "--resample", 1, method=method) == 2
    assert "own plays its steps by itself" in capsys.readouterr().err


def count_on_ranks() -> None:
    """What each of two ranks does."""
    rank = dist.get_rank()
    counted = ({"a": (1, 2), "b": (3, 4), "d": (0, 0)}, {"b": (0, 2), "c": (5, 5), "a": (1, 1)})
    method = dataclasses.replace(mars.METHOD, metrics=lambda trajectories: counted[rank])
    assert method_metrics([], method) == {"a": 2 / 3, "b": 1 / 2, "c": 1.0}

    options = almanac.AlmanacConfig(credit="candid", balance="none")
    mine = [t for t in two_attempts()[0] if t.attempt == rank]
    if rank:
        mine[0].notes = mine[0].notes[:1]
    almanac.credit(options, mine, 0)
    # On both ranks together two notes tell the fact, and two do not.
    assert {note.sample.loss_weight for t in mine for note in t.notes} == {1.0}


def test_ranks_count_together(tmp_path):
    """The ranks counted different things: they must neither add these up nor wait for ever.

    Shares of nothing are left out.
    """
    assert launch(count_on_ranks, log=tmp_path / "log") == 0


METHODS = mars, almanac, bvpo, hanabi, marsrl, matpo, mifo


@pytest.mark.parametrize("method", [module.METHOD for module in METHODS])
def test_eval_refuses_every_option_that_only_training_reads_and_shows_none(method, capsys):
    ignored = fields_with(method.config, TRAIN)
    kinds = {one.name: one.type for one in dataclasses.fields(method.config)}
    assert {"questions", "steps"} < ignored <= kinds.keys()
    with pytest.raises(SystemExit):
        evaluation.main(method, ["eval", "--help"], complete=None)
    shown = capsys.readouterr().out
    assert "--temperature " in shown
    for name in ignored:
        assert f"--{name} " not in shown
        kind = kinds[name]
        value = [] if kind is bool else [str((*get_args(kind), 1)[0])]
        with pytest.raises(UserError, match=f"eval does not read --{name}"):
            evaluation.main(method, ["eval", "CKPT", f"--{name}", *value], complete=None)


@pytest.mark.parametrize("code", [0, 2])
def test_a_rank_that_has_failed_leaves_its_group_open(monkeypatch, code):
    """To close it NCCL would wait for the other ranks, and they for this one."""
    calls = Mock()
    monkeypatch.setattr(processes.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(processes.dist, "destroy_process_group", calls.close)
    monkeypatch.setattr(processes.os, "_exit", calls.exit)
    processes.leave(code)
    closed = [] if code else [call.close()]
    assert calls.mock_calls == [*closed, call.exit(code)]
