"""What a process will hold in memory, by arithmetic and before anything is loaded.

`memory_parts` counts what lies there all the time: weights, gradients, moments, the sampler's
copy, its KV pool, and what CUDA itself takes. `micro_batch_bytes` counts what the largest
micro-batch adds at its worst moment: when the loss is made, when a layer goes backward, or when
FSDP sums the gradients of embedding and head over the ranks. All are bytes of one process.

The activations are those of a Qwen3 layer in transformers; Qwen2's and Llama's are about an
eighth smaller. tests/test_memory.py counts every tensor of a real step and compares.

Tests: `pytest tests/test_memory.py`.
"""

import os

import torch
from transformers import AutoModelForCausalLM

import kernels
from config import UserError
from trainer.loading import load_shape

GIB = 2**30
# These three are estimates and were not measured: a CUDA context with its libraries, NCCL's
# buffers, and the sampler's CUDA graphs with the workspaces of prefill and drawing.
CUDA_CONTEXT = 0.6 * GIB
NCCL = 1.0 * GIB
GRAPHS = 1.0 * GIB


def memory_plan(
    model: str, *, config, longest: int, world: int, device, training: bool = True
) -> str:
    """One line: GiB a process by purpose. UserError if it cannot fit, with what would.

    `model` is a folder or a hub name, `longest` the longest sample in tokens.
    """
    shape = load_shape(model)
    parameters = count_parameters(shape)
    cuda = device.type == "cuda"
    parts = memory_parts(
        shape, parameters, config=config, world=world, cuda=cuda, training=training
    )
    lasting = sum(parts.values())
    if training:
        parts["micro-batch"] = micro_batch_bytes(
            shape, parameters, config=config, longest=longest, cuda=cuda
        )
    total = sum(parts.values())
    have = memory_of(device)
    items = [f"{name} {part / GIB:.2f}" for name, part in parts.items() if part > GIB / 200]
    listed = ", ".join(items)
    if total <= have:
        return (
            f"memory per process, GiB: {listed}; {lasting / GIB:.2f} before activations, "
            f"{total / GIB:.2f} in all, of {have / GIB:.1f}"
        )
    advice = what_would_fit(config, parts["KV pool"], total - have, training)
    raise UserError(
        f"{total / GIB:.1f} GiB per process are needed ({listed}) and {have / GIB:.1f} are there: "
        f"{advice}"
    )


def what_would_fit(config, pool: float, excess: float, training: bool) -> str:
    """Advice for a plan that is `excess` bytes too large, of which the KV pool takes `pool`."""
    room = pool - excess  # what everything else leaves to the KV pool
    if room > 0.1 * pool:
        return f"--kv_tokens {int(config.kv_tokens * room / pool)} would fit"
    if training and not config.recompute_activations:
        return "use --recompute_activations, and --fsdp over more processes"
    if training and not config.fsdp:
        return "use --fsdp over more processes"
    if training:
        return "use a smaller model or more processes"
    return "use a smaller model"


def count_parameters(shape) -> int:
    """The number of a model's parameters; nothing is allocated."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a config it cannot build
        raise UserError(f"cannot build a {shape.model_type} model: {error}") from None
    return sum(parameter.numel() for parameter in model.parameters())


def memory_of(device) -> int:
    """Bytes that a process may use: the GPU's, or its share of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes


# ---------------------------------------------------------------- what lies there all the time


def memory_parts(
    shape, parameters: int, *, config, world: int, cuda: bool, training: bool = True
) -> dict[str, float]:
    """Bytes per process by purpose, before activations.

    `shape` is the model's transformers config, `parameters` the number of its parameters.

    The part "copies" is the weights that a micro-batch computes with. Autocast keeps a bf16 copy of
    all. FSDP gathers what lies outside the layers (embedding and head) and two layers, since the
    next one is under way.
    """
    size = 2 if cuda else 4  # bytes of a number outside the master weights
    # A role that the start's weights play has a sampler of its own; servers take one away.
    models = (not config.server) + bool(config.frozen())
    pool = kv_bytes(shape, size) * config.kv_tokens
    parts = {}
    if training:
        parts |= trainer_parts(shape, parameters, config=config, world=world, cuda=cuda)
    elif not cuda:  # a GPU gets the sampler's copy only
        parts["weights"] = 4 * parameters
    parts["sampler"] = size * parameters * models
    parts["KV pool"] = pool * models
    if training and config.kl_beta:
        parts["reference"] = size * parameters
    if cuda:
        parts["CUDA"] = CUDA_CONTEXT + (GRAPHS if models else 0) + (NCCL if world > 1 else 0)
    return parts


def trainer_parts(shape, parameters: int, *, config, world: int, cuda: bool) -> dict[str, float]:
    """The trainer's share of memory_parts."""
    size = 2 if cuda else 4
    state = 4 * parameters  # fp32
    parts = {"weights": state, "gradients": state, "optimizer": 2 * state}
    if config.fsdp:
        parts = {name: part / world for name, part in parts.items()}
        gathered = outside_layers(shape) + 2 * layer_parameters(shape, parameters)
        parts["copies"] = size * gathered
        return parts
    if world > 1:
        parts["gradients"] *= 2  # DDP adds buckets of the same size
    if cuda:
        parts["copies"] = size * parameters
    return parts


def outside_layers(shape) -> int:
    """Parameters of the embedding and, if it is another matrix, the LM head."""
    head = shape.vocab_size * shape.hidden_size
    return head if shape.tie_word_embeddings else 2 * head


def layer_parameters(shape, parameters: int) -> float:
    """Parameters of one layer."""
    return (parameters - outside_layers(shape)) / shape.num_hidden_layers


def kv_bytes(shape, size: int) -> int:
    """Bytes of one token's keys and values in all layers, at `size` bytes a number."""
    return 2 * shape.num_hidden_layers * kv_heads(shape) * head_size(shape) * size


def kv_heads(shape) -> int:
    """Heads of keys and values; models without grouped heads do not name them."""
    return getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads


def head_size(shape) -> int:
    """Width of one head."""
    return getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads


# ---------------------------------------------------------------- what a micro-batch adds


def micro_batch_bytes(shape, parameters: int, *, config, longest: int, cuda: bool) -> float:
    """Bytes that the largest micro-batch adds at its worst moment, if every token carries loss.

    Without recomputation every layer keeps all that its backward pass needs. With it every layer
    keeps its input, and only the layer that goes backward holds the rest.
    """
    tokens = max(config.micro_tokens, longest)  # a longer sample stands alone
    size = 2 if cuda else 4
    stream = 2 if cuda and config.fsdp else 4  # the residual stream; autocast leaves it fp32
    D = shape.hidden_size
    layer = layer_bytes(shape, size, stream)
    kept = shape.num_hidden_layers * layer
    recomputed = 0
    if config.recompute_activations:
        kept = shape.num_hidden_layers * stream * D
        recomputed = layer
    # The final norm; the loss's hidden states and their gradients, each before and after a cast.
    ends = (4 + stream + size) * D + 4 * size * D
    passing = 2 * size * feed_forward(shape) + 3 * stream * D  # gradients on their way down

    head = shape.vocab_size * D
    head_gradient = (size if config.fsdp else 4) * head
    sums = 0  # FSDP holds gradients in `size` bytes and, to sum them over the ranks, in fp32
    embedding_sums = 0
    if config.fsdp:
        sums = 2 * (size + 4) * layer_parameters(shape, parameters)
        embedding_sums = (size + 4) * outside_layers(shape)

    loss = tokens * (kept + ends) + 4 * head + logits_bytes(shape, cuda)
    loss_backward = tokens * (kept + ends) + 4 * head + head_gradient
    layer_backward = tokens * (kept + recomputed + passing + ends) + head_gradient + sums
    return max(loss, loss_backward, layer_backward, embedding_sums)


def logits_bytes(shape, cuda: bool) -> int:
    """Bytes of the loss's chunk of logits; the plain form keeps softmax and gradient beside it."""
    if cuda:
        return 4 * shape.vocab_size * kernels.linear_loss.CHUNK_TOKENS_CUDA
    return 3 * 4 * shape.vocab_size * kernels.linear_loss.CHUNK_TOKENS_CPU


def layer_bytes(shape, size: int, stream: int) -> int:
    """Bytes a token that the backward pass of one Qwen3 layer needs.

    `size` bytes a number in products, `stream` in the residual stream.
    """
    queries = shape.num_attention_heads * head_size(shape)
    keys = kv_heads(shape) * head_size(shape)
    # Two norms keep an fp32 copy of their input, what they made of it, and it times their weight.
    norms = 2 * (4 + stream + size) * shape.hidden_size
    if stream != size:
        # Autocast casts a norm's output anew for each of the five products that read one.
        norms += 3 * size * shape.hidden_size
    head_norms = (4 + size) * (queries + keys)
    # Queries, keys, values, and the output twice: as it is made and as the next product reads it.
    attention = size * (3 * queries + 2 * keys)
    mlp = 4 * size * feed_forward(shape)  # gate, its SiLU, up, and their product
    return norms + head_norms + attention + mlp


def feed_forward(shape) -> int:
    """Width of what one token passes through in the MLP."""
    experts = getattr(shape, "num_experts_per_tok", None)
    expert_width = getattr(shape, "moe_intermediate_size", None)
    if experts and expert_width:
        return experts * expert_width
    return getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size
