"""Paged decode attention, and the small kernels of a decode step, against what the memory can deliver.

    python -m bench.attention            everything this machine can run
    python -m bench.attention --quick    small shapes, to see that it works; writes no file
    python -m bench.attention --sweep    CUDA only: tries launch configurations and pieces a row

1. CPU: the reference on the decode step of bench/sampler.py's workload beside gathering every page once for all rows.
2. CUDA: time and bandwidth (bytes of keys and values over time) for real shapes in bf16, a captured graph for each
   form, page tables in turn so that no call finds its pages in the L2 cache. "share of copy" is against a large copy in
   the same run (an H200 does about 4.3 TB/s). "mixed" has lengths from 1/8 to 15/8 of the context.
   Goal: 85 % or more at batch 64, context 4k.
3. CUDA: the small kernels, time a launch.

A peer that fails is shown with its error. Results: bench/results/attention_{cpu,gpu,small,sweep}.json.
"""

import argparse
import itertools
import math
from functools import partial

import torch
import torch.nn.functional as F

import kernels
from bench.common import gpu_clock, interleaved, save, spread, table
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
COLD = (
    512 << 20
)  # bytes of keys and values that a graph goes through before it comes back: ten L2 caches


def make_case(
    rows, context, heads, page_size, *, mixed=False, dtype=torch.bfloat16, device=DEVICE, sets=None
):
    """q, pages, `sets` page tables over different pages in random order, lengths; bytes of keys and values a call."""
    Hq, Hkv, Dh = heads
    lengths = (
        [context * (2 + 28 * i // max(1, rows - 1)) // 16 for i in range(rows)]
        if mixed
        else [context] * rows
    )
    M = math.ceil(max(lengths) / page_size)
    size = 2 * sum(lengths) * Hkv * Dh * dtype.itemsize
    sets = sets or min(CALLS, math.ceil(COLD / size))
    tables = torch.randperm(sets * rows * M, device=device).int().view(sets, rows, M)
    k_pages, v_pages = (
        torch.randn(tables.numel(), page_size, Hkv, Dh, device=device, dtype=dtype)
        for _ in range(2)
    )
    q = torch.randn(rows, Hq, Dh, device=device, dtype=dtype)
    return (
        q,
        k_pages,
        v_pages,
        tables,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        size,
    )


def gather_all(q, k_pages, v_pages, table, lengths, *, scale):
    """Plain PyTorch as one would write it: every row padded to the longest, one SDPA."""
    k, v = (
        pages[table].flatten(1, 2).transpose(1, 2) for pages in (k_pages, v_pages)
    )  # [B, Hkv, T, Dh]
    mask = (torch.arange(k.shape[2], device=q.device) < lengths[:, None])[:, None, None]
    group = q.unflatten(1, (k.shape[1], -1))
    return F.scaled_dot_product_attention(group, k, v, attn_mask=mask, scale=scale).flatten(1, 2)


def flash_attn(q, k_pages, v_pages, table, lengths, *, scale):
    from flash_attn import flash_attn_with_kvcache

    return flash_attn_with_kvcache(
        q[:, None],
        k_pages,
        v_pages,
        cache_seqlens=lengths,
        block_table=table,
        softmax_scale=scale,
        causal=True,
    )[:, 0]


def torch_varlen(q, k_pages, v_pages, table, lengths, *, scale):
    """PyTorch ≥ 2.13, pages of a multiple of 256."""
    from torch.nn.attention.varlen import varlen_attn

    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    return varlen_attn(
        q,
        k_pages,
        v_pages,
        starts,
        None,
        1,
        table.shape[1] * k_pages.shape[1],
        scale=scale,
        enable_gqa=True,
        seqused_k=lengths,
        block_table=table,
    )


# ---------------------------------------------------------------- 1. CPU


def cpu(rounds, rows=64):
    """Prompts of 16–256 tokens in decode, 8 query heads over 4 key heads of 32, pages of 16, fp32."""
    torch.manual_seed(0)
    q, k_pages, v_pages, tables, lengths, _ = make_case(
        rows, 192, (8, 4, 32), 16, mixed=True, dtype=torch.float32, device="cpu", sets=1
    )
    forms = {"MARS, reference": reference, "one gather for all rows": gather_all}
    arguments = q, k_pages, v_pages, tables[0], lengths
    seconds = interleaved(
        {name: partial(form, *arguments, scale=32**-0.5) for name, form in forms.items()}, rounds
    )
    return [
        {"form": name, **{f"CPU ms, {k}": 1e3 * v for k, v in spread(seconds[name]).items()}}
        for name in forms
    ]


# ---------------------------------------------------------------- 2. CUDA


def captured(call):
    """A graph of CALLS calls; call(i) is the i-th. They run outside of it first, so that all is compiled."""
    for i in range(CALLS):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    return graph.replay


def microseconds(calls, rounds):
    """name -> {median, min, max} µs a call, or the error of a form that does not run here. All forms in turn."""
    ready, out = {}, {}
    for name, call in calls.items():
        try:
            ready[name] = captured(call)
        except Exception as error:  # a peer that does not run on this machine is a row, not the end
            out[name] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
            torch.cuda.synchronize()
    seconds = interleaved(ready, rounds, clock=gpu_clock)
    return {
        name: out.get(name) or {k: 1e6 * v / CALLS for k, v in spread(seconds[name]).items()}
        for name in calls
    }


def copy_speed(rounds, size=4 << 30):
    """Bytes a second (read and written) of a large device-to-device copy."""
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    seconds = interleaved({"copy": lambda: target.copy_(source)}, rounds, clock=gpu_clock)
    return 2 * size / spread(seconds["copy"])["median"]


def gpu_shapes(quick):
    """(model, page size, rows, context, mixed lengths)"""
    if quick:
        return [("Qwen3-8B", 16, 2, 512, False), ("Qwen3-8B", 256, 2, 512, True)]
    sizes = ((1, 4096), (64, 1024), (64, 4096), (128, 4096))
    shapes = [
        (model, page_size, *size, False)
        for model, page_size, size in itertools.product(HEADS, (16, 256), sizes)
    ]
    others = [(64, 4096, True), (1, 32768, False), (256, 1024, False)]
    return shapes + [("Qwen3-8B", 16, *other) for other in others]


def on_set(form, case, scale):
    """call(i) on the i-th page table in turn."""
    q, k_pages, v_pages, tables, lengths, _ = case
    return lambda i: form(q, k_pages, v_pages, tables[i % len(tables)], lengths, scale=scale)


def gpu(shapes, rounds, copy):
    rows = []
    forms = {
        "MARS": triton_paged_attention,
        "flash-attn": flash_attn,
        "torch varlen_attn": torch_varlen,
        "gather + SDPA": gather_all,
    }
    for model, page_size, batch, context, mixed in shapes:
        case = make_case(batch, context, HEADS[model], page_size, mixed=mixed)
        scale = HEADS[model][2] ** -0.5
        times = microseconds(
            {name: on_set(form, case, scale) for name, form in forms.items()}, rounds
        )
        shape = {
            "model": model,
            "page": page_size,
            "batch": batch,
            "context": f"{'mixed ' * mixed}{context}",
        }
        rows += [
            shape | {"form": name} | describe(time_of, case[-1], copy)
            for name, time_of in times.items()
        ]
        del case
        torch.cuda.empty_cache()
    return rows


def describe(time_of, size, copy):
    """Columns of one measurement; a failure keeps its message."""
    if isinstance(time_of, str):
        return {
            "µs": "",
            "µs, min": "",
            "µs, max": "",
            "TB/s": "",
            "share of copy": "",
            "failed": time_of,
        }
    speed = size / time_of["median"] * 1e6
    return {
        "µs": time_of["median"],
        "µs, min": time_of["min"],
        "µs, max": time_of["max"],
        "TB/s": speed / 1e12,
        "share of copy": speed / copy,
        "failed": "",
    }


def sweep(quick, rounds, copy):
    """Launch configurations for batch 1 and 64 at 4k, then pieces a row with the best of them; best first."""
    rows, scale = [], 128**-0.5
    candidates = (
        [(64, 4, 3), (32, 4, 3)]
        if quick
        else itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5))
    )
    configs = {
        f"block={b} warps={w} stages={s}": dict(block=b, num_warps=w, num_stages=s)
        for b, w, s in candidates
    }
    for page_size, batch in itertools.product((16, 256), (1, 64)):
        case = make_case(batch, 4096, HEADS["Qwen3-8B"], page_size)
        calls = {
            name: on_set(partial(triton_paged_attention, config=c), case, scale)
            for name, c in configs.items()
        }
        times = microseconds(calls, rounds)
        best = min(
            (name for name in times if not isinstance(times[name], str)),
            key=lambda name: times[name]["median"],
        )
        at_once = programs_at_once(case[0].device, shared_memory(configs[best], 256))
        usual = split_count(batch, HEADS["Qwen3-8B"][1], 4096, configs[best]["block"], at_once)
        calls = {
            f"{best} splits={n}{' (usual)' * (n == usual)}": on_set(
                partial(triton_paged_attention, config=configs[best], splits=n), case, scale
            )
            for n in (1, 2, 4, 8, 16, 32, 64)
        }
        times |= microseconds(calls, rounds)
        found = [
            {"page": page_size, "batch": batch, "config": name} | describe(time_of, case[-1], copy)
            for name, time_of in times.items()
        ]
        rows += sorted(found, key=lambda row: row["µs"] or math.inf)
    return rows


# ---------------------------------------------------------------- 3. the small kernels


def small(rounds, copy):
    """Qwen3-8B's layer: hidden 4,096, 32 + 2·8 heads of 128, 12,288 wide MLP."""
    rows = []
    new = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    weight, head = new(4096), new(128)
    for B in (1, 64, 256):
        x, residual, qkv, gate_up, cos = (
            new(B, 4096),
            new(B, 4096),
            new(B, 48 * 128),
            new(B, 2 * 12288),
            new(B, 128),
        )
        k_pages, v_pages = new(2, 64, 16, 8, 128)
        slots = torch.randperm(1024, device="cuda")[:B]
        calls = {
            "add_rms_norm": lambda i: kernels.add_rms_norm(x, residual, weight, 1e-6),
            "qk_norm_rope_store": lambda i: kernels.qk_norm_rope_store(
                qkv, head, head, cos, cos, slots, k_pages, v_pages, 1e-6
            ),
            "silu_mul": lambda i: kernels.silu_mul(gate_up),
        }
        size = {
            "add_rms_norm": 4 * x.nbytes,
            "qk_norm_rope_store": 2 * qkv.nbytes,
            "silu_mul": gate_up.nbytes * 3 // 2,
        }
        times = microseconds(calls, rounds)
        rows += [
            {"kernel": name, "batch": B} | describe(times[name], size[name], copy) for name in calls
        ]
    return rows


def main():
    parser = argparse.ArgumentParser(description="Decode attention and the small decode kernels.")
    parser.add_argument("--quick", action="store_true", help="small shapes, no files")
    parser.add_argument("--sweep", action="store_true", help="try launch configurations (CUDA)")
    options = parser.parse_args()
    if options.sweep and DEVICE != "cuda":
        parser.exit(
            2, "--sweep tries launch configurations on a GPU; this machine has no CUDA device.\n"
        )
    rounds = 2 if options.quick else 7
    parts = {"cpu": partial(cpu, rounds)}
    if DEVICE == "cuda":
        copy = copy_speed(rounds)
        print(f"copy: {copy / 1e12:.2f} TB/s")
        parts |= {
            "gpu": partial(gpu, gpu_shapes(options.quick), rounds, copy),
            "small": partial(small, rounds, copy),
        }
        if options.sweep:
            parts = {"sweep": partial(sweep, options.quick, rounds, copy)}
    for name, part in parts.items():
        rows = part()
        print(f"\n{name}\n" + table(rows), flush=True)
        if not options.quick:
            command = "python -m bench.attention" + " --sweep" * options.sweep
            save(
                f"attention_{name}",
                command,
                rows,
                **({"copy_bytes_per_second": copy} if DEVICE == "cuda" else {}),
            )
    if DEVICE != "cuda":
        shapes = [
            {
                "model": m,
                "page": p,
                "batch": b,
                "context": f"{'mixed ' * x}{c}",
                "share of copy": NOT_MEASURED,
            }
            for m, p, b, c, x in gpu_shapes(False)
        ]
        print("\ngpu\n" + table(shapes))


if __name__ == "__main__":
    main()
