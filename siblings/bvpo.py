"""BVPO: preference optimisation with gradients from answers with and without a trace, mixed.

arXiv 2510.05095. A reasoning model writes a trace r, then an answer y. Preferences are about y, so
the ideal loss is DPO's on the marginal π(y|x) = Σ_r π(r, y|x), which nobody can sum up. In use is
one sampled trace an answer, a noisy estimate. BVPO mixes in the gradient of answers without any:

    ℓ_t = −log σ(β Δ_t),  Δ_t = log π(r⁺,y⁺|x)/π_ref(r⁺,y⁺|x) − log π(r⁻,y⁻|x)/π_ref(r⁻,y⁻|x)
    ℓ_e = the same with the empty trace;      g_t = ∇ℓ_t,  g_e = ∇ℓ_e,      g = α g_t + (1 − α) g_e

    Theorem 1    tr Var_r(g) = α² tr Var_r(g_t)
    Theorem 2    E‖g − g_m‖² = ‖α b_t + (1 − α) b_e‖² + α² tr Σ_t     b: bias against the marginal's
    minimiser    α* = clip(b_e·(b_e − b_t) / (‖b_t − b_e‖² + tr Σ_t), 0, 1)

(g_e does not depend on r: for a given pair it has no variance.) Measured here, though the paper
does not say it: at π = π_ref a sampled trace has no bias, by Fisher's identity ∇log π(y|x) =
E_{r ~ π(r|x,y)} ∇log π(r,y|x), so mixing pays only as far as g_e is nearly right. The honest rival
are K traces a pair: variance tr Σ_t / K. In a batch of n pairs it falls as 1/n, and the bias stays.

    python -m siblings.bvpo                 the toy of bvpo_toy.py: traces of one word, all summed
    python -m siblings.bvpo --steps 0       the measurement alone

Sources: reviews that quote the theorems; there is no public code, and the paper was not read. The
minimiser and the rival are derived here. α = ½ is said to be the paper's. It draws its empty-trace
pairs from answers without thinking; here both losses see the same (y⁺, y⁻).

DPO's gradient is c (∇log π⁻ − ∇log π⁺) with c = β σ(−βΔ): one pass of the GRPO loss at ρ = 1, with
the advantages c and −c. What it does not show: that a trace of many words behaves as one of one
word does. Tests: pytest tests/test_bvpo.py
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import trainer
from config import fail, parse, parser
from plumbing import folders
from rollout import Sample
from siblings import bvpo_toy as toy
from siblings.bvpo_toy import Pair

CPU = torch.device("cpu")
TRACES = len(toy.TRACES)
# arm -> (α, traces of a pair)
ARMS = {"alpha 0": (0.0, 1), "alpha 1/2": (0.5, 1), "alpha 1": (1.0, 1), "alpha 1, K 4": (1.0, 4)}


@dataclass
class BvpoConfig:
    """The options, each with its reason."""

    name: str = "bvpo"  # of the folder below --runs
    runs: str = "runs"  # where results go
    cache: str = ".cache"  # keeps the base model
    seed: int = 0  # of the base model, the pairs and the traces
    pairs: int = 64  # of the measurement, on held-out pages
    beta: float = 0.5  # β of DPO
    steps: int = 40  # of DPO for each arm; 0: none
    batch: int = 8  # pairs per step
    lr: float = 1e-4  # of AdamW


# --------------------------------------------------------------------------- log-probs, gradients


def packed(samples: list[Sample]) -> list[trainer.MicroBatch]:
    """Micro-batches in which every token of a sample counts its advantage."""
    weights = [torch.tensor(sample.mask).float() for sample in samples]
    return trainer.micro_batches(samples, weights, 8192, CPU)


@torch.no_grad()
def logprobs(policy: trainer.Policy, pairs: list[Pair]) -> Tensor:
    """log π of what each sample of the pairs says: [pairs, 2 · TRACES + 2]."""
    samples = [sample for pair in pairs for sample in pair.samples()]
    total = torch.zeros(len(samples))
    for batch in packed(samples):
        total.index_add_(0, batch.owner, trainer.logprob(policy, batch, 1.0))
    return total.view(len(pairs), -1)


def accumulate(policy: trainer.Policy, samples: list[Sample], advantages: list[float]) -> None:
    """Adds −Σ_i advantage_i ∇log π(sample_i) to the gradients."""
    for sample, advantage in zip(samples, advantages, strict=True):
        sample.advantage = advantage
    batches = packed(samples)
    objective = {"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0, "temperature": 1.0}
    trainer.backward(policy, batches, [None] * len(batches), on_policy=True, **objective)


def gradient(policy: trainer.Policy, sample: Sample) -> Tensor:
    """∇log π(sample), flat: [P]."""
    policy.zero_grad(set_to_none=True)
    accumulate(policy, [sample], [-1.0])
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]).double()


# ------------------------------------------------------------------------- the theorems, by summing


@dataclass
class Errors:
    """Bias and variance of the two gradients against the marginal's."""

    traced: float  # ‖b_t‖²
    empty: float  # ‖b_e‖²
    product: float  # b_t · b_e
    variance: float  # tr Σ_t, of one trace a pair

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
    """A pair's gradients as rows of coefficients on V, the gradients ∇log π of its samples.

    From their log-probs [2 · TRACES + 2] under π and π_ref. Returns g_t for every (r⁺, r⁻), how
    probable those are given y⁺ and y⁻ [TRACES, TRACES], g_e, and g_m, the gradient of DPO on
    Σ_r π(r, y|x).
    """
    now, ref = now.double(), ref.double()
    good, bad = slice(0, TRACES), slice(TRACES, 2 * TRACES)
    rows = torch.eye(2 * TRACES + 2, dtype=torch.float64)
    gain = now - ref

    def c(delta: Tensor) -> Tensor:
        return beta * torch.sigmoid(-beta * delta)

    traced = c(gain[good][:, None] - gain[bad])[..., None] * (rows[bad] - rows[good][:, None])
    p_good, p_bad = now[good].softmax(0), now[bad].softmax(0)  # π(r|x,y)
    marginal_gain = [now[side].logsumexp(0) - ref[side].logsumexp(0) for side in (good, bad)]
    marginal = c(marginal_gain[0] - marginal_gain[1]) * (p_bad @ rows[bad] - p_good @ rows[good])
    empty = c(gain[-2] - gain[-1]) * (rows[-1] - rows[-2])
    return traced, p_good[:, None] * p_bad, empty, marginal


def measure(when: str, policy, ref, pairs: list[Pair], beta: float) -> dict[str, Errors]:
    """Of single pairs, on average; and of the mean gradient of all of them."""
    sums = torch.zeros(4, dtype=torch.float64)
    biases = 0  # summed over the pairs: [2, P]
    for pair, now, before in zip(pairs, logprobs(policy, pairs), logprobs(ref, pairs)):
        traced, chance, empty, marginal = coefficients(now, before, beta)
        mean = (chance[..., None] * traced).sum((0, 1))
        vectors = torch.stack([gradient(policy, sample) for sample in pair.samples()])  # V
        apart = (traced - mean).flatten(0, 1) @ vectors  # [TRACES², P]
        variance = chance.flatten() @ apart.square().sum(1)
        b_t, b_e = torch.stack([mean - marginal, empty - marginal]) @ vectors
        sums += torch.stack([b_t @ b_t, b_e @ b_e, b_t @ b_e, variance])
        biases = biases + torch.stack([b_t, b_e])
    n = len(pairs)
    b_t, b_e = biases / n
    mean = torch.stack([b_t @ b_t, b_e @ b_e, b_t @ b_e, sums[3] / n**2])
    found = {"one pair": sums / n, f"mean of {n} pairs": mean}
    return {f"{when}, {name}": Errors(*numbers.tolist()) for name, numbers in found.items()}


# -------------------------------------------------------------------------------------- training


def advantages_of(gain: Tensor, before: Tensor, beta: float, alpha: float, traces: int, generator):
    """DPO's gradient as advantages of a pair's samples; gain: log π/π_ref, before: log π_ref.

    The traces are drawn from π_ref(r|x,y), as data would have them.
    """
    chances = before[: 2 * TRACES].view(2, TRACES).softmax(1)
    drawn = chances.multinomial(traces, replacement=True, generator=generator).T.tolist()
    advantages = torch.zeros_like(gain)
    couples = [(i, TRACES + j, alpha / traces) for i, j in drawn]
    for good, bad, share in [*couples, (-2, -1, 1 - alpha)]:
        c = share * beta * torch.sigmoid(-beta * (gain[good] - gain[bad]))
        advantages[good] += c
        advantages[bad] -= c
    return advantages


def train(policy, ref, config: BvpoConfig, alpha: float, traces: int) -> None:
    """--steps steps of DPO."""
    optimizer = trainer.make_optimizer(policy, config.lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(config.seed)
    for step in range(config.steps):
        pairs = toy.draw_pairs("train", config.seed, step * config.batch, config.batch)
        before = logprobs(ref, pairs)
        gain = logprobs(policy, pairs) - before
        how = (config.beta, alpha, traces, generator)
        rows = [advantages_of(*row, *how) / len(pairs) for row in zip(gain, before)]
        optimizer.zero_grad(set_to_none=True)
        accumulate(policy, [s for p in pairs for s in p.samples()], torch.cat(rows).tolist())
        trainer.gradient_norm(policy, 1.0)
        optimizer.step()


def accuracies(policy: trainer.Policy, pairs: list[Pair]) -> dict[str, float]:
    """How probable the right answer is with a trace, all of them summed, and at once."""
    chances = logprobs(policy, pairs).exp().mean(0)
    return {"thinking": float(chances[:TRACES].sum()), "at once": float(chances[-2])}


def show(errors: dict[str, Errors], right: dict[str, dict[str, float]]) -> None:
    """Mean squared errors, each over that of one sampled trace, and accuracies."""
    print("E‖g − g_m‖², over that of α = 1")
    for name, numbers in errors.items():
        cells = {f"α* = {numbers.best():.3f}": numbers.mse(numbers.best())}
        cells |= {"α = ½": numbers.mse(0.5), "α = 0": numbers.mse(0.0)}
        cells |= {f"K = {k}": numbers.mse(1.0, k) for k in (2, 4)}
        told = [f"{cell}: {error / numbers.mse(1.0):.2f}" for cell, error in cells.items()]
        print(f"  {name:<34}{'   '.join(told)}")
    for arm, numbers in right.items():
        print(f"right, {arm:<14}" + "   ".join(f"{name} {x:.3f}" for name, x in numbers.items()))


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    config = BvpoConfig(**parse(parser(BvpoConfig, __doc__), arguments))
    if config.pairs < 1 or config.batch < 1 or config.beta <= 0:
        return fail("--pairs, --batch and --beta must be above 0")
    torch.set_num_threads(1)
    start = toy.build(config.cache, config.seed)
    ref = trainer.Policy(trainer.load_model(start, CPU), bf16=False)
    pairs = toy.draw_pairs("eval", config.seed, 0, config.pairs)
    held_out = toy.draw_pairs("eval", config.seed, config.pairs, 100)
    errors = measure("at π = π_ref", ref, ref, pairs, config.beta)
    right = {"before": accuracies(ref, held_out)}
    for arm, (alpha, traces) in ARMS.items() if config.steps else ():
        policy = trainer.Policy(trainer.load_model(start, CPU), bf16=False)
        train(policy, ref, config, alpha, traces)
        right[arm] = accuracies(policy, held_out)
        if arm == "alpha 1":
            errors |= measure("after DPO at α = 1", policy, ref, pairs, config.beta)
    show(errors, right)
    folder = Path(config.runs) / config.name
    folder.mkdir(parents=True, exist_ok=True)
    told = {"errors": {name: vars(found) for name, found in errors.items()}, "right": right}
    print("written to", folders.write_json(folder / f"seed-{config.seed}.json", told))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
