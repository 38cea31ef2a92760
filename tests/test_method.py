"""train_step as the method: who gets which advantage, who is drawn how often, what each sample weighs in the loss."""
import math
from types import SimpleNamespace

import pytest
import torch

import mars
from config import Config
from tasks.chat import Step
from rollout import Chunk, Sample, Trajectory, Turn
from sampler import Completion
from tasks.questions import Question

CPU = torch.device("cpu")
PLAN = {0: [(1.0, 3), (0.0, 1), (0.0, 0), (None, 2)],           # question: (reward, System 1 samples) of each trajectory
        1: [(1.0, 1), (1.0, 0), (1.0, 0), (1.0, 0)],            # all alike: nothing to learn
        2: [(1.0, 1), (0.0, 0), (1.0, 0), (0.0, 1)]}            # fewer System 1 samples than trajectories


def sample(role: str, group: int, k: int, reward, length: int) -> Sample:
    made = Sample(role, group, k, reward=reward)
    made.give([1, 2, 3])
    made.take(Completion([4] * length, [-1.0] * length, "stop"))
    return made


def trajectory(group: int, k: int, reward, chunks: int) -> Trajectory:
    made = Trajectory(Question(f"q{group}", "?", ("x",), "own"), sample("sys2", group, k, reward, 5), ended="answer", reward=reward)
    turn = Turn([4], Step(answer="x"))
    turn.chunks = [Chunk([0], 3, False, sample("sys1", group, k, reward, 2 + j)) for j in range(chunks)]
    made.turns.append(turn)
    return made


def play(monkeypatch, **options) -> tuple[SimpleNamespace, list[Trajectory], list, list]:
    """train_step over PLAN with the update left out: (run, trajectories, System 2's samples, System 1's)."""
    trajectories = [trajectory(g, k, *attempt) for g, attempts in PLAN.items() for k, attempt in enumerate(attempts)]
    seen = {}
    monkeypatch.setattr(mars, "update", lambda run, sys2, sys1, step: seen.update(sys2=sys2, sys1=sys1) or {})
    monkeypatch.setattr(mars.trainer, "unwrap", lambda policy: SimpleNamespace(model=None))
    run = SimpleNamespace(config=Config(questions=3, group=4, **options), rank=0, world=1, device=CPU, reference=None, policy=None,
                          tools={}, question=lambda i: None, rollouts=lambda *a, **k: trajectories, driver=SimpleNamespace(samplers=[]),
                          sampler=SimpleNamespace(load_weights=lambda model: None))
    mars.train_step(run, 0)
    return run, trajectories, seen["sys2"], seen["sys1"]


def of(samples: list[Sample], group: int) -> list[Sample]:
    return [s for s in samples if s.group == group]


def test_each_role_has_its_own_group_and_an_unjudged_trajectory_none(monkeypatch):
    _, trajectories, sys2, sys1 = play(monkeypatch)
    assert [s.advantage for s in of(sys2, 0)] == pytest.approx([math.sqrt(2), -1 / math.sqrt(2), -1 / math.sqrt(2)])      # G = 3
    assert [s.advantage for s in of(sys1, 0)] == pytest.approx([1 / math.sqrt(3)] * 3 + [-math.sqrt(3)])                   # M = 4
    assert all(s.advantage == 0 for s in of(sys2, 1) + of(sys1, 1))
    unjudged = trajectories[3]
    assert all(s.drawn == 0 and s.advantage == 0 for s in (unjudged.sample, *unjudged.sys1_samples()))


def test_shared_group_inherits(monkeypatch):
    _, trajectories, _, _ = play(monkeypatch, shared_group=True)
    assert all(s.advantage == t.sample.advantage for t in trajectories if t.reward is not None for s in t.sys1_samples())


def test_system1_is_balanced_to_system2s_number_a_question(monkeypatch):
    _, _, sys2, sys1 = play(monkeypatch)
    assert all(s.drawn == 1 for s in sys2)
    assert [sum(s.drawn for s in of(sys1, g)) for g in PLAN] == [3, 4, 4]
    assert max(s.drawn for s in of(sys1, 0)) == 1 and min(s.drawn for s in of(sys1, 2)) >= 1
    assert all(s.drawn == 1 for s in play(monkeypatch, balance="off")[3])
    assert not any(s.drawn for s in play(monkeypatch, system1="frozen")[3])


def test_a_sample_weighs_its_draws_over_its_roles_draws(monkeypatch):
    """1/|y| a token, once for each draw, over the draws of the role: also those of advantage 0, which are not run."""
    run, _, sys2, sys1 = play(monkeypatch)
    for roles in ([sys2, sys1], [sys2, []], [[], sys1]):
        batches, references = mars.prepare(run, roles)
        got = sum(float(b.weight.sum()) for b in batches)
        assert got == pytest.approx(sum(sum(s.drawn for s in role if s.advantage) / sum(s.drawn for s in role) for role in roles if role))
        assert references == [None] * len(batches)
        tokens = [(s, s.drawn / (sum(s.mask) * sum(o.drawn for o in role))) for role in roles for s in role if s.drawn and s.advantage]
        expected = sorted(weight for s, weight in tokens for _ in range(sum(s.mask)))
        assert sorted(w for b in batches for w in b.weight.tolist()) == pytest.approx(expected)


def test_ranks_share_out_the_questions_in_runs_so_that_inner_steps_stay_even(monkeypatch):
    asked = {}
    for rank in (0, 1):
        def rollouts(batch, *a, **k):
            asked[rank] = [group for group, _ in batch]
            raise StopIteration
        run = SimpleNamespace(config=Config(questions=5), rank=rank, world=2, question=lambda i: i, rollouts=rollouts, tools={})
        with pytest.raises(StopIteration):
            mars.train_step(run, 3)
    assert asked == {0: [0, 1], 1: [2, 3, 4]}
