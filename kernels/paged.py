"""Decode attention over a paged KV cache: one query token per row, keys and values in pages.

    out[b, h] = softmax(scale · q[b, h] · K_bᵀ) V_b

K_b and V_b are the first lengths[b] tokens of the pages in block_table[b].

Decoding reads every key and value once and computes little with them. So memory bandwidth limits
the kernel, and each of these measures keeps the memory busy:

* split KV (flash-decoding): the tokens of a row are cut into splits, so that one long row fills the
  GPU too. A split writes a partial result: its largest score m, its sum l = Σ exp(x − m) and
  acc = Σ exp(x − m)·v. The second kernel rescales the partial results to one maximum and adds them:

      top = max_s m_s ,   out = Σ_s exp(m_s − top)·acc_s / Σ_s exp(m_s − top)·l_s

* packed query heads: the query heads that share one key head are the rows of one matrix product.
  So a key is read once for all of them.
* prefix sharing (Hydragen, cascade attention): rows may have the same pages at the beginning of
  their tables, such as the attempts of one group. Such a range of tokens is read once for all of
  its rows. It adds one more partial result to each row, and the merge treats it like any other.
  With B rows, a shared prompt of P tokens and S tokens of each row alone, the kernel reads P + B·S
  tokens in place of B·(P + S).
* double buffers: one block of keys and values is loaded while the block before it is multiplied.
* full waves: the number of splits is chosen so that the last wave of programs fills the GPU too.
* The launch depends on shapes alone and on no value on the GPU, so a CUDA graph can hold it. A
  split beyond the end of its range stores l = 0. The merge ignores a partial result with l = 0.

Exponentials are base 2 (scale carries log₂ e), since that is one instruction on the GPU. Sums are
fp32. `reference()` is the plain PyTorch form that the kernel is tested against.
Tests: `pytest tests/test_kernels_decode.py tests/test_attention.py tests/test_kernels_compile.py`.
Speed: `python -m bench.gpu --step attention`.
"""

import functools
import math

import torch
import torch.nn.functional as F

from kernels.backend import check, jit, tl, triton, use_triton

# A program has two buffers of keys and two of values. At this size they take 32 KB together, so
# five programs fit one Hopper processor and load about 80 KB at a time. By arithmetic 32 KB per
# processor are enough to hide a latency of 1 µs at 4.3 TB/s.
BUFFER_BYTES = 8192
# From the block table's load to the product there are three stages, so two buffers need five.
NUM_STAGES = 5
HEAD_SIZES = (16, 32, 64, 128)  # A program of head size 256 would exceed PROGRAM_BYTES.
MAX_PARTS = 64  # The merge keeps [parts, Dh] in registers.
# Starting and merging a split takes about as long as reading this many tokens (by arithmetic).
TOKENS_PER_START = 32
LEAST_PIECE = 256  # tokens of a split, except the last one of a range
# A row has at most this many shared ranges, one after the other: a prompt, and a turn after it.
LEVELS = 2
RANGE_FIELDS = 5  # A range is (begin, end, first, last, level); see `paged_attention`.
RANGE_QUERIES = 32  # query heads in a range: eight rows of a model with four query heads per key
# The most shared memory of one program: for its buffers, queries and scores, and 1 KB for CUDA.
PROGRAM_BYTES = 45 * 1024


def reference(q, k_pages, v_pages, block_table, lengths, *, scale):
    """Paged decode attention in plain PyTorch, row by row; shapes as in `paged_attention`."""
    Hq = q.shape[1]
    page_size, Hkv = k_pages.shape[1:3]
    out = torch.zeros_like(q)
    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        pages = block_table[row, : -(-length // page_size)].long()
        k = k_pages[pages].flatten(0, 1)[:length].transpose(0, 1)  # [Hkv, T, Dh]
        v = v_pages[pages].flatten(0, 1)[:length].transpose(0, 1)
        # The query heads of one key head are passed as if they were several tokens of one head.
        query = q[row].unflatten(0, (Hkv, Hq // Hkv))
        out[row] = F.scaled_dot_product_attention(query, k, v, scale=scale).flatten(0, 1)
    return out


# --- the launch -----------------------------------------------------------------------------------


@functools.cache
def programs_at_once(device):
    """The programs that the GPU runs at a time; without a GPU, five per processor of an H200."""
    if device.type != "cuda":
        return 132 * 5
    gpu = torch.cuda.get_device_properties(device)
    programs = max(1, gpu.shared_memory_per_multiprocessor // PROGRAM_BYTES)
    return gpu.multi_processor_count * programs


@functools.lru_cache(maxsize=4096)
def split_count(rows, kv_heads, capacity, block, at_once, most=MAX_PARTS):
    """The number of splits of a row, from shapes only; at most `most`.

    capacity: the tokens that a row may have. at_once: the programs of one wave, which the GPU runs
    at a time. The estimated time is the number of waves times the time of one split.
    """

    def cost(splits):
        waves = math.ceil(rows * kv_heads * splits / at_once)
        split_size = math.ceil(capacity / splits / block) * block  # tokens, whole blocks
        return waves * (split_size + TOKENS_PER_START)

    return min(range(1, min(most, math.ceil(capacity / LEAST_PIECE)) + 1), key=cost, default=1)


@jit
def slots_of_block(table_ptr, page_stride, start, valid, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The slots in the pool of a row's tokens from `start` on, [BLOCK] int64."""
    j = tl.arange(0, BLOCK)
    if PAGE % BLOCK == 0:  # The block lies in one page, so one look-up is enough.
        page = tl.load(table_ptr + start // PAGE * page_stride)
        slot = page.to(tl.int64) * PAGE + (start % PAGE + j)
    else:
        page = tl.load(table_ptr + (start + j) // PAGE * page_stride, mask=valid, other=0)
        slot = page.to(tl.int64) * PAGE + (start + j) % PAGE
    return slot


@jit
def tokens_of_split(range_ptr, split, splits, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    """(first, last) of the range's tokens first:last that a split reads, in whole blocks."""
    range_first = tl.load(range_ptr + 2)
    range_last = tl.load(range_ptr + 3)
    split_size = tl.maximum(tl.cdiv(range_last - range_first, splits), LEAST)
    split_size = tl.cdiv(split_size, BLOCK) * BLOCK
    first = range_first + split * split_size
    last = tl.minimum(first + split_size, range_last)
    return first, last


@jit
def online_softmax(score, value, running_max, running_sum, acc):
    """Adds a block of scores and values to a partial result, rescaled to the new maximum."""
    # A block's first token is always valid, so the new maximum is finite.
    new_max = tl.maximum(running_max, tl.max(score, 1))
    p = tl.exp2(score - new_max[:, None])
    shrink = tl.exp2(running_max - new_max)
    running_sum = running_sum * shrink + tl.sum(p, 1)
    weighted = tl.dot(p.to(value.dtype), value, input_precision="ieee")
    return new_max, running_sum, acc * shrink[:, None] + weighted


@jit
def split_kernel(
    q_ptr,
    k_pages_ptr,
    v_pages_ptr,
    block_table_ptr,
    ranges_ptr,
    part_acc_ptr,
    part_max_ptr,
    part_sum_ptr,
    scale,
    splits,
    shared_splits,
    parts,
    row_stride,
    page_stride,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    DH: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    TILE: tl.constexpr,
    FIELDS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
):
    """One split of one range for one key head: max, sum and weighted values over its tokens.

    One product takes the queries of all rows of the range, HEADS_PER_KEY of each row. They are
    padded to TILE, because tl.dot needs at least 16 queries.
    """
    # Neighbouring programs read the heads of one token, which are neighbours in memory.
    kv_head = tl.program_id(0) % HKV
    range_ptr = ranges_ptr + tl.program_id(0) // HKV * FIELDS
    split = tl.program_id(1)
    begin = tl.load(range_ptr)
    end = tl.load(range_ptr + 1)
    first, last = tokens_of_split(range_ptr, split, splits, LEAST, BLOCK)
    level = tl.load(range_ptr + 4)
    table_ptr = block_table_ptr + begin.to(tl.int64) * row_stride

    m = tl.arange(0, TILE)
    d = tl.arange(0, DH)
    j = tl.arange(0, BLOCK)
    real = m < (end - begin) * HEADS_PER_KEY
    first_head = begin.to(tl.int64) * HQ + kv_head * HEADS_PER_KEY
    offset = m // HEADS_PER_KEY * HQ + m % HEADS_PER_KEY  # from the first head to each head
    query_ptr = q_ptr + first_head * DH + offset[:, None] * DH + d[None, :]
    query = tl.load(query_ptr, mask=real[:, None], other=0.0)
    running_max = tl.full((TILE,), float("-inf"), tl.float32)
    running_sum = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, DH), tl.float32)
    for start in range(first, last, BLOCK):
        valid = start + j < last
        slot = slots_of_block(table_ptr, page_stride, start, valid, PAGE, BLOCK)
        at = (slot * HKV + kv_head)[:, None] * DH + d[None, :]
        key = tl.load(k_pages_ptr + at, mask=valid[:, None], other=0.0)
        value = tl.load(v_pages_ptr + at, mask=valid[:, None], other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(valid[None, :], score, float("-inf"))
        running_max, running_sum, acc = online_softmax(score, value, running_max, running_sum, acc)

    part = first_head * parts + level * shared_splits + split + offset * parts
    tl.store(part_max_ptr + part, running_max, mask=real)
    tl.store(part_sum_ptr + part, running_sum, mask=real)
    if first < last:
        tl.store(part_acc_ptr + part[:, None] * DH + d[None, :], acc, mask=real[:, None])


@jit
def merge_kernel(
    part_acc_ptr,
    part_max_ptr,
    part_sum_ptr,
    out_ptr,
    parts,
    DH: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
):
    """Rescales the partial results of one row and query head to one maximum and adds them."""
    head = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_PADDED)
    d = tl.arange(0, DH)
    at = head * parts + part
    part_sum = tl.load(part_sum_ptr + at, mask=part < parts, other=0.0)
    # An empty part has no valid max and acc. A NaN counts as used, so that it reaches the output.
    used = part_sum != 0.0
    part_max = tl.load(part_max_ptr + at, mask=used, other=float("-inf"))
    factor = tl.where(used, tl.exp2(part_max - tl.max(part_max, 0)), 0.0)
    total = tl.sum(part_sum * factor, 0)
    acc = tl.load(part_acc_ptr + at[:, None] * DH + d[None, :], mask=used[:, None], other=0.0)
    # A padding row has no part at all and gives zeros.
    divisor = tl.where(total == 0.0, 1.0, total)
    out = tl.sum(acc * factor[:, None], 0) / divisor
    tl.store(out_ptr + head * DH + d, out.to(out_ptr.dtype.element_ty))


def max_rows_of_range(heads_per_key):
    """The largest number of rows of a shared range, for so many query heads per key head."""
    return max(4, RANGE_QUERIES // heads_per_key)


def own_ranges(lengths):
    """The ranges [B, 5] of rows that share nothing."""
    row = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
    zero = torch.zeros_like(row)
    return torch.stack((row, row + 1, zero, lengths, zero + LEVELS), 1)


def triton_paged_attention(
    q, k_pages, v_pages, block_table, lengths, *, scale, kv_ranges=None, splits=None
):
    """The Triton form of `paged_attention`; `splits` is for tests."""
    B, Hq, Dh = q.shape
    _, page_size, Hkv, _ = k_pages.shape
    block = max(16, BUFFER_BYTES // (Dh * q.element_size()))
    heads_per_key = Hq // Hkv
    if kv_ranges is None:
        kv_ranges = own_ranges(lengths)
    shared = len(kv_ranges) - B
    most = MAX_PARTS // (LEVELS + 2) if shared else MAX_PARTS
    # In a CUDA graph the table is as wide as the pool. Each row is taken to have an equal part.
    pages = min(block_table.shape[1], -(-len(k_pages) // max(1, B)))
    limits = Hkv, pages * page_size, block, programs_at_once(q.device), most
    own_splits = splits or split_count(B, *limits)
    shared_splits = 0
    launches = [(kv_ranges[shared:], own_splits, 1)]
    if shared:
        # Only the GPU knows how many ranges are in use. Eight rows per range are assumed.
        shared_splits = splits or split_count(-(-B // 8), *limits)
        launches.append((kv_ranges[:shared], shared_splits, max_rows_of_range(heads_per_key)))
    parts = LEVELS * shared_splits + own_splits
    part_acc = torch.empty(B, Hq, parts, Dh, dtype=torch.float32, device=q.device)
    part_max = torch.empty(B, Hq, parts, dtype=torch.float32, device=q.device)
    part_sum = torch.zeros_like(part_max)  # A part that no split writes has sum 0.
    results = part_acc, part_max, part_sum
    out = torch.empty_like(q)
    constants = {"HQ": Hq, "HKV": Hkv, "DH": Dh, "HEADS_PER_KEY": heads_per_key}
    constants |= {"PAGE": page_size, "BLOCK": block, "FIELDS": RANGE_FIELDS, "LEAST": LEAST_PIECE}
    for ranges, range_splits, rows in launches:
        tensors = q, k_pages, v_pages, block_table, ranges, *results
        layout = range_splits, shared_splits, parts, *block_table.stride()
        tile = max(16, triton.next_power_of_2(rows * heads_per_key))
        options = {"TILE": tile, "num_warps": 4, "num_stages": NUM_STAGES}
        split_kernel[(len(ranges) * Hkv, range_splits)](
            *tensors, scale * math.log2(math.e), *layout, **constants, **options
        )
    width = triton.next_power_of_2(parts)
    merge_kernel[(B * Hq,)](*results, out, parts, DH=Dh, PARTS_PADDED=width, num_warps=4)
    return out


# --- the entry point ------------------------------------------------------------------------------


def paged_attention(q, k_pages, v_pages, block_table, lengths, *, scale, kv_ranges=None):
    """Attention of one query token per row over its paged keys and values.

    q [B, Hq, Dh], Dh one of HEAD_SIZES; k_pages, v_pages [pages, page_size, Hkv, Dh], all fp32,
    fp16 or bf16; block_table [B, pages of a row] int32: a row's pages in order (those after its
    length are never read); lengths [B] int32, in tokens; scale: usually Dh^-0.5. Returns
    [B, Hq, Dh] in q's dtype. A row of length 0 (padding of a CUDA graph's bucket) gives zeros.
    ValueError if the shapes or types do not fit.

    kv_ranges [R + B, 5] int32 cover the tokens of all rows; they change the time only. For a range
    (begin, end, first, last, level) the kernel reads tokens first:last once for rows begin:end. The
    first R ranges are shared. Such a range has at most max_rows_of_range rows and covers whole
    pages, the same ones in each row. Its level, less than LEVELS, is the number of shared ranges
    before it in its rows. The last B ranges have one row each, the tokens that no shared range
    covers, and level LEVELS. A range of zeros is unused.
    """
    by_triton = use_triton(q)
    B, Hq, Dh = q.shape
    fits = (
        k_pages.dim() == 4
        and k_pages.shape == v_pages.shape
        and k_pages.shape[3] == Dh
        and Hq % k_pages.shape[2] == 0
        and block_table.dim() == 2
        and block_table.shape[0] == B
        and lengths.shape == (B,)
        and block_table.dtype == lengths.dtype == torch.int32
        and q.dtype == k_pages.dtype == v_pages.dtype
    )
    if kv_ranges is not None:
        fits &= len(kv_ranges) >= B and kv_ranges.shape[1:] == (RANGE_FIELDS,)
        fits &= kv_ranges.dtype == torch.int32
    if by_triton:
        types = [torch.float32, torch.float16]
        if q.is_cuda:  # Triton's interpreter gets bf16 wrong.
            types.append(torch.bfloat16)
        fits &= Dh in HEAD_SIZES and q.dtype in types
        fits &= all(x.is_contiguous() for x in (q, k_pages, v_pages, lengths))
    inputs = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "block_table": block_table}
    check(fits, "paged_attention", **inputs, lengths=lengths, kv_ranges=kv_ranges)
    if not by_triton:
        return reference(**inputs, lengths=lengths, scale=scale)
    return triton_paged_attention(**inputs, lengths=lengths, scale=scale, kv_ranges=kv_ranges)
