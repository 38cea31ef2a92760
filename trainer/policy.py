"""The policy: the model with the objective as its forward pass.

A micro-batch is a packed row of tokens (batches.py), and attention stays within each sample
(attention.py). Only the hidden states that predict a sampled token enter the LM head, and
kernels.linear_grpo_loss computes its loss and gradient. A model that cannot be packed (loading.py)
gets one sample at a time, and the same loss is computed on its own logits. Trained parameters are
always fp32 (master weights), also if the arithmetic is bf16.

DDP is the default, and `--fsdp` is PyTorch's fully_shard (FSDP2) with the same loop and files. DDP
and FSDP take the mean of the ranks' gradients. Here the gradient must be their sum, because the
token weights already divide by global counts. So the loss is multiplied by the number of ranks.

Departure from the textbook: the model is never in training mode. With dropout the gradient would
belong to another distribution than the one that was sampled.

Tests: `pytest tests/test_policy.py tests/test_compiled_layers.py tests/test_loading.py`. Speed
beside padded batches: `python -m bench.train_step`, on a GPU
`python -m bench.gpu --step training_step`.
"""

import contextlib
import functools
from collections.abc import Callable
from types import MethodType, SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

import kernels
from atomic import reason
from config import UserError
from family import gather_full
from trainer.attention import packed_attention
from trainer.batches import MicroBatch, make_micro_batch
from trainer.loading import can_pack

# A transformers model finds its attention function by a name, which Policy sets.
AttentionInterface.register("mars_packed", packed_attention)


class Policy(nn.Module):
    """The language model with the objective as its forward pass.

    `can_pack` tells whether a micro-batch may have several samples. `forward` computes the
    objective too, so that DDP and FSDP, which wrap it, act once per micro-batch. `compiler` is a
    back end of torch.compile (compiler_of), for the layers of a model that can be packed.
    """

    def __init__(self, model, *, bf16: bool, recompute_activations=False, compiler=None):
        super().__init__()
        self.can_pack = can_pack(model.config.get_text_config())
        if self.can_pack:
            model.set_attn_implementation("mars_packed")
        for module in model.modules():
            if type(module) is nn.Linear:
                module.forward = MethodType(linear, module)  # torch.compile takes no partial.
        if model.config.get_text_config() is not model.config:
            freeze_unread(model)
        self.model = model
        self.bf16 = bf16
        self.eval()
        if compiler and self.can_pack:
            compile_layers(model, compiler)
        if recompute_activations:
            for layer in layers(model):
                # FSDP's hooks wrap the new forward, so the recomputation does not call them again.
                layer.forward = functools.partial(
                    checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
                )

    def train(self, mode: bool = True):
        """Stays in evaluation mode for either `mode`."""
        return super().train(False)

    def hidden(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The hidden states [N, D] that predict the loss tokens, and the LM head [V, D].

        The states have the dtype of the arithmetic. The head keeps its dtype: fp32 if it is
        trained, bf16 if FSDP gathers it in bf16 or LoRA freezes it. The loss rounds the head for
        its products and sums the head's gradient in fp32. A cast here would round that gradient to
        bf16.
        """
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.bf16):
            # transformers passes `packing` on to packed_attention.
            states = self.model.base_model(
                batch.tokens, position_ids=batch.positions, use_cache=False, packing=batch
            ).last_hidden_state[0]
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        head = self.model.get_output_embeddings().weight
        return states[batch.loss_positions].to(dtype), head

    def logits(self, batch: MicroBatch) -> Tensor:
        """The fp32 logits [N, V] of the one sample in `batch`, from the model's own forward."""
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.bf16):
            output = self.model(batch.tokens, use_cache=False, logits_to_keep=batch.loss_positions)
        return output.logits[0].float()

    def forward(
        self,
        batch: MicroBatch,
        *,
        temperature: float,
        score: bool = False,
        on_policy: bool = False,
        **objective,
    ):
        """(Σ w·ℓ, stats) of the micro-batch; with `score` only its log-probs [N].

        `objective` has clip_low, clip_high and kl_beta. With `on_policy` the policy's present
        log-probs replace the batch's old log-probs, so that the importance ratio ρ is 1.
        """
        if self.can_pack:
            inputs = self.hidden(batch)
            logprob_of, loss_of = kernels.linear_logprob, kernels.linear_grpo_loss
        else:
            inputs = [self.logits(batch)]
            logprob_of, loss_of = kernels.logits_logprob, kernels.logits_grpo_loss
        if score:
            return logprob_of(*inputs, batch.target, temperature=temperature)[0]
        old_logprob = batch.old_logprob
        if on_policy:
            with torch.no_grad():
                old_logprob, _ = logprob_of(*inputs, batch.target, temperature=temperature)
        return loss_of(
            *inputs,
            batch.target,
            old_logprob,
            batch.advantage,
            batch.weight,
            ref_logprob=batch.ref_logprob,
            temperature=temperature,
            **objective,
        )


def freeze_unread(model) -> None:
    """Freezes what a text does not reach: the vision tower of a multimodal model, for instance.

    DDP waits for the gradients of all trained parameters, and AdamW keeps no state without one.
    """
    read = {*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()}
    for parameter in set(model.parameters()) - read:
        parameter.requires_grad_(False)


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    """The module's forward by kernels.linear, which is faster on some CPUs."""
    return kernels.linear(x, module.weight, module.bias)


def compiler_of(device) -> str | None:
    """The compiler for a policy on `device`: PyTorch's own on CUDA, none on a CPU."""
    return "inductor" if device.type == "cuda" else None


def compile_layers(model, compiler: str) -> None:
    """Lets torch.compile fuse the elementwise operations of each layer.

    All layers share the compiled code, which takes any number of tokens. Attention is not compiled.
    The first call tries the compiler on the first layer, forward and backward. If this fails, a
    sentence says so and nothing is compiled.
    """
    for layer in layers(model):
        layer.forward = torch.compile(layer.forward, backend=compiler, dynamic=True)
    first = layers(model)[0]
    forward = first.forward  # before recomputation wraps it, which would disturb the trial

    def try_compiler(_, inputs, options) -> None:
        hook.remove()
        try:
            with torch.enable_grad():
                x = inputs[0].detach().requires_grad_()
                torch.autograd.grad(forward(x, **options).sum(), x)
        except Exception as error:  # It calls other compilers, which raise errors of any type.
            cause = reason(getattr(error, "inner_exception", error))[:200]
            print(f"torch.compile failed, so training is slower: {cause}", flush=True)
            torch.compiler.set_stance("force_eager")

    hook = first.register_forward_pre_hook(try_compiler, with_kwargs=True)


def layers(model) -> nn.ModuleList:
    """The decoder's layers. Their attribute has different names in different models."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"{type(model).__name__} has no list of its {count} layers: use another model")


@torch.no_grad()
def logprob(policy: Callable, batch: MicroBatch, temperature: float) -> Tensor:
    """The log-probs [N] of a micro-batch's loss tokens. The policy may be wrapped (`parallel`)."""
    values = policy(batch, score=True, temperature=temperature)
    release_masks(batch)
    return values


def score(policy: nn.Module, tokens: list[int]) -> list[float]:
    """The log-probs of tokens[1:], each given all tokens before it. Every rank must call it."""
    count = len(tokens)
    mask = [False] + [True] * (count - 1)
    sample = SimpleNamespace(tokens=tokens, mask=mask, logprobs=[0.0] * count, advantage=0.0)
    device = next(policy.parameters()).device
    batch = make_micro_batch([sample], [torch.ones(count)], [count - 1], device)
    values = logprob(policy, batch, temperature=1.0).tolist()
    if hasattr(policy, "reshard"):  # FSDP2 would keep the root whole until a backward pass.
        policy.reshard()
    return values


def unwrap(policy: nn.Module) -> Policy:
    """The Policy within a wrapped policy. DDP stores it as `module`; FSDP2 changes it in place."""
    return getattr(policy, "module", policy)


def parallel(policy: Policy, *, fsdp: bool, device) -> nn.Module:
    """The policy for all ranks: unchanged for one process, wrapped in DDP, or sharded by FSDP2.

    FSDP2 keeps fp32 parameters and gathers one layer at a time, in bf16 if the policy computes so.
    It moves each layer to `device` and shards it at once. So a model on the CPU is never whole on a
    GPU.
    """
    if not fsdp and not dist.is_initialized():
        return policy
    if not fsdp:
        device_ids = [device.index] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(policy, device_ids=device_ids)
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if policy.bf16 else None,
        reduce_dtype=torch.float32,
        # Otherwise a micro-batch's weights and old log-probs would be cast to bf16.
        cast_forward_inputs=False,
    )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers(policy.model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    return fully_shard(policy, mesh=mesh, mp_policy=precision)


def backward(policy: nn.Module, batches: list[MicroBatch], **objective) -> list[dict]:
    """Computes the gradient of Σ w·ℓ over all micro-batches of all ranks; returns their stats.

    All ranks must have the same number of micro-batches (make_micro_batch makes empty ones).

    DDP sums the gradients over the ranks once, with the last micro-batch. FSDP2 does it with every
    micro-batch. If it waited, each GPU would keep the fp32 gradients of the whole model (33 GB for
    8B parameters, by arithmetic). The sum is the same.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    stats = []
    for number, batch in enumerate(batches, 1):
        last = number == len(batches)
        no_sync = hasattr(policy, "no_sync") and not last  # Only DDP has the attribute.
        with policy.no_sync() if no_sync else contextlib.nullcontext():
            loss, batch_stats = policy(batch, **objective)
            (loss * world).backward()
        release_masks(batch)
        stats.append(batch_stats)
    return stats


def release_masks(batch: MicroBatch) -> None:
    """Frees the attention masks of a CPU, which are large. A step keeps all its micro-batches."""
    if batch.keys is not None:
        batch.keys.masks = None


def clip_gradient(policy: nn.Module, limit: float) -> float:
    """Clips the gradient's norm to `limit`. Returns the norm over all ranks before clipping."""
    return float(gather_full(nn.utils.clip_grad_norm_(policy.parameters(), limit)))


def make_optimizer(policy: nn.Module, lr: float, beta1: float = 0.9):
    """AdamW with β2 = 0.95 and without weight decay, over the trained parameters.

    At β1 = 0.9 a gradient moves the weights during about 1 / (1 − β1) = 10 updates. A run of a few
    steps needs a smaller β1. On CUDA AdamW is fused, since its other form needs more memory.
    """
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    fused = parameters[0].is_cuda or None  # None: PyTorch's own choice on a CPU
    return torch.optim.AdamW(parameters, lr, betas=(beta1, 0.95), weight_decay=0.0, fused=fused)


def schedule(step: int, warmup: int, steps: int | None = None) -> float:
    """The factor on the learning rate in a step. It rises linearly over `warmup` steps.

    With `steps` it is at most 1 − step / steps (linear decay to 0). At a constant rate the last few
    batches would influence the weights more than all batches before them.
    """
    rise = (step + 1) / max(1, warmup)
    fall = 1 - step / steps if steps else 1.0
    return min(1.0, rise, fall)
