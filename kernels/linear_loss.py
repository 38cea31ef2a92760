"""LM head, log-prob, GRPO loss and its gradients in one pass, without the [N, V] logits in memory.

For each loss token, with hidden state h [D], head W [V, D], target y and temperature τ:

    z = W h ,   logp = z_y/τ − lse(z/τ) ,   p = softmax(z/τ) ,   H = −Σ p log p ,   L = Σ w·ℓ(logp)

ℓ is `grpo.grpo_loss` itself, on every device. This file has no second formula of the loss.

Gradient. A token's loss depends on its own log-prob alone, so c = ∂L/∂logp is one number per token.
Autograd computes it as soon as the token's logits exist. With ∂logp/∂z_j = (1[j = y] − p_j)/τ:

    dz_j = c/τ · (1[j = y] − p_j) ,   ∂L/∂h = Wᵀ dz ,   ∂L/∂W = Σ over tokens dz hᵀ

Departure from the textbook: the forward pass computes the gradients too. It takes the tokens in
chunks, and computes logits, c, dz and both gradients of a chunk before the next one. The backward
pass only scales them. So three matrix products are enough. With loss first and gradients later, the
logits would have to be kept, or computed a second time in a fourth product.

Precision. Logits are fp32. Rounded to bf16 they would change a log-prob by up to 1e-2, enough to
change clip decisions. dz is rounded to hidden's type for the products; ∂L/∂W is summed in fp32.
Memory. The fp32 logits of one chunk (in the Triton form dz replaces them) and ∂L/∂W in fp32. Only
∂L/∂h and a few numbers per token grow with N.
Two runs give the same bits, because one program computes a row and there are no atomic additions.

The Triton form has two kernels, `stats_kernel` for log-prob, entropy and lse, and `gradient_kernel`
for dz. Each has one program per row, which reads the row's logits once. The products are cuBLAS.
Tests: `pytest tests/test_kernels_loss.py`.
Accuracy and speed beside other implementations: `python -m bench.gpu --step accuracy`.
"""

import math

import torch

import grpo
from kernels import products
from kernels.backend import check, jit, tl, use_triton

# Tokens per chunk on CUDA. Each chunk after the first reads and writes all of ∂L/∂W, which takes
# 1.2 ms on an H200 beside 17 ms of products (2.5 GB at V = 152k, D = 4k; by arithmetic). A chunk of
# this size and ∂L/∂W need less than 5 GB together.
CHUNK_TOKENS_CUDA = 3584
# On a CPU the logits of a chunk have at most this many bytes, so that they fit the cache, but a
# chunk has at least CHUNK_TOKENS_CPU tokens.
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
    """`linear_grpo_loss` for given logits z [N, V], with gradients by autograd.

    `options` are those of `grpo.grpo_loss`. It is for models whose logits are not simply hidden
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
    """`linear_grpo_loss` in plain PyTorch: all logits are in memory, gradients by autograd."""
    hidden = torch.where((token_weight != 0)[:, None], hidden, 0)
    z = hidden @ weight.T
    return logits_grpo_loss(z, target, old_logprob, advantage, token_weight, **options)


# --- the products ---------------------------------------------------------------------------------


def on_tensor_cores(x) -> bool:
    """Whether the GPU's tensor cores multiply x. They multiply bf16 exactly and sum in fp32."""
    return x.is_cuda and x.dtype == torch.bfloat16


def sum_dtype(x):
    """The type of sums: fp32, or fp64 if x is fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def at_least_fp32(x):
    return x.to(sum_dtype(x))


def matmul_fp32(a, b):
    """a @ b, summed and returned in fp32 for any type of inputs (fp64 for fp64)."""
    if on_tensor_cores(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return products.matmul(at_least_fp32(a), at_least_fp32(b))


def add_matmul_fp32(total, a, b):
    """total + a @ b in fp32, in total's memory; if total is None it counts as zero."""
    if total is None:
        return matmul_fp32(a, b)
    if on_tensor_cores(a):
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    if products.by_onednn(total):
        return total.add_(products.onednn(at_least_fp32(a), at_least_fp32(b)))
    return torch.addmm(total, at_least_fp32(a), at_least_fp32(b), out=total)


def cut_into_chunks(N, V, on_cuda):
    """Slices of nearly equal length that cover N tokens."""
    limit = max(CHUNK_TOKENS_CPU, CHUNK_BYTES_CPU // (4 * V))
    if on_cuda:
        limit = CHUNK_TOKENS_CUDA
    count = max(1, math.ceil(N / limit))
    size = max(1, math.ceil(N / count))
    return [slice(start, min(start + size, N)) for start in range(0, N, size)]


# --- the softmax of a chunk: log-prob and entropy, and the gradient of the logits -----------------


def plain_stats(z, target, temperature):
    """(log-prob [C], entropy [C], softmax) of logits z [C, V], which are overwritten.

    softmax is (exp(z) [C, V], their sums [C]), for `plain_gradient`.
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
    """dz [C, V] in `dtype`, from the softmax of `plain_stats` and c = ∂L/∂logp [C]."""
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
    """One program per row: each lane computes an online softmax, and at the end they are merged.

    A lane has its maximum m, Σ exp(z − m) and Σ exp(z − m)·(z − m). In place of −∞ there are −1e38
    and −1e30: beside any real z their exponentials are 0, and no difference is NaN.
    """
    row = tl.program_id(0).to(tl.int64)  # row · V may exceed 2³¹.
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
    """One program per row: dz replaces z."""
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
        # dz overwrites z, so no thread may write before all threads have read this block.
        tl.debug_barrier()
        tl.store(dz_ptr + column, dz.to(dz_ptr.dtype.element_ty), mask=column < V)


def triton_stats(z, target, temperature):
    """(log-prob [C], entropy [C], lse [C]) of logits z [C, V]. Unlike `plain_stats` it keeps z."""
    C, V = z.shape
    logprob = torch.empty(C, dtype=torch.float32, device=z.device)
    entropy = torch.empty_like(logprob)
    lse = torch.empty_like(logprob)
    stats_kernel[(C,)](z, target, logprob, entropy, lse, V, 1 / temperature, **STATS_CONFIG)
    return logprob, entropy, lse


def triton_gradient(z, target, lse, c, temperature, dtype):
    """dz as from `plain_gradient`, in the memory of z: a row of dz begins where the row of z began.

    If dz is bf16 and z fp32, block k of dz overwrites a part of block k/2 of z. The kernel reads
    the blocks in rising order, so it has read that block already.
    """
    C, V = z.shape
    dz = z.view(dtype)[:, :V]
    layout = V, dz.stride(0), 1 / temperature
    gradient_kernel[(C,)](z, target, lse, c, dz, *layout, **GRADIENT_CONFIG)
    return dz


# --- chunk by chunk -------------------------------------------------------------------------------


def gradient_per_token(loss_of, logprob, part):
    """c = ∂L/∂logprob [C] for the tokens in slice `part`, by autograd through the loss."""
    with torch.enable_grad():
        leaf = logprob.detach().requires_grad_()
        loss, _ = loss_of(leaf, part)
    return torch.autograd.grad(loss, leaf)[0]


def chunk_by_chunk(
    hidden, weight, target, temperature, loss_of=None, need_hidden=False, need_weight=False
):
    """(log-prob [N], entropy [N], ∂L/∂hidden, ∂L/∂weight); a gradient is None unless needed.

    loss_of(logprob, part) returns the loss of the tokens in slice `part`, and its stats.

        for each chunk of tokens:
            z = h Wᵀ                            [C, V]
            logp, H, softmax = of z / τ
            c = ∂loss/∂logp                     [C], by autograd through loss_of
            dz = c/τ · (onehot(y) − softmax)    [C, V]
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
        del z, softmax  # Otherwise they would be in memory beside the next chunk's logits.
    if need_weight and d_weight is None:
        d_weight = torch.zeros_like(head, dtype=logprob.dtype)
    return logprob, entropy, d_hidden, d_weight


class _LinearGRPOLoss(torch.autograd.Function):
    """(loss, stats). The forward pass computes both gradients."""

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
            result = torch.empty_like(d_weight, dtype=ctx.weight_dtype)
            d_weight = torch.mul(d_weight, grad, out=result)
        return d_hidden, d_weight, None, None, None


# --- the entry points -----------------------------------------------------------------------------


def prepare_inputs(hidden, weight, target):
    """hidden and target, contiguous, hidden in autocast's type. ValueError if they do not fit."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):  # F.linear casts its input in the same way.
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    N, D = hidden.shape
    fits = weight.dim() == 2 and weight.shape[1] == D and target.shape == (N,)
    # An fp64 matrix can only be multiplied with an fp64 matrix.
    fits &= (hidden.dtype == torch.float64) == (weight.dtype == torch.float64)
    fits &= target.dtype == torch.int64
    check(fits, "linear_loss", hidden=hidden, weight=weight, target=target)
    if hidden.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"hidden is {hidden.dtype}; fp16 would lose small gradients, use bf16")
    V = len(weight)
    # A kernel would read outside the row. This check waits for the GPU.
    if N and not bool(((target >= 0) & (target < V)).all()):
        raise ValueError(f"a target is outside the vocabulary of {V} tokens")
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
    """Σ w·ℓ over the tokens with token_weight ≠ 0, differentiable in hidden and weight.

    hidden [N, D] (after the final norm), weight [V, D] of the LM head, target [N] int64; all others
    [N]. N may be 0: then the loss is 0 and both inputs get zero gradients. A masked token
    (token_weight 0) never enters the head: its gradient is exactly 0, even if it has NaN. hidden
    may be bf16 with an fp32 weight. Then the weight's gradient is fp32.

    Returns (loss, stats). Stats are detached: loss; clip_share and kl, means over the unmasked
    tokens; logprob [N] of the targets and entropy [N] of the softmax, both 0 for masked tokens. If
    a logit exceeds fp32's range, the entropy is NaN. ValueError if shapes or types do not fit, or
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
    hidden, target = prepare_inputs(hidden, weight, target)
    tokens = {name: x.to(sum_dtype(hidden)) for name, x in tokens.items()}

    def loss_of(logprob, part):
        chunk = {name: x[part] for name, x in tokens.items()}
        return grpo.grpo_loss(logprob, **chunk, **options)

    with torch.autocast(hidden.device.type, enabled=False):
        loss, stats = _LinearGRPOLoss.apply(hidden, weight, target, temperature, loss_of)
    if len(live) < N:
        for name in ("logprob", "entropy"):
            stats[name] = stats[name].new_zeros(N).index_copy_(0, live, stats[name])
    return loss, stats


@torch.no_grad()
def linear_logprob(hidden, weight, target, *, temperature=1.0):
    """(log-prob [N] of target, entropy [N]) under softmax(hidden @ weight.T / temperature).

    The result is fp32 and has no gradient. Shapes and errors are those of `linear_grpo_loss`. Only
    one chunk of logits is in memory at a time.
    """
    hidden, target = prepare_inputs(hidden, weight, target)
    with torch.autocast(hidden.device.type, enabled=False):
        return chunk_by_chunk(hidden, weight, target, temperature)[:2]
