"""The loss beside the forms that people use, and decode attention beside the memory's rate.

    python -m bench.gpu --step loss                     likewise accuracy, attention

accuracy   The errors of log-probs and gradients in bf16 against float64.
loss       The rate of useful operations beside that of a large product, in bf16. Goals on an H200:
           30 ms forward, 92 ms with the backward pass.
attention  The bytes of a call's keys and values over its time, as a share of a large copy's rate.
           The calls of one captured graph take their page tables in turn, so that no call finds
           its pages in the L2 cache. Goal: 85 % with 64 rows of 4k.

Results: bench/results/gpu_STEP.json. Tests: pytest tests/test_bench.py tests/test_bench_gpu.py
"""

import math
from functools import partial

import torch
import torch.nn.functional as F

import grpo
import kernels
from bench import common
from kernels.paged import max_rows_of_range, triton_paged_attention
from sampler.plan import plan_kv_ranges

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
TINY = (40, 16, 300)  # N, D, V
CHUNK = 1024  # tokens at a time: a GPU's memory does not hold all logits

# --- the loss -------------------------------------------------------------------------------------


def make_case(N, D, V, dtype, device) -> tuple:
    """Hidden states [N, D], head [V, D]; targets, old log-probs, advantages, weights, all [N].

    The logits have a standard deviation of 4.5, and the targets are drawn from their softmax.
    """
    generator = torch.Generator(device).manual_seed(0)
    randn = partial(torch.randn, generator=generator, device=device)
    hidden = randn(N, D).to(dtype)
    weight = randn(V, D).mul_(4.5 / D**0.5).to(dtype)
    logp = (hidden.float() @ weight.float().T).log_softmax(-1)
    target = torch.multinomial(logp.exp(), 1, generator=generator)
    old = logp.gather(-1, target)[:, 0] + 0.2 * randn(N)
    return hidden, weight, target[:, 0], old, randn(N), torch.full((N,), 1 / N, device=device)


def mars_logprob(*case):
    return kernels.linear_logprob(*case)[0]


def mars_loss(*case):
    return kernels.linear_grpo_loss(*case, **CLIP)[0]


def plain_logprob(hidden, weight, target):
    """The log-probs [N] of a model's forward pass: logits in its type, softmax in fp32 or fp64."""
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]


def liger_logprob(hidden, weight, target):
    """The log-probs [N] by Liger's code, which raises ImportError where it is not installed."""
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    return LigerFusedLinearPPOBase.chunk_forward(hidden[:, None], weight, target[:, None])[:, 0]


def loss_of(logprob_function):
    """The GRPO loss, by autograd through a function that returns log-probs."""

    def loss(hidden, weight, target, *tokens):
        return grpo.grpo_loss(logprob_function(hidden, weight, target), *tokens, **CLIP)[0]

    return loss


def gradients(loss_function, case, size: int | None = None):
    """Gradients of the hidden states and the head, in chunks of `size` tokens if it is given."""
    hidden, weight = (x.detach().requires_grad_() for x in case[:2])
    size = size or len(hidden)
    for start in range(0, len(hidden), size):
        part, *tokens = (x[start : start + size] for x in (hidden, *case[2:]))
        loss_function(part, weight, *tokens).backward()
    return hidden.grad, weight.grad


# form -> (the function that returns log-probs, the one that returns the loss)
LOSS_FORMS = {
    "MARS": (mars_logprob, mars_loss),
    "PyTorch, softmax in fp32": (plain_logprob, loss_of(plain_logprob)),
    "Liger": (liger_logprob, loss_of(liger_logprob)),
}


def accuracy(tiny: bool) -> common.Rows:
    """A row for each form: its errors against float64."""
    shape = TINY if tiny else (512, 512, 32_000)
    case = make_case(*shape, torch.bfloat16, common.DEVICE)
    exact = [x.double() if x.is_floating_point() else x for x in case]
    true_logprob = plain_logprob(*exact[:3])
    true_gradients = gradients(loss_of(plain_logprob), exact)

    def errors(logprob_function, loss_function):
        with torch.no_grad():
            logprob = logprob_function(*case[:3])
        error = (logprob.double() - true_logprob).abs()
        row = {"log-prob error, mean": error.mean().item(), "max": error.max().item()}
        result = gradients(loss_function, case)
        for name, ours, true in zip(("hidden", "weight"), result, true_gradients):
            row[f"gradient error, {name}"] = ((ours - true).norm() / true.norm()).item()
        return row

    for name, forms in LOSS_FORMS.items():
        yield {"form": name}, partial(errors, *forms)


def speed(tiny: bool) -> common.Rows:
    """A row for each pass and form: its time and rate."""
    N, D, V = TINY if tiny else (16_384, 4096, 151_936)
    case = make_case(N, D, V, common.DTYPE, common.DEVICE)
    plain = loss_of(plain_logprob)
    # pass, form, number of matrix products of hidden states and head, call
    forms = [
        ("forward", "MARS", 1, lambda: mars_logprob(*case[:3])),
        ("forward + backward", "MARS", 3, lambda: gradients(mars_loss, case)),
        ("forward + backward", "PyTorch", 3, lambda: gradients(plain, case, CHUNK)),
    ]

    def measurement(call, products) -> dict:
        row = common.spread("ms", [1e3 * seconds for seconds in common.timed(call)])
        rate = 2 * N * D * V * products / row["ms, median"] * 1e3
        return row | {"share of a product": rate / common.rates()["product"]}

    for kind, name, products, call in forms:
        yield {"pass": kind, "form": name}, partial(measurement, call, products)


# --- decode attention -----------------------------------------------------------------------------

QWEN3_8B = (32, 8, 128)  # number of query heads, number of key heads, size of a head
PAGE = 64  # tokens, as the sampler has them on a GPU
COLD = 512 << 20  # bytes that a graph reads before it reads a page again: ten L2 caches
CALLS = 32  # launches in a captured graph


def attention_case(heads: tuple, rows: int, context: int, calls: int) -> tuple:
    """Returns the bytes that a call reads, and the arguments of calls on different random pages."""
    Hq, Hkv, Dh = heads
    lengths = torch.full((rows,), context)
    size = rows * context * 2 * Hkv * Dh * 2  # bytes of keys and values
    sets = min(calls, math.ceil(COLD / size))
    pages_a_row = math.ceil(context / PAGE)
    count = sets * rows * pages_a_row
    tables = torch.randperm(count).int().view(sets, rows, pages_a_row)
    randn = partial(torch.randn, device=common.DEVICE, dtype=common.DTYPE)
    q, k_pages, v_pages = randn(rows, Hq, Dh), *randn(2, count, PAGE, Hkv, Dh)
    max_rows = max_rows_of_range(Hq // Hkv)
    arguments = []
    for table in tables:
        kv_ranges = plan_kv_ranges(table.numpy(), lengths.numpy(), PAGE, max_rows)
        planned = (table, lengths.int(), torch.from_numpy(kv_ranges))
        arguments.append((q, k_pages, v_pages, *(x.to(common.DEVICE) for x in planned)))
    return size, arguments


def mars_attention(q, k_pages, v_pages, table, lengths, kv_ranges):
    inputs = q, k_pages, v_pages, table, lengths
    return triton_paged_attention(*inputs, scale=q.shape[2] ** -0.5, kv_ranges=kv_ranges)


def gather_all(q, k_pages, v_pages, table, lengths, kv_ranges):
    """Attention in plain PyTorch: rows are padded to the longest, for one SDPA call."""
    k = k_pages[table].flatten(1, 2).transpose(1, 2)  # [B, Hkv, T, Dh]
    v = v_pages[table].flatten(1, 2).transpose(1, 2)
    valid = torch.arange(k.shape[2], device=q.device) < lengths[:, None]
    query = q.unflatten(1, (k.shape[1], -1))
    return F.scaled_dot_product_attention(query, k, v, attn_mask=valid[:, None, None]).flatten(1, 2)


FORMS = {"MARS": mars_attention, "gather + SDPA": gather_all}


def capture(function):
    """Runs `function` once and captures its launches. Returns their replay; on a CPU `function`."""
    function()
    if not torch.cuda.is_available():
        return function
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def attention(tiny: bool) -> common.Rows:
    """A row for each shape and form. Keys and values exist only while their row is measured."""
    heads, calls, rounds = ((4, 2, 16), 1, 1) if tiny else (QWEN3_8B, CALLS, 7)

    def measurement(form, rows, context) -> dict:
        size, arguments = attention_case(heads, rows, context, calls)

        def all_calls():
            for i in range(calls):
                form(*arguments[i % len(arguments)])

        times = common.timed(capture(all_calls), rounds)
        row = common.spread("µs", [1e6 * seconds / calls for seconds in times])
        rate = size / row["µs, median"] * 1e6
        return row | {"share of copy": rate / common.rates()["copy"]}

    for rows, context in [(2, 24)] if tiny else [(64, 4096), (1, 4096), (256, 1024), (1, 32768)]:
        for name, form in FORMS.items():
            row = {"model": "Qwen3-8B", "rows": rows, "context": context, "form": name}
            yield row, partial(measurement, form, rows, context)
