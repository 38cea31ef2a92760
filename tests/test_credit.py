"""Who gets which advantage, who stands in the loss how often, what each weighs."""

import itertools
import math
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import tiny
from helpers.samples import prepared
from hypothesis import given, settings
from hypothesis import strategies as st

import mars
import train
import trainer
from config import UserError
from plumbing import folders, logbook
from plumbing.outside import Questions
from rollout import Sample, Trajectory
from sampler import Completion
from tasks.questions import Question

# question: (reward, System 1 samples) of each attempt
PLAN = {
    0: [(1.0, 3), (0.0, 1), (0.0, 0)],
    1: [(1.0, 1), (1.0, 0), (1.0, 0), (1.0, 0)],  # all alike: nothing to learn
    2: [(1.0, 1), (0.0, 0), (1.0, 0), (0.0, 1)],  # fewer System 1 samples than attempts
    3: [(1.0, 3), (0.0, 1), (0.0, 0)],  # as question 0
}


def trajectory(place: int, attempt: int, reward: float, readers: int) -> Trajectory:
    made = Trajectory(None, place, attempt, ended="answer", reward=reward)
    lengths = [("sys2", 5), *(("sys1", 2 + j) for j in range(readers))]
    for role, length in lengths:
        sample = Sample(role, place, attempt, reward=reward)
        sample.append_given([1, 2, 3])
        sample.append_sampled(Completion([4] * length, [-1.0] * length, "stop"))
        made.contexts.append(SimpleNamespace(sample=sample))
    return made


def credited(step=0, **options) -> tuple[mars.MarsConfig, list[Sample], list[Sample]]:
    """The config, and both roles' samples after credit for PLAN."""
    config = mars.MarsConfig(questions=4, group=4, **options)
    played = [
        trajectory(place, k, *attempt)
        for place, attempts in PLAN.items()
        for k, attempt in enumerate(attempts)
    ]
    terms = mars.credit(config, played, step)
    assert list(terms) == ["sys2", "sys1"]
    return config, *terms.values()


@pytest.fixture
def learner(monkeypatch):
    """A run without a model: train.update calls stand-ins for the trainer."""
    monkeypatch.setattr(train, "trainer", Mock(schedule=trainer.schedule))
    train.trainer.backward.return_value = []
    train.trainer.clip_gradient.return_value = 1.0
    monkeypatch.setattr(train, "prepare", Mock(return_value=([], [])))
    monkeypatch.setattr(train, "update_metrics", lambda scored, roles: {"loss": 3.0})
    monkeypatch.setattr(train, "logbook", Mock())
    monkeypatch.setattr(train, "check_mismatch", Mock())
    config = mars.MarsConfig(inner_steps=2, questions=4, steps=4, lr=0.8)
    config.temperature, config.clip, config.kl_beta = 0.7, 0.1, 0.02
    return Mock(config=config, skipped=0, optimizer=Mock(param_groups=[{}]))


@pytest.mark.parametrize("decay, rates", [(False, [0.4, 0.8, 0.8]), (True, [0.4, 0.6, 0.4])])
def test_an_update_has_its_rate_and_objective_and_parts_of_whole_questions(learner, decay, rates):
    learner.config.warmup = 2
    learner.config.decay = decay
    found = []
    (group,) = learner.optimizer.param_groups
    learner.optimizer.step = lambda: found.append(group["lr"])
    attempts = [Sample("sys2", index, k) for index in range(4) for k in range(3)]
    for step in range(3):
        told = train.update(learner, {"sys2": attempts}, step)
        assert told["loss"] == 1.5, "the mean of the parts"
    assert found[::2] == found[1::2] == pytest.approx(rates)
    objective = {"clip_low": 0.1, "clip_high": 0.1, "kl_beta": 0.02, "temperature": 0.7}
    assert all(call.kwargs == objective for call in train.trainer.backward.mock_calls)
    assert {call.args[1] for call in train.trainer.clip_gradient.mock_calls} == {train.MAX_NORM}
    given = [call.args[1]["sys2"] for call in train.prepare.mock_calls]
    assert [{s.question_index for s in part} for part in given] == [{0, 2}, {1, 3}] * 3


def test_sampler_and_trainer_are_compared_where_something_is_trained(learner, monkeypatch):
    """By any rank: all of them take the same part."""
    sample = Sample("sys2", 1, 0)
    train.prepare.side_effect = [([], ["empty"]), ([sample], ["full"])]
    train.update(learner, {}, 0)
    (compared,) = train.check_mismatch.mock_calls
    assert compared.args[1] == ["full"] and compared.args[3] == [sample]
    train.prepare.side_effect = [([], ["empty"]), ([], ["another rank's"])]
    monkeypatch.setattr(train, "sum_over_ranks", lambda sums: {"loss": 0.0, **sums, 1: 1})
    train.update(learner, {}, 0)
    assert train.check_mismatch.call_args.args[1] == ["another rank's"]


def test_what_is_not_finite_moves_nothing_and_three_in_a_row_end_the_run(learner, monkeypatch):
    learner.config.inner_steps = 1

    def moves(norm: float, loss: float) -> bool:
        train.trainer.clip_gradient.return_value = norm
        train.trainer.backward.return_value = [{"loss": loss}]
        learner.optimizer.step.reset_mock()
        moved = not train.update(learner, {}, 0)["skipped_steps"]
        assert learner.optimizer.step.called == moved
        return moved

    with monkeypatch.context() as patch:  # another rank's loss is not finite
        patch.setattr(train, "sum_over_ranks", lambda sums: dict.fromkeys(sums, math.nan))
        assert not moves(1.0, 0.0)
    assert moves(1.0, 0.0)
    assert not moves(math.nan, 0.0) and not moves(1.0, math.nan)
    assert moves(1.0, 0.0)
    assert not moves(math.inf, 0.0) and not moves(1.0, math.inf)
    with pytest.raises(UserError, match="three updates in a row"):
        moves(math.nan, 0.0)
    assert not learner.optimizer.step.called
    told = [call.args[1] for call in train.logbook.print_line.mock_calls]
    assert len(told) == 6 and all("update skipped" in line for line in told)


def test_a_part_without_a_gradient_takes_no_step(learner):
    """Adam's momentum alone would move the weights; such a part is no failure either."""
    train.trainer.clip_gradient.side_effect = [0.0, 1.0]
    assert train.update(learner, {}, 0)["skipped_steps"] == 0
    assert learner.optimizer.step.call_count == 1


def of(samples: list[Sample], group: int) -> list[Sample]:
    return [s for s in samples if s.question_index == group]


def test_each_role_has_its_own_group():
    """Of question 0 there are G = 3 attempts and M = 4 notes."""
    _, sys2, sys1 = credited()
    for samples, wanted in (
        (sys2, [math.sqrt(2), -1 / math.sqrt(2), -1 / math.sqrt(2)]),
        (sys1, [1 / math.sqrt(3)] * 3 + [-math.sqrt(3)]),
    ):
        assert [s.advantage for s in of(samples, 0)] == pytest.approx(wanted)
        assert all(s.advantage == 0 for s in of(samples, 1))
    _, sys2, sys1 = credited(advantage="mean")
    assert [s.advantage for s in of(sys2, 0)] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert [s.advantage for s in of(sys1, 0)] == pytest.approx([0.25] * 3 + [-0.75])
    _, sys2, sys1 = credited(shared_group=True)
    earned = {(s.question_index, s.attempt): s.advantage for s in sys2}
    assert all(s.advantage == earned[s.question_index, s.attempt] for s in sys1)


def test_system1_is_balanced_to_system2s_number_a_question():
    _, sys2, sys1 = credited()
    assert all(s.loss_weight == 1 for s in sys2)
    assert [sum(s.loss_weight for s in of(sys1, g)) for g in PLAN] == [3, 4, 4, 3]
    assert max(s.loss_weight for s in of(sys1, 0)) == 1 <= min(s.loss_weight for s in of(sys1, 2))
    assert all(s.loss_weight == 1 for s in credited(balance="none")[2])
    assert credited(system1="frozen")[2] == []


def test_each_question_step_and_seed_draws_its_own_notes():
    draws = {}
    for step, seed in itertools.product(range(9), repeat=2):
        sys1 = credited(step, seed=seed)[2]
        draws[step, seed] = [tuple(s.loss_weight for s in of(sys1, group)) for group in (0, 3)]
    assert any(one != other for one, other in draws.values())
    assert len({draws[step, 0][0] for step in range(9)}) > 1
    assert len({draws[0, seed][0] for seed in range(9)}) > 1


@pytest.mark.parametrize("mean, kl_beta", [("sample", 0.0), ("token", 0.0), ("sample", 0.1)])
def test_a_sample_weighs_its_copies_over_those_of_its_term(mean, kl_beta):
    """1/|y| a token, once for each copy, over the copies of the role, or over its tokens."""
    config, sys2, sys1 = credited(loss_mean=mean, kl_beta=kl_beta)
    for own2, own1 in itertools.product((sys2, []), (sys1, [])):
        terms = {"sys2": own2, "sys1": own1}
        samples, batches = prepared(config, terms)
        assert batches, "a step moves by its momentum, also where nothing is trained"
        # Also those of advantage 0, of which no token is in the batches unless there is a KL term.
        total = {
            role: sum(s.loss_weight * (sum(s.mask) if mean == "token" else 1) for s in own)
            for role, own in terms.items()
        }
        for batch in batches:
            owners = [samples[i] for i in batch.owner.tolist()]
            sizes = [sum(s.mask) if mean == "sample" else 1 for s in owners]
            wanted = [s.loss_weight / (n * total[s.role]) for s, n in zip(owners, sizes)]
            assert batch.weight.tolist() == pytest.approx(wanted)
            assert batch.advantage.tolist() == pytest.approx([s.advantage for s in owners])
        live = [s for s in own2 + own1 if s.loss_weight and (s.advantage or kl_beta)]
        assert sum(len(batch.weight) for batch in batches) == sum(sum(s.mask) for s in live)


def test_what_resume_does_again_is_taken_back_and_a_last_evaluation_stays(tmp_path):
    run = SimpleNamespace(folder=tmp_path, config=mars.MarsConfig(eval_every=4))
    (tmp_path / "rollouts").mkdir()
    for step in range(8):
        records = [{"step": step, "split": split} for split in ("eval", "train")]
        folders.append_lines(tmp_path / f"rollouts/step_{step}.jsonl", records)
        folders.append_lines(tmp_path / "metrics.jsonl", [{"step": step}])
    logbook.take_back(run, 6)
    kept = {path.stem: folders.read_lines(path) for path in (tmp_path / "rollouts").iterdir()}
    assert sorted(kept) == [f"step_{step}" for step in range(7)]
    assert kept["step_6"] == [{"step": 6, "split": "eval"}]
    assert len(kept["step_5"]) == 2
    assert [line["step"] for line in folders.read_lines(tmp_path / "metrics.jsonl")] == [*range(6)]
    logbook.take_back(run, 4)  # it will be evaluated again
    assert not (tmp_path / "rollouts/step_4.jsonl").exists()


def test_every_step_asks_of_every_set():
    """Two thirds of one kind and a third of another: so in each step of six, in every epoch."""
    sets = ["one"] * 40 + ["two"] * 20
    loaded = [Question(f"q{i}", f"who {i} ?", ("x",), name) for i, name in enumerate(sets)]
    stream = Questions(loaded, seed=0)
    for epoch in range(3):
        drawn = [stream(60 * epoch + place) for place in range(60)]
        assert {q.id for q in drawn} == {q.id for q in loaded}
        for step in range(10):
            kinds = [q.source for q in drawn[6 * step : 6 * step + 6]]
            assert (kinds.count("one"), kinds.count("two")) == (4, 2)
    assert stream.order(0) != stream.order(1)


@pytest.mark.parametrize(
    "count, known, rank, ranks, told",
    [
        (5, 99, 0, 2, {0: "q15", 1: "q16"}),  # in runs, so that inner steps stay even
        (5, 99, 1, 2, {2: "q17", 3: "q18", 4: "q19"}),
        # Across the end of an epoch: the same id would name the same draws, token for token.
        (6, 4, 0, 1, dict(enumerate(["q2", "q3", "q0", "q1", "q2#2", "q3#2"]))),
    ],
)
def test_ranks_share_out_a_steps_questions(count, known, rank, ranks, told):
    config = mars.MarsConfig(questions=count)
    run = SimpleNamespace(config=config, rank=rank, ranks=ranks, resampled=0)
    run.question = lambda i: Question(f"q{i % known}", "?", ("x",), "own")
    assert {place: one.id for place, one in train.questions_of(run, 3)[rank]} == told


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_further_questions_are_played_until_enough_groups_differ_on_any_number_of_ranks(flat, data):
    """Or until the bound; the stream goes on behind them. flat: whether question i's group is."""
    count, bound, ranks = (data.draw(st.integers(*ends)) for ends in ((1, 4), (0, 3), (1, 3)))
    config = mars.MarsConfig(questions=count, resample=bound, group=2)

    def play(run, batch, attempts, tools, step):
        """Rewards that differ unless the question is flat, of which one attempt is not graded."""
        for index, question in batch:
            grades = [1.0, None] if flat[int(question.id) % len(flat)] else [1.0, 0.0]
            for attempt in range(attempts):
                yield trajectory(index, attempt, grades[attempt], 1)
                run.asked.append(int(question.id))

    def steps(rank):
        run = SimpleNamespace(config=config, rank=rank, ranks=ranks, resampled=0, tools=[])
        run.device = torch.device("cpu")
        run.question = lambda i: Question(str(i), "?", ("x",), "own")
        results = []
        for step in range(3):
            run.asked = []
            graded = [t for t in train.play_groups(run, step) if t.reward is not None]
            kept = train.first_groups(graded, count)
            places = [sample.question_index for t in kept for sample in t.samples()]
            results.append((set(run.asked), places, run.resampled))
        return results

    barrier, parts = threading.Barrier(ranks), []

    def sum_over_ranks(sums: dict) -> Counter:
        """Ranks are threads here."""
        parts.append(sums)
        barrier.wait(60)
        total = sum(map(Counter, parts), Counter())
        if barrier.wait(60) == 0:
            parts.clear()
        barrier.wait(60)
        return total

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(ranks) as threads:
        patch.setattr(train, "sum_over_ranks", sum_over_ranks)
        patch.setattr(train, "play_batch", play)
        found = list(threads.map(steps, range(ranks)))
    position = 0
    for step, told in enumerate(zip(*found)):
        rounds = [count]
        while rounds[-1]:
            asked = range(position, position + sum(rounds))
            differ = sum(not flat[i % len(flat)] for i in asked)
            gap = max(0, count - differ) * len(asked)
            rounds.append(min(-(-gap // max(1, differ)), count * (1 + bound) - len(asked)))
        position = asked.stop
        assert set.union(*(own for own, _, _ in told)) == set(asked)
        differ = min(count, differ)
        # Both attempts at each question have a sample of either role.
        assert sorted(sum((places for _, places, _ in told), [])) == sorted(4 * [*range(differ)])
        assert {added for _, _, added in told} == {position - count * (step + 1)}


@pytest.mark.usefixtures("products_by")
@pytest.mark.parametrize("kind", ["token", "sequence", "off"])
def test_what_is_trained_is_weighed_by_the_gap_to_the_sampler(kind):
    """`prepare`, beside each sample scored by itself."""
    samples = tiny.make_samples()
    config = mars.MarsConfig(importance=kind, importance_cap=1.5, micro_tokens=60)
    policy = trainer.Policy(tiny.model("qwen3"), bf16=False)
    known = []
    for sample in samples:
        mask = torch.tensor(sample.mask)
        scored = torch.tensor([0.0, *trainer.score(policy, sample.tokens)])
        drawn = scored - 0.3 * torch.randn(len(mask))  # what a sampler that is off would say
        sample.logprobs = drawn.tolist()
        known.append((scored[mask], drawn[mask]))
    terms = {role: [s for s in samples if s.role == role] for role in ("sys2", "sys1")}
    kept, batches = prepared(config, terms, policy)
    masked = 0
    for batch in batches:
        for owner in set(batch.owner.tolist()):
            mine = batch.owner == owner
            scored, drawn = known[samples.index(kept[owner])]
            gap = scored - drawn
            ratio = float(gap.sum().exp())
            factor = {
                "token": gap.exp().clamp(max=1.5),
                "sequence": torch.full_like(gap, ratio if ratio <= 1.5 else 0.0),
                "off": torch.ones_like(gap),
            }[kind]
            masked += float(factor.sum()) == 0
            want = factor / len(terms[kept[owner].role]) / len(gap)
            assert torch.allclose(batch.weight[mine], want, rtol=1e-4)
            old = drawn if kind == "off" else scored
            assert torch.allclose(batch.old_logprob[mine], old, atol=1e-5)
    assert bool(masked) == (kind == "sequence"), "some sample leaves the bound"
