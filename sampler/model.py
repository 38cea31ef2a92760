"""The transformer of Qwen2, Qwen3, Llama and similar models, over a paged KV cache.

`Model` has an inference copy of the weights, in which queries, keys and values are one product, and
gate and up are one product. SmolLM2 is a Llama. Mistral without a sliding window is a Llama too.
SmolLM3 has layers without rotary embedding. `refusal` gives the reason why another model cannot run
here; a server can sample it (`--server`).

Departure from the textbook: `fill` computes no output. The sampler prefills all tokens of a context
except the last one, which the decode step feeds. So a prefill needs no logits, and only the keys
and values of the last layer.

Shapes: T tokens, D hidden size, V vocabulary, Hq and Hkv query and key heads, Dh head size; the
cache of all layers is pool [2, layers, pages, page_size, Hkv, Dh].
Tests: pytest tests/test_decoder.py. Speed: python -m bench.gpu --step decode
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import kernels
from family import gather_full, head_size, unsupported_reason
from kernels.paged import HEAD_SIZES
from sampler.attention import attention, cache_dtype
from sampler.plan import Batch

# On a CPU, packed weights are faster from about this many rows on.
PACKED_ROWS = 8


def refusal(config) -> str | None:
    """Why `Model` cannot run models of this transformers config; None if it can."""
    size = head_size(config)
    if reason := unsupported_reason(config):
        return reason
    if size & (size - 1):
        return f"head size {size}, no power of two"
    if config.hidden_act not in ("silu", "swish"):
        return f"activation {config.hidden_act}"
    return "quantised weights" if getattr(config, "quantization_config", None) else None


# ---------------------------------------------------------------- weights


def full_weight(module: nn.Linear) -> Tensor:
    """A module's weight, gathered from all ranks, with its LoRA adapter merged in."""
    if hasattr(module, "merged_weight"):  # trainer/lora.py
        return module.merged_weight()
    return gather_full(module.weight)


def named_weights(model) -> Iterator[tuple[str, Tensor]]:
    """The inference copy's tensors, one at a time, because all at once would double the memory."""
    yield "embed", gather_full(model.model.embed_tokens.weight)
    yield "head", gather_full(model.lm_head.weight)
    yield "norm", gather_full(model.model.norm.weight)
    yield "inv_freq", model.model.rotary_emb.inv_freq
    for i, layer in enumerate(model.model.layers):
        attn = layer.self_attn
        mlp = layer.mlp
        yield f"{i}.norm1", gather_full(layer.input_layernorm.weight)
        yield f"{i}.norm2", gather_full(layer.post_attention_layernorm.weight)
        for name in ("q_norm", "k_norm"):
            if hasattr(attn, name):
                yield f"{i}.{name}", gather_full(getattr(attn, name).weight)
        products = {  # Modules with the same input become one product.
            "qkv": [attn.q_proj, attn.k_proj, attn.v_proj],
            "o": [attn.o_proj],
            "gate_up": [mlp.gate_proj, mlp.up_proj],
            "down": [mlp.down_proj],
        }
        for name, modules in products.items():
            yield f"{i}.{name}", torch.cat([full_weight(m) for m in modules])
            if modules[0].bias is not None:
                yield f"{i}.{name}.bias", torch.cat([gather_full(m.bias) for m in modules])


def has_packed_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN has packed products of this type. Some processors have none of bf16."""
    if not torch.backends.mkldnn.is_available():
        return False
    bf16 = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bf16 or dtype == torch.float32


# ---------------------------------------------------------------- the transformer


class Model:
    """A layer is four products, attention and four small operations."""

    def __init__(self, model, dtype: torch.dtype, device: torch.device):
        config = model.config.get_text_config()
        self.head_size = head_size(config)
        reason = refusal(config)
        if device.type == "cuda" and self.head_size not in HEAD_SIZES:
            reason = reason or f"head size {self.head_size}"
        if reason:
            raise ValueError(
                f"the sampler cannot run {type(model).__name__} ({reason}); "
                "sample it on a server, with --server"
            )
        self.layers = config.num_hidden_layers
        self.eps = config.rms_norm_eps
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.vocabulary = config.vocab_size
        self.scale = self.head_size**-0.5
        self.rope_scale = model.model.rotary_emb.attention_scaling
        # A 0 in SmolLM3's list is a layer without rotary embedding.
        self.rotates = getattr(config, "no_rope_layers", None) or [1] * self.layers
        self.dtype = dtype
        self.device = device
        self.cache_dtype = cache_dtype(dtype, device)
        self.tied = model.lm_head.weight is model.model.embed_tokens.weight
        self.weights: dict[str, Tensor] = {}
        self.packed: dict[str, Tensor] = {}
        self.load(model)

    @torch.no_grad()
    def load(self, model) -> None:
        """Copies the weights, in place after the first call, because CUDA graphs keep addresses.

        Matrices are [in, out]. On a CPU they are transposed in memory, which is up to twice as fast
        for few rows. For many rows there is a second copy in oneDNN's packed layout. On CUDA they
        are transposed views, and a tied head is the embedding itself.
        """
        cuda = self.device.type == "cuda"
        # Logits are never rounded to bf16. A CPU has no product of bf16 matrices with an fp32
        # result, so the head has the cache's fp32 there.
        dtypes = {"inv_freq": torch.float32, "head": self.cache_dtype}
        for name, value in named_weights(model):
            if name == "head" and self.tied and cuda:
                self.weights[name] = self.weights["embed"].t()
                continue
            matrix = value.dim() == 2 and name != "embed"
            if matrix:
                value = value.t()
            if name not in self.weights:
                self.weights[name] = torch.empty_like(
                    value,
                    dtype=dtypes.get(name, self.dtype),
                    device=self.device,
                    memory_format=torch.preserve_format if cuda else torch.contiguous_format,
                )
            weight = self.weights[name].copy_(value)
            if matrix and not cuda and has_packed_products(weight.dtype):
                # oneDNN packs [out, in].
                self.packed[name] = torch.ops.mkldnn._reorder_linear_weight(weight.t().contiguous())

    def linear(self, x: Tensor, name: str) -> Tensor:
        """x [T, in] -> [T, out]."""
        bias = self.weights.get(name + ".bias")
        if name in self.packed and x.shape[0] >= PACKED_ROWS:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed[name], bias, "none", [], "")
        if bias is None:
            return torch.mm(x, self.weights[name])
        return torch.addmm(bias, x, self.weights[name])

    def fill(self, batch: Batch, pool: Tensor) -> None:
        """Writes the keys and values of batch.ids into the pool."""
        self.hidden(batch, pool, last=self.layers - 1)

    def decode(self, batch: Batch, pool: Tensor) -> Tensor:
        """Writes them too, and returns fp32 logits [T, V], which are never rounded to bf16."""
        return self.logits(self.hidden(batch, pool))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, D] -> fp32 logits [T, V]."""
        if hidden.is_cuda and hidden.dtype != torch.float32:
            return torch.mm(hidden, self.weights["head"], out_dtype=torch.float32)
        return self.linear(hidden.to(self.weights["head"].dtype), "head").float()

    def hidden(self, batch: Batch, pool: Tensor, last: int | None = None) -> Tensor | None:
        """The last hidden states [T, D] after the final norm.

        With `last` it returns None as soon as that layer has stored its keys and values.
        """
        w = self.weights
        residual = None
        x = w["embed"][batch.ids]
        angle = batch.positions[:, None].float() * w["inv_freq"]
        angle = torch.cat((angle, angle), -1)  # [T, Dh]
        cos = (angle.cos() * self.rope_scale).to(x.dtype)
        sin = (angle.sin() * self.rope_scale).to(x.dtype)
        rotation = cos, sin
        no_rotation = torch.ones_like(cos), torch.zeros_like(sin)
        for i in range(self.layers):
            k_pages, v_pages = pool[:, i]
            x, residual = kernels.add_rms_norm(x, residual, w[f"{i}.norm1"], self.eps)
            q = kernels.qk_norm_rope_store(
                self.linear(x, f"{i}.qkv"),
                w.get(f"{i}.q_norm"),
                w.get(f"{i}.k_norm"),
                *(rotation if self.rotates[i] else no_rotation),
                batch.slots,
                k_pages,
                v_pages,
                self.eps,
            )
            if i == last:
                return None
            x = attention(q, k_pages, v_pages, batch, self.scale)
            x = self.linear(x.flatten(1), f"{i}.o")
            x, residual = kernels.add_rms_norm(x, residual, w[f"{i}.norm2"], self.eps)
            x = self.linear(kernels.silu_mul(self.linear(x, f"{i}.gate_up")), f"{i}.down")
        return kernels.add_rms_norm(x, residual, w["norm"], self.eps)[0]
