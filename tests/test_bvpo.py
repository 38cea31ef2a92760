"""BVPO: DPO's gradient, the theorems and their minimiser."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers.samples import prepared, stock_scores
from helpers.tiny import OBJECTIVE
from hypothesis import given
from hypothesis import strategies as st
from test_mars import metrics

import trainer
from siblings import bvpo, bvpo_errors, solo
from siblings import bvpo_toy as toy
from toy import base_model, language

BETA = 0.7
CHAT = solo.Language(language.make_tokenizer())


@pytest.fixture(scope="module")
def policies():
    """Two different models: π and π_ref."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = [base_model.new_model(len(language.make_tokenizer())) for _ in range(2)]
    return [trainer.Policy(model, bf16=False) for model in models]


PAIRS = [toy.pair("test", 0, i) for i in range(2)]
SAMPLES = [toy.samples_of(toy.answers(CHAT, 0, pair)) for pair in PAIRS]


def sums_of_logprobs(policy, samples):
    """The same as bvpo_errors.logprobs, by plain autograd through one sample at a time."""
    return torch.stack([stock_scores(policy, sample)[0].sum() for sample in samples])


def flat_gradient(policy, backward):
    """The gradient that `backward` leaves in the policy, as one vector."""
    policy.zero_grad(set_to_none=True)
    backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()]).double()


def dpo(now, ref, good, bad):
    return -F.logsigmoid(BETA * ((now[good] - ref[good]) - (now[bad] - ref[bad])))


def close(found, wanted, tolerance=1e-4):
    return float((found - wanted).norm()) < tolerance * float(wanted.norm())


def test_the_gradients_are_those_of_the_losses(policies):
    """Coefficients give the gradients that autograd finds of the losses as written down."""
    policy, other = policies
    pair = SAMPLES[0]
    with torch.no_grad():
        ref = sums_of_logprobs(other, pair)
    now = bvpo_errors.logprobs(policy, pair)[0]
    traced, _, empty, marginal = bvpo_errors.coefficients(now, ref, BETA)
    vectors = torch.stack([bvpo_errors.gradient(policy, sample) for sample in pair])

    def marginal_loss(now):
        sides = [x[:8].view(2, 4).logsumexp(1) for x in (now, ref)]
        gain = sides[0] - sides[1]
        return -F.logsigmoid(BETA * (gain[0] - gain[1]))

    for row, loss in (
        (traced[1, 2], lambda now: dpo(now, ref, 1, 4 + 2)),
        (empty, lambda now: dpo(now, ref, -2, -1)),
        (marginal, marginal_loss),
    ):
        value = loss(sums_of_logprobs(policy, pair))
        assert close(row @ vectors, flat_gradient(policy, value.backward))


@pytest.mark.parametrize("traces", [1, 3])
def test_a_training_step_has_dpos_gradient(policies, traces, monkeypatch):
    """Its loss is α ℓ_t + (1 − α) ℓ_e, a mean over pairs and, of the traced part, over traces."""
    policy, other = policies
    monkeypatch.setattr(bvpo_errors, "load", lambda model: other)
    drawn = []
    plain = torch.Tensor.multinomial

    def noted(*arguments, **options):
        drawn.append(plain(*arguments, **options))
        return drawn[-1]

    monkeypatch.setattr(torch.Tensor, "multinomial", noted)
    config = bvpo.BvpoConfig(questions=2, alpha=0.6, beta=BETA, traces=traces)
    place = {"rank": 0, "ranks": 1, "resampled": 0}
    run = SimpleNamespace(config=config, chat=CHAT, policy=policy, start="", **place)
    run.question = PAIRS.__getitem__
    (samples,) = bvpo.credit(config, bvpo.rollouts(run, 0), 0).values()
    _, batches = prepared(config, {solo.ROLE: samples}, policy)
    found = flat_gradient(policy, lambda: trainer.backward(policy, batches, **OBJECTIVE))

    loss = 0
    for own, traced in zip(SAMPLES, drawn, strict=True):
        with torch.no_grad():
            ref = sums_of_logprobs(other, own)
        now = sums_of_logprobs(policy, own)
        losses = [dpo(now, ref, good, 4 + bad) for good, bad in traced.T.tolist()]
        loss = loss + 0.6 * sum(losses) / traces + 0.4 * dpo(now, ref, -2, -1)
    assert close(found, flat_gradient(policy, (loss / 2).backward))


def test_the_theorems_hold_for_drawn_traces(policies):
    """At every α, variance and error of drawn traces are those of the sums over all traces."""
    policy, other = policies
    pair = SAMPLES[0]
    now, ref = (bvpo_errors.logprobs(p, pair)[0] for p in policies)
    traced, chance, empty, marginal = bvpo_errors.coefficients(now, ref, BETA)
    # As a step of training draws them: from π_ref.
    good, bad = ref[:8].double().view(2, 4).softmax(1)
    assert torch.allclose(chance, good[:, None] * bad)
    vectors = torch.stack([bvpo_errors.gradient(policy, sample) for sample in pair])
    errors, mean = bvpo_errors.measure(policy, other, [pair, pair], BETA).values()
    assert mean.traced == pytest.approx(errors.traced)
    assert mean.variance == pytest.approx(errors.variance / 2)
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
        assert mse == pytest.approx(errors.mse(alpha), rel=0.1)


@given(st.floats(0.1, 2), st.floats(0.1, 2), st.floats(-0.5, 0.5), st.floats(0.1, 3))
def test_the_minimiser_has_the_smallest_error(traced, empty, product, variance):
    """Of ‖b_t‖², ‖b_e‖², b_t · b_e and tr Σ_t."""
    errors = bvpo_errors.Errors(traced, empty, product * min(traced, empty), variance)
    best = errors.mse(errors.best())
    assert all(best <= errors.mse(i / 100) + 1e-9 for i in range(101))
    assert errors.mse(1.0, 4) == pytest.approx(errors.traced + errors.variance / 4)


def test_a_run_is_trained_and_its_errors_are_measured(tmp_path, monkeypatch, capsys):
    build = toy.build
    monkeypatch.setattr(toy, "build", lambda cache, seed: build(cache, seed, 2))
    monkeypatch.setattr(bvpo_errors.toy, "build", toy.build)
    runs = ["--cache", str(tmp_path), "--runs", str(tmp_path / "runs")]
    line = "--steps 2 --questions 2 --eval_questions 8 --name".split()
    assert bvpo.main([*line, "b", *runs]) == 0
    folder = tmp_path / "runs" / "b"
    assert all(line["mismatch_kl"] < 1e-8 for line in metrics(folder)), "rho is 1"
    assert bvpo.main([*line, "c", *runs, "--steps", "1"]) == 0
    assert bvpo.main(["--resume", "--steps", "2", "--name", "c", *runs]) == 0
    weights = [tmp_path / "runs" / name / "checkpoint" / "model.safetensors" for name in "bc"]
    assert weights[0].read_bytes() == weights[1].read_bytes(), "a resumed run has the same bits"
    # The reference is the run's own copy of its first model, so no base model is built.
    monkeypatch.setattr(bvpo_errors.toy, "build", None)
    assert bvpo.main(["measure", str(folder), "--pairs", "1"]) == 0
    assert capsys.readouterr().out.count("K = 4: ") == 2
    for line in (["--traces", "4"], [str(folder), *runs[:2]]):
        assert bvpo.main(["measure", *line]) == 2
