"""The fp32 products of a CPU: PyTorch's own, or oneDNN's where these are faster.

PyTorch multiplies fp32 matrices on x86 by MKL, which on other makers' processors stops at AVX2,
half the width of AVX-512. oneDNN, which PyTorch brings along for other work, uses all of it.
Nothing is rounded to bf16, also on processors with units for it.

y = x Wᵀ + b ,   ∂L/∂x = dy W ,   ∂L/∂W = dyᵀ x ,   ∂L/∂b = Σ over tokens dy

Tests: `pytest tests/test_kernels_products.py`.
"""

import functools
from pathlib import Path

import torch
import torch.nn.functional as F


def onednn(a, b):
    """a @ b of fp32 matrices by oneDNN, which takes b as the weight of a linear layer."""
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


@functools.cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies faster than PyTorch: where MKL leaves units for AVX-512 unused.

    A rule and no measurement, because a resumed run must decide alike, however busy the machine.
    """
    cpu = Path("/proc/cpuinfo")
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not cpu.exists():
        return False
    text = cpu.read_text()
    return "avx512f" in text and "GenuineIntel" not in text


def by_onednn(x) -> bool:
    """Whether a product of x goes to oneDNN."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and onednn_is_faster()


def matmul(a, b):
    """a @ b of two matrices."""
    return onednn(a, b) if by_onednn(a) else a @ b


class _Linear(torch.autograd.Function):
    """x [..., in], weight [out, in], bias [out] or None -> [..., out]."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        y = onednn(x, weight.t())
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        rows = dy.flatten(0, -2)
        dx = onednn(dy, weight) if need_x else None
        d_weight = onednn(rows.t(), x.flatten(0, -2)) if need_weight else None
        return dx, d_weight, rows.sum(0) if need_bias else None


def linear(x, weight, bias=None):
    """F.linear, under autocast too; by oneDNN where that is faster."""
    if by_onednn(x) and not torch.is_autocast_enabled("cpu"):
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight, bias)
