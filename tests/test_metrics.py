"""Means are over live tokens, intervals are honest, and the guard stops what is mismatched."""

import copy
import dataclasses
import math
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mars import SMALL, half

import mars
import train
from config import UserError
from plumbing import evaluation, metrics, start
from plumbing.logbook import check_failure_rate
from plumbing.metrics import clustered_interval, sign_test, update_metrics, wilson_interval
from rollout import Context, Sample, Trajectory, Turn
from sampler import Sampler
from tasks.format import Action
from tasks.questions import Question
from tools import Document
from tools.search import UNREAD

ROLES = ("sys2", "sys1")


def measured(live: list[bool], values: torch.Tensor, owner: torch.Tensor) -> dict:
    """The step's metrics of a batch of 8 tokens: all were scored, by the kernel the live ones."""
    weight = torch.tensor(live).float() / 8
    scored = [values[i] * (weight != 0) for i in range(2)]
    batch = SimpleNamespace(weight=weight, owner=owner)
    batch.old_logprob, _, batch.behaviour_logprob = values
    count = int((weight != 0).sum())
    numbers = {"loss": 0.5, "logprob": scored[0], "entropy": scored[1]}
    numbers |= {"clip_share": 0.25 if count else 0.0, "kl": 0.1 if count else 0.0}
    samples = [Sample(role, 0, 0) for role in ROLES]
    config = mars.MarsConfig(max_mismatch_kl=9.0, importance="token")
    run = SimpleNamespace(config=config)
    mismatch = {"mismatch_kl": train.check_mismatch(run, [batch], [numbers], samples)}
    return update_metrics([(batch, numbers, samples)], ROLES) | mismatch


@settings(max_examples=50)
@given(st.lists(st.booleans(), min_size=8, max_size=8), st.integers(0, 99))
def test_with_any_mask_the_metrics_are_those_of_the_live_tokens(live, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(3, 8, generator=generator)
    owner = torch.randint(2, (8,), generator=generator)
    told = measured(live, values, owner)
    kept = torch.tensor(live)
    alone = measured([True] * int(kept.sum()), values[:, kept], owner[kept])
    assert told["masked_share"] == 1 - sum(live) / 8 and told["trained_tokens"] == 8
    assert told["clip_share"] == (0.25 if any(live) else 0.0)
    for key in alone.keys() - {"masked_share", "trained_tokens", "mismatch_kl"}:
        assert told[key] == pytest.approx(alone[key]), key
    for index, role in enumerate(ROLES):
        own = values[1][kept & (owner == index)]
        assert told[f"{role}_entropy"] == (pytest.approx(own.mean().item()) if len(own) else None)
    gap = values[0] - values[2]  # the guard looks at masked tokens as well
    assert told["mismatch_kl"] == pytest.approx(float((gap.exp() - 1 - gap).mean()), abs=1e-6)


def test_log_probs_that_are_nan_are_a_mismatch():
    with pytest.raises(UserError, match="mismatch_kl nan"):
        measured([True] * 8, torch.full((3, 8), math.nan), torch.zeros(8, dtype=torch.long))


def stale(monkeypatch):
    """New weights never reach the sampler, which notices adapters after their first step."""
    monkeypatch.setattr(Sampler, "load_weights", lambda self, model: None)


def wrong_rotation(monkeypatch):
    """The sampler turns its queries and keys by other angles."""
    make = start.make_sampler

    def mutant(config, model, machine):
        model = copy.deepcopy(model)
        for module in model.modules():
            if hasattr(module, "inv_freq"):
                module.inv_freq *= 1.1
        model.config.rope_parameters["rope_theta"] /= 4
        return make(config, model, machine)

    monkeypatch.setattr(start, "make_sampler", mutant)


def shifted_tokens(monkeypatch):
    """The trainer is told of other tokens than the sampler was."""
    given = Sample.append_given

    def mutant(self, tokens):
        given(self, [max(0, token - 1) for token in tokens])

    monkeypatch.setattr(Sample, "append_given", mutant)


MISMATCHED = [
    (stale, "--lora_rank 4", 1),
    (wrong_rotation, "", 0),
    (shifted_tokens, "--importance sequence", 0),
]


@pytest.mark.parametrize("mutate, options, steps", MISMATCHED)
def test_a_mismatch_stops_the_run(base, tmp_path, monkeypatch, capsys, mutate, options, steps):
    mutate(monkeypatch)
    where = ["--model", str(base), "--runs", str(tmp_path), "--name", "x"]
    given = [*where, *SMALL, "--steps", "2", *options.split()]
    assert train.main(mars.METHOD, given, "", grade=half) == 2
    assert "does not sample what is trained: mismatch_kl" in capsys.readouterr().err
    assert len((tmp_path / "x" / "metrics.jsonl").read_text().splitlines()) == steps


def attempt(answer, reward, kind="a"):
    question = Question("q", "who ?", ("x",), kind)
    return Trajectory(question, 0, 0, answer=answer, reward=reward, ended="answer")


def test_right_is_more_than_half_and_a_lost_attempt_was_not_told_to_answer():
    lost = attempt(None, None)
    lost.ended = "lost: the server is gone"
    told = attempt("x", 0.25)
    told.ended = "no answer"
    attempts = [attempt("x", 1.0), told, lost, attempt("x", 1.0, kind="b")]
    questions = [one.question for one in attempts]
    assert metrics.right_by_kind(attempts, questions) == {"a": [1, 3], "b": [1, 1]}
    method = dataclasses.replace(mars.METHOD, roles={})
    assert metrics.rollout_metrics(attempts, method, 1.0)["demanded_share"] == 0.25


def test_a_judge_that_is_away_is_measured_by_what_it_was_asked():
    """Attempts without an answer need no judge: they would hide that it is gone."""
    method = dataclasses.replace(mars.METHOD, roles={})
    attempts = [attempt("x", None), *[attempt(None, 0.0)] * 3]
    assert metrics.rollout_metrics(attempts, method, 1.0)["judge_failure_share"] == 1.0
    assert metrics.rollout_metrics(attempts[:1], method, 1.0)["reward"] is None
    run = Mock(method=method, config=mars.MarsConfig(group=1))
    lines = [
        {"index": index, "reward": one.reward, "sums": metrics.local_sums([one])}
        for index, one in enumerate([attempt("x", 1.0), attempts[0]])
    ]
    told = evaluation.row(run, "own", lines)
    assert (told["questions"], told["accuracy"]) == (2, 0.5), "not judged is not right"


def test_pages_that_could_not_be_read_are_counted():
    told = attempt("x", 1.0)
    texts = ["a page", *[f"{UNREAD}\na snippet"] * 2]
    documents = [Document("", "", "", text) for text in texts]
    turns = [Turn([], Action(answer="x"), documents=documents)]
    Context(None, told, "sys2", turns=turns)
    made = metrics.rollout_metrics([told, attempt("y", 0.0)], mars.METHOD, 1.0)
    assert made["unread_share"] == 2 / 3
    with pytest.raises(UserError, match="67% of the pages of step 4 failed"):
        check_failure_rate(made, "step 4")


@given(st.integers(1, 300), st.data())
def test_an_interval_holds_its_share_and_mirrors(total, data):
    correct = data.draw(st.integers(0, total))
    low, high = wilson_interval(correct, total)
    assert 0 <= low <= correct / total <= high <= 1
    for end in (low, high):  # the normal's 95 % quantile, by Wilson's equation
        if 0 < end < 1:
            distance = abs(correct / total - end) / math.sqrt(end * (1 - end) / total)
            assert distance == pytest.approx(1.959964)


@given(st.integers(1, 8), st.lists(st.integers(0, 8), min_size=1, max_size=60))
def test_attempts_at_one_question_are_at_most_as_sure_as_independent_ones(attempts, right):
    right = [min(count, attempts) for count in right]
    low, high = clustered_interval([count / attempts for count in right], attempts)
    share = sum(right) / attempts / len(right)
    assert 0 <= low <= share + 1e-9 and share - 1e-9 <= high <= 1 + 1e-9
    one, other = wilson_interval(sum(right), attempts * len(right))
    assert high - low >= other - one - 1e-9
    alike = [float(count > attempts / 2) for count in right]  # all attempts end alike
    if 1 < len(right) and 0 < sum(alike) < len(right):
        n = len(right) - 1  # the variance of a sample
        assert clustered_interval(alike, attempts) == pytest.approx(
            wilson_interval(sum(alike) * n / len(right), n)
        )


@given(st.integers(0, 30), st.integers(0, 30))
def test_the_sign_test_is_the_binomials_two_tails(gained, lost):
    n = gained + lost
    uneven = abs(gained - lost)
    ways = sum(math.comb(n, k) for k in range(n + 1) if abs(n - 2 * k) >= uneven)
    assert sign_test(gained, lost) == pytest.approx(ways / 2**n)
