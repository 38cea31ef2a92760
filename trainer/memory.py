"""What a process will hold in memory, by arithmetic and before anything is loaded.

Activations come from one measured figure, bytes per unit of a layer's width, for each arithmetic:
tests/test_memory.py counts the tensors of a real step. Run it with `pytest tests/test_memory.py`.
"""

import os

import torch
from transformers import AutoModelForCausalLM

from config import UserError, uses_bf16
from kernels import linear_loss
from trainer.loading import load_shape, packs
from trainer.lora import add_adapters
from trainer.prefixes import MAX_KEYS_PER_TOKEN

GIB = 2**30
CUDA = 2.6 * GIB  # context, NCCL's buffers, CUDA graphs and workspaces: estimated, never measured
CPU = 0.7 * GIB  # Python and its libraries
# Bytes that a token keeps in a layer for each unit of width; "cast" is fp32 weights under autocast.
KEPT = {"fp32": 19.0, "cast": 12.6, "bf16": 10.6}


def memory_plan(model, *, config, longest: int, world: int, device, training: bool = True) -> str:
    """One line: GiB a process by purpose. UserError if it cannot fit, with what would.

    `model` is a folder or a hub name, `longest` the longest sample in tokens.
    """
    shape = load_shape(model)
    cuda = device.type == "cuda"
    parts = memory_parts(shape, config, longest, world, cuda, training)
    total = sum(parts.values())
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    have //= max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if cuda:
        have = torch.cuda.get_device_properties(device).total_memory
    listed = ", ".join(f"{k} {part / GIB:.2f}" for k, part in parts.items() if part > GIB / 200)
    if total <= have:
        return f"memory per process, GiB: {listed}; {total / GIB:.2f} of {have / GIB:.1f}"
    pool = parts["KV pool"]
    room = pool - (total - have)  # what everything else leaves to the KV pool
    advice = "use a smaller model or more processes"
    if room > 0.1 * pool:
        advice = f"--kv_tokens {int(config.kv_tokens * room / pool)} would fit"
    elif training and not config.recompute_activations:
        advice = "use --recompute_activations, and --fsdp over more processes"
    elif training and not config.fsdp:
        adapt = "" if config.lora_rank else "--lora_rank 16, or "
        advice = f"use {adapt}--fsdp over more processes"
    raise UserError(f"a process needs {total / GIB:.1f} GiB ({listed}) of {have / GIB:.1f}: {advice}")


def memory_parts(shape, config, longest: int, world: int, cuda: bool, training: bool) -> dict:
    """Bytes of one process by purpose. `shape` is a transformers config."""
    P, adapters = count_parameters(shape, config.lora_rank)
    trained = adapters or P
    bf16 = uses_bf16(config, cuda)
    size = 2 if bf16 else 4  # bytes of a number outside the master weights
    D = shape.hidden_size
    F = getattr(shape, "intermediate_size", None) or 4 * D
    F = max(F, getattr(shape, "num_experts_per_tok", 0) * getattr(shape, "moe_intermediate_size", 0))
    heads = shape.num_attention_heads
    head = getattr(shape, "head_dim", None) or D // heads
    keys = (getattr(shape, "num_key_value_heads", None) or heads) * head
    layers = shape.num_hidden_layers
    # A role that the start's weights play has a sampler of its own; servers take one away.
    samplers = (not config.server) + bool(config.frozen())
    shared = training and adapters and config.frozen() and not config.fsdp  # with the trainer
    pool = 2 * layers * keys * (2 if cuda else 4) * config.kv_tokens
    parts = {"process": CUDA if cuda else CPU, "KV pool": pool * samplers}
    parts["sampler"] = size * P * (samplers - bool(shared))
    if not training:
        return parts | ({} if cuda else {"weights": size * P})
    state = {"weights": 4 * trained + (size * P if adapters else 0)}
    state |= {"gradients": 4 * trained, "optimizer": 8 * trained}
    embedding = shape.vocab_size * D
    outside = embedding if shape.tie_word_embeddings else 2 * embedding
    layer = (P - outside) / layers
    if config.fsdp:
        state = {name: part / world for name, part in state.items()}
        # Gathered: all outside the layers and two layers. Their gradients are summed in fp32.
        state["copies"] = size * (outside + 2 * layer) + (4 + size) * max(outside, 2 * layer)
    elif world > 1:
        state["gradients"] *= 2  # DDP adds buckets of the same size
    elif bf16:
        state["copies"] = size * trained  # autocast's
    parts |= state
    if config.kl_beta and not adapters:
        parts["reference"] = size * P
    # The loss: a chunk of logits, with softmax and gradient beside it; and the head's gradient.
    tokens = max(config.micro_tokens, longest) if packs(shape) else longest
    chunk = linear_loss.CHUNK_TOKENS_CUDA if cuda else 3 * linear_loss.CHUNK_TOKENS_CPU
    parts["logits"] = 4 * shape.vocab_size * (chunk if packs(shape) else 3 * longest)
    parts["logits"] += 4 * embedding * (1 if adapters else 2)
    pure = bf16 and bool(config.fsdp or adapters)
    kept = KEPT["bf16" if pure else "cast" if bf16 else "fp32"] * (D + F + heads * head + keys)
    kept += 7 * size * config.lora_rank  # seven adapted products
    if config.share_prefixes:  # the keys; and on a CPU each sequence's mask
        kept += MAX_KEYS_PER_TOKEN * 2 * size * keys + (0 if cuda else size * longest)
    held = (2 if pure else 4) * D if config.recompute_activations else kept
    parts["activations"] = tokens * (layers * held + 1.5 * kept)  # one goes backward
    return parts


def count_parameters(shape, lora_rank: int) -> tuple[int, int]:
    """The numbers of a model's parameters and of its adapters'; no weight is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, trust_remote_code=False)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if not lora_rank:
        return parameters, 0
    add_adapters(model, lora_rank, seed=0)
    return parameters, sum(p.numel() for p in model.parameters() if p.requires_grad)
