"""BVPO: DPO's gradient, Fisher's identity, the theorems and their minimiser."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from mutants import load_mutant

import trainer
from siblings import bvpo
from siblings import bvpo_toy as toy
from toy import base_model, language

BETA = 0.7


def new_policy(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = base_model.new_model(len(language.make_tokenizer()))
    return trainer.Policy(model, bf16=False)


@pytest.fixture(scope="module")
def policies():
    """(π, π_ref), which differ."""
    return new_policy(0), new_policy(1)


PAIRS = toy.draw_pairs("test", 0, 0, 2)


def stock_logprobs(policy, pair):
    """The same as bvpo.logprobs, by plain autograd through one sample at a time."""
    found = []
    policy.model.set_attn_implementation("eager")
    for sample in pair.samples():
        logprob = policy.model(torch.tensor([sample.tokens])).logits[0].log_softmax(-1)
        told = [i for i, own in enumerate(sample.mask) if own]
        found.append(sum(logprob[i - 1, sample.tokens[i]] for i in told))
    policy.model.set_attn_implementation("mars_packed")
    return torch.stack(found)


def flat_gradient(policy, loss):
    policy.zero_grad(set_to_none=True)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()]).double()


def dpo(now, ref, good, bad):
    return -F.logsigmoid(BETA * ((now[good] - ref[good]) - (now[bad] - ref[bad])))


def vectors_of(policy, pair):
    return torch.stack([bvpo.gradient(policy, sample) for sample in pair.samples()])


def close(found, wanted, tolerance=1e-4):
    return float((found - wanted).norm()) < tolerance * float(wanted.norm())


def rows_are_gradients(module, policies) -> bool:
    """Whether coefficients give the gradients that autograd finds of the losses as written down."""
    policy, other = policies
    pair = PAIRS[0]
    with torch.no_grad():
        ref = stock_logprobs(other, pair)
    now = module.logprobs(policy, [pair])[0]
    traced, _, empty, marginal = module.coefficients(now, ref, BETA)
    vectors = vectors_of(policy, pair)

    def marginal_loss(now):
        sides = [x[:8].view(2, 4).logsumexp(1) for x in (now, ref)]
        gain = sides[0] - sides[1]
        return -F.logsigmoid(BETA * (gain[0] - gain[1]))

    wanted = [
        (traced[1, 2], lambda now: dpo(now, ref, 1, 4 + 2)),
        (empty, lambda now: dpo(now, ref, -2, -1)),
        (marginal, marginal_loss),
    ]
    return all(
        close(row @ vectors, flat_gradient(policy, loss(stock_logprobs(policy, pair))))
        for row, loss in wanted
    )


def test_the_gradients_are_those_of_the_losses(policies):
    assert rows_are_gradients(bvpo, policies)


@pytest.mark.parametrize(
    "stands, becomes",
    [
        ("beta * torch.sigmoid(-beta * delta)", "beta * torch.sigmoid(beta * delta)"),
        ("(rows[bad] - rows[good][:, None])", "(rows[bad] + rows[good][:, None])"),
        ("(p_bad @ rows[bad] - p_good @ rows[good])", "(p_bad @ rows[bad] - rows[good].mean(0))"),
        ("empty = c(gain[-2] - gain[-1])", "empty = c(gain[-1] - gain[-2])"),
    ],
)
def test_mutants_are_noticed(stands, becomes, policies, tmp_path):
    mutant = load_mutant("siblings/bvpo.py", stands, becomes, tmp_path)
    assert not rows_are_gradients(mutant, policies)


def test_a_training_step_has_dpos_gradient(policies):
    """One trace a pair, drawn; its loss is α ℓ_t + (1 − α) ℓ_e."""
    policy, other = policies
    pair = PAIRS[0]
    now, ref = (bvpo.logprobs(p, [pair])[0] for p in policies)
    draw = torch.Generator().manual_seed(3)
    advantages = bvpo.advantages_of(now - ref, ref, BETA, 0.6, 1, draw)
    good, bad = [i for i, a in enumerate(advantages[:8]) if a]
    assert good < 4 <= bad and float(advantages.sum()) == pytest.approx(0)
    policy.zero_grad(set_to_none=True)
    bvpo.accumulate(policy, pair.samples(), advantages.tolist())
    found = torch.cat([p.grad.flatten() for p in policy.parameters()]).double()
    told = stock_logprobs(policy, pair)
    loss = 0.6 * dpo(told, ref, good, bad) + 0.4 * dpo(told, ref, -2, -1)
    assert close(found, flat_gradient(policy, loss))


def test_fishers_identity(policies):
    """At π = π_ref a sampled trace has no bias; elsewhere it has some."""
    policy, other = policies
    at_home = bvpo.measure("", policy, policy, PAIRS, BETA)[", one pair"]
    away = bvpo.measure("", policy, other, PAIRS, BETA)[", one pair"]
    assert at_home.traced < 1e-12 * at_home.empty
    assert away.traced > 1e-12 * away.empty and at_home.variance > 0


def test_the_theorems_hold_for_drawn_traces(policies):
    """What is measured on draws is what the sums say, at every α."""
    policy, other = policies
    pair = PAIRS[0]
    now, ref = (bvpo.logprobs(p, [pair])[0] for p in policies)
    traced, chance, empty, marginal = bvpo.coefficients(now, ref, BETA)
    vectors = vectors_of(policy, pair)
    said = bvpo.measure("", policy, other, [pair], BETA)[", one pair"]
    generator = torch.Generator().manual_seed(0)
    drawn = chance.flatten().multinomial(4000, replacement=True, generator=generator)
    counts = drawn.bincount(minlength=16).double() / 4000  # [16]
    g_t = traced.flatten(0, 1) @ vectors  # [16, P], each as often as it was drawn
    g_e, g_m = empty @ vectors, marginal @ vectors

    def spread(g):
        return float(counts @ (g - counts @ g).square().sum(1))

    for alpha in (0.0, 0.3, 0.5, 1.0):
        g = alpha * g_t + (1 - alpha) * g_e
        assert spread(g) == pytest.approx(alpha**2 * spread(g_t), rel=1e-6, abs=1e-12)
        mse = float(counts @ (g - g_m).square().sum(1))
        assert mse == pytest.approx(said.mse(alpha), rel=0.1)
    grid = [i / 1000 for i in range(1001)]
    assert min(grid, key=said.mse) == pytest.approx(said.best(), abs=1e-3)


# ‖b_t‖², ‖b_e‖², b_t · b_e, tr Σ_t
NUMBERS = list(itertools.product((0.5, 1.0), (0.5, 2.0), (-0.5, 0.4), (0.1, 3.0)))


@pytest.mark.parametrize("numbers", NUMBERS)
def test_the_minimiser(numbers):
    errors = bvpo.Errors(*numbers)
    grid = [i / 1000 for i in range(1001)]
    assert min(grid, key=errors.mse) == pytest.approx(errors.best(), abs=2e-3)
    assert errors.mse(1.0, 4) == pytest.approx(errors.traced + errors.variance / 4)


def test_demonstrations_are_what_the_samples_hold():
    """The base model has read its prompts in the form in which it is measured."""
    rng = random.Random(0)
    for index in range(40):
        (pair,) = toy.draw_pairs("test", 0, index, 1)
        (given, _), (said, learnt) = toy.demonstrate(pair.page, rng, thinks=index % 2 == 0)
        *trace, answer, _ = said.replace("<answer>", "").split()
        made = toy.sample(pair.page, answer, trace[0] if trace else None)
        ids = toy.ids()
        assert learnt and made.tokens == [ids[word] for word in f"{given} {said}".split()]
        assert made.mask.index(True) == len(given.split())
        assert pair.wrong in pair.page.answers[1:] and len(pair.samples()) == 10


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(toy, "STEPS", 2)
    line = "--pairs 1 --steps 1 --batch 1".split()
    line += ["--cache", str(tmp_path), "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr(toy, "build", lambda cache, seed, build=toy.build: build(cache, seed, 2))
    assert bvpo.main(line) == 0
    assert "after DPO at α = 1" in capsys.readouterr().out
    assert (tmp_path / "runs" / "bvpo" / "seed-0.json").exists()
    assert bvpo.main([*line, "--beta", "0"]) == 2
