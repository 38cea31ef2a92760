"""What sampler and trainer both know of a model; neither of them imports the other.

To support a new family of models, edit these places, in this order:

    family.py               its name in `FAMILY`, what is wrong for it in `unsupported_reason`
    sampler/model.py        `named_weights`: where its weights are; `Model.hidden`: its computation
    tests/test_sampler.py   `KINDS`: the sampler must give what transformers gives
    tests/test_loading.py   `PACKED`: a packed step must give what single samples give
    docs/real_models.md     the sentence that lists the families

The trainer runs transformers' own model and needs no change. A model of any other family is trained
one sample a micro-batch (trainer/loading.py) and sampled on a server (sampler/vllm.py).
"""

from collections.abc import Sequence

from torch import Tensor

FAMILY = ("qwen2", "qwen3", "llama", "mistral", "smollm3")  # a config's model_type
# The rotations whose inverse frequencies depend on a row's length.
STRETCHED_ROPE = ("dynamic", "longrope")


def unsupported_reason(config) -> str | None:
    """What sets a model apart from the family, by its transformers config; None for one of it.

    With a window of attention, or rotary angles that depend on a row's length, a sample that is
    packed beside others, or resumed from pages, would be computed otherwise than alone.
    """
    if config.model_type not in FAMILY:
        return f"architecture {config.model_type}"
    if getattr(config, "sliding_window", None) is not None:
        return "a sliding window"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    return f"rope type {rope}" if rope in STRETCHED_ROPE else None


def head_size(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def gather_full(parameter: Tensor) -> Tensor:
    """A tensor's values, without gradient; where it is sharded (FSDP2) every rank must call it."""
    if hasattr(parameter, "full_tensor"):
        parameter = parameter.full_tensor()
    return parameter.detach()


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of their first tokens two contexts have in common."""
    pairs = zip(one, other)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
