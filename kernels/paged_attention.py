"""Decode attention over a paged KV cache: one query token per row, its keys and values scattered over pages.

    out[b, h] = softmax(scale · q[b, h] · K_bᵀ) V_b ,   K_b, V_b = the first lengths[b] tokens of the pages in table[b]

Decoding reads every key and value once and does almost nothing with them, so the whole aim is to keep the memory busy:
* split KV (flash-decoding): a row is cut into pieces, so that one long row fills the GPU too. A piece leaves its
  largest score m, its sum l = Σ exp(x − m) and acc = Σ exp(x − m)·v; the second kernel rescales them to one maximum:

      M = max_s m_s ,   out = Σ_s exp(m_s − M)·acc_s / Σ_s exp(m_s − M)·l_s

* packed query group: the query heads that share one key head are the rows of one matrix product, so a key is read once.
* nothing depends on a value on the GPU: the launch follows from shapes alone, so a CUDA graph can hold it. A piece past
  the end of its row leaves at once with l = 0, by which the merge knows that it is empty.

Exponentials are base 2 (scale carries log₂ e): one instruction on the GPU. Scores and sums are fp32.
`reference()` is the plain PyTorch form that the kernel is tested against; on a CPU the sampler has one of its own (forward.py).
Tests: `pytest tests/test_kernels_decode.py`. Speed: `python -m bench.attention`.
"""
from __future__ import annotations   # annotations stay text, so the file can be read where there is no Triton

import math

import torch
import torch.nn.functional as F

from kernels.backend import jit, tl, triton, use_triton

ROWS_AT_A_TIME = 16   # reference(): the copy of this many rows' keys and values stays in the processor's cache
# Launch by bytes of a head (Dh × element size): tokens in a block, warps, and stages of the load pipeline.
CONFIGS = {
    64: dict(block=128, num_warps=4, num_stages=3),
    128: dict(block=128, num_warps=4, num_stages=3),
    256: dict(block=64, num_warps=4, num_stages=3),     # bf16 with Dh = 128: Llama and Qwen
    512: dict(block=32, num_warps=4, num_stages=2),
    1024: dict(block=16, num_warps=4, num_stages=2),
}
PROGRAMS = 2048           # to aim for: several for each of 132 processors, so that the last wave is short
TOKENS_PER_SPLIT = 256    # a shorter piece spends its time starting
MAX_SPLITS = 64           # the merge holds [splits, Dh] in registers


def reference(q, k_pages, v_pages, table, lengths, *, scale):
    """Paged decode attention in plain PyTorch; shapes as in `paged_attention`.

    Rows of similar length are taken together, so that little is computed for padding. A position past a row's end reads
    the row's own first token instead and is masked: whatever an earlier owner left in the page (NaN too) stays out.
    """
    B, Hq, Dh = q.shape
    page_size, Hkv = k_pages.shape[1:3]
    k_pages, v_pages = (x.flatten(0, 1).flatten(1) for x in (k_pages, v_pages))   # [pages · page_size, Hkv · Dh]
    offset = torch.arange(page_size, device=q.device)
    out = torch.zeros_like(q)
    order = lengths.argsort()
    order = order[lengths[order] > 0]                          # rows of length 0 stay zero
    for begin in range(0, len(order), ROWS_AT_A_TIME):
        rows = order[begin:begin + ROWS_AT_A_TIME]             # R of them
        longest = int(lengths[rows[-1]])                       # T
        valid = torch.arange(longest, device=q.device) < lengths[rows, None]                   # [R, T]
        pages = table[rows, :-(-longest // page_size), None].long()                            # [R, T / page_size, 1]
        slots = (pages * page_size + offset).flatten(1)[:, :longest]                           # [R, T]
        slots = torch.where(valid, slots, slots[:, :1]).flatten()
        k = k_pages.index_select(0, slots).view(-1, longest, Hkv, Dh).transpose(1, 2)          # [R, Hkv, T, Dh]
        v = v_pages.index_select(0, slots).view(-1, longest, Hkv, Dh).transpose(1, 2)
        group = q[rows].unflatten(1, (Hkv, Hq // Hkv))         # heads that share a key stand where query tokens would
        mixed = F.scaled_dot_product_attention(group, k, v, attn_mask=valid[:, None, None], scale=scale)
        out[rows] = mixed.flatten(1, 2)
    return out


def split_count(rows, kv_heads, capacity):
    """Pieces a row is cut into: a power of two, from shapes only. capacity: tokens that the table has room for."""
    wanted = min(math.ceil(PROGRAMS / max(1, rows * kv_heads)), math.ceil(capacity / TOKENS_PER_SPLIT), MAX_SPLITS)
    return 1 << (wanted - 1).bit_length()


@jit
def split_kernel(q, k_pages, v_pages, table, lengths, part_acc, part_max, part_sum, scale, row_stride, page_stride,
                 HQ: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
                 PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """One piece of one row for one key head: max, sum and weighted values over its tokens."""
    kv_head = tl.program_id(0) % HKV          # the heads of a token lie side by side: read them at about the same time
    row = (tl.program_id(0) // HKV).to(tl.int64)
    split = tl.program_id(1)
    length = tl.load(lengths + row)
    piece = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    first = split * piece
    last = tl.minimum(first + piece, length)

    g = tl.arange(0, GROUP_PADDED)
    d = tl.arange(0, DH)
    j = tl.arange(0, BLOCK)
    head = row * HQ + kv_head * GROUP + g
    query = tl.load(q + head[:, None] * DH + d[None, :], mask=(g < GROUP)[:, None], other=0.0)
    running_max = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    running_sum = tl.zeros((GROUP_PADDED,), tl.float32)
    acc = tl.zeros((GROUP_PADDED, DH), tl.float32)
    for start in range(first, last, BLOCK):   # a block's first token is always valid: running_max is finite after it
        valid = start + j < last
        if PAGE % BLOCK == 0:                 # a block lies in one page: one look-up
            page = tl.load(table + row * row_stride + start // PAGE * page_stride)
            slot = page.to(tl.int64) * PAGE + (start % PAGE + j)
        else:
            page = tl.load(table + row * row_stride + (start + j) // PAGE * page_stride, mask=valid, other=0)
            slot = page.to(tl.int64) * PAGE + (start + j) % PAGE
        at = (slot * HKV + kv_head)[:, None] * DH + d[None, :]
        key = tl.load(k_pages + at, mask=valid[:, None], other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(valid[None, :], score, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(score, 1))
        p = tl.exp2(score - new_max[:, None])
        shrink = tl.exp2(running_max - new_max)
        value = tl.load(v_pages + at, mask=valid[:, None], other=0.0)
        running_sum = running_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        running_max = new_max

    part = head * SPLITS + split
    tl.store(part_max + part, running_max, mask=g < GROUP)
    tl.store(part_sum + part, running_sum, mask=g < GROUP)
    if first < last:
        tl.store(part_acc + part[:, None] * DH + d[None, :], acc, mask=(g < GROUP)[:, None])


@jit
def merge_kernel(part_acc, part_max, part_sum, out, DH: tl.constexpr, SPLITS: tl.constexpr):
    """Rescales the pieces of one row and query head to their common maximum and adds them."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, DH)
    part = head * SPLITS + split
    piece_sum = tl.load(part_sum + part)
    used = piece_sum != 0.0                   # an empty piece has max −inf and nothing in acc; NaN is used, and stays
    piece_max = tl.load(part_max + part)
    factor = tl.where(used, tl.exp2(piece_max - tl.max(piece_max, 0)), 0.0)
    total = tl.sum(piece_sum * factor, 0)
    acc = tl.load(part_acc + part[:, None] * DH + d[None, :], mask=used[:, None], other=0.0)
    mixed = tl.sum(acc * factor[:, None], 0) / tl.where(total == 0.0, 1.0, total)   # no piece at all (padding): zeros
    tl.store(out + head * DH + d, mixed.to(out.dtype.element_ty))


def triton_paged_attention(q, k_pages, v_pages, table, lengths, *, scale, splits=None, config=None):
    """The Triton form of `paged_attention`; `splits` (a power of two) and `config` are for tests and tuning."""
    B, Hq, Dh = q.shape
    _, page_size, Hkv, _ = k_pages.shape
    config = dict(config or CONFIGS[max(64, Dh * q.element_size())])
    block = config.pop("block")
    splits = splits or split_count(B, Hkv, table.shape[1] * page_size)
    group = Hq // Hkv
    part_acc = torch.empty(B, Hq, splits, Dh, dtype=torch.float32, device=q.device)
    part_max, part_sum = torch.empty(2, B, Hq, splits, dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    split_kernel[(B * Hkv, splits)](
        q, k_pages, v_pages, table, lengths, part_acc, part_max, part_sum, scale * math.log2(math.e), *table.stride(),
        HQ=Hq, HKV=Hkv, DH=Dh, GROUP=group, GROUP_PADDED=max(16, triton.next_power_of_2(group)),   # tl.dot: 16 rows
        PAGE=page_size, BLOCK=block, SPLITS=splits, **config)
    merge_kernel[(B * Hq,)](part_acc, part_max, part_sum, out, DH=Dh, SPLITS=splits, num_warps=4)
    return out


def check(q, k_pages, v_pages, table, lengths):
    """ValueError in one sentence for any shape, type or layout that the kernels do not read."""
    B, Hq, Dh = q.shape
    shape, k_shape, v_shape, table_shape = (tuple(x.shape) for x in (q, k_pages, v_pages, table))
    if k_shape != v_shape or len(k_shape) != 4 or k_shape[3] != Dh or Hq % k_shape[2]:
        raise ValueError(f"paged_attention: pages {k_shape} and {v_shape} do not fit q {shape}.")
    if len(table_shape) != 2 or table_shape[0] != B or lengths.shape != (B,):
        raise ValueError(f"paged_attention: table {table_shape} and {len(lengths)} lengths do not fit {B} rows.")
    if table.dtype != torch.int32 or lengths.dtype != torch.int32:
        raise ValueError("paged_attention: table and lengths are int32.")
    if not q.dtype == k_pages.dtype == v_pages.dtype:
        raise ValueError(f"paged_attention: q is {q.dtype}, the pages are {k_pages.dtype} and {v_pages.dtype}.")


def check_triton(q, k_pages, v_pages, lengths):
    """What the kernels need beyond `check`."""
    Dh = q.shape[2]
    if not all(x.is_contiguous() for x in (q, k_pages, v_pages, lengths)):
        raise ValueError("paged_attention: q, the pages and lengths must be contiguous.")
    if Dh & (Dh - 1) or not 16 <= Dh <= 256:
        raise ValueError(f"paged_attention: the kernel takes head sizes 16, 32, 64, 128 and 256, not {Dh}.")
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"paged_attention: the kernel takes fp32, fp16 or bf16, not {q.dtype}.")
    if not q.is_cuda and q.dtype == torch.bfloat16:
        raise ValueError("paged_attention: Triton's interpreter gets bf16 wrong; use fp32 or MARS_KERNELS=reference.")


def paged_attention(q, k_pages, v_pages, table, lengths, *, scale):
    """Attention of one query token per row over its paged keys and values.

    q [B, Hq, Dh]; k_pages, v_pages [pages, page_size, Hkv, Dh]; table [B, M] int32: a row's pages in order (those past
    its length are never read); lengths [B] int32, in tokens; scale: usually Dh^-0.5. Returns [B, Hq, Dh], q's dtype.
    A row of length 0 (padding of a CUDA graph's bucket) gives zeros. ValueError if the shapes or types do not fit.
    """
    check(q, k_pages, v_pages, table, lengths)
    if not use_triton(q):
        return reference(q, k_pages, v_pages, table, lengths, scale=scale)
    check_triton(q, k_pages, v_pages, lengths)
    return triton_paged_attention(q, k_pages, v_pages, table, lengths, scale=scale)
