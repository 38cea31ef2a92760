"""Token-level GRPO loss on given log-probs, forward and backward in one Triton pass.

With ρ = exp(logp − old), d = ref − logp, w the token's weight and A its advantage:

    L = Σ w·ℓ ,   ℓ = −min(ρA, clip(ρ, 1−ε_low, 1+ε_high)·A) + β·k3 ,   k3 = exp(d) − 1 − d

Gradient, by ∂ρ/∂logp = ρ:

    first term   −ρA where the unclipped branch is the smaller one; inside the clip range both branches are the same;
                 0 where the clipped branch is smaller (there it is a constant):
                     A > 0 and ρ > 1+ε_high ,   A < 0 and ρ < 1−ε_low
    second term  β·∂k3/∂logp = β·(1 − exp(d)) = −β·(k3 + d)

The gradient is a number per token that the forward pass knows already: it is stored there, and backward only scales it.
Sums leave each program as one row of `partial` and are added in a fixed order (no atomics: bitwise reproducible).
`reference` is `grpo.grpo_loss`: the formula has one plain definition in this project.
Tests: `pytest tests/test_kernels_loss.py`.
"""
from __future__ import annotations   # annotations stay text, so the file can be read where there is no Triton

import torch

from grpo import grpo_loss as reference
from kernels import jit, tl, triton, use_triton

CONFIG = {"BLOCK": 1024, "num_warps": 4}
SUMS = 6   # columns of `partial`: loss, live tokens, clipped tokens, Σ ratio, Σ KL, largest ratio


@jit
def grpo_kernel(logprob_p, old_p, ref_p, advantage_p, weight_p, gradient_p, partial_p, N, floor, ceiling, kl_beta,
                HAS_REF: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    token = program * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weight_p + token, mask=token < N, other=0.0)
    live = weight != 0.0                                     # a masked load: NaN in a masked token is never read
    logprob = tl.load(logprob_p + token, mask=live, other=0.0)
    old = tl.load(old_p + token, mask=live, other=0.0)
    advantage = tl.load(advantage_p + token, mask=live, other=0.0)

    ratio = tl.exp(logprob - old)
    unclipped = ratio * advantage
    clipped = tl.minimum(tl.maximum(ratio, floor), ceiling) * advantage
    loss = -tl.minimum(unclipped, clipped)
    gradient = tl.where(clipped < unclipped, 0.0, -unclipped)
    kl = tl.zeros((BLOCK,), tl.float32)
    if HAS_REF:
        d = tl.load(ref_p + token, mask=live, other=0.0) - logprob
        series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d * (1 / 720 + d * (1 / 5040))))))
        kl = tl.where(tl.abs(d) < 0.5, series, tl.exp(d) - 1.0 - d)   # the closed form cancels for small d
        loss += kl_beta * kl
        gradient -= kl_beta * (kl + d)
    tl.store(gradient_p + token, gradient * weight, mask=token < N)

    partial_p += program * SUMS
    count = live.to(tl.float32)
    tl.store(partial_p, tl.sum(loss * weight, 0))
    tl.store(partial_p + 1, tl.sum(count, 0))
    tl.store(partial_p + 2, tl.sum(tl.where(clipped < unclipped, count, 0.0), 0))
    tl.store(partial_p + 3, tl.sum(ratio * count, 0))
    tl.store(partial_p + 4, tl.sum(kl * count, 0))
    tl.store(partial_p + 5, tl.max(ratio * count, 0))


class _GRPOLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logprob, old_logprob, advantage, weight, ref_logprob, clip_low, clip_high, kl_beta):
        N = len(logprob)
        programs = max(1, triton.cdiv(N, CONFIG["BLOCK"]))
        gradient = torch.empty_like(logprob)
        partial = torch.empty(programs, SUMS, dtype=torch.float32, device=logprob.device)
        has_ref = ref_logprob is not None
        grpo_kernel[(programs,)](logprob, old_logprob, ref_logprob if has_ref else logprob, advantage, weight, gradient,
                                 partial, N, 1 - clip_low, 1 + clip_high, kl_beta, HAS_REF=has_ref, SUMS=SUMS, **CONFIG)
        ctx.save_for_backward(gradient)
        total = partial[:, :5].double().sum(0).float()
        means = total[2:] / total[1].clamp(min=1)
        outputs = total[0], means[0], means[1], partial[:, 5].amax(), means[2]
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx, grad, *_):
        return ctx.saved_tensors[0] * grad, *[None] * 7


def grpo_loss(logprob, old_logprob, advantage, weight, *, clip_low=0.2, clip_high=0.2, kl_beta=0.0,
              ref_logprob=None):
    """(Σ w·ℓ over tokens, stats): `grpo.grpo_loss`, on CUDA in one kernel. All inputs [N]; weight 0 = masked.

    The Triton form takes fp32 and differentiates with respect to logprob only. ValueError if shapes or types misfit.
    """
    tokens = {"logprob": logprob, "old_logprob": old_logprob, "advantage": advantage, "weight": weight,
              "ref_logprob": ref_logprob}
    for name, x in tokens.items():
        if x is not None and (x.shape != logprob.shape or x.dim() != 1 or x.device != logprob.device):
            raise ValueError(f"grpo_loss: {name} is {tuple(x.shape)} on {x.device}; all inputs are [N] on one device")
    if not use_triton(logprob) or logprob.dtype == torch.float64:
        return reference(logprob, old_logprob, advantage, weight, clip_low=clip_low, clip_high=clip_high,
                         kl_beta=kl_beta, ref_logprob=ref_logprob)
    if logprob.dtype != torch.float32:
        raise ValueError(f"grpo_loss: log-probs are {logprob.dtype}; the loss needs fp32")
    old_logprob, advantage, weight, ref_logprob = (
        None if x is None else x.detach().float().contiguous() for x in (old_logprob, advantage, weight, ref_logprob))
    loss, *numbers = _GRPOLoss.apply(logprob.contiguous(), old_logprob, advantage, weight, ref_logprob,
                                     clip_low, clip_high, kl_beta)
    return loss, dict(zip(("clip_share", "ratio_mean", "ratio_max", "kl"), numbers))
