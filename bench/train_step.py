"""The training step: packed against padded, and a GRPO step beside TRL's.

    python -m bench.train_step                            packed against padded on a CPU
    python -m bench.gpu --step training_step              the same on a GPU
    python -m bench.train_step --trl FOLDER/bin/python    a whole step of SmolLM2 beside GRPOTrainer
    python -m bench.train_step --tiny                     the first in seconds; writes no file

Packed is the trainer (micro_batches, backward); padded is the step that code around Hugging Face
models takes: batches of 4 samples, right-padded, with an attention mask, in random order or sorted
by length. Weights, samples and loss are the same, and a form whose loss differs is a failure. A
CPU's model is a small Qwen3 in fp32 with one thread (2 minutes); a GPU's has Qwen3-0.6B's shape, in
bf16, with AdamW's step and activations recomputed or kept. Operations are the model's, forward and
backward: 6·(weights of the layers·T + D·V·N), and for causal attention 6·layers·Hq·Dh·Σ length²;
recomputing counts as nothing. Predicted for a GPU: 35 % of a large product's rate with
recomputation, 45 % without, 20 % padded; 18 bytes a parameter, and what the layers keep.

Samples: as many of System 2 as of System 1. Lengths are log-normal: System 2 with median 6,400
tokens and σ 0.6, a third of it sampled, in five steps; System 1 with median 1,920 and σ 0.7, its
last fifth sampled; 31,744 at most. The paper gives the limits only, so medians and spreads are our
assumption. On a CPU 1/16 of these lengths, on a GPU a half.

Beside TRL: 4 prompts × G = 8, 64 new tokens that cannot end early, fp32, one thread, CPU seconds.
Not the same: draws and rewards; TRL also computes entropies, and pads.

Results: bench/results/train_step_PART.json. Tests: pytest tests/test_bench.py
"""

import argparse
import math
import random
import time
from functools import partial

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kernels
import trainer
from bench import common, peers
from bench.sampler import QWEN3_0_6B, SMALL, TINY, pieces_of_text, random_model, weight_bytes
from grpo import token_weights
from plumbing import models
from rollout import Sample
from sampler import Sampler

OBJECTIVE = {"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0, "temperature": 1.0}
PADDED_ROWS = 4
# role, median length, σ of its logarithm, steps, share of tokens that are sampled
LENGTHS = (("sys2", 6400, 0.6, 5, 1 / 3), ("sys1", 1920, 0.7, 1, 1 / 5))
LONGEST = 31_744


def draw_samples(count: int, scale: float, vocabulary: int) -> list[Sample]:
    """`count` samples of each role in random order, of LENGTHS times `scale`."""
    rng = random.Random(0)
    samples = []
    for role, median, sigma, steps, share in LENGTHS:
        for i in range(count):
            length = min(rng.lognormvariate(math.log(median), sigma), LONGEST) * scale / steps
            advantage = rng.choice((-1.0, 1.0))
            sample = Sample(role, question_index=0, attempt=i, advantage=advantage, copies=1)
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
    return token_weights([torch.tensor(sample.mask) for sample in samples], len(samples) // 2)


# --- packed and padded ----------------------------------------------------------------------------


def packed_step(policy, batches) -> tuple[float, int]:
    """(loss, tokens computed) of a step by the trainer, micro-batch by micro-batch."""
    stats = trainer.backward(policy, batches, [None] * len(batches), **OBJECTIVE)
    return sum(float(s["loss"]) for s in stats), sum(batch.tokens.numel() for batch in batches)


def padded_step(model, batches, *, by_length: bool = False) -> tuple[float, int]:
    """(loss, tokens computed, padding included) of the same by the stock model.

    batches: micro-batches of one sample each, which hold what the loss needs.
    """
    if by_length:
        batches = sorted(batches, key=lambda batch: batch.tokens.numel())
    total = 0.0
    computed = 0
    for start in range(0, len(batches), PADDED_ROWS):
        rows = batches[start : start + PADDED_ROWS]
        T = max(batch.tokens.numel() for batch in rows)
        tokens = torch.zeros(len(rows), T, dtype=torch.long, device=model.device)
        mask = torch.zeros_like(tokens)
        for i, batch in enumerate(rows):
            tokens[i, : batch.tokens.numel()] = batch.tokens[0]
            mask[i, : batch.tokens.numel()] = 1
        at = torch.cat([batch.loss_positions + i * T for i, batch in enumerate(rows)])
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            out = model.base_model(tokens, attention_mask=mask, use_cache=False)
        states = out.last_hidden_state.flatten(0, 1)[at]  # [N, D]
        states = states.to(torch.bfloat16 if tokens.is_cuda else torch.float32)
        names = ("target", "old_logprob", "advantage", "weight")
        of_tokens = [torch.cat([getattr(batch, name) for batch in rows]) for name in names]
        loss, _ = kernels.linear_grpo_loss(states, model.lm_head.weight, *of_tokens, **OBJECTIVE)
        loss.backward()
        total += loss.item()
        computed += tokens.numel()
    return total, computed


FORMS = {
    "packed": {"packed": True},
    "packed, activations kept": {"packed": True, "recompute": False},
    "padded, random order": {},
    "padded, sorted by length": {"by_length": True},
}


def operations(shape: dict, batches) -> float:
    """Floating-point operations of forward and backward that a model needs for the batches."""
    head = shape["vocab_size"] * shape["hidden_size"]
    layers = weight_bytes(shape) / 2 - head
    attention = shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"]
    total = 0
    for batch in batches:
        squares = sum(length**2 for length in batch.lengths)
        total += layers * sum(batch.lengths) + attention * squares + head * len(batch.target)
    return 6 * total


def predict(shape: dict, samples, capacity: int, name: str, product: float) -> dict:
    """By arithmetic: see the head of this file. 75 · D bytes a token and layer are kept."""
    D, layers = shape["hidden_size"], shape["num_hidden_layers"]
    share = {"packed": 0.35, "packed, activations kept": 0.45}.get(name, 0.2)
    batches = trainer.micro_batches(samples, weigh(samples), capacity, "cpu")
    kept = 75 * D + layers * (4 if name == "packed" else 75) * D
    tokens = max(batch.tokens.numel() for batch in batches)
    seconds = operations(shape, batches) / product / share
    size = 18 * weight_bytes(shape) / 2 + tokens * kept
    return {"s": seconds, "share of a product": share, "peak GB": size / 1e9}


def steps(tiny: bool, rows: list[dict], write, rate: dict) -> None:
    """A row for each form; on a GPU with an optimizer step. rate: see bench.common.rates."""
    where = common.device()
    cuda = where.type == "cuda"
    shape = QWEN3_0_6B if cuda else SMALL | {"tie_word_embeddings": True}
    count, scale, capacity = (16, 1 / 2, 16_384) if cuda else (16, 1 / 16, 2048)
    if tiny:
        shape, count, scale, capacity = TINY, 2, 1 / 64, 256
    samples = draw_samples(count, scale, shape["vocab_size"])
    expected = []  # the loss and the gradient's norm of the first form

    def result(packed=False, recompute=True, by_length=False):
        common.free_bytes()  # what the form before has left goes
        model = random_model(shape, where=where)
        batches = trainer.micro_batches(samples, weigh(samples), capacity if packed else 1, where)
        run = partial(padded_step, model, batches, by_length=by_length)
        if cuda and not packed:
            model.train()  # it has no dropout
            model.gradient_checkpointing_enable()
        if packed:
            policy = trainer.Policy(model, bf16=cuda, recompute_activations=cuda and recompute)
            run = partial(packed_step, policy, batches)
        optimizer = trainer.make_optimizer(model, 1e-6, 0.0)

        def step():
            optimizer.zero_grad(set_to_none=True)
            found = run()
            norm = trainer.gradient_norm(model, 1.0)
            if cuda:
                optimizer.step()
            return *found, norm

        loss, computed, norm = step()
        expected[:] = expected or [loss, norm]
        for ours, first in zip((loss, norm), expected):
            if abs(ours - first) > (0.02 if cuda else 1e-5) * max(1.0, abs(first)):
                raise ValueError(f"another loss or gradient: {loss}, {norm}; first {expected}")
        held = torch.cuda.memory_allocated() if cuda else math.nan
        peak = held + common.peak_bytes(step)
        taken = common.interleaved(
            {"": step}, 1 if tiny else 3, common.clock if cuda else time.process_time
        )[""]
        row = {f"s, {key}": value for key, value in common.spread(taken).items()}
        seconds = row["s, median"]
        speed = operations(shape, batches) / seconds
        row |= {
            "tokens computed": computed,
            "tokens/s": sum(len(s.tokens) for s in samples) / seconds,
        }
        row |= {"TFLOP/s": speed / 1e12, "share of a product": speed / rate["product"]}
        return row | {"peak GB": peak / 1e9}

    for name, form in FORMS.items():
        if not cuda and "recompute" in form:
            continue  # on a CPU nothing is recomputed
        predicted = predict(shape, samples, capacity, name, rate["product"])
        common.measure(rows, write, {"form": name}, predicted, partial(result, **form))


# --- a GRPO step beside TRL's ---------------------------------------------------------------------


def rollout(sampler, prompts: list[list[int]], group: int, new: int) -> list[Sample]:
    """`group` samples of each prompt, of `new` tokens each; their rewards are draws."""
    rng = random.Random(0)
    copies = [prompt for prompt in prompts for _ in range(group)]
    samples = []
    for i, done in enumerate(sampler.generate(copies, max_new_tokens=new)):
        advantage = rng.choice((-1.0, 1.0))
        sample = Sample("sys2", question_index=i, attempt=i, advantage=advantage, copies=1)
        sample.append_given(copies[i])
        sample.tokens += done.tokens
        sample.mask += [True] * len(done.tokens)
        sample.logprobs += done.logprobs
        samples.append(sample)
    return samples


def our_step(model, prompts, group: int, new: int, apart: bool) -> dict:
    """CPU seconds of the parts of one GRPO step; with `apart` no sample shares a prefix."""
    tokens = sum(map(len, prompts)) * group + len(prompts) * group * (new + 16)
    sampler = Sampler(model, max_tokens=tokens)
    policy = trainer.Policy(model, bf16=False)
    optimizer = trainer.make_optimizer(policy, 1e-6, 0.0)
    start = time.process_time()
    samples = rollout(sampler, prompts, group, new)
    sampled = time.process_time()
    weights = token_weights([torch.tensor(sample.mask) for sample in samples], len(samples))
    batches = trainer.micro_batches(samples, weights, 4096, torch.device("cpu"), pack=not apart)
    optimizer.zero_grad()
    trainer.backward(policy, batches, [None] * len(batches), **OBJECTIVE)
    trainer.gradient_norm(policy, 1.0)
    optimizer.step()
    sampler.load_weights(model)
    end = time.process_time()
    row = {"CPU s, rollout": sampled - start, "CPU s, update": end - sampled}
    trained = sum(batch.tokens.numel() for batch in batches)
    return row | {"CPU s, step": end - start, "tokens trained": trained}


def beside_trl(python: str, rows: list[dict], write) -> None:
    """SmolLM2-135M; a step of ours with shared prefixes and without, and one of TRL's."""
    folder = str(models.smollm2(common.ROOT / ".cache"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = pieces_of_text(tokenizer, 4)
    for apart in (False, True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        name = {"form": "MARS, samples apart" if apart else "MARS, shared prefixes"}
        common.measure(rows, write, name, {}, partial(our_step, model, prompts, 8, 64, apart))
    texts = [tokenizer.decode(prompt) for prompt in prompts]

    work = {"folder": folder, "prompts": texts, "group": 8, "new": 64}
    reply = peers.first("TRL", [python], rounds=1, **work)
    rows.append({"form": "TRL's GRPOTrainer"})
    rows[-1] |= reply if "failed" in reply else {"CPU s, step": reply["answers"]}
    write(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, no file")
    parser.add_argument("--trl", metavar="PYTHON", help="of an environment that has TRL")
    options = parser.parse_args()
    torch.set_num_threads(1)
    part = "trl" if options.trl else "cpu"

    def write(rows):
        if not options.tiny:
            common.save(f"train_step_{part}", "python -m bench.train_step", rows)

    rows = []
    if options.trl:
        beside_trl(options.trl, rows, write)
    else:
        steps(options.tiny, rows, write, common.rates(**common.SMALL_RATES))
    print(common.table(rows))


if __name__ == "__main__":
    main()
