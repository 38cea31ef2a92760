"""The kernels: the loss beside the forms that people use, decode attention beside the memory.

    python -m bench.gpu --step loss                     likewise accuracy, attention

accuracy  bf16 hidden states and head; log-probs and gradients against float64.
speed     Useful operations against a large product, in fp32, on a GPU in bf16. Goals on an H200:
          forward ≤ 30 ms, forward + backward ≤ 92 ms, ≤ 5 GB of extra memory, twice as fast as
          Liger. Predicted: 85 % of a large product's rate forward, 82 % with gradients.
attention A call's bytes of keys and values over its time, as a share of a large copy. It is a
          captured graph of calls, page tables in turn, so that no call finds its pages in the L2
          cache. Goal: 85 % with 64 rows of 4k. Predicted: 88 %; 30 % for one row (128 programs of
          four steps each); 70 % where eight rows at a time share 7/8 of their pages, which are
          then read once (two launches in place of one). Beside it: gathering all pages for
          PyTorch's attention.

Results, which no prediction had seen: bench/results/gpu_STEP.json.
Tests: pytest tests/test_bench.py tests/test_bench_gpu.py
"""

import math
from functools import partial

import torch
import torch.nn.functional as F

import grpo
import kernels
from bench import common
from kernels.paged_attention import max_rows_of_range, triton_paged_attention
from sampler.plan import plan_kv_ranges

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
SHAPES = {  # N, D, V
    "cuda": (16_384, 4096, 151_936),
    "cpu": (4096, 256, 32_000),
    "accuracy": (512, 512, 32_000),
    "tiny": (40, 16, 300),
}
CHUNK = 1024  # tokens at a time on a GPU, whose memory does not hold all logits

# --- the loss -------------------------------------------------------------------------------------


def make_case(N, D, V, dtype, where) -> tuple:
    """Hidden states, head, targets, old log-probs, advantages, token weights.

    Logits have a standard deviation of 4.5 and targets are drawn from their softmax.
    """
    generator = torch.Generator(where).manual_seed(0)
    new = partial(torch.randn, generator=generator, device=where)
    hidden = new(N, D).to(dtype)
    weight = new(V, D).mul_(4.5 / D**0.5).to(dtype)
    logp = (hidden.float() @ weight.float().T).log_softmax(-1)
    target = torch.multinomial(logp.exp(), 1, generator=generator)
    old = logp.gather(-1, target)[:, 0] + 0.2 * new(N)
    return hidden, weight, target[:, 0], old, new(N), torch.full((N,), 1 / N, device=where)


def mars_logprob(*case):
    return kernels.linear_logprob(*case)[0]


def mars_loss(*case):
    return kernels.linear_grpo_loss(*case, **CLIP)[0]


def whole_logits(hidden, weight, target):
    """The textbook's log-probs [N], with all the logits in memory, in the inputs' type.

    In bf16 they are those of TRL's selective_log_softmax (no autocast), which goes row by row.
    """
    return (hidden @ weight.T).log_softmax(-1).gather(-1, target[:, None])[:, 0]


def fp32_softmax(hidden, weight, target):
    """As a model's forward pass has it: logits in the model's type, softmax in fp32."""
    return (hidden @ weight.T).float().log_softmax(-1).gather(-1, target[:, None])[:, 0]


def liger_logprob(hidden, weight, target):
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    return LigerFusedLinearPPOBase.chunk_forward(hidden[:, None], weight, target[:, None])[:, 0]


def liger_loss(hidden, weight, target, old, advantage, token_weight, *, compiled=False):
    """Liger's fused linear GRPO loss: N sequences of one token, a mean over tokens."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    options = {"beta": 0.0, "use_ref_model": False, "loss_type": "bnpo", "compiled": compiled}
    loss = LigerFusedLinearGRPOLoss(chunk_size=CHUNK, **options)
    y = target[:, None]
    mask = torch.ones_like(y)
    return loss(hidden[:, None], weight, y, mask, advantage, old_per_token_logps=old[:, None])[0]


def loss_of(logprob_function):
    """The GRPO loss by autograd through a function that gives log-probs."""

    def loss(hidden, weight, target, *tokens):
        return grpo.grpo_loss(logprob_function(hidden, weight, target), *tokens, **CLIP)[0]

    return loss


def gradients(loss_function, case, size: int | None = None):
    """Of hidden states and head; with `size` one chunk of so many tokens after the other."""
    hidden, weight = (x.detach().requires_grad_() for x in case[:2])
    size = size or len(hidden)
    for start in range(0, len(hidden), size):
        part, *tokens = (x[start : start + size] for x in (hidden, *case[2:]))
        loss_function(part, weight, *tokens).backward()
    return hidden.grad, weight.grad


# name -> (gives log-probs, gives the loss)
ACCURACY = {
    "MARS": (mars_logprob, mars_loss),
    "PyTorch, softmax in fp32": (fp32_softmax, loss_of(fp32_softmax)),
    "TRL's formula": (whole_logits, loss_of(whole_logits)),
    "Liger fused linear GRPO": (liger_logprob, liger_loss),
}


def accuracy(bench: common.Bench) -> None:
    """Errors of each form against float64."""
    shape = SHAPES["tiny" if bench.tiny else "accuracy"]
    case = make_case(*shape, torch.bfloat16, common.DEVICE)
    exact = [x.double() if x.is_floating_point() else x for x in case]
    true_logprob = whole_logits(*exact[:3])
    true_gradients = gradients(loss_of(whole_logits), exact)

    def errors(logprob_function, loss_function):
        with torch.no_grad():
            logprob = logprob_function(*case[:3])
        error = (logprob.double() - true_logprob).abs()
        row = {"log-prob error, mean": error.mean().item(), "max": error.max().item()}
        made = gradients(loss_function, case)
        for name, ours, true in zip(("hidden", "weight"), made, true_gradients):
            row[f"gradient error, {name}"] = ((ours - true).norm() / true.norm()).item()
        return row

    for name, forms in ACCURACY.items():
        bench.measure({"form": name}, partial(errors, *forms))


def speed(bench: common.Bench) -> None:
    """Time and extra memory of each form; a product is one pass over head and states."""
    cuda = common.DEVICE.type == "cuda"
    N, D, V = SHAPES["tiny" if bench.tiny else common.DEVICE.type]
    case = make_case(N, D, V, common.DTYPE, common.DEVICE)
    plain, liger = loss_of(fp32_softmax), partial(liger_loss, compiled=cuda)
    size = CHUNK if cuda else N
    # pass, form, products, call
    forms = [
        ("forward", "MARS", 1, lambda: mars_logprob(*case[:3])),
        ("forward + backward", "MARS", 3, lambda: gradients(mars_loss, case)),
        ("forward + backward", "PyTorch", 3, lambda: gradients(plain, case, size)),
        ("forward + backward", "Liger", 3, lambda: gradients(liger, case)),
    ]

    def one(call, products) -> dict:
        call()  # compiles
        row = {"extra GB": common.added_bytes(call) / 1e9}
        row |= common.spread("ms", [1e3 * seconds for seconds in common.timed(call)])
        rate = 2 * N * D * V * products / row["ms, median"] * 1e3
        share = rate / common.rates()["product"]
        return row | {"TFLOP/s": rate / 1e12, "share of a product": share}

    for kind, name, products, call in forms:
        bench.measure({"pass": kind, "form": name}, partial(one, call, products))


# --- decode attention -----------------------------------------------------------------------------

# Heads of queries, heads of keys, their size.
HEADS = {"Qwen3-8B": (32, 8, 128), "Qwen2.5-7B": (28, 4, 128), "tiny": (4, 2, 16)}
PAGE = 64  # tokens, as the sampler has them on a GPU
COLD = 512 << 20  # bytes that a graph reads before it comes back to a page: ten L2 caches
CALLS = 32  # launches in a captured graph
# Model, rows, context, and what the rows hold: pages of their own, lengths from 1/8 to 15/8 of the
# context, or eight at a time 7/8 of their pages in common.
ATTENTION = [
    ("Qwen3-8B", 64, 4096, "own"),
    ("Qwen3-8B", 64, 4096, "shared"),
    ("Qwen3-8B", 1, 4096, "own"),
    ("Qwen3-8B", 64, 4096, "mixed"),
    ("Qwen3-8B", 256, 1024, "own"),
    ("Qwen3-8B", 1, 32768, "own"),
    ("Qwen2.5-7B", 64, 4096, "own"),
]


def attention_case(model: str, rows: int, context: int, pages: str, calls: int = CALLS) -> tuple:
    """(bytes that a call reads, arguments of each call): page tables of different random pages."""
    Hq, Hkv, Dh = HEADS[model]
    lengths = torch.full((rows,), context)
    if pages == "mixed":
        lengths = context * torch.linspace(2, 30, rows).int() // 16
    token = 2 * Hkv * Dh * 2
    sets = min(calls, math.ceil(COLD / (int(lengths.sum()) * token)))
    pages_a_row = math.ceil(int(lengths.max()) / PAGE)
    count = sets * rows * pages_a_row
    tables = torch.randperm(count).int().view(sets, rows, pages_a_row)
    shared = pages_a_row * 7 // 8 if pages == "shared" else 0
    for first in range(0, rows, 8):
        tables[:, first : first + 8, :shared] = tables[:, first : first + 1, :shared]
    saved = (rows - math.ceil(rows / 8)) * shared * PAGE
    new = partial(torch.randn, device=common.DEVICE, dtype=common.DTYPE)
    q, k_pages, v_pages = new(rows, Hq, Dh), *new(2, count, PAGE, Hkv, Dh)
    given = []
    for table in tables:
        max_rows = max_rows_of_range(Hq // Hkv)
        kv_ranges = plan_kv_ranges(table.numpy(), lengths.numpy(), PAGE, max_rows)
        planned = (table, lengths.int(), torch.from_numpy(kv_ranges))
        given.append((q, k_pages, v_pages, *(x.to(common.DEVICE) for x in planned)))
    return (int(lengths.sum()) - saved) * token, given


def mars_attention(q, k_pages, v_pages, table, lengths, kv_ranges):
    inputs = q, k_pages, v_pages, table, lengths
    return triton_paged_attention(*inputs, scale=q.shape[2] ** -0.5, kv_ranges=kv_ranges)


def gather_all(q, k_pages, v_pages, table, lengths, kv_ranges):
    """Plain PyTorch as one would write it: every row padded to the longest, one SDPA."""
    k = k_pages[table].flatten(1, 2).transpose(1, 2)  # [B, Hkv, T, Dh]
    v = v_pages[table].flatten(1, 2).transpose(1, 2)
    valid = torch.arange(k.shape[2], device=q.device) < lengths[:, None]
    query = q.unflatten(1, (k.shape[1], -1))
    return F.scaled_dot_product_attention(query, k, v, attn_mask=valid[:, None, None]).flatten(1, 2)


FORMS = {"MARS": mars_attention, "gather + SDPA": gather_all}


def captured(function):
    """A CUDA graph of what `function` launches, after it ran once; on a CPU itself."""
    function()
    if not torch.cuda.is_available():
        return function
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def attention(bench: common.Bench) -> None:
    """A row for each form of each shape, whose keys and values exist for as long as it runs."""
    calls, rounds = (1, 1) if bench.tiny else (CALLS, 7)

    def one(shape, form) -> dict:
        size, given = attention_case(*shape, calls)

        def all_calls():
            for i in range(calls):
                form(*given[i % len(given)])

        times = common.timed(captured(all_calls), rounds)
        row = common.spread("µs", [1e6 * seconds / calls for seconds in times])
        rate = size / row["µs, median"] * 1e6
        return row | {"TB/s": rate / 1e12, "share of copy": rate / common.rates()["copy"]}

    for shape in [("tiny", 2, 24, "mixed")] if bench.tiny else ATTENTION:
        for name, form in FORMS.items():
            row = dict(zip(("model", "rows", "context", "pages"), shape)) | {"form": name}
            bench.measure(row, partial(one, shape, form))
