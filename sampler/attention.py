"""Attention over a paged KV cache: every query token reads the pages of its own row.

Each device gets the form that moves the fewest bytes there:

    decode, CUDA             kernels.paged_attention (Triton), or flash-attn where it is installed
    decode, CPU              `sparse_decode`: two sparse products over the whole pool, no copy
    prefill, CUDA            `packed_attention`: one variable-length launch over the gathered rows
    prefill, CPU or fp32     `row_attention`: one SDPA a row

The plain decode attention that the Triton kernel is tested against is `reference` in
kernels/paged_attention.py.

Shapes: B rows, T packed tokens, Hq and Hkv query and key heads, Dh head size. The pages of one
layer are k_pages and v_pages [pages, page_size, Hkv, Dh].
Tests: pytest tests/test_decoder.py
"""

import inspect
import itertools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from sampler.plan import Batch

try:
    # No wheel of it is on PyPI, so everything has a path without it.
    from flash_attn import flash_attn_with_kvcache
except ImportError:
    flash_attn_with_kvcache = None

# The first CSR tensor of a process brings a warning that they are in beta. It is silenced here.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 0], [], [], (1, 1))

# Padding of fewer tokens than this costs less than one more group of launches.
CHEAP_PADDING = 4096


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of the pages of a model of type `dtype`.

    A CPU has its sparse products in fp32 and fp64 only, so bf16 keys and values lie there in fp32.
    """
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        return torch.float32
    return dtype


def store(new: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Writes the first len(slots) of the keys or values `new` [T, Hkv, Dh] into their slots."""
    flat = pages.view(-1, *pages.shape[2:])
    flat.index_copy_(0, slots, new[: len(slots)].to(pages.dtype))


def attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, scale: float) -> Tensor:
    """Causal attention of q [T, Hq, Dh] over its rows' pages -> [T, Hq, Dh]."""
    if batch.starts is None and q.is_cuda:
        return cuda_decode(q, k_pages, v_pages, batch, scale)
    if batch.starts is None:
        return sparse_decode(q, k_pages, v_pages, batch, scale)
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return packed_attention(q, k_pages, v_pages, batch, scale)
    return row_attention(q, k_pages, v_pages, batch, scale)


# ---------------------------------------------------------------- decode


def cuda_decode(q, k_pages, v_pages, batch, scale):
    """flash-attn if it is there and can read pages of this size, else the Triton kernel."""
    flash_reads_it = k_pages.shape[1] % 256 == 0 and q.dtype != torch.float32
    if flash_attn_with_kvcache is None or not flash_reads_it:
        return kernels.paged_attention(
            q, k_pages, v_pages, batch.block_table, batch.lengths, scale=scale
        )
    out = flash_attn_with_kvcache(
        q[:, None],
        k_pages,
        v_pages,
        cache_seqlens=batch.lengths,
        block_table=batch.block_table,
        softmax_scale=scale,
        causal=True,
    )
    return out[:, 0]


def group_by_length(spans: list[int]) -> list[tuple[int, int]]:
    """Cuts rows, longest first, into runs (first, end) to be padded to the longest of each.

    At most half of a run is padding, unless the padding is cheap.
    """
    runs = []
    begin = 0
    real = 0
    for row, span in enumerate(spans):
        padding = spans[begin] * (row + 1 - begin) - (real + span)
        if padding > max(CHEAP_PADDING, real + span):
            runs.append((begin, row))
            begin = row
            real = 0
        real += span
    return runs + [(begin, len(spans))]


def sparse_plan(batch: Batch, heads: int, k_pages: Tensor) -> list[tuple]:
    """Which key vectors of the pool each query head reads, for groups of rows of similar length.

    Returns (first row, end row, pattern, bias) a group. pattern [rows · Hq, key vectors of the
    pool] is a CSR matrix with one line for a row's query head and one entry for a token. bias
    [rows · Hq, longest] is 0, or -inf for padding, whose entry reads the row's first token.
    """
    page_size, kv_heads = k_pages.shape[1:3]
    vectors = k_pages.shape[0] * page_size * kv_heads
    kv_head = torch.arange(heads) // (heads // kv_heads)
    # Indices of half the width are read faster. No memory holds 2^31 key vectors.
    index_type = torch.int32
    groups = []
    for begin, end in group_by_length(batch.spans):
        longest = max(batch.spans[begin], 1)
        lengths = batch.lengths[begin:end, None]
        position = torch.arange(longest)
        pages = batch.block_table[begin:end, : -(-longest // page_size), None]
        slots = (pages * page_size + torch.arange(page_size)).flatten(1)[:, :longest]
        valid = position < lengths
        slots = torch.where(valid, slots, slots[:, :1])
        columns = (slots[:, None] * kv_heads + kv_head[:, None]).flatten().to(index_type)
        bias = torch.where(valid, 0.0, float("-inf"))[:, None].expand(-1, heads, -1)
        bias = bias.reshape(-1, longest)
        pattern = torch.sparse_csr_tensor(
            torch.arange(0, len(columns) + 1, longest, dtype=index_type),
            columns,
            torch.zeros(len(columns), dtype=k_pages.dtype),
            (len(bias), vectors),
            check_invariants=False,
        )
        groups.append((begin, end, pattern, bias))
    return groups


def sparse_decode(q, k_pages, v_pages, batch, scale):
    """Decode attention on a CPU as two sparse products, in the cache's type; q [B, Hq, Dh].

    Scores are a dense product sampled at the plan's pattern (SDDMM), outputs are weighted sums of
    value vectors (embedding bags). No key or value is moved.
    """
    heads, size = q.shape[1:]
    keys = k_pages.view(-1, size)
    values = v_pages.view(-1, size)
    queries = q.to(keys.dtype)
    out = torch.empty_like(queries)
    if "sparse" not in batch.cache:
        batch.cache["sparse"] = sparse_plan(batch, heads, k_pages)
    for begin, end, scores, bias in batch.cache["sparse"]:
        rows = queries[begin:end].reshape(-1, size)
        torch.sparse.sampled_addmm(scores, rows, keys.t(), beta=0.0, alpha=scale, out=scores)
        probs = (scores.values().view(bias.shape) + bias).softmax(-1)
        mixed = F.embedding_bag(
            scores.col_indices(),
            values,
            scores.crow_indices()[:-1],
            mode="sum",
            per_sample_weights=probs.flatten(),
        )
        out[begin:end] = mixed.view(-1, heads, size)
    return out.to(q.dtype)


# ---------------------------------------------------------------- prefill


def row_attention(q, k_pages, v_pages, batch, scale):
    """One SDPA a row in plain PyTorch, for any type and head size."""
    page_size = k_pages.shape[1]
    out = torch.empty_like(q)
    for row, length in enumerate(batch.spans):
        start, end = batch.starts[row : row + 2]
        used = batch.block_table[row, : -(-length // page_size)]
        # The SDPA wants [1, heads, tokens, Dh].
        query = q[start:end].transpose(0, 1)[None]
        key = k_pages[used].flatten(0, 1)[:length].transpose(0, 1)[None].to(q.dtype)
        value = v_pages[used].flatten(0, 1)[:length].transpose(0, 1)[None].to(q.dtype)
        past = length - (end - start)
        mask = None
        if past:
            position = torch.arange(length, device=q.device)
            mask = position <= position[past:, None]
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )
        out[start:end] = mixed[0].transpose(0, 1)
    return out


def packed_plan(batch: Batch, page_size: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """What varlen_attn needs: slots of all rows' keys, both cu_seqlens, the longest query."""
    device = batch.block_table.device
    lengths = batch.lengths.long()
    cu_keys = F.pad(lengths.cumsum(0), (1, 0))
    rows = torch.arange(len(lengths), device=device)
    row = torch.repeat_interleave(rows, lengths, output_size=sum(batch.spans))
    position = torch.arange(len(row), device=device) - cu_keys[row]
    slots = batch.block_table[row, position // page_size].long() * page_size + position % page_size
    cu_queries = torch.tensor(batch.starts, dtype=torch.int32, pin_memory=device.type == "cuda")
    cu_queries = cu_queries.to(device, non_blocking=True)
    longest = max(end - start for start, end in itertools.pairwise(batch.starts))
    return slots, cu_queries, cu_keys.int(), longest


def packed_attention(q, k_pages, v_pages, batch, scale):
    """One variable-length launch over the rows' gathered keys and values."""
    from torch.nn.attention.varlen import varlen_attn

    if "packed" not in batch.cache:
        batch.cache["packed"] = packed_plan(batch, k_pages.shape[1])
    slots, cu_queries, cu_keys, longest = batch.cache["packed"]
    keys = k_pages.flatten(0, 1)[slots]  # [keys, Hkv, Dh]
    values = v_pages.flatten(0, 1)[slots]
    options = {"enable_gqa": True}
    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:
        # torch 2.11 has no grouped heads here: the key heads are repeated.
        repeats = q.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(repeats, 1)
        values = values.repeat_interleave(repeats, 1)
        options = {}
    return varlen_attn(
        q,
        keys,
        values,
        cu_queries,
        cu_keys,
        longest,
        max(batch.spans),
        scale=scale,
        window_size=(-1, 0),  # every token before, and none after
        **options,
    )
