"""The training step: packed against padded.

    python -m bench.train_step                            on one thread of a CPU, two minutes
    python -m bench.gpu --step training_step              on a GPU
    python -m bench.gpu --part speed                      what is open on a GPU, with predictions

The packed step is the trainer's (micro_batches, backward). The padded step is what code around
Hugging Face models does: batches of 4 samples, right-padded, with an attention mask, in random
order or sorted by length. All have the same weights and samples, and a form whose loss differs has
failed. A CPU's model is a small Qwen3 in fp32. A GPU's has the size of Qwen3-0.6B, in bf16, and
AdamW's step is included.

There are as many samples of System 2 as of System 1. Their log-normal LENGTHS are scaled by 1/16 on
a CPU, by 1/2 on a GPU. The paper states only limits: medians and spreads are our assumption.

Results: bench/results/gpu_training_step.json. Tests: pytest tests/test_bench.py
"""

import argparse
import math
import random
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

import kernels
import trainer
from bench import common
from bench.sampler import QWEN3_0_6B, SMALL, TINY, force_attention, random_model, random_tokens
from grpo import token_weights
from rollout import Sample
from sampler import Completion
from trainer.policy import layers

OBJECTIVE = {"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0, "temperature": 1.0}
PADDED_ROWS = 4
# role, median length, σ of its logarithm, steps, share of tokens that are sampled
LENGTHS = (("sys2", 6400, 0.6, 5, 1 / 3), ("sys1", 1920, 0.7, 1, 1 / 5))
LONGEST = 31_744


def draw_samples(count: int, scale: float, vocabulary: int) -> list[Sample]:
    """`count` samples of each role, in random order. Their lengths are LENGTHS times `scale`."""
    rng = random.Random(0)
    samples = []
    for role, median, sigma, steps, share in LENGTHS:
        for i in range(count):
            length = min(rng.lognormvariate(math.log(median), sigma), LONGEST) * scale
            advantage = rng.choice((-1.0, 1.0))
            sample = Sample(role, question_index=0, attempt=i, advantage=advantage, loss_weight=1)
            sampled = max(1, int(length / steps * share))
            prompt = max(2, int(length / steps) - sampled)
            for _ in range(steps):
                sample.append_given(random_tokens(rng, prompt, vocabulary))
                tokens = random_tokens(rng, sampled, vocabulary)
                logprobs = [rng.gauss(-math.log(vocabulary), 0.1) for _ in tokens]
                sample.append_sampled(Completion(tokens, logprobs, "length"))
            samples.append(sample)
    rng.shuffle(samples)
    return samples


def packed_step(policy, batches) -> tuple[float, int]:
    """The trainer's step. Returns the loss and the number of tokens computed."""
    stats = trainer.backward(policy, batches, **OBJECTIVE)
    return sum(float(s["loss"]) for s in stats), sum(batch.tokens.numel() for batch in batches)


def padded_step(model, batches) -> tuple[float, int]:
    """The same step by the stock model. Returns the loss and the tokens computed, with padding.

    batches: micro-batches of one sample each.
    """
    total = computed = 0
    for start in range(0, len(batches), PADDED_ROWS):
        rows = batches[start : start + PADDED_ROWS]
        tokens = pad_sequence([batch.tokens[0] for batch in rows], batch_first=True)  # [B, T]
        mask = pad_sequence([torch.ones_like(batch.tokens[0]) for batch in rows], batch_first=True)
        T = tokens.shape[1]
        positions = torch.cat([batch.loss_positions + i * T for i, batch in enumerate(rows)])
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            out = model.base_model(tokens, attention_mask=mask, use_cache=False)
        states = out.last_hidden_state.flatten(0, 1)[positions]  # [N, D]
        states = states.to(torch.bfloat16 if tokens.is_cuda else torch.float32)
        names = ("target", "old_logprob", "advantage", "weight")
        columns = [torch.cat([getattr(batch, name) for batch in rows]) for name in names]
        loss, _ = kernels.linear_grpo_loss(states, model.lm_head.weight, *columns, **OBJECTIVE)
        loss.backward()
        total += loss.item()
        computed += tokens.numel()
    return total, computed


FORMS = {
    "packed, not compiled": {"packed": True, "compiled": False},
    "packed, kept, not compiled": {"packed": True, "recompute": False, "compiled": False},
    "packed": {"packed": True},
    "packed, activations kept": {"packed": True, "recompute": False},
    "padded, random order": {},
    "padded, sorted by length": {"by_length": True},
}
# What is open, with predictions for an H200. Kernels took 0.94 s of its step with kept activations
# (0.99 s) and 1.20 s of the step that recomputes them (1.48 s). Attention took 0.38 and 0.47 s of
# these: 0.09 s a forward pass, 0.29 s the backward pass. In a prefill flash-attn 4 needed 0.53 of
# PyTorch's time; we assume 0.6 backward, and 0.01 s a pass for repeated keys. The host needs 1.2 ms
# for each of 140 layers in each pass: forward, recomputed, backward. With reentrant checkpointing
# the GPU should be as rarely idle as in the kept step. If the host works all the time, flash-attn 4
# gains nothing.
PYTORCH = {"packed": True, "attention": "PyTorch"}
FLASH_4 = {"packed": True, "attention": "flash-attn 4"}
OPEN = {
    "recomputed": PYTORCH | {"prediction": "1.48 s, idle 0.28, host 0.5"},
    "kept": PYTORCH | {"recompute": False, "prediction": "0.99 s, idle 0.05, host 0.3"},
    "recomputed, flash-attn 4": FLASH_4 | {"prediction": "1.26 s, idle 0.28"},
    "kept, flash-attn 4": FLASH_4 | {"recompute": False, "prediction": "0.83 s, idle 0.05"},
    "reentrant": PYTORCH | {"recompute": "reentrant", "prediction": "1.25 s, idle 0.05"},
}


def reentrant(forward: Callable, *inputs, **options):
    """A layer with reentrant checkpointing: its first forward pass makes no graph."""
    run = partial(forward, **options)
    return checkpoint(run, *inputs, use_reentrant=True, preserve_rng_state=False)


def idleness(step: Callable) -> dict:
    """Columns: the seconds of a profiled step, and how many of them the GPU idles, the host works.

    A call of CUDA that takes more than 30 µs waits for the GPU or for room in its queue.
    """
    activity = getattr(torch.profiler.ProfilerActivity, common.DEVICE.type.upper())
    with torch.profiler.profile(activities=[activity]) as profile:
        start = common.clock()
        step()
        seconds = common.clock() - start
    events = profile.events()
    busy = sum(event.self_device_time_total for event in events) / 1e6
    calls = (event.self_cpu_time_total for event in events)  # on a GPU only calls of CUDA
    waits = sum(call for call in calls if call > 30) / 1e6
    return {"profiled, s": seconds, "idle, s": seconds - busy, "host, s": seconds - waits}


def setting(tiny: bool) -> tuple[dict, list[Sample], int]:
    """The size of the model, the samples, and the tokens of a micro-batch."""
    size, count, scale, capacity = SMALL, 16, 1 / 16, 2048
    if tiny:
        size, count, scale, capacity = TINY, 2, 1 / 64, 256
    elif torch.cuda.is_available():
        size, count, scale, capacity = QWEN3_0_6B, 16, 1 / 2, 16_384
    return size, draw_samples(count, scale, size["vocab_size"]), capacity


def make_step(
    size, samples, capacity, *, packed=False, recompute=True, compiled=True, by_length=False
) -> tuple[torch.nn.Module, Callable]:
    """A random model, and a step, which returns (loss, tokens computed, the gradient's norm).

    recompute: True, False, or "reentrant". On a CPU only "reentrant" recomputes.
    """
    device = common.DEVICE
    cuda = device.type == "cuda"
    model = random_model(size, device)
    weights = token_weights([torch.tensor(sample.mask) for sample in samples], len(samples))
    batches = trainer.micro_batches(samples, weights, capacity if packed else 1, device)
    if by_length:
        batches.sort(key=lambda batch: batch.tokens.numel())
    if packed:
        form = {"recompute_activations": cuda and recompute is True}
        if compiled:
            form["compiler"] = "eager" if size is TINY else trainer.compiler_of(device)
        policy = trainer.Policy(model, bf16=cuda, **form)
        for layer in layers(model) if recompute == "reentrant" else ():
            layer.forward = partial(reentrant, layer.forward)
        run = partial(packed_step, policy, batches)
    else:
        run = partial(padded_step, model, batches)
        if cuda:
            model.train()  # it has no dropout
            model.gradient_checkpointing_enable()
    optimizer = trainer.make_optimizer(model, 1e-6)

    def step() -> tuple[float, int, float]:
        optimizer.zero_grad(set_to_none=True)
        loss, computed = run()
        norm = trainer.clip_gradient(model, 1.0)
        if cuda:
            optimizer.step()
        return loss, computed, norm

    return model, step


def steps(tiny: bool, forms: dict = FORMS) -> common.Rows:
    """A row for each form; on a GPU with an optimizer step."""
    cuda = torch.cuda.is_available()
    size, samples, capacity = setting(tiny)
    expected = []  # the loss and the gradient's norm of the first form

    def measurement(attention=None, prediction=None, **form) -> dict:
        with force_attention(attention):
            _, step = make_step(size, samples, capacity, **form)
            loss, computed, norm = step()
            if not expected:
                expected.extend((loss, norm))
            for value, first in zip((loss, norm), expected):
                if abs(value - first) > (0.02 if cuda else 1e-5) * max(1.0, abs(first)):
                    raise ValueError(f"loss or gradient differs: {loss}, {norm}, not {expected}")
            row = {"peak GB": common.peak_bytes(step) / 1e9, "tokens computed": computed}
            row |= common.spread("s", common.timed(step, 1 if tiny else 3))
            return row | (idleness(step) if prediction else {})

    for name, form in forms.items():
        # Without a GPU a policy neither recomputes nor compiles: these forms would equal "packed".
        if cuda or tiny or not form.keys() & {"recompute", "compiled"}:
            row = {"form": name, "prediction": form.get("prediction", math.nan)}
            yield row, partial(measurement, **form)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    if torch.cuda.is_available():
        sys.exit("this measures a CPU; on a GPU: python -m bench.gpu --step training_step")
    torch.set_num_threads(1)
    common.run("train_step_cpu", steps)
