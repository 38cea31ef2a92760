"""Who gets which advantage, who stands in the loss how often, what each weighs."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

import mars
import train
from config import UserError, resolve
from plumbing import folders, logbook
from plumbing.outside import Questions
from rollout import Sample, Trajectory
from sampler import Completion
from tasks.questions import Question

CPU = torch.device("cpu")
# question: (reward, System 1 samples) of each attempt
PLAN = {
    0: [(1.0, 3), (0.0, 1), (0.0, 0), (None, 2)],
    1: [(1.0, 1), (1.0, 0), (1.0, 0), (1.0, 0)],  # all alike: nothing to learn
    2: [(1.0, 1), (0.0, 0), (1.0, 0), (0.0, 1)],  # fewer System 1 samples than attempts
}


def sample(role: str, question: int, attempt: int, reward, length: int) -> Sample:
    made = Sample(role, question, attempt, reward=reward)
    made.append_given([1, 2, 3])
    made.append_sampled(Completion([4] * length, [-1.0] * length, "stop"))
    return made


def trajectory(place: int, attempt: int, reward, readers: int) -> Trajectory:
    question = Question(f"q{place}", "?", ("x",), "own")
    made = Trajectory(question, place, attempt, ended="answer", reward=reward)
    samples = [sample("sys2", place, attempt, reward, 5)]
    samples += [sample("sys1", place, attempt, reward, 2 + j) for j in range(readers)]
    made.contexts = [
        SimpleNamespace(role=one.role, sample=one, chunk=None, turns=[]) for one in samples
    ]
    return made


def play(**options) -> tuple[SimpleNamespace, list[Trajectory], list[Sample], list[Sample]]:
    """train_step over PLAN without the update: run, trajectories, both roles' samples."""
    trajectories = [
        trajectory(place, k, *attempt)
        for place, attempts in PLAN.items()
        for k, attempt in enumerate(attempts)
    ]
    seen = {}

    def update(run, terms, step):
        seen.update(terms)
        return {}

    config = mars.MarsConfig(questions=3, group=4, **options)
    run = SimpleNamespace(
        config=config,
        method=mars.METHOD,
        rank=0,
        ranks=1,
        device=CPU,
        reference=None,
        policy=SimpleNamespace(packs=True, model=None),
        tools=[],
        question=lambda i: Question(f"q{i}", "?", ("x",), "own"),
        rollouts=lambda *a, **k: trajectories,
        driver=SimpleNamespace(samplers=[]),
        sampler=SimpleNamespace(load_weights=lambda model: None),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "update", update)
        patch.setattr(train.trainer, "unwrap", lambda policy: SimpleNamespace(model=None))
        train.train_step(run, 0)
    return run, trajectories, seen["sys2"], seen["sys1"]


@pytest.fixture
def update(monkeypatch):
    """train.update without a model; it keeps what the optimizer and the trainer were told."""
    told = SimpleNamespace(rates=[], parts=[], temperatures=[])

    def prepare(run, terms):
        told.parts.append({s.question_index for samples in terms.values() for s in samples})
        return [], [], []

    def backward(policy, batches, references, **objective):
        told.temperatures.append(objective["temperature"])
        return []

    monkeypatch.setattr(train, "prepare", prepare)
    monkeypatch.setattr(train.trainer, "backward", backward)
    monkeypatch.setattr(train.trainer, "gradient_norm", lambda policy, limit: 1.0)
    monkeypatch.setattr(train, "update_metrics", lambda sums, roles: {"loss": 0.0})
    monkeypatch.setattr(train.logbook, "stop_if_mismatched", lambda *given: None)
    group = {}
    optimizer = SimpleNamespace(
        param_groups=[group],
        zero_grad=lambda set_to_none: None,
        step=lambda: told.rates.append(group["lr"]),
    )

    def update(config, terms, step):
        run = SimpleNamespace(config=config, method=mars.METHOD, policy=None, optimizer=optimizer)
        train.update(run, terms, step)
        return told

    return update


@pytest.mark.parametrize(
    "decay, rates", [(False, [0.4, 0.8, 0.8, 0.8]), (True, [0.4, 0.6, 0.4, 0.2])]
)
def test_the_learning_rate_rises_and_falls_if_told_to(update, decay, rates):
    config = mars.MarsConfig(steps=4, lr=0.8, warmup=2, decay=decay, inner_steps=1)
    told = [update(config, {}, step) for step in range(4)]
    assert told[-1].rates == pytest.approx(rates)


def test_an_update_differentiates_at_the_temperature_and_its_parts_hold_whole_questions(update):
    config = mars.MarsConfig(temperature=0.7, inner_steps=2, questions=4)
    attempts = [Sample("sys2", index, k) for index in range(4) for k in range(3)]
    told = update(config, {"sys2": attempts}, 0)
    assert told.temperatures == [0.7, 0.7]
    assert told.parts == [{0, 2}, {1, 3}]


def of(samples: list[Sample], group: int) -> list[Sample]:
    return [s for s in samples if s.question_index == group]


def test_each_role_has_its_own_group_and_an_unjudged_trajectory_none():
    """Of question 0 there are G = 3 attempts with a reward and M = 4 notes."""
    _, trajectories, sys2, sys1 = play()
    for samples, wanted in (
        (sys2, [math.sqrt(2), -1 / math.sqrt(2), -1 / math.sqrt(2)]),
        (sys1, [1 / math.sqrt(3)] * 3 + [-math.sqrt(3)]),
    ):
        assert [s.advantage for s in of(samples, 0)] == pytest.approx(wanted)
        assert all(s.advantage == 0 for s in of(samples, 1))
    assert all(s.copies == 0 and s.advantage == 0 for s in trajectories[3].samples())
    _, _, sys2, sys1 = play(advantage="mean")
    assert [s.advantage for s in of(sys2, 0)] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert [s.advantage for s in of(sys1, 0)] == pytest.approx([0.25] * 3 + [-0.75])


def test_shared_group_inherits():
    _, trajectories, _, _ = play(shared_group=True)
    for graded in (t for t in trajectories if t.reward is not None):
        first, *others = graded.samples()
        assert {s.advantage for s in others} <= {first.advantage}


def test_system1_is_balanced_to_system2s_number_a_question():
    _, _, sys2, sys1 = play()
    assert all(s.copies == 1 for s in sys2)
    assert [sum(s.copies for s in of(sys1, g)) for g in PLAN] == [3, 4, 4]
    assert max(s.copies for s in of(sys1, 0)) == 1 and min(s.copies for s in of(sys1, 2)) >= 1
    assert all(s.copies == 1 for s in play(balance="none")[3])
    assert not any(s.copies for s in play(system1="frozen")[3])


@pytest.mark.parametrize("mean", ["sample", "token"])
def test_a_sample_weighs_its_copies_over_those_of_its_term(mean):
    """1/|y| a token, once for each copy, over the copies of the role, or over its tokens."""
    run, _, sys2, sys1 = play(loss_mean=mean)
    for terms in (
        {"sys2": sys2, "sys1": sys1},
        {"sys2": sys2, "sys1": []},
        {"sys2": [], "sys1": sys1},
    ):
        samples, batches, references = train.prepare(run, terms)
        assert references == [None] * len(batches)
        # Also those of advantage 0, of which no token is in the batches.
        total = {
            role: sum(s.copies * (sum(s.mask) if mean == "token" else 1) for s in own)
            for role, own in terms.items()
        }
        for batch in batches:
            owners = [samples[i] for i in batch.owner.tolist()]
            sizes = [sum(s.mask) if mean == "sample" else 1 for s in owners]
            wanted = [s.copies / (n * total[s.role]) for s, n in zip(owners, sizes)]
            assert batch.weight.tolist() == pytest.approx(wanted)
            assert batch.advantage.tolist() == pytest.approx([s.advantage for s in owners])
        live = [s for own in terms.values() for s in own if s.copies and s.advantage]
        assert sum(len(batch.weight) for batch in batches) == sum(sum(s.mask) for s in live)


def test_drawn_by_advantage_system1_has_as_many_and_the_sign_of_its_advantage():
    _, _, sys2, sys1 = play(balance="advantage")
    uniform = play()[3]
    assert [sum(s.copies for s in of(sys1, g)) for g in PLAN] == [3, 4, 4]
    sizes = {abs(s.advantage) for s in of(sys1, 0)}
    assert len(sizes) == 1
    mean = sum(abs(s.advantage) for s in of(uniform, 0)) / len(of(uniform, 0))
    assert sizes.pop() == pytest.approx(mean)
    for mine, theirs in zip(sys1, uniform):
        assert math.copysign(1, mine.advantage) == math.copysign(1, theirs.advantage)


def test_a_credit_of_ones_own_can_train_each_turn_by_itself():
    """It returns a sample for each turn: the same tokens, the turn's mask, an advantage."""
    run, *_ = play()
    whole = Sample("sys2", 0, 0)
    for length in (3, 2):
        whole.append_given([1, 2])
        whole.append_sampled(Completion([4 + length] * length, [-float(length)] * length, "stop"))
    turns = []
    for span, advantage in ((range(2, 5), 1.0), (range(7, 9), -0.5)):
        mask = [i in span for i in range(len(whole.tokens))]
        turns.append(dataclasses.replace(whole, mask=mask, advantage=advantage, copies=1))
    _, (batch,), _ = train.prepare(run, {"sys2": turns, "sys1": []})
    trained = zip(batch.target.tolist(), batch.old_logprob.tolist(), batch.advantage.tolist())
    assert sorted(trained) == [(6, -2.0, -0.5)] * 2 + [(7, -3.0, 1.0)] * 3
    assert sorted(batch.lengths) == [4, 4]  # the second adds what the first does not have
    assert float(batch.weight.sum()) == pytest.approx(1)


@pytest.mark.parametrize(
    "given",
    [
        {"balance": "advantage", "kl_beta": 0.1},
        {"balance": "advantage", "loss_mean": "token"},
        {"balance": "none", "system1": "frozen"},
        {"purpose": False, "system1": "none"},
        {"warmup": -1},
        {"block": " , ", "search": "serper"},
    ],
)
def test_options_that_contradict_each_other_are_refused(given):
    with pytest.raises(UserError):
        resolve(mars.MarsConfig, given, presets={})


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


# ------------------------------------------------------------------------------- a step's questions


def test_every_step_asks_of_every_set():
    """Two thirds of one kind and a third of another: so in each step of six, in every epoch."""
    sets = ["one"] * 40 + ["two"] * 20
    loaded = [Question(f"q{i}", f"who {i} ?", ("x",), name) for i, name in enumerate(sets)]
    question = Questions(loaded, seed=0)
    for epoch in range(3):
        asked = [question(60 * epoch + place) for place in range(60)]
        assert {q.id for q in asked} == {q.id for q in loaded}
        for step in range(10):
            kinds = [q.source for q in asked[6 * step : 6 * step + 6]]
            assert (kinds.count("one"), kinds.count("two")) == (4, 2)
    assert question.order(0) != question.order(1)


def test_a_step_without_any_graded_trajectory_has_an_empty_update():
    run, *_ = play()
    samples, batches, _ = train.prepare(run, {"sys2": [], "sys1": []})
    assert samples == [] and len(batches) == 1 and len(batches[0].target) == 0


def test_ranks_share_out_the_questions_in_runs_so_that_inner_steps_stay_even():
    for rank, places in ((0, [0, 1]), (1, [2, 3, 4])):
        run = SimpleNamespace(
            config=mars.MarsConfig(questions=5),
            rank=rank,
            ranks=2,
            question=lambda i: Question(f"q{i}", "?", ("x",), "own"),
        )
        batch = train.questions_of(run, 3)
        assert [place for place, _ in batch] == places
        assert [question.id for _, question in batch] == [f"q{15 + place}" for place in places]


def test_a_question_that_comes_twice_in_a_step_is_drawn_anew():
    """Across the end of an epoch; the same id would name the same draws, token for token."""
    run = SimpleNamespace(
        config=mars.MarsConfig(questions=6),
        rank=0,
        ranks=1,
        question=lambda i: Question(f"q{i % 4}", "?", ("x",), "own"),
    )
    ids = [question.id for _, question in train.questions_of(run, 0)]
    assert ids == ["q0", "q1", "q2", "q3", "q0#2", "q1#2"]
    run.question = lambda i: Question(["a", "a", "a#2", "a"][i % 4], "?", ("x",), "own")
    run.config.questions = 4
    ids = [question.id for _, question in train.questions_of(run, 0)]
    assert len(set(ids)) == 4 and ids[2] == "a#2"
