"""BVPO: preference optimisation with gradients from answers with and without a trace, mixed.

arXiv 2510.05095. A reasoning model writes a trace r, then an answer y. Preferences are about y, so
the ideal loss is DPO's on the marginal π(y|x) = Σ_r π(r, y|x), which nobody can sum up. In use is
one sampled trace an answer, a noisy estimate. BVPO mixes in the gradient of answers without any:

    ℓ_t = −log σ(β Δ_t),  Δ_t = log π(r⁺,y⁺|x)/π_ref(r⁺,y⁺|x) − log π(r⁻,y⁻|x)/π_ref(r⁻,y⁻|x)
    ℓ_e = the same with the empty trace;      g_t = ∇ℓ_t,  g_e = ∇ℓ_e,      g = α g_t + (1 − α) g_e

    Theorem 1    tr Var_r(g) = α² tr Var_r(g_t)
    Theorem 2    E‖g − g_m‖² = ‖α b_t + (1 − α) b_e‖² + α² tr Σ_t     b: bias against the marginal's
    minimiser    α* = clip(b_e·(b_e − b_t) / (‖b_t − b_e‖² + tr Σ_t), 0, 1)

(g_e does not depend on r, so its terms of variance are 0 for a given pair.) What follows, though
the paper does not say it, is measured here. At π = π_ref a sampled trace has no bias, by Fisher's
identity ∇log π(y|x) = E_{r ~ π(r|x,y)} ∇log π(r,y|x): mixing pays only as far as g_e is nearly
right. The honest rival are K traces a pair, at K times the cost: variance tr Σ_t / K. Over a batch
of n pairs the variance falls as 1/n too, and the bias does not.

    python -m siblings.bvpo                 the toy of bvpo_toy.py: traces of one word, all summed
    python -m siblings.bvpo --steps 0       the measurement alone

Sources: reviews of the paper that quote its theorems; no code is public, and the paper itself was
not read. The minimiser and the rival are derived here. α = ½ is said to be the paper's. It draws
its empty-trace pairs from answers without thinking; here both losses see the same (y⁺, y⁻).

DPO's gradient is c (∇log π⁻ − ∇log π⁺) with c = β σ(−βΔ): one pass of the GRPO loss at ρ = 1, with
the advantages c and −c. So packing and kernels are the trainer's own.

What it does not show: that a trace of many words behaves as one of one word does.
Tests: pytest tests/test_bvpo.py
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import trainer
from config import UserError, fail, parse, parser
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
    pairs: int = 64  # on held-out pages: for the measurement and the accuracy
    beta: float = 0.5  # β of DPO
    steps: int = 40  # of DPO for each arm; 0: none
    batch: int = 8  # pairs per step
    lr: float = 1e-4  # of AdamW


# --------------------------------------------------------------------------- log-probs, gradients


def weigh(samples: list[Sample], advantages: list[float]) -> list[trainer.MicroBatch]:
    """Micro-batches in which every token of a sample counts its advantage."""
    for sample, advantage in zip(samples, advantages, strict=True):
        sample.advantage = advantage
    weights = [torch.tensor(sample.mask).float() for sample in samples]
    return trainer.micro_batches(samples, weights, 8192, CPU)


@torch.no_grad()
def logprobs(policy: trainer.Policy, pairs: list[Pair]) -> Tensor:
    """log π of what each sample of the pairs says: [pairs, 2 · TRACES + 2]."""
    samples = [sample for pair in pairs for sample in pair.samples()]
    total = torch.zeros(len(samples))
    for batch in weigh(samples, [0.0] * len(samples)):
        total.index_add_(0, batch.owner, trainer.logprob(policy, batch, 1.0))
    return total.view(len(pairs), -1)


def accumulate(policy: trainer.Policy, samples: list[Sample], advantages: list[float]) -> None:
    """Adds −Σ_i advantage_i ∇log π(sample_i) to the gradients."""
    batches = weigh(samples, advantages)
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


def measure(
    policy: trainer.Policy, ref: trainer.Policy, pairs: list[Pair], beta: float
) -> dict[str, Errors]:
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
    of_mean = (b_t @ b_t, b_e @ b_e, b_t @ b_e, sums[3] / n**2)
    single = Errors(*(sums / n).tolist())
    return {"one pair": single, f"mean of {n} pairs": Errors(*map(float, of_mean))}


# -------------------------------------------------------------------------------------- training


def advantages_of(gain: Tensor, before: Tensor, beta: float, alpha: float, traces: int, generator):
    """DPO's gradient as advantages of a pair's samples; gain: log π/π_ref of each.

    The traces are drawn from π_ref(r|x,y), as data would have them.
    """
    chances = before[: 2 * TRACES].view(2, TRACES).softmax(1)
    drawn = chances.multinomial(traces, replacement=True, generator=generator)
    couples = [(int(i), TRACES + int(j), alpha / traces) for i, j in drawn.T]
    advantages = torch.zeros_like(gain)
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
        rows = [advantages_of(*row, *how) for row in zip(gain, before)]
        advantages = (torch.cat(rows) / len(pairs)).tolist()
        samples = [sample for pair in pairs for sample in pair.samples()]
        optimizer.zero_grad(set_to_none=True)
        accumulate(policy, samples, advantages)
        trainer.gradient_norm(policy, 1.0)
        optimizer.step()


def accuracies(policy: trainer.Policy, pairs: list[Pair]) -> dict[str, float]:
    """How probable the right answer is with a trace, all of them summed, and at once."""
    chances = logprobs(policy, pairs).exp()
    thinking = chances[:, :TRACES].sum(1)
    return {"thinking": float(thinking.mean()), "at once": float(chances[:, -2].mean())}


# ------------------------------------------------------------------------------------ the command


def show(errors: dict[str, dict[str, Errors]]) -> None:
    """Mean squared errors, each over that of one sampled trace."""
    print("E‖g − g_m‖², over that of α = 1")
    for at, found in errors.items():
        for of, numbers in found.items():
            one = numbers.mse(1.0)
            cells = {f"α* = {numbers.best():.3f}": numbers.best(), "α = ½": 0.5, "α = 0": 0.0}
            told = [f"{cell} {numbers.mse(alpha) / one:.2f}" for cell, alpha in cells.items()]
            told += [f"K = {k} {numbers.mse(1.0, k) / one:.2f}" for k in (2, 4)]
            print(f"  {at}, {of:<18}{'   '.join(told)}")


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    try:
        config = BvpoConfig(**parse(parser(BvpoConfig, __doc__), arguments))
        if config.pairs < 1 or config.batch < 1 or config.beta <= 0:
            raise UserError("--pairs, --batch and --beta must be above 0")
    except UserError as error:
        return fail(error)
    torch.set_num_threads(1)
    start = toy.build(config.cache, config.seed)

    def load() -> trainer.Policy:
        return trainer.Policy(trainer.load_model(start, CPU), bf16=False)

    ref = load()
    pairs = toy.draw_pairs("eval", config.seed, 0, config.pairs)
    errors = {"at π = π_ref": measure(ref, ref, pairs, config.beta)}
    table = {"before": accuracies(ref, pairs)}
    for arm, (alpha, traces) in ARMS.items() if config.steps else ():
        policy = load()
        train(policy, ref, config, alpha, traces)
        table[arm] = accuracies(policy, pairs)
        if arm == "alpha 1":
            errors["after DPO at α = 1"] = measure(policy, ref, pairs, config.beta)
    show(errors)
    for arm, numbers in table.items():
        print(f"right, {arm:<14}" + "   ".join(f"{name} {x:.3f}" for name, x in numbers.items()))
    folder = Path(config.runs) / config.name
    folder.mkdir(parents=True, exist_ok=True)
    told = {at: {of: vars(e) for of, e in found.items()} for at, found in errors.items()}
    file = folder / f"seed-{config.seed}.json"
    print("written to", folders.write_json(file, {"errors": told, "right": table}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
