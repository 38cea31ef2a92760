"""Causal attention within each sample of a packed row (varlen attention), as transformers calls it.

On CUDA it is kernels.varlen_attention. On a CPU it is one scaled_dot_product_attention per sample.

Departure from the textbook: with a shared prefix (prefixes.py) a sequence has more keys than
queries, because the prefix has no queries. The causal mask is aligned at the end, as in flash-attn:
the last query sees all keys.

Tests: `pytest tests/test_policy.py tests/test_prefixes.py`.
"""

from functools import partial

import torch
from torch import Tensor, autocast, cat, float32, full, inf, promote_types
from torch.nn.functional import scaled_dot_product_attention

import kernels
from trainer.batches import MicroBatch


@torch.compiler.disable
def packed_attention(
    module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask=None,
    scaling: float | None = None,
    *,
    packing: MicroBatch,
    **options,
):
    """Attention of each token to itself and those before it in its sample; never dropout.

    q [1, Hq, T, Dh], k and v [1, Hkv, T, Dh] -> ([1, T, Hq, Dh], None). `packing` is the
    micro-batch of the T tokens. A compiled layer passes it on without a look at its lists: code
    that was compiled for their lengths would fit this micro-batch only.
    """
    lengths, cu_seqlens, keys = packing.lengths, packing.cu_seqlens, packing.keys
    dtype = v.dtype
    # Under autocast, rotated queries and keys are fp32. On a GPU all three get the values' type,
    # bf16. On a CPU all are fp32: on an Intel Xeon bf16 attention has a backward pass ten times
    # slower (on an AMD with AVX-512 BF16 a third faster).
    compute_dtype = dtype if q.is_cuda else promote_types(dtype, float32)
    q, k, v = (x.to(compute_dtype) for x in (q, k, v))
    key_lengths, key_cu_seqlens = lengths, cu_seqlens
    if keys is not None:
        key_lengths, key_cu_seqlens = keys.lengths, keys.cu_seqlens
        k = k.index_select(2, keys.indices)
        v = v.index_select(2, keys.indices)
    if q.is_cuda:
        bounds = (cu_seqlens, key_cu_seqlens, max(lengths), max(key_lengths))
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [T, H, Dh]
        return kernels.varlen_attention(q, k, v, bounds, scaling)[None], None
    masks = [None] * len(lengths)
    if keys is not None:
        keys.masks = keys.masks or causal_masks(lengths, key_lengths, compute_dtype)
        masks = keys.masks
    grouped = q.shape[1] != k.shape[1]
    attend = partial(scaled_dot_product_attention, scale=scaling, enable_gqa=grouped)
    parts = (q.split(lengths, 2), k.split(key_lengths, 2), v.split(key_lengths, 2), masks)
    with autocast("cpu", enabled=False):
        out = [
            attend(q_part, k_part, v_part, attn_mask=mask, is_causal=mask is None)
            for q_part, k_part, v_part, mask in zip(*parts, strict=True)
        ]
    return cat(out, dim=2).transpose(1, 2).to(dtype), None


def causal_masks(lengths: list[int], key_lengths: list[int], dtype) -> list[Tensor | None]:
    """The additive mask of each sequence [queries, keys]; None if both numbers are equal.

    is_causal would be wrong: it aligns at the start, so the first query would see only one key.
    """
    masks = []
    for queries, keys in zip(lengths, key_lengths, strict=True):
        mask = None
        if keys > queries:
            mask = full((queries, keys), -inf, dtype=dtype).triu(keys - queries + 1)
        masks.append(mask)
    return masks
