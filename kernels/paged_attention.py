"""Decode attention over a paged KV cache: one query token a row, its keys and values scattered over pages.

    out[b, h] = softmax(scale · q[b, h] · K_bᵀ) V_b ,   K_b, V_b = the first lengths[b] tokens of the pages in table[b]

`reference()` is the plain PyTorch form and the CPU path of the sampler.
Tests: `pytest tests/test_kernels_decode.py`. Speed: `python -m bench.attention`.
"""
import torch
import torch.nn.functional as F

ROWS_AT_A_TIME = 16   # reference(): the copy of this many rows' keys and values stays in the processor's cache


def reference(q, k_pages, v_pages, table, lengths, *, scale):
    """Paged decode attention in plain PyTorch; shapes as in `paged_attention`.

    Rows of similar length are taken together, so that little is computed for padding. A position past a row's end reads
    the row's own first token instead and is masked: whatever an earlier owner left in the page (NaN too) stays out.
    """
    B, Hq, Dh = q.shape
    page_size, Hkv = k_pages.shape[1:3]
    k_pages, v_pages = k_pages.flatten(0, 1).flatten(1), v_pages.flatten(0, 1).flatten(1)   # [P·page, Hkv·Dh]
    offset = torch.arange(page_size, device=q.device)
    out = torch.zeros_like(q)
    order = lengths.argsort()
    order = order[lengths[order] > 0]                          # rows of length 0 are padding: zeros
    for rows in order.split(ROWS_AT_A_TIME):
        longest = int(lengths[rows[-1]])
        valid = torch.arange(longest, device=q.device) < lengths[rows, None]                   # [R, T]
        pages = table[rows, :-(-longest // page_size), None].long()                            # [R, pages, 1]
        slots = (pages * page_size + offset).flatten(1)[:, :longest]                           # [R, T]
        slots = torch.where(valid, slots, slots[:, :1]).flatten()
        k = k_pages.index_select(0, slots).view(-1, longest, Hkv, Dh).transpose(1, 2)
        v = v_pages.index_select(0, slots).view(-1, longest, Hkv, Dh).transpose(1, 2)
        group = q[rows].unflatten(1, (Hkv, Hq // Hkv))         # the query heads of one key head stand in as its query tokens
        mixed = F.scaled_dot_product_attention(group, k, v, attn_mask=valid[:, None, None], scale=scale)
        out[rows] = mixed.flatten(1, 2)
    return out


def paged_attention(q, k_pages, v_pages, table, lengths, *, scale):
    """Attention of one query token a row over its paged keys and values.

    q [B, Hq, Dh]; k_pages, v_pages [pages, page_size, Hkv, Dh]; table [B, M] int32: the pages of a row in order (entries past
    its length are never read); lengths [B] int32, in tokens; scale: usually Dh^-0.5. Returns [B, Hq, Dh], q's dtype.
    A row of length 0 (padding of a CUDA graph's bucket) gives zeros.
    """
    return reference(q, k_pages, v_pages, table, lengths, scale=scale)
