"""The small operations of a decode step as three kernels. A layer has two norms: four launches.

    add_rms_norm          residual ← residual + x
                          normed = weight · residual / √(mean(residual²) + eps)
    qk_norm_rope_store    a row of the merged QKV product → query and key normed and rotated,
                          key and value in a page
    silu_mul              silu(gate) · up ,   silu(g) = g / (1 + exp(−g))

Without them, PyTorch needs about thirty launches. The kernels round to the model's dtype where
transformers' Llama, Qwen2 and Qwen3 modules round: after every operation, except inside a norm and
inside silu, which are fp32. In bf16 a sampler that rounds at other places than the trainer has
log-probs that differ more from the trainer's.
Tests: `pytest tests/test_kernels_decode.py`.
"""

import torch
import torch.nn.functional as F

from kernels.backend import check, jit, tl, triton, use_triton

NORM_WARPS = 8
SILU_WARPS = 4
SILU_BLOCK = 1024


@jit
def round_to(x, dtype: tl.constexpr):
    """x in fp32, rounded to `dtype`."""
    return x.to(dtype).to(tl.float32)


def one_layout(dtype, *tensors) -> bool:
    """Whether all tensors are contiguous and have this dtype, as the kernels require."""
    return all(x.dtype == dtype and x.is_contiguous() for x in tensors)


# --- residual sum and norm ------------------------------------------------------------------------


def rms_norm_reference(x, eps):
    """x / √(mean(x²) + eps) in fp32, rounded to x's dtype."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


def add_rms_norm_reference(x, residual, weight, eps):
    """`add_rms_norm` in plain PyTorch."""
    residual = x if residual is None else residual + x
    return weight * rms_norm_reference(residual, eps), residual


@jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    new_residual_ptr,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row."""
    dtype = x_ptr.dtype.element_ty
    d = tl.arange(0, BLOCK)
    inside = d < D
    at = tl.program_id(0).to(tl.int64) * D + d
    row = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        row = round_to(row + residual, dtype)
        tl.store(new_residual_ptr + at, row.to(dtype), mask=inside)
    unit = round_to(row * tl.rsqrt(tl.sum(row * row, 0) / D + eps), dtype)
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + at, (unit * weight).to(dtype), mask=inside)


def add_rms_norm(x, residual, weight, eps):
    """Adds x to the residual stream and norms the sum: (normed [B, D], new residual [B, D]).

    x [B, D]; residual [B, D] or None (then x itself becomes the residual); weight [D]. ValueError
    if the shapes or dtypes do not fit.
    """
    B, D = x.shape
    add = residual is not None
    by_triton = use_triton(x)
    fits = weight.shape == (D,) and (not add or residual.shape == x.shape)
    if by_triton:
        fits &= one_layout(x.dtype, x, weight, residual if add else x)
    check(fits, "add_rms_norm", x=x, residual=residual, weight=weight)
    if not by_triton:
        return add_rms_norm_reference(x, residual, weight, eps)
    normed = torch.empty_like(x)
    new_residual = torch.empty_like(x) if add else x
    constants = {"D": D, "BLOCK": triton.next_power_of_2(D), "num_warps": NORM_WARPS}
    add_rms_norm_kernel[(B,)](x, residual, weight, normed, new_residual, eps, **constants)
    return normed, new_residual


# --- QK norm, rotary embedding, cache write -------------------------------------------------------


def qk_norm_rope_store_reference(qkv, q_weight, k_weight, cos, sin, slots, k_pages, v_pages, eps):
    """`qk_norm_rope_store` in plain PyTorch."""
    Hkv, Dh = k_pages.shape[2:]
    heads = qkv.unflatten(-1, (-1, Dh))  # [B, Hq + 2·Hkv, Dh]
    qk = heads[:, :-Hkv]
    v = heads[:, -Hkv:]
    if q_weight is not None:
        qk = rms_norm_reference(qk, eps)
        qk[:, :-Hkv] *= q_weight
        qk[:, -Hkv:] *= k_weight
    first, second = qk.chunk(2, -1)
    rotated = torch.cat((-second, first), -1)
    qk = (qk * cos[:, None]).add_(rotated.mul_(sin[:, None]))
    k = qk[:, -Hkv:]
    has_slot = slots >= 0
    if not has_slot.all():
        slots = slots[has_slot]
        k = k[has_slot]
        v = v[has_slot]
    for pages, new in ((k_pages, k), (v_pages, v)):
        pages.view(-1, Hkv, Dh).index_copy_(0, slots, new.to(pages.dtype))
    return qk[:, :-Hkv]


@jit
def qk_norm_rope_store_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_ptr,
    k_pages_ptr,
    v_pages_ptr,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    DH: tl.constexpr,
):
    """One program per row and head. The rotation combines the first and second half of the head."""
    dtype = qkv_ptr.dtype.element_ty
    HALF: tl.constexpr = DH // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, HALF)
    slot = tl.load(slots_ptr + row)
    at = (row * (HQ + 2 * HKV) + head) * DH + d
    first = tl.load(qkv_ptr + at)
    second = tl.load(qkv_ptr + at + HALF)
    if head >= HQ + HKV:  # a value
        if slot >= 0:
            to = v_pages_ptr + (slot * HKV + head - HQ - HKV) * DH + d
            tl.store(to, first)
            tl.store(to + HALF, second)
    else:
        first = first.to(tl.float32)
        second = second.to(tl.float32)
        if q_weight_ptr is not None:
            squares = tl.sum(first * first, 0) + tl.sum(second * second, 0)
            shrink = tl.rsqrt(squares / DH + eps)
            weight_ptr = q_weight_ptr
            if head >= HQ:
                weight_ptr = k_weight_ptr
            w_first = tl.load(weight_ptr + d).to(tl.float32)
            w_second = tl.load(weight_ptr + HALF + d).to(tl.float32)
            first = round_to(round_to(first * shrink, dtype) * w_first, dtype)
            second = round_to(round_to(second * shrink, dtype) * w_second, dtype)
        angle = row * DH + d
        cos_first = tl.load(cos_ptr + angle).to(tl.float32)
        cos_second = tl.load(cos_ptr + angle + HALF).to(tl.float32)
        sin_first = tl.load(sin_ptr + angle).to(tl.float32)
        sin_second = tl.load(sin_ptr + angle + HALF).to(tl.float32)
        first_cos = round_to(first * cos_first, dtype)
        first_sin = round_to(first * sin_second, dtype)
        first = (first_cos - round_to(second * sin_first, dtype)).to(dtype)
        second = (round_to(second * cos_second, dtype) + first_sin).to(dtype)
        if head < HQ:
            to = q_ptr + (row * HQ + head) * DH + d
            tl.store(to, first)
            tl.store(to + HALF, second)
        elif slot >= 0:
            to = k_pages_ptr + (slot * HKV + head - HQ) * DH + d
            tl.store(to, first)
            tl.store(to + HALF, second)


def qk_norm_rope_store(qkv, q_weight, k_weight, cos, sin, slots, k_pages, v_pages, eps):
    """Norms and rotates the queries and keys of the merged QKV product, and writes to the cache.

    qkv [B, (Hq + 2·Hkv)·Dh]: queries, keys, values; q_weight, k_weight [Dh], or both None for a
    model without QK norm; cos, sin [B, Dh] at each row's position (both halves are equal, as in
    transformers); slots [B] int64: page · page_size + offset, or −1 to store nothing; k_pages,
    v_pages [pages, page_size, Hkv, Dh] (the plain form also accepts a wider type than qkv's).
    Returns q [B, Hq, Dh]. ValueError if shapes or types do not fit. The kernel needs Dh = 2^n.
    """
    Hkv, Dh = k_pages.shape[2:]
    B, width = qkv.shape
    heads = width // Dh
    by_triton = use_triton(qkv)
    fits = (
        width == heads * Dh
        and heads > 2 * Hkv
        and v_pages.shape == k_pages.shape
        and cos.shape == sin.shape == (B, Dh)
        and slots.shape == (B,)
        and slots.dtype == torch.int64
        and (q_weight is None) == (k_weight is None)
    )
    if fits and by_triton:
        weights = () if q_weight is None else (q_weight, k_weight)
        fits = one_layout(qkv.dtype, qkv, cos, sin, k_pages, v_pages, *weights)
        fits &= Dh & (Dh - 1) == 0
    inputs = {"qkv": qkv, "q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin}
    inputs |= {"slots": slots, "k_pages": k_pages, "v_pages": v_pages}
    check(fits, "qk_norm_rope_store", **inputs)
    if not by_triton:
        return qk_norm_rope_store_reference(**inputs, eps=eps)
    Hq = heads - 2 * Hkv
    q = torch.empty(B, Hq, Dh, dtype=qkv.dtype, device=qkv.device)
    # Without fusion the rotation's product and sum are rounded separately, as in transformers.
    options = {"HQ": Hq, "HKV": Hkv, "DH": Dh, "num_warps": 1, "enable_fp_fusion": False}
    tensors = (qkv, q_weight, k_weight, cos, sin, slots, q, k_pages, v_pages)
    qk_norm_rope_store_kernel[(B, heads)](*tensors, eps, **options)
    return q


# --- SiLU product ---------------------------------------------------------------------------------


def silu_mul_reference(gate_up):
    """`silu_mul` in plain PyTorch."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


@jit
def silu_mul_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row and block of columns."""
    dtype = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < WIDTH
    gate_ptr = gate_up_ptr + row * 2 * WIDTH
    gate = tl.load(gate_ptr + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + WIDTH + f, mask=inside, other=0.0).to(tl.float32)
    act = round_to(gate / (1.0 + tl.exp(-gate)), dtype)
    tl.store(out_ptr + row * WIDTH + f, (act * up).to(dtype), mask=inside)


def silu_mul(gate_up):
    """silu(gate) · up for gate_up [B, 2·F], the merged gate and up products. Returns [B, F]."""
    by_triton = use_triton(gate_up)
    fits = gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0
    check(fits and (not by_triton or gate_up.is_contiguous()), "silu_mul", gate_up=gate_up)
    if not by_triton:
        return silu_mul_reference(gate_up)
    B = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    out = torch.empty(B, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (B, triton.cdiv(width, SILU_BLOCK))
    silu_mul_kernel[grid](gate_up, out, WIDTH=width, BLOCK=SILU_BLOCK, num_warps=SILU_WARPS)
    return out
