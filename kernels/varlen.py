"""Causal attention within sequences that lie end to end, on CUDA: PyTorch's own varlen_attn.

Tests: `pytest tests/test_attention.py tests/test_prefixes.py`.
"""

import inspect

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# torch 2.11 lacks this option. There keys and values are repeated for each head of the queries.
GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def varlen_attention(q, k, v, bounds: tuple[Tensor, Tensor, int, int], scale) -> Tensor:
    """q [T, Hq, Dh], k and v [K, Hkv, Dh] -> [T, Hq, Dh].

    A sequence's last query sees all its keys.
    bounds: cu_seqlens of the queries and of the keys, most queries in a sequence, most keys in a
    sequence.
    """
    options = {"scale": scale, "window_size": (-1, 0)}  # every token before, and none after
    if GROUPS_HEADS:
        return varlen_attn(q, k, v, *bounds, enable_gqa=True, **options)
    heads_per_key = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(heads_per_key, 1)
    v = v.repeat_interleave(heads_per_key, 1)
    return varlen_attn(q, k, v, *bounds, **options)
