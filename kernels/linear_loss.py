"""LM head, log-prob, GRPO loss and its gradients in one pass, without the [N, V] logits in memory.

For each loss token, with hidden state h [D], head W [V, D], target y and temperature τ:

    z = W h / τ ,   logp = z_y − lse(z) ,   p = softmax(z) ,   H = −Σ p log p ,   L = Σ w·ℓ(logp)

ℓ is `grpo.grpo_loss`, called as it stands there on every device: this file has no formula of its
own for it, and an edit there is an edit here.

Gradient. A token's loss depends on its own log-prob alone: c = ∂L/∂logp is one number per token,
known as soon as its logits are. Autograd gives it. With ∂logp/∂z_j = 1[j = y] − p_j:

    dz_j = c/τ · (1[j = y] − p_j) ,   ∂L/∂h = Wᵀ dz ,   ∂L/∂W = Σ over tokens dz hᵀ

Tokens are taken in chunks; each chunk makes its logits, c, dz and both gradients before the next
one starts. So the gradients are ready when the forward pass ends (backward scales them) and the
whole costs three matrix products. The textbook order, loss first and backward later, has to keep
the logits or make them a second time: a fourth product.

Precision. Logits leave the tensor cores as fp32: rounded to bf16 they would put an error of 1e-2 on
a log-prob, enough to flip clip decisions. dz is rounded to hidden's type, as the products need it;
∂L/∂W is summed over chunks in fp32.
Memory. One chunk's logits in fp32 (dz takes their place) and ∂L/∂W in fp32 are held. Only ∂L/∂h and
a few numbers per token grow with N.
Reproducible bit by bit: a row belongs to one program, and nothing is added atomically.

The Triton form is two kernels around the loss, one program per row, one sweep over the vocabulary
each: `stats_kernel` gives log-prob, entropy and lse, `gradient_kernel` dz. The products are cuBLAS.
Tests: `pytest tests/test_kernels_loss.py`.
Accuracy and speed beside other implementations: `python -m bench.gpu --step accuracy`.
"""

import math

import torch

import grpo
from kernels import products
from kernels.backend import check, jit, tl, triton, use_triton

# Tokens per chunk on CUDA. Each chunk but the first reads and writes the whole fp32 ∂L/∂W (2.5 GB
# at V = 152k, D = 4k: by arithmetic 1.2 ms on an H200, beside 17 ms of products for 3,584 tokens).
# So there should be few chunks, but chunk and ∂L/∂W together should stay under 5 GB.
CHUNK_TOKENS_CUDA = 3584
# On a CPU a chunk's logits should stay in the cache, and below the size from which malloc asks the
# system for fresh pages. So a chunk has as many tokens as make this many bytes of logits, but at
# least CHUNK_TOKENS_CPU.
CHUNK_BYTES_CPU = 16 << 20
CHUNK_TOKENS_CPU = 128
STATS_CONFIG = {"BLOCK": 4096, "num_warps": 16}
GRADIENT_CONFIG = {"BLOCK": 4096, "num_warps": 8}


def logits_logprob(z, target, *, temperature=1.0):
    """(log-prob [N] of target, entropy [N]) under softmax(z / temperature), z [N, V]."""
    logp = (z / temperature).log_softmax(-1)
    logprob = logp.gather(-1, target[:, None])[:, 0]
    return logprob, -(logp.exp() * logp).sum(-1)


def logits_grpo_loss(
    z, target, old_logprob, advantage, token_weight, *, temperature=1.0, **options
):
    """`linear_grpo_loss` on logits z [N, V] that are in memory, gradients by autograd.

    `options` are those of `grpo.grpo_loss`. It trains models whose logits are more than hidden
    states times LM head (trainer/loading.py).
    """
    live = token_weight != 0
    z = torch.where(live[:, None], z, 0)
    target = torch.where(live, target, 0)
    logprob, entropy = logits_logprob(z, target, temperature=temperature)
    loss, stats = grpo.grpo_loss(logprob, old_logprob, advantage, token_weight, **options)
    stats["loss"] = loss.detach()
    stats["logprob"] = logprob.detach() * live
    stats["entropy"] = entropy.detach() * live
    return loss, stats


def reference(hidden, weight, target, old_logprob, advantage, token_weight, **options):
    """`linear_grpo_loss` in plain PyTorch: all the logits in memory, gradients by autograd."""
    hidden = torch.where((token_weight != 0)[:, None], hidden, 0)
    z = hidden @ weight.T
    return logits_grpo_loss(z, target, old_logprob, advantage, token_weight, **options)


# --- the products ---------------------------------------------------------------------------------


def on_tensor_cores(x) -> bool:
    """Whether the GPU's 16-bit units multiply x: exactly, and adding up in fp32."""
    return x.is_cuda and x.dtype == torch.bfloat16


def sum_dtype(x):
    """The type that sums are kept in: fp32, or fp64 if x has it already."""
    return torch.promote_types(x.dtype, torch.float32)


def at_least_fp32(x):
    return x.to(sum_dtype(x))


def matmul_fp32(a, b):
    """a @ b, summed and returned in fp32 whatever the inputs' type (fp64 for fp64)."""
    if on_tensor_cores(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return products.matmul(at_least_fp32(a), at_least_fp32(b))


def add_matmul_fp32(total, a, b):
    """total + a @ b in fp32, in total's memory; total None stands for zeros."""
    if total is None:
        return matmul_fp32(a, b)
    if on_tensor_cores(a):
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    if products.by_onednn(total):
        return total.add_(products.onednn(at_least_fp32(a), at_least_fp32(b)))
    return torch.addmm(total, at_least_fp32(a), at_least_fp32(b), out=total)


def cut_into_chunks(N, V, on_cuda):
    """Cuts N tokens into slices of nearly equal length."""
    limit = max(CHUNK_TOKENS_CPU, CHUNK_BYTES_CPU // (4 * V))
    if on_cuda:
        limit = CHUNK_TOKENS_CUDA
    count = max(1, math.ceil(N / limit))
    size = max(1, math.ceil(N / count))
    return [slice(start, min(start + size, N)) for start in range(0, N, size)]


# --- the softmax of a chunk: what the loss needs of the logits, and their gradient ----------------


def plain_stats(z, target, temperature):
    """(log-prob [C], entropy [C], softmax) of logits z [C, V], which are overwritten.

    softmax is what `plain_gradient` needs: exp(z) and its sums.
    """
    if temperature != 1:
        z /= temperature
    z -= z.amax(-1, keepdim=True)
    e = z.exp()
    total = e.sum(-1)
    logprob = z.gather(-1, target[:, None])[:, 0] - total.log()
    entropy = total.log() - torch.linalg.vecdot(e, z) / total
    return logprob, entropy, (e, total)


def plain_gradient(z, target, softmax, c, temperature, dtype):
    """dz [C, V] in `dtype`, from what `plain_stats` left and c = ∂L/∂logp [C]."""
    e, total = softmax
    c = c / temperature
    dz = e.mul_((-c / total)[:, None])
    dz = dz.scatter_add_(-1, target[:, None], c[:, None])
    return dz.to(dtype)


@jit
def stats_kernel(
    z_ptr,
    target_ptr,
    logprob_ptr,
    entropy_ptr,
    lse_ptr,
    V,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    """One program per row: an online softmax, each lane for itself, the lanes together at the end.

    A lane keeps its maximum m, Σ exp(z − m) and Σ exp(z − m)·(z − m). −1e38 and −1e30 stand for −∞
    but are finite: their differences are no NaN and their exponentials are 0.
    """
    row = tl.program_id(0).to(tl.int64)  # row · V passes 2³¹
    z_ptr += row * V
    highest = tl.full((BLOCK,), -1e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + column, mask=column < V, other=-1e30) * inverse_temperature
        new = tl.maximum(highest, z)
        shrink = tl.exp(highest - new)
        e = tl.exp(z - new)
        moment = shrink * (moment + total * (highest - new)) + e * (z - new)
        total = shrink * total + e
        highest = new
    m = tl.max(highest, 0)
    shrink = tl.exp(highest - m)
    moment = tl.sum(shrink * (moment + total * (highest - m)), 0)
    total = tl.sum(shrink * total, 0)
    z = tl.load(z_ptr + tl.load(target_ptr + row)) * inverse_temperature
    tl.store(logprob_ptr + row, z - m - tl.log(total))
    tl.store(entropy_ptr + row, tl.log(total) - moment / total)
    tl.store(lse_ptr + row, m + tl.log(total))


@jit
def gradient_kernel(
    z_ptr,
    target_ptr,
    lse_ptr,
    c_ptr,
    dz_ptr,
    V,
    dz_stride,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    """One program per row: dz in the place of z."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * V
    dz_ptr += row * dz_stride
    target = tl.load(target_ptr + row)
    lse = tl.load(lse_ptr + row)
    c = tl.load(c_ptr + row) * inverse_temperature
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + column, mask=column < V, other=0.0) * inverse_temperature
        p = tl.exp(z - lse)
        dz = c * (tl.where(column == target, 1.0, 0.0) - p)
        # dz overwrites z: no thread may write before all threads have read this block.
        tl.debug_barrier()
        tl.store(dz_ptr + column, dz.to(dz_ptr.dtype.element_ty), mask=column < V)


def fit_block(config, V):
    """The kernel's configuration, with a block no longer than a row needs."""
    return config | {"BLOCK": min(config["BLOCK"], triton.next_power_of_2(V))}


def triton_stats(z, target, temperature):
    """As `plain_stats`, but z is left as it is: with z, lse is all that the gradient needs."""
    C, V = z.shape
    logprob = torch.empty(C, dtype=torch.float32, device=z.device)
    entropy = torch.empty_like(logprob)
    lse = torch.empty_like(logprob)
    config = fit_block(STATS_CONFIG, V)
    stats_kernel[(C,)](z, target, logprob, entropy, lse, V, 1 / temperature, **config)
    return logprob, entropy, lse


def triton_gradient(z, target, lse, c, temperature, dtype):
    """`plain_gradient`, in the memory of z: a row of dz starts where the row of z did.

    Where dz is bf16 and z fp32, block k of dz lands in the bytes of block k/2 of z. The kernel goes
    upwards through the blocks, so that block has been read by then.
    """
    C, V = z.shape
    dz = z.view(dtype)[:, :V]
    config = fit_block(GRADIENT_CONFIG, V)
    gradient_kernel[(C,)](z, target, lse, c, dz, V, dz.stride(0), 1 / temperature, **config)
    return dz


# --- chunk by chunk -------------------------------------------------------------------------------


def gradient_per_token(loss_of, logprob, part):
    """c = ∂L/∂logprob [C] of the tokens in slice `part`, by autograd through the loss."""
    with torch.enable_grad():
        leaf = logprob.detach().requires_grad_()
        loss, _ = loss_of(leaf, part)
    return torch.autograd.grad(loss, leaf)[0]


def chunk_by_chunk(
    hidden, weight, target, temperature, loss_of=None, need_hidden=False, need_weight=False
):
    """Log-prob [N] and entropy [N] of the targets, and the gradients that are needed, else None.

    loss_of(logprob, part) gives the loss of the tokens in slice `part`, and its stats.

        for each chunk of tokens:
            z = h Wᵀ                            [C, V]
            logp, H, softmax = of z / τ
            c = ∂loss/∂logp                     [C], by autograd through loss_of
            dz = c/τ · (onehot(y) − softmax)    [C, V], in the place of z
            dh[chunk] = dz W ;  dW += dzᵀ h
    """
    softmax_stats, softmax_gradient = plain_stats, plain_gradient
    if use_triton(hidden) and hidden.dtype != torch.float64:
        softmax_stats, softmax_gradient = triton_stats, triton_gradient
    head = weight.to(hidden.dtype) if on_tensor_cores(hidden) else at_least_fp32(weight)
    logprob = torch.empty(len(hidden), dtype=sum_dtype(hidden), device=hidden.device)
    entropy = torch.empty_like(logprob)
    d_hidden = torch.empty_like(hidden) if need_hidden else None
    d_weight = None
    for part in cut_into_chunks(len(hidden), len(head), hidden.is_cuda):
        h = hidden[part]
        y = target[part]
        z = matmul_fp32(h, head.T)  # [C, V]
        logprob[part], entropy[part], softmax = softmax_stats(z, y, temperature)
        if need_hidden or need_weight:
            c = gradient_per_token(loss_of, logprob[part], part)
            dz = softmax_gradient(z, y, softmax, c, temperature, hidden.dtype)  # [C, V]
            if need_hidden:
                d_hidden[part] = matmul_fp32(dz, head)
            if need_weight:
                d_weight = add_matmul_fp32(d_weight, dz.T, h)
            del dz
        # Kept, these would stand in memory beside the next chunk's logits.
        del z, softmax
    if need_weight and d_weight is None:
        d_weight = torch.zeros_like(head, dtype=logprob.dtype)
    return logprob, entropy, d_hidden, d_weight


class _LinearGRPOLoss(torch.autograd.Function):
    """(loss, stats); forward makes both gradients."""

    @staticmethod
    def forward(ctx, hidden, weight, target, temperature, loss_of):
        need = ctx.needs_input_grad[:2]
        logprob, entropy, *gradients = chunk_by_chunk(
            hidden, weight, target, temperature, loss_of, *need
        )
        ctx.save_for_backward(*gradients)
        ctx.weight_dtype = weight.dtype
        loss, stats = loss_of(logprob, slice(None))
        return loss, stats | {"loss": loss.detach(), "logprob": logprob, "entropy": entropy}

    @staticmethod
    def backward(ctx, grad, _):
        d_hidden, d_weight = ctx.saved_tensors
        if d_hidden is not None:
            d_hidden = d_hidden * grad
        if d_weight is not None:
            # One step scales and rounds.
            rounded = torch.empty_like(d_weight, dtype=ctx.weight_dtype)
            d_weight = torch.mul(d_weight, grad, out=rounded)
        return d_hidden, d_weight, None, None, None


# --- the entry points -----------------------------------------------------------------------------


def checked(hidden, weight, target):
    """hidden and target as the products take them; ValueError for what these do not take."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):  # as F.linear would have it
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    N, D = hidden.shape
    fits = weight.dim() == 2 and weight.shape[1] == D and target.shape == (N,)
    # The products take fp64 with fp64 only.
    fits &= (hidden.dtype == torch.float64) == (weight.dtype == torch.float64)
    fits &= target.dtype == torch.int64
    check(fits, "linear_grpo_loss", hidden=hidden, weight=weight, target=target)
    if hidden.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"hidden is {hidden.dtype}; fp16 would lose small gradients, use bf16")
    V = len(weight)
    # Unchecked, a kernel would read past the row. The host waits for the GPU here.
    if N and not bool(((target >= 0) & (target < V)).all()):
        raise ValueError(f"a target is outside the vocabulary of {V} words")
    return hidden.contiguous(), target.contiguous()


def linear_grpo_loss(
    hidden,
    weight,
    target,
    old_logprob,
    advantage,
    token_weight,
    *,
    ref_logprob=None,
    clip_low=0.2,
    clip_high=0.2,
    kl_beta=0.0,
    temperature=1.0,
):
    """Σ w·ℓ over the tokens of weight ≠ 0, differentiable in hidden and weight.

    hidden [N, D] (final norm applied), weight [V, D] of the LM head, target [N] int64; the rest
    [N]. N may be 0: then the loss is 0 and both inputs get zero gradients. A masked token
    (token_weight 0) never enters the head: its gradient is exactly 0, whatever stands in it. hidden
    may be bf16 with an fp32 weight, whose gradient is fp32 then.

    Returns (loss, stats). Stats are detached: loss; clip_share and kl, means over the unmasked
    tokens; logprob [N] of the targets and entropy [N] of the softmax, both 0 where masked. An
    entropy is NaN where a logit leaves fp32's range. ValueError if shapes or types do not fit, or
    an unmasked target is outside the vocabulary.
    """
    N = len(hidden)
    tokens = {
        "old_logprob": old_logprob,
        "advantage": advantage,
        "weight": token_weight,
        "ref_logprob": ref_logprob,
    }
    tokens = {name: x.detach() for name, x in tokens.items() if x is not None}
    fits = target.shape == (N,) and all(x.shape == (N,) for x in tokens.values())
    check(fits, "linear_grpo_loss", hidden=hidden, target=target, **tokens)
    options = {"clip_low": clip_low, "clip_high": clip_high, "kl_beta": kl_beta}

    live = token_weight.nonzero()[:, 0]
    if len(live) < N:
        hidden = hidden[live]
        target = target[live]
        tokens = {name: x[live] for name, x in tokens.items()}
    hidden, target = checked(hidden, weight, target)
    tokens = {name: x.to(sum_dtype(hidden)) for name, x in tokens.items()}

    def loss_of(logprob, part):
        given = {name: x[part] for name, x in tokens.items()}
        return grpo.grpo_loss(logprob, **given, **options)

    with torch.autocast(hidden.device.type, enabled=False):
        loss, stats = _LinearGRPOLoss.apply(hidden, weight, target, temperature, loss_of)
    if len(live) < N:
        for name in ("logprob", "entropy"):
            stats[name] = stats[name].new_zeros(N).index_copy_(0, live, stats[name])
    return loss, stats


@torch.no_grad()
def linear_logprob(hidden, weight, target, *, temperature=1.0):
    """(log-prob [N] of target, entropy [N]) under softmax(hidden @ weight.T / temperature).

    fp32, no gradient. Shapes, errors and the entropy of infinite logits as in `linear_grpo_loss`.
    The logits are made a chunk at a time and dropped.
    """
    hidden, target = checked(hidden, weight, target)
    with torch.autocast(hidden.device.type, enabled=False):
        return chunk_by_chunk(hidden, weight, target, temperature)[:2]
