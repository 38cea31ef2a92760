"""The fp32 products of a CPU: PyTorch's own, or oneDNN's on processors where they are faster.

PyTorch multiplies fp32 matrices on x86 by Intel's MKL. On processors that are not Intel's, MKL uses
AVX2 and not AVX-512, which is twice as wide. oneDNN is part of PyTorch and uses AVX-512 there. No
input of a product is rounded to bf16.

y = x Wᵀ + b ,   ∂L/∂x = dy W ,   ∂L/∂W = dyᵀ x ,   ∂L/∂b = Σ over tokens dy

Tests: `pytest tests/test_kernels_products.py`.
"""

import functools
from pathlib import Path

import torch
import torch.nn.functional as F


def onednn(a, b):
    """a [..., K] @ b [K, N] in fp32 by oneDNN. PyTorch computes it if a size is 0."""
    if a.numel() == 0 or b.numel() == 0:
        return a @ b
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


@functools.cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies faster than PyTorch: with AVX-512 and without an Intel processor.

    This is a rule and not a measurement, because a resumed run must get the same answer. PyTorch
    reports AVX512 if the processor has it, unless ATEN_CPU_CAPABILITY names older instructions.
    """
    cpu = Path("/proc/cpuinfo")
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not cpu.exists():
        return False
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_avx512 and "GenuineIntel" not in cpu.read_text()


def by_onednn(x) -> bool:
    """Whether oneDNN computes a product of x."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and onednn_is_faster()


def matmul(a, b):
    """a [M, K] @ b [K, N]."""
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
        rows = torch.atleast_2d(dy).flatten(0, -2)
        dx = onednn(dy, weight) if need_x else None
        d_weight = None
        if need_weight:
            d_weight = onednn(rows.t(), torch.atleast_2d(x).flatten(0, -2))
        return dx, d_weight, rows.sum(0) if need_bias else None


def linear(x, weight, bias=None):
    """F.linear, computed by oneDNN if that is faster. Under autocast it is F.linear itself."""
    if by_onednn(x) and not torch.is_autocast_enabled("cpu"):
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight, bias)
