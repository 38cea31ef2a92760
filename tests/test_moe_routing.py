"""Routing in a mixture of experts: the divergence by hand, the hook's place, parallel texts."""

import math
import signal

import pytest
import torch

from siblings import moe_routing
from toy import language

IDS = moe_routing.vocabulary()


@pytest.fixture(scope="module")
def model():
    """Random weights, with routers that prefer somebody."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = moe_routing.make_model(len(IDS)).eval()
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.mlp.gate.weight)
    return model


def test_the_divergence_is_symmetric_and_normalised():
    """Two distributions worked out on paper, and the ends of the scale."""
    p, q = torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])
    # H(p) = 0 and H(q) = log 2; the mean is (¾, ¼), with H = log 4 − ¾ log 3.
    by_hand = (1.5 * math.log(2) - 0.75 * math.log(3)) / (0.5 * math.log(2))
    apart = math.log(2) / math.log(8)  # 1 only for two experts
    eight, two = torch.eye(8), torch.eye(2)
    pairs = [(p, q), (q, p), (eight[0], eight[5]), (p, p), (two[0], two[1])]
    values = [float(moe_routing.divergence(*pair)) for pair in pairs]
    assert values == pytest.approx([by_hand, by_hand, apart, 0, 1], abs=1e-6)


def test_steering_changes_the_chosen_logits_of_the_chosen_layers(model):
    """λ = 0 changes nothing. Else the chosen logits of the chosen layer rise by λ std(z).

    What layers before it do is unchanged, and layers after it meet other experts' work: the hook
    sits before softmax and top-k.
    """
    texts = moe_routing.held_out(0, 1, weak=False)

    def logits(experts, strength):
        with moe_routing.steered(model, experts, strength):
            return moe_routing.read(model, texts)[1]

    plain = logits({}, 8.0)
    same = logits({1: [3], 2: [0, 5]}, 0.0)
    after = logits({1: [3]}, 8.0)
    rise = torch.zeros_like(plain[1])  # [T, E]
    rise[:, 3] = 8.0 * plain[1].std(-1)
    assert torch.equal(logits({}, 8.0), plain), "the hook is gone"
    torch.testing.assert_close(same, plain, atol=1e-6, rtol=0)
    torch.testing.assert_close(after[1] - plain[1], rise, atol=1e-5, rtol=0)
    assert torch.equal(after[0], plain[0])
    assert (after[2] - plain[2]).abs().amax(-1).min() > 1e-3


def test_texts_are_parallel():
    """Both languages have the same words in the same order; only control words are common."""
    strong, weak = (moe_routing.held_out(1, 20, weak) for weak in (False, True))
    shared = len(language.CONTROL)
    for one, other in zip(strong, weak):
        assert one.task == other.task
        for a, b in zip(one.tokens, other.tokens, strict=True):
            assert b == (a if a < shared else a + len(IDS))


def test_what_is_read_is_what_the_model_says(model):
    """Logits of the routers and the share of right answers, one unpadded text at a time."""
    texts = moe_routing.held_out(0, 6, weak=True)
    answer = model(torch.tensor([texts[0].tokens])).logits[0, -3].argmax()
    texts[0].tokens[-2] = int(answer)  # so one of six is right
    right, logits, task = moe_routing.read(model, texts)
    alone = [moe_routing.read(model, [text]) for text in texts]
    assert right == pytest.approx(1 / 6)
    assert torch.allclose(logits, torch.cat([one[1] for one in alone], 1), atol=1e-4)
    assert torch.equal(task, torch.cat([one[2] for one in alone]))
    for text in texts:
        words = [token % len(IDS) for token in text.tokens]
        assert words[text.task] == IDS["<purpose>"] and words[-1] == IDS["<eot>"]


def test_task_experts_by_hand():
    """Four tokens, the last two are the task's. Experts 0 and 1 read the page, 2 and 0 the task."""
    logits = torch.zeros(1, 4, 8)
    for token, chosen in enumerate([(0, 1), (0, 1), (0, 2), (2, 7)]):
        logits[0, token, list(chosen)] = 1.0
    task = torch.tensor([False, False, True, True])
    # Shares of the task: ¼, 0, ½, ¼; of the page: ½, ½, 0, 0.
    assert moe_routing.task_experts(logits, task, 0.1) == [[2, 7]]
    assert moe_routing.task_experts(logits, task, 0.3) == [[2]]


def test_the_command(tmp_path, capsys):
    line = ["--steps", "1", "--pages", "3", "--runs", str(tmp_path)]
    assert moe_routing.main(line) == 0
    assert "middle, random experts" in capsys.readouterr().out
    assert (tmp_path / "moe_routing" / "seed-0.json").exists()
    assert moe_routing.main([*line, "--seed", str(1 << 70)]) == 2


def test_an_interrupt_and_a_full_disk_end_in_one_sentence(tmp_path, monkeypatch, capsys):
    line = ["--steps", "1", "--pages", "1", "--runs", str(tmp_path)]
    (tmp_path / "moe_routing" / "seed-0.json").mkdir(parents=True)
    assert moe_routing.main(line) == 2
    monkeypatch.setattr(moe_routing, "train", lambda *_: signal.raise_signal(signal.SIGINT))
    assert moe_routing.main(line) == 130
    assert capsys.readouterr().err.count("mars: ") == 2
