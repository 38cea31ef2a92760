"""The stock modules of any other decoder, with our attention in place of theirs.

transformers lets attention be swapped by name (AttentionInterface). A model qualifies if
nothing but attention mixes tokens and if attention gets all that it needs as arguments.
architectures.py checks both, since transformers itself refuses nothing.

Tests: pytest tests/test_decoder.py
"""

import copy

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from sampler.architectures import (
    check_architecture,
    check_config,
    check_same,
    computation,
    named_tensors,
    position_limit,
    refusal,
)
from sampler.attention import Batch, attention, cache_dtype, store
from sampler.model import share, whole

IMPLEMENTATION = "mars_paged"
PROBED = "mars_paged_probed"


def stock_attention(
    module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask,
    scaling: float | None = None,
    sampler_batch: Batch | None = None,
    sampler_pool: Tensor | None = None,
    sliding_window: int | None = None,
    **options,
):
    """Our attention as AttentionInterface calls it.

    q [1, Hq, T, Dh], k and v [1, Hkv, T, Dh] -> [1, T, Hq, Dh]. ValueError for what it cannot do.
    """
    if sampler_batch is None:
        raise ValueError("its modules do not hand their arguments on to attention")
    if attention_mask is not None:
        raise ValueError("its layers make masks of their own")
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"its attention uses {name}")
    if not getattr(module, "is_causal", True):
        raise ValueError("its attention is not causal")
    layer = module.layer_idx
    if sampler_batch.layers_seen is not None:
        sampler_batch.layers_seen[layer] = sliding_window
    k_pages = sampler_pool[0, layer]
    v_pages = sampler_pool[1, layer]
    slots = sampler_batch.slots[: sampler_batch.stored]
    store(k[0].transpose(0, 1), k_pages, slots)
    store(v[0].transpose(0, 1), v_pages, slots)
    if scaling is None:
        scaling = q.shape[-1] ** -0.5
    q = q[0].transpose(0, 1).contiguous()
    out = attention(q, k_pages, v_pages, sampler_batch, scaling, sliding_window)
    return out[None], None


# No mask function has this name, so transformers builds no mask.
AttentionInterface.register(IMPLEMENTATION, stock_attention)
AttentionInterface.register(PROBED, stock_attention)


def copy_of(model, dtype: torch.dtype, device: torch.device):
    """A copy of the model on `device`, with parameters of type `dtype` and buffers of their own.

    Inverse frequencies rounded to bf16 would turn the last of a few thousand tokens by radians.
    """
    copied = copy.deepcopy(model).to(device, dtype).eval().requires_grad_(False)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        owner, _, own_name = name.rpartition(".")
        setattr(copied.get_submodule(owner), own_name, buffer.to(device, copy=True))
    return copied


class StockForward:
    """A copy of the model's own modules; ValueError where they would be wrong over pages."""

    path = "stock modules"

    def __init__(self, model, dtype: torch.dtype, device: torch.device):
        check_config(model)
        self.model = copy_of(model, dtype, device)
        try:
            self.model.set_attn_implementation(IMPLEMENTATION)
        except ValueError as error:
            raise refusal(model, str(error)) from error
        config = self.model.config.get_text_config()
        # transformers only logs a warning where a model has an attention of its own.
        if config._attn_implementation != IMPLEMENTATION:
            raise refusal(model, "its attention cannot be replaced")
        try:
            self.layers = config.num_hidden_layers
            self.heads = config.num_attention_heads
            self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
            self.head_size = getattr(config, "head_dim", None) or config.hidden_size // self.heads
            self.vocabulary = self.model.get_input_embeddings().num_embeddings
        except Exception as error:
            # Such as a config whose layers have heads of different sizes.
            reason = f"its config does not tell one shape of all layers ({type(error).__name__})"
            raise refusal(model, reason) from error
        self.positions = position_limit(model)
        self.dtype = dtype
        self.device = device
        self.cache_dtype = cache_dtype(dtype, device)
        self.computation = computation(model)
        self.mask_windows: set[int | None] = set()
        self.probe(model)

    def probe(self, model) -> None:
        """check_architecture, while the windows of the masks that the model asks for are noted."""

        def note(*args, local_size: int | None = None, **options) -> None:
            self.mask_windows.add(local_size)

        AttentionMaskInterface.register(PROBED, note)
        self.model.set_attn_implementation(PROBED)
        check_architecture(model, self)
        self.model.set_attn_implementation(IMPLEMENTATION)

    def check(self, model) -> None:
        """As OwnForward.check."""
        check_same(self.computation, model)

    @torch.no_grad()
    def load(self, model) -> None:
        """Copies the weights and buffers in."""
        for name, value in named_tensors(self.model):
            owner, _, kind = name.rpartition(".")
            value.copy_(whole(model.get_submodule(owner), kind))

    def share(self, model) -> None:
        """As OwnForward.share."""
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                share(model.get_submodule(name), module.weight.detach())

    def run(self, module, batch: Batch, pool: Tensor):
        return module(
            batch.ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            sampler_batch=batch,
            sampler_pool=pool,
        )

    def fill(self, batch: Batch, pool: Tensor) -> None:
        """Does what OwnForward.fill does, but leaves out the output layer only."""
        self.run(self.model.base_model, batch, pool)

    def decode(self, batch: Batch, pool: Tensor) -> Tensor:
        """The model's own logits [T, V] in fp32, after its own rounding and caps."""
        return self.run(self.model, batch, pool).logits[0].float()
