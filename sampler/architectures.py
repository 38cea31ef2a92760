"""Which models the sampler can run: it refuses at once, in one sentence, what it would get wrong.

Two kinds of checks, made when a forward is built:

    check_config         what a config says outright: kinds of layers and of rotations
    check_architecture   a probe: random tokens through the given model, and the same tokens
                         through `fill` and `decode`

The probe catches whatever mixes tokens outside attention (convolutions, recurrent states),
reads a mask that the sampler does not build, or counts positions of its own. It cannot see what
only begins after its 40 tokens, such as a window of 4,096. So each layer that has a window must
hand it on to attention, and it must be a window of the masks that the model would build.
docs/architectures.md lists what was found exact and what is refused.

Tests: pytest tests/test_decoder.py
"""

import itertools
import json
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from sampler.attention import Batch

LONG = 40  # tokens of the probe's first row
SHORT = 25  # tokens of its second row
STEPS = 3  # the last tokens of each row, which are decoded one by one
PAGE_SIZE = 8


# What a config says of files, types and training. A model computes the same whatever it is.
NEUTRAL = (
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "initializer_range",
    "return_dict",
    "id2label",
    "label2id",
)
NEUTRAL_BEGINNINGS = ("_", "output_")
NEUTRAL_ENDINGS = ("_token_id", "dropout", "_pdrop", "_drop")


def refusal(model, reason: str) -> ValueError:
    return ValueError(f"the sampler cannot run {type(model).__name__}: {reason}")


def check_config(model) -> None:
    """ValueError for what a config says outright."""
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise refusal(model, "it has an encoder")
    kinds = set(getattr(config, "layer_types", None) or ())
    odd = sorted(kinds - {"full_attention", "sliding_attention"})
    if odd:
        raise refusal(model, f"it has layers of kind {', '.join(odd)}")
    for parameters in rope_parameters(config):
        rope = str(parameters.get("rope_type") or parameters.get("type"))
        if rope in ("dynamic", "longrope"):
            reason = f"rope type {rope} depends on the longest row of a batch"
            raise refusal(model, reason)


def rope_parameters(config) -> list[dict]:
    """The rotations of a config: one for all layers, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def position_limit(model) -> int | None:
    """How many positions a model with a table of positions has; None for rotations, which go on."""
    if any(name.endswith("inv_freq") for name, _ in model.named_buffers()):
        return None
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def named_tensors(model) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers; those that are one are named once.

    Adapters are left out where their module merges them into its weight (decoder.whole).
    """
    merging = {name for name, module in model.named_modules() if hasattr(module, "merged_weight")}
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        owner, _, kind = name.rpartition(".")
        if owner not in merging or kind in ("weight", "bias"):
            yield name, tensor


def computation(model) -> dict[str, object]:
    """What decides a model's logits beside its weights: class, config, names and shapes."""
    told = {"class": type(model).__name__.removeprefix("FSDP")}
    config = model.config.get_text_config().to_dict()
    # As in a file, where tuples are lists.
    config = json.loads(json.dumps(config, default=str))
    for name, value in config.items():
        neutral = name in NEUTRAL or name.startswith(NEUTRAL_BEGINNINGS)
        if not neutral and not name.endswith(NEUTRAL_ENDINGS):
            told[name] = value
    for name, tensor in named_tensors(model):
        told[f"the shape of {name}"] = list(tensor.shape)
    return told


def check_same(built: dict[str, object], model) -> None:
    """ValueError unless the model computes what one of the computation `built` does."""
    given = computation(model)
    for name in sorted(built.keys() | given.keys()):
        if built.get(name) != given.get(name):
            raise ValueError(
                "these are not weights of the sampler's model: "
                f"{name} is {given.get(name)}, not {built.get(name)}"
            )


@torch.no_grad()
def check_architecture(model, forward) -> None:
    """ValueError unless `forward` gives the logits of `model` itself.

    forward: an OwnForward or StockForward made from `model`. It takes milliseconds for a small
    model and leaves every random generator as it was.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (LONG + SHORT,)
    tokens = torch.randint(forward.vocabulary, shape, generator=generator)
    rows = list(tokens.split([LONG, SHORT]))
    try:
        expected = stock_logits(model, rows)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        raise refusal(model, f"it fails on its own ({type(error).__name__})") from error
    try:
        logits, layers_seen = paged_logits(forward, rows)
    except torch.cuda.OutOfMemoryError:
        raise
    except ValueError as error:
        raise refusal(model, str(error)) from error
    except Exception as error:
        # Whatever a foreign architecture stumbles over, its class says enough.
        reason = f"its forward fails over paged keys and values ({type(error).__name__})"
        raise refusal(model, reason) from error
    check_layers(model, forward, layers_seen)
    difference = relative_error(logits, expected.to(logits.device))
    # Written so that NaN is refused as well.
    if not difference <= tolerance(model, forward):
        reason = f"over paged keys and values its logits are wrong by {100 * difference:.2g} %"
        raise refusal(model, reason)


def stock_logits(model, rows: list[Tensor]) -> Tensor:
    """The given model's own logits after the last STEPS tokens of each row: [rows · STEPS, V].

    The plainest attention is asked, since a model in training has the trainer's.
    """
    device = next(model.parameters()).device
    training = [(module, module.training) for module in model.modules()]
    implementation = model.config._attn_implementation
    model.eval()
    model.set_attn_implementation("eager")
    try:
        with torch.autocast(device.type, enabled=False):
            logits = [model(row[None].to(device), use_cache=False).logits[0] for row in rows]
    finally:
        model.set_attn_implementation(implementation)
        for module, mode in training:
            module.training = mode
    return torch.cat([row[-STEPS:].float() for row in logits])


def paged_logits(forward, rows: list[Tensor]) -> tuple[Tensor, dict | None]:
    """The same logits from `fill` and `decode`, and the window that each stock layer asked for."""
    pages_of_row = math.ceil(LONG / PAGE_SIZE)
    # Page 0 stays unused, and the rows' pages alternate: nobody's pages lie side by side.
    table = 1 + torch.arange(pages_of_row * len(rows)).view(pages_of_row, len(rows)).T
    pool = torch.zeros(
        2,
        forward.layers,
        1 + table.numel(),
        PAGE_SIZE,
        forward.kv_heads,
        forward.head_size,
        dtype=forward.cache_dtype,
        device=forward.device,
    )
    layers_seen = {}
    filled = [len(row) - STEPS for row in rows]
    # The second prefill continues the first one: a context that grows is prefilled in pieces.
    half = [count // 2 for count in filled]
    for begin, end in (([0] * len(rows), half), (half, filled)):
        batch = probe_batch(rows, table, begin, end, forward.device)
        forward.fill(batch, pool)
    logits = []
    for step in range(STEPS):
        begin = [count + step for count in filled]
        end = [count + 1 for count in begin]
        batch = probe_batch(rows, table, begin, end, forward.device)
        batch.starts = None
        batch.layers_seen = layers_seen
        logits.append(forward.decode(batch, pool))
    # [STEPS, rows, V] in the order of stock_logits: row by row.
    return torch.stack(logits).transpose(0, 1).flatten(0, 1), layers_seen


def probe_batch(rows, table, begin: list[int], end: list[int], device) -> Batch:
    """Tokens begin[b]:end[b] of each row b, packed."""
    ids = []
    positions = []
    slots = []
    starts = [0]
    for row, pages, first, last in zip(rows, table, begin, end, strict=True):
        position = torch.arange(first, last)
        ids.append(row[first:last])
        positions.append(position)
        slots.append(pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
        starts.append(starts[-1] + last - first)
    return Batch(
        torch.cat(ids).to(device),
        torch.cat(positions).to(device),
        torch.cat(slots).to(device),
        table.int().contiguous().to(device),
        torch.tensor(end, dtype=torch.int32, device=device),
        starts,
        list(end),
    )


def check_layers(model, forward, layers_seen: dict[int, int | None]) -> None:
    """ValueError if stock layers do not attend through us, or keep their window to themselves."""
    if not layers_seen:
        return  # Our own forward notes no layers.
    if set(layers_seen) != set(range(forward.layers)):
        reason = f"{len(layers_seen)} of its {forward.layers} layers use transformers' attention"
        raise refusal(model, reason)
    for layer, window in sorted(layers_seen.items()):
        if forward.mask_windows and window not in forward.mask_windows:
            masks = " or ".join(str(other) for other in forward.mask_windows)
            reason = f"the window of its layer {layer} is {window}, but {masks} in its mask"
            raise refusal(model, reason)
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        in_use = getattr(config, "use_sliding_window", True)
        if window and in_use and not any(layers_seen.values()):
            raise refusal(model, f"its window of {window} tokens is only in its mask")
        return
    for layer, kind in enumerate(kinds):
        if kind == "sliding_attention" and layers_seen[layer] is None:
            raise refusal(model, f"the window of its layer {layer} is only in its mask")


def tolerance(model, forward) -> float:
    """How far logits may be apart: twice what rounding does in the narrower of the two types.

    In bf16 random tokens moved the logits of a fine-tuned SmolLM2-135M by 5 to 12 %.
    """
    narrower = {forward.dtype, next(model.parameters()).dtype}
    if narrower & {torch.bfloat16, torch.float16}:
        return 0.25
    return 1e-3


def relative_error(logits: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of the centred expected logits.

    Where the model itself gives NaN there is nothing to compare.
    """
    finite = expected.isfinite()
    if not finite.any():
        return 0.0
    spread = (expected - expected.nanmean(-1, keepdim=True))[finite]
    difference = (logits - expected)[finite]
    if not difference.any():
        return 0.0  # a head that begins as zeros has no spread
    return (difference.norm() / spread.norm()).item()
