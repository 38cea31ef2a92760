"""The memory plan of a process, computed before any weight is loaded.

The size of activations was measured in bytes per unit of a layer's width. tests/test_memory.py
compares the plan with the tensors of a real step. The plan does not count freed memory that the C
library keeps. On a CPU the plan of recipes/almanac.py was 7.8 GiB and sixteen steps took 10.2 GiB,
or 6.4 GiB with MALLOC_MMAP_THRESHOLD_=1000000 in the environment.
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
# PROCESS: Python with its libraries, or the context of a GPU. GRAPHS: the sampler's CUDA graphs.
# NCCL: its buffers. The numbers of a GPU are estimates (NCCL's can be measured with two GPUs only).
PROCESS = {"cpu": 0.7 * GIB, "cuda": 0.6 * GIB}
GRAPHS = NCCL = {"cpu": 0, "cuda": GIB}
# Parts that a GPU holds only while it samples, or only while it trains (train.train_step).
SAMPLING = {"KV pool", "graphs"}
TRAINING = {"gradients", "copies", "micro-batch"}
# Without --kv_tokens: the pool's tokens on a CPU; on a GPU the plan fills this share of its memory.
CPU_KV_TOKENS = 65536
GPU_SHARE = 0.95
# A token's activations in one layer that is not compiled, in bytes per unit of its width: in fp32,
# under autocast, and all in bf16.
ACTIVATION_BYTES = 19.0, 12.6, 11.9


def memory_plan(model, *, config, longest: int, world: int, device, training: bool = True) -> tuple:
    """(tokens of a KV pool, a line about the plan). UserError if a process needs too much memory.

    `model`: a folder or a hub name. `longest`: the most tokens of a sample. `world`: processes.
    A GPU needs the larger of two sums: what it holds while it samples, and while it trains.
    """
    parts = memory_parts(load_shape(model), config, longest, world, device.type, training)

    def size(absent=()) -> float:
        return sum(part for name, part in parts.items() if name not in absent) / GIB

    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    available /= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cuda = device.type == "cuda"
    if cuda:
        available = torch.cuda.get_device_properties(device).total_memory / GIB
    kv_tokens = config.kv_tokens or CPU_KV_TOKENS
    if cuda and not config.kv_tokens:
        room = GPU_SHARE * available - size(absent={"KV pool", *TRAINING})
        # More than two of the longest contexts per row are no use. One must fit, in whole pages.
        most = min(room * GIB // (parts["KV pool"] or 1), 2 * config.max_sequences * longest)
        kv_tokens = max(int(most), longest + 64)
    parts["KV pool"] *= kv_tokens  # until here the bytes of one token
    total = max(size(absent=TRAINING), size(absent=SAMPLING)) if cuda else size()
    summary = ", ".join(f"{name} {part / GIB:.2f}" for name, part in parts.items() if part)
    if total > available:
        in_update = parts.get("micro-batch", 0) > parts["KV pool"]
        if cuda:
            in_update = total > size(absent=TRAINING)
        advice = "lower --micro_tokens" if in_update else "lower --kv_tokens"
        if training:
            advice += ", or use --recompute_activations, --lora_rank 16, or --fsdp over more ranks"
        sizes = f"{total:.1f} GiB ({summary}) and has {available:.1f}"
        raise UserError(f"a process needs {sizes}: {advice}")
    line = f"memory per process, GiB: {summary}; at once {total:.2f} of {available:.1f}"
    return kv_tokens, f"{line}; {kv_tokens} tokens in the KV pool"


def memory_parts(shape, config, longest: int, world: int, kind: str, training: bool) -> dict:
    """Bytes by purpose; "KV pool" has those of one token. `shape`: a model's config."""
    try:
        with torch.device("meta"):  # no weight is allocated
            model = AutoModelForCausalLM.from_config(shape, trust_remote_code=False)
    except ValueError:
        problem = f"{shape.model_type} is no causal language model: use another model"
        raise UserError(problem) from None
    weights = model.num_parameters()
    adapters = config.lora_rank > 0
    if adapters:
        add_adapters(model, config.lora_rank, seed=0)
    trained = model.num_parameters(only_trainable=True)
    size = 2 if uses_bf16(config, kind == "cuda") else 4  # bytes per number in products
    D, layers = shape.hidden_size, shape.num_hidden_layers
    heads = getattr(shape, "num_attention_heads", 0)  # A state-space model has none.
    head = head_size(shape) if heads else 0
    kv_width = head * (getattr(shape, "num_key_value_heads", None) or heads)
    samplers = (not config.server) + bool(config.frozen())  # Frozen roles have a second sampler.
    token = 2 * layers * kv_width * (2 if kind == "cuda" else 4)
    copy = size * weights
    if kind == "cpu":  # A second copy has oneDNN's layout. Each has the head in fp32 (4 bytes) too.
        copy = 2 * (copy + 4 * shape.vocab_size * D)
    process = PROCESS[kind] + NCCL[kind] * (world > 1)
    parts = {"process": process, "KV pool": token * samplers, "graphs": GRAPHS[kind] * samplers}
    parts["sampler"] = copy * samplers
    if not training:
        return parts | {"weights": size * weights * (kind == "cpu")}  # The model stays on the CPU.
    embeddings = shape.vocab_size * D * (1 if shape.tie_word_embeddings else 2)  # and the head
    layer = (weights - embeddings) / layers
    state = {"weights": 4 * trained + size * weights * adapters}
    state |= {"gradients": 4 * trained, "optimizer": 8 * trained}
    # FSDP gathers two layers with their gradients, and two copies of the weights outside layers.
    if config.fsdp:
        state = {name: part / world for name, part in state.items()}
        state["copies"] = 2 * size * embeddings + 2 * (4 + 2 * size) * layer
    else:  # autocast's copies of trained weights, and DDP's gradient buckets, which are never freed
        state |= {"copies": size * trained * (size == 2), "buckets": 4 * trained * (world > 1)}
    parts |= state | {"reference": size * weights * bool(config.kl_beta and not adapters)}
    # A micro-batch has the activations of all layers, and beside them either the logits or the
    # temporary tensors of one layer's backward pass.
    no_autocast = config.fsdp or adapters  # Then autocast converts at most the adapters.
    width = D + (getattr(shape, "intermediate_size", None) or 4 * D) + head * heads + kv_width
    bytes_per_width = ACTIVATION_BYTES[0 if size == 4 else 1 + no_autocast]
    token_bytes = bytes_per_width * width + 7 * size * config.lora_rank  # in one layer
    token_bytes += MAX_KEYS_PER_TOKEN * 2 * size * kv_width  # gathered keys and values
    tokens = max(config.micro_tokens, longest) if can_pack(shape) else longest
    layer_bytes = tokens * token_bytes
    if config.recompute_activations:
        layer_bytes = tokens * (size if no_autocast else 4) * D
    masks = size * tokens * longest * (kind == "cpu")
    chunk = linear_loss.CHUNK_TOKENS_CUDA if kind == "cuda" else 3 * linear_loss.CHUNK_TOKENS_CPU
    head_gradient = 4 * shape.vocab_size * D * (not adapters)
    logits = 4 * shape.vocab_size * (chunk if can_pack(shape) else 3 * longest)
    temporary = max(logits + 2 * head_gradient, tokens * 1.5 * token_bytes + head_gradient)
    return parts | {"micro-batch": layers * layer_bytes + masks + temporary}
