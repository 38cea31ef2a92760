"""Models that packed training gets wrong are refused in one sentence; all others are exact."""

import json

import pytest
import torch
from helpers.tiny import CPU, KINDS, OBJECTIVE, SHAPE, make_samples, model, saved, weigh
from transformers import AutoConfig, AutoModelForCausalLM

import trainer
from config import UserError
from trainer import loading
from trainer.attention import packed_attention

GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 128,
}
EXACT = {
    "mistral without a window": ("mistral", SHAPE | {"sliding_window": None}),
    "gemma": ("gemma", SHAPE | {"head_dim": 16}),
    "phi3": ("phi3", SHAPE | {"pad_token_id": 0, "sliding_window": None}),
    "gpt2": ("gpt2", GPT2),
    "gpt_neox": ("gpt_neox", SHAPE),
    "olmo2": ("olmo2", SHAPE),
    "llama, yarn": ("llama", SHAPE | {"rope_parameters": YARN}),
    "qwen3_moe": ("qwen3_moe", SHAPE | MOE | {"head_dim": 16}),
    "granite, plain logits": ("granite", SHAPE),
}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
WRONG = {
    "qwen3, window": ("qwen3", SHAPE | WINDOW | {"head_dim": 16}, "sliding window of 8"),
    "mistral, wide window": ("mistral", SHAPE, "sliding window of 4096"),
    "gemma3": ("gemma3_text", SHAPE | {"head_dim": 16}, "sliding window"),
    "llama, dynamic rope": ("llama", SHAPE | {"rope_parameters": DYNAMIC}, "rope type dynamic"),
    "gemma2": ("gemma2", SHAPE | {"head_dim": 16}, "plain logits"),
    "cohere": ("cohere", SHAPE | {"logit_scale": 0.06}, "plain logits"),
    "granite": ("granite", SHAPE | {"logits_scaling": 8.0}, "plain logits"),
    "phi": ("phi", SHAPE, "bias"),
    "gpt_oss": (
        "gpt_oss",
        SHAPE | {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8},
        "s_aux",
    ),
    "mamba": ("mamba", SHAPE, "leak"),
    "lfm2": ("lfm2", SHAPE | {"layer_types": ["conv", "full_attention"]}, "of type conv"),
    "bamba": (
        "bamba",
        SHAPE | {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16},
        "leak",
    ),
    "falcon_h1": (
        "falcon_h1",
        SHAPE | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
        "leak",
    ),
    "llama4": (
        "llama4_text",
        SHAPE | {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
        "chunked_attention",
    ),
    "bloom": ("bloom", {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}, ""),
    "falcon": ("falcon", SHAPE, "AttentionInterface"),
    "stablelm": ("stablelm", SHAPE, "boundaries"),
    "diffllama": ("diffllama", SHAPE, "call attention 4 times"),
    "phimoe, window in a mask": (
        "phimoe",
        SHAPE | {"num_local_experts": 2, "sliding_window": 4096},
        "sliding window of 4096",
    ),
    "doge": ("doge", SHAPE, "mask of its own"),
}


def build(kind, options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **options)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # large weights, so that a leak shows
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return made


@pytest.mark.parametrize("name", EXACT)
def test_what_is_let_through_is_exact_in_training_too(name):
    """Log-probs of packed samples beside the stock model on each sample alone."""
    made = build(*EXACT[name])
    trainer.check_exact(made)
    samples = make_samples()
    (batch,) = trainer.micro_batches(samples, weigh(samples), 10_000, CPU)
    expected = {}
    for index, sample in enumerate(samples):
        with torch.no_grad():
            logits = made(torch.tensor([sample.tokens])).logits[0].log_softmax(-1)
        places = [i for i, sampled in enumerate(sample.mask) if sampled]
        expected[index] = [logits[i - 1, sample.tokens[i]].item() for i in places]
    policy = trainer.Policy(made, bf16=False)
    logprobs = trainer.logprob(policy, batch, 1.0)
    for index in expected:
        found = logprobs[batch.owner == index].tolist()
        assert found == pytest.approx(expected[index], abs=2e-4)
    (stats,) = trainer.backward(policy, [batch], [None], **OBJECTIVE)
    assert stats["loss"].isfinite()


@pytest.mark.parametrize("name", WRONG)
def test_what_packing_gets_wrong_is_refused_in_one_sentence(name):
    kind, options, match = WRONG[name]
    made = build(kind, options)
    with pytest.raises(UserError, match="the trainer cannot run") as refusal:
        trainer.check_exact(made)
    assert match in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert "use a Qwen2, Qwen3 or Llama model" in str(refusal.value)


def test_a_window_that_no_sample_reaches_is_let_through():
    made = build("mistral", SHAPE | {"sliding_window": 100})
    loading.check_exact(made, longest=100)
    with pytest.raises(UserError, match="window of 100"):
        loading.check_exact(made, longest=101)


def test_the_probe_alone_finds_a_leak(monkeypatch):
    """Without a word in the config: a model whose layers look across the samples' boundary."""
    made = model("qwen3")
    layer = made.model.layers[0]
    plain = layer.mlp.forward
    monkeypatch.setattr(layer.mlp, "forward", lambda x: plain(x + x.roll(1, dims=1)))
    with pytest.raises(UserError, match="packed samples change its logits"):
        trainer.check_exact(made)


def test_weights_that_are_no_numbers_are_refused():
    made = model("qwen3")
    with torch.no_grad():
        made.model.norm.weight[3] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        trainer.check_exact(made)


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_leaves_no_trace(kind):
    made = model(kind)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    attention = made.config._attn_implementation
    for training in (False, True):
        made.train(training)
        state = torch.random.get_rng_state()
        trainer.check_exact(made)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert made.training == training
    assert made.config._attn_implementation == attention
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    assert all(parameter.grad is None for parameter in made.parameters())


def test_bf16_is_let_through_too():
    """As the reference of the KL term is loaded on a GPU."""
    trainer.check_exact(model("qwen3").bfloat16())


def test_only_training_asks_for_plain_logits(tmp_path):
    made = build("granite", SHAPE | {"logits_scaling": 8.0})
    made.save_pretrained(tmp_path)
    assert trainer.load_model(tmp_path, CPU, training=False)
    with pytest.raises(UserError, match="plain logits"):
        trainer.load_model(tmp_path, CPU, training=True)


# ---------------------------------------------------------------- folders


def cut(path):
    path.write_bytes(path.read_bytes()[:2000])


def without_a_weight(folder):
    made = AutoModelForCausalLM.from_pretrained(folder)
    weights = made.state_dict()
    del weights["model.layers.1.mlp.up_proj.weight"]
    made.save_pretrained(folder, state_dict=weights)


def with_code(folder):
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "stranger"
    config["auto_map"] = {
        "AutoConfig": "stranger.StrangerConfig",
        "AutoModelForCausalLM": "stranger.Stranger",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "stranger.py").write_text("open('ran', 'w')\n")


BROKEN = {
    "no folder": lambda folder: folder.rename(folder.with_name("elsewhere")),
    "config gone": lambda folder: (folder / "config.json").unlink(),
    "config cut": lambda folder: (folder / "config.json").write_text('{"model_type": "qwen3"'),
    "config a list": lambda folder: (folder / "config.json").write_text("[]"),
    "config unknown": lambda folder: (folder / "config.json").write_text('{"model_type": "x"}'),
    "weights gone": lambda folder: (folder / "model.safetensors").unlink(),
    "weights cut": lambda folder: cut(folder / "model.safetensors"),
    "a weight missing": without_a_weight,
    "code of its own": with_code,
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_folder_is_one_sentence(kind, training, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    folder = saved("qwen3", tmp_path / "model")
    BROKEN[kind](folder)
    with pytest.raises(UserError, match="cannot load a model from") as refusal:
        trainer.load_model(folder, CPU, training=training)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- attention


def test_attention_refuses_what_it_does_not_do():
    q = torch.randn(1, 4, 20, 8)
    k = torch.randn(1, 2, 20, 8)
    lengths = [12, 8]
    whole, _ = packed_attention(None, q, k, k, lengths=lengths)
    wide, _ = packed_attention(None, q, k, k, lengths=lengths, sliding_window=12)
    assert torch.equal(whole, wide)
    with pytest.raises(UserError, match="sliding window"):
        packed_attention(None, q, k, k, lengths=lengths, sliding_window=11)
    for name in ("softcap", "s_aux", "position_bias"):
        with pytest.raises(UserError, match=name):
            packed_attention(None, q, k, k, lengths=lengths, **{name: 1.0})
    with pytest.raises(ValueError, match="lengths"):
        packed_attention(None, q, k, k)
