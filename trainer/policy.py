"""The policy as the trainer sees it: the model with the objective as its forward pass.

Samples lie end to end in one row of tokens (batches.py), attention stays within each of them
(attention.py), and only the hidden states that predict a sampled token enter the LM head, whose
loss and gradient kernels.linear_grpo_loss makes. A model that cannot be packed (loading.py) gets
one sample at a time, and the same loss on the logits that it makes itself. Parameters that are
trained are always fp32 (master weights), also where the arithmetic is bf16.

DDP is the default, `--fsdp` is PyTorch's fully_shard (FSDP2): the same loop and the same files. The
gradient is a sum over ranks, since the weights already divide by global counts, so the mean that
DDP and FSDP take is multiplied by the number of ranks.

Departure from the textbook: the model never trains in training mode. Dropout would differentiate
another distribution than the one that was sampled.

Tests: `pytest tests/test_policy.py tests/test_loading.py`. Speed beside padded batches:
`python -m bench.train_step`; on a GPU `python -m bench.gpu --step training_step`.
"""

import contextlib
import functools
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

import kernels
from config import UserError
from family import gather_full
from trainer.attention import packed_attention
from trainer.batches import MicroBatch, make_micro_batch
from trainer.loading import can_pack

# transformers' models look their attention up by a name, which Policy sets.
AttentionInterface.register("mars_packed", packed_attention)


class Policy(nn.Module):
    """The language model with the objective as its forward pass.

    `can_pack` says whether a micro-batch may hold several samples. DDP and FSDP act around
    `forward` only. With the objective in it they act once a micro-batch.
    """

    def __init__(self, model, *, bf16: bool, recompute_activations: bool = False):
        super().__init__()
        self.can_pack = can_pack(model.config.get_text_config())
        if self.can_pack:
            model.set_attn_implementation("mars_packed")
        for module in model.modules():
            if type(module) is nn.Linear:
                module.forward = functools.partial(linear, module)
        self.model = model
        self.bf16 = bf16
        self.eval()
        if recompute_activations:
            for layer in layers(model):
                # FSDP's hooks stay outside: they run around forward and not in the recomputation.
                layer.forward = functools.partial(
                    checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
                )

    def train(self, mode: bool = True):
        """Stays in evaluation mode, whatever is asked."""
        return super().train(False)

    def hidden(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The hidden states [N, D] that predict the loss tokens, and the LM head [V, D].

        The states are in the arithmetic's dtype. The head stays as it is: fp32 where it is trained,
        bf16 where FSDP gathers it in bf16, or adapters freeze it. The loss rounds the head for its
        products and sums the head's gradient in fp32. If the head were cast here, that gradient
        would be rounded to bf16.
        """
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.bf16):
            # transformers hands keyword arguments that it does not know on to the attention, here
            # the last three to packed_attention.
            states = self.model.base_model(
                batch.tokens,
                position_ids=batch.positions,
                use_cache=False,
                lengths=batch.lengths,
                cu_seqlens=batch.cu_seqlens,
                keys=batch.keys,
            ).last_hidden_state[0]
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        head = self.model.get_output_embeddings().weight
        return states[batch.loss_positions].to(dtype), head

    def logits(self, batch: MicroBatch) -> Tensor:
        """The logits [N, V] of the one sample in `batch`, fp32, as the stock model makes them."""
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

        `objective` holds clip_low, clip_high and kl_beta. With `on_policy` the old log-probs are
        the policy's own of this moment in place of the batch's, so that ρ is 1.
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


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    """The module's own forward; on some CPUs faster (kernels/products.py)."""
    return kernels.linear(x, module.weight, module.bias)


def layers(model) -> nn.ModuleList:
    """The decoder's layers, whatever the model calls them."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"{type(model).__name__} has no list of its {count} layers: use another model")


@torch.no_grad()
def logprob(policy: nn.Module, batch: MicroBatch, temperature: float) -> Tensor:
    """Log-probs [N] of a micro-batch's loss tokens under a policy, wrapped or not."""
    return policy(batch, score=True, temperature=temperature)


def score(policy: nn.Module, tokens: list[int]) -> list[float]:
    """Log-probs of tokens[1:], each given those before it; every rank calls it."""
    count = len(tokens)
    mask = [False] + [True] * (count - 1)
    sample = SimpleNamespace(tokens=tokens, mask=mask, logprobs=[0.0] * count, advantage=0.0)
    device = next(policy.parameters()).device
    batch = make_micro_batch([sample], [torch.ones(count)], [count - 1], device)
    return logprob(policy, batch, temperature=1.0).tolist()


def unwrap(policy: nn.Module) -> Policy:
    """The Policy itself: DDP holds it as `module`, FSDP2 changes it in place."""
    return getattr(policy, "module", policy)


def parallel(policy: Policy, *, fsdp: bool, device) -> nn.Module:
    """The policy wrapped for the ranks: as it is (one process), DDP, or FSDP2.

    FSDP2 keeps fp32 parameters and gathers each layer on its own, in bf16 on CUDA. It moves a
    layer to `device` before it cuts it up: a model loaded to the CPU never stands whole on a GPU.
    """
    if not fsdp and not dist.is_initialized():
        return policy
    if not fsdp:
        device_ids = [device.index] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(policy, device_ids=device_ids)
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if policy.bf16 else None,
        reduce_dtype=torch.float32,
        # Cast, a micro-batch's weights and old log-probs would be bf16 in the loss.
        cast_forward_inputs=False,
    )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers(policy.model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    return fully_shard(policy, mesh=mesh, mp_policy=precision)


def backward(policy: nn.Module, batches: list[MicroBatch], **objective) -> list[dict]:
    """Gradients of Σ w·ℓ over all micro-batches of all ranks; returns stats of each micro-batch.

    All ranks bring equally many micro-batches (make_micro_batch makes empty ones).

    DDP adds the gradients up over the ranks once, with the last micro-batch. FSDP2 does so with
    every micro-batch, because waiting would keep the whole model's fp32 gradients on each GPU (8B:
    33 GB by arithmetic). The sum is the same.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    stats = []
    for batch in batches:
        last = len(stats) == len(batches) - 1
        alone = hasattr(policy, "no_sync") and not last  # DDP adds ranks' gradients up at the last
        with policy.no_sync() if alone else contextlib.nullcontext():
            loss, numbers = policy(batch, **objective)
            (loss * world).backward()
        stats.append(numbers)
    return stats


def gradient_norm(policy: nn.Module, limit: float) -> float:
    """Clips the gradient's norm to `limit`; returns the norm before, of all ranks."""
    return float(gather_full(nn.utils.clip_grad_norm_(policy.parameters(), limit)))


def make_optimizer(policy: nn.Module, lr: float, weight_decay: float, beta1: float = 0.9):
    """AdamW with β2 = 0.95 over what is trained.

    At β1 = 0.9 a gradient goes on moving the weights for about ten updates, 1 / (1 − β1). A run of
    a few steps has no room for that. Fused on CUDA, since the other form takes memory of its own.
    """
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    fused = parameters[0].is_cuda or None  # None: PyTorch's own choice on a CPU
    return torch.optim.AdamW(
        parameters, lr, betas=(beta1, 0.95), weight_decay=weight_decay, fused=fused
    )


def schedule(step: int, warmup: int, steps: int | None = None) -> float:
    """The factor on the learning rate in a step. It rises in a line over `warmup` steps.

    With `steps` it is at most 1 − step / steps, which falls in a line to 0 (linear decay): at a
    constant rate the last few batches weigh more than all before them.
    """
    rise = (step + 1) / max(1, warmup)
    fall = 1 - step / steps if steps else 1.0
    return min(1.0, rise, fall)
