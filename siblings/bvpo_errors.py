"""Exact errors of BVPO's gradients: bias and variance against the marginal's gradient.

In bvpo_toy.py a trace is one of four words, so π(y|x) = Σ_r π(r, y|x) and every mean over traces
are sums of few terms. bvpo.py has the formulas. All gradients of a pair are linear combinations of
V, the gradients ∇log π of its ten samples. Traces are drawn from π_ref(r|x,y), as in training.

    python -m siblings.bvpo measure [RUN] [--pairs N]

Tests: pytest tests/test_bvpo.py
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import trainer
from config import UserError, fail, parse, parser
from plumbing import evaluation, models
from rollout import Sample
from siblings import bvpo_toy as toy
from siblings import solo

CPU = torch.device("cpu")
TRACES = len(toy.TRACES)


@functools.cache
def load(model: str | Path) -> trainer.Policy:
    """The policy of a model's folder."""
    return trainer.Policy(trainer.load_model(model, CPU), bf16=False)


def logprobs(policy: trainer.Policy, samples: list[Sample]) -> Tensor:
    """log π of each sample of the pairs: [pairs, 2 · TRACES + 2]. Also stored in the samples."""
    token_logprobs, _ = solo.score(policy, samples)
    for sample, own in zip(samples, token_logprobs):
        sample.logprobs[-len(own) :] = own.tolist()
    return torch.stack([own.sum() for own in token_logprobs]).view(-1, 2 * TRACES + 2)


def gradient(policy: trainer.Policy, sample: Sample) -> Tensor:
    """∇log π(sample) as one vector [P]."""
    sample.advantage = -1.0
    weights = [torch.tensor(sample.mask).float()]
    batches = trainer.micro_batches([sample], weights, 8192, CPU)
    policy.zero_grad(set_to_none=True)
    objective = {"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0, "temperature": 1.0}
    trainer.backward(policy, batches, on_policy=True, **objective)
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]).double()


@dataclass
class Errors:
    """Biases and variance of the two gradients against the marginal's gradient."""

    traced: float  # ‖b_t‖²
    empty: float  # ‖b_e‖²
    product: float  # b_t · b_e
    variance: float  # tr Σ_t, with one trace for each pair

    def mse(self, alpha: float, traces: int = 1) -> float:
        """E‖α g_t + (1 − α) g_e − g_m‖²"""
        rest = 1 - alpha
        bias = alpha**2 * self.traced + rest**2 * self.empty + 2 * alpha * rest * self.product
        return bias + alpha**2 * self.variance / traces

    def best(self) -> float:
        """α*, the minimiser of `mse` on [0, 1]."""
        distance = self.traced + self.empty - 2 * self.product
        return min(1.0, max(0.0, (self.empty - self.product) / (distance + self.variance)))


def coefficients(now: Tensor, ref: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A pair's gradients as coefficients of V, the gradients ∇log π of its samples.

    now, ref: the samples' log-probs [2 · TRACES + 2] under π and π_ref. Returns g_t for every
    (r⁺, r⁻), the probability of (r⁺, r⁻) given y⁺ and y⁻ [TRACES, TRACES], g_e, and g_m, the
    gradient of DPO on Σ_r π(r, y|x).
    """
    now, ref = now.double(), ref.double()
    good, bad = slice(0, TRACES), slice(TRACES, 2 * TRACES)
    rows = torch.eye(2 * TRACES + 2, dtype=torch.float64)
    gain = now - ref

    def c(delta: Tensor) -> Tensor:
        return beta * torch.sigmoid(-beta * delta)

    traced = c(gain[good][:, None] - gain[bad])[..., None] * (rows[bad] - rows[good][:, None])
    p_good, p_bad = now[good].softmax(0), now[bad].softmax(0)  # π(r|x,y)
    chance = ref[good].softmax(0)[:, None] * ref[bad].softmax(0)
    marginal_gain = [now[side].logsumexp(0) - ref[side].logsumexp(0) for side in (good, bad)]
    marginal = c(marginal_gain[0] - marginal_gain[1]) * (p_bad @ rows[bad] - p_good @ rows[good])
    empty = c(gain[-2] - gain[-1]) * (rows[-1] - rows[-2])
    return traced, chance, empty, marginal


def measure(policy, ref, pairs: list[list[Sample]], beta: float) -> dict[str, Errors]:
    """The mean error of one pair's gradient, and the error of the mean gradient of all pairs."""
    sums = torch.zeros(4, dtype=torch.float64)
    biases = 0  # summed over the pairs: [2, P]
    for samples in pairs:
        now, before = logprobs(policy, samples)[0], logprobs(ref, samples)[0]
        traced, chance, empty, marginal = coefficients(now, before, beta)
        expected = (chance[..., None] * traced).sum((0, 1))  # E g_t
        vectors = torch.stack([gradient(policy, sample) for sample in samples])  # V
        deviations = (traced - expected).flatten(0, 1) @ vectors  # [TRACES², P]
        variance = chance.flatten() @ deviations.square().sum(1)
        b_t, b_e = torch.stack([expected - marginal, empty - marginal]) @ vectors
        sums += torch.stack([b_t @ b_t, b_e @ b_e, b_t @ b_e, variance])
        biases = biases + torch.stack([b_t, b_e])
    n = len(pairs)
    b_t, b_e = biases / n
    mean = torch.stack([b_t @ b_t, b_e @ b_e, b_t @ b_e, sums[3] / n**2])
    rows = {"one pair": sums / n, f"mean of {n} pairs": mean}
    return {name: Errors(*numbers.tolist()) for name, numbers in rows.items()}


def show(errors: dict[str, Errors]) -> None:
    """Prints mean squared errors, each divided by the error of one sampled trace."""
    print("E‖g − g_m‖², divided by its value at α = 1")
    for name, numbers in errors.items():
        cells = {f"α* = {numbers.best():.3f}": numbers.mse(numbers.best())}
        cells |= {"α = ½": numbers.mse(0.5), "α = 0": numbers.mse(0.0)}
        cells |= {f"K = {k}": numbers.mse(1.0, k) for k in (2, 4)}
        texts = [f"{cell}: {error / numbers.mse(1.0):.2f}" for cell, error in cells.items()]
        print(f"  {name:<18}{'   '.join(texts)}")


def main(options: type, arguments: list[str]) -> int:
    """`measure [RUN] [--pairs N]`: prints the errors at the end of a run, or of the base model."""
    line = parser(options, __doc__)
    line.add_argument("run", nargs="?")
    line.add_argument("--pairs", type=int, default=64)
    try:
        given = parse(line, arguments)
        run, count = given.pop("run", None), given.pop("pairs")
        if count < 1:
            raise UserError("--pairs must be at least 1")
        model, saved = models.find_checkpoint("bvpo", run) if run else (None, {})
        read = set() if run else {"cache", "seed", "model", "beta"}
        if saved is None or given.keys() - read:
            raise UserError(
                "measure takes --pairs, and a run of BVPO or --cache, --seed, --model and --beta: "
                "leave the rest out"
            )
        config = options(**(saved | given))
        config.check(training=False)
        if run:
            start = evaluation.frozen_model(Path(run))
        else:
            start = config.model if config.model != "toy" else toy.build(config.cache, config.seed)
        chat = solo.Language(models.load_tokenizer(start))
        policy, reference = load(model or start), load(start)
        pairs = [toy.pair("measure", config.seed, i) for i in range(count)]
        samples = [toy.samples_of(toy.answers(chat, 0, pair)) for pair in pairs]
        show(measure(policy, reference, samples, config.beta))
    except UserError as error:
        return fail(error)
    except KeyboardInterrupt:
        fail("interrupted; nothing is written, so start again")
        return 130
    return 0
