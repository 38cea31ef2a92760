"""Causal attention within sequences that lie end to end, on CUDA: flash-attn, or PyTorch's own.

Tests: `pytest tests/test_attention.py tests/test_prefixes.py`.
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# Both packages are optional: requirements-gpu.txt.
try:
    from flash_attn.cute import flash_attn_varlen_func as flash_attn_4
except ImportError:
    flash_attn_4 = None
try:
    from flash_attn import flash_attn_varlen_func as flash_attn_2
except ImportError:
    flash_attn_2 = None

# Without this option (torch 2.11) keys and values are repeated for each head of the queries.
GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def varlen_attention(q, k, v, bounds: tuple[Tensor, Tensor, int, int], scale) -> Tensor:
    """q [T, Hq, Dh], k and v [K, Hkv, Dh] -> [T, Hq, Dh].

    A sequence's last query sees all its keys.
    bounds: cu_seqlens of the queries and of the keys, most queries in a sequence, most keys in a
    sequence.
    """
    flash_attention = choose_flash_attention(q)
    if flash_attention:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        options = dict(zip(names, bounds, strict=True))
        out = flash_attention(q, k, v, **options, softmax_scale=scale, causal=True)
        return out[0] if isinstance(out, tuple) else out  # Version 4 adds the log-sum-exps.
    options = {"scale": scale, "window_size": (-1, 0)}  # every token before, and none after
    if GROUPS_HEADS:
        return varlen_attn(q, k, v, *bounds, enable_gqa=True, **options)
    heads_per_key = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(heads_per_key, 1)
    v = v.repeat_interleave(heads_per_key, 1)
    return varlen_attn(q, k, v, *bounds, **options)


def choose_flash_attention(q: Tensor) -> Callable | None:
    """flash-attn 4, else flash-attn 2, else None: PyTorch's varlen_attn.

    Version 4 is for Hopper (9.x) and Blackwell (10.x), and takes head sizes of up to 128.
    """
    if flash_attn_4 and q.shape[-1] <= 128:
        if torch.cuda.get_device_capability(q.device)[0] in (9, 10):
            return flash_attn_4
    return flash_attn_2
