"""The model's forward over a paged KV cache: what the sampler runs instead of `model(...)`.

Two classes with one interface (`load`, `fill`, `decode`):
  OwnForward    Qwen2, Qwen3 and Llama: a short forward over an inference copy of the weights with merged QKV and
                gate-up products. `unsupported` says, strictly, for which models it would be wrong.
  StockForward  any other architecture: a copy of the stock transformers modules, whose attention is replaced by ours
                through AttentionInterface.

Attention reads keys and values where they lie, in their pages:
  decode   CUDA: the Triton kernel of kernels/paged_attention.py, or flash-attn. CPU: two sparse products that visit
           just the pages of each row, so that nothing is gathered (`sparse_decode`): scores are a dense-dense product
           sampled at a sparse pattern (SDDMM), outputs are weighted sums of value vectors (embedding bags).
  prefill  CUDA: variable-length flash attention; elsewhere SDPA, row by row.

Departure from the textbook: `fill` computes no output. The sampler prefills all tokens of a context but the last and
lets the decode step feed the last one, so a prefill needs no logits, and of the last layer only keys and values.

Shapes: T packed tokens, B rows, D hidden size, Hq/Hkv query/key heads, Dh head size, M pages of the longest row, V
vocabulary. Pages of one layer: k_pages, v_pages [P, page, Hkv, Dh]. Tests: pytest tests/test_sampler.py
"""
import copy
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels

try:
    from flash_attn import flash_attn_with_kvcache      # no wheel on PyPI: everything has a path without it
except ImportError:
    flash_attn_with_kvcache = None

with warnings.catch_warnings():                             # torch says once a process that CSR tensors are in beta
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 0], [], [], (1, 1))


@dataclass
class Batch:
    """Tokens that go through the model together, and where their keys and values live.

    Decode: one token per row, rows sorted by length, longest first. Prefill: tokens of row b are starts[b]:starts[b+1],
    the last ones of its lengths[b] tokens.
    """
    ids: Tensor                             # [T]
    positions: Tensor                       # [T]
    slots: Tensor                           # [T] page · page_size + offset of its key and value; -1 = store none
    table: Tensor                           # [B, M] int32: pages of each row
    lengths: Tensor                         # [B] int32: tokens of each row, these included; 0 = padding
    starts: list[int] | None = None         # prefill only
    spans: list[int] | None = None          # `lengths` on the host; None in a CUDA graph
    plans: dict = field(default_factory=dict)       # what attention works out once a batch and its layers share


# ---------------------------------------------------------------- attention over the pages

def attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, scale: float, window: int | None = None):
    """Causal attention of q [T, Hq, Dh] over its rows' pages -> [T, Hq, Dh]. window: see so many last tokens only."""
    if batch.starts is not None:
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            return varlen_prefill(q, k_pages, v_pages, batch, scale, window)
        return row_prefill(q, k_pages, v_pages, batch, scale, window)
    if window is None and q.is_cuda and q.shape[2] in (16, 32, 64, 128, 256):
        return cuda_decode(q, k_pages, v_pages, batch, scale)
    if q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64):
        return sparse_decode(q, k_pages, v_pages, batch, scale, window)
    return gather_decode(q, k_pages, v_pages, batch, scale, window)


def rotate_and_store(qkv, q_weight, k_weight, cos, sin, slots, k_pages, v_pages, eps):
    """kernels.qk_norm_rope_store for a CPU and fp32, in fewer passes over memory; the kernel's own form elsewhere.

    qkv [B, (Hq + 2·Hkv)·Dh] -> q [B, Hq, Dh]; keys and values go to the pages.
    """
    if qkv.is_cuda or qkv.dtype != torch.float32:
        return kernels.qk_norm_rope_store(qkv, q_weight, k_weight, cos, sin, slots, k_pages, v_pages, eps)
    kv_heads, size = k_pages.shape[2:]
    heads = qkv.unflatten(1, (-1, size))
    qk, v = heads[:, :-kv_heads], heads[:, -kv_heads:]
    if q_weight is not None:
        qk = qk * torch.rsqrt(torch.linalg.vector_norm(qk, dim=-1, keepdim=True).square_().div_(size).add_(eps))
        qk[:, :-kv_heads] *= q_weight
        qk[:, -kv_heads:] *= k_weight
    (first, second), rotated = qk.chunk(2, -1), torch.empty_like(qk)
    half_cos, half_sin = cos[:, None, :size // 2], sin[:, None, :size // 2]
    torch.mul(first, half_cos, out=rotated[..., :size // 2]).addcmul_(second, half_sin, value=-1)
    torch.mul(second, half_cos, out=rotated[..., size // 2:]).addcmul_(first, half_sin)
    stored = len(slots) if slots[-1] >= 0 else int((slots >= 0).sum())      # padding rows come last
    for new, pages in ((rotated[:, -kv_heads:], k_pages), (v, v_pages)):
        pages.view(-1, kv_heads, size).index_copy_(0, slots[:stored], new[:stored])
    return rotated[:, :-kv_heads]


def cuda_decode(q, k_pages, v_pages, batch, scale):
    """flash-attn if it is there and can read pages of this size (multiples of 256), else the Triton kernel."""
    if flash_attn_with_kvcache is not None and k_pages.shape[1] % 256 == 0 and q.dtype != torch.float32:
        return flash_attn_with_kvcache(q[:, None], k_pages, v_pages, cache_seqlens=batch.lengths,
                                       block_table=batch.table, softmax_scale=scale, causal=True)[:, 0]
    return kernels.paged_attention(q, k_pages, v_pages, batch.table, batch.lengths, scale=scale)


def similar(spans: list[int]) -> list[tuple[int, int]]:
    """Cuts rows, longest first, into runs (first, last) that, padded to their longest, are at most half padding.

    Less than 4,096 tokens of padding cost less than another group of launches.
    """
    runs, begin, real = [], 0, 0
    for row, span in enumerate(spans):
        if spans[begin] * (row + 1 - begin) - (real + span) > max(4096, real + span):
            runs.append((begin, row))
            begin, real = row, 0
        real += span
    return runs + [(begin, len(spans))]


def sparse_plan(batch: Batch, heads: int, kv_heads: int, page: int, keys: int, dtype, window) -> list[tuple]:
    """Which of the pool's `keys` key vectors each query head reads, for groups of rows of similar length.

    A group is (first row, end row, pattern, bias). pattern [rows·Hq, keys]: a CSR matrix with one line per (row, query
    head) and one entry per token, whose column is the key vector's number in the pool. bias [rows·Hq, longest]: padding
    reads the row's first token and has -inf.
    """
    groups, of_head = [], torch.arange(heads) // (heads // kv_heads)
    for begin, end in similar(batch.spans):
        longest, lengths = max(batch.spans[begin], 1), batch.lengths[begin:end, None]
        position = torch.arange(longest)
        pages = batch.table[begin:end, :-(-longest // page), None].long()
        slots = (pages * page + torch.arange(page)).flatten(1)[:, :longest]
        valid = position < lengths
        if window is not None:
            valid &= position >= lengths - window
        slots = torch.where(valid, slots, slots[:, :1])
        columns = (slots[:, None] * kv_heads + of_head[:, None]).flatten()                  # rows · Hq · longest
        bias = torch.where(valid, 0.0, float("-inf"))[:, None].expand(-1, heads, -1).reshape(-1, longest)
        pattern = torch.sparse_csr_tensor(torch.arange(0, len(columns) + 1, longest), columns, torch.zeros(len(columns),
                                          dtype=dtype), (len(bias), keys), check_invariants=False)
        groups.append((begin, end, pattern, bias))
    return groups


def sparse_decode(q, k_pages, v_pages, batch, scale, window=None):
    """Decode attention as two sparse products over the pool; q [B, Hq, Dh]. No key or value is moved."""
    (_, heads, size), (_, page, kv_heads, _) = q.shape, k_pages.shape
    keys, values, out = k_pages.view(-1, size), v_pages.view(-1, size), q.new_empty(q.shape)
    if window not in batch.plans:
        batch.plans[window] = sparse_plan(batch, heads, kv_heads, page, len(keys), q.dtype, window)
    for begin, end, scores, bias in batch.plans[window]:
        torch.sparse.sampled_addmm(scores, q[begin:end].reshape(-1, size), keys.t(), beta=0.0, alpha=scale, out=scores)
        probs = (scores.values().view(bias.shape) + bias).softmax(-1)
        out[begin:end] = F.embedding_bag(scores.col_indices(), values, scores.crow_indices()[:-1], mode="sum",
                                         per_sample_weights=probs.flatten()).view(-1, heads, size)
    return out


def gather_decode(q, k_pages, v_pages, batch, scale, window=None):
    """Decode attention in plain PyTorch for any device and type: copies every row's keys and values. q [B, Hq, Dh]."""
    (rows, heads, size), (_, page, kv_heads, _) = q.shape, k_pages.shape
    slots = (batch.table[:, :, None].long() * page + torch.arange(page, device=q.device)).flatten(1)     # [B, S]
    position = torch.arange(slots.shape[1], device=q.device)
    valid = position < batch.lengths[:, None]
    if window is not None:
        valid &= position >= batch.lengths[:, None] - window
    slots = torch.where(position < batch.lengths[:, None], slots, slots[:, :1])     # 0 · NaN is NaN: read no one else's
    k, v = (pages.flatten(0, 1)[slots].transpose(1, 2) for pages in (k_pages, v_pages))     # [B, Hkv, S, Dh]
    q = q.reshape(rows, kv_heads, heads // kv_heads, size)  # the query heads of one key head as its query tokens
    return F.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None], scale=scale).flatten(1, 2)


def row_prefill(q, k_pages, v_pages, batch, scale, window=None):
    """Prefill attention, one SDPA a row."""
    out, page = q.new_empty(q.shape), k_pages.shape[1]
    for row, (start, end, length) in enumerate(zip(batch.starts, batch.starts[1:], batch.spans)):
        used = batch.table[row, :-(-length // page)]
        k, v = (pages[used].flatten(0, 1)[:length].transpose(0, 1)[None] for pages in (k_pages, v_pages))
        past, mask = length - (end - start), None
        if past or window is not None:
            key = torch.arange(length, device=q.device)
            own = key[past:, None]
            mask = (key <= own) if window is None else (key <= own) & (key > own - window)
        new = F.scaled_dot_product_attention(q[start:end].transpose(0, 1)[None], k, v, attn_mask=mask, scale=scale,
                                             is_causal=mask is None, enable_gqa=True)
        out[start:end] = new[0].transpose(0, 1)
    return out


def varlen_plan(batch: Batch, page: int) -> tuple:
    """Slots of all keys of all rows, one after the other, and the bounds that varlen_attn wants."""
    device, lengths = batch.table.device, batch.lengths.long()
    first = F.pad(lengths.cumsum(0), (1, 0))                                                            # [B + 1]
    row = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths, output_size=sum(batch.spans))
    position = torch.arange(len(row), device=device) - first[row]
    slots = batch.table[row, position // page].long() * page + position % page
    cu_q = torch.tensor(batch.starts, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    return slots, cu_q, first.int(), max(end - start for start, end in zip(batch.starts, batch.starts[1:]))


def varlen_prefill(q, k_pages, v_pages, batch, scale, window=None):
    """Prefill attention on CUDA: one variable-length launch over the rows' gathered keys and values."""
    from torch.nn.attention.varlen import varlen_attn
    if "varlen" not in batch.plans:
        batch.plans["varlen"] = varlen_plan(batch, k_pages.shape[1])
    slots, cu_q, cu_k, longest = batch.plans["varlen"]
    k, v = (pages.flatten(0, 1)[slots] for pages in (k_pages, v_pages))                     # [keys, Hkv, Dh]
    options = {"enable_gqa": True}
    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:                                   # torch 2.11
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        options = {}
    return varlen_attn(q, k, v, cu_q, cu_k, longest, max(batch.spans), scale=scale,
                       window_size=(-1 if window is None else window - 1, 0), **options)


# ---------------------------------------------------------------- Qwen2, Qwen3, Llama

FAMILY = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")       # inverse frequencies that do not depend on the length


def unsupported(model) -> str | None:
    """Why OwnForward would be wrong for `model`, or None where it is right."""
    config = model.config
    if type(model).__name__.removeprefix("FSDP") not in FAMILY:
        return f"architecture {type(model).__name__}"
    if config.hidden_act not in ("silu", "swish"):
        return f"activation {config.hidden_act}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "sliding-window layers"
    if model.model.rotary_emb.rope_type not in STATIC_ROPE:
        return f"rope type {model.model.rotary_emb.rope_type}"
    if (size := model.model.layers[0].self_attn.head_dim) & (size - 1):
        return f"head size {size}, no power of two"
    products = [(name, module) for name, module in model.named_modules() if name.endswith(("_proj", "lm_head"))]
    for name, module in products:
        if type(module).__name__.removeprefix("FSDP") != "Linear":
            return f"{name} of type {type(module).__name__}"
    return "a biased output layer" if model.lm_head.bias is not None else None


def whole(parameter: Tensor) -> Tensor:
    """A parameter's values, gathered from all ranks where it is sharded (FSDP2: every rank must call this)."""
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


def merged(modules: list[nn.Linear], kind: str) -> Tensor | None:
    """Weights or biases of several products of one input, as one. None if the modules have none."""
    return None if getattr(modules[0], kind) is None else torch.cat([whole(getattr(module, kind)) for module in modules])


def named_weights(model) -> Iterator[tuple[str, Tensor | None]]:
    """The inference copy's tensors, made from the stock model one at a time (all at once would double the memory)."""
    yield "embed", whole(model.model.embed_tokens.weight)
    yield "head", whole(model.lm_head.weight)
    yield "norm", whole(model.model.norm.weight)
    yield "inv_freq", model.model.rotary_emb.inv_freq
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        yield f"{i}.norm1", whole(layer.input_layernorm.weight)
        yield f"{i}.norm2", whole(layer.post_attention_layernorm.weight)
        for name in ("q_norm", "k_norm"):
            yield f"{i}.{name}", whole(getattr(attention, name).weight) if hasattr(attention, name) else None
        products = {"qkv": [attention.q_proj, attention.k_proj, attention.v_proj], "o": [attention.o_proj],
                    "gate_up": [mlp.gate_proj, mlp.up_proj], "down": [mlp.down_proj]}
        for name, modules in products.items():
            yield f"{i}.{name}", merged(modules, "weight")
            yield f"{i}.{name}.bias", merged(modules, "bias")


class OwnForward:
    """The forward of Qwen2, Qwen3 and Llama: per layer four products, attention, and four fused small operations."""
    path = "own forward"

    def __init__(self, model, dtype: torch.dtype, device: torch.device):
        config = model.config
        self.layers, self.eps = config.num_hidden_layers, config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_size = model.model.layers[0].self_attn.head_dim
        self.vocabulary = model.lm_head.out_features
        self.scale, self.rope_scale = self.head_size ** -0.5, model.model.rotary_emb.attention_scaling
        self.dtype, self.device = dtype, device
        self.tied = model.lm_head.weight is model.model.embed_tokens.weight
        self.weights: dict[str, Tensor | None] = {}
        self.load(model)

    @torch.no_grad()
    def load(self, model) -> None:
        """Copies the weights in; in place after the first time, because CUDA graphs keep their addresses.

        Matrices are kept as [in, out]: on a CPU that layout is up to twice as fast for few rows, so they are really
        transposed there. On CUDA they are transposed views, and a tied head is the embedding itself.
        """
        for name, value in named_weights(model):
            if value is None:
                self.weights[name] = None
                continue
            matrix = value.dim() == 2 and name != "embed"
            if name == "head" and self.tied and self.device.type == "cuda":
                self.weights[name] = self.weights["embed"].t()
                continue
            value = value.t() if matrix else value
            if name in self.weights:
                self.weights[name].copy_(value)
                continue
            dtype = torch.float32 if name == "inv_freq" else self.dtype
            new = torch.empty(value.shape, dtype=dtype, device=self.device)
            if matrix and self.device.type == "cuda":
                new = torch.empty(value.t().shape, dtype=dtype, device=self.device).t()
            self.weights[name] = new.copy_(value)

    def linear(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.weights[name], self.weights[name + ".bias"]
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def fill(self, batch: Batch, pool: Tensor) -> None:
        """Writes the keys and values of batch.ids into pool [2, layers, P, page, Hkv, Dh]."""
        self.hidden(batch, pool, last=self.layers - 1)

    def decode(self, batch: Batch, pool: Tensor) -> Tensor:
        """The same, and fp32 logits [T, V], which are never rounded to bf16 on the way."""
        return self.logits(self.hidden(batch, pool))

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.weights["head"]
        if hidden.is_cuda and hidden.dtype != torch.float32:
            return torch.mm(hidden, head, out_dtype=torch.float32)
        return torch.mm(hidden.float(), head.float())

    def hidden(self, batch: Batch, pool: Tensor, last: int | None = None) -> Tensor | None:
        """Last hidden states [T, D], final norm included; None if it stops with layer `last`'s keys and values."""
        w, residual = self.weights, None
        x = w["embed"][batch.ids]
        angle = batch.positions[:, None].float() * w["inv_freq"]
        angle = torch.cat((angle, angle), -1)
        cos, sin = ((f(angle) * self.rope_scale).to(x.dtype) for f in (torch.cos, torch.sin))               # [T, Dh]
        for i in range(self.layers):
            k_pages, v_pages = pool[0, i], pool[1, i]
            x, residual = kernels.add_rms_norm(x, residual, w[f"{i}.norm1"], self.eps)
            q = rotate_and_store(self.linear(x, f"{i}.qkv"), w[f"{i}.q_norm"], w[f"{i}.k_norm"], cos, sin, batch.slots,
                                 k_pages, v_pages, self.eps)
            if i == last:
                return None
            x = self.linear(attention(q, k_pages, v_pages, batch, self.scale).flatten(1), f"{i}.o")
            x, residual = kernels.add_rms_norm(x, residual, w[f"{i}.norm2"], self.eps)
            x = self.linear(kernels.silu_mul(self.linear(x, f"{i}.gate_up")), f"{i}.down")
        return kernels.add_rms_norm(x, residual, w["norm"], self.eps)[0]


# ---------------------------------------------------------------- any other architecture

def stock_attention(module, q, k, v, attention_mask, scaling=None, sampler_batch=None, sampler_pool=None,
                    sliding_window=None, **options):
    """Our attention as AttentionInterface calls it: q [1, Hq, T, Dh], k and v [1, Hkv, T, Dh] -> [1, T, Hq, Dh]."""
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"the sampler cannot run {type(module).__name__}: its attention uses {name}")
    k_pages, v_pages = sampler_pool[0, module.layer_idx], sampler_pool[1, module.layer_idx]
    stored = (sampler_batch.slots >= 0).nonzero()[:, 0]
    for new, pages in ((k, k_pages), (v, v_pages)):
        pages.view(-1, *pages.shape[2:]).index_copy_(0, sampler_batch.slots[stored], new[0].transpose(0, 1)[stored])
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    q = q[0].transpose(0, 1).contiguous()
    return attention(q, k_pages, v_pages, sampler_batch, scale, sliding_window)[None], None


class StockForward:
    """The stock modules of any decoder that calls AttentionInterface, with our attention; else ValueError."""
    path = "stock modules"

    def __init__(self, model, dtype: torch.dtype, device: torch.device):
        from transformers import AttentionInterface
        AttentionInterface.register("mars_paged", stock_attention)      # no mask function so named: no mask is built
        self.model = copy.deepcopy(model).to(device, dtype).eval().requires_grad_(False)
        try:
            self.model.set_attn_implementation("mars_paged")
        except ValueError as error:
            raise ValueError(f"the sampler cannot run {type(model).__name__}: {error}") from error
        config = self.model.config.get_text_config()
        rope = str((getattr(config, "rope_parameters", None) or {}).get("rope_type"))
        if "dynamic" in rope or rope == "longrope":
            raise ValueError(f"the sampler cannot run rope type {rope}: it depends on the longest row of a batch")
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.vocabulary = self.model.get_input_embeddings().num_embeddings
        self.dtype, self.device = dtype, device

    @torch.no_grad()
    def load(self, model) -> None:
        source = dict(model.named_parameters())
        for name, value in self.model.named_parameters():
            value.copy_(whole(source[name]))

    def run(self, module, batch: Batch, pool: Tensor):
        return module(batch.ids[None], position_ids=batch.positions[None], use_cache=False, sampler_batch=batch,
                      sampler_pool=pool)

    def fill(self, batch: Batch, pool: Tensor) -> None:
        """As OwnForward.fill; only the output layer is spared here."""
        self.run(self.model.base_model, batch, pool)

    def decode(self, batch: Batch, pool: Tensor) -> Tensor:
        """fp32 copies of the model's own logits [T, V], rounded to its dtype (some models scale or cap theirs)."""
        return self.run(self.model, batch, pool).logits[0].float()


# ---------------------------------------------------------------- decode steps over static buffers

class Buckets:
    """Decode steps padded to a few sizes, so that on CUDA each size is one graph that is captured once and replayed.

    Padding rows have length 0 and slot -1: they read nothing and write nothing. Off CUDA it runs the same padded batch.
    """

    def __init__(self, forward, pool: Tensor, max_rows: int):
        self.forward, self.pool = forward, pool
        self.sizes = sorted({min(size, max_rows) for size in (1, 2, 4, 8, 16, *range(32, max_rows + 32, 32))})
        self.graphs: dict[tuple[int, int], tuple] = {}      # (rows, pages per row) -> (graph, its batch, its hidden states)

    def decode(self, batch: Batch, pool: Tensor) -> Tensor:
        """forward.decode(batch, pool) through the smallest bucket that holds the batch."""
        rows, width = batch.table.shape
        size = next(size for size in self.sizes if size >= rows)
        key = size, max(16, 1 << (width - 1).bit_length())
        if key not in self.graphs:
            self.graphs[key] = self.capture(*key)
        graph, static, hidden = self.graphs[key]
        for name, padding in (("ids", 0), ("positions", 0), ("slots", -1), ("lengths", 0)):
            buffer = getattr(static, name)
            buffer[:rows] = getattr(batch, name)
            buffer[rows:] = padding
        static.table[:rows, :width] = batch.table
        if graph is None:
            static.spans, static.plans = batch.spans + [0] * (size - rows), {}
            return self.forward.decode(static, pool)[:rows]
        graph.replay()
        return self.forward.logits(hidden[:rows])           # outside the graphs: each would keep logits [size, V] of its own

    def capture(self, size: int, width: int) -> tuple:
        """A graph over buffers of `size` rows; run before it is captured, so that kernels are compiled by then."""
        def buffer(*shape, dtype=torch.int64, fill=0):
            return torch.full(shape, fill, dtype=dtype, device=self.pool.device)
        static = Batch(buffer(size), buffer(size), buffer(size, fill=-1), buffer(size, width, dtype=torch.int32),
                       buffer(size, dtype=torch.int32))
        if not (self.pool.is_cuda and isinstance(self.forward, OwnForward) and kernels.use_triton(self.pool)):
            return None, static, None                       # the plain forms look at values on the host: not for a graph
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.forward.hidden(static, self.pool)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        shared = next(iter(self.graphs.values()))[0].pool() if self.graphs else None    # graphs run one at a time
        with torch.cuda.graph(graph, pool=shared):
            hidden = self.forward.hidden(static, self.pool)
        return graph, static, hidden
