"""LM head, log-prob, GRPO loss and its gradients in one pass, without the [N, V] logits in memory.

For each loss token, with hidden state h [D], head W [V, D], target y and temperature τ:

    z = W h / τ ,   logp = z_y − lse(z) ,   p = softmax(z) ,   H = −Σ p log p ,   L = Σ w·ℓ(logp)   (`grpo.grpo_loss`)

Gradient. A token's loss depends on its own log-prob alone, so c = ∂L/∂logp is one number per token, known as soon as its
logits are. With ∂logp/∂z_j = 1[j = y] − p_j:

    dz_j = c/τ · (1[j = y] − p_j) ,   ∂L/∂h = Wᵀ dz ,   ∂L/∂W = Σ over tokens dz hᵀ

Tokens are taken in chunks; each chunk makes its logits, c, dz and both gradients before the next one starts. So the
gradients are ready when the forward pass ends (backward scales them) and the whole costs three matrix products. The
textbook order, loss first and backward later, has to keep the logits or make them a second time: a fourth product.

Precision. Logits leave the tensor cores as fp32: rounded to bf16 they would put an error of 1e-2 on a log-prob, enough
to flip clip decisions. dz is rounded to hidden's type, as the products need it; ∂L/∂W is summed over chunks in fp32.
Memory. One chunk's logits in fp32 (dz takes their place) and ∂L/∂W in fp32; beside ∂L/∂h and a few numbers per token nothing
grows with N.
Reproducible bit by bit: a row belongs to one program, nothing is added atomically.

The Triton form is two kernels around the loss, one program per row, one sweep over the vocabulary each: `stats_kernel`
gives log-prob, entropy and lse, `gradient_kernel` dz. The products are cuBLAS.
Tests: `pytest tests/test_kernels_loss.py`. Accuracy and speed beside other implementations: `python -m bench.kernels`.
"""
from __future__ import annotations   # annotations stay text, so the file can be read where there is no Triton

import math

import torch

import grpo
from kernels import jit, tl, triton, use_triton
from kernels.grpo_loss import grpo_loss

# Tokens per chunk. Each chunk reads and writes the whole fp32 ∂L/∂W (2.5 GB at V = 152k, D = 4k: by arithmetic 1.2 ms on an H200,
# beside 17 ms of products for 3,584 tokens), so few chunks; but chunk and ∂L/∂W together should stay under 5 GB.
# On CPU a chunk's logits should stay in the cache (and below malloc's limit for fresh pages), again not too few tokens.
CHUNK_TOKENS_CUDA = 3584
CHUNK_TOKENS_CPU = 128          # at least, and as many as have this many bytes of logits:
CHUNK_BYTES_CPU = 16 << 20
STATS_CONFIG = {"BLOCK": 4096, "num_warps": 16}
GRADIENT_CONFIG = {"BLOCK": 4096, "num_warps": 8}


def reference(hidden, weight, target, old_logprob, advantage, token_weight, *, ref_logprob=None, clip_low=0.2,
              clip_high=0.2, kl_beta=0.0, temperature=1.0):
    """`linear_grpo_loss` in plain PyTorch: all the logits in memory, gradients by autograd, in the inputs' own type."""
    live = token_weight != 0
    z = torch.where(live[:, None], hidden, 0) @ weight.T / temperature                         # [N, V]
    logp = z.log_softmax(-1)
    logprob = logp.gather(-1, torch.where(live, target, 0)[:, None])[:, 0]
    loss, stats = grpo.grpo_loss(logprob, old_logprob, advantage, token_weight, clip_low=clip_low, clip_high=clip_high,
                                 kl_beta=kl_beta, ref_logprob=ref_logprob)
    entropy = -(logp.exp() * logp).sum(-1)
    per_token = {"logprob": logprob.detach() * live, "entropy": entropy.detach() * live}
    return loss, stats | per_token | {"entropy_mean": per_token["entropy"].sum() / live.sum().clamp(min=1)}


def wide(x):
    """x in the type that sums are kept in: fp32, or fp64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def tensor_cores(x) -> bool:
    """Whether products of x run on the GPU's 16-bit units, which multiply exactly and add in fp32."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def product(a, b):
    """a @ b, summed and returned in fp32 whatever the inputs' type (fp64 for fp64)."""
    return torch.mm(a, b, out_dtype=torch.float32) if tensor_cores(a) else wide(a) @ wide(b)


def add_product(total, a, b):
    """total += a @ b in fp32 (fp64 for fp64), without a temporary of total's size."""
    if tensor_cores(a):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, wide(a), wide(b), out=total)


def chunks(N, V, on_cuda):
    """Cuts N tokens into slices of nearly equal length (on CUDA a multiple of 128, the tile of the products)."""
    limit = CHUNK_TOKENS_CUDA if on_cuda else max(CHUNK_TOKENS_CPU, CHUNK_BYTES_CPU // (4 * V))
    size = math.ceil(N / max(1, math.ceil(N / limit)))
    size = math.ceil(size / 128) * 128 if on_cuda else max(1, size)
    return [slice(start, min(start + size, N)) for start in range(0, N, size)]


def plain_stats(z, target, temperature):
    """(log-prob [C], entropy [C], what `plain_gradient` needs) of logits z [C, V], which are overwritten."""
    if temperature != 1:
        z /= temperature
    z -= z.amax(-1, keepdim=True)
    e = z.exp()
    total = e.sum(-1)
    logprob = z.gather(-1, target[:, None])[:, 0] - total.log()
    return logprob, total.log() - torch.linalg.vecdot(e, z) / total, (e, total)


def plain_gradient(z, target, softmax, c, temperature, dtype):
    """dz [C, V] in `dtype`, from what `plain_stats` left and c = ∂L/∂logp [C]."""
    (e, total), c = softmax, c / temperature
    return e.mul_((-c / total)[:, None]).scatter_add_(-1, target[:, None], c[:, None]).to(dtype)


@jit
def stats_kernel(z_p, target_p, logprob_p, entropy_p, lse_p, V, inverse_temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)              # row · V passes 2³¹
    z_p += row * V
    # Online softmax, each lane for itself (no exchange in the loop): its maximum m, Σ exp(z − m), Σ exp(z − m)·(z − m).
    # -1e38 and -1e30 stand for −∞ but are finite: their differences are no NaN and their exponentials are 0.
    high = tl.full((BLOCK,), -1e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(z_p + column, mask=column < V, other=-1e30) * inverse_temperature
        new = tl.maximum(high, z)
        scale, e = tl.exp(high - new), tl.exp(z - new)
        moment = scale * (moment + total * (high - new)) + e * (z - new)
        total = scale * total + e
        high = new
    m = tl.max(high, 0)                              # then the lanes together
    scale = tl.exp(high - m)
    moment = tl.sum(scale * (moment + total * (high - m)), 0)
    total = tl.sum(scale * total, 0)
    z = tl.load(z_p + tl.load(target_p + row)) * inverse_temperature
    tl.store(logprob_p + row, z - m - tl.log(total))
    tl.store(entropy_p + row, tl.log(total) - moment / total)
    tl.store(lse_p + row, m + tl.log(total))


@jit
def gradient_kernel(z_p, target_p, lse_p, c_p, dz_p, V, dz_stride, inverse_temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z_p += row * V
    dz_p += row * dz_stride
    target = tl.load(target_p + row)
    lse = tl.load(lse_p + row)
    c = tl.load(c_p + row) * inverse_temperature
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        p = tl.exp(tl.load(z_p + column, mask=column < V, other=0.0) * inverse_temperature - lse)
        dz = c * (tl.where(column == target, 1.0, 0.0) - p)
        tl.debug_barrier()                           # dz overwrites z: no thread writes before all have read this block
        tl.store(dz_p + column, dz.to(dz_p.dtype.element_ty), mask=column < V)


def config(table, V):
    """The kernel's configuration, with a block no longer than the row needs."""
    return table | {"BLOCK": min(table["BLOCK"], triton.next_power_of_2(V))}


def check_rows(z, target):
    if not (z.dtype == torch.float32 and z.is_contiguous() and target.dtype == torch.int64 and target.is_contiguous()):
        raise ValueError("the row kernels take contiguous fp32 logits and contiguous int64 targets")


def triton_stats(z, target, temperature):
    """`plain_stats`; z is left as it is, and lse is all that the gradient needs besides."""
    check_rows(z, target)
    C, V = z.shape
    logprob, entropy, lse = (torch.empty(C, dtype=torch.float32, device=z.device) for _ in range(3))
    stats_kernel[(C,)](z, target, logprob, entropy, lse, V, 1 / temperature, **config(STATS_CONFIG, V))
    return logprob, entropy, lse


def triton_gradient(z, target, lse, c, temperature, dtype):
    """`plain_gradient`, in the memory of z: a row of dz starts where the row of z did.

    Where dz is narrower than z, block k of dz lands on block k/2 of z: read already, given the barrier.
    """
    check_rows(z, target)
    C, V = z.shape
    dz = z.view(dtype)[:, :V]
    gradient_kernel[(C,)](z, target, lse, c, dz, V, dz.stride(0), 1 / temperature, **config(GRADIENT_CONFIG, V))
    return dz


def loss_gradient(logprob, tokens, options):
    """c = ∂L/∂logprob [C], by autograd through `grpo_loss`: a change of the loss there needs no change here."""
    with torch.enable_grad():
        logprob = logprob.detach().requires_grad_()
        loss, _ = grpo_loss(logprob, **tokens, **options)
    return torch.autograd.grad(loss, logprob)[0]


def prepare(hidden, weight, target, temperature):
    """Checks shapes and types; returns hidden and head in the type of the products, and the two row functions."""
    N, D = hidden.shape
    if weight.dim() != 2 or weight.shape[1] != D or target.shape != (N,) or target.dtype != torch.int64:
        raise ValueError(f"hidden {tuple(hidden.shape)} needs weight [V, {D}] and int64 target [{N}], not "
                         f"{tuple(weight.shape)} and {target.dtype} {tuple(target.shape)}")
    if hidden.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"hidden is {hidden.dtype}; use bf16, fp32 or fp64 (fp16 would lose small gradients)")
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; the softmax needs one above 0")
    head = weight.to(hidden.dtype) if tensor_cores(hidden) else wide(weight)
    fused = use_triton(hidden) and hidden.dtype != torch.float64
    return hidden.contiguous(), head, *((triton_stats, triton_gradient) if fused else (plain_stats, plain_gradient))


def number_per_row(hidden):
    """An uninitialised [N] in the type that sums are kept in."""
    return torch.empty(len(hidden), dtype=wide(hidden[:0]).dtype, device=hidden.device)


class _LinearGRPOLoss(torch.autograd.Function):
    """Loss, log-probs [N], entropies [N] and statistics; both gradients are made in forward.

    tokens: old_logprob, advantage, weight and perhaps ref_logprob, each [N]; options: the keywords of `grpo_loss`.
    """

    @staticmethod
    def forward(ctx, hidden, weight, target, tokens, options, temperature):
        hidden, head, stats, gradient = prepare(hidden, weight, target, temperature)
        logprob, entropy = number_per_row(hidden), number_per_row(hidden)
        tokens = {name: x.to(logprob.dtype) for name, x in tokens.items()}
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(head, dtype=logprob.dtype) if need_weight else None
        for part in chunks(len(hidden), len(head), hidden.is_cuda):
            h, y = hidden[part], target[part]
            z = product(h, head.T)                                                            # [C, V]
            logprob[part], entropy[part], softmax = stats(z, y, temperature)
            if need_hidden or need_weight:
                c = loss_gradient(logprob[part], {name: x[part] for name, x in tokens.items()}, options)
                dz = gradient(z, y, softmax, c, temperature, hidden.dtype)                    # [C, V]
                if need_hidden:
                    d_hidden[part] = product(dz, head)
                if need_weight:
                    add_product(d_weight, dz.T, h)
                del dz
            del z, softmax                           # or the next chunk's logits would stand beside these
        loss, numbers = grpo_loss(logprob, **tokens, **options)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        outputs = logprob, entropy, *numbers.values()
        ctx.mark_non_differentiable(*outputs)
        return loss, *outputs

    @staticmethod
    def backward(ctx, grad, *_):
        d_hidden, d_weight = ctx.saved_tensors
        if d_hidden is not None:
            d_hidden = d_hidden * grad
        if d_weight is not None:                     # scaled and rounded in one step
            d_weight = torch.mul(d_weight, grad, out=torch.empty_like(d_weight, dtype=ctx.weight_dtype))
        return d_hidden, d_weight, None, None, None, None


def autocast_to(hidden):
    """Under autocast, hidden in autocast's type, as F.linear would have it."""
    kind = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else hidden


def linear_grpo_loss(hidden, weight, target, old_logprob, advantage, token_weight, *, ref_logprob=None, clip_low=0.2,
                     clip_high=0.2, kl_beta=0.0, temperature=1.0):
    """Σ w·ℓ over the tokens of weight ≠ 0, differentiable in hidden and weight.

    hidden [N, D] (final norm applied), weight [V, D] of the LM head, target [N] int64; the rest [N]. N may be 0: then
    the loss is 0 and both inputs get zero gradients. A masked token (token_weight 0) never enters the head: its
    gradient is exactly 0, whatever stands in it. hidden may be bf16 with an fp32 weight, whose gradient is fp32 then.

    Returns (loss, stats): clip_share, ratio_mean, ratio_max, kl, entropy_mean over the unmasked tokens, and logprob,
    entropy [N], 0 where masked; all fp32 and detached. ValueError if shapes or types do not fit.
    """
    N = len(hidden)
    tokens = {"old_logprob": old_logprob, "advantage": advantage, "weight": token_weight, "ref_logprob": ref_logprob}
    tokens = {name: x.detach() for name, x in tokens.items() if x is not None}
    for name, x in tokens.items():
        if x.shape != (N,):
            raise ValueError(f"{name} is {tuple(x.shape)}; it must be [{N}], one number for each row of hidden")
    live = token_weight.nonzero()[:, 0]
    if len(live) < N:
        hidden, target, tokens = hidden[live], target[live], {name: x[live] for name, x in tokens.items()}
    options = {"clip_low": clip_low, "clip_high": clip_high, "kl_beta": kl_beta}
    hidden = autocast_to(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        loss, logprob, entropy, *numbers = _LinearGRPOLoss.apply(hidden, weight, target, tokens, options, temperature)
    stats = dict(zip(("clip_share", "ratio_mean", "ratio_max", "kl"), numbers))
    stats["entropy_mean"] = entropy.sum() / max(1, len(live))
    for name, value in (("logprob", logprob), ("entropy", entropy)):
        stats[name] = value if len(live) == N else value.new_zeros(N).index_copy_(0, live, value)
    return loss, stats


@torch.no_grad()
def linear_logprob(hidden, weight, target, *, temperature=1.0):
    """(log-prob [N] of target, entropy [N]) under softmax(hidden @ weight.T / temperature); fp32, no gradient.

    Shapes as in `linear_grpo_loss`. The logits are made a chunk at a time and dropped.
    """
    hidden = autocast_to(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        hidden, head, stats, _ = prepare(hidden, weight, target, temperature)
        logprob, entropy = number_per_row(hidden), number_per_row(hidden)
        for part in chunks(len(hidden), len(head), hidden.is_cuda):
            logprob[part], entropy[part], _ = stats(product(hidden[part], head.T), target[part], temperature)
    return logprob, entropy
