"""The loss kernels: accuracy and cost beside the implementations that people use.

    python -m bench.kernels                      accuracy, and time on a CPU (about 3 minutes)
    python -m bench.kernels --tiny               the same lines in seconds; writes no file
    python -m bench.gpu --step loss_peers        on a GPU

accuracy  bf16 hidden states and head; log-probs and gradients against float64. Every gradient ends
          in bf16: the row "all in fp32" is what that alone costs.
cpu       N = 4,096, D = 256, V = 32,000 in fp32: the chunked form against whole logits in plain
          PyTorch.
gpu       N = 16,384, D = 4,096, V = 151,936 in bf16; useful operations against a large product on
          the card at hand. Goals on an H200: forward ≤ 30 ms, forward + backward ≤ 92 ms, ≤ 5 GB of
          extra memory, twice as fast as Liger.

Predictions, made before any GPU was seen: 85 % of a large product's rate forward, 82 % with
gradients; the memory of one chunk of logits and of the head's gradient in fp32.

Results: bench/results/kernels_PART.json. Tests: pytest tests/test_bench.py
"""

import argparse
import os
from functools import partial

import torch

import grpo
import kernels
from bench import common

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
SHAPES = {  # part -> N, D, V
    "full": {
        "gpu": (16_384, 4096, 151_936),
        "accuracy": (512, 512, 32_000),
        "cpu": (4096, 256, 32_000),
    },
    "tiny": {"gpu": (40, 16, 300), "accuracy": (24, 16, 300), "cpu": (64, 16, 300)},
}
LIGER_ROWS = 1024  # tokens of a chunk
PRODUCTS = {"forward": 1, "forward + backward": 3}
SHARES = {"forward": 0.85, "forward + backward": 0.82}  # predicted, of a large product's rate


def make_case(N, D, V, dtype, where) -> tuple:
    """Hidden states, head, targets, old log-probs, advantages, token weights.

    Logits have a standard deviation of 4.5 and targets are drawn from their softmax, a few rows at
    a time: the peak of memory is to be the measured call's.
    """
    generator = torch.Generator(where).manual_seed(0)
    new = partial(torch.randn, generator=generator, device=where)
    hidden = new(N, D).to(dtype)
    weight = new(V, D).mul_(4.5 / D**0.5).to(dtype)
    target = torch.empty(N, dtype=torch.int64, device=where)
    logprob = torch.empty(N, device=where)
    head = weight.float()
    for start in range(0, N, 32):
        part = slice(start, start + 32)
        logp = (hidden[part].float() @ head.T).log_softmax(-1)
        target[part] = torch.multinomial(logp.exp(), 1, generator=generator)[:, 0]
        logprob[part] = logp.gather(-1, target[part, None])[:, 0]
    old = logprob + 0.2 * new(N)
    return hidden, weight, target, old, new(N), torch.full((N,), 1 / N, device=where)


# --- the implementations --------------------------------------------------------------------------


def whole_logits(hidden, weight, target):
    """The textbook's log-probs [N], with all the logits in memory, in the inputs' type."""
    return (hidden @ weight.T).log_softmax(-1).gather(-1, target[:, None])[:, 0]


def bf16_logits(hidden, weight, target):
    """As a model's forward pass has it: logits in the model's type, softmax in fp32."""
    return (hidden @ weight.T).float().log_softmax(-1).gather(-1, target[:, None])[:, 0]


def bf16_softmax(hidden, weight, target):
    """TRL's selective_log_softmax for bf16 logits (no autocast): log-softmax row by row in bf16."""
    rows = []
    for row, y in zip(hidden @ weight.T, target, strict=True):
        rows.append(row.log_softmax(-1).gather(-1, y[None])[0])
    return torch.stack(rows).float()


def fp32_logits(hidden, weight, target):
    """Everything in fp32, the products too: slow, and nothing is rounded before the gradients."""
    return whole_logits(hidden.float(), weight.float(), target)


def liger_logprob(hidden, weight, target):
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    return LigerFusedLinearPPOBase.chunk_forward(hidden[:, None], weight, target[:, None])[:, 0]


def liger_loss(hidden, weight, target, old, advantage, token_weight, *, compiled=False):
    """Liger's fused linear GRPO loss: N sequences of one token, a mean over tokens."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    options = {"beta": 0.0, "use_ref_model": False, "loss_type": "bnpo", "compiled": compiled}
    loss = LigerFusedLinearGRPOLoss(chunk_size=LIGER_ROWS, **options)
    y = target[:, None]
    mask = torch.ones_like(y)
    return loss(hidden[:, None], weight, y, mask, advantage, old_per_token_logps=old[:, None])[0]


def loss_of(logprob_function):
    """The GRPO loss by autograd through a function that gives log-probs."""

    def loss(hidden, weight, target, *tokens):
        return grpo.grpo_loss(logprob_function(hidden, weight, target), *tokens, **CLIP)[0]

    return loss


def mars_logprob(*case):
    return kernels.linear_logprob(*case)[0]


def mars_loss(*case):
    return kernels.linear_grpo_loss(*case, **CLIP)[0]


def forced(form, function):
    """function with MARS_KERNELS set to form."""

    def run(*arguments):
        before = os.environ.get("MARS_KERNELS", "")
        os.environ["MARS_KERNELS"] = form
        try:
            return function(*arguments)
        finally:
            os.environ["MARS_KERNELS"] = before

    return run


def gradients(loss_function, case):
    hidden, weight = (x.detach().requires_grad_() for x in case[:2])
    loss_function(hidden, weight, *case[2:]).backward()
    return hidden.grad, weight.grad


def chunked_gradients(case, size=1024):
    """PyTorch's forward and backward of one chunk after the other, whose logits fit in memory."""
    hidden, weight = (x.detach().requires_grad_() for x in case[:2])
    loss = loss_of(bf16_logits)
    for start in range(0, len(hidden), size):
        part, *tokens = (x[start : start + size] for x in (hidden, *case[2:]))
        loss(part, weight, *tokens).backward()
    return hidden.grad, weight.grad


# --- accuracy -------------------------------------------------------------------------------------

# name -> (gives log-probs, gives the loss)
ACCURACY = {
    "MARS, PyTorch form": (forced("reference", mars_logprob), forced("reference", mars_loss)),
    "MARS, Triton form": (forced("triton", mars_logprob), forced("triton", mars_loss)),
    "plain PyTorch, bf16 logits": (bf16_logits, loss_of(bf16_logits)),
    "plain PyTorch, all in fp32": (fp32_logits, loss_of(fp32_logits)),
    "TRL's formula on bf16 logits": (bf16_softmax, loss_of(bf16_softmax)),
    "Liger fused linear GRPO": (liger_logprob, liger_loss),
}


def accuracy(tiny: bool, rows: list[dict], write) -> None:
    """Errors of each form against float64."""
    N, D, V = SHAPES["tiny" if tiny else "full"]["accuracy"]
    case = make_case(N, D, V, torch.bfloat16, common.device())
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
        common.measure(rows, write, {"form": name}, {}, partial(errors, *forms))


# --- CPU ------------------------------------------------------------------------------------------


def cpu(tiny: bool, rows: list[dict], write) -> None:
    """CPU seconds of forward and backward."""
    N, D, V = SHAPES["tiny" if tiny else "full"]["cpu"]
    case = make_case(N, D, V, torch.float32, "cpu")
    forms = {
        "MARS": lambda: gradients(mars_loss, case),
        "whole logits": lambda: gradients(loss_of(whole_logits), case),
    }
    for name, seconds in common.interleaved(forms, 1 if tiny else 5).items():
        columns = {f"CPU s, {key}": value for key, value in common.spread(seconds).items()}
        rows.append({"form": name} | columns)
    write(rows)


# --- GPU ------------------------------------------------------------------------------------------


def gpu_forms(case) -> dict:
    """(pass, form) -> function; ours first."""
    liger = partial(liger_loss, compiled=common.device().type == "cuda")
    return {
        ("forward", "MARS"): lambda: kernels.linear_logprob(*case[:3]),
        ("forward + backward", "MARS"): lambda: gradients(mars_loss, case),
        ("forward + backward", "PyTorch, chunked"): lambda: chunked_gradients(case),
        ("forward + backward", "Liger"): lambda: gradients(liger, case),
    }


def peers_too(tiny: bool, rows: list[dict], write, rate: dict) -> None:
    accuracy(tiny, rows, write)
    gpu(tiny, rows, write, rate)


def case_bytes(N, D, V) -> float:
    """Memory of the GPU part: case, a float copy of the head, gradients, and 5 GB for a form."""
    return 3 * 2 * (N * D + V * D) + 2 * 4 * V * D + 5e9


def gpu(tiny: bool, rows: list[dict], write, rate: dict, peers: bool = True) -> None:
    """Time and extra memory of each form; rate: see bench.common.rates."""
    N, D, V = SHAPES["tiny" if tiny else "full"]["gpu"]
    product = rate["product"]
    if case_bytes(N, D, V) > common.free_bytes():
        raise MemoryError(f"needs {case_bytes(N, D, V) / 1e9:.0f} GB of free GPU memory")
    case = make_case(N, D, V, torch.bfloat16, common.device())

    def one(form, flops):
        form()  # compiles
        row = {"extra GB": common.peak_bytes(form) / 1e9}
        seconds = common.spread(
            common.interleaved({"form": form}, 1 if tiny else 5, common.clock)["form"]
        )
        row |= {f"ms, {key}": 1e3 * value for key, value in seconds.items()}
        speed = flops / seconds["median"]
        return row | {"TFLOP/s": speed / 1e12, "share of a product": speed / product}

    for (kind, name), form in gpu_forms(case).items():
        flops = 2 * N * D * V * PRODUCTS[kind]
        predicted = {}
        if name == "MARS":
            share = SHARES[kind]
            extra = 0.6 if kind == "forward" else 0.6 + (4 + 2) * V * D / 1e9 + 2 * N * D / 1e9
            ms = 1e3 * flops / product / share
            predicted = {"ms": ms, "share of a product": share, "extra GB": extra}
        elif not peers:
            continue
        common.measure(
            rows, write, {"pass": kind, "form": name}, predicted, partial(one, form, flops)
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small shapes, no files")
    tiny = parser.parse_args().tiny
    for name, part in (("accuracy", accuracy), ("cpu", cpu)):

        def write(rows, name=name):
            if not tiny:
                common.save(f"kernels_{name}", "python -m bench.kernels", rows)

        rows = []
        part(tiny, rows, write)
        print(f"\n{name}\n{common.table(rows)}", flush=True)


if __name__ == "__main__":
    main()
