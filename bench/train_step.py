"""The training step: packed against padded, and a GRPO step beside TRL's.

    python -m bench.train_step --only cpu                 packed against padded, on a CPU
    python -m bench.gpu --step training_step              the same on a GPU
    python -m bench.train_step --only trl --peers FOLDER/bin/python      a step beside GRPOTrainer

Packed is the trainer (micro_batches, backward); padded is the step that code around Hugging Face
models takes: batches of 4 samples, right-padded, with an attention mask, in random order or sorted
by length. Weights, samples and loss are the same, and a form whose loss differs is a failure. A
CPU's model is a small Qwen3 in fp32 with one thread (2 minutes); a GPU's has Qwen3-0.6B's shape, in
bf16, with AdamW's step and activations recomputed or kept.

Samples: as many of System 2 as of System 1, of log-normal lengths (LENGTHS). The paper gives the
limits only, so medians and spreads are our assumption. On a CPU 1/16 of them, on a GPU a half.

Beside TRL, SmolLM2-135M: 4 prompts × G = 8, 64 new tokens that cannot end early, fp32, one thread,
CPU seconds. Not the same: draws and rewards; TRL also computes entropies, and pads.

Results: bench/results/train_step_PART.json. Tests: pytest tests/test_bench.py
"""

import math
import random
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

import kernels
import trainer
from bench import common, peers
from bench.sampler import QWEN3_0_6B, SMALL, TINY, pieces_of_text, random_model, random_tokens
from config import Config
from grpo import token_weights
from plumbing import models
from rollout import Sample
from sampler import Completion, Sampler
from trainer.memory import memory_parts

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
            sample = Sample(role, question_index=0, attempt=i, advantage=advantage, loss_weight=1)
            sampled = max(1, int(length * share))
            given = max(2, int(length) - sampled)
            for _ in range(steps):
                sample.append_given(random_tokens(rng, given, vocabulary))
                tokens = random_tokens(rng, sampled, vocabulary)
                logprobs = [rng.gauss(-math.log(vocabulary), 0.1) for _ in tokens]
                sample.append_sampled(Completion(tokens, logprobs, "length"))
            samples.append(sample)
    rng.shuffle(samples)
    return samples


def make_batches(samples: list[Sample], capacity: int, where) -> list:
    """Micro-batches of a step's samples, all of which have the same weight."""
    weights = token_weights([torch.tensor(sample.mask) for sample in samples], len(samples))
    return trainer.micro_batches(samples, weights, capacity, where)


def packed_step(policy, batches) -> tuple[float, int]:
    """(loss, tokens computed) of a step by the trainer, micro-batch by micro-batch."""
    stats = trainer.backward(policy, batches, **OBJECTIVE)
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
        tokens = pad_sequence([batch.tokens[0] for batch in rows], batch_first=True)  # [B, T]
        mask = pad_sequence([torch.ones_like(batch.tokens[0]) for batch in rows], batch_first=True)
        T = tokens.shape[1]
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


def planned_bytes(shape: dict, capacity: int, recompute: bool) -> float:
    """The trainer's part of the memory plan of a GPU."""
    config = Config(bf16="on", micro_tokens=capacity, recompute_activations=recompute)
    parts = memory_parts(Qwen3Config(**shape), config, capacity, 1, "cuda", True)
    ours = ("weights", "gradients", "optimizer", "copies", "micro-batch")
    return sum(parts[name] for name in ours)


def steps(bench: common.Bench) -> None:
    """A row for each form; on a GPU with an optimizer step."""
    where = common.DEVICE
    cuda = where.type == "cuda"
    shape = QWEN3_0_6B if cuda else SMALL | {"tie_word_embeddings": True}
    count, scale, capacity = (16, 1 / 2, 16_384) if cuda else (16, 1 / 16, 2048)
    if bench.tiny:
        shape, count, scale, capacity = TINY, 2, 1 / 64, 256
    samples = draw_samples(count, scale, shape["vocab_size"])
    expected = []  # the loss and the gradient's norm of the first form

    def result(packed=False, recompute=True, by_length=False) -> dict:
        model = random_model(shape, where)
        batches = make_batches(samples, capacity if packed else 1, where)
        if packed:
            policy = trainer.Policy(model, bf16=cuda, recompute_activations=cuda and recompute)
            run = partial(packed_step, policy, batches)
        else:
            run = partial(padded_step, model, batches, by_length=by_length)
            if cuda:
                model.train()  # it has no dropout
                model.gradient_checkpointing_enable()
        optimizer = trainer.make_optimizer(model, 1e-6, 0.0)

        def step():
            optimizer.zero_grad(set_to_none=True)
            found = run()
            norm = trainer.gradient_norm(model, 1.0)
            if cuda:
                optimizer.step()
            return *found, norm

        loss, computed, norm = step()
        if not expected:
            expected.extend((loss, norm))
        for ours, first in zip((loss, norm), expected):
            if abs(ours - first) > (0.02 if cuda else 1e-5) * max(1.0, abs(first)):
                raise ValueError(f"another loss or gradient: {loss}, {norm}; first {expected}")
        held = torch.cuda.memory_allocated() if cuda else 0
        row = {"peak GB": (held + common.added_bytes(step)) / 1e9, "tokens computed": computed}
        if packed:
            row["planned GB"] = planned_bytes(shape, capacity, recompute) / 1e9
        return row | common.spread("s", common.timed(step, 1 if bench.tiny else 3))

    for name, form in FORMS.items():
        if cuda or "recompute" not in form:  # on a CPU nothing is recomputed
            bench.measure({"form": name}, partial(result, **form))


# --- a GRPO step beside TRL's ---------------------------------------------------------------------


def our_step(model, prompts: list[list[int]], group: int, new: int) -> dict:
    """CPU seconds of the parts of one GRPO step; the rewards are draws."""
    rng = random.Random(0)
    copies = [prompt for prompt in prompts for _ in range(group)]
    sampler = Sampler(model, max_tokens=sum(map(len, copies)) + len(copies) * (new + 16))
    policy = trainer.Policy(model, bf16=False)
    optimizer = trainer.make_optimizer(policy, 1e-6, 0.0)
    start = common.clock()
    samples = []
    for i, done in enumerate(sampler.generate(copies, max_new_tokens=new)):
        advantage = rng.choice((-1.0, 1.0))
        samples.append(
            Sample("sys2", question_index=i, attempt=i, advantage=advantage, loss_weight=1)
        )
        samples[i].append_given(copies[i])
        samples[i].append_sampled(done)
    sampled = common.clock()
    batches = make_batches(samples, 4096, torch.device("cpu"))
    optimizer.zero_grad()
    trainer.backward(policy, batches, **OBJECTIVE)
    trainer.gradient_norm(policy, 1.0)
    optimizer.step()
    sampler.load_weights(model)
    end = common.clock()
    row = {"CPU s, rollout": sampled - start, "CPU s, update": end - sampled}
    trained = sum(len(batch.target) for batch in batches)
    return row | {"CPU s, step": end - start, "tokens trained": trained}


def beside_trl(bench: common.Bench) -> None:
    """A step of ours and one of TRL's."""
    folder = str(models.find("smollm2", common.ROOT / ".cache"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = pieces_of_text(tokenizer, 4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    bench.measure({"form": "MARS"}, partial(our_step, model, prompts, 8, 64))
    texts = [tokenizer.decode(prompt) for prompt in prompts]

    def theirs() -> dict:
        work = {"folder": folder, "prompts": texts, "group": 8, "new": 64}
        reply = peers.first("TRL", bench.peers, rounds=1, **work)
        return {"CPU s, step": reply["answers"], "version": reply["version"]}

    bench.measure({"form": "TRL's GRPOTrainer"}, theirs)


if __name__ == "__main__":
    common.main("train_step", __doc__, {"cpu": steps, "trl": beside_trl})
