"""The policy in training, and that ranks and shards are one process.

That packing changes nothing is tested in tests/test_prefixes.py and tests/test_loading.py.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import ranks
from helpers.launch import launch
from helpers.tiny import CPU, KINDS, OBJECTIVE, make_samples, model, pack, saved, step
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import trainer
from kernels import products
from trainer import policy as policy_module

MODES = ("ddp", "ddp even", "fsdp recomputing", "ddp lora", "fsdp lora recomputing")
# Of kernels/products.py, whatever processor this is.
ROUTES = ["PyTorch", "oneDNN"] if hasattr(torch.ops.mkldnn, "_linear_pointwise") else ["PyTorch"]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return saved("qwen3", tmp_path_factory.mktemp("qwen3"))


def gradients(plain, samples, capacity):
    """(loss, gradients by name) of one process."""
    return step(trainer.Policy(plain, bf16=False), pack(samples, capacity))[:2]


def close(a, b, tolerance=1e-5):
    return max((a[name] - b[name]).abs().max().item() for name in a) < tolerance


def similarity(a, b):
    return torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0)


def assert_a_step_is_that_of_the_cpu(policy, kind, samples):
    """In bf16 on a GPU. Returns the gradients that a CPU has."""
    loss, expected = gradients(model(kind), samples, 90)
    found, got, _ = step(policy, pack(samples, 90, torch.device("cuda")))
    assert abs(found - loss) < 0.02
    for name, gradient in got.items():
        assert similarity(gradient.cpu(), expected[name.removeprefix("module.")]) > 0.98, name
    return expected


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("compiler", [None, "inductor"])
def test_a_step_on_a_gpu_is_that_of_the_cpu(kind, recompute, compiler):
    """With a shared prefix too: the first sample comes twice, with another end."""
    kin = make_samples()[0]
    kin.tokens[-2] ^= 1
    options = {"bf16": True, "recompute_activations": recompute, "compiler": compiler}
    for samples in (make_samples(), [kin, *make_samples()]):
        policy = trainer.Policy(model(kind).cuda(), **options)
        assert_a_step_is_that_of_the_cpu(policy, kind, samples)
        optimizer = trainer.make_optimizer(policy, 1e-3)
        assert optimizer.defaults["fused"]
        optimizer.step()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fsdp", [False, True])
def test_ddp_and_fsdp_over_nccl_are_a_plain_step(fsdp, tmp_path):
    """One GPU is a group of one: all of the wrappers' code, and no second GPU."""
    meet = f"file://{tmp_path}/meet"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=meet, rank=0, world_size=1)
    try:
        policy = trainer.Policy(model("qwen3").cuda(), bf16=True, compiler="inductor")
        policy = trainer.parallel(policy, fsdp=fsdp, device=torch.device("cuda", 0))
        expected = assert_a_step_is_that_of_the_cpu(policy, "qwen3", make_samples())
        norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
        assert trainer.clip_gradient(policy, 1.0) == pytest.approx(norm.item(), rel=0.01)
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("products_by")
@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_of_a_models_config_is_off(recompute):
    """With dropout the loss would be of another distribution than the one that was sampled."""
    torch.manual_seed(0)
    shape = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=256)
    plain = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    torch.manual_seed(0)
    dropping = GPT2LMHeadModel(GPT2Config(**shape))  # 0.1 of everything
    found = []
    for kind in (plain, dropping):
        policy = trainer.Policy(kind, bf16=False, recompute_activations=recompute)
        policy.train()  # as somebody may call it
        found.append(step(policy, pack(make_samples(3), pack=False))[1])
    assert close(*found, 1e-9)


@pytest.mark.usefixtures("products_by")
def test_the_heads_gradient_is_not_rounded_to_bf16():
    policy = trainer.Policy(model("qwen2"), bf16=True)
    loss, _ = policy(pack(make_samples())[0], **OBJECTIVE)
    loss.backward()
    gradient = policy.model.lm_head.weight.grad
    assert gradient.dtype == torch.float32
    assert (gradient != gradient.bfloat16()).float().mean() > 0.9


def test_the_optimizer_is_adamw_with_the_methods_betas():
    optimizer = trainer.make_optimizer(model("qwen3"), 1e-3)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-3, (0.9, 0.95), 0.0)
    assert not group["fused"]  # a CPU keeps the bits that it had


def test_the_rate_rises_stays_or_falls_and_never_is_nothing():
    assert [trainer.schedule(step, warmup=4) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert trainer.schedule(0, warmup=0) == trainer.schedule(0, warmup=0, steps=1) == 1
    factors = [trainer.schedule(step, warmup=5, steps=20) for step in range(20)]
    assert factors[0] == pytest.approx(1 / 5) and max(factors) == factors[4] == 16 / 20
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[-1] == pytest.approx(1 / 20)


def steps_by_both_routes(model, out, modes):
    """By PyTorch's products and by oneDNN's, in one start: PyTorch keeps what it plans."""
    with pytest.MonkeyPatch.context() as patch:
        for route in ROUTES:
            patch.setattr(
                products, "onednn_is_faster", lambda by_onednn=route == "oneDNN": by_onednn
            )
            ranks.steps(model, out / route, modes)


@pytest.fixture(scope="module")
def both_routes(qwen3, tmp_path_factory):
    """The folders of one optimizer step: by one process, and by three in every mode."""
    out = tmp_path_factory.mktemp("steps")
    steps_by_both_routes(qwen3, out, ["alone", "alone lora"])
    assert launch(steps_by_both_routes, qwen3, out, MODES, log=out / "log", world=3) == 0
    return out


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("mode", MODES)
def test_ranks_are_one_process(both_routes, route, mode):
    """Loss, norm, clipped gradients, weights on disk and in the sampler, optimizer state.

    The ranks' shares are uneven, and one has no sample at all, unless they are evened out.
    """
    steps = both_routes / route
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
    _, expected = gradients(model("qwen3"), make_samples(), 90)
    batches = pack(make_samples(), 90)
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
    _, got, _ = step(policy, batches)
    assert set(seen) == {(torch.bfloat16, *[torch.float32] * 4)}
    assert len(seen) == len(batches)
    for name, gradient in got.items():
        assert gradient.dtype == torch.float32
        assert similarity(gradient, expected[name]) > 0.99, name
