"""The memory plan beside the tensors of a real step, and what it lets through."""

import os
import re
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny import CPU, OBJECTIVE, make_samples, saved, weigh
from helpers.tiny import SHAPE as TINY
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen3Config

import mars
import trainer
from config import UserError, parse, parser, resolve
from rollout import Sample
from sampler import Completion, Sampler
from trainer import memory

GIB = 2**30
SHAPE = TINY | {
    "vocab_size": 600,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
}
MODELS = {"qwen3": Qwen3Config(**SHAPE, head_dim=32), "qwen2": Qwen2Config(**SHAPE)}


def new(kind: str):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MODELS[kind], dtype=torch.float32)


def parts_of(model, longest=0, kind="cpu", **options) -> dict[str, float]:
    """The plan of one process."""
    config = mars.MarsConfig(**{"kv_tokens": 4096, "micro_tokens": 2000, **options})
    return memory.memory_parts(model.config, config, longest, 1, kind, True)


def size(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def test_a_model_that_has_no_plan_is_named(tmp_path):
    """An encoder with a decoder is refused; a state-space model has neither heads nor a pool."""
    config = mars.MarsConfig(server="http://localhost:1")
    plan = partial(memory.memory_plan, config=config, longest=100, world=1, device=CPU)
    AutoConfig.for_model("t5").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="t5 is no causal language model"):
        plan(tmp_path)
    shape = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
    AutoConfig.for_model("mamba", **shape).save_pretrained(tmp_path)
    assert "KV pool" not in plan(tmp_path)[1].partition("at once")[0]


@pytest.mark.parametrize("rank", [0, 8])
def test_the_plan_counts_what_a_step_holds(rank):
    """One process on a CPU, all lasting tensors counted, with adapters or without."""
    model = new("qwen2")
    parts = parts_of(model, kl_beta=0.1, lora_rank=rank)
    sampler = Sampler(model, max_tokens=4096)
    sampler.generate([[1]], max_new_tokens=1)  # makes the pool
    if rank:
        trainer.add_adapters(model, rank, seed=0)
    policy = trainer.Policy(model, bf16=False)
    optimizer = trainer.make_optimizer(policy, 1e-3)
    samples = make_samples()
    batches = trainer.micro_batches(samples, weigh(samples), 90, CPU)
    trainer.backward(policy, batches, **OBJECTIVE)
    optimizer.step()
    states = optimizer.state.values()
    held = {
        "weights": size(policy.parameters()),
        "gradients": size(parameter.grad for parameter in policy.parameters()),
        "optimizer": size(state[k] for state in states for k in ("exp_avg", "exp_avg_sq")),
        "KV pool": size([sampler.pool]) / 4096,  # the plan has the bytes of a token
    }
    for name, expected in held.items():
        assert parts[name] == pytest.approx(expected, rel=1e-3), name
    sampling = [*sampler.model.weights.values(), *sampler.model.packed.values()]
    assert 0.8 * parts["sampler"] < size(sampling) <= parts["sampler"]
    assert parts["reference"] == (0 if rank else parts["weights"])
    two = parts_of(model, lora_rank=rank, system1="frozen")
    assert two["sampler"] == 2 * parts["sampler"] and two["KV pool"] == 2 * parts["KV pool"]
    assert parts_of(model, server="http://a")["sampler"] == 0
    graphs = parts_of(model, kind="cuda", system1="frozen")["graphs"]
    assert graphs == 2 * memory.GRAPHS["cuda"], "each sampler has graphs of its own"


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that are made under it; `peak` is their largest sum."""

    def __init__(self):
        super().__init__()
        self.sizes = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage and storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.peak = max(self.peak, sum(self.sizes.values()))
                weakref.finalize(storage, self.sizes.pop, storage._cdata)
        return out


@pytest.mark.parametrize("bf16", ["off", "on"])
@pytest.mark.parametrize("kind, recompute", [("qwen3", False), ("qwen2", True)])
def test_a_micro_batchs_peak_is_at_most_the_plans_and_not_far_below(kind, recompute, bf16):
    """2,000 tokens in samples of 100, of which all but the first carry loss."""
    model = new(kind)
    samples = []
    for k in range(20):
        sample = Sample("sys2", question_index=0, attempt=k, advantage=1.0)
        sample.append_given([1])
        sample.append_sampled(Completion([k + 2] * 100, [-6.0] * 100, "stop"))
        samples.append(sample)
    (batch,) = trainer.micro_batches(samples, weigh(samples, {"sys2": 20}), 2000, CPU)
    options = {"recompute_activations": recompute}
    policy = trainer.Policy(model, bf16=bf16 == "on", **options)
    options["bf16"] = bf16
    trainer.backward(policy, [batch], **OBJECTIVE)  # the gradients are there from now on
    with Live() as live:
        trainer.backward(policy, [batch], **OBJECTIVE)
    planned = parts_of(model, **options)["micro-batch"]
    assert 0.6 * planned < live.peak < planned
    longer = parts_of(model, 4000, **options)["micro-batch"]
    assert longer > 1.8 * planned, "the longest sample counts, not only the packed ones"


def test_a_cpu_is_told_to_lower_the_larger_part(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "999999")  # No plan fits a millionth of the memory.
    new("qwen3").save_pretrained(tmp_path)
    how = {"longest": 64, "world": 1, "device": CPU}
    for tokens, advice in ((1 << 24, "lower --kv_tokens"), (64, "lower --micro_tokens")):
        config = mars.MarsConfig(kv_tokens=tokens)
        with pytest.raises(UserError, match=advice):
            trainer.memory_plan(str(tmp_path), config=config, **how)


QWEN3 = {  # hidden size, intermediate size, layers, heads
    "0.6B": (1024, 3072, 28, 16),
    "1.7B": (2048, 6144, 28, 16),
    "4B": (2560, 9728, 36, 32),
    "8B": (4096, 12288, 36, 32),
}
DOCS = (Path(__file__).parent.parent / "docs" / "real_models.md").read_text()
OFFERED = re.findall(r"^\| (Qwen3.*?) \|.*`(--model Qwen/Qwen3-.*)` \|", DOCS, re.MULTILINE)
assert {options.split()[1].removeprefix("Qwen/Qwen3-") for _, options in OFFERED} == set(QWEN3)


def plan_of(options: str, *where) -> tuple[int, str]:
    """As `plan_with`, for a command's options."""
    given = parse(parser(mars.MarsConfig, ""), options.split())
    return plan_with(resolve(mars.MarsConfig, given, presets=mars.METHOD.presets), *where)


def plan_with(config, gib: int, world: int, monkeypatch, folder) -> tuple[int, str]:
    """The plan of a run of a Qwen3 on cards that show `gib` GiB."""
    name = config.model.removeprefix("Qwen/Qwen3-")
    sizes = "hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
    shape = dict(zip(sizes, QWEN3[name], strict=True)) | {"tie_word_embeddings": name != "8B"}
    Qwen3Config(num_key_value_heads=8, **shape).save_pretrained(folder)
    properties = SimpleNamespace(total_memory=gib * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    how = {"longest": config.longest(), "world": world, "device": SimpleNamespace(type="cuda")}
    return trainer.memory_plan(str(folder), config=config, **how)


def test_the_papers_setting_fits_eight_cards_of_80_gb(tmp_path, monkeypatch):
    """An 80 GB card shows 79 GiB; a twentieth is left to what the plan does not count."""
    paper = "--preset paper --model Qwen/Qwen3-8B"
    tokens, line = plan_of(paper, 79, 8, monkeypatch, tmp_path)
    assert 300_000 < tokens < 350_000 and f"{tokens} tokens" in line
    assert "at once 75.05 of 79.0" in line, "the larger of two phases"
    with pytest.raises(UserError, match="lower --kv_tokens"):
        plan_of(f"{paper} --kv_tokens {tokens + 30_000}", 79, 8, monkeypatch, tmp_path)
    # A pool that is lent does not help an update that is too large.
    with pytest.raises(UserError, match="lower --micro_tokens"):
        plan_of(f"{paper} --kv_tokens 40000", 60, 8, monkeypatch, tmp_path)
    for less in ("--no-fsdp", "--no-recompute_activations"):
        with pytest.raises(UserError, match="--recompute_activations, --lora_rank 16, or --fsdp"):
            plan_of(f"{paper} {less}", 139, 8, monkeypatch, tmp_path)


@pytest.mark.parametrize("row, options", OFFERED)
def test_what_the_docs_offer_for_one_gpu_fits(row, options, tmp_path, monkeypatch):
    """A card of 24 GB may show 22 GiB; one of 80 GB shows 79, of which some are left."""
    (limits,) = re.findall(r"--sys2_context 8192 .*", DOCS)
    gib = 75 if "80 GB" in row else 22
    assert f"of {gib}.0" in plan_of(f"{limits} {options}", gib, 1, monkeypatch, tmp_path)[1]


def test_the_plan_of_a_cpu(tmp_path, monkeypatch):
    config = mars.MarsConfig(kv_tokens=4096, micro_tokens=2000)
    how = {"config": config, "longest": 160, "world": 1, "device": CPU}
    plan = partial(trainer.memory_plan, str(saved("qwen3", tmp_path)), **how)
    tokens, line = plan()
    assert tokens == 4096 and "micro-batch" in line
    assert "micro-batch" not in plan(training=False)[1]
    assert plan(config=mars.MarsConfig())[0] == 65536
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PAGE_SIZE" else GIB)
    assert "of 1.0" in plan()[1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="--fsdp"):
        plan()
