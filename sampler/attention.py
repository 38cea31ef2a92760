"""Attention over a paged KV cache: every query token reads the pages of its own row.

    decode, CPU              `cascade`: pages that rows share are read once for all of them
    decode, CUDA             kernels.paged_attention (Triton), which also reads shared pages once
    prefill, CUDA            `packed_attention`: one variable-length launch over the gathered rows
    prefill, CPU or fp32     `row_attention`: one SDPA per row

The cascade (Hydragen, cascade attention) cuts a row's tokens into parts: the pages that it shares
with its neighbours in the batch (plan.find_shared_pages), and its own pages. Attention to part s
alone gives an output o_s and l_s = log Σ exp(scores). The parts are joined exactly:

    out = Σ_s w_s · o_s ,   w = softmax over s of l_s

With eight rows of one prompt, each key head multiplies 8 · Hq / Hkv queries with the prompt's keys
in one product, and the prompt is read once.

Shapes: B rows, T packed tokens, Hq and Hkv query and key heads, Dh head size. The pages of one
layer are k_pages and v_pages [pages, page_size, Hkv, Dh].
Tests: pytest tests/test_attention.py
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from sampler.plan import Batch, SharedPages, find_shared_pages, to_device

# The first CSR tensor of a process makes PyTorch warn that CSR is in beta. This hides the warning.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 0], [], [], (1, 1))

# F.scaled_dot_product_attention calls this operator, which also returns log Σ exp(scores).
sdpa_with_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of the pages of a model of type `dtype`.

    PyTorch's sparse products on a CPU are fp32 or fp64, so bf16 keys and values are fp32 there.
    """
    return torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype


def attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, scale: float) -> Tensor:
    """Causal attention of q [T, Hq, Dh] over its rows' pages -> [T, Hq, Dh]."""
    if not batch.starts and (q.is_cuda or kernels.use_triton(q)):
        inputs = q, k_pages, v_pages, batch.block_table, batch.lengths
        return kernels.paged_attention(*inputs, scale=scale, kv_ranges=batch.kv_ranges)
    if not batch.starts:
        return cascade(q, k_pages, v_pages, batch, scale)
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return packed_attention(q, k_pages, v_pages, batch, scale)
    return row_attention(q, k_pages, v_pages, batch, scale)


# ---------------------------------------------------------------- decode on a CPU


# Shared pages are read together only if that saves `attend_apart` this many numbers (measured):
# tokens · query heads · head size.
LEAST_NUMBERS = 200_000


@dataclass
class Cascade:
    """The parts of a batch's rows. All layers use the same plan and overwrite its values.

    own: a CSR matrix [rows · Hq, key vectors of the pool]. Each query head of each row has a line
    in it, with an entry for each of the row's own tokens. The values are the scores.
    outs, sums: o and l of each level of shared pages, and last of the own tokens.
    """

    rows: int  # without the padding rows, which come last
    shared: list[tuple[SharedPages, Tensor | range]]  # each with its page numbers
    own: Tensor
    counts: np.ndarray  # int32 [rows · Hq]: the number of entries in each line
    outs: Tensor  # [levels + 1, rows, Hq, Dh]
    sums: Tensor  # [levels + 1, rows, Hq]; -inf where a row shares no pages at a level


def plan_cascade(q: Tensor, k_pages: Tensor, batch: Batch) -> Cascade:
    """The parts of the rows of q [B, Hq, Dh]."""
    heads, size = q.shape[1:]
    page_size, kv_heads = k_pages.shape[1:3]
    rows = sum(length > 0 for length in batch.host_lengths)
    table = batch.block_table[:rows].numpy()
    shared = find_shared_pages(table, LEAST_NUMBERS / (page_size * heads * size))
    begins = np.zeros(rows, np.int32)  # where each row's own tokens begin
    for part in shared:
        begins[part.begin : part.end] = part.last * page_size
    lengths = batch.lengths[:rows].numpy()
    slots = table[:, :, None] * page_size + np.arange(page_size, dtype=np.int32)
    slots = slots.reshape(rows, -1)  # [rows, tokens]
    # The column of an entry is the index of the token's key vector in k_pages.view(-1, Dh).
    kv_head = np.arange(heads, dtype=np.int32) // (heads // kv_heads)
    lines = [
        row[begin:end] * kv_heads + kv_head[:, None]  # [Hq, own tokens]
        for row, begin, end in zip(slots, begins, lengths)
    ]
    columns = np.concatenate(lines, axis=None)
    counts = np.repeat(lengths - begins, heads)
    offsets = counts.cumsum(dtype=np.int32) - counts
    # int32 is enough for these indices: no memory holds 2^31 key vectors.
    own = torch.sparse_csr_tensor(
        torch.from_numpy(np.append(offsets, np.int32(len(columns)))),
        torch.from_numpy(columns),
        torch.zeros(len(columns), dtype=k_pages.dtype),
        (rows * heads, k_pages.shape[0] * page_size * kv_heads),
        check_invariants=False,
    )
    levels = max((part.level + 1 for part in shared), default=0)
    return Cascade(
        rows=rows,
        shared=[(part, page_numbers(part, batch.block_table)) for part in shared],
        own=own,
        counts=counts,
        outs=torch.zeros(levels + 1, rows, heads, size, dtype=k_pages.dtype),
        sums=torch.full((levels + 1, rows, heads), float("-inf"), dtype=k_pages.dtype),
    )


def page_numbers(shared: SharedPages, block_table: Tensor) -> Tensor | range:
    """The numbers of shared pages: a range if they are consecutive."""
    numbers = block_table[shared.begin, shared.first : shared.last]
    consecutive = range(int(numbers[0]), int(numbers[0]) + len(numbers))
    return consecutive if numbers.tolist() == list(consecutive) else numbers


def take(pages: Tensor, numbers: Tensor | range) -> Tensor:
    """The pages with these numbers, without a copy if the numbers are consecutive."""
    if isinstance(numbers, range):
        return pages[numbers.start : numbers.stop]
    return pages.index_select(0, numbers)


def cascade(q, k_pages, v_pages, batch, scale):
    """Decode attention on a CPU, in the cache's type; q [B, Hq, Dh]."""
    batch.plan = plan = batch.plan or plan_cascade(q, k_pages, batch)
    queries = q[: plan.rows].to(k_pages.dtype)
    for shared, numbers in plan.shared:
        rows = slice(shared.begin, shared.end)
        keys, values = (take(x, numbers) for x in (k_pages, v_pages))
        out, sums = attend_together(queries[rows], keys, values, scale)
        plan.outs[shared.level, rows] = out
        plan.sums[shared.level, rows] = sums
    out, sums = attend_apart(queries, k_pages, v_pages, plan, scale)
    if plan.shared:
        plan.outs[-1] = out
        plan.sums[-1] = sums
        out = (plan.sums.softmax(0)[..., None] * plan.outs).sum(0)
    if plan.rows == len(q):
        return out.to(q.dtype)
    result = torch.zeros_like(q)
    result[: plan.rows] = out
    return result


def attend_together(q, keys, values, scale):
    """Attention of all rows of q [R, Hq, Dh] to shared pages [pages, page_size, Hkv, Dh].

    Returns the output [R, Hq, Dh] and the logarithm of the softmax's sum [R, Hq].
    """
    rows, heads, size = q.shape
    kv_heads = keys.shape[2]
    # The query heads of one key head are passed as tokens of one head: [1, Hkv, R · Hq / Hkv, Dh].
    query = q.unflatten(1, (kv_heads, -1)).transpose(0, 1).reshape(1, kv_heads, -1, size)
    keys = keys.flatten(0, 1).transpose(0, 1)[None]
    values = values.flatten(0, 1).transpose(0, 1)[None]
    out, sums = sdpa_with_sums(query, keys, values, scale=scale)
    out = out.view(kv_heads, rows, -1, size).transpose(0, 1)
    sums = sums.view(kv_heads, rows, -1).transpose(0, 1)
    return out.flatten(1, 2), sums.flatten(1, 2)


def attend_apart(q, k_pages, v_pages, plan, scale):
    """Attention of each row of q [rows, Hq, Dh] to its own tokens; returns as `attend_together`.

    The scores are a dense product sampled at the plan's entries (SDDMM). The outputs are weighted
    sums of value vectors (embedding bags). So no key or value is copied.
    """
    size = q.shape[2]
    queries = q.reshape(-1, size)
    keys = k_pages.view(-1, size)
    torch.sparse.sampled_addmm(plan.own, queries, keys.t(), beta=0.0, alpha=scale, out=plan.own)
    scores = plan.own.values()
    offsets = plan.own.crow_indices()[:-1]  # the first entry of each line
    # This is a softmax of each line, divided at the end. numpy can sum lines of different lengths.
    top = np.maximum.reduceat(scores.numpy(), offsets.numpy())
    scores.sub_(torch.from_numpy(np.repeat(top, plan.counts))).exp_()
    total = np.add.reduceat(scores.numpy(), offsets.numpy())
    out = F.embedding_bag(
        plan.own.col_indices(),
        v_pages.view(-1, size),
        offsets,
        mode="sum",
        per_sample_weights=scores,
    )
    sums = torch.from_numpy(top + np.log(total))
    return out.div_(torch.from_numpy(total)[:, None]).view(q.shape), sums.view(q.shape[:2])


# ---------------------------------------------------------------- prefill


def row_attention(q, k_pages, v_pages, batch, scale):
    """One SDPA per row in plain PyTorch, for any type and head size."""
    page_size = k_pages.shape[1]
    out = torch.empty_like(q)
    for row, length in enumerate(batch.host_lengths):
        start, end = batch.starts[row : row + 2]
        pages = batch.block_table[row, : -(-length // page_size)]
        # SDPA takes [1, heads, tokens, Dh].
        query = q[start:end].transpose(0, 1)[None]
        key = k_pages[pages].flatten(0, 1)[:length].transpose(0, 1)[None].to(q.dtype)
        value = v_pages[pages].flatten(0, 1)[:length].transpose(0, 1)[None].to(q.dtype)
        past = length - (end - start)
        mask = None
        if past:
            position = torch.arange(length, device=q.device)
            mask = position <= position[past:, None]
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        out[start:end] = output[0].transpose(0, 1)
    return out


def packed_plan(batch: Batch, page_size: int) -> tuple[Tensor, tuple[Tensor, Tensor, int, int]]:
    """The slots of all rows' keys [keys], and the bounds for `varlen_attention`."""
    device = batch.block_table.device
    lengths = batch.lengths.long()
    cu_keys = F.pad(lengths.cumsum(0), (1, 0))
    rows = torch.arange(len(lengths), device=device)
    row = torch.repeat_interleave(rows, lengths, output_size=sum(batch.host_lengths))
    position = torch.arange(len(row), device=device) - cu_keys[row]
    slots = batch.block_table[row, position // page_size].long() * page_size + position % page_size
    cu_queries = to_device(np.array(batch.starts, np.int32), device)
    longest = int(np.diff(batch.starts).max())
    return slots, (cu_queries, cu_keys.int(), longest, max(batch.host_lengths))


def packed_attention(q, k_pages, v_pages, batch, scale):
    """One variable-length launch over the rows' gathered keys and values."""
    batch.plan = batch.plan or packed_plan(batch, k_pages.shape[1])
    slots, bounds = batch.plan
    keys = k_pages.flatten(0, 1)[slots]  # [keys, Hkv, Dh]
    values = v_pages.flatten(0, 1)[slots]
    return kernels.varlen_attention(q, keys, values, bounds, scale)
