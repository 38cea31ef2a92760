"""Token-level GRPO loss on given log-probs, forward and backward in one Triton pass.

The first kernel to read: one program per block of tokens, loads under a mask, the formula, stores.

With ρ = exp(logp − old), d = ref − logp, w the token's weight and A its advantage:

    L = Σ w·ℓ ,   ℓ = −min(ρA, clip(ρ, 1−ε_low, 1+ε_high)·A) + β·k3 ,   k3 = exp(d) − 1 − d

Gradient, by ∂ρ/∂logp = ρ:

    first term   −ρA where the unclipped branch is the smaller one; inside the clip range both
                 branches are the same; 0 where the clipped branch is smaller, for there it is a
                 constant:
                     A > 0 and ρ > 1+ε_high ,   A < 0 and ρ < 1−ε_low
    second term  β·∂k3/∂logp = −β·(exp(d) − 1)

The gradient is a number per token that the forward pass knows already: it is stored there, and
backward only scales it. Sums leave each program as one row of `partial` and are added in a fixed
order, without atomics, so the result is the same bit by bit.

The formula is `grpo.grpo_loss`, which is what trains: `linear_grpo_loss` calls it on every device.
This kernel stands beside it, for log-probs that are in memory already, and is tested against it.
Tests: `pytest tests/test_kernels_loss.py`.
"""

import torch

import grpo
from kernels.backend import check, jit, tl, triton, use_triton

CONFIG = {"BLOCK": 1024, "num_warps": 4}
SUMS = 4  # columns of `partial`: loss, live tokens, clipped tokens, Σ KL


@jit
def grpo_kernel(
    logprob_ptr,
    old_ptr,
    ref_ptr,
    advantage_ptr,
    weight_ptr,
    gradient_ptr,
    partial_ptr,
    N,
    lowest,
    highest,
    kl_beta,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK tokens."""
    program = tl.program_id(0).to(tl.int64)
    token = program * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + token, mask=token < N, other=0.0)
    live = weight != 0.0
    # What stands in a token that is not live, NaN included, is never read below.
    logprob = tl.load(logprob_ptr + token, mask=live, other=0.0)
    old = tl.load(old_ptr + token, mask=live, other=0.0)
    advantage = tl.load(advantage_ptr + token, mask=live, other=0.0)

    log_ratio = logprob - old
    # Where A ≥ 0 the loss is flat above the clip. Held below overflow, exp makes no 0 · inf there.
    log_ratio = tl.where(advantage < 0.0, log_ratio, tl.minimum(log_ratio, 80.0))
    ratio = tl.exp(log_ratio)
    unclipped = ratio * advantage
    clipped = tl.minimum(tl.maximum(ratio, lowest), highest) * advantage
    loss = -tl.minimum(unclipped, clipped)
    gradient = tl.where(clipped < unclipped, 0.0, -unclipped)
    kl = tl.zeros((BLOCK,), tl.float32)
    if ref_ptr is not None:
        d = tl.load(ref_ptr + token, mask=live, other=0.0) - logprob
        # The closed forms cancel for small d; there the series of exp(d) − 1 − d keeps its digits.
        series = 1 / 120 + d * (1 / 720 + d * (1 / 5040))
        series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d * series)))
        small = tl.abs(d) < 0.5
        kl = tl.where(small, series, tl.exp(d) - 1.0 - d)
        loss += kl_beta * kl
        gradient -= kl_beta * tl.where(small, series + d, tl.exp(d) - 1.0)
    tl.store(gradient_ptr + token, gradient * weight, mask=token < N)

    partial_ptr += program * SUMS
    count = live.to(tl.float32)
    tl.store(partial_ptr, tl.sum(loss * weight, 0))
    tl.store(partial_ptr + 1, tl.sum(count, 0))
    tl.store(partial_ptr + 2, tl.sum(tl.where(clipped < unclipped, count, 0.0), 0))
    tl.store(partial_ptr + 3, tl.sum(kl * count, 0))


class _GRPOLoss(torch.autograd.Function):
    """(loss, clip share, KL) of fp32 log-probs [N]; forward makes the gradient."""

    @staticmethod
    def forward(ctx, logprob, old_logprob, advantage, weight, ref_logprob, options):
        N = len(logprob)
        programs = max(1, triton.cdiv(N, CONFIG["BLOCK"]))
        gradient = torch.empty_like(logprob)
        partial = torch.empty(programs, SUMS, dtype=torch.float32, device=logprob.device)
        tokens = logprob, old_logprob, ref_logprob, advantage, weight
        numbers = N, 1 - options["clip_low"], 1 + options["clip_high"], options["kl_beta"]
        grpo_kernel[(programs,)](*tokens, gradient, partial, *numbers, SUMS=SUMS, **CONFIG)
        ctx.save_for_backward(gradient)
        loss, live, clipped, kl = partial.double().sum(0).float()
        live = live.clamp(min=1)
        outputs = loss, clipped / live, kl / live
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx, grad, *_):
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None, None, None, None, None


def grpo_loss(
    logprob,
    old_logprob,
    advantage,
    weight,
    *,
    clip_low=0.2,
    clip_high=0.2,
    kl_beta=0.0,
    ref_logprob=None,
):
    """(Σ w·ℓ over tokens, stats): `grpo.grpo_loss`, on CUDA in one kernel.

    All inputs are [N]; a token of weight 0 is masked. The Triton form takes fp32 log-probs and
    differentiates with respect to them only. ValueError if shapes or types misfit.
    """
    tokens = {
        "old_logprob": old_logprob,
        "advantage": advantage,
        "weight": weight,
        "ref_logprob": ref_logprob,
    }
    options = {"clip_low": clip_low, "clip_high": clip_high, "kl_beta": kl_beta}
    given = {name: x for name, x in tokens.items() if x is not None}
    by_triton = use_triton(logprob) and logprob.dtype != torch.float64
    fits = logprob.dim() == 1 and not (by_triton and logprob.dtype != torch.float32)
    fits &= all((x.shape, x.device) == (logprob.shape, logprob.device) for x in given.values())
    check(fits, "grpo_loss", logprob=logprob, **tokens)
    if not by_triton:
        return grpo.grpo_loss(logprob, **tokens, **options)
    tokens |= {name: x.detach().float().contiguous() for name, x in given.items()}
    loss, clip_share, kl = _GRPOLoss.apply(logprob.contiguous(), *tokens.values(), options)
    return loss, {"clip_share": clip_share, "kl": kl}
