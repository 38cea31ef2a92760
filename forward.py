"""The model's forward over a paged KV cache: what the sampler runs instead of `model(...)`.

Two classes with one interface (`load`, `hidden`, `logits`):
  OwnForward    Qwen2, Qwen3 and Llama: a short forward over an inference copy of the weights with merged QKV and
                gate-up products. `supported` says, strictly, which models it is right for.
  StockForward  any other architecture: a copy of the stock transformers modules, whose attention is replaced by ours
                through AttentionInterface.
Departure from the textbook: `hidden(fill_only=True)` fills pages only. The sampler prefills all tokens of a context but
the last and lets the decode step feed the last one, so a prefill needs no logits and its last layer only keys and values.

Shapes: T packed tokens, B rows, D hidden size, Hq/Hkv query/key heads, Dh head size, M pages of the longest row.
Pages of one layer: k_pages, v_pages [P, page, Hkv, Dh]. Tests: pytest tests/test_sampler.py
"""
import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Batch:
    """Tokens that go through the model together, and where their keys and values live."""
    ids: Tensor                         # [T]
    positions: Tensor                   # [T]
    slots: Tensor                       # [T] page · page_size + offset: where each token's key and value go
    table: Tensor                       # [B, M] pages of each row
    lengths: Tensor                     # [B] tokens of each row, these included
    starts: list[int] | None = None     # prefill: tokens of row b are starts[b]:starts[b+1]. None = decode, one a row
    spans: list[int] | None = None      # prefill: lengths, as host integers


# ---------------------------------------------------------------- attention over the pages

def store(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Writes k, v [T, Hkv, Dh] to their slots."""
    k_pages.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
    v_pages.view(-1, *v.shape[1:]).index_copy_(0, slots, v)


def attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, scale: float, window: int | None = None) -> Tensor:
    """Causal attention of q [T, Hq, Dh] over each row's pages -> [T, Hq, Dh]."""
    if batch.starts is None:
        return decode_attention(q, k_pages, v_pages, batch.table, batch.lengths, scale, window)
    out = torch.empty_like(q)
    for row, (start, end, length) in enumerate(zip(batch.starts, batch.starts[1:], batch.spans)):
        out[start:end] = row_attention(q[start:end], k_pages, v_pages, batch.table[row], length, scale, window)
    return out


def decode_attention(q, k_pages, v_pages, table, lengths, scale, window=None):
    """One query token a row: q [B, Hq, Dh]. The query group of a key head is packed into the query dimension."""
    rows, heads, size = q.shape
    kv_heads = k_pages.shape[2]
    k = k_pages[table].flatten(1, 2).transpose(1, 2)                       # [B, Hkv, S, Dh]
    v = v_pages[table].flatten(1, 2).transpose(1, 2)
    position = torch.arange(k.shape[2], device=q.device)
    mask = position < lengths[:, None]
    if window is not None:
        mask &= position >= lengths[:, None] - window
    q = q.view(rows, kv_heads, heads // kv_heads, size)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None], scale=scale).reshape(rows, heads, size)


def row_attention(q, k_pages, v_pages, pages, length, scale, window=None):
    """The last T tokens of one row of `length` tokens: q [T, Hq, Dh]."""
    count = q.shape[0]
    used = pages[:-(-length // k_pages.shape[1])]
    k = k_pages[used].flatten(0, 1)[:length].transpose(0, 1)[None]         # [1, Hkv, length, Dh]
    v = v_pages[used].flatten(0, 1)[:length].transpose(0, 1)[None]
    key, query = torch.arange(length, device=q.device), torch.arange(length - count, length, device=q.device)[:, None]
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


# ---------------------------------------------------------------- Qwen2, Qwen3, Llama

FAMILY = ("qwen2", "qwen3", "llama")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")     # inverse frequencies that do not depend on the length


def unsupported(model) -> str | None:
    """Why OwnForward would be wrong for `model`, or None if it is right."""
    config = model.config
    if config.model_type not in FAMILY or type(model).__name__.removeprefix("FSDP") not in (
            "Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"):
        return f"architecture {type(model).__name__} ({config.model_type})"
    if config.hidden_act not in ("silu", "swish"):
        return f"activation {config.hidden_act}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "sliding-window layers"
    if model.model.rotary_emb.rope_type not in STATIC_ROPE:
        return f"rope type {model.model.rotary_emb.rope_type}"
    if model.lm_head.bias is not None:
        return "a biased output layer"
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for module in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
                       mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            if type(module).__name__.removeprefix("FSDP") != "Linear":
                return f"projections of type {type(module).__name__}"
    return None


def whole(parameter: Tensor) -> Tensor:
    """A parameter's values, gathered from all ranks if it is sharded (FSDP2; then every rank must call this)."""
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


def merged(modules: list[nn.Linear], kind: str) -> Tensor | None:
    """Weights or biases of several products of one input, stacked. Modules without bias count as zero beside a biased one."""
    values = [getattr(module, kind) for module in modules]
    if all(value is None for value in values):
        return None
    return torch.cat([module.weight.new_zeros(module.out_features) if value is None else whole(value)
                      for module, value in zip(modules, values)])


def named_weights(model) -> dict[str, Tensor | None]:
    """The tensors of the inference copy, from the stock model."""
    weights = {"embed": whole(model.model.embed_tokens.weight), "norm": whole(model.model.norm.weight),
               "inv_freq": model.model.rotary_emb.inv_freq}
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        weights["head"] = whole(model.lm_head.weight)
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        qkv, gate_up = [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]
        for name, modules in (("qkv", qkv), ("o", [attention.o_proj]), ("gate_up", gate_up), ("down", [mlp.down_proj])):
            weights[f"{i}.{name}"] = merged(modules, "weight")
            weights[f"{i}.{name}.bias"] = merged(modules, "bias")
        weights[f"{i}.norm1"] = whole(layer.input_layernorm.weight)
        weights[f"{i}.norm2"] = whole(layer.post_attention_layernorm.weight)
        for name in ("q_norm", "k_norm"):
            module = getattr(attention, name, None)
            weights[f"{i}.{name}"] = None if module is None else whole(module.weight)
    return weights


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last dimension, in fp32, rounded before the weight as the stock modules do."""
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, H, Dh] with cos, sin [T, 1, Dh]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class OwnForward:
    """The forward of Qwen2, Qwen3 and Llama in about ten products a layer."""
    path = "own forward"

    def __init__(self, model, dtype, device):
        config = model.config
        self.layers, self.eps = config.num_hidden_layers, config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_size = model.model.layers[0].self_attn.head_dim
        self.vocabulary = config.vocab_size
        self.scale, self.rope_scale = self.head_size ** -0.5, model.model.rotary_emb.attention_scaling
        self.dtype, self.device, self.weights = dtype, device, {}
        self.load(model)

    @torch.no_grad()
    def load(self, model) -> None:
        """Copies the weights in, in place after the first time (captured CUDA graphs keep their addresses)."""
        for name, value in named_weights(model).items():
            if value is None or name not in self.weights:
                dtype = torch.float32 if name == "inv_freq" else self.dtype
                self.weights[name] = None if value is None else value.to(self.device, dtype, copy=True)
            else:
                self.weights[name].copy_(value)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name], self.weights[name + ".bias"])

    def hidden(self, batch: Batch, pool: Tensor, fill_only: bool = False) -> Tensor | None:
        """Last hidden states [T, D], after the final norm. pool [2, layers, P, page, Hkv, Dh] is written at batch.slots."""
        w = self.weights
        x = w["embed"][batch.ids]
        angle = batch.positions[:, None].float() * w["inv_freq"]
        angle = torch.cat((angle, angle), -1)[:, None]
        cos, sin = (angle.cos() * self.rope_scale).to(x.dtype), (angle.sin() * self.rope_scale).to(x.dtype)
        for i in range(self.layers):
            y = self.linear(rms_norm(x, w[f"{i}.norm1"], self.eps), f"{i}.qkv")
            q, k, v = y.view(len(x), -1, self.head_size).split((self.heads, self.kv_heads, self.kv_heads), 1)
            if w[f"{i}.q_norm"] is not None:
                q, k = rms_norm(q, w[f"{i}.q_norm"], self.eps), rms_norm(k, w[f"{i}.k_norm"], self.eps)
            store(rotate(k, cos, sin), v, pool[0, i], pool[1, i], batch.slots)
            if fill_only and i == self.layers - 1:
                return None
            y = attention(rotate(q, cos, sin), pool[0, i], pool[1, i], batch, self.scale)
            x = x + self.linear(y.flatten(1), f"{i}.o")
            gate, up = self.linear(rms_norm(x, w[f"{i}.norm2"], self.eps), f"{i}.gate_up").chunk(2, -1)
            x = x + self.linear(F.silu(gate) * up, f"{i}.down")
        return rms_norm(x, w["norm"], self.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [T, V] of hidden states [T, D]."""
        head = self.weights.get("head", self.weights["embed"])
        if hidden.is_cuda and hidden.dtype != torch.float32:
            return torch.mm(hidden, head.t(), out_dtype=torch.float32)
        return F.linear(hidden.float(), head.float())


# ---------------------------------------------------------------- any other architecture

def interface(module, q, k, v, attention_mask, scaling=None, sampler_batch=None, sampler_pool=None, sliding_window=None,
              **options):
    """Our attention in the form that AttentionInterface calls: q [1, Hq, T, Dh], k and v [1, Hkv, T, Dh]."""
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"the sampler cannot run this architecture: its attention uses {name}")
    pages = sampler_pool[0, module.layer_idx], sampler_pool[1, module.layer_idx]
    store(k[0].transpose(0, 1), v[0].transpose(0, 1), *pages, sampler_batch.slots)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return attention(q[0].transpose(0, 1), *pages, sampler_batch, scale, sliding_window)[None], None


class StockForward:
    """The stock modules with our attention."""
    path = "stock modules"

    def __init__(self, model, dtype, device):
        from transformers import AttentionInterface
        AttentionInterface.register("mars_paged", interface)      # no mask function of that name: no mask is built
        self.model = copy.deepcopy(model).to(device, dtype).eval().requires_grad_(False)
        self.model.set_attn_implementation("mars_paged")
        config = self.model.config.get_text_config()
        self.layers = config.num_hidden_layers
        self.heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.vocabulary = self.model.get_input_embeddings().weight.shape[0]
        self.dtype, self.device = dtype, device

    @torch.no_grad()
    def load(self, model) -> None:
        source = dict(model.named_parameters())
        for name, value in self.model.named_parameters():
            value.copy_(whole(source[name]))

    def hidden(self, batch: Batch, pool: Tensor, fill_only: bool = False) -> Tensor:
        out = self.model.base_model(batch.ids[None], position_ids=batch.positions[None], use_cache=False,
                                    sampler_batch=batch, sampler_pool=pool)
        return out.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden).float()
