"""Decode attention over a paged KV cache: one query token per row, keys and values in pages.

    out[b, h] = softmax(scale · q[b, h] · K_bᵀ) V_b

K_b and V_b are the first lengths[b] tokens of the pages in block_table[b].

Decoding reads every key and value once and does almost nothing with them, so the whole aim is to
keep the memory busy:

* split KV (flash-decoding): a row is cut into pieces, so that one long row fills the GPU too. A
  piece leaves its largest score m, its sum l = Σ exp(x − m) and acc = Σ exp(x − m)·v; the second
  kernel rescales them to one maximum:

      top = max_s m_s ,   out = Σ_s exp(m_s − top)·acc_s / Σ_s exp(m_s − top)·l_s

* packed query heads: the query heads that share one key head are the rows of one matrix product.
  So a key is read once.
* shared pages: rows whose tables begin alike (attempts of one group, readers of one chunk) are cut
  into runs, each read once for all of its rows (Hydragen, cascade attention). What a run leaves is
  one more piece of each of these rows, so the merge joins it exactly. With R rows of a group, a
  prompt of P tokens and S own ones, R·(P + S) tokens become P + R·S.
* double buffers: while one block of keys and values is multiplied, the next one is on its way.
* whole waves: the number of pieces is chosen so that the last wave of programs fills the GPU too.
* nothing depends on a value on the GPU: the launch follows from shapes alone, so a CUDA graph can
  hold it. A piece past the end of its row leaves at once with l = 0, by which the merge knows that
  it is empty.

Exponentials are base 2 (scale carries log₂ e): one instruction on the GPU. Sums are fp32.
`reference()` is the plain PyTorch form that the kernel is tested against.
Tests: `pytest tests/test_kernels_decode.py tests/test_attention.py tests/test_kernels_compile.py`.
Speed: `python -m bench.gpu --step attention`.
"""

import functools
import math

import torch
import torch.nn.functional as F

from kernels.backend import check, jit, tl, triton, use_triton

# One buffer of keys, and one of values. Two of each are 32 KB, so that a Hopper processor runs five
# programs at a time: about 80 KB are on their way in each, where 32 KB already hide the latency of
# a 4.3 TB/s memory (by arithmetic, at 1 µs).
BUFFER_BYTES = 8192
# The pipeline uses up three stages on the way from block table to product. Five leave two buffers.
NUM_STAGES = 5
HEAD_SIZES = (16, 32, 64, 128, 256)  # what the kernels take
MAX_PARTS = 64  # The merge holds [parts, Dh] in registers.
# Starting a piece and merging it cost about as much as reading this many tokens (by arithmetic).
TOKENS_PER_START = 32
# Runs of shared pages that may follow one another in a row's table: a prompt, and a turn behind it.
LEVELS = 2
RUN_FIELDS = 5  # A run is (begin, end, first, last, level); see `paged_attention`.
RUN_QUERIES = 32  # A run has about so many: eight rows of a model with four query heads a key.
# Shared memory of one program at most: its buffers, what queries and scores need, CUDA's own 1 KB.
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
        # The query heads of one key head stand as if they were several tokens of one head.
        query = q[row].unflatten(0, (Hkv, Hq // Hkv))
        out[row] = F.scaled_dot_product_attention(query, k, v, scale=scale).flatten(0, 1)
    return out


# --- the launch -----------------------------------------------------------------------------------


@functools.cache
def programs_at_once(device):
    """Programs that the GPU runs at a time; without one, five on each processor of an H200."""
    if device.type != "cuda":
        return 132 * 5
    gpu = torch.cuda.get_device_properties(device)
    programs = max(1, gpu.shared_memory_per_multiprocessor // PROGRAM_BYTES)
    return gpu.multi_processor_count * programs


@functools.lru_cache(maxsize=4096)
def split_count(rows, kv_heads, capacity, block, at_once, most=MAX_PARTS):
    """Pieces a row is cut into, from shapes only; `most` at most.

    capacity: tokens that the block table has room for. at_once: programs that the GPU runs at a
    time; it works through all of them in waves of that many. The best number of pieces is the one
    that is done first, counting for each wave a piece's tokens and its start.
    """

    def cost(splits):
        waves = math.ceil(rows * kv_heads * splits / at_once)
        piece = math.ceil(capacity / splits / block) * block  # tokens, whole blocks
        return waves * (piece + TOKENS_PER_START)

    return min(range(1, min(most, math.ceil(capacity / block)) + 1), key=cost, default=1)


@jit
def slots_of_block(table_ptr, page_stride, start, valid, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the tokens from `start` on of a row lie in the pool, [BLOCK] int64."""
    j = tl.arange(0, BLOCK)
    if PAGE % BLOCK == 0:  # The block lies in one page: one look-up.
        page = tl.load(table_ptr + start // PAGE * page_stride)
        slot = page.to(tl.int64) * PAGE + (start % PAGE + j)
    else:
        page = tl.load(table_ptr + (start + j) // PAGE * page_stride, mask=valid, other=0)
        slot = page.to(tl.int64) * PAGE + (start + j) % PAGE
    return slot


@jit
def split_kernel(
    q_ptr,
    k_pages_ptr,
    v_pages_ptr,
    block_table_ptr,
    runs_ptr,
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
    SHARING: tl.constexpr,
    TILE: tl.constexpr,
    FIELDS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One piece of one run for one key head: max, sum and weighted values over its tokens.

    The queries of all rows of the run are taken together, SHARING of each row. tl.dot takes at
    least 16 queries, hence TILE.
    """
    # The heads of a token lie side by side: neighbouring programs read them at about the same time.
    kv_head = tl.program_id(0) % HKV
    run = runs_ptr + tl.program_id(0) // HKV * FIELDS
    split = tl.program_id(1)
    begin = tl.load(run)
    end = tl.load(run + 1)
    run_first = tl.load(run + 2)
    run_last = tl.load(run + 3)
    level = tl.load(run + 4)
    piece = tl.cdiv(tl.cdiv(run_last - run_first, splits), BLOCK) * BLOCK
    first = run_first + split * piece
    last = tl.minimum(first + piece, run_last)
    table_ptr = block_table_ptr + begin.to(tl.int64) * row_stride

    m = tl.arange(0, TILE)
    d = tl.arange(0, DH)
    j = tl.arange(0, BLOCK)
    real = m < (end - begin) * SHARING
    head = begin.to(tl.int64) * HQ + kv_head * SHARING  # the first one
    behind = m // SHARING * HQ + m % SHARING  # how far the others are behind it
    query_ptr = q_ptr + head * DH + behind[:, None] * DH + d[None, :]
    query = tl.load(query_ptr, mask=real[:, None], other=0.0)
    running_max = tl.full((TILE,), float("-inf"), tl.float32)
    running_sum = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, DH), tl.float32)
    # A block's first token is always valid, so running_max is finite after it.
    for start in range(first, last, BLOCK):
        valid = start + j < last
        slot = slots_of_block(table_ptr, page_stride, start, valid, PAGE, BLOCK)
        at = (slot * HKV + kv_head)[:, None] * DH + d[None, :]
        key = tl.load(k_pages_ptr + at, mask=valid[:, None], other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(valid[None, :], score, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(score, 1))
        p = tl.exp2(score - new_max[:, None])
        shrink = tl.exp2(running_max - new_max)
        value = tl.load(v_pages_ptr + at, mask=valid[:, None], other=0.0)
        running_sum = running_sum * shrink + tl.sum(p, 1)
        mixed = tl.dot(p.to(value.dtype), value, input_precision="ieee")
        acc = acc * shrink[:, None] + mixed
        running_max = new_max

    part = head * parts + level * shared_splits + split + behind * parts
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
    """Rescales the parts of one row and query head to their common maximum and adds them."""
    head = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_PADDED)
    d = tl.arange(0, DH)
    at = head * parts + part
    part_sum = tl.load(part_sum_ptr + at, mask=part < parts, other=0.0)
    # An empty part has max −inf and nothing in acc. A NaN counts as used, so that it is seen.
    used = part_sum != 0.0
    part_max = tl.load(part_max_ptr + at, mask=used, other=float("-inf"))
    factor = tl.where(used, tl.exp2(part_max - tl.max(part_max, 0)), 0.0)
    total = tl.sum(part_sum * factor, 0)
    acc = tl.load(part_acc_ptr + at[:, None] * DH + d[None, :], mask=used[:, None], other=0.0)
    # A padding row has no part at all and gives zeros.
    divisor = tl.where(total == 0.0, 1.0, total)
    mixed = tl.sum(acc * factor[:, None], 0) / divisor
    tl.store(out_ptr + head * DH + d, mixed.to(out_ptr.dtype.element_ty))


def rows_of_a_run(sharing):
    """How many rows a run may have where `sharing` query heads share a key head."""
    return max(4, RUN_QUERIES // sharing)


def own_runs(lengths):
    """The runs [B, 5] of rows that share nothing. Level 0: no shared piece stands before theirs."""
    row = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
    nothing = torch.zeros_like(row)
    return torch.stack((row, row + 1, nothing, lengths, nothing), 1)


def triton_paged_attention(
    q, k_pages, v_pages, block_table, lengths, *, scale, runs=None, splits=None, config=None
):
    """The Triton form of `paged_attention`; `splits` and `config` are for tests and tuning."""
    B, Hq, Dh = q.shape
    _, page_size, Hkv, _ = k_pages.shape
    block = max(16, BUFFER_BYTES // (Dh * q.element_size()))
    config = {"block": block, "num_warps": 4, "num_stages": NUM_STAGES} | (config or {})
    block = config.pop("block")
    sharing = Hq // Hkv
    if runs is None:
        runs = own_runs(lengths)
    shared = len(runs) - B
    most = MAX_PARTS // (LEVELS + 2) if shared else MAX_PARTS
    layout = Hkv, block_table.shape[1] * page_size, block, programs_at_once(q.device), most
    own_splits = splits or split_count(B, *layout)
    shared_splits = 0
    launches = [(runs[shared:], own_splits, 1)]
    if shared:
        # Only the host knows how many of the runs are real. About eight rows a run are assumed.
        shared_splits = splits or split_count(-(-B // 8), *layout)
        launches.append((runs[:shared], shared_splits, rows_of_a_run(sharing)))
    parts = LEVELS * shared_splits + own_splits
    part_acc = torch.empty(B, Hq, parts, Dh, dtype=torch.float32, device=q.device)
    part_max = torch.empty(B, Hq, parts, dtype=torch.float32, device=q.device)
    part_sum = torch.zeros_like(part_max)  # 0: a row has no such part
    found = part_acc, part_max, part_sum
    out = torch.empty_like(q)
    sizes = {"HQ": Hq, "HKV": Hkv, "DH": Dh, "SHARING": sharing, "PAGE": page_size, "BLOCK": block}
    for some, pieces, rows in launches:
        tensors = q, k_pages, v_pages, block_table, some, *found
        numbers = scale * math.log2(math.e), pieces, shared_splits, parts, *block_table.stride()
        tile = max(16, triton.next_power_of_2(rows * sharing))
        split_kernel[(len(some) * Hkv, pieces)](
            *tensors, *numbers, **sizes, TILE=tile, FIELDS=RUN_FIELDS, **config
        )
    padded = triton.next_power_of_2(parts)
    merge_kernel[(B * Hq,)](*found, out, parts, DH=Dh, PARTS_PADDED=padded, num_warps=4)
    return out


# --- the entry point ------------------------------------------------------------------------------


def paged_attention(q, k_pages, v_pages, block_table, lengths, *, scale, runs=None):
    """Attention of one query token per row over its paged keys and values.

    q [B, Hq, Dh], Dh one of 16, 32, 64, 128, 256; k_pages, v_pages [pages, page_size, Hkv, Dh], all
    fp32, fp16 or bf16; block_table [B, pages of a row] int32: a row's pages in order (those past
    its length are never read); lengths [B] int32, in tokens; scale: usually Dh^-0.5. Returns
    [B, Hq, Dh] in q's dtype. A row of length 0 (padding of a CUDA graph's bucket) gives zeros.
    ValueError if the shapes or types do not fit.

    runs [R + B, 5] int32 say what is read once for several rows; they change the time only. Each is
    (begin, end, first, last, level): rows begin:end (at most rows_of_a_run) have the same pages for
    their tokens first:last, whole pages, and `level` < LEVELS other runs before it. The last B are
    the rows themselves, each with what no run reads for it, at level LEVELS. Zeros are no run.
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
    if runs is not None:  # The rows themselves are the last B of them.
        fits &= runs.dtype == torch.int32 and runs.shape == (max(B, len(runs)), RUN_FIELDS)
    if by_triton:
        types = [torch.float32, torch.float16]
        if q.is_cuda:  # Triton's interpreter gets bf16 wrong.
            types.append(torch.bfloat16)
        fits &= Dh in HEAD_SIZES and q.dtype in types
        fits &= all(x.is_contiguous() for x in (q, k_pages, v_pages, lengths))
    inputs = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "runs": runs}
    check(fits, "paged_attention", **inputs, block_table=block_table, lengths=lengths)
    if not by_triton:
        return reference(q, k_pages, v_pages, block_table, lengths, scale=scale)
    return triton_paged_attention(q, k_pages, v_pages, block_table, lengths, scale=scale, runs=runs)
