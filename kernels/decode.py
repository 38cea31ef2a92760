"""The small operations of a decode step, three launches instead of about thirty a layer.

    add_rms_norm          residual ← residual + x;  normed = weight · residual / rms(residual)
    qk_norm_rope_store    one row of the merged QKV product → query and key normed and rotated, key and value in their page
    silu_mul              silu(gate) · up

All three round where transformers' Llama, Qwen2 and Qwen3 modules round (fp32 inside a norm, the model's dtype after each
other operation), so that a bf16 decode step stays close to the trainer's forward pass.
Tests: `pytest tests/test_kernels_decode.py`.
"""
import torch
import torch.nn.functional as F


def add_rms_norm_reference(x, residual, weight, eps):
    """`add_rms_norm` in plain PyTorch."""
    residual = x if residual is None else residual + x
    wide = residual.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype), residual


def qk_norm_rope_store_reference(qkv, q_weight, k_weight, cos, sin, slots, k_pages, v_pages, eps):
    """`qk_norm_rope_store` in plain PyTorch."""
    Hkv, Dh = k_pages.shape[2:]
    heads = qkv.unflatten(-1, (-1, Dh))                        # [B, Hq + 2·Hkv, Dh]
    qk, v = heads[:, :-Hkv], heads[:, -Hkv:]
    if q_weight is not None:
        wide = qk.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        normed = wide.to(qkv.dtype)
        qk = torch.cat((q_weight * normed[:, :-Hkv], k_weight * normed[:, -Hkv:]), 1)
    half = Dh // 2
    rotated = torch.cat((-qk[..., half:], qk[..., :half]), -1)
    qk = (qk * cos[:, None] + rotated * sin[:, None]).to(qkv.dtype)
    q, k = qk[:, :-Hkv], qk[:, -Hkv:]
    stored = slots >= 0
    if not stored.all():
        slots, k, v = slots[stored], k[stored], v[stored]
    k_pages.view(-1, Hkv, Dh)[slots] = k
    v_pages.view(-1, Hkv, Dh)[slots] = v
    return q.contiguous()


def silu_mul_reference(gate_up):
    """`silu_mul` in plain PyTorch."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def add_rms_norm(x, residual, weight, eps):
    """Adds x to the residual stream and norms the sum: (normed [B, D], new residual [B, D]).

    x [B, D]; residual [B, D] or None (then x is the residual); weight [D].
    """
    return add_rms_norm_reference(x, residual, weight, eps)


def qk_norm_rope_store(qkv, q_weight, k_weight, cos, sin, slots, k_pages, v_pages, eps):
    """From the merged QKV product to the rotated query; writes key and value into their page.

    qkv [B, (Hq + 2·Hkv)·Dh]: queries, keys, values; q_weight, k_weight [Dh], or both None for a model without QK norm;
    cos, sin [B, Dh] at each row's position (halves repeated, as transformers gives them); slots [B] int64:
    page · page_size + offset, or -1 = store nothing; k_pages, v_pages [pages, page_size, Hkv, Dh]. Returns q [B, Hq, Dh].
    """
    return qk_norm_rope_store_reference(qkv, q_weight, k_weight, cos, sin, slots, k_pages, v_pages, eps)


def silu_mul(gate_up):
    """silu(gate) · up for gate_up [B, 2·F] = the merged gate and up products. Returns [B, F]."""
    return silu_mul_reference(gate_up)
