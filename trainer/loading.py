"""Loads a model, and decides whether its samples can be packed.

In a packed row, attention alone keeps samples apart (attention.py). That is exact if attention over
all earlier tokens is the only operation that mixes tokens, and if the logits are hidden states
times LM head: Qwen2, Qwen3, Llama, and models with the same computation. Any other causal model is
trained with one sample per micro-batch, through its own forward and its own logits (policy.py). The
auxiliary loss of a mixture of experts is not part of the objective.

Tests: `pytest tests/test_loading.py`.
"""

import math
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from atomic import reason
from config import UserError
from family import unsupported_reason

transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()  # `load_model` itself checks the weights.


def can_pack(config) -> bool:
    """Whether samples of a model with this transformers config can be packed into one row."""
    return unsupported_reason(config) is None


class AsLoaded(GenerationConfig):
    """A model's settings for `generate`, which are saved exactly as they were loaded.

    Many published settings contradict themselves, and transformers before 5.23 refuses to save
    those. This repository never generates with them.
    """

    def validate(self, **options):
        """Accepts everything."""


def load_model(path: str | Path, device, *, dtype=torch.float32) -> PreTrainedModel:
    """A causal language model from a folder or the hub, its parameters in `dtype`, on `device`.

    UserError for a model that cannot be read, lacks weights or has its own code (which is never
    run).
    """
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # transformers and safetensors raise many types for a bad folder.
        raise UserError(f"cannot load a model from {path}: {reason(error)}") from None
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(
            f"cannot load a model from {path}: {len(missing)} of its weights are missing, such as "
            f"{missing[0]}"
        )
    model.generation_config.__class__ = AsLoaded
    model.config.output_attentions = False  # Otherwise transformers refuses to save the model.
    return model.to(device)


def load_shape(path: str | Path):
    """The transformers config of a model, for its text part. UserError if it cannot be read."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
    except Exception as error:  # as in load_model
        raise UserError(f"cannot read a model at {path}: {reason(error)}") from None


def check_positions(path: str | Path, longest: int) -> None:
    """UserError if a model has fewer positions than the longest sample, in tokens.

    Scaled rotary embeddings reach `factor` times the original number of positions. Where a config
    does not name the original, max_position_embeddings counts as it. The factor of llama3 has
    another meaning. Without a number there is no limit.
    """
    config = load_shape(path)
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or positions
    if rope.get("rope_type") != "llama3":
        positions = max(positions, original * (rope.get("factor") or 1))
    if longest > positions:
        raise UserError(
            f"{path} has {positions:.0f} positions, fewer than one context of {longest} tokens; "
            "lower the episode's limits, leave out longer demonstrations, or use another model"
        )
