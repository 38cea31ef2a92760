"""MIFO, a reconstruction: SFT between phases of RL, made so that it forgets little.

arXiv 2510.04454. RL sharpens what a model can do; what it never does right has to be shown. But SFT
is said to overwrite what RL has learned. Against that MIFO shows only questions that at most
`threshold` of the rollouts got right, learns only from the share `hard` of the teacher's tokens,
and keeps the share `frozen` of the parameters, which RL has moved most, as they are during SFT:

    C_i = α C_{i−1} + |θ after RL_i − θ before RL_i|,    F_i = the top `frozen` of C_i
    L_SFT = −(1/|M|) Σ_{t ∈ M} log π(y*_t | y*_<t, x),    M = the top `hard` of tokens by entropy

Sources: the abstract, reviews of the submission and a digest. The paper's equations and values were
not to be had and there is no code: the two lines above are our reading of the words, all numbers
below are ours. Reviewers miss a measure of forgetting and the control of freezing **as many
parameters by chance**; both are here. SFT without any of the three is ReLIFT (arXiv 2506.07527).

    python -m siblings.mifo              all arms on the toy of mifo_toy.py, from one first phase
    python -m siblings.mifo --seed 1     once more

Each arm: RL (shared by all arms), SFT, RL, SFT, RL. Printed is the accuracy on held-out questions
of both kinds, direct/indirect, after each phase. What it does not show: how a large
model forgets, whose SFT has thousands of long solutions; and no arm's rates were tuned.
Tests: pytest tests/test_mifo.py
"""

import copy
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import grpo
import kernels
import trainer
from config import UserError, fail, parse, parser
from plumbing import folders
from sampler import Sampler, hashed
from siblings import mifo_toy as toy
from siblings.mifo_toy import KINDS, Task

CPU = torch.device("cpu")
OBJECTIVE = {"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0, "temperature": 1.0}


@dataclass
class MifoConfig:
    """The options, each with its reason."""

    name: str = "mifo"  # of the folder below --runs
    runs: str = "runs"  # where results go
    cache: str = ".cache"  # keeps the base model
    seed: int = 0  # of the base model, the questions and all draws
    rounds: int = 2  # of SFT and RL after the first phase of RL
    rl_steps: int = 30  # of a phase
    sft_steps: int = 30
    questions: int = 16  # a step of RL, half of each kind; a step of SFT
    group: int = 8  # attempts at a question
    eval_questions: int = 400  # half of each kind
    rl_lr: float = 3e-4  # of AdamW
    sft_lr: float = 1e-3
    threshold: float = 0.25  # share of right attempts up to which a question is shown
    hard: float = 0.5  # share of tokens that SFT learns from, by entropy
    frozen: float = 0.5  # share of parameters that SFT leaves alone
    history: float = 0.5  # α


# arm -> (what it changes, how it chooses what to freeze)
ARMS = {
    "RL only": ({"sft_steps": 0}, "none"),
    "plain SFT (ReLIFT)": ({"hard": 1.0}, "none"),
    "MIFO": ({}, "moved"),
    "all tokens": ({"hard": 1.0}, "moved"),
    "no freezing": ({}, "none"),
    "random freezing": ({}, "random"),
}


# -------------------------------------------------------------------------------------- the phases


def rl_phase(policy: trainer.Policy, sampler: Sampler, config: MifoConfig, phase: int) -> list:
    """GRPO on both kinds. Returns the questions that were hardly ever answered rightly."""
    optimizer = trainer.make_optimizer(policy, config.rl_lr, weight_decay=0.01)
    buffer = []
    for step in range(phase * config.rl_steps, (phase + 1) * config.rl_steps):
        tasks = toy.draw_tasks("train", config.seed, step * config.questions, config.questions)
        repeated = [task for task in tasks for _ in range(config.group)]
        prompts = [task.tokens() for task in repeated]
        seed = hashed(config.seed, step)
        answers = sampler.generate(prompts, max_new_tokens=6, stop_ids=[toy.EOT], seed=seed)
        rewards = torch.tensor([t.grade(a.tokens) for t, a in zip(repeated, answers, strict=True)])
        groups = [i // config.group for i in range(len(repeated))]
        advantages = grpo.group_advantages(rewards, groups).tolist()
        samples = [
            toy.sample(task, answer.tokens, answer.logprobs, advantage)
            for task, answer, advantage in zip(repeated, answers, advantages, strict=True)
        ]
        weights = grpo.token_weights([torch.tensor(s.mask) for s in samples], len(samples))
        update(policy, optimizer, trainer.micro_batches(samples, weights, 16_384, CPU))
        sampler.load_weights(policy.model)
        accuracy = rewards.view(-1, config.group).mean(1).tolist()
        buffer += [t for t, share in zip(tasks, accuracy) if share <= config.threshold]
    return buffer


def sft_phase(policy, buffer: list[Task], config: MifoConfig, frozen: list[Tensor]) -> None:
    """SFT on the teacher's solutions; `frozen`: a mask for each parameter."""
    optimizer = trainer.make_optimizer(policy, config.sft_lr, weight_decay=0.01)
    for step in range(config.sft_steps if buffer else 0):
        first = step * config.questions
        shown = [buffer[(first + i) % len(buffer)] for i in range(config.questions)]
        batch = solutions(shown)
        hard = hardest(entropies(policy, batch), config.hard)
        batch.weight = hard.float() / hard.sum()
        update(policy, optimizer, [batch], frozen, on_policy=True)


def solutions(tasks: list[Task]) -> trainer.MicroBatch:
    """The teacher's solutions as one micro-batch of advantage 1."""
    samples = []
    for task in tasks:
        said = [toy.IDS[word] for word in task.solution.split()]
        samples.append(toy.sample(task, said, [0.0] * len(said), 1.0))
    weights = [torch.ones(len(sample.tokens)) for sample in samples]
    (batch,) = trainer.micro_batches(samples, weights, 65_536, CPU)
    return batch


def update(policy, optimizer, batches, frozen: list[Tensor] = (), **options) -> None:
    """One optimizer step. Frozen entries are put back after it.

    A gradient of 0 would not keep them: momentum and weight decay move a parameter without one.
    """
    parameters = list(policy.parameters())
    kept = [parameter.detach().clone() for parameter in parameters] if frozen else []
    optimizer.zero_grad(set_to_none=True)
    trainer.backward(policy, batches, [None] * len(batches), **OBJECTIVE, **options)
    trainer.gradient_norm(policy, 1.0)
    optimizer.step()
    with torch.no_grad():
        for parameter, mask, value in zip(parameters, frozen, kept):
            parameter[mask] = value[mask]


# ----------------------------------------------------------------------- what SFT learns and moves


@torch.no_grad()
def entropies(policy: trainer.Policy, batch: trainer.MicroBatch) -> Tensor:
    """Of each loss token's distribution, in nats: [N]."""
    return kernels.linear_logprob(*policy.hidden(batch), batch.target)[1]


def hardest(entropy: Tensor, share: float) -> Tensor:
    """A mask [N] of the ⌈share · N⌉ tokens of highest entropy."""
    chosen = torch.zeros(len(entropy), dtype=torch.bool)
    chosen[entropy.topk(math.ceil(share * len(entropy))).indices] = True
    return chosen


def values(policy: trainer.Policy) -> Tensor:
    """All parameters as one vector, copied: [P]."""
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def most_moved(importance: Tensor, share: float, how: str, generator) -> Tensor:
    """A mask [P] of ⌈share · P⌉ parameters: the most moved, or any by chance; none for "none"."""
    chosen = torch.zeros(len(importance), dtype=torch.bool)
    count = math.ceil(share * len(importance))
    if how == "moved":
        chosen[importance.topk(count).indices] = True
    if how == "random":
        chosen[torch.randperm(len(importance), generator=generator)[:count]] = True
    return chosen


def by_parameter(policy: trainer.Policy, vector: Tensor) -> list[Tensor]:
    """The vector [P] cut into the parameters' shapes."""
    parts = vector.split([p.numel() for p in policy.parameters()])
    return [part.view_as(p) for part, p in zip(parts, policy.parameters(), strict=True)]


# ----------------------------------------------------------------------------------------- the arms


def accuracies(sampler: Sampler, config: MifoConfig) -> dict[str, float]:
    """Shares of right answers on held-out questions, sampled, by kind."""
    tasks = toy.draw_tasks("eval", config.seed, 0, config.eval_questions)
    prompts = [task.tokens() for task in tasks]
    answers = sampler.generate(prompts, max_new_tokens=6, stop_ids=[toy.EOT], seed=1)
    right = [task.grade(answer.tokens) for task, answer in zip(tasks, answers, strict=True)]
    return {kind: sum(right[i::2]) / len(right[i::2]) for i, kind in enumerate(KINDS)}


def play_arm(start, config: MifoConfig, how: str) -> dict:
    """SFT and RL in turn from the state after the first phase of RL."""
    policy, buffer, importance = copy.deepcopy(start)
    sampler = Sampler(policy.model, max_tokens=32_768)
    generator = torch.Generator().manual_seed(config.seed)
    found = {"after": [accuracies(sampler, config)], "sft_moved": [], "rl_moved": []}
    for phase in range(1, config.rounds + 1):
        before = values(policy)
        frozen = most_moved(importance, config.frozen, how, generator)
        sft_phase(policy, buffer, config, by_parameter(policy, frozen))
        sampler.load_weights(policy.model)
        found["after"].append(accuracies(sampler, config))
        middle = values(policy)
        buffer = rl_phase(policy, sampler, config, phase)
        found["after"].append(accuracies(sampler, config))
        moved = (values(policy) - middle).abs()
        importance = config.history * importance + moved
        found["sft_moved"].append(float((middle - before).norm()))
        found["rl_moved"].append(float(moved.norm()))
    return found


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    try:
        config = MifoConfig(**parse(parser(MifoConfig, __doc__), arguments))
        if not 0 < config.hard <= 1 or not 0 <= config.frozen <= 1:
            raise UserError("--hard and --frozen are shares: give numbers between 0 and 1")
    except UserError as error:
        return fail(error)
    torch.set_num_threads(1)
    base = trainer.load_model(toy.build(config.cache, config.seed), CPU)
    policy = trainer.Policy(base, bf16=False)
    sampler = Sampler(policy.model, max_tokens=32_768)
    print("base model:", accuracies(sampler, config), flush=True)
    before = values(policy)
    buffer = rl_phase(policy, sampler, config, phase=0)
    moved = (values(policy) - before).abs()
    still = float((moved < 1e-6).float().mean())
    print(f"RL moved {1 - still:.1%} of the parameters by 1e-6 or more, {moved.norm():.2f} in all")
    table = {}
    for arm, (changes, how) in ARMS.items():
        found = play_arm((policy, buffer, moved), replace(config, **changes), how)
        table[arm] = found
        after = ["/".join(f"{row[kind]:.2f}" for kind in KINDS) for row in found["after"]]
        print(f"{arm:20} {' → '.join(after)}", flush=True)
    file = Path(config.runs) / config.name / f"seed-{config.seed}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    print("written to", folders.write_json(file, {"unmoved": still, "arms": table}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
