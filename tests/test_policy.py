"""The policy in training, and that ranks and shards are one process.

That packing changes nothing is tested in tests/test_prefixes.py and tests/test_loading.py.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import ranks
from helpers.launch import launch
from helpers.tiny import CPU, KINDS, OBJECTIVE, make_samples, model, pack, saved
from transformers import AutoModelForCausalLM

import trainer
from family import gather_full
from trainer import policy as policy_module

MODES = ("ddp", "fsdp recomputing", "ddp lora even", "fsdp lora recomputing")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return saved("qwen3", tmp_path_factory.mktemp("qwen3"))


def gradients(plain, samples, capacity):
    """(loss, gradients by name, micro-batches) of one process."""
    policy = trainer.Policy(plain, bf16=False)
    batches = pack(samples, capacity)
    stats = trainer.backward(policy, batches, **OBJECTIVE)
    loss = sum(float(s["loss"]) for s in stats)
    return loss, {name: p.grad for name, p in policy.named_parameters()}, batches


def close(a, b, tolerance=1e-5):
    return max((a[name] - b[name]).abs().max().item() for name in a) < tolerance


def similarity(a, b):
    return torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("compiler", [None, "inductor"])
def test_a_step_on_a_gpu_is_that_of_the_cpu(kind, recompute, compiler):
    """With a shared prefix too: the first sample comes twice, with another end."""
    device = torch.device("cuda")
    kin = make_samples()[0]
    kin.tokens[-2] ^= 1
    for samples in (make_samples(), [kin, *make_samples()]):
        loss, expected, _ = gradients(model(kind), samples, 90)
        plain = model(kind).to(device)
        options = {"recompute_activations": recompute, "compiler": compiler}
        policy = trainer.Policy(plain, bf16=True, **options)
        batches = pack(samples, 90, device)
        stats = trainer.backward(policy, batches, **OBJECTIVE)
        assert abs(sum(float(s["loss"]) for s in stats) - loss) < 0.02
        for name, parameter in policy.named_parameters():
            assert similarity(parameter.grad.cpu(), expected[name]) > 0.98, name
        optimizer = trainer.make_optimizer(policy, 1e-3, 0.0)
        assert optimizer.defaults["fused"]
        optimizer.step()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fsdp", [False, True])
def test_ddp_and_fsdp_over_nccl_are_a_plain_step(fsdp, tmp_path):
    """One GPU is a group of one: all of the wrappers' code, and no second GPU."""
    device = torch.device("cuda", 0)
    meet = f"file://{tmp_path}/meet"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=meet, rank=0, world_size=1)
    try:
        loss, expected, _ = gradients(model("qwen3"), make_samples(), 90)
        policy = trainer.Policy(model("qwen3").to(device), bf16=True, compiler="inductor")
        policy = trainer.parallel(policy, fsdp=fsdp, device=device)
        stats = trainer.backward(policy, pack(make_samples(), 90, device), **OBJECTIVE)
        assert abs(sum(float(s["loss"]) for s in stats) - loss) < 0.02
        for name, parameter in trainer.unwrap(policy).named_parameters():
            assert similarity(gather_full(parameter.grad).cpu(), expected[name]) > 0.98, name
        norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
        assert trainer.gradient_norm(policy, 1.0) == pytest.approx(norm.item(), rel=0.01)
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("products_by")
def test_the_heads_gradient_is_not_rounded_to_bf16():
    policy = trainer.Policy(model("qwen2"), bf16=True)
    loss, _ = policy(pack(make_samples())[0], **OBJECTIVE)
    loss.backward()
    gradient = policy.model.lm_head.weight.grad
    assert gradient.dtype == torch.float32
    assert (gradient != gradient.bfloat16()).float().mean() > 0.9


def test_the_optimizer_is_adamw_with_the_methods_betas():
    optimizer = trainer.make_optimizer(model("qwen3"), 1e-3, 0.1)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-3, (0.9, 0.95), 0.1)
    assert not group["fused"]  # a CPU keeps the bits that it had


def test_the_rate_rises_stays_or_falls_and_never_is_nothing():
    assert [trainer.schedule(step, warmup=4) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert trainer.schedule(0, warmup=0) == trainer.schedule(0, warmup=0, steps=1) == 1
    factors = [trainer.schedule(step, warmup=5, steps=20) for step in range(20)]
    assert factors[0] == pytest.approx(1 / 5) and max(factors) == factors[4] == 16 / 20
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[-1] == pytest.approx(1 / 20)


@pytest.fixture(scope="module")
def steps(qwen3, products_by, tmp_path_factory):
    """The folders of one optimizer step: by one process, and by three in every mode."""
    out = tmp_path_factory.mktemp("steps")
    ranks.steps(qwen3, out, ["alone", "alone lora"])
    assert launch(ranks.steps, qwen3, out, MODES, log=out / "log", world=3) == 0
    return out


@pytest.mark.parametrize("mode", MODES)
def test_ranks_are_one_process(steps, mode):
    """Loss, norm, clipped gradients, weights on disk and in the sampler, optimizer state.

    The ranks' shares are uneven, and one has no sample at all, unless they are evened out.
    """
    modes = "alone lora" if "lora" in mode else "alone", mode
    one, two = (torch.load(steps / name / "numbers.pt") for name in modes)
    assert abs(one["loss"] - two["loss"]) < 1e-5
    assert abs(one["norm"] - two["norm"]) < 1e-5
    clipped = torch.stack([gradient.norm() for gradient in one["gradients"].values()]).norm()
    assert one["norm"] > 0.01 and clipped == pytest.approx(0.01, rel=1e-3)
    assert close(one["gradients"], two["gradients"], 1e-7)
    assert close(one["sampler"], two["sampler"], 2e-5)
    states = [Path("state/step_000001") / name for name in ("model", "optimizer.pt")]
    first, second = (
        AutoModelForCausalLM.from_pretrained(steps / name / states[0]).state_dict()
        for name in modes
    )
    assert close(first, second, 2e-5)
    assert torch.equal(two["sampler"]["embed"], second["model.embed_tokens.weight"])
    first, second = (torch.load(steps / name / states[1])["state"] for name in modes)
    assert first.keys() == second.keys()
    assert all(
        (first[name]["exp_avg"] - second[name]["exp_avg"]).abs().max() < 1e-5 for name in first
    )


@pytest.fixture
def alone():
    """A process group of this process, for what differs only in the wrapping."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("products_by")
def test_scored_shards_are_shards_again(alone):
    """FSDP2's root gathers embedding, norm and head, and only a backward pass shards them again."""
    policy = trainer.Policy(model("qwen2"), bf16=False)
    expected = trainer.score(policy, [5, 6, 7, 8])
    policy = trainer.parallel(policy, fsdp=True, device=CPU)
    assert trainer.score(policy, [5, 6, 7, 8]) == pytest.approx(expected)
    assert all(hasattr(parameter, "full_tensor") for parameter in policy.parameters())


@pytest.mark.usefixtures("products_by")
def test_sharded_bf16_gives_the_loss_its_numbers_in_fp32(alone, monkeypatch):
    """FSDP2 would cast what a module is called with: old log-probs and weights as well."""
    _, expected, batches = gradients(model("qwen3"), make_samples(), 90)
    policy = trainer.Policy(model("qwen3"), bf16=True)
    policy = trainer.parallel(policy, fsdp=True, device=CPU)
    plain = policy_module.kernels.linear_grpo_loss
    seen = []

    def watched(hidden, head, target, *numbers, ref_logprob, **options):
        seen.append((hidden.dtype, *[x.dtype for x in numbers], ref_logprob.dtype))
        return plain(hidden, head, target, *numbers, ref_logprob=ref_logprob, **options)

    monkeypatch.setattr(policy_module.kernels, "linear_grpo_loss", watched)
    for batch in batches:
        batch.ref_logprob = trainer.logprob(policy, batch, 1.0)
    trainer.backward(policy, batches, **OBJECTIVE)
    assert set(seen) == {(torch.bfloat16, *[torch.float32] * 4)}
    assert len(seen) == len(batches)
    for name, parameter in policy.named_parameters():
        got = parameter.grad.full_tensor()
        assert got.dtype == torch.float32
        assert similarity(got, expected[name]) > 0.99, name
