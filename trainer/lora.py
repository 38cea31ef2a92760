"""LoRA: small adapters are trained beside frozen weights (arXiv 2106.09685).

    y = W x + (α/R) · B (A x) ,   A [R, in] ,   B [out, R]

Which layers: all linear layers of the decoder's layers, attention and MLP, as in QLoRA (arXiv
2305.14314) and in Schulman et al., "LoRA Without Regret" (Thinking Machines, 2025), which finds
that attention alone learns less and that RL needs but small ranks. Embedding and LM head stay as
they are. α is 32 as in the latter, so that the best learning rate hardly depends on R. That rate is
about ten times the best one of full training. A is drawn as nn.Linear draws its weight, as in
LoRA's own code, and B is 0: training starts at the model itself.

Departure from the textbook: no dropout on A's input, which would differentiate another
distribution than the one that was sampled. Adapters are fp32, whatever the frozen weights are.

The sampler's copy has the adapters merged in (`LoRALinear.merged_weight`). With the adapters off
the same modules are the model that the run began with, which is the KL term's reference.

Tests: `pytest tests/test_lora.py`.
"""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import kernels
from config import UserError
from processes import is_first
from trainer.policy import layers

ALPHA = 32
PEFT_NAME = "base_model.model.{}.{}.weight"  # the layer's name, then lora_A or lora_B


class LoRALinear(nn.Linear):
    """A linear layer with a frozen weight, and an adapter of rank R beside it.

    It shares the weight and the bias of the layer that it takes the place of.
    """

    def __init__(self, plain: nn.Linear, rank: int, generator: torch.Generator):
        nn.Module.__init__(self)
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.weight = plain.weight
        self.bias = plain.bias
        self.scale = ALPHA / rank
        self.on = True
        # Drawn on the CPU, so that every device gets the same.
        bound = 1 / math.sqrt(self.in_features)
        a = torch.empty(rank, self.in_features, device="cpu")
        a.uniform_(-bound, bound, generator=generator)
        b = torch.zeros(self.out_features, rank)
        self.lora_A = nn.Parameter(a.to(plain.weight.device))
        self.lora_B = nn.Parameter(b.to(plain.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        y = kernels.linear(x, self.weight, self.bias)
        if not self.on:
            return y
        return y + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """W + (α/R) · B A in fp32, gathered from all ranks where it is sharded."""
        weight, a, b = (gathered(x) for x in (self.weight, self.lora_A, self.lora_B))
        return torch.addmm(weight.float(), b, a, alpha=self.scale)


def gathered(parameter: Tensor) -> Tensor:
    """A parameter's values; under FSDP2 every rank must call this."""
    if hasattr(parameter, "full_tensor"):
        parameter = parameter.full_tensor()
    return parameter.detach()


def add_adapters(model: nn.Module, rank: int, seed: int) -> None:
    """Freezes the model, and puts an adapter beside every linear layer of its decoder's layers.

    UserError for a model that has no such layer.
    """
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, module in list(layers(model).named_modules()):
        if type(module) is nn.Linear:
            layers(model).set_submodule(name, LoRALinear(module, rank, generator))
    if not adapted(model):
        raise UserError(
            f"--lora_rank {rank}: {type(model).__name__} has no linear layers; leave it out"
        )


def adapted(model: nn.Module) -> dict[str, LoRALinear]:
    """The layers of a model that have an adapter, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


def reference(policy: nn.Module):
    """What `logprob` takes for the policy with its adapters off: it needs no memory of its own.

    With them off the policy is the model that it was before it got them.
    """

    def call(batch, **options):
        found = adapted(policy).values()
        for module in found:
            module.on = False
        try:
            return policy(batch, **options)
        finally:
            for module in found:
                module.on = True

    return call


# ---------------------------------------------------------------- on disk


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights by name, with the adapters merged in where there are some, on rank 0's CPU.

    A weight keeps its dtype, and tied weights appear once, under their first name. Every rank must
    call it.
    """
    found = adapted(model)
    weights = {}
    seen = set()
    for name, value in model.state_dict(keep_vars=True).items():
        owner, _, kind = name.rpartition(".")
        adapter = owner in found and kind.startswith("lora_")
        if adapter or id(value) in seen:
            continue
        seen.add(id(value))
        merged = gathered(value)
        if owner in found and kind == "weight":
            merged = found[owner].merged_weight().to(value.dtype)
        if is_first():
            weights[name] = merged.cpu().contiguous()
    return weights


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """The adapters by the names that `peft` gives them, on the CPU. Every rank must call it."""
    weights = {}
    for name, module in adapted(model).items():
        for kind in ("lora_A", "lora_B"):
            weights[PEFT_NAME.format(name, kind)] = gathered(getattr(module, kind)).cpu()
    return weights


def write_adapters(folder: Path, model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Writes `adapter_weights` as a folder that `peft` and vLLM load beside the model itself."""
    found = adapted(model)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name_or_path,
        "r": len(next(iter(found.values())).lora_A),
        "lora_alpha": ALPHA,
        "target_modules": sorted({name.rpartition(".")[2] for name in found}),
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    save_file(weights, folder / "adapter_model.safetensors")


@torch.no_grad()
def read_adapters(folder: Path, model: nn.Module) -> None:
    """Loads the adapters that `write_adapters` wrote. UserError if they do not fit the model."""
    path = folder / "adapter_model.safetensors"
    try:
        weights = load_file(path)
        for name, module in adapted(model).items():
            for kind in ("lora_A", "lora_B"):
                parameter = getattr(module, kind)
                parameter.copy_(weights[PEFT_NAME.format(name, kind)].view_as(parameter))
    except Exception as error:  # safetensors has errors of its own kind
        raise UserError(f"{path} does not fit the model: {error or type(error).__name__}") from None
