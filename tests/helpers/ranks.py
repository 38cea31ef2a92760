"""What each rank does in tests/test_policy.py: one step on its share of given samples."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.tiny import CPU, OBJECTIVE, Tokenizer, counts, make_samples, weigh

import trainer
from family import gather_full
from processes import is_first
from sampler import Sampler

# Where each of three ranks' share of 13 samples begins: uneven, and the last one has none.
SHARES = [0, 1, 13, 13]


def steps(model: Path, out: Path, modes: Sequence[str]) -> None:
    """All the modes one after the other: most of a test's time goes into starting processes."""
    for mode in modes:
        step(model, out / mode, mode)


def step(model: Path, out: Path, mode: str) -> None:
    """One optimizer step; the first rank saves what came of it.

    `mode` names what is on: "fsdp" (else DDP), "lora", "recomputing", "even".
    """
    policy = make_policy(model, mode)
    optimizer = trainer.make_optimizer(policy, 1e-3)
    stats = trainer.backward(policy, share("even" in mode), **OBJECTIVE)
    loss = torch.tensor(sum(float(numbers["loss"]) for numbers in stats))
    if dist.is_initialized():
        dist.all_reduce(loss)
    norm = trainer.clip_gradient(policy, 0.01)  # low enough to clip
    gradients = {
        name: gather_full(parameter.grad)
        for name, parameter in trainer.unwrap(policy).named_parameters()
        if parameter.requires_grad
    }
    optimizer.step()
    sampler = Sampler(trainer.load_model(model, CPU), max_tokens=64)
    sampler.load_weights(trainer.unwrap(policy).model)
    weights = {name: w for name, w in sampler.model.weights.items() if w is not None}
    trainer.save(out, 1, policy, optimizer, Tokenizer())
    moments_come_back(out / "state" / "step_000001", policy, optimizer)
    if is_first():
        made = {"loss": loss, "norm": norm, "gradients": gradients, "sampler": weights}
        torch.save(made, out / "numbers.pt")


def make_policy(folder: Path, mode: str):
    """The policy as the ranks wrap it, with adapters that are not 0."""
    model = trainer.load_model(folder, CPU)
    if "lora" in mode:
        trainer.add_adapters(model, 3, seed=0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter += 0.02
    policy = trainer.Policy(model, bf16=False, recompute_activations="recomputing" in mode)
    policy = trainer.parallel(policy, fsdp="fsdp" in mode, device=CPU)
    if "fsdp" in mode:
        policy.register_forward_pre_hook(unsharded_gradients_are_gone(policy), prepend=True)
    return policy


def share(even: bool) -> list[trainer.MicroBatch]:
    """This rank's micro-batches, with as many empty ones as other ranks have more."""
    samples = mine = make_samples()
    if dist.is_initialized():
        rank = dist.get_rank()
        mine = samples[SHARES[rank] : SHARES[rank + 1]]
    weights = weigh(mine, counts(samples))
    if even:
        mine, weights = trainer.even_out(mine, weights, pack=True)
        assert mine, "the last rank had no sample"
    batches = trainer.micro_batches(mine, weights, 60, CPU)
    most = torch.tensor(len(batches))
    if dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    missing = int(most) - len(batches)
    return batches + [trainer.make_micro_batch([], [], [], CPU)] * missing


def moments_come_back(state: Path, policy, optimizer) -> None:
    """Each rank's part of the saved moments is what it had."""
    before = [moments["exp_avg"].clone() for moments in optimizer.state.values()]
    next(iter(optimizer.state.values()))["exp_avg"].zero_()
    trainer.load_optimizer(state, policy, optimizer)
    after = [moments["exp_avg"] for moments in optimizer.state.values()]
    for one, other in zip(before, after, strict=True):
        assert torch.equal(part(one), part(other))
    assert part(before[0]).any() or not part(before[0]).numel(), "some ranks hold nothing of it"


def part(tensor):
    """This rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def unsharded_gradients_are_gone(policy):
    """A hook before every micro-batch: the one before left its gradients in shards.

    So no whole copy of them piles up.
    """
    calls = []

    def check(*_):
        up = policy.model.base_model.layers[0].mlp.up_proj
        weight = getattr(up, "lora_B", up.weight)
        assert (weight.grad is not None) == bool(calls)
        assert hasattr(weight, "full_tensor")
        calls.append(1)

    return check
