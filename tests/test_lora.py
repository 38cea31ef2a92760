"""Adapters beside the dense model: gradients, the reference, states.

Ranks and shards: tests/test_policy.py; the sampler's copy: tests/test_lora_and_bf16.py.
"""

import json
import os

import pytest
import torch
from helpers.tiny import CPU, OBJECTIVE, Tokenizer, make_samples, model, pack, saved
from safetensors.torch import load_file

import trainer
from trainer import lora

pytestmark = pytest.mark.usefixtures("products_by")

RANK = 3
SCALE = 32 / RANK


def learn(policy):
    """Three optimizer steps on the samples; returns the optimizer."""
    optimizer = trainer.make_optimizer(policy, 1e-2, 0.0)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        trainer.backward(policy, pack(make_samples()), **OBJECTIVE)
        optimizer.step()
    return optimizer


def test_the_gradient_is_the_dense_one_projected():
    """y = (W + s B A) x, so dB = s dW Aᵀ and dA = s Bᵀ dW."""
    adapted, dense = model("qwen2"), model("qwen2")
    trainer.add_adapters(adapted, RANK, seed=0)
    layers = lora.lora_layers(adapted)
    with torch.no_grad():
        for name, layer in layers.items():
            layer.lora_B.normal_(std=0.02)
            dense.get_submodule(name).weight += SCALE * layer.lora_B @ layer.lora_A
    for plain in (adapted, dense):
        policy = trainer.Policy(plain, bf16=False)
        trainer.backward(policy, pack(make_samples()), **OBJECTIVE)
    assert len(layers) == 2 * 7
    for name, layer in layers.items():
        gradient = dense.get_submodule(name).weight.grad
        assert gradient.norm() > 1e-4
        expected = SCALE * gradient @ layer.lora_A.T
        torch.testing.assert_close(layer.lora_B.grad, expected, rtol=1e-3, atol=1e-6)
        expected = SCALE * layer.lora_B.T @ gradient
        torch.testing.assert_close(layer.lora_A.grad, expected, rtol=1e-3, atol=1e-6)


def test_training_begins_at_the_model_itself():
    """B is 0, and A is drawn from a seed alone, within the bounds of a linear layer's weight."""
    (batch,) = pack(make_samples())
    expected = trainer.logprob(trainer.Policy(model("qwen3"), bf16=False), batch, 1.0)
    drawn = []
    for seed in (5, 5, 6):
        adapted = model("qwen3")
        trainer.add_adapters(adapted, RANK, seed)
        found = trainer.logprob(trainer.Policy(adapted, bf16=False), batch, 1.0)
        assert torch.equal(found, expected)
        layers = lora.lora_layers(adapted).values()
        drawn.append(torch.cat([layer.lora_A.detach().flatten() for layer in layers]))
        for layer in layers:
            assert layer.lora_A.abs().max() <= layer.in_features**-0.5
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert 0.9 < drawn[0].std() / (32**-0.5 / 3**0.5) < 1.1


def test_a_state_brings_the_adapters_back_beside_the_merged_model(tmp_path):
    """With the adapters off the policy is, bit by bit, the model that it began with."""
    start = saved("qwen3", tmp_path / "start")
    policy = trainer.Policy(trainer.load_model(start, CPU), bf16=False)
    (batch,) = pack(make_samples())
    began = trainer.logprob(policy, batch, 1.0)
    trainer.add_adapters(policy.model, RANK, seed=0)
    optimizer = learn(policy)
    assert torch.equal(trainer.logprob(trainer.reference(policy), batch, 1.0), began)
    assert not torch.equal(trainer.logprob(policy, batch, 1.0), began)
    trainer.save(tmp_path, 1, policy, optimizer, Tokenizer())
    step, state = trainer.newest(tmp_path)
    again = trainer.Policy(trainer.load_model(start, CPU), bf16=False)
    trainer.add_adapters(again.model, RANK, seed=7)
    trainer.read_adapters(state / "model", again.model)
    other = trainer.make_optimizer(again, 1e-2, 0.0)
    trainer.load_optimizer(state, again, other)
    for one, taking in ((policy, optimizer), (again, other)):
        merged = trainer.Policy(trainer.load_model(state / "model", CPU), bf16=False)
        gap = trainer.logprob(one, batch, 1.0) - trainer.logprob(merged, batch, 1.0)
        assert gap.abs().max() < 1e-5
        one.zero_grad()
        trainer.backward(one, [batch], **OBJECTIVE)
        taking.step()
    assert all(map(torch.equal, policy.parameters(), again.parameters()))


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
