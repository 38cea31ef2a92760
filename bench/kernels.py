"""The loss kernels: accuracy, CPU cost, H200 cost, beside the implementations that people use.

    python -m bench.kernels            everything this machine can run (CPU part: about 3 minutes)
    python -m bench.kernels --quick    small shapes, to see that it works; writes no file

1. Accuracy: bf16 hidden states and head; log-probs and gradients against float64. Every gradient ends in bf16: the row
   "all in fp32" is what that alone costs. The PyTorch form rounds where the Triton form does.
2. CPU, N = 4,096, D = 256, V = 32,000 in fp32: the chunked form against the whole logits in plain PyTorch.
3. H200, N = 16,384, D = 4,096, V = 151,936 in bf16. Goals: forward ≤ 30 ms, forward + backward ≤ 92 ms, ≤ 5 GB of extra
   memory, twice as fast as Liger. Without a GPU: "not yet measured".

A peer that fails is shown with its error. Results: bench/results/kernels_{accuracy,cpu,gpu}.json.
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
from bench.common import gpu_clock, interleaved, save, spread, table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NOT_MEASURED = "not yet measured (needs CUDA)"
CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def make_case(N, D, V, dtype, device=DEVICE):
    """hidden, weight, target, per-token inputs; logits of standard deviation 4.5, targets drawn from their softmax."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, device=device).to(dtype)
    weight = torch.randn(V, D, generator=generator, device=device).mul_(4.5 / D ** 0.5).to(dtype)
    target, logprob = (torch.empty(N, dtype=t, device=device) for t in (torch.int64, torch.float32))
    head = weight.float()
    for start in range(0, N, 32):                    # a few rows at a time: the peak is to be the measured call's
        part = slice(start, start + 32)
        logp = (hidden[part].float() @ head.T).log_softmax(-1)
        target[part] = torch.multinomial(logp.exp(), 1, generator=generator)[:, 0]
        logprob[part] = logp.gather(-1, target[part, None])[:, 0]
    old = logprob + 0.2 * torch.randn(N, generator=generator, device=device)
    advantage = torch.randn(N, generator=generator, device=device)
    return hidden, weight, target, old, advantage, torch.full((N,), 1 / N, device=device)


# ---------------------------------------------------------------- the implementations

def whole_logits(hidden, weight, target):
    """The textbook's log-probs [N], with all the logits in memory, in the inputs' type."""
    return (hidden @ weight.T).log_softmax(-1).gather(-1, target[:, None])[:, 0]


def bf16_logits(hidden, weight, target):
    """As a model's forward pass and plain PyTorch have it: logits in the model's type, softmax in fp32."""
    return (hidden @ weight.T).float().log_softmax(-1).gather(-1, target[:, None])[:, 0]


def bf16_softmax(hidden, weight, target):
    """TRL's selective_log_softmax for bf16 logits (no autocast): log-softmax row by row in bf16."""
    rows = [row.log_softmax(-1).gather(-1, y[None])[0] for row, y in zip(hidden @ weight.T, target)]
    return torch.stack(rows).float()


def fp32_logits(hidden, weight, target):
    """Everything in fp32, the products too: slow, and nothing is rounded before the gradients."""
    return whole_logits(hidden.float(), weight.float(), target)


def liger_logprob(hidden, weight, target):
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
    return LigerFusedLinearPPOBase.chunk_forward(hidden[:, None], weight, target[:, None])[:, 0]


def liger_loss(hidden, weight, target, old, advantage, token_weight, *, length=1, compiled=False):
    """Liger's fused linear GRPO loss over N/length sequences, one advantage a sequence, mean over tokens."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo", compiled=compiled,
                                    chunk_size=max(1, 1024 // length))
    shape = (-1, length)
    return loss(hidden.unflatten(0, shape), weight, target.view(shape), torch.ones_like(target).view(shape),
                advantage.view(shape)[:, 0], old_per_token_logps=old.view(shape))[0]


def cce_logprob(hidden, weight, target, filter_eps="auto"):
    from cut_cross_entropy import linear_cross_entropy
    return -linear_cross_entropy(hidden, weight, target, reduction="none", impl="cce", filter_eps=filter_eps).float()


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


# ---------------------------------------------------------------- 1. accuracy

def accuracy(N, D, V):
    case = make_case(N, D, V, torch.bfloat16)
    exact = [x.double() if x.is_floating_point() else x for x in case]
    true_logprob = whole_logits(*exact[:3])
    true_hidden, true_weight = gradients(loss_of(whole_logits), exact)
    mars = lambda *case: kernels.linear_logprob(*case)[0]                                  # noqa: E731
    forms = {"MARS, PyTorch form": (forced("reference", mars), forced("reference", mars_loss)),
             "MARS, Triton form": (forced("triton", mars), forced("triton", mars_loss)),
             "plain PyTorch, bf16 logits": (bf16_logits, loss_of(bf16_logits)),
             "plain PyTorch, all in fp32": (fp32_logits, loss_of(fp32_logits)),
             "TRL's formula on bf16 logits": (bf16_softmax, loss_of(bf16_softmax)),
             "Liger fused linear GRPO": (liger_logprob, liger_loss),
             "cut-cross-entropy": (cce_logprob, loss_of(cce_logprob)),
             "cut-cross-entropy, no filter": (partial(cce_logprob, filter_eps=None),
                                              loss_of(partial(cce_logprob, filter_eps=None)))}
    rows = []
    for name, (logprob_function, loss_function) in forms.items():
        if DEVICE == "cpu" and name.startswith(("cut", "MARS, Triton")):
            rows.append(dict.fromkeys(rows[0], NOT_MEASURED) | {"form": name})
            continue
        try:
            with torch.no_grad():
                logprob = logprob_function(*case[:3])
        except ImportError as error:                 # a peer that is not installed is a row, not the end
            rows.append(dict.fromkeys(rows[0], f"not measured ({error})") | {"form": name})
            continue
        d_hidden, d_weight = gradients(loss_function, case)
        error = (logprob.double() - true_logprob).abs()
        flipped = outside(logprob.double(), case) != outside(true_logprob, case)
        rows.append({"form": name, "log-prob error, mean": error.mean().item(),
                     "log-prob error, max": error.max().item(),
                     "clip decisions wrong": flipped.double().mean().item(),
                     "gradient error, hidden": ((d_hidden - true_hidden).norm() / true_hidden.norm()).item(),
                     "gradient error, weight": ((d_weight - true_weight).norm() / true_weight.norm()).item()})
    return rows


def outside(logprob, case):
    """Whether the clipped branch is taken, so that the token has no gradient."""
    ratio, advantage = (logprob - case[3]).exp(), case[4]
    return ((ratio > 1.2) & (advantage > 0)) | ((ratio < 0.8) & (advantage < 0))


# ---------------------------------------------------------------- 2. CPU

CPU_FORMS = {"MARS, forward + backward": partial(gradients, mars_loss),
             "whole logits, forward + backward": partial(gradients, loss_of(whole_logits)),
             "MARS, log-probs": lambda case: kernels.linear_logprob(*case[:3]),
             "whole logits, log-probs": torch.no_grad()(lambda case: whole_logits(*case[:3]))}


def peak_memory(name, shape):
    """MB that one call adds to the process's peak, measured in a fresh process."""
    command = [sys.executable, "-m", "bench.kernels", "--peak", name, *map(str, shape)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(result.stdout)


def print_peak(name, shape):
    case = make_case(*shape, torch.float32, "cpu")
    CPU_FORMS[name](make_case(8, 8, 8, torch.float32, "cpu"))                               # loads what loads late
    before = process_peak()
    CPU_FORMS[name](case)
    print(process_peak() - before)


def process_peak():
    """Largest resident size of this process so far, in MB."""
    if sys.platform == "linux":                      # there ru_maxrss starts from the parent's
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def cpu(N, D, V, rounds):
    case = make_case(N, D, V, torch.float32, "cpu")
    seconds = interleaved({name: partial(form, case) for name, form in CPU_FORMS.items()}, rounds)
    return [{"form": name, **{f"CPU s, {k}": v for k, v in spread(seconds[name]).items()},
             "peak MB": peak_memory(name, (N, D, V))} for name in CPU_FORMS]


# ---------------------------------------------------------------- 3. H200

def in_chunks(function, hidden, target, *tokens, size=1024):
    """Calls function(hidden, target, *tokens) on one chunk of tokens after the other: their logits fit in memory."""
    inputs = hidden, target, *tokens
    return [function(*(x[start:start + size] for x in inputs)) for start in range(0, len(hidden), size)]


def chunked_gradients(loss_function, case):
    """Forward and backward of each chunk in turn; the head's gradient is summed by autograd, in its own type."""
    weight = case[1].detach().requires_grad_()

    def one(hidden, target, *tokens):
        hidden = hidden.detach().requires_grad_()
        loss_function(hidden, weight, target, *tokens).backward()
        return hidden.grad
    return torch.cat(in_chunks(one, case[0], *case[2:])), weight.grad


def chunked_logprob(logprob_function, case):
    return torch.cat(in_chunks(lambda h, y: logprob_function(h, case[1], y), case[0], case[2]))


def gpu(N, D, V, rounds, length=1024):
    """Rows of time and extra memory; every form in the same interleaved rounds."""
    case = make_case(N, D, V, torch.bfloat16)
    compiled_loss, compiled_logprob = torch.compile(loss_of(bf16_logits)), torch.compile(bf16_logits)
    unfiltered = partial(cce_logprob, filter_eps=None)
    forward = {"MARS": lambda: kernels.linear_logprob(*case[:3]),
               "PyTorch eager, chunked": lambda: chunked_logprob(bf16_logits, case),
               "torch.compile, chunked": lambda: chunked_logprob(compiled_logprob, case),
               "Liger": lambda: chunked_logprob(liger_logprob, case),
               "cut-cross-entropy": lambda: cce_logprob(*case[:3])}
    both = {"MARS": lambda: gradients(mars_loss, case),
            "PyTorch eager, chunked": lambda: chunked_gradients(loss_of(bf16_logits), case),
            "torch.compile, chunked": lambda: chunked_gradients(compiled_loss, case),
            "Liger": lambda: gradients(partial(liger_loss, length=length, compiled=True), case),
            "cut-cross-entropy": lambda: gradients(loss_of(cce_logprob), case),
            "cut-cross-entropy, no filter": lambda: gradients(loss_of(unfiltered), case)}
    forms = {("forward", name): torch.no_grad()(f) for name, f in forward.items()}
    forms |= {("forward + backward", name): f for name, f in both.items()}
    memory, failures = {}, {}
    for key, form in forms.items():
        try:
            memory[key] = extra_memory(form)
        except Exception as error:                   # a peer that does not run on this machine is a row, not the end
            failures[key] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
    seconds = interleaved({key: forms[key] for key in memory}, rounds, clock=gpu_clock)
    products = {"forward": 1, "forward + backward": 3}
    return [{"pass": key[0], "form": key[1],
             **({"failed": failures[key]} if key in failures else
                {**{f"ms, {k}": 1e3 * v for k, v in spread(seconds[key]).items()},
                 "useful TFLOP/s": 2e-12 * N * D * V * products[key[0]] / spread(seconds[key])["median"],
                 "extra GB": memory[key]})} for key in forms]


def extra_memory(form):
    """GB by which the second call's peak exceeds what is allocated before it (the first one compiles)."""
    form()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    form()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def same_columns(rows):
    """Rows with every column of any of them, so that they make a table."""
    columns = {column: "" for row in rows for column in row}
    return [columns | row for row in rows]


def main():
    parser = argparse.ArgumentParser(description="Accuracy and cost of the loss kernels.")
    parser.add_argument("--quick", action="store_true", help="small shapes, no files")
    parser.add_argument("--peak", nargs=4, metavar=("FORM", "N", "D", "V"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        return print_peak(options.peak[0], tuple(map(int, options.peak[1:])))
    shapes = {"accuracy": (512, 512, 32_000), "cpu": (4096, 256, 32_000), "gpu": (16_384, 4096, 151_936)}
    if options.quick:
        shapes = {"accuracy": (64, 64, 4000), "cpu": (256, 32, 4000), "gpu": (2048, 512, 32_000)}
    rounds = 2 if options.quick else 5
    parts = {"accuracy": partial(accuracy, *shapes["accuracy"]), "cpu": partial(cpu, *shapes["cpu"], rounds)}
    if DEVICE == "cuda":
        parts["gpu"] = partial(gpu, *shapes["gpu"], 3 * rounds)
    for name, part in parts.items():
        rows = part()
        print(f"\n{name}: N, D, V = {shapes[name]}\n" + table(same_columns(rows)), flush=True)
        if not options.quick:
            file = "kernels_accuracy_gpu" if (name, DEVICE) == ("accuracy", "cuda") else f"kernels_{name}"
            save(file, "python -m bench.kernels", rows, shape=shapes[name])
    if "gpu" not in parts:
        print(f"\ngpu: N, D, V = {shapes['gpu']}: {NOT_MEASURED}")


if __name__ == "__main__":
    main()
