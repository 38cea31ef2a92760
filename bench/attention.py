"""Paged decode attention against what the memory can deliver.

    python -m bench.gpu --step attention_goal    batch 64 and 1 at context 4k, launch configurations
    python -m bench.gpu --step attention_all     more shapes of two models

A shape's row is the time and the bandwidth (bytes of keys and values over time) of one call: a
captured graph of calls, page tables in turn, so that no call finds its pages in the L2 cache. The
share is of a large copy in the same run. Lengths that are "mixed" go from 1/8 to 15/8 of the
context. Goal: 85 % at batch 64, context 4k. Beside it: other launch configurations, gathering all
pages for PyTorch's attention, and flash-attn where it is installed; and the same call where eight
rows at a time share 7/8 of their pages, which are then read once (its bytes are what is left).

Predictions are those of arithmetic and of the compiled code, made before any GPU was seen: 88 % of
the copy rate, 30 % at batch 1 (128 programs of four steps each), 70 % with shared pages (two
launches in place of one).

Tests: pytest tests/test_bench_gpu.py
"""

import itertools
import math
from functools import partial

import torch
import torch.nn.functional as F

from bench import common
from kernels.paged_attention import rows_of_a_run, triton_paged_attention
from sampler.plan import kernel_runs

# Heads of queries, heads of keys, their size.
HEADS = {"Qwen3-8B": (32, 8, 128), "Qwen2.5-7B": (28, 4, 128), "tiny": (4, 2, 16)}
COLD = 512 << 20  # bytes that a graph reads before it comes back to a page: ten L2 caches
GOAL = ("Qwen3-8B", 16, 64, 4096, False)
SIZES = {
    "full": {
        "calls": 32,  # launches in a captured graph
        "rounds": 7,
        # model, page size, rows, context, mixed lengths
        "shapes": [
            GOAL,
            ("Qwen3-8B", 16, 1, 4096, False),
            ("Qwen3-8B", 256, 64, 4096, False),
            ("Qwen3-8B", 16, 64, 4096, True),
            ("Qwen3-8B", 16, 256, 1024, False),
            ("Qwen3-8B", 16, 1, 32768, False),
            ("Qwen2.5-7B", 16, 64, 4096, False),
        ],
    },
    "tiny": {
        "calls": 1,
        "rounds": 1,
        "shapes": [("tiny", 16, 2, 24, True)],
    },
}


def row_lengths(rows: int, context: int, mixed: bool) -> list[int]:
    """Tokens of each row: `context`, or from 1/8 to 15/8 of it."""
    if not mixed:
        return [context] * rows
    return [context * (2 + 28 * i // max(1, rows - 1)) // 16 for i in range(rows)]


def case_bytes(shape: tuple, calls: int) -> tuple[int, int]:
    """Bytes of keys and values that a call reads, and that all page tables' pages take."""
    model, page_size, rows, context, mixed = shape
    _, Hkv, Dh = HEADS[model]
    lengths = row_lengths(rows, context, mixed)
    token = 2 * Hkv * Dh * 2
    read = sum(lengths) * token
    sets = min(calls, math.ceil(COLD / read))
    return read, sets * rows * (max(lengths) + page_size) * token


def make_case(shape: tuple, calls: int) -> tuple:
    """q, pages, page tables [sets, rows, pages] over different pages in random order, lengths."""
    model, page_size, rows, context, mixed = shape
    Hq, Hkv, Dh = HEADS[model]
    lengths = row_lengths(rows, context, mixed)
    read, _ = case_bytes(shape, calls)
    sets = min(calls, math.ceil(COLD / read))
    pages_a_row = math.ceil(max(lengths) / page_size)
    count = sets * rows * pages_a_row
    tables = torch.randperm(count, device=common.device()).int().view(sets, rows, pages_a_row)
    new = partial(torch.randn, device=common.device(), dtype=torch.bfloat16)
    k_pages = new(count, page_size, Hkv, Dh)
    v_pages = new(count, page_size, Hkv, Dh)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=common.device())
    return new(rows, Hq, Dh), k_pages, v_pages, tables, lengths


def gather_all(q, k_pages, v_pages, table, lengths, *, scale):
    """Plain PyTorch as one would write it: every row padded to the longest, one SDPA."""
    k = k_pages[table].flatten(1, 2).transpose(1, 2)  # [B, Hkv, T, Dh]
    v = v_pages[table].flatten(1, 2).transpose(1, 2)
    valid = torch.arange(k.shape[2], device=q.device) < lengths[:, None]
    query = q.unflatten(1, (k.shape[1], -1))
    mask = valid[:, None, None]
    return F.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scale).flatten(1, 2)


def flash_attn(q, k_pages, v_pages, table, lengths, *, scale):
    from flash_attn import flash_attn_with_kvcache

    options = {"cache_seqlens": lengths, "block_table": table, "softmax_scale": scale}
    return flash_attn_with_kvcache(q[:, None], k_pages, v_pages, causal=True, **options)[:, 0]


def configured(block: int, warps: int, stages: int):
    config = {"block": block, "num_warps": warps, "num_stages": stages}
    return partial(triton_paged_attention, config=config)


FORMS = {
    "MARS": triton_paged_attention,
    # Five stages leave two buffers of keys and values, three leave one.
    "block 32, stages 5": configured(32, 4, 5),
    "block 64, stages 5": configured(64, 4, 5),
    "block 64, stages 3": configured(64, 4, 3),
    "block 32, warps 8": configured(32, 8, 5),
    "flash-attn": flash_attn,
    "gather + SDPA": gather_all,
}


def captured(call, calls: int):
    """A graph of the calls 0 … calls − 1, all of which run before; on a CPU a plain loop."""

    def loop():
        for i in range(calls):
            call(i)

    loop()
    if not torch.cuda.is_available():
        return loop
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop()
    return graph.replay


def attempts(shape: tuple, sizes: dict, copy: float) -> dict:
    """One row: groups of eight rows with 7/8 of their pages in common."""
    page_size, rows = shape[1:3]
    q, k_pages, v_pages, tables, lengths = make_case(shape, sizes["calls"])
    tables = tables.clone()
    shared = tables.shape[2] * 7 // 8
    for first in range(0, rows, 8):
        tables[:, first : first + 8, :shared] = tables[:, first : first + 1, :shared]
    most = rows_of_a_run(q.shape[1] // k_pages.shape[2])
    runs = []
    for table in tables.cpu().numpy():
        planned = kernel_runs(table, lengths.cpu().numpy(), page_size, most)
        runs.append(torch.from_numpy(planned).to(common.device()))

    def call(i):
        i %= len(tables)
        triton_paged_attention(
            q, k_pages, v_pages, tables[i], lengths, scale=q.shape[2] ** -0.5, runs=runs[i]
        )

    read, _ = case_bytes(shape, sizes["calls"])
    return timed(call, read * attempts_share(rows), sizes, copy)


def attempts_share(rows: int) -> float:
    """The share of the pages that is read where eight rows at a time have 7/8 in common."""
    return 1 / 8 + 7 / 8 * math.ceil(rows / 8) / rows


def timed(call, size: int, sizes: dict, copy: float) -> dict:
    """Columns of a call that moves `size` bytes; copy: bytes a second of a large copy."""
    replay = captured(call, sizes["calls"])
    seconds = common.interleaved({"call": replay}, sizes["rounds"], common.clock)["call"]
    taken = common.spread([each / sizes["calls"] for each in seconds])
    columns = {f"µs, {key}": 1e6 * value for key, value in taken.items()}
    speed = size / taken["median"]
    return columns | {"TB/s": speed / 1e12, "share of copy": speed / copy}


def one_shape(shape: tuple, form, sizes: dict, copy: float) -> dict:
    """One row: a form on a shape, whose keys and values exist for as long as it runs."""
    read, total = case_bytes(shape, sizes["calls"])
    if 2 * total > common.free_bytes():  # gathering takes as much again
        raise MemoryError(f"needs {2 * total / 1e9:.0f} GB")
    q, k_pages, v_pages, tables, lengths = make_case(shape, sizes["calls"])
    scale = q.shape[2] ** -0.5

    def call(i):
        table = tables[i % len(tables)]
        form(q, k_pages, v_pages, table, lengths, scale=scale)

    return timed(call, read, sizes, copy)


def goal(tiny: bool, rows: list[dict], write, rate: dict, count: int = 2, forms=FORMS) -> None:
    """A row for each form of the first `count` shapes; rate: see bench.common.rates."""
    sizes = SIZES["tiny" if tiny else "full"]
    for shape, (name, form) in itertools.product(sizes["shapes"][:count], forms.items()):
        read, _ = case_bytes(shape, sizes["calls"])
        predicted = {}
        if name == "MARS":
            share = 0.3 if shape[2] * shape[3] < 2**14 else 0.88
            microseconds = 1e6 * read / rate["copy"] / share
            predicted = {"MB": read / 1e6, "µs": microseconds, "share of copy": share}
        row = dict(zip(("model", "page", "batch", "context", "mixed"), shape)) | {"form": name}
        common.measure(
            rows, write, row, predicted, partial(one_shape, shape, form, sizes, rate["copy"])
        )
    shape = sizes["shapes"][0]
    megabytes = case_bytes(shape, sizes["calls"])[0] * attempts_share(shape[2]) / 1e6
    predicted = {"MB": megabytes, "µs": 1e12 * megabytes / rate["copy"] / 0.7, "share of copy": 0.7}
    row = dict(zip(("model", "page", "batch", "context", "mixed"), shape))
    row["form"] = "MARS, eight share 7/8"
    common.measure(rows, write, row, predicted, partial(attempts, shape, sizes, rate["copy"]))


def all_shapes(tiny: bool, rows: list[dict], write, rate: dict) -> None:
    forms = {name: FORMS[name] for name in ("MARS", "flash-attn", "gather + SDPA")}
    goal(tiny, rows, write, rate, count=99, forms=forms)
