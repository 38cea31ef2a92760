"""Adapters beside the dense model: gradients, the reference, states.

Ranks and shards: tests/test_policy.py; the sampler's copy: tests/test_lora_and_bf16.py.
"""

import json
import os

import pytest
import torch
from helpers.tiny import CPU, Tokenizer, make_samples, model, pack, saved, step
from safetensors.torch import load_file

import trainer
from trainer import lora

pytestmark = pytest.mark.usefixtures("products_by")

RANK = 3
SCALE = 32 / RANK


def with_adapters(plain, seed: int = 0):
    """The model with adapters of which neither half is 0, as after some steps."""
    trainer.add_adapters(plain, RANK, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in lora.lora_layers(plain).values():
            layer.lora_B.normal_(std=0.02, generator=generator)
    return plain


def merged_by_hand(plain, adapted):
    """`plain`, whose weights become those of the other model with its adapters: W + (α/R) B A."""
    with torch.no_grad():
        for name, layer in lora.lora_layers(adapted).items():
            plain.get_submodule(name).weight += SCALE * layer.lora_B @ layer.lora_A
    return plain


def learn(policy):
    """Three optimizer steps on the samples; returns the optimizer."""
    optimizer = trainer.make_optimizer(policy, 1e-2)
    for _ in range(3):
        step(policy, pack(make_samples()))
        optimizer.step()
    return optimizer


def test_the_gradient_is_the_dense_one_projected():
    """y = (W + s B A) x, so dB = s dW Aᵀ and dA = s Bᵀ dW."""
    adapted = with_adapters(model("qwen2"))
    dense = merged_by_hand(model("qwen2"), adapted)
    for plain in (adapted, dense):
        step(trainer.Policy(plain, bf16=False), pack(make_samples()))
    layers = lora.lora_layers(adapted)
    assert len(layers) == 2 * 7
    for name, layer in layers.items():
        gradient = dense.get_submodule(name).weight.grad
        assert gradient.norm() > 1e-4
        expected = SCALE * gradient @ layer.lora_A.T
        torch.testing.assert_close(layer.lora_B.grad, expected, rtol=1e-3, atol=1e-6)
        expected = SCALE * layer.lora_B.T @ gradient
        torch.testing.assert_close(layer.lora_A.grad, expected, rtol=1e-3, atol=1e-6)


def test_training_begins_at_the_model_itself_and_its_reference_stays_there():
    """Bit by bit: B is 0 at first, and the adapters that are off for the reference are on again."""
    (batch,) = pack(make_samples())
    start = trainer.logprob(trainer.Policy(model("llama"), bf16=False), batch, 1.0)
    policy = trainer.Policy(model("llama"), bf16=False)
    trainer.add_adapters(policy.model, RANK, seed=0)
    assert torch.equal(trainer.logprob(policy, batch, 1.0), start)
    learn(policy)
    trained = trainer.logprob(policy, batch, 1.0)
    assert torch.equal(trainer.logprob(trainer.reference(policy), batch, 1.0), start)
    assert torch.equal(trainer.logprob(policy, batch, 1.0), trained)
    assert not torch.equal(trained, start)


def test_adapters_are_drawn_from_a_seed_alone():
    """Within the bounds of a linear layer's weight."""
    drawn = []
    for seed in (5, 5, 6):
        adapted = model("qwen3")
        trainer.add_adapters(adapted, RANK, seed)
        layers = lora.lora_layers(adapted).values()
        drawn.append(torch.cat([layer.lora_A.detach().flatten() for layer in layers]))
        assert all(layer.lora_A.abs().max() <= layer.in_features**-0.5 for layer in layers)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert 0.9 < drawn[0].std() / (32**-0.5 / 3**0.5) < 1.1


def test_adapters_are_written_as_peft_names_them(tmp_path):
    """The path of their base is whole, although the model was loaded by a relative one."""
    start = saved("llama", tmp_path / "start")
    policy = trainer.Policy(trainer.load_model(os.path.relpath(start), CPU), bf16=False)
    trainer.add_adapters(policy.model, RANK, seed=0)
    trainer.save(tmp_path, 3, policy, learn(policy), Tokenizer())
    checkpoint = tmp_path / "checkpoint"
    assert json.loads((checkpoint / "adapter/adapter_config.json").read_text()) == {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(start)},
        **{"r": RANK, "lora_alpha": 32},
        "target_modules": "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj".split(),
    }
    weights = load_file(checkpoint / "adapter/adapter_model.safetensors")
    assert len(weights) == 2 * 2 * 7
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_{}.weight"
    a, b = (weights[name.format(half)] for half in "AB")
    assert a.shape == (RANK, 48) and b.shape == (32, RANK)
    down = [
        trainer.load_model(path, CPU).model.layers[1].mlp.down_proj for path in (start, checkpoint)
    ]
    torch.testing.assert_close(down[0].weight + SCALE * b @ a, down[1].weight)
