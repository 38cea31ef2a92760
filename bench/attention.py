"""Paged decode attention, and the small kernels of a decode step, against what memory can deliver.

    python -m bench.attention                          everything this machine can run
    python -m bench.attention --only gpu --rows 64 --context 4096     some parts, some shapes
    python -m bench.attention --only sweep             launch configurations, pieces a row (CUDA)
    python -m bench.attention --no-peers               ours alone
    python -m bench.attention --quick                  small shapes, to see that it works; no file

gpu    Time and bandwidth (bytes of keys and values over time) for real shapes in bf16: a captured
       graph for each form, page tables in turn so that no call finds its pages in the L2 cache.
       "share of copy" is against a large copy in the same run (an H200 does about 4.3 TB/s).
       "mixed" has lengths from 1/8 to 15/8 of the context. Goal: 85 % at batch 64, context 4k.
small  The small kernels, time a launch.
sweep  Candidates of the launch, best first: batch 1 and 64 at context 4k.
cpu    The reference on the decode step of bench/sampler.py's workload beside gathering every page
       once for all rows.

A peer that fails is shown with its error. Results: bench/results/attention_PART.json, written
after each shape.
"""

import argparse
import itertools
import math
from functools import partial

import torch
import torch.nn.functional as F

import kernels
from bench.common import copy_rate, fits, gpu_clock, interleaved, save, spread, table, why
from kernels.paged_attention import (
    programs_at_once,
    reference,
    shared_memory,
    split_count,
    triton_paged_attention,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NOT_MEASURED = "not yet measured on a GPU"
HEADS = {"Qwen3-8B": (32, 8, 128), "Qwen2.5-7B": (28, 4, 128)}
CALLS = 32  # launches in a captured graph
COLD = 512 << 20  # bytes that a graph reads before it comes back to a page: ten L2 caches
# Tokens in a block, warps, stages. Five stages leave two buffers, three and four leave one.
FEW_CONFIGS = [(32, 4, 5), (64, 4, 5), (64, 4, 3)]
ALL_CONFIGS = list(itertools.product((16, 32, 64, 128), (2, 4, 8), (3, 5, 7)))


def row_lengths(rows, context, mixed):
    """Tokens of each row: `context`, or from 1/8 to 15/8 of it."""
    if not mixed:
        return [context] * rows
    return [context * (2 + 28 * i // max(1, rows - 1)) // 16 for i in range(rows)]


def case_bytes(rows, context, heads, mixed, itemsize=2):
    """(bytes of keys and values that a call reads, bytes that all page tables' pages take)"""
    _, Hkv, Dh = heads
    lengths = row_lengths(rows, context, mixed)
    token = 2 * Hkv * Dh * itemsize
    read = sum(lengths) * token
    sets = min(CALLS, math.ceil(COLD / read))
    return read, sets * rows * (max(lengths) + 256) * token


def make_case(
    rows, context, heads, page_size, mixed=False, dtype=torch.bfloat16, device=DEVICE, sets=None
):
    """q, pages, page tables [sets, rows, pages] over different pages in random order, lengths."""
    Hq, Hkv, Dh = heads
    lengths = row_lengths(rows, context, mixed)
    pages_a_row = math.ceil(max(lengths) / page_size)
    if sets is None:
        read, _ = case_bytes(rows, context, heads, mixed)
        sets = min(CALLS, math.ceil(COLD / read))
    count = sets * rows * pages_a_row
    tables = torch.randperm(count, device=device).int().view(sets, rows, pages_a_row)
    new = partial(torch.randn, device=device, dtype=dtype)
    k_pages = new(count, page_size, Hkv, Dh)
    v_pages = new(count, page_size, Hkv, Dh)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    return new(rows, Hq, Dh), k_pages, v_pages, tables, lengths


# --- peers ----------------------------------------------------------------------------------------


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

    out = flash_attn_with_kvcache(
        q[:, None],
        k_pages,
        v_pages,
        cache_seqlens=lengths,
        block_table=table,
        softmax_scale=scale,
        causal=True,
    )
    return out[:, 0]


def torch_varlen(q, k_pages, v_pages, table, lengths, *, scale):
    """PyTorch ≥ 2.13, pages of a multiple of 256."""
    from torch.nn.attention.varlen import varlen_attn

    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    longest = table.shape[1] * k_pages.shape[1]
    return varlen_attn(
        q,
        k_pages,
        v_pages,
        starts,
        None,
        1,
        longest,
        scale=scale,
        enable_gqa=True,
        seqused_k=lengths,
        block_table=table,
    )


PEERS = {"flash-attn": flash_attn, "torch varlen_attn": torch_varlen, "gather + SDPA": gather_all}


# --- CPU ------------------------------------------------------------------------------------------


def cpu(options, save_rows):
    """Prompts of 16–256 tokens in decode, 8 query heads over 4 key heads of 32, pages of 16."""
    torch.manual_seed(0)
    case = make_case(64, 192, (8, 4, 32), 16, True, torch.float32, "cpu", sets=1)
    q, k_pages, v_pages, tables, lengths = case
    forms = {"MARS, reference": reference, "one gather for all rows": gather_all}
    calls = {}
    for name, form in forms.items():
        calls[name] = partial(form, q, k_pages, v_pages, tables[0], lengths, scale=32**-0.5)
    seconds = interleaved(calls, options.rounds)
    rows = []
    for name in forms:
        columns = {f"CPU ms, {k}": 1e3 * value for k, value in spread(seconds[name]).items()}
        rows.append({"form": name, **columns})
    save_rows(rows)
    return rows


# --- CUDA -----------------------------------------------------------------------------------------


def captured(call):
    """A graph of CALLS calls; call(i) is the i-th. They run before, so that all is compiled."""
    for i in range(CALLS):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    return graph.replay


def microseconds(calls, rounds):
    """name -> {median, min, max} µs a call, or the error of a form that does not run here."""
    graphs = {}
    found = {}
    for name, call in calls.items():
        try:
            graphs[name] = captured(call)
        except Exception as error:
            found[name] = why(error)
            torch.cuda.synchronize()
    for name, seconds in interleaved(graphs, rounds, gpu_clock).items():
        found[name] = {k: 1e6 * value / CALLS for k, value in spread(seconds).items()}
    return {name: found[name] for name in calls}


def describe(measured, size, copy):
    """Columns of one measurement of a call that moves `size` bytes; a failure keeps its message."""
    if isinstance(measured, str):
        return {"failed": measured}
    speed = size / measured["median"] * 1e6
    columns = {"µs": measured["median"], "µs, min": measured["min"], "µs, max": measured["max"]}
    return columns | {"TB/s": speed / 1e12, "share of copy": speed / copy}


def gpu_shapes(options):
    """(model, page size, rows, context, mixed lengths), the goal's shape first."""
    if options.quick:
        return [("Qwen3-8B", 16, 2, 512, False), ("Qwen3-8B", 256, 2, 512, True)]
    sizes = ((64, 4096), (1, 4096), (64, 1024), (128, 4096))
    shapes = []
    for (rows, context), page_size, model in itertools.product(sizes, (16, 256), HEADS):
        shapes.append((model, page_size, rows, context, False))
    shapes.append(("Qwen3-8B", 16, 64, 4096, True))
    shapes.append(("Qwen3-8B", 16, 1, 32768, False))
    shapes.append(("Qwen3-8B", 16, 256, 1024, False))
    if options.rows is not None:
        shapes = [shape for shape in shapes if shape[2] == options.rows]
    if options.context is not None:
        shapes = [shape for shape in shapes if shape[3] == options.context]
    return shapes


def name_of(shape):
    model, page_size, rows, context, mixed = shape
    context = f"mixed {context}" if mixed else str(context)
    return {"model": model, "page": page_size, "batch": rows, "context": context}


def on_set(form, case, scale):
    """call(i) on the i-th page table in turn."""
    q, k_pages, v_pages, tables, lengths = case
    count = len(tables)
    return lambda i: form(q, k_pages, v_pages, tables[i % count], lengths, scale=scale)


def gpu(options, save_rows):
    copy = copy_rate()
    forms = {"MARS": triton_paged_attention}
    if not options.no_peers:
        forms |= PEERS
    rows = []
    for shape in gpu_shapes(options):
        model, page_size, batch, context, mixed = shape
        read, total = case_bytes(batch, context, HEADS[model], mixed)
        if not fits(2 * total):  # gathering takes as much again
            rows.append(name_of(shape) | {"failed": f"needs {2 * total / 1e9:.0f} GB"})
            continue
        case = make_case(batch, context, HEADS[model], page_size, mixed)
        scale = HEADS[model][2] ** -0.5
        calls = {name: on_set(form, case, scale) for name, form in forms.items()}
        for name, measured in microseconds(calls, options.rounds).items():
            rows.append(name_of(shape) | {"form": name} | describe(measured, read, copy))
        print(table(rows[-len(forms) :]), flush=True)
        save_rows(rows, copy_bytes_per_second=copy)
        del case, calls
        torch.cuda.empty_cache()
    return rows


def sweep(options, save_rows):
    """Launch configurations, then pieces a row with the best of them."""
    copy = copy_rate()
    heads = HEADS["Qwen3-8B"]
    scale = heads[2] ** -0.5
    candidates = FEW_CONFIGS if options.quick or options.no_peers else ALL_CONFIGS
    configs = {}
    for block, warps, stages in candidates:
        name = f"block={block} warps={warps} stages={stages}"
        configs[name] = {"block": block, "num_warps": warps, "num_stages": stages}
    rows = []
    for batch, page_size in itertools.product((64, 1), (16, 256)):
        if options.rows not in (None, batch):
            continue
        case = make_case(batch, 4096, heads, page_size)
        read, _ = case_bytes(batch, 4096, heads, False)
        calls = {}
        for name, config in configs.items():
            form = partial(triton_paged_attention, config=config)
            calls[name] = on_set(form, case, scale)
        times = microseconds(calls, options.rounds)
        measured = [name for name in times if not isinstance(times[name], str)]
        best = min(measured, key=lambda name: times[name]["median"])
        config = configs[best]
        at_once = programs_at_once(case[0].device, shared_memory(config, 256))
        usual = split_count(batch, heads[1], 4096, config["block"], at_once)
        calls = {}
        for splits in sorted({1, 2, 4, 5, 8, 16, 32, 64, usual}):
            note = " (usual)" if splits == usual else ""
            form = partial(triton_paged_attention, config=config, splits=splits)
            calls[f"{best} splits={splits}{note}"] = on_set(form, case, scale)
        times |= microseconds(calls, options.rounds)
        found = []
        for name, time_of in times.items():
            row = {"page": page_size, "batch": batch, "config": name}
            found.append(row | describe(time_of, read, copy))
        rows += sorted(found, key=lambda row: row.get("µs", math.inf))
        save_rows(rows, copy_bytes_per_second=copy)
        del case, calls
        torch.cuda.empty_cache()
    return rows


def small(options, save_rows):
    """Qwen3-8B's layer: hidden 4,096, 32 + 2·8 heads of 128, 12,288 wide MLP."""
    copy = copy_rate()
    rows = []
    new = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    weight = new(4096)
    head = new(128)
    for B in (1, 64, 256):
        x = new(B, 4096)
        residual = new(B, 4096)
        qkv = new(B, 48 * 128)
        gate_up = new(B, 2 * 12288)
        cos = new(B, 128)
        k_pages, v_pages = new(2, 64, 16, 8, 128)
        slots = torch.randperm(1024, device="cuda")[:B]
        rope = partial(
            kernels.qk_norm_rope_store, qkv, head, head, cos, cos, slots, k_pages, v_pages, 1e-6
        )
        norm = partial(kernels.add_rms_norm, x, residual, weight, 1e-6)
        silu = partial(kernels.silu_mul, gate_up)
        sizes = {
            "add_rms_norm": (norm, 4 * x.nbytes),
            "qk_norm_rope_store": (rope, 2 * qkv.nbytes),
            "silu_mul": (silu, gate_up.nbytes * 3 // 2),
        }
        calls = {name: (lambda i, call=call: call()) for name, (call, _) in sizes.items()}
        for name, measured in microseconds(calls, options.rounds).items():
            row = {"kernel": name, "batch": B}
            rows.append(row | describe(measured, sizes[name][1], copy))
        save_rows(rows, copy_bytes_per_second=copy)
    return rows


PARTS = {"gpu": gpu, "small": small, "cpu": cpu, "sweep": sweep}  # what needs a GPU goes first


def main():
    parser = argparse.ArgumentParser(description="Decode attention and the small decode kernels.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=["gpu", "small", "cpu"])
    parser.add_argument("--rows", type=int, help="shapes with this many rows only")
    parser.add_argument("--context", type=int, help="shapes with this context only")
    parser.add_argument("--no-peers", action="store_true", help="ours alone; few candidates")
    parser.add_argument("--quick", action="store_true", help="small shapes, no files")
    options = parser.parse_args()
    options.rounds = 2 if options.quick else 7
    for part in options.only:
        if part != "cpu" and DEVICE != "cuda":
            print(f"\n{part}: {NOT_MEASURED}")
            continue

        def save_rows(rows, part=part, **more):
            if not options.quick:
                save(f"attention_{part}", f"python -m bench.attention --only {part}", rows, **more)

        print(f"\n{part}\n{table(PARTS[part](options, save_rows))}", flush=True)


if __name__ == "__main__":
    main()
