"""The early warning speaks when a run unlearns, once, and keeps silent while it learns."""

from types import SimpleNamespace

import pytest
from plumbing.collapse import warnings

from plumbing import files, logbook

ROLES = ("sys2", "sys1")


def told(**columns: list[float | None]) -> list[list[str]]:
    """What is said after each step."""
    steps = len(next(iter(columns.values())))
    lines = [{key: values[step] for key, values in columns.items()} for step in range(steps)]
    return [warnings(lines[: step + 1], ROLES) for step in range(steps)]


@pytest.mark.parametrize("key", ["malformed_share", "unaided_share"])
def test_a_share_that_rises_is_told_once(key):
    values = [0.3] * 5 + [0.02] * 6 + [0.2] * 8
    said = told(**{key: values})
    assert [step for step, signs in enumerate(said) if signs] == [13]  # 3 of 5 means are high
    assert said[13] == [f"{key} has risen by more than 0.10"]


@pytest.mark.parametrize("role", ROLES)
def test_a_log_prob_of_right_attempts_that_falls_is_told(role):
    values = [-0.4, -0.3, None, -0.1, -0.1, -0.1, -0.1, -0.1, -0.1, -0.5, -0.5]
    said = told(**{f"{role}_logprob_right": values})
    assert [step for step, signs in enumerate(said) if signs] == [10]
    assert said[10] == [f"{role}_logprob_right has fallen by more than 0.10 nats per token"]


def test_a_run_that_learns_hears_nothing():
    """Also one that starts badly, one that is short, and lines of an older version."""
    falling = [0.9, 0.8, 0.5, 0.3, 0.2, 0.1, 0.1, 0.05, 0.1, 0.04]
    assert not any(told(malformed_share=falling, unaided_share=falling))
    assert not any(told(sys1_logprob_right=[-value for value in falling]))
    assert not any(told(malformed_share=[0.0, 0.9, 0.9, 0.9]))
    assert not any(told(reward=[0.5] * 9))


def test_what_changes_from_step_to_step_is_no_collapse():
    """A role with few samples. Its means of five steps lie up to 0.24 apart."""
    noise = [-0.6, 0.0, -0.3, -0.6, 0.0, -0.6, 0.0, 0.0, -0.3, 0.0, -0.6, 0.0, -0.6]
    assert not any(told(sys1_logprob_right=noise))
    fallen = [*noise, -2.0, -2.2, -2.0, -2.4, -2.2]
    assert any(told(sys1_logprob_right=fallen))


def test_a_second_rise_is_told_again():
    said = told(malformed_share=[0.0] * 5 + [0.5] * 5 + [0.0] * 5 + [0.5] * 5)
    assert sum(map(len, said)) == 2


@pytest.mark.parametrize("rank, lines", [(0, 1), (1, 0)])
def test_the_first_rank_prints_it(tmp_path, capsys, rank, lines):
    shares = [0.0] * 5 + [0.5] * 2
    files.append_lines(tmp_path / "metrics.jsonl", [{"malformed_share": s} for s in shares])
    method = SimpleNamespace(roles={"sys2": "System 2"})
    logbook.warn(SimpleNamespace(rank=rank, folder=tmp_path, method=method))
    said = capsys.readouterr().out
    assert said.count("warning: malformed_share has risen by more than 0.10") == lines
