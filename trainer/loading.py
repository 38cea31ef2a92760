"""A model as the trainer gets it: loaded whole, and packed only where packing is exact.

Packed training lays samples end to end and keeps them apart by attention alone (attention.py). That
is exact where attention over all earlier tokens is the only thing that mixes tokens, and where the
logits are plainly hidden states times LM head: Qwen2, Qwen3, Llama, and what is the same
computation. Any other causal model trains too: one sample a micro-batch, through its own forward
and its own logits (policy.py), which is exact for each of them. What other engines leave out, this
leaves out too: a router's auxiliary loss is no part of the objective.

Tests: `pytest tests/test_loading.py`.
"""

import math
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from atomic import reason
from config import UserError
from family import unsupported_reason

transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()  # `load_model` itself checks what was loaded


def can_pack(shape) -> bool:
    """Whether samples may lie end to end in one row; `shape` is a model's transformers config."""
    return unsupported_reason(shape) is None


class AsLoaded(GenerationConfig):
    """A model's settings for `generate`, written back as they came, contradictions included.

    Many published ones contradict themselves, and transformers before 5.23 refuses to write those.
    """

    def validate(self, **options):
        """Finds nothing wrong: nobody here generates by them."""


def load_model(path: str | Path, device, *, dtype=torch.float32) -> nn.Module:
    """A causal language model from a folder or the hub, its parameters in `dtype`, on `device`.

    UserError, one sentence, for a model that cannot be read, lacks weights or brings code of its
    own, which is never run.
    """
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # transformers and safetensors raise many kinds for a bad folder
        raise UserError(f"cannot load a model from {path}: {reason(error)}") from None
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(
            f"cannot load a model from {path}: {len(missing)} of its weights are missing, "
            f"{missing[0]} among them"
        )
    model.generation_config.__class__ = AsLoaded
    model.config.output_attentions = False  # nobody reads them, and no state could be written
    return model.to(device)


def load_shape(path: str | Path):
    """The transformers config of a model, for its text part. UserError if it cannot be read."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # as in load_model
        raise UserError(f"cannot read a model at {path}: {reason(error)}") from None
    return config.get_text_config()


def check_positions(path: str | Path, longest: int) -> None:
    """UserError if a model has fewer positions than the longest sample, in tokens.

    Stretched angles reach `factor` times as far as those before them. Some configs name the longer
    range only, some the shorter one. A model that names none takes any.
    """
    shape = load_shape(path)
    most = getattr(shape, "max_position_embeddings", None) or math.inf
    rope = getattr(shape, "rope_parameters", None) or {}
    before = rope.get("original_max_position_embeddings") or most
    most = max(most, before * (rope.get("factor") or 1))
    if longest > most:
        raise UserError(
            f"{path} has {most:.0f} positions, fewer than one context of {longest} tokens; lower "
            "the episode's limits, leave out longer demonstrations, or use another model"
        )
