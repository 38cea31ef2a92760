"""Adapters beside the dense model: gradients, merging, the reference, states, ranks."""

import json

import pytest
import torch
from helpers import ranks
from helpers.launch import launch
from helpers.tiny import CPU, KINDS, OBJECTIVE, Tokenizer, make_samples, model, saved, weigh
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import trainer
from config import UserError
from sampler import Sampler
from trainer import lora

RANK = 3
SCALE = 32 / RANK


def with_adapters(plain, seed: int = 0):
    """The model with adapters of which neither half is 0, as after some steps."""
    trainer.add_adapters(plain, RANK, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in lora.adapted(plain).values():
            layer.lora_B.normal_(std=0.02, generator=generator)
    return plain


def merged_by_hand(plain, adapted):
    """`plain`, whose weights become those of the other model with its adapters: W + (α/R) B A."""
    with torch.no_grad():
        for name, layer in lora.adapted(adapted).items():
            plain.get_submodule(name).weight += SCALE * layer.lora_B @ layer.lora_A
    return plain


def pack(samples=None, capacity=10_000):
    samples = samples or make_samples()
    return trainer.micro_batches(samples, weigh(samples), capacity, CPU)


def learn(policy, steps: int = 3, lr: float = 1e-2):
    """Optimizer steps on the samples; returns the optimizer."""
    optimizer = trainer.make_optimizer(policy, lr, 0.0)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        batches = pack()
        trainer.backward(policy, batches, [None] * len(batches), **OBJECTIVE)
        optimizer.step()
    return optimizer


# ---------------------------------------------------------------- forward and gradient


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_the_dense_one_projected(kind):
    """y = (W + s B A) x, so dB = s dW Aᵀ and dA = s Bᵀ dW."""
    adapted = with_adapters(model(kind))
    dense = merged_by_hand(model(kind), adapted)
    for plain in (adapted, dense):
        policy = trainer.Policy(plain, bf16=False)
        trainer.backward(policy, pack(), [None], **OBJECTIVE)
    layers = lora.adapted(adapted)
    assert len(layers) == 2 * 7
    for name, layer in layers.items():
        gradient = dense.get_submodule(name).weight.grad
        assert gradient.norm() > 1e-4
        expected = SCALE * gradient @ layer.lora_A.T
        torch.testing.assert_close(layer.lora_B.grad, expected, rtol=1e-3, atol=1e-6)
        expected = SCALE * layer.lora_B.T @ gradient
        torch.testing.assert_close(layer.lora_A.grad, expected, rtol=1e-3, atol=1e-6)


def test_only_adapters_are_trained_and_the_head_has_none():
    adapted = model("qwen2")
    before = {name: p.clone() for name, p in adapted.named_parameters()}
    trainer.add_adapters(adapted, RANK, seed=0)
    policy = trainer.Policy(adapted, bf16=False)
    optimizer = learn(policy)
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == {"lora_A", "lora_B"}
    assert not any("head" in name or "embed" in name for name in trained)
    assert len(optimizer.param_groups[0]["params"]) == len(trained) == 2 * 2 * 7
    for name, parameter in adapted.named_parameters():
        if name in before:
            assert torch.equal(parameter, before[name])
            assert parameter.grad is None
        else:
            assert parameter.dtype == torch.float32
            assert parameter.any()


def test_training_begins_at_the_model_itself():
    """B is 0, and A is drawn from a seed alone, within the bounds of a linear layer's weight."""
    (batch,) = pack()
    expected = trainer.logprob(trainer.Policy(model("qwen3"), bf16=False), batch, 1.0)
    state = torch.get_rng_state()
    drawn = []
    for seed in (5, 5, 6):
        adapted = model("qwen3")
        state = torch.get_rng_state()
        trainer.add_adapters(adapted, RANK, seed)
        assert torch.equal(torch.get_rng_state(), state)
        found = trainer.logprob(trainer.Policy(adapted, bf16=False), batch, 1.0)
        assert torch.equal(found, expected)
        layers = lora.adapted(adapted).values()
        drawn.append(torch.cat([layer.lora_A.detach().flatten() for layer in layers]))
        for layer in layers:
            assert layer.lora_A.abs().max() <= layer.in_features**-0.5
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert 0.9 < drawn[0].std() / (32**-0.5 / 3**0.5) < 1.1


# ---------------------------------------------------------------- the reference


def test_with_the_adapters_off_the_policy_is_the_model_it_began_with():
    """Bit by bit, and they are on again afterwards, even after an error."""
    (batch,) = pack()
    start = trainer.logprob(trainer.Policy(model("llama"), bf16=False), batch, 1.0)
    policy = trainer.Policy(model("llama"), bf16=False)
    trainer.add_adapters(policy.model, RANK, seed=0)
    learn(policy)
    trained = trainer.logprob(policy, batch, 1.0)
    reference = trainer.reference(policy)
    assert torch.equal(trainer.logprob(reference, batch, 1.0), start)
    assert torch.equal(trainer.logprob(policy, batch, 1.0), trained)
    assert not torch.equal(trained, start)
    with pytest.raises(AttributeError):
        reference(None, temperature=1.0)
    assert torch.equal(trainer.logprob(policy, batch, 1.0), trained)


# ---------------------------------------------------------------- the sampler's copy


def test_the_sampler_takes_up_the_merged_weights():
    """Before and after steps, as a sampler that was built from weights merged by hand."""
    sampler = Sampler(model("qwen2"), max_tokens=2048)
    adapted = model("qwen2")
    trainer.add_adapters(adapted, RANK, seed=0)
    policy = trainer.Policy(adapted, bf16=False)
    prompts = [list(range(3, 20)), list(range(30, 41))]
    options = {"max_new_tokens": 30, "temperature": 1.0}
    start = sampler.generate(prompts, **options)
    sampler.load_weights(adapted)
    assert sampler.generate(prompts, **options) == start
    learn(policy)
    sampler.load_weights(adapted)
    fresh = Sampler(merged_by_hand(model("qwen2"), adapted), max_tokens=2048)
    taken = sampler.generate(prompts, **options)
    assert taken != start
    for one, other in zip(taken, fresh.generate(prompts, **options), strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    # And the trainer gives the same log-probs to what was sampled.
    samples = make_samples(2)
    for sample, prompt, completion in zip(samples, prompts, taken, strict=True):
        sample.tokens = prompt + completion.tokens
        sample.mask = [False] * len(prompt) + [True] * 30
        sample.logprobs = [0.0] * len(prompt) + completion.logprobs
    (batch,) = pack(samples)
    mismatch = trainer.logprob(policy, batch, 1.0) - batch.behaviour_logprob
    assert mismatch.abs().max() < 1e-5


def test_a_frozen_roles_sampler_shares_its_memory_with_the_frozen_weights(tmp_path):
    """All matrices lie there once, and nothing else changes, on either side."""
    plain = model("qwen2")
    frozen = Sampler(plain, max_tokens=2048)
    (batch,) = pack()
    expected = trainer.logprob(trainer.Policy(model("qwen2"), bf16=False), batch, 1.0)
    prompts = [list(range(3, 20))]
    written = frozen.generate(prompts, max_new_tokens=20)
    frozen.alias_weights(plain)
    trainer.add_adapters(plain, RANK, seed=0)
    policy = trainer.Policy(plain, bf16=False)
    tensors = frozen.model.weights.values()
    places = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}
    for name, parameter in plain.named_parameters():
        shared = parameter.untyped_storage().data_ptr() in places
        assert shared == (parameter.dim() == 2 and not parameter.requires_grad), name
    found = trainer.logprob(trainer.reference(policy), batch, 1.0)
    assert (found - expected).abs().max() < 1e-5
    optimizer = learn(policy)
    assert frozen.generate(prompts, max_new_tokens=20) == written
    trainer.save(tmp_path, 1, policy, optimizer, Tokenizer())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    found = trainer.logprob(trainer.Policy(loaded, bf16=False), batch, 1.0)
    assert (found - trainer.logprob(policy, batch, 1.0)).abs().max() < 1e-5


# ---------------------------------------------------------------- on disk


@pytest.fixture
def run(tmp_path):
    """(policy, optimizer, where the model came from) after some steps with adapters."""
    start = saved("qwen3", tmp_path / "start")
    policy = trainer.Policy(trainer.load_model(start, CPU), bf16=False)
    trainer.add_adapters(policy.model, RANK, seed=0)
    return policy, learn(policy), start


def test_a_state_is_the_adapters_and_brings_them_back(run, tmp_path):
    policy, optimizer, start = run
    trainer.save(tmp_path, 1, policy, optimizer, Tokenizer())
    step, state = trainer.newest(tmp_path)
    files = {str(p.relative_to(state)) for p in state.rglob("*") if p.is_file()}
    assert files == {
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "optimizer.pt",
        "state.json",
    }
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    held = sum((state / name).stat().st_size for name in files)
    assert held < 3 * 4 * trained + 28 * 2_000  # 28 tensors have names and headers
    again = trainer.Policy(trainer.load_model(start, CPU), bf16=False)
    trainer.add_adapters(again.model, RANK, seed=7)
    trainer.read_adapters(state / "adapter", again.model)
    other = trainer.make_optimizer(again, 1e-2, 0.0)
    trainer.load_optimizer(state, again, other)
    for one, taking in ((policy, optimizer), (again, other)):
        one.zero_grad()
        trainer.backward(one, pack(), [None], **OBJECTIVE)
        taking.step()
    assert all(map(torch.equal, policy.parameters(), again.parameters()))


def test_the_adapters_folder_is_laid_out_as_peft_lays_it_out(run, tmp_path):
    """Loaded by hand, by PEFT's names: base_model.model.LAYER.lora_A.weight [R, in]."""
    policy, _, start = run
    weights = lora.adapter_weights(policy.model)
    trainer.write_adapters(tmp_path / "adapter", policy.model, weights)
    told = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert (told["peft_type"], told["r"], told["lora_alpha"]) == ("LORA", RANK, 32)
    assert told["base_model_name_or_path"] == str(start)
    by_hand = AutoModelForCausalLM.from_pretrained(start)
    count = 0
    with torch.no_grad():
        for name, module in by_hand.named_modules():
            if name.rpartition(".")[2] not in told["target_modules"]:
                continue
            count += 1
            a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
            assert a.shape == (told["r"], module.in_features)
            assert b.shape == (module.out_features, told["r"])
            module.weight += told["lora_alpha"] / told["r"] * b @ a
    assert len(tensors) == 2 * count == 2 * 2 * 7
    (batch,) = pack()
    expected = trainer.logprob(policy, batch, 1.0)
    found = trainer.logprob(trainer.Policy(by_hand, bf16=False), batch, 1.0)
    assert (found - expected).abs().max() < 1e-5


def test_adapters_of_another_shape_are_one_sentence(run, tmp_path):
    policy, _, _ = run
    trainer.write_adapters(tmp_path, policy.model, lora.adapter_weights(policy.model))
    other = model("qwen3")
    trainer.add_adapters(other, RANK + 1, seed=0)
    with pytest.raises(UserError, match="does not fit the model") as refusal:
        trainer.read_adapters(tmp_path, other)
    assert "\n" not in str(refusal.value)


# ---------------------------------------------------------------- ranks and shards


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """The folders of one step with adapters: by one process, and by two in either mode."""
    out = tmp_path_factory.mktemp("steps")
    start = saved("qwen3", out / "start")
    (out / "single lora").mkdir()
    ranks.step(str(start), out / "single lora", "single lora")
    modes = ["ddp lora", "fsdp lora recomputing"]
    assert launch(ranks.__file__, start, out, *modes, log=out / "log") == 0
    return out


@pytest.mark.parametrize("mode", ["ddp lora", "fsdp lora recomputing"])
def test_two_ranks_are_one_process(steps, mode):
    """Loss, norm, gradients, the sampler's weights, the reference, and what lies on disk."""
    one, two = (torch.load(steps / name / "numbers.pt") for name in ("single lora", mode))
    for name in ("loss", "norm"):
        assert abs(one[name] - two[name]) < 1e-5
    assert one["norm"] > 0.01
    for kind, tolerance in (("gradients", 1e-7), ("sampler", 2e-5)):
        assert one[kind].keys() == two[kind].keys()
        for name, value in one[kind].items():
            assert (value - two[kind][name]).abs().max() < tolerance, name
    assert all("lora" in name for name in one["gradients"])
    state = "state/step_000001/adapter/adapter_model.safetensors"
    for path in (state, "checkpoint/model.safetensors"):
        first, second = (load_file(steps / name / path) for name in ("single lora", mode))
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert (value - second[name]).abs().max() < 2e-5, name
