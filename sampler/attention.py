"""Attention over a paged KV cache: every query token reads the pages of its own row.

    decode, CPU              `cascade`: pages that rows share are read once for all of them
    decode, CUDA             kernels.paged_attention (Triton), which does the same
    prefill, CUDA            `packed_attention`: one variable-length launch over the gathered rows
    prefill, CPU or fp32     `row_attention`: one SDPA a row

The cascade cuts a row's tokens into parts: the runs of pages that it shares with its neighbours in
the batch (plan.shared_runs), and its own. Attention to part s alone gives an output o_s and
l_s = log Σ exp(scores). The parts are joined exactly:

    out = Σ_s w_s · o_s ,   w = softmax over s of l_s

With eight rows of one prompt, each key head multiplies 8 · Hq / Hkv queries with the prompt's keys
in one product, and the prompt is read once (Hydragen, cascade attention).

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
from sampler.plan import Batch, SharedPages, shared_runs, to_device

# The first CSR tensor of a process brings a warning that they are in beta. It is silenced here.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 0], [], [], (1, 1))

# What F.scaled_dot_product_attention calls. It returns log Σ exp(scores) as well.
sdpa_with_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of the pages of a model of type `dtype`.

    A CPU has its sparse products in fp32 and fp64 only, so bf16 keys and values lie there in fp32.
    """
    return torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype


def attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, scale: float) -> Tensor:
    """Causal attention of q [T, Hq, Dh] over its rows' pages -> [T, Hq, Dh]."""
    if batch.starts is None and (q.is_cuda or kernels.use_triton(q)):
        return kernels.paged_attention(
            q, k_pages, v_pages, batch.block_table, batch.lengths, scale=scale, runs=batch.runs
        )
    if batch.starts is None:
        return cascade(q, k_pages, v_pages, batch, scale)
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return packed_attention(q, k_pages, v_pages, batch, scale)
    return row_attention(q, k_pages, v_pages, batch, scale)


# ---------------------------------------------------------------- decode on a CPU


# A run's product costs as much as `attend_apart` of so many numbers: tokens · query heads · head
# size (measured).
WORTH = 200_000


@dataclass
class Cascade:
    """How a batch's rows are cut into parts; all layers share it.

    own: a CSR matrix [rows · Hq, key vectors of the pool] with a line for a row's query head and an
    entry for each of the row's own tokens; its values are the scores.
    outs, sums: o and l of each level of runs, and of the own tokens last.
    """

    rows: int  # those behind are padding
    shared: list[tuple[SharedPages, Tensor | range]]  # a run and its pages
    own: Tensor
    counts: np.ndarray  # int32 [rows · Hq]: a line's entries
    outs: Tensor  # [levels + 1, rows, Hq, Dh]
    sums: Tensor  # [levels + 1, rows, Hq]; -inf where a row has no run at a level


def plan_cascade(q: Tensor, k_pages: Tensor, batch: Batch) -> Cascade:
    """The parts of the rows of q [B, Hq, Dh]."""
    heads, size = q.shape[1:]
    page_size, kv_heads = k_pages.shape[1:3]
    rows = sum(span > 0 for span in batch.spans)
    table = batch.block_table[:rows].numpy()
    runs = shared_runs(table, WORTH / (page_size * heads * size))
    begins = np.zeros(rows, np.int32)
    for run in runs:
        begins[run.begin : run.end] = run.last * page_size
    lengths = batch.lengths[:rows].numpy()
    slots = table[:, :, None] * page_size + np.arange(page_size, dtype=np.int32)
    slots = slots.reshape(rows, -1)  # [rows, tokens]
    # A query head has a line with an entry for each own token of its row: where the token's key
    # vector for this head lies in k_pages.view(-1, Dh).
    kv_head = np.arange(heads, dtype=np.int32) // (heads // kv_heads)
    lines = [
        row[begin:end] * kv_heads + kv_head[:, None]  # [Hq, own tokens]
        for row, begin, end in zip(slots, begins, lengths)
    ]
    columns = np.concatenate(lines, axis=None)
    counts = np.repeat(lengths - begins, heads)
    offsets = counts.cumsum(dtype=np.int32) - counts
    # Indices of half the width are read faster. No memory holds 2^31 key vectors.
    own = torch.sparse_csr_tensor(
        torch.from_numpy(np.append(offsets, np.int32(len(columns)))),
        torch.from_numpy(columns),
        torch.zeros(len(columns), dtype=k_pages.dtype),
        (rows * heads, k_pages.shape[0] * page_size * kv_heads),
        check_invariants=False,
    )
    levels = max((run.level + 1 for run in runs), default=0)
    return Cascade(
        rows=rows,
        shared=[(run, pages_of(run, batch.block_table)) for run in runs],
        own=own,
        counts=counts,
        outs=torch.zeros(levels + 1, rows, heads, size, dtype=k_pages.dtype),
        sums=torch.full((levels + 1, rows, heads), float("-inf"), dtype=k_pages.dtype),
    )


def pages_of(run: SharedPages, block_table: Tensor) -> Tensor | range:
    """The pages of a run: a range where they lie side by side."""
    pages = block_table[run.begin, run.first : run.last]
    side_by_side = range(int(pages[0]), int(pages[0]) + len(pages))
    return side_by_side if pages.tolist() == list(side_by_side) else pages


def take(pages: Tensor, chosen: Tensor | range) -> Tensor:
    """The chosen pages, without a copy where they lie side by side."""
    if isinstance(chosen, range):
        return pages[chosen.start : chosen.stop]
    return pages.index_select(0, chosen)


def cascade(q, k_pages, v_pages, batch, scale):
    """Decode attention on a CPU, in the cache's type; q [B, Hq, Dh]."""
    if "cascade" not in batch.cache:
        batch.cache["cascade"] = plan_cascade(q, k_pages, batch)
    plan = batch.cache["cascade"]
    queries = q[: plan.rows].to(k_pages.dtype)
    for run, pages in plan.shared:
        part = slice(run.begin, run.end)
        keys, values = (take(x, pages) for x in (k_pages, v_pages))
        out, sums = attend_together(queries[part], keys, values, scale)
        plan.outs[run.level, part] = out
        plan.sums[run.level, part] = sums
    joined, sums = attend_apart(queries, k_pages, v_pages, plan, scale)
    if plan.shared:
        plan.outs[-1] = joined
        plan.sums[-1] = sums
        joined = (plan.sums.softmax(0)[..., None] * plan.outs).sum(0)
    if plan.rows == len(q):
        return joined.to(q.dtype)
    out = torch.zeros_like(q)  # padding rows give zeros
    out[: plan.rows] = joined
    return out


def attend_together(q, keys, values, scale):
    """Attention of all rows q [R, Hq, Dh] to one run of pages [pages, page_size, Hkv, Dh].

    Returns the output [R, Hq, Dh] and the logarithm of the softmax's sum [R, Hq].
    """
    rows, heads, size = q.shape
    kv_heads = keys.shape[2]
    # The query heads of one key head stand as if they were tokens of one head: [1, Hkv, R · G, Dh].
    query = q.unflatten(1, (kv_heads, -1)).transpose(0, 1).reshape(1, kv_heads, -1, size)
    keys = keys.flatten(0, 1).transpose(0, 1)[None]
    values = values.flatten(0, 1).transpose(0, 1)[None]
    out, sums = sdpa_with_sums(query, keys, values, scale=scale)
    out = out.view(kv_heads, rows, -1, size).transpose(0, 1)
    sums = sums.view(kv_heads, rows, -1).transpose(0, 1)
    return out.flatten(1, 2), sums.flatten(1, 2)


def attend_apart(q, k_pages, v_pages, plan, scale):
    """Attention of each row of q [rows, Hq, Dh] to its own tokens; returns as `attend_together`.

    Scores are a dense product sampled at the plan's entries (SDDMM), outputs are weighted sums of
    value vectors (embedding bags). No key or value is moved.
    """
    size = q.shape[2]
    queries = q.reshape(-1, size)
    keys = k_pages.view(-1, size)
    torch.sparse.sampled_addmm(plan.own, queries, keys.t(), beta=0.0, alpha=scale, out=plan.own)
    scores = plan.own.values()
    offsets = plan.own.crow_indices()[:-1]  # a line's first entry
    # A softmax of each line, whose division comes last. numpy can sum over lines of any lengths.
    top = np.maximum.reduceat(scores.numpy(), offsets.numpy())
    scores.sub_(torch.from_numpy(np.repeat(top, plan.counts))).exp_()
    total = np.add.reduceat(scores.numpy(), offsets.numpy())
    mixed = F.embedding_bag(
        plan.own.col_indices(),
        v_pages.view(-1, size),
        offsets,
        mode="sum",
        per_sample_weights=scores,
    )
    sums = torch.from_numpy(top + np.log(total))
    return mixed.div_(torch.from_numpy(total)[:, None]).view(q.shape), sums.view(q.shape[:2])


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
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        out[start:end] = mixed[0].transpose(0, 1)
    return out


def packed_plan(batch: Batch, page_size: int) -> tuple[Tensor, tuple[Tensor, Tensor, int, int]]:
    """The slots of all rows' keys, and the bounds that `varlen_attention` takes."""
    device = batch.block_table.device
    lengths = batch.lengths.long()
    cu_keys = F.pad(lengths.cumsum(0), (1, 0))
    rows = torch.arange(len(lengths), device=device)
    row = torch.repeat_interleave(rows, lengths, output_size=sum(batch.spans))
    position = torch.arange(len(row), device=device) - cu_keys[row]
    slots = batch.block_table[row, position // page_size].long() * page_size + position % page_size
    cu_queries = to_device(np.array(batch.starts, np.int32), device)
    longest = int(np.diff(batch.starts).max())
    return slots, (cu_queries, cu_keys.int(), longest, max(batch.spans))


def packed_attention(q, k_pages, v_pages, batch, scale):
    """One variable-length launch over the rows' gathered keys and values."""
    if "packed" not in batch.cache:
        batch.cache["packed"] = packed_plan(batch, k_pages.shape[1])
    slots, bounds = batch.cache["packed"]
    keys = k_pages.flatten(0, 1)[slots]  # [keys, Hkv, Dh]
    values = v_pages.flatten(0, 1)[slots]
    return kernels.varlen_attention(q, keys, values, bounds, scale)
