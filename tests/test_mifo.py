"""MIFO: what is frozen stays, hard tokens are learned from, shown is what rollouts missed."""

import json
import math
import random

import pytest
import torch

import trainer
from siblings import mifo, mifo_toy
from siblings.mifo import MifoConfig


@pytest.fixture
def policy():
    """A random model with the toy's words."""
    torch.manual_seed(0)
    return trainer.Policy(mifo_toy.base_model.new_model(len(mifo_toy.TOKENIZER)), bf16=False)


TASKS = mifo_toy.draw_tasks("test", 0, 0, 8)


def test_frozen_entries_stay_bit_for_bit_and_all_others_move(policy):
    """With momentum and weight decay, which move a parameter whose gradient is 0."""
    batch = mifo.solutions(TASKS)
    batch.weight = torch.full_like(batch.weight, 1 / len(batch.weight))
    optimizer = trainer.make_optimizer(policy, 1e-2, weight_decay=0.1)
    mifo.update(policy, optimizer, [batch], on_policy=True)  # momentum for everybody
    before = mifo.values(policy)
    mask = torch.rand(len(before), generator=torch.Generator().manual_seed(1)) < 0.5
    frozen = mifo.by_parameter(policy, mask)
    for _ in range(2):
        mifo.update(policy, optimizer, [batch], frozen, on_policy=True)
    after = mifo.values(policy)
    assert torch.equal(after[mask], before[mask])
    assert (after[~mask] != before[~mask]).float().mean() > 0.99


@pytest.mark.parametrize("share", [0.0, 0.001, 0.37, 1.0])
def test_as_many_as_asked_and_those_that_moved_most(share):
    importance = torch.rand(1001, generator=torch.Generator().manual_seed(0))
    count = math.ceil(share * 1001)
    chosen = mifo.most_moved(importance, share, "moved", None)
    assert chosen.sum() == count
    if 0 < count < 1001:
        assert importance[chosen].min() >= importance[~chosen].max()
    generator = torch.Generator().manual_seed(0)
    by_chance = mifo.most_moved(importance, share, "random", generator)
    assert by_chance.sum() == count
    if 0 < count < 1001:
        assert not torch.equal(by_chance, chosen)
    assert not mifo.most_moved(importance, share, "none", None).any()


def test_the_hardest_tokens():
    entropy = torch.tensor([0.1, 3.0, 0.2, 2.0, 0.0])
    assert mifo.hardest(entropy, 0.4).tolist() == [False, True, False, True, False]
    assert mifo.hardest(entropy, 0.41).sum() == 3
    assert mifo.hardest(entropy, 1.0).all()


def test_entropies_are_those_of_the_model(policy):
    batch = mifo.solutions(TASKS)
    hidden, head = policy.hidden(batch)
    logits = torch.log_softmax((hidden.double() @ head.double().T), -1)
    expected = -(logits.exp() * logits).sum(-1)
    torch.testing.assert_close(mifo.entropies(policy, batch).double(), expected, rtol=0, atol=1e-4)


def test_sft_is_the_mean_log_likelihood_of_the_hard_tokens(policy):
    batch = mifo.solutions(TASKS)
    hard = mifo.hardest(mifo.entropies(policy, batch), 0.5)
    batch.weight = hard.float() / hard.sum()
    trainer.backward(policy, [batch], [None], on_policy=True, **mifo.OBJECTIVE)
    found = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.zero_grad()
    hidden, head = policy.hidden(batch)
    logprob = torch.log_softmax(hidden @ head.T, -1).gather(1, batch.target[:, None])[:, 0]
    (-logprob[hard].mean()).backward()
    for gradient, parameter in zip(found, policy.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-6)


def test_tasks_have_one_answer_on_their_page_and_the_teacher_gives_it():
    for task in mifo_toy.draw_tasks("test", 1, 0, 200):
        words = task.page.split()
        assert words.count(task.answer) == 1
        assert all(words.count(other) == 1 and other != task.answer for other in task.others)
        solution = [mifo_toy.IDS[word] for word in task.solution.split()]
        assert task.grade(solution) == 1
        assert task.grade([mifo_toy.IDS[task.others[0]], mifo_toy.EOT]) == 0
        assert task.grade(solution[:-1]) == 0, "it was cut"
        assert ("<answer>" in task.solution) == (task.kind == "indirect")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A cache with a base model that has hardly learned anything."""
    cache = tmp_path_factory.mktemp("mifo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(mifo_toy.build.keywords, "steps", (4, 4))
        yield cache


SMALL = "--rl_steps 1 --sft_steps 2 --questions 4 --group 2 --eval_questions 8".split()


def test_all_arms_start_from_one_first_phase(base):
    line = [*SMALL, "--cache", str(base), "--runs", str(base), "--name", "arms"]
    assert mifo.main(line) == 0
    table = json.loads((base / "arms" / "seed-0.json").read_text())["arms"]
    assert table.keys() == mifo.ARMS.keys()
    assert all(len(arm["after"]) == 5 for arm in table.values())
    starts = [arm["after"][0] for arm in table.values()]
    assert all(start == starts[0] for start in starts)
    assert table["RL only"]["sft_moved"] == [0, 0]
    assert all(min(arm["sft_moved"]) > 0 for name, arm in table.items() if name != "RL only")
    assert mifo.main(line) == 0
    assert json.loads((base / "arms" / "seed-0.json").read_text())["arms"] == table


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_shown_are_questions_that_rollouts_missed(base, threshold, monkeypatch):
    config = MifoConfig(rl_steps=2, questions=8, group=4, threshold=threshold)
    model = trainer.load_model(mifo_toy.build(base, 0), torch.device("cpu"))
    policy = trainer.Policy(model, bf16=False)
    right = {}

    def grade(task, tokens):
        right.setdefault(task, []).append(float(random.Random(f"{task} {tokens}").random() < 0.5))
        return right[task][-1]

    monkeypatch.setattr(mifo_toy.Task, "grade", grade)
    buffer = mifo.rl_phase(policy, mifo.Sampler(model, max_tokens=4096), config, phase=0)
    assert len(right) == 16 and all(len(rewards) == 4 for rewards in right.values())
    assert set(buffer) == {t for t, rewards in right.items() if sum(rewards) / 4 <= threshold}


def test_history_forgets_at_alpha_0(base, monkeypatch):
    """C_i = α C_{i−1} + |Δ_i|; what is frozen in the second SFT phase follows from it."""
    seen = []
    plain = mifo.most_moved

    def noted(importance, *rest):
        seen.append(importance.clone())
        return plain(importance, *rest)

    monkeypatch.setattr(mifo, "most_moved", noted)
    model = trainer.load_model(mifo_toy.build(base, 0), torch.device("cpu"))
    policy = trainer.Policy(model, bf16=False)
    first = torch.ones_like(mifo.values(policy))
    for history in (0.0, 0.5):
        config = MifoConfig(
            rl_steps=1, sft_steps=0, questions=4, group=2, eval_questions=8, history=history
        )
        mifo.play_arm((policy, [], first), config, "moved")
    assert torch.equal(seen[0], first) and torch.equal(seen[2], first)
    torch.testing.assert_close(seen[3] - seen[1], 0.5 * first)
