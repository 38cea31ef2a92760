"""The training step: packed against padded on a CPU, and its speed and memory on a GPU.

    python -m bench.train_step           what this machine can measure: with CUDA part 2, else part 1 (2 minutes)
    python -m bench.train_step --quick   both with tiny shapes, to see that they work; writes no file

1. CPU, one thread, a small Qwen3 in fp32: the trainer (policy.micro_batches, policy.backward) against the step that
   code around Hugging Face models takes: batches of 4 samples in random order, right-padded, an attention mask. Same
   weights, samples and loss; all forms must give the same loss and gradients, or there is no table. Three padded forms:
   logits of the loss tokens only, so that nothing but the packing differs (goal: packed ≥ 1.5 times as fast); the same
   with samples sorted by length, which keeps padding low but makes batches of a kind; and logits of all positions.
2. H200: a step (gradients, clipping, AdamW) of a random model of Qwen3-1.7B's shape in bf16, with and without
   checkpointing: tokens/s, share of the 790 TFLOP/s peak, peak memory beside what the memory plan counts before
   activations. Without a GPU: "not yet measured". Operations are the model's: 6·(weights of the layers·T + D·V·N) and,
   for causal attention, 6·layers·Hq·Dh·Σ length²; recomputing counts as nothing.

Samples: as many of System 2 as of System 1 (that is what balancing leaves). Lengths are log-normal: System 2 with
median 6,400 tokens and σ 0.6, a third of it sampled, in five steps; System 1 with median 1,920 and σ 0.7, its last
fifth sampled; 31,744 at most. The paper gives the limits only, so medians and spreads are our assumption. Part 1 has
1/16 of these lengths, part 2 a half. Results: bench/results/train_step_{cpu,gpu}.json.
"""
import argparse
import math
import random
import time
from functools import partial
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import grpo
import kernels
from trainer import policy as trainer
from bench.common import interleaved, save, spread, table
from rollout import Sample

OBJECTIVE = {"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0, "temperature": 1.0}
PEAK = 790e12                                               # FLOP/s of bf16 products on one H200, measured elsewhere
NOT_MEASURED = "not yet measured on a GPU"
SMALL = dict(vocab_size=8192, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
             num_key_value_heads=4, head_dim=32, tie_word_embeddings=True)
QWEN3_1_7B = dict(vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
                  num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
                  max_position_embeddings=40_960)


def draw_samples(count: int, scale: float, vocabulary: int, seed: int = 0) -> list[Sample]:
    """`count` samples of each role in random order, lengths as the docstring above has them times `scale`."""
    rng, samples = random.Random(seed), []
    for role, median, sigma, steps, share in (("sys2", 6400, 0.6, 5, 1 / 3), ("sys1", 1920, 0.7, 1, 1 / 5)):
        for i in range(count):
            length = min(rng.lognormvariate(math.log(median), sigma), 31_744) * scale / steps
            sample = Sample(role, group=0, trajectory=i, advantage=rng.choice((-1.0, 1.0)), drawn=1)
            for _ in range(steps):
                sampled = max(1, int(length * share))
                sample.give([rng.randrange(vocabulary) for _ in range(max(2, int(length) - sampled))])
                sample.tokens += [rng.randrange(vocabulary) for _ in range(sampled)]
                sample.mask += [True] * sampled
                sample.logprobs += [rng.gauss(-math.log(vocabulary), 0.1) for _ in range(sampled)]
            samples.append(sample)
    rng.shuffle(samples)
    return samples


def weigh(samples: list[Sample]) -> list[torch.Tensor]:
    """grpo.token_weights of all samples of a step; there are as many of either role."""
    return grpo.token_weights([torch.tensor(sample.mask) for sample in samples], len(samples) // 2)


def random_model(shape: dict, device, attention: str):
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(Qwen3Config(**shape), attn_implementation=attention,
                                                dtype=torch.float32)


# ---------------------------------------------------------------- 1. packed and padded

def padded_loss(model, samples, all_logits):
    """Σ w·ℓ of one right-padded batch [B, T] by the stock model; `samples` are (sample, weights, tokens of input)."""
    batch = trainer.make_micro_batch(*map(list, zip(*samples)), "cpu")          # for what a loss token needs
    width, starts = max(batch.lengths), batch.cu.long()
    tokens, mask = (torch.zeros(len(samples), width, dtype=torch.long) for _ in range(2))
    for row, length in enumerate(batch.lengths):
        tokens[row, :length], mask[row, :length] = batch.tokens[0, starts[row]:starts[row + 1]], 1
    row = torch.bucketize(batch.at, starts[1:], right=True)
    at = row * width + batch.at - starts[row]
    given = batch.old_logprob, batch.advantage, batch.weight
    if not all_logits:
        hidden = model.base_model(tokens, attention_mask=mask, use_cache=False).last_hidden_state.flatten(0, 1)[at]
        return kernels.linear_grpo_loss(hidden, model.lm_head.weight, batch.target, *given, **OBJECTIVE)[0]
    logprobs = model(tokens, attention_mask=mask, use_cache=False).logits.log_softmax(-1)               # [B, T, V]
    logprob = logprobs.flatten(0, 1)[at].gather(-1, batch.target[:, None])[:, 0]
    return grpo.grpo_loss(logprob, *given, clip_low=0.2, clip_high=0.2)[0]


def padded_step(model, samples, *, by_length=False, all_logits=False, rows=4):
    """(loss, tokens computed, padding included) of a whole step in batches of `rows` samples."""
    rest = [(s, w, max(i for i, trained in enumerate(s.mask) if trained)) for s, w in zip(samples, weigh(samples))]
    rest = sorted(rest, key=lambda entry: entry[2]) if by_length else rest
    total, computed = 0.0, 0
    for batch in (rest[start:start + rows] for start in range(0, len(rest), rows)):
        loss = padded_loss(model, batch, all_logits)
        loss.backward()
        total, computed = total + loss.item(), computed + len(batch) * max(length for *_, length in batch)
    return total, computed


def packed_step(policy, samples, capacity):
    """The same by the trainer."""
    batches = trainer.micro_batches(samples, weigh(samples), capacity, torch.device("cpu"))
    stats = trainer.backward(policy, batches, [None] * len(batches), **OBJECTIVE)
    return sum(s["loss"].item() for s in stats), sum(batch.tokens.numel() for batch in batches)


def cpu(count, scale, capacity, shape, rounds):
    """Rows of time and tokens; ValueError if a form disagrees with the packed one about loss or gradients."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    samples = draw_samples(count, scale, shape["vocab_size"])
    policy, stock = (random_model(shape, "cpu", attention) for attention in ("mars_packed", "sdpa"))
    policy = trainer.Policy(policy, bf16=False)
    forms = {"packed": (policy, partial(packed_step, policy, samples, capacity)),
             "padded, random order": (stock, partial(padded_step, stock, samples)),
             "padded, sorted by length": (stock, partial(padded_step, stock, samples, by_length=True)),
             "padded, logits everywhere": (stock, partial(padded_step, stock, samples, all_logits=True))}
    loss, computed, error = {}, {}, {}
    for name, (model, step) in forms.items():
        model.zero_grad()
        loss[name], computed[name] = step()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        reference = gradient if name == "packed" else reference
        error[name] = ((gradient - reference).norm() / reference.norm()).item()
        if abs(loss[name] - loss["packed"]) > 1e-5 or error[name] > 1e-4:
            raise ValueError(f"{name} and packed disagree: loss {loss[name]} and {loss['packed']}, "
                             f"gradients by {error[name]:.1e}")
    seconds = interleaved({name: step for name, (_, step) in forms.items()}, rounds)
    torch.set_num_threads(threads)
    best = spread(seconds["packed"])["median"]
    return [{"form": name, **{f"CPU s, {k}": v for k, v in spread(seconds[name]).items()}, "tokens": computed["packed"],
             "computed": computed[name], "tokens/s": computed["packed"] / spread(seconds[name])["median"],
             "packed is faster by": spread(seconds[name])["median"] / best, "gradient differs by": error[name]}
            for name in forms]


# ---------------------------------------------------------------- 2. one step on a GPU

def operations(model, batches) -> float:
    """Floating-point operations of forward and backward that the model needs for these micro-batches."""
    config = model.config
    weights = sum(p.numel() for p in model.base_model.layers.parameters() if p.dim() == 2)
    head = config.vocab_size * config.hidden_size
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return sum(6 * weights * batch.tokens.numel() + 6 * head * len(batch.target)
               + 6 * attention * sum(length ** 2 for length in batch.lengths) for batch in batches)


def gpu(count, scale, capacity, shape, rounds, device):
    """Rows of time and memory of one optimiser step, without and with checkpointing. A CPU runs it too, for --quick."""
    cuda = device == "cuda"
    model = random_model(shape, device, "mars_packed")
    policy = trainer.Policy(model, bf16=cuda, checkpointing=True)
    optimiser = torch.optim.AdamW(policy.parameters(), 1e-6, betas=(0.9, 0.95), weight_decay=0.0)
    samples = draw_samples(count, scale, shape["vocab_size"])
    batches = trainer.micro_batches(samples, weigh(samples), capacity, device)
    tokens, needed = sum(batch.tokens.numel() for batch in batches), operations(model, batches)

    def step(checkpointing):
        for layer in model.base_model.layers:
            layer.gradient_checkpointing = checkpointing
        optimiser.zero_grad(set_to_none=True)
        trainer.backward(policy, batches, [None] * len(batches), **OBJECTIVE)
        trainer.gradient_norm(policy, 1.0)
        optimiser.step()

    def peak(form):
        form()
        if not cuda:
            return float("nan")
        torch.cuda.reset_peak_memory_stats()
        form()
        return torch.cuda.max_memory_allocated() / 1e9

    def clock():
        torch.cuda.synchronize() if cuda else None
        return time.perf_counter()
    forms = {"activations kept": partial(step, False), "checkpointing": partial(step, True)}
    memory = {name: peak(form) for name, form in forms.items()}
    seconds = interleaved(forms, rounds, clock)
    alone = SimpleNamespace(fsdp=False, kv_tokens=0, system1="train", kl_beta=0)
    planned = trainer.memory_parts(model.config, model.num_parameters(), config=alone, world=1, cuda=cuda)
    return [{"form": name, **{f"s, {k}": v for k, v in spread(seconds[name]).items()}, "tokens": tokens,
             "loss tokens": sum(len(batch.target) for batch in batches), "micro-batches": len(batches),
             "tokens/s": tokens / spread(seconds[name])["median"],
             "TFLOP/s": needed / spread(seconds[name])["median"] / 1e12,
             "share of peak": needed / spread(seconds[name])["median"] / PEAK, "peak GB": memory[name],
             "planned GB": (sum(planned.values()) - planned["sampler"]) / 1e9} for name in forms]


def main():
    parser = argparse.ArgumentParser(description="The training step, packed against padded, and on a GPU.")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, no files")
    quick = parser.parse_args().quick
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    tiny = SMALL | dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    parts = {}
    if quick:
        parts["cpu"] = partial(cpu, 6, 1 / 32, 512, tiny, rounds=2)
        parts["gpu"] = partial(gpu, 2, 1 / 64, 256, tiny, rounds=2, device=device)
    elif cuda:
        parts["gpu"] = partial(gpu, 16, 1 / 2, 16_384, QWEN3_1_7B, rounds=5, device=device)
    else:
        parts["cpu"] = partial(cpu, 16, 1 / 16, 2048, SMALL, rounds=5)
    for name, part in parts.items():
        rows = part()
        on = torch.cuda.get_device_name() if name == "gpu" and cuda else "CPU"
        print(f"\n{name} part, on {on}{', tiny' if quick else ''}\n{table(rows)}", flush=True)
        if not quick:
            save(f"train_step_{name}", "python -m bench.train_step", rows)
    if not cuda:
        print(f"\nH200, one step of a Qwen3-1.7B-shaped model: {NOT_MEASURED}")


if __name__ == "__main__":
    main()
