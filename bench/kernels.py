"""The loss kernels: accuracy, CPU cost, GPU cost, beside the implementations that people use.

    python -m bench.kernels               everything this machine can run, with a GPU its part first
    python -m bench.kernels --only cpu    some of: gpu, accuracy, cpu
    python -m bench.kernels --no-peers    ours alone
    python -m bench.kernels --quick       small shapes, to see that it works; writes no file

accuracy  bf16 hidden states and head; log-probs and gradients against float64. Every gradient ends
          in bf16: the row "all in fp32" is what that alone costs. The PyTorch form rounds where the
          Triton form does.
cpu       N = 4,096, D = 256, V = 32,000 in fp32: the chunked form against the whole logits in plain
          PyTorch (about 3 minutes).
gpu       N = 16,384, D = 4,096, V = 151,936 in bf16; useful operations against a large product on
          the card at hand. Goals on an H200: forward ≤ 30 ms, forward + backward ≤ 92 ms, ≤ 5 GB of
          extra memory, twice as fast as Liger. Without a GPU: "not yet measured".

A peer that fails is shown with its error. Results: bench/results/kernels_{gpu,accuracy,cpu}.json,
written after each round; the accuracy on a GPU goes to kernels_accuracy_gpu.json.
"""

import argparse
import os
import resource
import subprocess
import sys
from functools import partial

import torch

import grpo
import kernels
from bench.common import (
    fits,
    gpu_clock,
    interleaved,
    matmul_rate,
    save,
    spread,
    table,
    why,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NOT_MEASURED = "not yet measured (needs CUDA)"
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
SHAPES = {  # N, D, V
    "gpu": (16_384, 4096, 151_936),
    "accuracy": (512, 512, 32_000),
    "cpu": (4096, 256, 32_000),
}
QUICK_SHAPES = {"gpu": (2048, 512, 32_000), "accuracy": (64, 64, 4000), "cpu": (256, 32, 4000)}


def make_case(N, D, V, dtype, device=DEVICE):
    """Hidden states, head, targets and per-token inputs.

    Logits have a standard deviation of 4.5 and targets are drawn from their softmax, a few rows at
    a time: the peak of memory is to be the measured call's.
    """
    generator = torch.Generator(device).manual_seed(0)
    new = partial(torch.randn, generator=generator, device=device)
    hidden = new(N, D).to(dtype)
    weight = new(V, D).mul_(4.5 / D**0.5).to(dtype)
    target = torch.empty(N, dtype=torch.int64, device=device)
    logprob = torch.empty(N, device=device)
    head = weight.float()
    for start in range(0, N, 32):
        part = slice(start, start + 32)
        logp = (hidden[part].float() @ head.T).log_softmax(-1)
        target[part] = torch.multinomial(logp.exp(), 1, generator=generator)[:, 0]
        logprob[part] = logp.gather(-1, target[part, None])[:, 0]
    old = logprob + 0.2 * new(N)
    advantage = new(N)
    return hidden, weight, target, old, advantage, torch.full((N,), 1 / N, device=device)


# --- the implementations ---


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


def liger_loss(hidden, weight, target, old, advantage, token_weight, *, length=1, compiled=False):
    """Liger's fused linear GRPO loss: N/length sequences, an advantage each, mean over tokens."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0,
        use_ref_model=False,
        loss_type="bnpo",
        compiled=compiled,
        chunk_size=max(1, 1024 // length),
    )
    shape = (-1, length)
    return loss(
        hidden.unflatten(0, shape),
        weight,
        target.view(shape),
        torch.ones_like(target).view(shape),
        advantage.view(shape)[:, 0],
        old_per_token_logps=old.view(shape),
    )[0]


def cce_logprob(hidden, weight, target, filter_eps="auto"):
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(
        hidden, weight, target, reduction="none", impl="cce", filter_eps=filter_eps
    ).float()


def loss_of(logprob_function):
    """The GRPO loss by autograd through a function that gives log-probs."""

    def loss(hidden, weight, target, *tokens):
        return grpo.grpo_loss(logprob_function(hidden, weight, target), *tokens, **CLIP)[0]

    return loss


def mars_loss(*case):
    return kernels.linear_grpo_loss(*case, **CLIP)[0]


def forced(form, function):
    """function with MARS_KERNELS set to form."""

    def run(*arguments):
        os.environ["MARS_KERNELS"] = form
        try:
            return function(*arguments)
        finally:
            del os.environ["MARS_KERNELS"]

    return run


def gradients(loss_function, case):
    hidden, weight = (x.detach().requires_grad_() for x in case[:2])
    loss_function(hidden, weight, *case[2:]).backward()
    return hidden.grad, weight.grad


# --- accuracy ---


def accuracy_forms(peers):
    """name -> (function that gives log-probs, function that gives the loss)"""

    def mars(*case):
        return kernels.linear_logprob(*case)[0]

    forms = {
        "MARS, PyTorch form": (forced("reference", mars), forced("reference", mars_loss)),
        "MARS, Triton form": (forced("triton", mars), forced("triton", mars_loss)),
        "plain PyTorch, bf16 logits": (bf16_logits, loss_of(bf16_logits)),
        "plain PyTorch, all in fp32": (fp32_logits, loss_of(fp32_logits)),
    }
    if peers:
        unfiltered = partial(cce_logprob, filter_eps=None)
        forms |= {
            "TRL's formula on bf16 logits": (bf16_softmax, loss_of(bf16_softmax)),
            "Liger fused linear GRPO": (liger_logprob, liger_loss),
            "cut-cross-entropy": (cce_logprob, loss_of(cce_logprob)),
            "cut-cross-entropy, no filter": (unfiltered, loss_of(unfiltered)),
        }
    return forms


def accuracy(shape, rounds, peers, save_rows):
    case = make_case(*shape, torch.bfloat16)
    exact = [x.double() if x.is_floating_point() else x for x in case]
    true_logprob = whole_logits(*exact[:3])
    true_hidden, true_weight = gradients(loss_of(whole_logits), exact)
    rows = []
    for name, (logprob_function, loss_function) in accuracy_forms(peers).items():
        rows.append({"form": name})
        if DEVICE == "cpu" and name.startswith(("cut", "MARS, Triton")):
            rows[-1]["note"] = NOT_MEASURED
            continue
        try:
            with torch.no_grad():
                logprob = logprob_function(*case[:3])
            d_hidden, d_weight = gradients(loss_function, case)
        except Exception as error:
            rows[-1]["note"] = why(error)
            continue
        error = (logprob.double() - true_logprob).abs()
        flipped = outside(logprob.double(), case) != outside(true_logprob, case)
        hidden_error = (d_hidden - true_hidden).norm() / true_hidden.norm()
        weight_error = (d_weight - true_weight).norm() / true_weight.norm()
        rows[-1] |= {
            "log-prob error, mean": error.mean().item(),
            "log-prob error, max": error.max().item(),
            "clip decisions wrong": flipped.double().mean().item(),
            "gradient error, hidden": hidden_error.item(),
            "gradient error, weight": weight_error.item(),
        }
        save_rows(rows)
    return rows


def outside(logprob, case):
    """Whether the clipped branch is taken, so that the token has no gradient."""
    ratio, advantage = (logprob - case[3]).exp(), case[4]
    return ((ratio > 1.2) & (advantage > 0)) | ((ratio < 0.8) & (advantage < 0))


# --- CPU ---

CPU_FORMS = {
    "MARS, forward + backward": partial(gradients, mars_loss),
    "whole logits, forward + backward": partial(gradients, loss_of(whole_logits)),
    "MARS, log-probs": lambda case: kernels.linear_logprob(*case[:3]),
    "whole logits, log-probs": torch.no_grad()(lambda case: whole_logits(*case[:3])),
}


def peak_memory(name, shape):
    """MB that one call adds to the process's peak, measured in a fresh process."""
    command = [sys.executable, "-m", "bench.kernels", "--peak", name, *map(str, shape)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(result.stdout)


def print_peak(name, shape):
    case = make_case(*shape, torch.float32, "cpu")
    CPU_FORMS[name](make_case(8, 8, 8, torch.float32, "cpu"))  # loads what loads late
    before = process_peak()
    CPU_FORMS[name](case)
    print(process_peak() - before)


def process_peak():
    """Largest resident size of this process so far, in MB."""
    if sys.platform == "linux":  # there ru_maxrss starts from the parent's
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def cpu(shape, rounds, peers, save_rows):
    case = make_case(*shape, torch.float32, "cpu")
    forms = {name: partial(form, case) for name, form in CPU_FORMS.items()}
    peaks = {name: peak_memory(name, shape) for name in forms}

    def rows_of(times):
        rows = []
        for name, seconds in times.items():
            columns = {f"CPU s, {k}": value for k, value in spread(seconds).items()}
            rows.append({"form": name, **columns, "peak MB": peaks[name]})
        return rows

    times = interleaved(forms, rounds, after_round=lambda times: save_rows(rows_of(times)))
    return rows_of(times)


# --- GPU ---


def in_chunks(function, hidden, target, *tokens, size=1024):
    """Calls the function on one chunk of tokens after the other, whose logits fit in memory."""
    inputs = hidden, target, *tokens
    results = []
    for start in range(0, len(hidden), size):
        results.append(function(*(x[start : start + size] for x in inputs)))
    return results


def chunked_gradients(loss_function, case):
    """Forward and backward of each chunk in turn; autograd sums the head's gradient."""
    weight = case[1].detach().requires_grad_()

    def one(hidden, target, *tokens):
        hidden = hidden.detach().requires_grad_()
        loss_function(hidden, weight, target, *tokens).backward()
        return hidden.grad

    return torch.cat(in_chunks(one, case[0], *case[2:])), weight.grad


def chunked_logprob(logprob_function, case):
    return torch.cat(in_chunks(lambda h, y: logprob_function(h, case[1], y), case[0], case[2]))


def gpu_forms(case, peers, length=1024):
    """(pass, form) -> function; ours first."""
    forms = {
        ("forward", "MARS"): lambda: kernels.linear_logprob(*case[:3]),
        ("forward + backward", "MARS"): lambda: gradients(mars_loss, case),
    }
    if not peers:
        return forms
    compiled_loss = torch.compile(loss_of(bf16_logits))
    compiled_logprob = torch.compile(bf16_logits)
    liger = partial(liger_loss, length=length, compiled=True)
    unfiltered = partial(cce_logprob, filter_eps=None)
    forward = {
        "PyTorch eager, chunked": lambda: chunked_logprob(bf16_logits, case),
        "torch.compile, chunked": lambda: chunked_logprob(compiled_logprob, case),
        "Liger": lambda: chunked_logprob(liger_logprob, case),
        "cut-cross-entropy": lambda: cce_logprob(*case[:3]),
    }
    both = {
        "PyTorch eager, chunked": lambda: chunked_gradients(loss_of(bf16_logits), case),
        "torch.compile, chunked": lambda: chunked_gradients(compiled_loss, case),
        "Liger": lambda: gradients(liger, case),
        "cut-cross-entropy": lambda: gradients(loss_of(cce_logprob), case),
        "cut-cross-entropy, no filter": lambda: gradients(loss_of(unfiltered), case),
    }
    forms |= {("forward", name): torch.no_grad()(form) for name, form in forward.items()}
    forms |= {("forward + backward", name): form for name, form in both.items()}
    return forms


def case_bytes(N, D, V):
    """Memory of the GPU part: case, a float copy of the head, gradients, and 5 GB for a form."""
    return 3 * 2 * (N * D + V * D) + 2 * 4 * V * D + 5e9


def gpu(shape, rounds, peers, save_rows):
    """Rows of time and extra memory; every form in the same interleaved rounds."""
    N, D, V = shape
    if not fits(case_bytes(*shape)):
        return [{"note": f"needs {case_bytes(*shape) / 1e9:.0f} GB of free GPU memory"}]
    rate = matmul_rate()
    case = make_case(N, D, V, torch.bfloat16)
    forms = gpu_forms(case, peers)
    products = {"forward": 1, "forward + backward": 3}
    notes = {}

    def rows_of(times):
        rows = []
        for key in forms:
            row = {"pass": key[0], "form": key[1]}
            if times.get(key):
                seconds = spread(times[key])
                speed = 2 * N * D * V * products[key[0]] / seconds["median"]
                row |= {f"ms, {k}": 1e3 * value for k, value in seconds.items()}
                row |= {"useful TFLOP/s": speed / 1e12, "share of a product": speed / rate}
            rows.append(row | notes.get(key, {}))
        save_rows(rows, matmul_flops_per_second=rate)
        return rows

    running = {}
    for key, form in forms.items():
        try:
            notes[key] = {"extra GB": extra_memory(form)}
            running[key] = form
        except Exception as error:
            notes[key] = {"failed": why(error)}
    return rows_of(interleaved(running, rounds, gpu_clock, after_round=rows_of))


def extra_memory(form):
    """GB that the second call's peak adds to what is allocated (the first one compiles)."""
    form()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    form()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


PARTS = {"gpu": gpu, "accuracy": accuracy, "cpu": cpu}  # what needs a GPU goes first


def main():
    parser = argparse.ArgumentParser(description="Accuracy and cost of the loss kernels.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--quick", action="store_true", help="small shapes, no files")
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)  # form, N, D, V
    options = parser.parse_args()
    if options.peak:
        return print_peak(options.peak[0], tuple(map(int, options.peak[1:])))
    shapes = QUICK_SHAPES if options.quick else SHAPES
    rounds = 2 if options.quick else 5
    for part in options.only:
        title = f"\n{part}: N, D, V = {shapes[part]}"
        if part == "gpu" and DEVICE == "cpu":
            print(f"{title}: {NOT_MEASURED}")
            continue
        file = f"kernels_{part}"
        if part == "accuracy" and DEVICE == "cuda":
            file = "kernels_accuracy_gpu"

        def save_rows(rows, file=file, part=part, **more):
            if not options.quick:
                save(file, "python -m bench.kernels", rows, shape=shapes[part], **more)

        rows = PARTS[part](shapes[part], rounds, not options.no_peers, save_rows)
        print(f"{title}\n{table(rows)}", flush=True)


if __name__ == "__main__":
    main()
