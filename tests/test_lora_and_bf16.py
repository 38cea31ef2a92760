"""Whole runs of a briefly trained base model with adapters, and in bf16."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from test_mars import SMALL, half, metrics, run, weights

import mars
import train
import trainer
from config import UserError, uses_bf16
from plumbing.outside import Machine, check_machine
from sampler import Sampler

ADAPTERS = ["--lora_rank", "4", "--kl_beta", "0.05", "--system1", "frozen", "--eval_every", "1"]
STEP = train.train_step


def start(base, folder, name, steps, *arguments, one_step=STEP):
    """A run in `folder`; its lines of metrics."""
    line = ["--model", base, "--runs", folder, "--name", name, "--steps", steps, *SMALL]
    line += ["--inner_steps", 1, "--eval_questions", 2, *arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", one_step)
        assert run(*line, grade=half) == 0
    return metrics(folder / name)


def sampler_weights(run, role):
    """A copy of what plays a role."""
    weights = run.samplers[role].model.weights
    return {name: value.clone() for name, value in weights.items() if value is not None}


@pytest.fixture(scope="module")
def adapted(base, products_by, tmp_path_factory):
    """Two steps with adapters, a KL term and a frozen System 1: (folder, metrics, weights)."""
    folder = tmp_path_factory.mktemp("adapted")
    held = []

    def watched(run, step):
        if not step:
            held.append({role: sampler_weights(run, role) for role in run.samplers})
        done = STEP(run, step)
        held.append({role: sampler_weights(run, role) for role in run.samplers})
        return done

    lines = start(base, folder, "whole", 2, *ADAPTERS, one_step=watched)
    return folder, lines, held


def test_with_adapters_the_sampler_follows_the_trainer_and_the_frozen_role_stays(adapted):
    """And the checkpoint is what the sampler had."""
    folder, lines, held = adapted
    for line in lines:
        assert line["grad_norm"] > 0
        assert line["mismatch_kl"] < 1e-8
    assert lines[0]["kl"] == 0
    assert lines[1]["kl"] > 0, "the reference is the base, not the policy"
    for before, after in zip(held, held[1:]):
        assert all(map(torch.equal, before["sys1"].values(), after["sys1"].values()))
        for name, value in before["sys2"].items():
            product = name.endswith((".qkv", ".o", ".gate_up", ".down"))
            assert torch.equal(value, after["sys2"][name]) != product, name
    sampler = Sampler(trainer.load_model(folder / "whole/checkpoint", "cpu"), max_tokens=64)
    for name, value in held[-1]["sys2"].items():
        assert torch.equal(sampler.model.weights[name], value)


def test_a_run_with_adapters_resumes_bit_by_bit(base, adapted, tmp_path):
    folder, lines, _ = adapted
    cut = shutil.copytree(folder / "whole", tmp_path / "whole", symlinks=True)
    shutil.rmtree(cut / "state/step_000002")
    assert start(base, tmp_path, "whole", 2, "--resume", *ADAPTERS) == lines
    for path in ("checkpoint/adapter/adapter_model.safetensors", "checkpoint/model.safetensors"):
        first, second = (load_file(run / path) for run in (folder / "whole", cut))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("adapters", [[], ADAPTERS], ids=["in full", "adapters"])
def test_a_run_in_bf16_on_a_cpu_keeps_its_masters_in_fp32(base, tmp_path, adapters):
    """What is frozen, and every role's sampler, is in bf16; its evaluation is as well."""
    found = []

    def watched(run, step):
        policy = trainer.unwrap(run.policy)
        for p in policy.parameters():
            assert p.dtype == (torch.float32 if p.requires_grad else torch.bfloat16)
        for sampler in run.samplers.values():
            assert sampler.model.weights["0.qkv"].dtype == torch.bfloat16
        assert policy.bf16
        found.append(run)
        return STEP(run, step)

    for line in start(base, tmp_path, "bf16", 2, "--bf16", "on", *adapters, one_step=watched):
        assert line["grad_norm"] > 0
        assert 0 < line["mismatch_kl"] < 1e-3
    assert len(found) == 2
    saved = weights(tmp_path / "bf16/checkpoint").values()
    assert any(not torch.equal(w, w.bfloat16().float()) for w in saved) == (not adapters)
    assert run("eval", tmp_path / "bf16", "--runs", tmp_path, grade=half) == 0
    assert json.loads((tmp_path / "eval-bf16/config.json").read_text())["bf16"] == "on"


def test_who_computes_in_bf16():
    for bf16, used in {"auto": (False, True), "on": (True, True), "off": (False, False)}.items():
        config = mars.MarsConfig(bf16=bf16)
        assert tuple(uses_bf16(config, cuda) for cuda in (False, True)) == used
    machine = Machine(torch.device("cuda"), rank=0, ranks=1, bf16=False)
    with pytest.raises(UserError, match="--bf16 off: attention on CUDA takes bf16 only"):
        check_machine(mars.MarsConfig(bf16="off"), machine)
