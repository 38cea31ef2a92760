"""What each rank does in tests/test_policy.py: one step on its share of given samples; rank 0 saves what came of it."""
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import grpo
from trainer import policy as trainer
from rollout import Sample
from sampler import Sampler

OBJECTIVE = {"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0, "temperature": 1.0}


def make_samples(count: int = 13, vocabulary: int = 61, seed: int = 0) -> list[Sample]:
    """Samples of both roles as rollouts would leave them: given and sampled stretches of random length."""
    g, samples = torch.Generator().manual_seed(seed), []

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=g))
    for i in range(count):
        sample = Sample("sys2" if i % 3 == 0 else "sys1", group=i % 4, trajectory=i)
        for _ in range(1 + 2 * (i % 3 == 0)):
            given, sampled = draw(2, 20), draw(1, 9)
            sample.give(torch.randint(0, vocabulary, (given,), generator=g).tolist())
            sample.tokens += torch.randint(0, vocabulary, (sampled,), generator=g).tolist()
            sample.mask += [True] * sampled
            sample.logprobs += (-4 + 0.2 * torch.randn(sampled, generator=g)).tolist()
        sample.give([3, 4] * (i % 2))                       # an observation that no step follows
        sample.advantage, sample.drawn = float(torch.randn((), generator=g)), 1
        samples.append(sample)
    return samples


def weigh(samples: list[Sample], total: dict[str, int]) -> list[torch.Tensor]:
    return [grpo.token_weights([torch.tensor(s.mask)], total[s.role])[0] for s in samples]


def step(model: str, out: Path, mode: str) -> None:
    """One optimiser step of this rank; mode is "single", or "ddp" or "fsdp", perhaps with " checkpointing" behind."""
    device, fsdp = torch.device("cpu"), mode.startswith("fsdp")
    rank, world = (dist.get_rank(), dist.get_world_size()) if mode != "single" else (0, 1)
    samples = make_samples()
    total = {role: sum(s.role == role for s in samples) for role in ("sys1", "sys2")}
    mine = samples[:9] if rank == 0 else samples[9:]        # an uneven share
    mine = samples if world == 1 else mine
    policy = trainer.Policy(trainer.load_model(model, device), bf16=False, checkpointing=mode.endswith("checkpointing"))
    policy = trainer.parallel(policy, fsdp=fsdp, device=device)
    sampler = Sampler(trainer.load_model(model, device), max_tokens=64)
    optimiser = torch.optim.AdamW(policy.parameters(), 1e-3, weight_decay=0.0)
    batches = trainer.micro_batches(mine, weigh(mine, total), 60, device)
    count = torch.tensor(len(batches))
    if world > 1:
        dist.all_reduce(count, dist.ReduceOp.MAX)
        assert len(batches) != int(count) or rank == 0, "the test wants a rank that must add empty micro-batches"
    batches += [trainer.make_micro_batch([], [], [], device) for _ in range(int(count) - len(batches))]
    if fsdp:
        policy.register_forward_pre_hook(unsharded_gradients_are_gone(policy), prepend=True)
    stats = trainer.backward(policy, batches, [None] * len(batches), **OBJECTIVE)
    loss = torch.tensor(sum(float(s["loss"]) for s in stats))
    norm = trainer.gradient_norm(policy, 0.01)              # low enough to clip
    gradients = {name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad)
                 for name, p in trainer.unwrap(policy).named_parameters()}
    optimiser.step()
    sampler.load_weights(trainer.unwrap(policy).model)
    if world > 1:
        dist.all_reduce(loss)

    class Tokenizer:
        def save_pretrained(self, folder):
            pass
    trainer.save(out, 1, policy, optimiser, Tokenizer())
    first, before = next(iter(optimiser.state)), [state["exp_avg"].clone() for state in optimiser.state.values()]
    optimiser.state[first]["exp_avg"].zero_()
    trainer.load_optimiser(out / "state" / "step_000001", policy, optimiser)
    after = [state["exp_avg"] for state in optimiser.state.values()]
    assert all(torch.equal(part(a), part(b)) for a, b in zip(before, after)) and part(before[0]).any()
    if rank == 0:
        sampled = {name: weight for name, weight in sampler.forward.weights.items() if weight is not None}
        torch.save({"loss": loss, "norm": norm, "gradients": gradients, "sampler": sampled}, out / "numbers.pt")


def part(tensor):
    """This rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def unsharded_gradients_are_gone(policy):
    """A hook before every micro-batch: the one before left its gradients in shards, so no whole copy of them piles up."""
    calls = []

    def check(*_):
        weight = policy.model.base_model.layers[0].mlp.up_proj.weight
        assert (weight.grad is not None) == bool(calls) and hasattr(weight, "full_tensor")
        calls.append(1)
    return check


def main(model: str, out: str, *modes: str) -> None:
    """All the modes one after the other: most of a test's time goes into starting the processes."""
    dist.init_process_group("gloo")
    for mode in modes:
        if dist.get_rank() == 0:
            (Path(out) / mode).mkdir()
        dist.barrier()
        step(model, Path(out) / mode, mode)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
