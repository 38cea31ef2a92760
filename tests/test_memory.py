"""The memory plan: its formulas beside the tensors of a real step, and 8B on cards of two sizes."""

import json
import os
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny import CPU, OBJECTIVE, make_samples, saved, weigh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import mars
import trainer
from config import UserError, parse, parser, resolve
from rollout import Sample
from sampler import Sampler
from trainer import memory

GIB = 2**30
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
P = 8_190_735_360  # its parameters
HEAD = 151936 * 4096
LAYER = (P - 2 * HEAD) / 36
TOKEN = 2 * 36 * 8 * 128 * 2  # bytes of a token's keys and values
SHAPE = {
    "vocab_size": 600,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
}


def settings(**given):
    """What the plan reads of a Config."""
    plain = {
        "fsdp": False,
        "kv_tokens": 4096,
        "frozen": set,
        "kl_beta": 0.0,
        "bf16": "auto",
        "lora_rank": 0,
        "server": "",
        "micro_tokens": 2000,
        "recompute_activations": False,
        "share_prefixes": False,
    }
    return SimpleNamespace(**plain | given)


# ---------------------------------------------------------------- beside a real step


def size(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def tensors_held(policy, optimizer, sampler) -> dict[str, int]:
    """Bytes of the tensors of a trainer and a sampler, by the plan's names."""
    states = optimizer.state.values()
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    return {
        "weights": size(policy.parameters()),
        "gradients": size(parameter.grad for parameter in policy.parameters()),
        "optimizer": size(moments),
        "sampler": size(sampler.model.weights.values()),
        "KV pool": size([sampler.pool]),
    }


def test_memory_parts_are_what_a_step_holds():
    """One process on a CPU, all tensors counted."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    config = settings(kl_beta=0.1)
    parameters = model.num_parameters()
    parts = memory.memory_parts(model.config, parameters, config=config, world=1, cuda=False)
    policy = trainer.Policy(model, bf16=False)
    optimizer = trainer.make_optimizer(policy, 1e-3, 0.0)
    samples = make_samples()
    batches = trainer.micro_batches(samples, weigh(samples), 90, CPU)
    trainer.backward(policy, batches, [None] * len(batches), **OBJECTIVE)
    optimizer.step()
    sampler = Sampler(model, max_tokens=4096)
    held = tensors_held(policy, optimizer, sampler)
    for name, expected in held.items():
        assert abs(parts[name] - expected) < 0.001 * expected, name
    assert parts["reference"] == parts["weights"]
    assert set(parts) == {*held, "reference"}


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that are made under it; `peak` is their largest sum."""

    def __init__(self):
        super().__init__()
        self.sizes = {}
        self.now = 0
        self.peak = 0

    def note(self, storage):
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, key)

    def forget(self, key):
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor.untyped_storage())
        return out


def full_batch():
    """2,000 tokens in four samples; half of them carry loss."""
    samples = []
    for k in range(4):
        sample = Sample("sys2", question_index=0, attempt=k, advantage=1.0)
        sample.append_given([1] * 250)
        sample.tokens += [2] * 251
        sample.mask += [True] * 251
        sample.logprobs += [-6.0] * 251
        samples.append(sample)
    (batch,) = trainer.micro_batches(samples, weigh(samples, {"sys2": 4}), 2000, CPU)
    return batch


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_micro_batchs_peak_is_at_most_the_plans_and_not_far_below(kind, recompute):
    """Every tensor of forward and backward counted while it lives, gradients already there."""
    model = MODELS[kind]()
    policy = trainer.Policy(model, bf16=False, recompute_activations=recompute)
    batch = full_batch()
    trainer.backward(policy, [batch], [None], **OBJECTIVE)
    with Live() as live:
        trainer.backward(policy, [batch], [None], **OBJECTIVE)
    config = settings(recompute_activations=recompute)
    planned = memory.micro_batch_bytes(
        model.config, model.num_parameters(), config=config, longest=0, cuda=False
    )
    assert 0.75 * planned < live.peak < planned
    longer = memory.micro_batch_bytes(
        model.config, model.num_parameters(), config=config, longest=4000, cuda=False
    )
    assert longer > 1.9 * planned, "the longest sample counts, not only the packed ones"


@pytest.mark.parametrize("kind", MODELS)
def test_shared_prefixes_keep_no_more_than_the_plan_says(kind):
    """Seven samples of which 900 tokens are the same: 7,259 keys to 1,859 tokens."""
    samples = []
    for k in range(7):
        sample = Sample("sys2", question_index=0, attempt=k, advantage=1.0)
        sample.append_given([1] * 900)
        sample.tokens += [k + 2] * 138
        sample.mask += [True] * 138
        sample.logprobs += [-6.0] * 138
        samples.append(sample)
    weights = weigh(samples, {"sys2": 7})
    (batch,) = trainer.micro_batches(samples, weights, 1860, CPU, share_prefixes=True)
    assert (batch.tokens.numel(), len(batch.keys.indices)) == (1859, 7259)
    model = MODELS[kind]()
    policy = trainer.Policy(model, bf16=False)
    trainer.backward(policy, [batch], [None], **OBJECTIVE)
    with Live() as live:
        trainer.backward(policy, [batch], [None], **OBJECTIVE)
    planned = [
        memory.micro_batch_bytes(
            model.config,
            model.num_parameters(),
            config=settings(micro_tokens=1860, share_prefixes=share),
            longest=1038,
            cuda=False,
        )
        for share in (False, True)
    ]
    assert 0.75 * planned[1] < live.peak < planned[1]


@pytest.mark.parametrize("fsdp", [False, True])
def test_what_a_bf16_layer_keeps_is_the_formulas(fsdp):
    """By the hooks on saved tensors; FSDP computes with bf16 weights, autocast with fp32 ones."""
    model = MODELS["qwen3"]()
    if fsdp:
        model.bfloat16()
    policy = trainer.Policy(model, bf16=True)
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    shapes = {p.shape for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        cast_weight = tensor.dim() == 2 and {tensor.shape, tensor.T.shape} & shapes
        if storage._cdata not in weights and not cast_weight:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.hidden(full_batch())
    found = sum(kept.values()) / 2000
    layer = memory.layer_bytes(model.config, 2, 2 if fsdp else 4)
    assert 0.85 < found / (4 * layer) < 1.1


# ---------------------------------------------------------------- 8B on GPUs


@pytest.fixture
def qwen3_8b(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return tmp_path


def test_memory_parts_of_8b_are_the_arithmetic(qwen3_8b):
    shape = AutoConfig.from_pretrained(qwen3_8b)

    def parts(world, training=True, **options):
        config = settings(kv_tokens=400_000, **options)
        found = memory.memory_parts(
            shape, P, world=world, cuda=True, training=training, config=config
        )
        return [round(part) for part in found.values()]

    pool = 400_000 * TOKEN
    alone = round(1.6 * GIB)
    several = round(2.6 * GIB)
    assert parts(1) == [4 * P, 4 * P, 8 * P, 2 * P, 2 * P, pool, alone]
    assert parts(8) == [4 * P, 8 * P, 8 * P, 2 * P, 2 * P, pool, several]
    gathered = round(2 * (2 * HEAD + 2 * LAYER))  # embedding, head, two of 36 layers
    shared = [P // 2, P // 2, P, gathered]
    assert parts(8, fsdp=True, kl_beta=0.1) == [*shared, 2 * P, pool, 2 * P, several]
    assert parts(8, frozen=lambda: {"sys1"})[-3:] == [4 * P, 2 * pool, several]
    assert parts(1, training=False) == [2 * P, pool, alone]


def test_a_micro_batch_of_8b_is_the_arithmetic(qwen3_8b):
    """A sample of 31,744 tokens: 9.4 GB of layer inputs and 7.1 GB for one layer's recomputation.

    So also by hooks on fake tensors.
    """
    shape = AutoConfig.from_pretrained(qwen3_8b)

    def added(longest=31_744, **options):
        config = settings(fsdp=True, recompute_activations=True, micro_tokens=16_384, **options)
        return memory.micro_batch_bytes(shape, P, config=config, longest=longest, cuda=True)

    T = 31_744
    inputs = T * 36 * 2 * 4096
    layer = T * memory.layer_bytes(shape, 2, 2)
    assert inputs == pytest.approx(9.36e9, rel=0.01)
    assert layer == pytest.approx(7.1e9, rel=0.02)
    rest = T * (2 * 2 * 12288 + 3 * 2 * 4096 + (8 + 8) * 4096) + 2 * HEAD + 2 * 6 * LAYER
    assert added() == pytest.approx(inputs + layer + rest)
    assert added(longest=0) < 0.6 * added()
    config = settings(fsdp=True, recompute_activations=True, micro_tokens=1)
    least = memory.micro_batch_bytes(shape, P, config=config, longest=1, cuda=True)
    assert least >= 6 * 2 * HEAD, "the embedding's and the head's gradients, in bf16 and fp32"


def plan(monkeypatch, model, gib, world, *, longest=31_744, training=True, **options):
    properties = SimpleNamespace(total_memory=gib * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    paper = {
        "fsdp": True,
        "recompute_activations": True,
        "micro_tokens": 16_384,
        "kv_tokens": 120_000,
    }
    return trainer.memory_plan(
        str(model),
        config=settings(**paper | options),
        longest=longest,
        world=world,
        device=SimpleNamespace(type="cuda"),
        training=training,
    )


def test_the_papers_setting_fits_eight_cards_of_80_gb(qwen3_8b, monkeypatch):
    """An 80 GB card shows 79 GiB. The pool of 180,000 tokens that the preset had does not fit."""
    line = plan(monkeypatch, qwen3_8b, 78, 8)
    assert " before activations, 75." in line
    for name in ("weights", "optimizer", "copies", "sampler", "KV pool", "CUDA", "micro-batch"):
        assert f"{name} " in line
    with pytest.raises(UserError, match=r"--kv_tokens \d+ would fit") as refusal:
        plan(monkeypatch, qwen3_8b, 78, 8, kv_tokens=180_000)
    tokens = int(re.search(r"--kv_tokens (\d+)", str(refusal.value))[1])
    assert 120_000 < tokens < 180_000
    assert plan(monkeypatch, qwen3_8b, 78, 8, kv_tokens=tokens)
    assert plan(monkeypatch, qwen3_8b, 139, 8, kv_tokens=400_000)


def test_what_does_not_fit_is_refused_with_an_alternative(qwen3_8b, monkeypatch):
    def refused(match, gib, world, **options):
        with pytest.raises(UserError, match=match):
            plan(monkeypatch, qwen3_8b, gib, world, **options)

    refused("use --lora_rank 16, or --fsdp over more", 139, 8, fsdp=False)
    refused("use --fsdp over more", 20, 8, fsdp=False, lora_rank=16)
    refused("use --recompute_activations", 78, 8, recompute_activations=False)
    refused("smaller model or more processes", 20, 8)
    refused("smaller model$", 14, 1, training=False)
    assert "micro-batch" not in plan(monkeypatch, qwen3_8b, 78, 1, training=False)


QWEN3 = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
    "8B": {},
}
DOCS = (Path(__file__).parent.parent / "docs" / "real_models.md").read_text()
LINES_24_GB = re.findall(r"\| `(--model Qwen/Qwen3-.*)` \|", DOCS)


def plan_of_a_command(options: str, monkeypatch, folder) -> str:
    """The plan of the documented limits with `options`, on a card that shows 22 GiB."""
    (limits,) = re.findall(r"--sys2_context 8192 .*", DOCS)
    given = parse(parser(mars.MarsConfig, ""), (limits + " " + options).split())
    return plan_on_22_gib(resolve(mars.MarsConfig, given, presets={}), monkeypatch, folder)


def plan_on_22_gib(config, monkeypatch, folder) -> str:
    """The plan of a run of a Qwen3 on a card that shows 22 GiB, as one of 24 GB may."""
    name = config.model.removeprefix("Qwen/Qwen3-")
    heads = {} if name in ("4B", "8B") else {"num_attention_heads": 16}
    shape = QWEN3_8B | QWEN3[name] | heads | {"tie_word_embeddings": name != "8B"}
    (folder / "config.json").write_text(json.dumps(shape))
    properties = SimpleNamespace(total_memory=22 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = SimpleNamespace(type="cuda")
    return trainer.memory_plan(
        str(folder), config=config, longest=config.longest(), world=1, device=device
    )


def test_there_are_lines_for_24_gb():
    assert {line.split()[1].removeprefix("Qwen/Qwen3-") for line in LINES_24_GB} == set(QWEN3)


@pytest.mark.parametrize("options", LINES_24_GB)
def test_what_the_docs_offer_for_24_gb_fits(options, tmp_path, monkeypatch):
    assert "of 22.0" in plan_of_a_command(options, monkeypatch, tmp_path)


@pytest.mark.parametrize("name, gib", [("1.7B", 42), ("4B", 88)])
def test_what_the_docs_call_too_large_for_24_gb_is_refused(name, gib, tmp_path, monkeypatch):
    options = f"--model Qwen/Qwen3-{name} --recompute_activations --kv_tokens 32768"
    with pytest.raises(UserError, match="use --lora_rank 16, or --fsdp") as refusal:
        plan_of_a_command(options, monkeypatch, tmp_path)
    assert round(float(str(refusal.value).split(" GiB")[0])) == gib
    assert f"training {name} in full needs {gib} GiB" in " ".join(DOCS.split())


def test_8b_with_adapters_needs_a_server_on_24_gb(tmp_path, monkeypatch):
    options = "--model Qwen/Qwen3-8B --lora_rank 16 --recompute_activations --kv_tokens 16384"
    with pytest.raises(UserError, match="^40.1 GiB"):
        plan_of_a_command(options, monkeypatch, tmp_path)
    assert "8B with adapters and its own sampler needs 40 GiB" in DOCS


def test_the_plan_of_a_cpu(tmp_path, monkeypatch):
    folder = saved("qwen3", tmp_path)
    options = {"config": settings(), "longest": 160, "world": 1, "device": CPU}
    line = trainer.memory_plan(str(folder), **options)
    assert line.startswith("memory per process, GiB: ")
    assert "0.00" not in line.split(";")[0]
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PAGE_SIZE" else 1000)
    with pytest.raises(UserError, match="--fsdp"):
        trainer.memory_plan(str(folder), **options)


def test_models_that_name_their_sizes_otherwise_have_a_plan(tmp_path):
    """GPT-2 has no num_key_value_heads, head_dim or intermediate_size."""
    shape = GPT2Config(n_embd=64, n_head=4, n_layer=3)
    assert memory.kv_bytes(shape, 2) == 2 * 3 * 64 * 2
    assert memory.feed_forward(shape) == 256
    shape.save_pretrained(tmp_path)
    options = {"config": settings(), "longest": 160, "world": 1, "device": CPU}
    assert trainer.memory_plan(str(tmp_path), **options)


def test_a_folder_without_a_model_is_one_sentence(tmp_path):
    options = {"config": settings(), "longest": 160, "world": 1, "device": CPU}
    for content in (None, "", "{", "[]", '{"model_type": "unheard-of"}', '{"model_type": "qwen3"'):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(UserError, match="cannot read a model at") as refusal:
            trainer.memory_plan(str(tmp_path), **options)
        assert "\n" not in str(refusal.value)
