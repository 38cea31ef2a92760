"""The small operations of a decode step: four launches per layer (the norm twice) where the stock modules need about thirty.

    add_rms_norm          residual ← residual + x;  normed = weight · residual / √(mean(residual²) + eps)
    qk_norm_rope_store    a row of the merged QKV product → query and key normed and rotated, key and value in a page
    silu_mul              silu(gate) · up,  silu(g) = g / (1 + exp(−g))

All three round where transformers' Llama, Qwen2 and Qwen3 modules round (fp32 inside a norm and inside silu, the
model's dtype after each other operation): in bf16 a sampler that rounds elsewhere than the trainer widens the mismatch
between their log-probs. `.to(T).to(tl.float32)` in a kernel is such a rounding.
Tests: `pytest tests/test_kernels_decode.py`.
"""
from __future__ import annotations   # annotations stay text, so the file can be read where there is no Triton

import torch
import torch.nn.functional as F

from kernels.backend import jit, tl, triton, use_triton

WARPS = {"add_rms_norm": 8, "qk_norm_rope_store": 1, "silu_mul": 4}
SILU_BLOCK = 1024


def add_rms_norm_reference(x, residual, weight, eps):
    """`add_rms_norm` in plain PyTorch."""
    residual = x if residual is None else residual + x
    wide = residual.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype), residual


@jit
def add_rms_norm_kernel(x, residual, weight, normed, new_residual, eps,
                        D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """One program a row."""
    T = x.dtype.element_ty
    d = tl.arange(0, BLOCK)
    inside = d < D
    at = tl.program_id(0).to(tl.int64) * D + d
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        row = (row + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(T)
        tl.store(new_residual + at, row, mask=inside)
        row = row.to(tl.float32)
    unit = row * tl.rsqrt(tl.sum(row * row, 0) / D + eps)
    scale = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (unit.to(T).to(tl.float32) * scale).to(T), mask=inside)


def add_rms_norm(x, residual, weight, eps):
    """Adds x to the residual stream and norms the sum: (normed [B, D], new residual [B, D]).

    x [B, D]; residual [B, D] or None (then x itself becomes the residual); weight [D]; one dtype. ValueError otherwise.
    """
    B, D = x.shape
    if weight.shape != (D,) or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"add_rms_norm: residual or weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}.")
    if not use_triton(x):
        return add_rms_norm_reference(x, residual, weight, eps)
    check_layout("add_rms_norm", x.dtype, x, weight, x if residual is None else residual)
    normed = torch.empty_like(x)
    new_residual = x if residual is None else torch.empty_like(x)
    add_rms_norm_kernel[(B,)](x, residual, weight, normed, new_residual, eps, D=D, BLOCK=triton.next_power_of_2(D),
                              ADD=residual is not None, num_warps=WARPS["add_rms_norm"])
    return normed, new_residual


def qk_norm_rope_store_reference(qkv, q_weight, k_weight, cos, sin, slots, k_pages, v_pages, eps):
    """`qk_norm_rope_store` in plain PyTorch."""
    Hkv, Dh = k_pages.shape[2:]
    heads = qkv.unflatten(-1, (-1, Dh))                        # [B, Hq + 2·Hkv, Dh]
    qk, v = heads[:, :-Hkv], heads[:, -Hkv:]
    if q_weight is not None:
        wide = qk.float()
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(qkv.dtype)
        qk = torch.cat((q_weight * normed[:, :-Hkv], k_weight * normed[:, -Hkv:]), 1)
    first, second = qk.chunk(2, -1)
    rotated = torch.cat((-second, first), -1)
    qk = (qk * cos[:, None] + rotated * sin[:, None]).to(qkv.dtype)
    q, k = qk[:, :-Hkv], qk[:, -Hkv:]
    stored = slots >= 0
    if not stored.all():
        slots, k, v = slots[stored], k[stored], v[stored]
    k_pages.view(-1, Hkv, Dh)[slots] = k
    v_pages.view(-1, Hkv, Dh)[slots] = v
    return q.contiguous()


@jit
def qk_norm_rope_store_kernel(qkv, q_weight, k_weight, cos, sin, slots, q, k_pages, v_pages, eps,
                              HQ: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr, NORM: tl.constexpr):
    """One program a row and head; a head is held as its two halves, which are what the rotation mixes."""
    T = qkv.dtype.element_ty
    TABLE = cos.dtype.element_ty              # products with cos and sin round to its dtype, as PyTorch promotes
    HALF: tl.constexpr = DH // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, HALF)
    slot = tl.load(slots + row)
    at = (row * (HQ + 2 * HKV) + head) * DH + d
    first = tl.load(qkv + at)
    second = tl.load(qkv + at + HALF)
    if head >= HQ + HKV:
        if slot >= 0:
            to = v_pages + (slot * HKV + head - HQ - HKV) * DH + d
            tl.store(to, first)
            tl.store(to + HALF, second)
    else:
        first = first.to(tl.float32)
        second = second.to(tl.float32)
        if NORM:
            shrink = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / DH + eps)
            w_first = tl.where(head < HQ, tl.load(q_weight + d), tl.load(k_weight + d)).to(tl.float32)
            w_second = tl.where(head < HQ, tl.load(q_weight + HALF + d), tl.load(k_weight + HALF + d)).to(tl.float32)
            first = ((first * shrink).to(T).to(tl.float32) * w_first).to(T).to(tl.float32)
            second = ((second * shrink).to(T).to(tl.float32) * w_second).to(T).to(tl.float32)
        turn = row * DH + d
        cos_first = (first * tl.load(cos + turn).to(tl.float32)).to(TABLE).to(tl.float32)
        cos_second = (second * tl.load(cos + turn + HALF).to(tl.float32)).to(TABLE).to(tl.float32)
        sin_first = (second * tl.load(sin + turn).to(tl.float32)).to(TABLE).to(tl.float32)
        sin_second = (first * tl.load(sin + turn + HALF).to(tl.float32)).to(TABLE).to(tl.float32)
        first = (cos_first - sin_first).to(T)
        second = (cos_second + sin_second).to(T)
        if head < HQ:
            to = q + (row * HQ + head) * DH + d
            tl.store(to, first)
            tl.store(to + HALF, second)
        elif slot >= 0:
            to = k_pages + (slot * HKV + head - HQ) * DH + d
            tl.store(to, first)
            tl.store(to + HALF, second)


def qk_norm_rope_store(qkv, q_weight, k_weight, cos, sin, slots, k_pages, v_pages, eps):
    """From the merged QKV product to the rotated query; writes key and value into their page.

    qkv [B, (Hq + 2·Hkv)·Dh]: queries, keys, values; q_weight, k_weight [Dh], or both None for a model without QK norm;
    cos, sin [B, Dh] at each row's position (halves repeated, as transformers gives them), in qkv's dtype or fp32;
    slots [B] int64: page · page_size + offset, or -1 = store nothing; k_pages, v_pages [pages, page_size, Hkv, Dh].
    Returns q [B, Hq, Dh]. ValueError if shapes or types do not fit.
    """
    Hkv, Dh = k_pages.shape[2:]
    B, heads = qkv.shape[0], qkv.shape[1] // Dh
    if heads * Dh != qkv.shape[1] or heads <= 2 * Hkv or v_pages.shape != k_pages.shape:
        raise ValueError(f"qk_norm_rope_store: qkv {tuple(qkv.shape)} does not fit pages {tuple(k_pages.shape)}.")
    if cos.shape != (B, Dh) or sin.shape != (B, Dh) or slots.shape != (B,) or slots.dtype != torch.int64:
        raise ValueError(f"qk_norm_rope_store: cos and sin are [{B}, {Dh}], slots is [{B}] int64.")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("qk_norm_rope_store: give both norm weights or neither.")
    if not use_triton(qkv):
        return qk_norm_rope_store_reference(qkv, q_weight, k_weight, cos, sin, slots, k_pages, v_pages, eps)
    weights = () if q_weight is None else (q_weight, k_weight)
    check_layout("qk_norm_rope_store", qkv.dtype, qkv, k_pages, v_pages, *weights)
    check_layout("qk_norm_rope_store", cos.dtype, cos, sin)
    if Dh & (Dh - 1) or cos.dtype not in (qkv.dtype, torch.float32):
        raise ValueError(f"qk_norm_rope_store: head size {Dh} is no power of two, or cos is not {qkv.dtype} or fp32.")
    Hq = heads - 2 * Hkv
    q = torch.empty(B, Hq, Dh, dtype=qkv.dtype, device=qkv.device)
    qk_norm_rope_store_kernel[(B, heads)](
        qkv, q_weight, k_weight, cos, sin, slots, q, k_pages, v_pages, eps,
        HQ=Hq, HKV=Hkv, DH=Dh, NORM=q_weight is not None, num_warps=WARPS["qk_norm_rope_store"])
    return q


def silu_mul_reference(gate_up):
    """`silu_mul` in plain PyTorch."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@jit
def silu_mul_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row and block of columns."""
    T = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * WIDTH + f, mask=f < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + f, mask=f < WIDTH, other=0.0).to(tl.float32)
    act = (gate / (1.0 + tl.exp(-gate))).to(T).to(tl.float32)
    tl.store(out + row * WIDTH + f, (act * up).to(T), mask=f < WIDTH)


def silu_mul(gate_up):
    """silu(gate) · up for gate_up [B, 2·F], the merged gate and up products. Returns [B, F]."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_mul: gate_up is [B, 2·F], not {tuple(gate_up.shape)}.")
    if not use_triton(gate_up):
        return silu_mul_reference(gate_up)
    check_layout("silu_mul", gate_up.dtype, gate_up)
    B, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(B, width, dtype=gate_up.dtype, device=gate_up.device)
    silu_mul_kernel[(B, triton.cdiv(width, SILU_BLOCK))](gate_up, out, WIDTH=width, BLOCK=SILU_BLOCK,
                                                         num_warps=WARPS["silu_mul"])
    return out


def check_layout(name, dtype, *tensors):
    """The kernels read contiguous tensors of one dtype."""
    for tensor in tensors:
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name}: the kernel takes contiguous tensors of {dtype}, not {tensor.dtype} with strides "
                             f"{tensor.stride()}.")
