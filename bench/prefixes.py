"""Shared prefixes in the trainer: when `--share_prefixes` pays, on a CPU.

    python -m bench.prefixes           one thread, a small Qwen3 in fp32
    python -m bench.prefixes --quick   a tiny one, to see that it works; no file

Eight groups of eight samples, 384 tokens each. The samples of a group share a prefix: 0, 1/4, 1/2,
3/4 or 7/8 of their length. Their last sixteenth carries loss. One row of the table per share. The
same samples go through micro_batches and backward twice: without and with shared prefixes. If loss
or gradients disagree, there is no table. A shared part p leaves about 1 - p·7/8 of the tokens.

Results: bench/results/prefixes.json. Tests: pytest tests/test_bench_train_step.py
"""

import argparse
import random

import torch

import trainer
from bench.common import interleaved, save, spread, table
from bench.train_step import OBJECTIVE, SMALL, random_model, weigh
from rollout import Sample

GROUPS = 8
SIZE = 8  # samples of a group
SHARES = (0, 1 / 4, 1 / 2, 3 / 4, 7 / 8)


def draw_groups(share: float, length: int, vocabulary: int) -> list[Sample]:
    """GROUPS · SIZE samples of `length` tokens; each group shares a prefix of `share` of them."""
    rng = random.Random(0)
    samples = []
    trained = length // 16
    for _ in range(GROUPS):
        prompt = [rng.randrange(vocabulary) for _ in range(int(share * length))]
        for attempt in range(SIZE):
            sample = Sample("sys2", question_index=0, attempt=attempt, copies=1)
            sample.advantage = rng.choice((-1.0, 1.0))
            rest = [rng.randrange(vocabulary) for _ in range(length - len(prompt))]
            sample.append_given([*prompt, *rest[:-trained]])
            sample.tokens += rest[-trained:]
            sample.mask += [True] * trained
            sample.logprobs += [-6.0] * trained
            samples.append(sample)
    rng.shuffle(samples)
    return samples


def measure(length: int, capacity: int, shape: dict, rounds: int) -> list[dict]:
    """A row for each share. ValueError if the two disagree about loss or gradients."""
    torch.set_num_threads(1)
    policy = trainer.Policy(random_model(shape, "cpu"), bf16=False)
    rows = []
    for share in SHARES:
        samples = draw_groups(share, length, shape["vocab_size"])
        weights = weigh(samples)
        computed = {}

        def step(share_prefixes: bool):
            batches = trainer.micro_batches(
                samples, weights, capacity, torch.device("cpu"), share_prefixes=share_prefixes
            )
            computed[share_prefixes] = sum(batch.tokens.numel() for batch in batches)
            stats = trainer.backward(policy, batches, [None] * len(batches), **OBJECTIVE)
            return sum(numbers["loss"].item() for numbers in stats)

        check_equal(policy, step, share)
        forms = {"packed": lambda: step(False), "shared": lambda: step(True)}
        seconds = {name: spread(taken) for name, taken in interleaved(forms, rounds).items()}
        rows.append(
            {
                "prefix": share,
                "tokens, packed": computed[False],
                "tokens, shared": computed[True],
                **{f"CPU s, packed, {k}": value for k, value in seconds["packed"].items()},
                **{f"CPU s, shared, {k}": value for k, value in seconds["shared"].items()},
                "speed-up": seconds["packed"]["median"] / seconds["shared"]["median"],
            }
        )
    return rows


def check_equal(policy, step, share: float) -> None:
    """ValueError if loss or gradients differ by more than rounding."""
    losses = {}
    gradients = {}
    for shared in (False, True):
        policy.zero_grad()
        losses[shared] = step(shared)
        gradients[shared] = torch.cat([p.grad.flatten() for p in policy.parameters()])
    error = ((gradients[True] - gradients[False]).norm() / gradients[False].norm()).item()
    if abs(losses[True] - losses[False]) > 1e-5 or error > 1e-4:
        raise ValueError(
            f"with a shared prefix of {share} the two disagree, gradients by {error:.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, no file")
    if parser.parse_args().quick:
        tiny = SMALL | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
        print(table(measure(64, 512, tiny, rounds=2)))
        return
    rows = measure(384, 4096, SMALL, rounds=3)
    print(table(rows))
    save("prefixes", "python -m bench.prefixes", rows)


if __name__ == "__main__":
    main()
