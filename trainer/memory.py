"""What a process will hold in memory, by arithmetic and before anything is loaded.

Activations come from measured figures, bytes for each unit of a layer's width: tests/test_memory.py
counts the tensors of a real step. What the C library keeps of freed memory is
not in the plan: on a CPU sixteen steps of recipes/almanac.py came to 10.2 GiB where 7.8 were
planned, and to 6.4 with MALLOC_MMAP_THRESHOLD_=1000000 in the environment.
"""

import os

import torch
from transformers import AutoModelForCausalLM

from config import UserError, uses_bf16
from family import head_size
from kernels import linear_loss
from trainer.loading import can_pack, load_shape
from trainer.lora import add_adapters
from trainer.prefixes import MAX_KEYS_PER_TOKEN

GIB = 2**30
# Python and its libraries, or a GPU's context; the sampler's CUDA graphs; buffers between
# processes. A GPU's three figures were not measured.
PROCESS = {"cpu": 0.7 * GIB, "cuda": 0.6 * GIB}
GRAPHS = NCCL = {"cpu": 0, "cuda": GIB}
# Bytes that a token keeps in a layer per unit of width: in fp32, under autocast, all in bf16.
KEPT = 19.0, 12.6, 11.9


def memory_plan(model, *, config, longest: int, world: int, device, training: bool = True) -> str:
    """One line: GiB a process by purpose. UserError if it cannot fit, with what to change.

    `model` is a folder or a hub name, `longest` the longest sample in tokens.
    """
    parts = memory_parts(load_shape(model), config, longest, world, device.type, training)
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    have /= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.type == "cuda":
        have = torch.cuda.get_device_properties(device).total_memory / GIB
    total = sum(parts.values()) / GIB
    listed = ", ".join(f"{name} {part / GIB:.2f}" for name, part in parts.items() if part)
    if total > have:
        advice = "lower --kv_tokens"
        if training:
            advice += (
                " or --micro_tokens, or use --recompute_activations, --lora_rank 16, or --fsdp "
                "over more processes"
            )
        raise UserError(f"a process needs {total:.1f} GiB ({listed}) and has {have:.1f}: {advice}")
    return f"memory per process, GiB: {listed}; {total:.2f} of {have:.1f}"


def memory_parts(shape, config, longest: int, world: int, kind: str, training: bool) -> dict:
    """Bytes of one process by purpose. `shape` is a transformers config, `kind` the device's."""
    with torch.device("meta"):  # no weight is allocated
        model = AutoModelForCausalLM.from_config(shape, trust_remote_code=False)
    weights = model.num_parameters()
    adapters = config.lora_rank > 0
    if adapters:
        add_adapters(model, config.lora_rank, seed=0)
    trained = model.num_parameters(only_trainable=True)
    size = 2 if uses_bf16(config, kind == "cuda") else 4  # bytes of a number in products
    D, heads, layers = shape.hidden_size, shape.num_attention_heads, shape.num_hidden_layers
    head = head_size(shape)
    keys = head * (getattr(shape, "num_key_value_heads", None) or heads)
    samplers = (not config.server) + bool(config.frozen())  # frozen roles have one of their own
    pool = 2 * layers * keys * (2 if kind == "cuda" else 4) * config.kv_tokens
    copy = size * weights
    if kind == "cpu":  # a second copy in oneDNN's layout, and the head in fp32 in both
        copy += copy + 8 * shape.vocab_size * D
    process = PROCESS[kind] + GRAPHS[kind] * samplers + NCCL[kind] * (world > 1)
    parts = {"process": process, "KV pool": pool * samplers, "sampler": copy * samplers}
    if not training:
        return parts | {"weights": size * weights * (kind == "cpu")}
    outside = shape.vocab_size * D * (1 if shape.tie_word_embeddings else 2)
    layer = (weights - outside) / layers
    state = {"weights": 4 * trained + size * weights * adapters}
    state |= {"gradients": 4 * trained, "optimizer": 8 * trained}
    # FSDP gathers two layers with their gradients, and two copies of what lies outside the layers.
    if config.fsdp:
        state = {name: part / world for name, part in state.items()}
        state["copies"] = 2 * size * outside + 2 * (4 + 2 * size) * layer
    else:  # autocast's copies of what is trained, and DDP's buckets beside the gradients
        state["copies"] = size * trained * (size == 2) + 4 * trained * (world > 1)
    parts |= state | {"reference": size * weights * bool(config.kl_beta and not adapters)}
    # A micro-batch: what all layers keep, and the larger of what loss and backward pass add.
    bare = config.fsdp or adapters  # no autocast of fp32 weights, except of the adapters
    width = D + (getattr(shape, "intermediate_size", None) or 4 * D) + head * heads + keys
    kept = KEPT[0 if size == 4 else 1 + bare] * width + 7 * size * config.lora_rank
    kept += MAX_KEYS_PER_TOKEN * 2 * size * keys  # gathered keys and values
    tokens = max(config.micro_tokens, longest) if can_pack(shape) else longest
    held = tokens * layers * ((size if bare else 4) * D if config.recompute_activations else kept)
    held += size * tokens * longest * (kind == "cpu")  # attention's masks
    chunk = linear_loss.CHUNK_TOKENS_CUDA if kind == "cuda" else 3 * linear_loss.CHUNK_TOKENS_CPU
    head_gradient = 4 * shape.vocab_size * D * (not adapters)
    logits = 4 * shape.vocab_size * (chunk if can_pack(shape) else 3 * longest)
    added = max(logits + 2 * head_gradient, tokens * 1.5 * kept + head_gradient)
    return parts | {"micro-batch": held + added}
