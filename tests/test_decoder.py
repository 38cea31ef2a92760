"""The forward over pages: which models it takes, and that each form of attention is exact."""

import math
from dataclasses import replace

import pytest
import torch
import transformers

import kernels
from sampler import Sampler
from sampler import model as decoder
from sampler.attention import Batch, packed_plan, row_attention, sparse_decode
from sampler.graphs import Buckets
from sampler.model import PACKED_ROWS, OwnForward

SMALL = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    initializer_range=0.3,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
)
# An option that this architecture does not have.
ABSENT = "absent"
WINDOW = dict(sliding_window=6, layer_types=["full_attention", "sliding_attention"])
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
LINEAR = dict(layer_types=["linear_attention", "full_attention"])
LATENT = dict(
    head_dim=ABSENT,
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
)

# What the sampler gets right, each against the model's own forward.
EXACT = {
    "Qwen2": {},
    "Qwen3": {},
    "Llama": {},
    "Mistral": dict(sliding_window=6),
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "Gemma": {},
    "Gemma3 text": dict(sliding_window=6, layer_types=WINDOW["layer_types"]),
    "Phi": {},
    "Phi3": dict(pad_token_id=0),
    "Qwen2Moe": dict(EXPERTS, shared_expert_intermediate_size=24),
    "Qwen3Moe": EXPERTS,
    "Olmo2": {},
    "GPT2": dict(n_embd=32, n_layer=2, n_head=4, num_key_value_heads=4),
    "GPTNeoX": dict(num_key_value_heads=4),
    "SmolLM3": dict(pad_token_id=0),
    "Granite": {},
    "Cohere": {},
    "Cohere2": WINDOW,
    "Starcoder2": dict(sliding_window=6),
    "Exaone4": WINDOW,
    "Glm4": dict(pad_token_id=0),
    "OPT": dict(ffn_dim=48, word_embed_proj_dim=32, num_key_value_heads=4),
    "Olmoe": dict(num_experts=4, num_experts_per_tok=2),
}

# What it would get wrong, with a word of the reason that it must give.
WRONG = {
    # State that lives outside attention.
    "Qwen3Next": (LINEAR, "linear_attention"),
    "Lfm2": (dict(layer_types=["conv", "full_attention"]), "conv"),
    "Mamba": (dict(state_size=4), ""),
    "Mamba2": (dict(num_heads=8, head_dim=8, state_size=4, n_groups=1), ""),
    "Rwkv": (dict(attention_hidden_size=32), ""),
    "Jamba": (dict(attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False), ""),
    "Bamba": (dict(attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8), ""),
    "FalconH1": (dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8), ""),
    "RecurrentGemma": (dict(lru_width=32), ""),
    # Attention that is not transformers' interface.
    "Bloom": (dict(n_head=4, n_layer=2), ""),
    "Falcon": (dict(head_dim=ABSENT), ""),
    "GPTJ": (dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4), ""),
    "CodeGen": (dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4), ""),
    "GPTNeo": (dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]), ""),
    "Mpt": (dict(d_model=32, n_heads=4, n_layers=2), ""),
    "XGLM": (dict(d_model=32, attention_heads=4, num_layers=2, ffn_dim=48), ""),
    "DiffLlama": ({}, ""),
    # Windows and chunks that only a mask knows.
    "Llama4 text": (
        dict(
            EXPERTS,
            intermediate_size_mlp=48,
            num_local_experts=2,
            attention_chunk_size=128,
            layer_types=["chunked_attention", "full_attention"],
            pad_token_id=0,
        ),
        "chunked",
    ),
    "Olmoe": (
        dict(num_experts=4, num_experts_per_tok=2, sliding_window=200),
        "layer 0 is 200, but None in its mask",
    ),
    "Phimoe": (
        dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=200,
            use_sliding_window=False,
        ),
        "layer 0 is None, but 200 in its mask",
    ),
    "Phimoe full": (
        dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=200,
            layer_types=["full_attention"] * 2,
        ),
        "layer 0 is None, but 200 in its mask",
    ),
    "Qwen2Moe windows": (
        dict(
            EXPERTS,
            shared_expert_intermediate_size=24,
            use_sliding_window=True,
            sliding_window=200,
            max_window_layers=1,
        ),
        "window",
    ),
    # Attention with more than keys and values, or of other shapes.
    "Gemma2": (dict(sliding_window=6), "softcap"),
    "DeepseekV2": (
        dict(LATENT, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
        "",
    ),
    "DeepseekV3": (dict(LATENT, n_routed_experts=4, n_group=2, topk_group=1), ""),
    "StableLm": ({}, ""),
    "GptOss": (dict(num_local_experts=4, sliding_window=6), "s_aux"),
    "Gemma4Unified text": (dict(pad_token_id=0), "one shape of all layers"),
    # Rotations that depend on the longest row of a batch.
    "Llama dynamic": (
        dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "dynamic",
    ),
}


def build(kind, **options):
    """A random tiny model of an architecture, named by the beginning of its class."""
    name = kind.split()[0]
    text = "Text" if "text" in kind else ""
    config = getattr(transformers, f"{name}{text}Config")
    for suffix in ("ForCausalLM", "LMHeadModel"):
        model = getattr(transformers, name + suffix, None)
        if model is not None:
            break
    torch.manual_seed(0)
    given = {key: value for key, value in {**SMALL, **options}.items() if value != ABSENT}
    return model(config(**given)).eval()


@pytest.mark.parametrize("kind", EXACT)
def test_exact_architectures_pass_the_probe(kind):
    """Built, and its greedy tokens are those of `generate`."""
    model = build(kind, **EXACT[kind])
    sampler = Sampler(model, max_tokens=256, page_size=4)
    prompt = list(range(3, 20))
    ids = torch.tensor([prompt])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    tokens = sampler.generate([prompt], max_new_tokens=12, temperature=0)[0].tokens
    assert tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_architectures_are_refused_at_once(kind):
    """One sentence that names the architecture, when the sampler is built."""
    options, reason = WRONG[kind]
    model = build(kind, **options)
    with pytest.raises(ValueError, match=type(model).__name__) as error:
        Sampler(model, max_tokens=256)
    sentence = str(error.value)
    assert reason in sentence
    assert "\n" not in sentence
    assert len(sentence) < 200


@pytest.mark.parametrize("own", [True, False])
def test_the_probe_leaves_no_trace(own):
    """A model that trains stays in training, and the global generator is where it was."""
    model = build("Llama").train()
    attention = model.config._attn_implementation
    state = torch.get_rng_state()
    Sampler(model, max_tokens=256, own_forward=own)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model.config._attn_implementation == attention


def test_layers_that_are_frozen_stay_in_evaluation():
    model = build("Llama").train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    Sampler(model, max_tokens=256)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize(
    "dtype, error, refused",
    [
        (torch.bfloat16, 0.12, False),  # rounding did as much to a fine-tuned SmolLM2
        (torch.bfloat16, 0.4, True),
        (torch.float32, 0.01, True),
    ],
)
def test_the_probe_lets_rounding_pass_and_no_mistake(dtype, error, refused, monkeypatch):
    model = build("Llama")
    decode = OwnForward.decode
    generator = torch.Generator().manual_seed(0)

    def wrong(self, batch, pool):
        logits = decode(self, batch, pool)
        noise = torch.randn(logits.shape, generator=generator)
        return logits + error * logits.std() * noise

    monkeypatch.setattr(OwnForward, "decode", wrong)
    if not refused:
        Sampler(model, max_tokens=256, dtype=dtype)
        return
    with pytest.raises(ValueError, match="its logits are wrong by"):
        Sampler(model, max_tokens=256, dtype=dtype)


@pytest.mark.parametrize("own", [True, False])
def test_a_head_that_begins_as_zeros_passes_the_probe(own):
    model = build("Llama")
    torch.nn.init.zeros_(model.lm_head.weight)
    sampler = Sampler(model, max_tokens=256, own_forward=own)
    logprobs = sampler.generate([[1, 2]], max_new_tokens=1)[0].logprobs
    assert logprobs == pytest.approx([-math.log(SMALL["vocab_size"])])


def test_a_model_that_fails_itself_is_refused_in_one_sentence():
    """Its table of positions is shorter than the probe."""
    model = build("GPT2", **EXACT["GPT2"])
    model.transformer.wpe = torch.nn.Embedding(8, 32)
    with pytest.raises(ValueError, match="GPT2LMHeadModel: it fails on its own .IndexError.$"):
        Sampler(model, max_tokens=256)


@pytest.mark.parametrize(
    "kind, options",
    [
        ("GPT2", dict(EXACT["GPT2"], max_position_embeddings=ABSENT, n_positions=64)),
        ("OPT", dict(EXACT["OPT"], max_position_embeddings=64)),
    ],
)
def test_no_request_passes_a_table_of_positions(kind, options):
    """The last new token is not fed, so 60 tokens and 5 new ones fill 64 positions."""
    sampler = Sampler(build(kind, **options), max_tokens=256, page_size=4)
    conversation = sampler.open()
    with pytest.raises(ValueError, match="60 tokens and 6 new ones .* 64 positions"):
        sampler.submit(conversation, [1] * 60, max_new_tokens=6)
    with pytest.raises(ValueError, match="64 positions"):
        sampler.generate([[1], [1] * 60], max_new_tokens=6)
    assert len(sampler.generate([[1] * 60], max_new_tokens=5)[0].tokens) == 5
    sampler.submit(conversation, [1] * 50, max_new_tokens=2)
    while sampler.busy:
        sampler.step()
    with pytest.raises(ValueError, match="62 tokens and 4 new ones"):
        sampler.submit(conversation, [1] * 10, max_new_tokens=4)


@pytest.mark.parametrize("kind", ["Cohere", "GPTNeoX", "Phi", "Gemma3 text"])
def test_rotations_have_no_last_position(kind):
    options = dict(EXACT[kind], max_position_embeddings=48)
    sampler = Sampler(build(kind, **options), max_tokens=256, page_size=4)
    assert len(sampler.generate([[1] * 60], max_new_tokens=5)[0].tokens) == 5


def test_a_mask_of_the_layers_own_is_refused():
    with pytest.raises(ValueError, match="DogeForCausalLM: its layers make masks of their own"):
        Sampler(build("Doge", keep_window_size=64), max_tokens=256)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    "options, word",
    [
        (dict(num_hidden_layers=1), "num_hidden_layers is 1, not 2"),
        (dict(num_hidden_layers=3), "num_hidden_layers is 3, not 2"),
        (dict(rms_norm_eps=0.5), "rms_norm_eps is 0.5"),
        (dict(rope_parameters=dict(rope_type="default", rope_theta=7.0)), "rope_parameters"),
        (dict(num_attention_heads=2), "num_attention_heads"),
        (dict(intermediate_size=40), "intermediate_size"),
        (dict(attention_bias=True), "attention_bias"),
    ],
)
def test_weights_of_another_model_are_refused(own, options, word):
    """In one sentence, before any of them is copied, and running requests go on."""
    model = build("Llama")
    sampler = Sampler(model, max_tokens=256, page_size=4, own_forward=own)
    prompt = list(range(3, 20))
    expected = sampler.generate([prompt], max_new_tokens=6, temperature=0)[0].tokens
    request = sampler.submit(sampler.open(), prompt, max_new_tokens=6, temperature=0)
    sampler.step()
    with pytest.raises(ValueError, match=word) as error:
        sampler.load_weights(build("Llama", **options))
    assert "\n" not in str(error.value)
    while sampler.busy:
        sampler.step()
    assert request.tokens == expected


def test_weights_of_a_model_with_adapters_are_refused():
    """A class of a LoRA may be called Linear too; it is no product of the own forward."""

    class Linear(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down = torch.nn.Parameter(torch.ones(2, base.in_features))

        @property
        def weight(self):
            return self.base.weight

        @property
        def bias(self):
            return self.base.bias

        def forward(self, x):
            return self.base(x)

    model = build("Llama")
    sampler = Sampler(model, max_tokens=256)
    assert sampler.path == "own forward"
    mlp = model.model.layers[0].mlp
    mlp.down_proj = Linear(mlp.down_proj)
    assert "down_proj of type Linear" in decoder.unsupported(model)
    with pytest.raises(ValueError, match="down_proj"):
        sampler.load_weights(model)


def test_weights_that_were_saved_and_read_are_taken(tmp_path):
    """Names, types and paths in a config do not matter."""
    model = build("Qwen3")
    sampler = Sampler(model, max_tokens=256)
    model.save_pretrained(tmp_path)
    saved = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    saved.config.use_cache = False
    saved.config.pad_token_id = 3
    sampler.load_weights(saved)
    fresh = Sampler(saved.float(), max_tokens=256)
    one, other = (s.generate([[1, 2, 3]], max_new_tokens=4)[0] for s in (sampler, fresh))
    assert one.logprobs == other.logprobs
    old = Sampler(model, max_tokens=256).generate([[1, 2, 3]], max_new_tokens=4)[0]
    assert one.logprobs != old.logprobs, "bf16 has rounded the weights"


def test_buffers_are_loaded_with_the_weights():
    """What a mixture of experts routes by may be a buffer."""
    sampler = Sampler(build("Gemma"), max_tokens=256)
    other = build("Gemma")
    other.model.rotary_emb.inv_freq.mul_(2)
    sampler.load_weights(other)
    assert torch.equal(
        sampler.forward.model.model.rotary_emb.inv_freq, other.model.rotary_emb.inv_freq
    )


# ---------------------------------------------------------------- exact on every path


@pytest.mark.parametrize("length", [PACKED_ROWS - 1, PACKED_ROWS, 3 * PACKED_ROWS])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights_give_the_same_products(length, bias):
    """Few rows use the plain matrix and many the packed one; new weights reach both."""
    forward = OwnForward(
        build("Llama", attention_bias=bias, mlp_bias=bias), torch.float32, torch.device("cpu")
    )
    other = build("Llama", attention_bias=bias, mlp_bias=bias)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    forward.load(other)
    x = torch.randn(length, SMALL["intermediate_size"])
    expected = other.model.layers[1].mlp.down_proj(x)
    assert torch.allclose(forward.linear(x, "1.down"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_small_operations_equal_the_kernels(rows):
    """The forms of a CPU against the kernels' own plain forms."""
    torch.manual_seed(0)
    x = torch.randn(rows, 16)
    residual = torch.randn(rows, 16)
    weight = torch.randn(16)
    expected = kernels.add_rms_norm(x, residual, weight, 1e-6)
    normed, total = decoder.add_rms_norm(x, residual.clone(), weight, 1e-6)
    assert torch.allclose(normed, expected[0], atol=1e-6)
    assert torch.equal(total, expected[1])
    assert torch.allclose(decoder.silu_mul(x), kernels.silu_mul(x), atol=1e-6)


def test_a_bf16_model_on_a_cpu_keeps_its_cache_and_head_in_fp32():
    """Keys and values have bf16's values; logits are those of bf16 weights without rounding."""
    model = build("Qwen3").bfloat16()
    sampler = Sampler(model, max_tokens=256, page_size=4)
    prompts = [list(range(3, 20)), list(range(40, 60))]
    done = sampler.generate(prompts, max_new_tokens=8, temperature=0)
    assert sampler.path == "own forward"
    assert sampler.pool.dtype == sampler.forward.weights["head"].dtype == torch.float32
    assert torch.equal(sampler.pool, sampler.pool.bfloat16().float())
    for prompt, completion in zip(prompts, done, strict=True):
        ids = torch.tensor([prompt + completion.tokens])
        with torch.no_grad():
            logits = model.float()(ids).logits[0, len(prompt) - 1 : -1]
        model.bfloat16()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])
        got = torch.tensor(completion.logprobs)
        assert (got - expected[:, 0]).abs().max() < 0.5
        assert (got - expected[:, 0]).abs().mean() < 0.1


@torch.no_grad()
def test_stock_modules_in_bf16_turn_keys_by_the_model_s_own_angles():
    """Only weights are rounded: the buffers keep their type, so distant positions stay put."""
    model = build("Mistral", sliding_window=None, head_dim=64, max_position_embeddings=4096)
    sampler = Sampler(model, max_tokens=4096, dtype=torch.bfloat16)
    copied = sampler.forward.model
    assert sampler.path == "stock modules"
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.bfloat16}
    buffers = dict(copied.named_buffers())
    for name, buffer in model.named_buffers():
        assert buffers[name] is not buffer
        assert torch.equal(buffers[name], buffer)
    prompt = torch.arange(2000) % 90
    completion = sampler.generate([prompt], max_new_tokens=1, temperature=0)[0]
    rounded = build("Mistral", sliding_window=None, head_dim=64, max_position_embeddings=4096)
    for parameter in rounded.parameters():
        parameter.copy_(parameter.bfloat16())
    logits = rounded(prompt[None]).logits[0, -1]
    expected = logits.log_softmax(-1)[completion.tokens[0]].item()
    assert completion.logprobs[0] == pytest.approx(expected, abs=0.1)


# ---------------------------------------------------------------- paths that only CUDA takes


@pytest.mark.parametrize("window", [None, 3])
def test_row_attention_decodes_as_a_prefill_of_one_token_a_row(window):
    """What CUDA does for windows and odd head sizes, against the sparse products of a CPU."""
    torch.manual_seed(0)
    table = torch.randperm(12).view(3, 4).int()
    k_pages, v_pages = torch.randn(2, 12, 4, 2, 8)
    lengths = [14, 5, 1]
    batch = Batch(None, None, None, table, torch.tensor(lengths, dtype=torch.int32), spans=lengths)
    q = torch.randn(3, 4, 8)
    sparse = sparse_decode(q, k_pages, v_pages, batch, 0.3, window)
    rows = row_attention(q, k_pages, v_pages, batch, 0.3, window)
    assert torch.allclose(sparse, rows, atol=1e-5)


def test_packed_plan_of_a_decode_step():
    """One query token a row, and every key of every row once, in order."""
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    batch = Batch(None, None, None, table, torch.tensor([6, 3], dtype=torch.int32), spans=[6, 3])
    slots, cu_queries, cu_keys, longest = packed_plan(batch, 4)
    assert slots.tolist() == [12, 13, 14, 15, 4, 5, 8, 9, 10]
    assert cu_queries.tolist() == [0, 1, 2]
    assert cu_keys.tolist() == [0, 6, 9]
    assert longest == 1


class FakeGraph:
    """Stands for torch.cuda.CUDAGraph: counts its replays."""

    def __init__(self):
        self.replays = 0

    def pool(self):
        return "memory"

    def replay(self):
        self.replays += 1


def test_graphs_are_captured_at_the_start(monkeypatch):
    """One graph a size before any request; a decode step replays one and captures none."""
    captured = []

    def capture(self, static, memory):
        captured.append((len(static.ids), memory))
        self.forward.hidden(replace(static, spans=[0] * len(static.ids)), self.pool)
        return FakeGraph(), torch.zeros(len(static.ids), SMALL["hidden_size"])

    monkeypatch.setattr(Buckets, "may_capture", lambda self: True)
    monkeypatch.setattr(Buckets, "capture", capture)
    forward = OwnForward(build("Qwen3"), torch.float32, torch.device("cpu"))
    pool = torch.zeros(2, 2, 6, 4, 2, 8)
    buckets = Buckets(forward, pool, 40)
    assert [size for size, _ in captured] == [40, 32, 16, 8, 4, 2, 1]
    assert [memory for _, memory in captured] == [None] + ["memory"] * 6
    assert not pool.any()
    ids = torch.zeros(3, dtype=torch.int64)
    table = torch.tensor([[0], [1], [2]], dtype=torch.int32)
    batch = Batch(ids, ids, 4 * ids, table, torch.ones(3, dtype=torch.int32), spans=[1, 1, 1])
    assert buckets.decode(batch, pool).shape == (3, SMALL["vocab_size"])
    assert buckets.graphs[4][0].replays == 1
    assert len(captured) == 7
