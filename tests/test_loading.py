"""Any causal model trains exactly: some packed, all others through their own forward."""

import copy
import json

import pytest
import torch
from helpers.tiny import CPU, OBJECTIVE, SHAPE, make_samples, pack, saved, weigh
from transformers import AutoConfig, AutoModelForCausalLM

import grpo
import trainer
from config import UserError
from plumbing import models

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
TEXT = SHAPE | {"head_dim": 16, "pad_token_id": 0}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
PACKED = {
    "qwen2": ("qwen2", SHAPE),
    "qwen3": ("qwen3", SHAPE | {"head_dim": 16}),
    "llama, linear rope": ("llama", SHAPE | {"rope_parameters": DYNAMIC | {"rope_type": "linear"}}),
    "mistral without a window": ("mistral", SHAPE | {"sliding_window": None}),
    "smollm3": ("smollm3", SHAPE | {"pad_token_id": 0}),
}
ALONE = {
    "mistral, window": ("mistral", SHAPE | {"sliding_window": 8}),
    "llama, dynamic rope": ("llama", SHAPE | {"rope_parameters": DYNAMIC}),
    "gemma2, capped logits": ("gemma2", SHAPE | {"head_dim": 16, "final_logit_softcapping": 2.0}),
    "granite, scaled logits": ("granite", SHAPE | {"logits_scaling": 8.0}),
    "gpt2": ("gpt2", GPT2),
    "qwen3.5, linear layers": ("qwen3_5_text", SHAPE | LINEAR | {"head_dim": 16}),
    "gemma3, with a vision tower": ("gemma3", {"text_config": TEXT, "vision_config": VISION}),
    "mixtral": ("mixtral", SHAPE | {"num_local_experts": 4, "sliding_window": None}),
}


def build(kind, options):
    """A random model with large weights, so that a leak shows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **options)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return made


def stock_step(made, samples, weights):
    """(loss, log-probs by sample): the stock model on each sample alone, with its gradients."""
    logprobs = {}
    total = 0.0
    for index, (sample, weight) in enumerate(zip(samples, weights, strict=True)):
        places = [i for i, sampled in enumerate(sample.mask) if sampled]
        logits = made(torch.tensor([sample.tokens])).logits[0]
        logp = (logits / OBJECTIVE["temperature"]).log_softmax(-1)
        logprob = torch.stack([logp[i - 1, sample.tokens[i]] for i in places])
        old = torch.tensor([sample.logprobs[i] for i in places])
        advantage = torch.full_like(old, sample.advantage)
        loss, _ = grpo.grpo_loss(logprob, old, advantage, weight[places])
        loss.backward()
        total += loss.item()
        logprobs[index] = logprob.tolist()
    return total, logprobs


@pytest.mark.usefixtures("products_by")
@pytest.mark.parametrize("name", [*PACKED, *ALONE])
def test_log_probs_loss_and_gradients_are_the_stock_models(name):
    kind, options = (PACKED | ALONE)[name]
    made = build(kind, options)
    samples = make_samples()
    weights = weigh(samples)
    stock = copy.deepcopy(made)
    loss, logprobs = stock_step(stock, samples, weights)
    policy = trainer.Policy(made, bf16=False, recompute_activations=name in ALONE)
    assert policy.can_pack == (name in PACKED)
    batches = pack(samples, pack=policy.can_pack)
    assert len(batches) == (1 if policy.can_pack else len(samples))
    batches.append(trainer.make_micro_batch([], [], [], CPU))  # as a rank without samples needs
    scored = [trainer.logprob(policy, batch, OBJECTIVE["temperature"]) for batch in batches]
    stats = trainer.backward(policy, batches, **OBJECTIVE)
    assert sum(float(numbers["loss"]) for numbers in stats) == pytest.approx(loss, abs=1e-4)
    for batch, numbers, again in zip(batches, stats, scored, strict=True):
        for index in batch.owner.unique().tolist():
            found = numbers["logprob"][batch.owner == index].tolist()
            assert found == pytest.approx(logprobs[index], abs=2e-4)
        torch.testing.assert_close(again, numbers["logprob"])
    for (parameter, p), q in zip(made.named_parameters(), stock.parameters(), strict=True):
        if q.grad is None:  # else DDP would wait, and AdamW's state could not be loaded
            assert not p.requires_grad and p.grad is None, parameter
        else:
            assert (p.grad - q.grad).norm() < 1e-3 * q.grad.norm() + 1e-6, parameter


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | YARN | {"rope_type": "llama3"}


@pytest.mark.parametrize(
    "kind, options, most",
    [
        ("qwen3", SHAPE, 256),
        ("gpt2", GPT2, 256),
        ("llama", SHAPE | {"rope_parameters": DYNAMIC}, 512),
        ("qwen3", SHAPE | {"rope_parameters": YARN | {"rope_theta": 1e4}}, 512),
        ("llama", SHAPE | {"rope_parameters": LLAMA3 | {"factor": 32.0, "rope_theta": 1e4}}, 256),
        ("bloom", {"vocab_size": 61}, None),
    ],
)
def test_a_sample_beyond_a_models_positions_is_refused(kind, options, most, tmp_path):
    AutoConfig.for_model(kind, **options).save_pretrained(tmp_path)
    trainer.check_positions(tmp_path, most or 10**9)
    if most:
        with pytest.raises(UserError, match=f"{most} positions, fewer than one context of"):
            trainer.check_positions(tmp_path, most + 1)


@pytest.mark.parametrize(
    "settings, shape",
    [
        ({"do_sample": False, "temperature": 0.9, "top_p": 0.6}, {}),
        ({"early_stopping": True, "num_beams": 1}, {}),
        ({"pad_token_id": -1}, {}),
        ({}, {"output_attentions": True}),
    ],
)
def test_settings_that_contradict_each_other_are_written_back(settings, shape, tmp_path):
    """Else transformers refuses every state of such a model."""
    folder = saved("qwen3", tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | shape))
    made = trainer.load_model(folder, CPU)
    made.generation_config.max_length = 7  # from 5.23 on only what has changed is refused
    made.save_pretrained(tmp_path / "again")
    assert trainer.load_model(tmp_path / "again", CPU).generation_config.max_length == 7
    again = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert settings.items() <= again.items()


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


@pytest.mark.parametrize("damage", [without_a_weight, with_code])
def test_a_broken_folder_is_one_sentence(damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = saved("qwen3", tmp_path / "model")
    damage(folder)
    with pytest.raises(UserError, match="cannot load a model from") as refusal:
        trainer.load_model(folder, CPU)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "ran").exists()


def test_ends_are_read_from_both_files_of_a_model(tmp_path):
    AutoConfig.for_model("llama", **SHAPE | {"eos_token_id": 5}).save_pretrained(tmp_path)
    assert models.declared_ends(tmp_path) == {5}
    for declared, ends in ((7, {5, 7}), ([5, 7, 9], {5, 7, 9})):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
        assert models.declared_ends(tmp_path) == ends
