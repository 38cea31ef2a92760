"""The forward over pages: which models it takes, and that each form of attention is exact."""

import pytest
import torch
import transformers

from sampler import Sampler

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
