"""The training step: packed against padded on a CPU, and its speed and memory on a GPU.

    python -m bench.train_step           part 2 with CUDA, else part 1
    python -m bench.train_step --quick   both with tiny shapes, to see that they work; no file

1. CPU, one thread, a small Qwen3 in fp32 (2 minutes): the trainer (micro_batches, backward)
   against the step that code around Hugging Face models takes: batches of 4 samples in random
   order, right-padded, with an attention mask. Weights, samples and loss are the same, and there
   is no table unless all forms give the same loss and gradients. Three padded forms: logits of
   the loss tokens only, so that nothing but the packing differs (goal: packed ≥ 1.5 times as
   fast); the same with samples sorted by length, which keeps padding low but makes batches of a
   kind; and logits of all positions.
2. GPU: a step (gradients, clipping, AdamW) of a random model of Qwen3-1.7B's shape in bf16, first
   with activations recomputed, then with activations kept: tokens/s, share of the 790 TFLOP/s of
   an H200, peak memory beside the memory plan's. A form that the plan does not fit into what is
   free on the card is left out, and its row says so; each row is saved when it is measured.
   Operations are the model's: 6·(weights of the layers·T + D·V·N) and, for causal attention,
   6·layers·Hq·Dh·Σ length². Recomputing counts as nothing.

Samples: as many of System 2 as of System 1, which is what balancing leaves. Lengths are
log-normal: System 2 with median 6,400 tokens and σ 0.6, a third of it sampled, in five steps;
System 1 with median 1,920 and σ 0.7, its last fifth sampled; 31,744 at most. The paper gives the
limits only, so medians and spreads are our assumption. Part 1 has 1/16 of these lengths, part 2 a
half. Results: bench/results/train_step_{cpu,gpu}.json.
"""

import argparse
import math
import random
import time
from functools import partial

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import grpo
import kernels
import trainer
from bench.common import interleaved, save, spread, table
from config import Config
from rollout import Sample
from trainer import memory
from trainer.batches import input_length

OBJECTIVE = {"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0, "temperature": 1.0}
PEAK = 790e12  # FLOP/s of bf16 products on one H200, measured elsewhere
NOT_MEASURED = "not yet measured on a GPU"
PADDED_ROWS = 4
SMALL = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
QWEN3_1_7B = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}
# role, median length, σ of its logarithm, steps, share of tokens that are sampled
LENGTHS = (("sys2", 6400, 0.6, 5, 1 / 3), ("sys1", 1920, 0.7, 1, 1 / 5))
LONGEST = 31_744


def draw_samples(count: int, scale: float, vocabulary: int, seed: int = 0) -> list[Sample]:
    """`count` samples of each role in random order, of LENGTHS times `scale`."""
    rng = random.Random(seed)
    samples = []
    for role, median, sigma, steps, share in LENGTHS:
        for i in range(count):
            length = min(rng.lognormvariate(math.log(median), sigma), LONGEST) * scale / steps
            advantage = rng.choice((-1.0, 1.0))
            sample = Sample(role, place=0, attempt=i, advantage=advantage, copies=1)
            sampled = max(1, int(length * share))
            given = max(2, int(length) - sampled)
            for _ in range(steps):
                sample.append_given([rng.randrange(vocabulary) for _ in range(given)])
                sample.tokens += [rng.randrange(vocabulary) for _ in range(sampled)]
                sample.mask += [True] * sampled
                sample.logprobs += [rng.gauss(-math.log(vocabulary), 0.1) for _ in range(sampled)]
            samples.append(sample)
    rng.shuffle(samples)
    return samples


def weigh(samples: list[Sample]) -> list[torch.Tensor]:
    """grpo.token_weights of all samples of a step; there are as many of either role."""
    masks = [torch.tensor(sample.mask) for sample in samples]
    return grpo.token_weights(masks, len(samples) // 2)


def random_model(shape: dict, device):
    """A random Qwen3 in fp32, the same at every call."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(Qwen3Config(**shape), dtype=torch.float32)


# ---------------------------------------------------------------- 1. packed and padded


def padded_loss(model, samples: list, weights: list, lengths: list[int], all_logits: bool):
    """Σ w·ℓ of one right-padded batch [B, T] by the stock model."""
    batch = trainer.make_micro_batch(samples, weights, lengths, "cpu")  # what loss tokens need
    T = max(lengths)
    starts = batch.cu_seqlens.long()
    tokens = torch.zeros(len(samples), T, dtype=torch.long)
    mask = torch.zeros(len(samples), T, dtype=torch.long)
    for row, length in enumerate(lengths):
        tokens[row, :length] = batch.tokens[0, starts[row] : starts[row + 1]]
        mask[row, :length] = 1
    at = batch.owner * T + batch.loss_positions - starts[batch.owner]  # [N], of B·T positions
    given = (batch.old_logprob, batch.advantage, batch.weight)
    options = {"attention_mask": mask, "use_cache": False}
    if not all_logits:
        states = model.base_model(tokens, **options).last_hidden_state.flatten(0, 1)
        head = model.lm_head.weight
        return kernels.linear_grpo_loss(states[at], head, batch.target, *given, **OBJECTIVE)[0]
    logprobs = model(tokens, **options).logits.log_softmax(-1).flatten(0, 1)  # [B·T, V]
    logprob = logprobs[at].gather(-1, batch.target[:, None])[:, 0]
    return grpo.grpo_loss(logprob, *given, clip_low=0.2, clip_high=0.2)[0]


def padded_step(model, samples, *, by_length=False, all_logits=False) -> tuple[float, int]:
    """(loss, tokens computed, padding included) of a whole step in batches of PADDED_ROWS."""
    weights = weigh(samples)
    lengths = [input_length(*pair) for pair in zip(samples, weights, strict=True)]
    order = list(range(len(samples)))
    if by_length:
        order.sort(key=lambda i: lengths[i])
    total = 0.0
    computed = 0
    for start in range(0, len(order), PADDED_ROWS):
        rows = order[start : start + PADDED_ROWS]
        parts = [[whole[i] for i in rows] for whole in (samples, weights, lengths)]
        loss = padded_loss(model, *parts, all_logits)
        loss.backward()
        total += loss.item()
        computed += len(rows) * max(parts[2])
    return total, computed


def packed_step(policy, samples, capacity: int) -> tuple[float, int]:
    """The same by the trainer."""
    batches = trainer.micro_batches(samples, weigh(samples), capacity, torch.device("cpu"))
    stats = trainer.backward(policy, batches, [None] * len(batches), **OBJECTIVE)
    computed = sum(batch.tokens.numel() for batch in batches)
    return sum(s["loss"].item() for s in stats), computed


def cpu(count, scale, capacity, shape, rounds) -> list[dict]:
    """Rows of time and tokens. ValueError if a form disagrees about loss or gradients."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    samples = draw_samples(count, scale, shape["vocab_size"])
    policy = trainer.Policy(random_model(shape, "cpu"), bf16=False)
    stock = random_model(shape, "cpu")
    padded = partial(padded_step, stock, samples)
    forms = {
        "packed": partial(packed_step, policy, samples, capacity),
        "padded, random order": padded,
        "padded, sorted by length": partial(padded, by_length=True),
        "padded, logits everywhere": partial(padded, all_logits=True),
    }
    computed = {}
    error = {}
    for name, step in forms.items():
        model = policy if name == "packed" else stock
        model.zero_grad()
        loss, computed[name] = step()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        if name == "packed":
            expected_loss = loss
            expected = gradient
        error[name] = ((gradient - expected).norm() / expected.norm()).item()
        if abs(loss - expected_loss) > 1e-5 or error[name] > 1e-4:
            raise ValueError(
                f"{name} and packed disagree: loss {loss} and {expected_loss}, "
                f"gradients by {error[name]:.1e}"
            )
    seconds = {name: spread(s) for name, s in interleaved(forms, rounds).items()}
    torch.set_num_threads(threads)
    tokens = computed["packed"]
    return [
        {
            "form": name,
            **{f"CPU s, {key}": value for key, value in seconds[name].items()},
            "tokens": tokens,
            "computed": computed[name],
            "tokens/s": tokens / seconds[name]["median"],
            "packed is faster by": seconds[name]["median"] / seconds["packed"]["median"],
            "gradient differs by": error[name],
        }
        for name in forms
    ]


# ---------------------------------------------------------------- 2. one step on a GPU


def operations(model, batches) -> float:
    """Floating-point operations of forward and backward that the model needs for the batches."""
    config = model.config
    weights = sum(p.numel() for p in model.base_model.layers.parameters() if p.dim() == 2)
    head = config.vocab_size * config.hidden_size
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    total = 0
    for batch in batches:
        squares = sum(length**2 for length in batch.lengths)
        total += weights * batch.tokens.numel() + head * len(batch.target) + attention * squares
    return 6 * total


def planned_bytes(config, parameters: int, capacity: int, recompute: bool, cuda: bool) -> float:
    """What the memory plan counts for one process that only trains, activations included."""
    options = Config(micro_tokens=capacity, recompute_activations=recompute)
    parts = memory.memory_parts(config, parameters, config=options, world=1, cuda=cuda)
    added = memory.micro_batch_bytes(config, parameters, config=options, longest=0, cuda=cuda)
    return sum(parts.values()) - parts["sampler"] + added


def gpu(count, scale, capacity, shape, rounds, device, save_rows=lambda rows: None) -> list[dict]:
    """Rows of one optimizer step, activations recomputed and kept. A CPU runs it for --quick."""
    cuda = device == "cuda"
    rows = []
    for recompute in (True, False):  # what needs less goes first
        name = "activations recomputed" if recompute else "activations kept"
        try:
            row = gpu_row(count, scale, capacity, shape, rounds, device, recompute)
        except torch.OutOfMemoryError:
            row = {"note": "out of memory"}
        rows.append({"form": name, **row})
        save_rows(rows)
        if cuda:
            torch.cuda.empty_cache()
    return rows


def gpu_row(count, scale, capacity, shape, rounds, device, recompute) -> dict:
    """One form, measured; or why it is not."""
    cuda = device == "cuda"
    with torch.device("meta"):
        parameters = sum(p.numel() for p in random_model(shape, "meta").parameters())
    samples = draw_samples(count, scale, shape["vocab_size"])
    batches = trainer.micro_batches(samples, weigh(samples), capacity, device)
    largest = max(batch.tokens.numel() for batch in batches)
    planned = planned_bytes(Qwen3Config(**shape), parameters, largest, recompute, cuda)
    free = torch.cuda.mem_get_info()[0] if cuda else math.inf
    if planned > free:
        return {"note": f"needs {planned / 1e9:.0f} GB by plan, {free / 1e9:.0f} GB are free"}
    model = random_model(shape, device)
    policy = trainer.Policy(model, bf16=cuda, recompute_activations=recompute)
    optimizer = trainer.make_optimizer(policy, 1e-6, 0.0)

    def step():
        optimizer.zero_grad(set_to_none=True)
        trainer.backward(policy, batches, [None] * len(batches), **OBJECTIVE)
        trainer.gradient_norm(policy, 1.0)
        optimizer.step()

    def clock():
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    (seconds,) = interleaved({"step": step}, rounds, clock).values()
    seconds = spread(seconds)
    tokens = sum(batch.tokens.numel() for batch in batches)
    speed = operations(model, batches) / seconds["median"]
    return {
        **{f"s, {key}": value for key, value in seconds.items()},
        "tokens": tokens,
        "loss tokens": sum(len(batch.target) for batch in batches),
        "micro-batches": len(batches),
        "tokens/s": tokens / seconds["median"],
        "TFLOP/s": speed / 1e12,
        "share of peak": speed / PEAK,
        "peak GB": torch.cuda.max_memory_allocated() / 1e9 if cuda else math.nan,
        "planned GB": planned / 1e9,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny shapes, no files")
    quick = parser.parse_args().quick
    cuda = torch.cuda.is_available()
    command = "python -m bench.train_step"
    if quick:
        device = "cuda" if cuda else "cpu"
        tiny = SMALL | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
        print_rows("cpu part, tiny", cpu(6, 1 / 32, 512, tiny, rounds=2))
        print_rows("gpu part, tiny", gpu(2, 1 / 64, 256, tiny, 2, device))
    elif cuda:
        save_rows = partial(save, "train_step_gpu", command)
        rows = gpu(16, 1 / 2, 16_384, QWEN3_1_7B, 5, "cuda", save_rows)
        print_rows(f"gpu part, on {torch.cuda.get_device_name()}", rows)
    else:
        rows = cpu(16, 1 / 16, 2048, SMALL, rounds=5)
        print_rows("cpu part, on CPU", rows)
        save("train_step_cpu", command, rows)
    if not cuda:
        print(f"\nOne step of a Qwen3-1.7B-shaped model on a GPU: {NOT_MEASURED}")


def print_rows(title: str, rows: list[dict]) -> None:
    """A table; a row that could not be measured is a line with its note."""
    print(f"\n{title}")
    measured = [row for row in rows if "note" not in row]
    if measured:
        print(table(measured))
    for row in rows:
        if "note" in row:
            print(f"{row['form']}: {row['note']}")


if __name__ == "__main__":
    main()
