"""LoRA: small adapters are trained beside frozen weights (arXiv 2106.09685).

    y = W x + (α/R) · B (A x) ,   A [R, in] ,   B [out, R]

Every linear layer of the decoder's layers gets an adapter, in attention and MLP, as in QLoRA
(arXiv 2305.14314) and in Schulman et al., "LoRA Without Regret" (Thinking Machines, 2025). Schulman
et al. find that adapters in attention alone learn less, and that small ranks are enough for RL.
Their α of 32 is used here too: with it the best learning rate hardly depends on R and is about ten
times that of full training. A is initialised as nn.Linear's weight, as in LoRA's own code. B is 0,
so that training begins at the model itself. In transformers the experts of a mixture are no linear
layers, so they get no adapters.

Departure from the textbook: there is no dropout on A's input. With it the gradient would belong to
another distribution than the one that was sampled. Adapters are fp32 for any type of the weights.

The sampler's copy has the adapters merged in (`LoRALinear.merged_weight`). With the adapters off,
the same modules are the model that the run began with. It is the reference of the KL term.

On disk adapters have PEFT's names: PeftModel.from_pretrained(base, "runs/NAME/checkpoint/adapter").

Tests: `pytest tests/test_lora.py`.
"""

import json
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

import kernels
from atomic import reason
from config import UserError
from family import gather_full
from processes import is_first
from trainer.policy import layers

ALPHA = 32
ADAPTER = "adapter"  # the adapters' folder, within the folder of the merged model
WEIGHTS = "adapter_model.safetensors"


class LoRALinear(nn.Linear):
    """A linear layer with a frozen weight and an adapter of rank R. It replaces the layer `plain`.

    Weight and bias are those of `plain`, not copies.
    """

    def __init__(self, plain: nn.Linear, rank: int, generator: torch.Generator):
        nn.Module.__init__(self)
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.weight = plain.weight
        self.bias = plain.bias
        self.scale = ALPHA / rank
        self.on = True
        # The CPU draws the numbers, so that they are the same on every device.
        bound = 1 / math.sqrt(self.in_features)
        a = torch.empty(rank, self.in_features, device="cpu")
        a.uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(a.to(plain.weight.device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, device=plain.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        y = kernels.linear(x, self.weight, self.bias)
        if not self.on:
            return y
        return y + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """W + (α/R) · B A in fp32, gathered from all ranks if it is sharded."""
        weight, a, b = (gather_full(x) for x in (self.weight, self.lora_A, self.lora_B))
        return torch.addmm(weight.float(), b, a, alpha=self.scale)


def add_adapters(model: nn.Module, rank: int, seed: int) -> None:
    """Freezes the model, and gives every linear layer of its decoder's layers an adapter.

    UserError for a model without linear layers.
    """
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, module in list(layers(model).named_modules()):
        if type(module) is nn.Linear:
            layers(model).set_submodule(name, LoRALinear(module, rank, generator))
    if not lora_layers(model):
        raise UserError(
            f"--lora_rank {rank}: {type(model).__name__} has no linear layers; leave the option out"
        )


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """The layers of a model that have an adapter, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


def reference(policy: nn.Module):
    """A callable like the policy, which computes the model without adapters."""

    def call(batch, **options):
        modules = lora_layers(policy).values()
        for module in modules:
            module.on = False
        try:
            return policy(batch, **options)
        finally:
            for module in modules:
                module.on = True

    return call


# ---------------------------------------------------------------- on disk


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights by name on rank 0's CPU, with the adapters, if any, merged in.

    A weight keeps its dtype. Tied weights appear once, under their first name. Every rank must call
    it, and other ranks get an empty dictionary.
    """
    modules = lora_layers(model)
    weights = {}
    ids = set()  # of the weights so far
    for name, value in model.state_dict(keep_vars=True).items():
        owner, _, kind = name.rpartition(".")
        is_adapter = owner in modules and kind.startswith("lora_")
        if is_adapter or id(value) in ids:
            continue
        ids.add(id(value))
        if owner in modules and kind == "weight":
            weight = modules[owner].merged_weight().to(value.dtype)
        else:
            weight = gather_full(value)
        if is_first():
            weights[name] = weight.cpu().contiguous()
    return weights


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters, by PEFT's names."""
    parameters = model.named_parameters()
    return {f"base_model.model.{name}.weight": p for name, p in parameters if "lora_" in name}


def write_adapters(folder: Path, model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Writes the folder that PEFT loads: `weights`, and the config that gives them their scale."""
    modules = lora_layers(model)
    base = model.name_or_path
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": os.path.abspath(base) if os.path.exists(base) else base,
        "r": next(iter(modules.values())).lora_A.shape[0],
        "lora_alpha": ALPHA,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(weights, folder / WEIGHTS)


@torch.no_grad()
def read_adapters(folder: Path, model: nn.Module) -> None:
    """Loads the adapters beside a merged model. UserError if they do not fit the model."""
    file = folder / ADAPTER / WEIGHTS
    try:
        weights = load_file(file)
        for name, parameter in adapters(model).items():
            parameter.copy_(weights[name].view_as(parameter))
    except Exception as error:  # safetensors raises its own types.
        raise UserError(f"{file} does not fit the model: {reason(error)}") from None
