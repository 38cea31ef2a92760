"""BVPO: preference optimisation that mixes gradients of answers with and without a trace.

arXiv 2510.05095. A reasoning model writes a trace r, then an answer y. Preferences are about y, so
the ideal loss is DPO's on the marginal π(y|x) = Σ_r π(r, y|x), a sum of too many terms. In practice
one trace is sampled for each answer, a noisy estimate. BVPO mixes in the gradient of empty traces:

    ℓ_t = −log σ(β Δ_t),  Δ_t = log π(r⁺,y⁺|x)/π_ref(r⁺,y⁺|x) − log π(r⁻,y⁻|x)/π_ref(r⁻,y⁻|x)
    ℓ_e = the same with the empty trace;      g_t = ∇ℓ_t,  g_e = ∇ℓ_e,      g = α g_t + (1 − α) g_e

    Theorem 1    tr Var_r(g) = α² tr Var_r(g_t)
    Theorem 2    E‖g − g_m‖² = ‖α b_t + (1 − α) b_e‖² + α² tr Σ_t     b: bias, E g − g_m
    minimiser    α* = clip(b_e·(b_e − b_t) / (‖b_t − b_e‖² + tr Σ_t), 0, 1)

g_m is the marginal's gradient. g_e does not depend on r: for a given pair it has no variance. Ours,
not the paper's: at π = π_ref a sampled trace has no bias, by Fisher's identity ∇log π(y|x) =
E_{r ~ π(r|x,y)} ∇log π(r,y|x), so mixing helps only if g_e is nearly right. The fair alternative is
K traces for each pair, with the variance tr Σ_t / K. In a batch of n pairs the variance falls as
1/n, and the bias does not fall.

    python -m siblings.bvpo measure                     the errors at π = π_ref, all traces summed
    python -m siblings.bvpo --alpha 1 --name traced     DPO on sampled traces alone (default: α = ½)
    python -m siblings.bvpo measure runs/traced         the errors at the end of that run

Sources: reviews that quote the theorems; there is no public code, and we have not read the paper.
We derived the minimiser and the alternative. By the reviews the paper has α = ½ and takes its
empty-trace pairs from answers without thinking. Here both losses have the same (y⁺, y⁻).

DPO's gradient is c (∇log π⁻ − ∇log π⁺) with c = β σ(−βΔ): one pass of the GRPO loss at ρ = 1, with
the advantages c and −c. The answers of a step's pairs are its "attempts"; their reward, 1 for y⁺,
has no effect. The loop clips the gradient's norm to 1, so α changes mostly its direction. Traces of
many words may behave differently from these traces of one word.
The toy: siblings/bvpo_toy.py. Tests: pytest tests/test_bvpo.py
"""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

import train
import trainer
from config import TRAIN, UserError, option
from plumbing.start import Run
from rollout import Method, Sample, Trajectory
from sampler import hash64
from siblings import bvpo_errors, solo
from siblings import bvpo_toy as toy


@dataclass
class BvpoConfig(solo.SoloConfig):
    """BVPO's own options."""

    steps: int = option(40, "batches of pairs")
    questions: int = option(8, "pairs a step")
    eval_every: int = option(40, "steps between evaluations")
    eval_questions: int = option(2000, "half of them with a trace, half without")
    lr: float = option(1e-4, "learning rate")

    alpha: float = option(0.5, "share of the traced gradient", TRAIN, heading="preferences")
    traces: int = option(1, "K, for each pair", TRAIN)
    beta: float = option(0.5, "β of DPO", TRAIN)

    def needs_start(self) -> bool:
        """DPO's reference model is the model at the run's start."""
        return True

    def check(self, training: bool) -> None:
        """Refuses values that contradict each other, BVPO's own included."""
        super().check(training)
        self.at_least(1, "traces")
        solo.refuse_others(self, {"group": 8, "advantage": "std"} if training else {})
        if self.alpha > 1 or self.beta == 0:
            raise UserError("--alpha must be at most 1 and --beta above 0")


def advantages_of(gain: Tensor, ref: Tensor, beta: float, alpha: float, traces: int, generator):
    """DPO's gradient as advantages of a pair's samples; gain: log π/π_ref, ref: log π_ref.

    The traces are drawn from π_ref(r|x,y), as in data that the reference model wrote.
    """
    count = len(toy.TRACES)
    chances = ref[: 2 * count].view(2, count).softmax(1)
    choices = chances.multinomial(traces, replacement=True, generator=generator).T.tolist()
    advantages = torch.zeros_like(gain)
    traced = [(i, count + j, alpha / traces) for i, j in choices]
    for good, bad, share in [*traced, (-2, -1, 1 - alpha)]:
        c = share * beta * torch.sigmoid(-beta * (gain[good] - gain[bad]))
        advantages[good] += c
        advantages[bad] -= c
    return advantages


def rollouts(run: Run, step: int) -> list[Trajectory]:
    """The answers of a step's pairs, with DPO's gradient in their advantages."""
    config = run.config
    reference = bvpo_errors.load(run.start)
    result = []
    for place, pair in train.questions_of(run, step)[run.rank]:
        trajectories = toy.answers(run.chat, place, pair)
        samples = toy.samples_of(trajectories)
        ref = bvpo_errors.logprobs(reference, samples)[0]
        gain = bvpo_errors.logprobs(trainer.unwrap(run.policy), samples)[0] - ref
        draws = torch.Generator().manual_seed(hash64(config.seed, step, place))
        advantages = advantages_of(
            gain, ref, config.beta, config.alpha, config.traces, generator=draws
        )
        for sample, advantage in zip(samples, advantages.tolist()):
            sample.advantage = advantage
        result += trajectories
    return result


def credit(
    config: BvpoConfig, trajectories: list[Trajectory], step: int
) -> dict[str, list[Sample]]:
    """Turns the loop's mean over tokens into DPO's mean over pairs."""
    samples = toy.samples_of(trajectories)
    pairs = len(samples) // toy.ANSWERS
    for sample in samples:
        sample.loss_weight = sum(sample.mask)
    tokens = sum(sample.loss_weight for sample in samples)  # equally many in every pair
    for sample in samples:
        sample.advantage *= tokens / pairs
    return {solo.ROLE: samples}


METHOD = Method(
    name="bvpo",
    roles={solo.ROLE: "Solver"},
    config=BvpoConfig,
    episode=solo.episode,
    credit=credit,
    words=solo.words,
    fits=solo.fits,
    play_step=rollouts,
)


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    if arguments[:1] == ["measure"]:
        return bvpo_errors.main(BvpoConfig, arguments[1:])
    return train.main(
        METHOD,
        arguments,
        __doc__,
        base_model=toy.build,
        language=solo.Language,
        questions=toy.questions,
        more_tools=[solo.NO_TOOL],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
