"""What a process will hold in memory, by arithmetic and before anything is loaded.

`memory_parts` counts what lies there all the time: weights, gradients, moments, the sampler's
copy, its KV pool, and what CUDA itself takes. `micro_batch_bytes` counts what the largest
micro-batch adds at its worst moment: when the loss is made, when a layer goes backward, or when
FSDP sums the gradients of embedding and head over the ranks. All are bytes of one process.

The activations are those of a Qwen3 layer in transformers; Qwen2's and Llama's are about an
eighth smaller. tests/test_memory.py counts every tensor of a real step and compares.

On a CPU a process holds more than its tensors: two runs of the atlas came to 11.9 GiB where 8.9
were planned, and to 9.2 where it was 6.5. To give the C library's free memory back after each phase
(malloc_trim) took 2 GiB off between the phases, and nothing off the peak.

Tests: `pytest tests/test_memory.py`.
"""

import os

import torch
from transformers import AutoModelForCausalLM

import kernels
from config import UserError, uses_bf16
from trainer.batches import MAX_KEYS_PER_TOKEN
from trainer.loading import load_shape
from trainer.lora import add_adapters

GIB = 2**30
# These three are estimates and were not measured: a CUDA context with its libraries, NCCL's
# buffers, and the sampler's CUDA graphs with the workspaces of prefill and drawing.
CUDA_CONTEXT = 0.6 * GIB
NCCL = 1.0 * GIB
GRAPHS = 1.0 * GIB
ADAPTED = 7  # linear layers of a decoder's layer, which get adapters


def memory_plan(
    model: str, *, config, longest: int, world: int, device, training: bool = True
) -> str:
    """One line: GiB a process by purpose. UserError if it cannot fit, with what would.

    `model` is a folder or a hub name, `longest` the longest sample in tokens.
    """
    shape = load_shape(model)
    parameters, adapters = count_parameters(shape, config.lora_rank)
    cuda = device.type == "cuda"
    counts = {"config": config, "adapters": adapters, "cuda": cuda}
    parts = memory_parts(shape, parameters, world=world, training=training, **counts)
    lasting = sum(parts.values())
    if training:
        parts["micro-batch"] = micro_batch_bytes(shape, parameters, longest=longest, **counts)
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
    if training and not config.fsdp and not config.lora_rank:
        return "use --lora_rank 16, or --fsdp over more processes"
    if training and not config.fsdp:
        return "use --fsdp over more processes"
    if training:
        return "use a smaller model or more processes"
    return "use a smaller model"


def count_parameters(shape, lora_rank: int) -> tuple[int, int]:
    """The numbers of a model's parameters and of its adapters'; no weight is allocated."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a config it cannot build
        raise UserError(f"cannot build a {shape.model_type} model: {error}") from None
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if not lora_rank:
        return parameters, 0
    add_adapters(model, lora_rank, seed=0)
    return parameters, sum(p.numel() for p in model.parameters() if p.requires_grad)


def memory_of(device) -> int:
    """Bytes that a process may use: the GPU's, or its share of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes


# ---------------------------------------------------------------- what lies there all the time


def memory_parts(
    shape,
    parameters: int,
    *,
    config,
    world: int,
    cuda: bool,
    training: bool = True,
    adapters: int = 0,
) -> dict[str, float]:
    """Bytes of one process by purpose. `shape` is a transformers config, `parameters` the number
    of its parameters, `adapters` that of the parameters of its adapters (0: all are trained).

    The part "copies" is the weights that a micro-batch computes with. Autocast keeps a bf16 copy of
    all that are fp32. FSDP gathers what lies outside the layers (embedding and head) and two
    layers, since the next one is under way. Frozen weights are in bf16 already, and with the
    adapters off they are the reference.
    """
    size = 2 if uses_bf16(config, cuda) else 4  # bytes of a number outside the master weights
    # A role that the start's weights play has a sampler of its own; servers take one away.
    models = (not config.server) + bool(config.frozen())
    copies = models
    if training and adapters and config.frozen() and not config.fsdp:
        copies -= 1  # the frozen role's sampler and the trainer share the frozen weights
    pool = kv_bytes(shape, 2 if cuda else 4) * config.kv_tokens  # on a CPU it is always fp32
    parts = {}
    if training:
        parts |= trainer_parts(
            shape, parameters, config=config, world=world, size=size, adapters=adapters
        )
    elif not cuda:  # a GPU gets the sampler's copy only
        parts["weights"] = size * parameters
    parts["sampler"] = size * parameters * copies
    parts["KV pool"] = pool * models
    if training and config.kl_beta and not adapters:
        parts["reference"] = size * parameters
    if cuda:
        parts["CUDA"] = CUDA_CONTEXT + (GRAPHS if models else 0) + (NCCL if world > 1 else 0)
    return parts


def trainer_parts(
    shape, parameters: int, *, config, world: int, size: int, adapters: int
) -> dict[str, float]:
    """The trainer's share of memory_parts."""
    trained = adapters or parameters
    frozen = parameters if adapters else 0
    state = 4 * trained  # fp32
    parts = {"weights": size * frozen + state, "gradients": state, "optimizer": 2 * state}
    if config.fsdp:
        parts = {name: part / world for name, part in parts.items()}
        gathered = outside_layers(shape) + 2 * layer_parameters(shape, parameters)
        parts["copies"] = size * gathered
        return parts
    if world > 1:
        parts["gradients"] *= 2  # DDP adds buckets of the same size
    if size == 2:
        parts["copies"] = size * trained
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


def micro_batch_bytes(
    shape, parameters: int, *, config, longest: int, cuda: bool, adapters: int = 0
) -> float:
    """Bytes that the largest micro-batch adds at its worst moment, if every token carries loss.

    Without recomputation every layer keeps all that its backward pass needs. With it every layer
    keeps its input, and only the layer that goes backward holds the rest. `adapters` as in
    `memory_parts`.
    """
    tokens = max(config.micro_tokens, longest)  # a longer sample stands alone
    bf16 = uses_bf16(config, cuda)
    size = 2 if bf16 else 4
    # The residual stream has the type of the embedding; autocast leaves an fp32 one as it is.
    stream = 2 if bf16 and (config.fsdp or adapters) else 4
    D = shape.hidden_size
    layer = layer_bytes(shape, size, stream)
    if adapters:
        layer += ADAPTED * size * config.lora_rank
    if config.share_prefixes:
        layer += MAX_KEYS_PER_TOKEN * 2 * size * kv_heads(shape) * head_size(shape)
        # On a CPU attention keeps each sequence's mask, a number for each query and key.
        layer += 0 if cuda else size * longest
    kept = shape.num_hidden_layers * layer
    recomputed = 0
    if config.recompute_activations:
        kept = shape.num_hidden_layers * stream * D
        recomputed = layer
    # The final norm; the loss's hidden states and their gradients, each before and after a cast.
    ends = (4 + stream + size) * D + 4 * size * D
    passing = 2 * size * feed_forward(shape) + 3 * stream * D  # gradients on their way down

    head = shape.vocab_size * D
    head_sum = 4 * head
    head_gradient = (size if config.fsdp else 4) * head
    sums = 0  # FSDP holds gradients in `size` bytes and, to sum them over the ranks, in fp32
    embedding_sums = 0
    if config.fsdp:
        sums = 2 * (size + 4) * (adapters or layer_parameters(shape, parameters))
        embedding_sums = (size + 4) * outside_layers(shape)
    if adapters:
        # Only on a CPU is a frozen head in bf16 copied, to fp32.
        head_sum = 4 * head if bf16 and not cuda else 0
        head_gradient = 0
        embedding_sums = 0

    loss = tokens * (kept + ends) + head_sum + logits_bytes(shape, cuda)
    loss_backward = tokens * (kept + ends) + head_sum + head_gradient
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
