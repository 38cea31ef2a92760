"""The trainer's side: packing leaks and changes nothing; ranks and shards are one process; states on disk are whole."""
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config,
                          Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

from trainer import policy as trainer
import ranks
from ranks import OBJECTIVE, make_samples, weigh
from sampler import Sampler
from config import UserError

CPU = torch.device("cpu")
SHAPE = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256)
KINDS = {"qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=16, tie_word_embeddings=True, **SHAPE)),
         "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=False, **SHAPE)),
         "llama": lambda: LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **SHAPE))}

MODES = ("ddp", "fsdp", "ddp checkpointing", "fsdp checkpointing")


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp(request.param)
    KINDS[request.param]().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("qwen3-alone")
    KINDS["qwen3"]().save_pretrained(path)
    return path


def gradients(folder, samples, capacity, **options):
    """(loss, gradients by name, log-prob of every loss token by sample) of one process."""
    policy = trainer.Policy(trainer.load_model(folder, CPU), bf16=False, **options)
    total = {role: sum(s.role == role for s in samples) for role in ("sys1", "sys2")}
    batches = trainer.micro_batches(samples, weigh(samples, total), capacity, CPU)
    policy.train()
    stats = trainer.backward(policy, batches, [None] * len(batches), **OBJECTIVE)
    return sum(float(s["loss"]) for s in stats), {n: p.grad for n, p in policy.named_parameters()}, batches, stats


def close(a, b, tolerance=1e-5):
    return max((a[name] - b[name]).abs().max().item() for name in a) < tolerance


def test_packed_log_probs_are_those_of_each_sample_alone(folder):
    """Against the stock model on one sample at a time: no padding, no packing, its own attention."""
    samples = make_samples()
    policy = trainer.Policy(trainer.load_model(folder, CPU), bf16=False)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    batches = trainer.micro_batches(samples, weigh(samples, {"sys1": 9, "sys2": 5}), 10_000, CPU)
    assert len(batches) == 1 and len(batches[0].lengths) == len(samples)
    got = iter(trainer.logprob(policy, batches[0], 0.7).tolist())
    by_length = sorted(samples, key=lambda s: -max(i for i, m in enumerate(s.mask) if m))      # FFD's order
    for sample in by_length:
        with torch.no_grad():
            expected = (oracle(torch.tensor([sample.tokens])).logits[0].float() / 0.7).log_softmax(-1)
        for i, (token, trained) in enumerate(zip(sample.tokens, sample.mask)):
            if trained:
                assert abs(next(got) - expected[i - 1, token].item()) < 1e-4
    assert next(got, None) is None


def test_packing_order_and_micro_batch_size_change_nothing(folder):
    samples = make_samples()
    loss, expected, batches, _ = gradients(folder, samples, 10_000)
    assert len(batches) == 1
    for capacity, order in ((1, samples), (40, samples), (90, samples[::-1]), (200, samples[5:] + samples[:5])):
        other, got, cut, _ = gradients(folder, order, capacity)
        assert len(cut) > 1 and abs(other - loss) < 1e-5 and close(got, expected)


def test_a_change_in_one_sample_moves_no_other_samples_log_probs(folder):
    samples = make_samples()
    policy = trainer.Policy(trainer.load_model(folder, CPU), bf16=False)

    def logprobs():
        (batch,) = trainer.micro_batches(samples, weigh(samples, {"sys1": 9, "sys2": 5}), 10_000, CPU)
        owner = torch.bucketize(batch.at, batch.cu[1:].long(), right=True)
        return trainer.logprob(policy, batch, 1.0), owner
    before, owner = logprobs()
    longest = max(samples, key=lambda s: max(i for i, m in enumerate(s.mask) if m))     # FFD puts it first
    longest.tokens[0] = (longest.tokens[0] + 1) % 61
    after, _ = logprobs()
    assert torch.equal(before[owner != 0], after[owner != 0]) and not torch.equal(before[owner == 0], after[owner == 0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_packed_attention_on_a_gpu_is_that_of_the_cpu(kv_heads):
    """Output and gradients in bf16, of fp32 queries and keys as autocast leaves them, beside the CPU's form in fp32."""
    lengths, shapes = [37, 1, 200, 64], [(1, heads, 302, 64) for heads in (4, kv_heads, kv_heads)]
    torch.manual_seed(0)
    inputs, above = [torch.randn(shape).bfloat16().float() for shape in shapes], torch.randn(1, 302, 4, 64)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()

    def run(device):
        q, k, v = (x.to(device).requires_grad_() for x in inputs)
        value = v.bfloat16() if device == "cuda" else v
        out, _ = trainer.packed_attention(None, q, k, value, None, 0.125, lengths=lengths, cu=cu.to(device))
        return [x.float().cpu() for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), above.to(out)))]
    for name, here, there in zip("o q k v".split(), run("cpu"), run("cuda")):
        assert (here - there).norm() < 0.01 * here.norm(), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_on_a_gpu_is_that_of_the_cpu(folder, checkpointing):
    loss, expected, *_ = gradients(folder, make_samples(), 90)
    samples, device = make_samples(), torch.device("cuda")
    policy = trainer.Policy(trainer.load_model(folder, device), bf16=True, checkpointing=checkpointing)
    batches = trainer.micro_batches(samples, weigh(samples, {"sys1": 8, "sys2": 5}), 90, device)
    stats = trainer.backward(policy, batches, [None] * len(batches), **OBJECTIVE)
    assert abs(sum(float(s["loss"]) for s in stats) - loss) < 0.02
    for name, parameter in policy.named_parameters():
        got = parameter.grad.cpu()
        assert torch.nn.functional.cosine_similarity(got.flatten(), expected[name].flatten(), 0) > 0.98, name


def test_gradient_checkpointing_changes_nothing(qwen3):
    loss, expected, *_ = gradients(qwen3, make_samples(), 90)
    again, got, *_ = gradients(qwen3, make_samples(), 90, checkpointing=True)
    assert abs(loss - again) < 1e-6 and close(got, expected, 1e-6)


def test_an_empty_micro_batch_touches_every_parameter_with_nothing(folder):
    policy = trainer.Policy(trainer.load_model(folder, CPU), bf16=False)
    loss, _ = policy(trainer.make_micro_batch([], [], [], CPU), **OBJECTIVE)
    loss.backward()
    assert loss.item() == 0 and all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_the_heads_gradient_is_not_rounded_to_bf16(tmp_path):
    torch.manual_seed(0)
    KINDS["qwen2"]().save_pretrained(tmp_path)
    policy = trainer.Policy(trainer.load_model(tmp_path, CPU), bf16=True)
    samples = make_samples()
    loss, _ = policy(trainer.micro_batches(samples, weigh(samples, {"sys1": 8, "sys2": 5}), 10_000, CPU)[0], **OBJECTIVE)
    loss.backward()
    gradient = policy.model.lm_head.weight.grad
    assert gradient.dtype == torch.float32 and (gradient != gradient.bfloat16()).float().mean() > 0.9


def test_only_loss_tokens_enter_the_head_and_what_nobody_predicts_is_dropped():
    samples = make_samples()
    batches = trainer.micro_batches(samples, weigh(samples, {"sys1": 9, "sys2": 5}), 10_000, CPU)
    assert sum(len(b.target) for b in batches) == sum(sum(s.mask) for s in samples)
    assert sum(b.tokens.numel() for b in batches) == sum(max(i for i, m in enumerate(s.mask) if m) for s in samples)


def test_lists_of_unequal_length_are_refused():
    samples = make_samples()
    weights = weigh(samples, {"sys1": 9, "sys2": 5})
    samples[0].logprobs.pop()
    with pytest.raises(ValueError, match="differ in length"):
        trainer.micro_batches(samples, weights, 100, CPU)


@pytest.fixture(scope="module")
def steps(qwen3, tmp_path_factory):
    """The folders of one optimiser step: by one process, and by two in every mode."""
    out = tmp_path_factory.mktemp("steps")
    (out / "single").mkdir()
    ranks.step(str(qwen3), out / "single", "single")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    here = Path(__file__).parent
    command = [sys.executable, str(here / "ranks.py"), str(qwen3), str(out), *MODES]
    environment = {**os.environ, "PYTHONPATH": f"{here.parent}{os.pathsep}{here}", "OMP_NUM_THREADS": "1",
                   "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = [subprocess.Popen(command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    assert [child.wait(timeout=120) for child in children] == [0, 0]
    return out


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_are_one_process(steps, mode):
    """Loss, norm, clipped gradients, weights on disk and in the sampler, optimiser state; the shares are uneven."""
    one, two = (torch.load(steps / name / "numbers.pt") for name in ("single", mode))
    assert abs(one["loss"] - two["loss"]) < 1e-5 and abs(one["norm"] - two["norm"]) < 1e-5 and one["norm"] > 0.01
    assert close(one["gradients"], two["gradients"], 1e-7) and close(one["sampler"], two["sampler"], 2e-5)
    states = [steps / name / "state" / "step_000001" for name in ("single", mode)]
    first, second = (AutoModelForCausalLM.from_pretrained(state / "model").state_dict() for state in states)
    assert close(first, second, 2e-5) and torch.equal(two["sampler"]["embed"], second["model.embed_tokens.weight"])
    first, second = (torch.load(state / "optimiser.pt")["state"] for state in states)
    assert first.keys() == second.keys()
    assert close(*({name: values["exp_avg"] for name, values in state.items()} for state in (first, second)))


@pytest.fixture
def alone():
    """A process group of this process, for what differs only in the wrapping."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_sharded_bf16_gives_the_loss_its_numbers_in_fp32_and_nearly_the_gradients(qwen3, alone, monkeypatch):
    """FSDP2 would cast what a module is called with, a micro-batch's old log-probs and weights as well."""
    loss, expected, batches, _ = gradients(qwen3, make_samples(), 90)
    policy = trainer.parallel(trainer.Policy(trainer.load_model(qwen3, CPU), bf16=True), fsdp=True, device=CPU)
    seen, plain = [], trainer.kernels.linear_grpo_loss

    def watched(hidden, head, target, old, advantage, weight, *, ref_logprob, **options):
        seen.append((hidden.dtype, old.dtype, advantage.dtype, weight.dtype, ref_logprob.dtype))
        return plain(hidden, head, target, old, advantage, weight, ref_logprob=ref_logprob, **options)
    monkeypatch.setattr(trainer.kernels, "linear_grpo_loss", watched)
    references = [trainer.logprob(policy, batch, 1.0) for batch in batches]
    trainer.backward(policy, batches, references, **OBJECTIVE)
    assert set(seen) == {(torch.bfloat16, *[torch.float32] * 4)} and len(seen) == len(batches)
    for name, parameter in policy.named_parameters():
        got = parameter.grad.full_tensor()
        assert got.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(got.flatten(), expected[name].flatten(), 0) > 0.99, name


def test_states_are_whole_or_absent(qwen3, tmp_path, monkeypatch):
    policy = trainer.Policy(trainer.load_model(qwen3, CPU), bf16=False)
    optimiser = torch.optim.AdamW(policy.parameters())
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    for step in (1, 2, 3):
        trainer.save(tmp_path, step, policy, optimiser, tokenizer)
    assert trainer.newest(tmp_path)[0] == 3 and len(list((tmp_path / "state").iterdir())) == 2
    assert (tmp_path / "checkpoint").resolve() == (tmp_path / "state" / "step_000003" / "model").resolve()
    monkeypatch.setattr(torch, "save", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        trainer.save(tmp_path, 4, policy, optimiser, tokenizer)
    assert trainer.newest(tmp_path)[0] == 3 and AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")


PLAN = dict(fsdp=False, kv_tokens=4096, system1="train", kl_beta=0.1)
QWEN3_8B = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
            "intermediate_size": 12288, "head_dim": 128, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 151936, "tie_word_embeddings": False}


def test_memory_parts_are_what_a_step_holds():
    """One process on a CPU, all tensors counted; copies and loss come and go."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=False, **SHAPE | {"hidden_size": 128}))
    model.set_attn_implementation("mars_packed")
    config = SimpleNamespace(**PLAN)
    parts = trainer.memory_parts(model.config, model.num_parameters(), config=config, world=1, cuda=False)
    policy = trainer.Policy(model, bf16=False)
    optimiser = torch.optim.AdamW(policy.parameters())
    batches = trainer.micro_batches(make_samples(), weigh(make_samples(), {"sys1": 8, "sys2": 5}), 90, CPU)
    trainer.backward(policy, batches, [None] * len(batches), **OBJECTIVE)
    optimiser.step()
    sampler = Sampler(model, max_tokens=4096)

    def size(tensors):
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)
    held = {"weights": size(policy.parameters()), "gradients": size(p.grad for p in policy.parameters()),
            "optimiser": size(x for state in optimiser.state.values() for name, x in state.items() if name != "step"),
            "sampler": size(sampler.forward.weights.values()), "KV pool": size([sampler.pool])}
    for name, expected in held.items():
        assert abs(parts[name] - expected) < 0.001 * expected, name
    assert parts["copies"] == 0 and parts["reference"] == parts["weights"]


def test_memory_plan_refuses_with_an_alternative(qwen3, monkeypatch):
    line = trainer.memory_plan(str(qwen3), config=SimpleNamespace(**PLAN), world=1, device=CPU)
    assert line.startswith("memory per process, GiB: ") and " before activations, of " in line and "0.00" not in line.split(";")[0]
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PAGE_SIZE" else 1000)
    with pytest.raises(UserError, match="--fsdp"):
        trainer.memory_plan(str(qwen3), config=SimpleNamespace(**PLAN), world=1, device=CPU)


def test_memory_plan_of_8b_is_the_arithmetic(tmp_path, monkeypatch):
    """Qwen3-8B does not fit an H200 under DDP; sharded over 8 it does, with half of the pool even 80 GB."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    P, head, pool = 8_190_735_360, 151936 * 4096, 2 * 36 * 8 * 128 * 2
    loss = 4 * head + 4 * 151936 * 3584
    config = SimpleNamespace(**PLAN | {"kv_tokens": 400_000, "kl_beta": 0.0})

    def parts(world, **options):
        training, shape = options.pop("training", True), AutoConfig.from_pretrained(tmp_path)
        found = trainer.memory_parts(shape, P, world=world, cuda=True, training=training,
                                     config=SimpleNamespace(**vars(config) | options))
        return [round(size) for size in found.values() if size]
    assert parts(1) == [4 * P, 4 * P, 8 * P, 2 * P, loss, 2 * P, 400_000 * pool]
    assert parts(8) == [4 * P, 8 * P, 8 * P, 2 * P, loss, 2 * P, 400_000 * pool]
    gathered = round(2 * (2 * head + (P - 2 * head) / 18))              # embedding, head, two of 36 layers
    assert parts(8, fsdp=True, kl_beta=0.1) == [P // 2, P // 2, P, gathered, loss, 2 * P, 400_000 * pool, 2 * P]
    assert parts(8, system1="frozen")[-2:] == [4 * P, 800_000 * pool]
    assert parts(1, training=False) == [2 * P, 400_000 * pool]

    def plan(gib, world, training=True, **options):
        properties = SimpleNamespace(total_memory=gib * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return trainer.memory_plan(str(tmp_path), config=SimpleNamespace(**vars(config) | options), world=world,
                                   device=SimpleNamespace(type="cuda"), training=training)
    with pytest.raises(UserError, match="--fsdp over more"):
        plan(141, 8)
    assert "reference" not in plan(141, 8, fsdp=True)
    whole = plan(200, 8, fsdp=True, kl_beta=0.1)
    assert all(f"{name} " in whole for name in ("weights", "gradients", "optimiser", "sampler", "KV pool", "reference"))
    with pytest.raises(UserError, match=r"--kv_tokens \d+ would fit") as refusal:
        plan(80, 8, fsdp=True)
    tokens = int(re.search(r"--kv_tokens (\d+)", str(refusal.value))[1])
    assert 200_000 < tokens < 400_000 and plan(80, 8, fsdp=True, kv_tokens=tokens)
    with pytest.raises(UserError, match="smaller model or more processes"):
        plan(20, 8, fsdp=True)
    with pytest.raises(UserError, match="smaller model$"):
        plan(14, 1, training=False)


def test_models_with_bent_logits_are_refused(qwen3, tmp_path):
    with pytest.raises(UserError, match="cannot load"):
        trainer.load_model(tmp_path / "nothing", CPU)
    model = AutoModelForCausalLM.from_pretrained(qwen3)
    model.config.final_logit_softcapping = 30.0
    model.save_pretrained(tmp_path / "bent")
    with pytest.raises(UserError, match="plain logits"):
        trainer.load_model(tmp_path / "bent", CPU)


def test_attention_of_another_kind_is_refused():
    config = Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    policy = trainer.Policy(AutoModelForCausalLM.from_config(config, attn_implementation="mars_packed"), bf16=False)
    with pytest.raises(UserError, match="sliding_window"):
        policy(trainer.make_micro_batch([], [], [], CPU), **OBJECTIVE)
