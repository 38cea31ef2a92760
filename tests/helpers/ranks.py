"""What each rank does in tests/test_policy.py: one step on its share of given samples.

Rank 0 saves what came of it.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.tiny import CPU, OBJECTIVE, Tokenizer, counts, make_samples, weigh

import trainer
from processes import leave
from sampler import Sampler

# Where each of four ranks' share of 13 samples begins: uneven, and the last one has none.
SHARES = [0, 7, 8, 13, 13]


def step(model: str, out: Path, mode: str) -> None:
    """One optimizer step of this rank.

    `mode` is "single", "ddp" or "fsdp", perhaps with " lora", " recomputing" or " even" behind.
    """
    fsdp = mode.startswith("fsdp")
    single = mode.startswith("single")
    rank = 0 if single else dist.get_rank()
    world = 1 if single else dist.get_world_size()
    samples = make_samples()
    mine = samples if single else samples[SHARES[rank] : SHARES[rank + 1]]
    loaded = trainer.load_model(model, CPU)
    if "lora" in mode:
        trainer.add_adapters(loaded, 3, seed=0)
        with torch.no_grad():
            for name, parameter in loaded.named_parameters():
                if "lora" in name:
                    parameter += 0.02
    recompute = mode.endswith("recomputing")
    policy = trainer.Policy(loaded, bf16=False, recompute_activations=recompute)
    policy = trainer.parallel(policy, fsdp=fsdp, device=CPU)
    sampler = Sampler(trainer.load_model(model, CPU), max_tokens=64)
    optimizer = trainer.make_optimizer(policy, 1e-3, 0.0)
    weights = weigh(mine, counts(samples))
    if "even" in mode:
        mine, weights = trainer.even_out(mine, weights, pack=True)
        assert mine, "the last rank had no sample"
    batches = trainer.micro_batches(mine, weights, 60, CPU)
    count = torch.tensor(len(batches))
    if world > 1:
        dist.all_reduce(count, dist.ReduceOp.MAX)
    if world > 1 and "even" not in mode:
        assert len(batches) < int(count) or rank < world - 1, "the last rank adds empty ones"
    empty = range(int(count) - len(batches))
    batches += [trainer.make_micro_batch([], [], [], CPU) for _ in empty]
    if fsdp:
        policy.register_forward_pre_hook(unsharded_gradients_are_gone(policy), prepend=True)
    stats = trainer.backward(policy, batches, **OBJECTIVE)
    loss = torch.tensor(sum(float(s["loss"]) for s in stats))
    norm = trainer.gradient_norm(policy, 0.01)  # low enough to clip
    gradients = {
        name: whole(parameter.grad)
        for name, parameter in trainer.unwrap(policy).named_parameters()
        if parameter.requires_grad
    }
    optimizer.step()
    sampler.load_weights(trainer.unwrap(policy).model)
    if world > 1:
        dist.all_reduce(loss)
    trainer.save(out, 1, policy, optimizer, Tokenizer())
    first = next(iter(optimizer.state))
    before = [state["exp_avg"].clone() for state in optimizer.state.values()]
    optimizer.state[first]["exp_avg"].zero_()
    trainer.load_optimizer(out / "state" / "step_000001", policy, optimizer)
    after = [state["exp_avg"] for state in optimizer.state.values()]
    for one, other in zip(before, after, strict=True):
        assert torch.equal(part(one), part(other))
    assert part(before[0]).any() or not part(before[0]).numel(), "some ranks hold nothing of it"
    numbers = {"loss": loss, "norm": norm, "gradients": gradients}
    weights = sampler.model.weights.items()
    numbers["sampler"] = {name: weight for name, weight in weights if weight is not None}
    if rank == 0:
        torch.save(numbers, out / "numbers.pt")


def part(tensor):
    """This rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor):
    """All ranks' parts of a tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


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


def main(model: str, out: str, *modes: str) -> None:
    """All the modes one after the other: most of a test's time goes into starting processes."""
    dist.init_process_group("gloo")
    for mode in modes:
        if dist.get_rank() == 0:
            (Path(out) / mode).mkdir()
        dist.barrier()
        step(model, Path(out) / mode, mode)
    leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
