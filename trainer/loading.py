"""A model as the trainer gets it: loaded whole, and refused if packed training would be wrong.

Packed training is exact for models whose layers mix tokens through attention alone, and call it
through transformers' AttentionInterface. Other models run as well and give wrong gradients without
a word. State-space and convolution layers carry one sample's tokens into the next. Older attention
never sees the samples' boundaries. Scaled or capped logits are not what the objective
differentiates. `check_exact` finds such models by what they say of themselves, and by a probe: 40
tokens through packed attention and through the model's own eager attention.

Tests: `pytest tests/test_loading.py`.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from config import UserError
from trainer.attention import packed_attention

PROBE_LENGTHS = [17, 23]  # tokens of the probe's two samples
# Of the types of layers that transformers names, those that mix tokens through attention alone.
LAYER_TYPES = ("full_attention", "sliding_attention")
BENT_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
# How far the probe's logits may differ, relative to their own size. Rounding stays far below it.
TOLERANCE_FP32 = 1e-3
TOLERANCE_BF16 = 0.1

transformers.logging.disable_progress_bar()


def load_model(path: str | Path, device, *, dtype=torch.float32, training: bool) -> nn.Module:
    """A causal language model from a folder or the hub, its parameters in `dtype`, on `device`.

    With `training` it must pass `check_exact`. UserError, one sentence, for a model that cannot be
    read, lacks weights or brings code of its own, which is never run.
    """
    try:
        with silence():
            model, report = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, trust_remote_code=False, output_loading_info=True
            )
    except Exception as error:  # transformers and safetensors raise many kinds for a bad folder
        raise UserError(f"cannot load a model from {path}: {first_line(error)}") from None
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(
            f"cannot load a model from {path}: {len(missing)} of its weights are missing, "
            f"{missing[0]} among them"
        )
    if training:
        check_exact(model)
    return model.to(device)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """No warnings of transformers: the caller looks what became of its request, and says so."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def load_shape(path: str | Path):
    """The transformers config of a model, for its text part. UserError if it cannot be read."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # as in load_model
        raise UserError(f"cannot read a model at {path}: {first_line(error)}") from None
    return config.get_text_config()


def first_line(error: Exception) -> str:
    """What an error says, cut after its first line; its kind if it says nothing."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return lines[0]


# ---------------------------------------------------------------- is packed training exact?


def check_exact(model: nn.Module, longest: int | None = None) -> None:
    """UserError, one sentence, if packed training of `model` would be wrong.

    A sliding window as wide as the `longest` sample changes nothing and is let through; without
    `longest` every window is refused. The model's attention and mode are left as they were, and
    no generator is touched.
    """
    reason = static_reason(model)
    if reason is None:
        reason = probe_reason(model, longest)
    if reason is not None:
        raise UserError(
            f"the trainer cannot run {type(model).__name__}: {reason}; "
            "use a Qwen2, Qwen3 or Llama model"
        )


def static_reason(model: nn.Module) -> str | None:
    """Why training would be wrong, as far as the model's config tells."""
    config = model.config.get_text_config()
    for name in BENT_LOGITS:
        value = getattr(config, name, None)
        if value not in (None, 1, 1.0):
            return f"the objective needs plain logits, and {name} is {value}"
    head = model.get_output_embeddings()
    if head is None:
        return "it has no LM head"
    if getattr(head, "bias", None) is not None:
        return "the objective needs plain logits, and its LM head has a bias"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder with a decoder"
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            return f"packed samples would leak through its layers of type {kind}"
    rope = str((getattr(config, "rope_parameters", None) or {}).get("rope_type"))
    if rope in ("dynamic", "longrope"):
        return f"its positions (rope type {rope}) depend on the longest sample of a batch"
    return None


@torch.no_grad()
def probe_reason(model: nn.Module, longest: int | None) -> str | None:
    """Why training would be wrong, as two packed samples beside each sample alone show it."""
    config = model.config.get_text_config()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (1, sum(PROBE_LENGTHS)), generator=generator)
    tokens = tokens.to(device)
    samples = tokens.split(PROBE_LENGTHS, dim=1)
    attention = model.config._attn_implementation
    training = model.training
    calls = []
    model.eval()
    try:
        set_attention(model, "eager")
        alone = torch.cat([plain_logits(model, sample) for sample in samples])
        set_attention(model, "mars_probe")
        if model.config._attn_implementation != "mars_probe":
            return "its attention cannot be exchanged (it does not use AttentionInterface)"
        packed = packed_logits(model, tokens, calls)
    except Exception as error:  # a model of any other kind may fail in any way
        return f"packed samples make it fail ({first_line(error)})"
    finally:
        set_attention(model, attention)
        model.train(training)
    fp32 = model.dtype == torch.float32 and device.type == "cpu"
    return attention_reason(model, calls, longest) or logits_reason(packed, alone, fp32)


def set_attention(model: nn.Module, name: str) -> None:
    """Exchanges the attention of all layers; a model that cannot keeps its own."""
    with silence():
        model.set_attn_implementation(name)


def arithmetic(model: nn.Module):
    """Autocast as in training: bf16 on CUDA, none on a CPU."""
    device = next(model.parameters()).device
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def plain_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """What the model itself makes of one sample [1, T]: logits [T, V], fp32."""
    with arithmetic(model):
        return model(tokens, use_cache=False).logits[0].float()


def packed_logits(model: nn.Module, tokens: Tensor, calls: list) -> Tensor:
    """What the objective makes of the packed probe: hidden states times LM head, [T, V], fp32."""
    cu_seqlens = torch.tensor([0, *PROBE_LENGTHS], device=tokens.device).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in PROBE_LENGTHS])
    with arithmetic(model):
        hidden = model.base_model(
            tokens,
            position_ids=positions[None].to(tokens.device),
            use_cache=False,
            lengths=PROBE_LENGTHS,
            cu_seqlens=cu_seqlens,
            calls=calls,
        ).last_hidden_state[0]
        return nn.functional.linear(hidden, model.get_output_embeddings().weight).float()


def probe_attention(
    module, q, k, v, attention_mask, *args, calls=None, sliding_window=None, **options
):
    """packed_attention that notes which modules call it; here a window may bind."""
    if calls is None:
        raise ValueError("its layers do not hand the samples' boundaries on to attention")
    if attention_mask is not None:
        # transformers makes no mask for this attention, so it is the model's own.
        raise ValueError("its attention has a mask of its own")
    calls.append((module, sliding_window))
    return packed_attention(module, q, k, v, None, *args, **options)


AttentionInterface.register("mars_probe", probe_attention)


def attention_reason(model: nn.Module, calls: list, longest: int | None) -> str | None:
    """Why training would be wrong, as the layers' calls of attention tell."""
    config = model.config.get_text_config()
    config_window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if not types:
        kind = "sliding_attention" if config_window else "full_attention"
        types = [kind] * config.num_hidden_layers
    if len(calls) != len(types):
        return (
            f"its {len(types)} layers call attention {len(calls)} times, "
            "so packing cannot keep samples apart"
        )
    for (module, window), kind in zip(calls, types, strict=True):
        if getattr(module, "is_causal", True) is False:
            return "its attention looks ahead"
        if kind == "sliding_attention" and window is None:  # the window would be in a mask
            window = config_window or 0
        if window is not None and (longest is None or window < longest):
            return f"its attention has a sliding window of {window} tokens"
    return None


def logits_reason(packed: Tensor, alone: Tensor, fp32: bool) -> str | None:
    """Why training would be wrong, as the probe's logits [T, V] tell."""
    if packed.shape != alone.shape:
        return "its LM head and its logits differ in shape"
    if not alone.isfinite().all():
        return "its logits are not finite"
    size = (alone - alone.mean(-1, keepdim=True)).norm(dim=-1)  # [T]
    errors = (packed - alone).norm(dim=-1) / size
    if fp32:
        error = errors.max().item()
        tolerance = TOLERANCE_FP32
    else:
        # A token that is rounded to bf16 may go to another expert and differ much. A leak moves
        # most tokens.
        error = errors.median().item()
        tolerance = TOLERANCE_BF16
    if not error < tolerance:
        return f"packed samples change its logits (by {error:.1g} of their size)"
    return None
