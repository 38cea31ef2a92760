"""MIFO, a reconstruction: phases of SFT between phases of RL, which should forget little.

arXiv 2510.04454. RL improves what a model can do already; what it never does right needs SFT. But
SFT may overwrite what RL has learned. To forget less, MIFO uses only questions that at most a share
`threshold` of the rollouts got right, trains only the share `hard` of the teacher's tokens with the
highest entropy, and freezes the share `frozen_share` of the parameters, which RL has moved most:

    C_i = α C_{i−1} + |θ after RL_i − θ before RL_i|,    F_i = the top `frozen_share` of C_i
    L_SFT = −(1/|M|) Σ_{t ∈ M} log π(y*_t | y*_<t, x),    M = the top `hard` of tokens by entropy

Sources: the abstract, reviews of the submission and a digest. We had neither the paper's equations
and values nor code: the two lines above are our reading of the words, and all numbers below are
ours. Reviewers ask for a measure of forgetting, and for a control that freezes **as many parameters
at random**; both are here. SFT without the last two measures is ReLIFT (arXiv 2506.07527).

    python -m siblings.mifo                                     RL, SFT, RL, SFT, RL
    python -m siblings.mifo --name random --freeze random       the control
    python -m siblings.mifo table runs/mifo runs/random         accuracies after each phase

Other arms: `--steps 90 --sft_steps 0` (RL only), `--hard 1 --freeze none` (ReLIFT), `--hard 1`,
`--freeze none`. In SFT a step's "attempts" are the teacher's answers, of reward and advantage 1.
It does not show how a large model forgets, and no arm's learning rates were tuned.
Tests: pytest tests/test_mifo.py
"""

import functools
import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import mars
import train
import trainer
from config import TRAIN, UserError, fail, option
from plumbing.folders import read_lines
from plumbing.start import Run
from rollout import Method, Sample, Trajectory
from sampler import hash64
from siblings import mifo_toy, solo


@dataclass
class MifoConfig(solo.SoloConfig):
    """MIFO's own options."""

    steps: int = option(150, "three phases of RL, two of SFT between them")
    eval_every: int = option(30, "steps between evaluations: one at each phase's end")
    eval_questions: int = option(400, "held-out questions, half of each kind")
    lr: float = option(3e-4, "learning rate of RL")

    rl_steps: int = option(
        30, "steps of an RL phase", TRAIN, heading="SFT between the phases of RL"
    )
    sft_steps: int = option(30, "steps of an SFT phase; 0: RL only", TRAIN)
    sft_lr: float = option(1e-3, "learning rate of SFT", TRAIN)
    threshold: float = option(0.25, "largest share of right attempts of a question in SFT", TRAIN)
    hard: float = option(0.5, "share of tokens that SFT trains, by entropy", TRAIN)
    freeze: Literal["moved", "random", "none"] = option(
        "moved", "parameters that SFT freezes", TRAIN
    )
    frozen_share: float = option(0.5, "share of the parameters", TRAIN)
    history: float = option(0.5, "α above", TRAIN)

    def check(self, training: bool) -> None:
        """Refuses values that contradict each other, MIFO's own included."""
        super().check(training)
        self.at_least(1, "rl_steps")
        self.at_least(0, "sft_steps")
        # No state on disk holds what one phase leaves to the next.
        solo.refuse_others(self, {"resume": False} if training else {})
        if not 0 < self.hard <= 1 or max(self.frozen_share, self.threshold, self.history) > 1:
            raise UserError("--hard, --frozen_share, --threshold and --history are shares up to 1")

    def phase(self, step: int) -> tuple[bool, int]:
        """Whether a step is one of SFT, and the step's number in its phase."""
        number = step % (self.rl_steps + self.sft_steps)
        if number < self.rl_steps:
            return False, number
        return True, number - self.rl_steps


@dataclass
class Phases:
    """The state that one phase leaves to the next."""

    missed: list[mifo_toy.Task] = field(default_factory=list)  # in the last RL phase
    before: Tensor | None = None  # all parameters when this phase began: [P]
    importance: Tensor | float = 0.0  # C: [P]
    frozen: Tensor | None = None  # F, in SFT: [P] bool


def rollouts(run: Run, step: int, phases: Phases) -> list[Trajectory]:
    """A step's attempts: in RL the model's own, in SFT the teacher's."""
    teaching, number = run.config.phase(step)
    if number == 0:
        begin(run, step, phases, teaching)
    if teaching:
        return taught(run, number, phases.missed)
    trajectories = train.play_groups(run, step)
    phases.missed += missed(trajectories, run.config.threshold)
    return trajectories


def begin(run: Run, step: int, phases: Phases, teaching: bool) -> None:
    """Begins a phase with new optimizer moments; for SFT it chooses questions and parameters."""
    if phases.before is None:
        attach(run, phases)
    run.optimizer.state.clear()
    now = values(run.policy)
    if teaching:
        moved = (now - phases.before).abs()
        phases.missed = solo.of_all_ranks(run, phases.missed)
        phases.importance = run.config.history * phases.importance + moved
        phases.frozen = chosen_to_stay(phases.importance, run.config, hash64(run.config.seed, step))
    else:
        phases.missed, phases.frozen = [], None
    phases.before = now


def attach(run: Run, phases: Phases) -> None:
    """Makes the optimizer use SFT's learning rate and restore frozen parameters after each step."""

    def rate(optimizer, *_) -> None:
        if phases.frozen is not None:
            optimizer.param_groups[0]["lr"] = run.config.sft_lr

    def put_back(*_) -> None:
        if phases.frozen is not None:
            vector = torch.where(phases.frozen, phases.before, values(run.policy))
            vector_to_parameters(vector, run.policy.parameters())

    run.optimizer.register_step_pre_hook(rate)
    run.optimizer.register_step_post_hook(put_back)


def missed(trajectories: list[Trajectory], threshold: float) -> list[mifo_toy.Task]:
    """The questions whose share of right attempts is at most `threshold`."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.reward is not None:
            groups.setdefault(trajectory.question_index, []).append(trajectory)
    shares = {place: sum(t.reward for t in own) / len(own) for place, own in groups.items()}
    return [groups[place][0].question for place, share in shares.items() if share <= threshold]


def taught(run: Run, number: int, tasks: list[mifo_toy.Task]) -> list[Trajectory]:
    """This rank's share of the teacher's answers to the next of `tasks`.

    Only the hardest tokens of the whole batch are trained, so every rank scores the whole batch.
    """
    trajectories = []
    for index in range(run.config.questions if tasks else 0):
        task = tasks[(number * run.config.questions + index) % len(tasks)]
        trajectories.append(solo.written(run.chat, task, index, 0, task.solution, 1.0))
    samples = [sample for trajectory in trajectories for sample in trajectory.samples()]
    if not samples:
        return []
    logprobs, entropies = solo.score(trainer.unwrap(run.policy), samples)
    hard = hardest(torch.cat(entropies), run.config.hard)
    for sample, own, mask in zip(samples, logprobs, hard.split([len(own) for own in logprobs])):
        sample.logprobs[-len(own) :] = own.tolist()
        sample.mask[-len(own) :] = mask.tolist()
    return trajectories[run.rank :: run.ranks]


def credit(
    config: MifoConfig, trajectories: list[Trajectory], step: int
) -> dict[str, list[Sample]]:
    """RL: GRPO's advantages. SFT: advantages of 1, and a mean over all hard tokens."""
    samples = [sample for trajectory in trajectories for sample in trajectory.samples()]
    mars.set_advantages(config, samples)
    for sample in samples:
        sample.loss_weight = 1
        if config.phase(step)[0]:
            sample.advantage = 1.0
            # The loop divides by the sample's tokens, so with this weight each token counts once.
            sample.loss_weight = sum(sample.mask)
    return {solo.ROLE: samples}


def hardest(entropy: Tensor, share: float) -> Tensor:
    """A mask [N] of the ⌈share · N⌉ tokens with the highest entropy."""
    mask = torch.zeros(len(entropy), dtype=torch.bool)
    mask[entropy.topk(math.ceil(share * len(entropy))).indices] = True
    return mask


def chosen_to_stay(importance: Tensor, config: MifoConfig, seed: int) -> Tensor:
    """A mask [P] of ⌈frozen_share · P⌉ parameters by --freeze: most moved, random, or none."""
    mask = torch.zeros(len(importance), dtype=torch.bool, device=importance.device)
    count = math.ceil(config.frozen_share * len(importance))
    if config.freeze == "moved":
        mask[importance.topk(count).indices] = True
    if config.freeze == "random":
        generator = torch.Generator().manual_seed(seed)
        mask[torch.randperm(len(importance), generator=generator)[:count]] = True
    return mask


def values(policy: torch.nn.Module) -> Tensor:
    """A copy of all parameters as one vector [P]."""
    return parameters_to_vector(policy.parameters()).detach().clone()


def table(folders: list[str]) -> None:
    """Prints the sampled accuracy of both kinds of held-out questions, for all evaluations."""
    print(f"{'run':20} {'/'.join(mifo_toy.KINDS)} before, and at each evaluation")
    for folder in map(Path, folders):
        lines = read_lines(folder / "metrics.jsonl")
        kinds = [line.get("eval_accuracy_by_kind") for line in lines]
        shares = [["{:.2f}".format(x[k][0] / x[k][1]) for k in mifo_toy.KINDS] for x in kinds if x]
        if not shares:
            raise UserError(f"{folder} has no evaluation of both kinds")
        print(f"{folder.name:20} {' → '.join(map('/'.join, shares))}")


METHOD = Method(
    name="mifo",
    roles={solo.ROLE: "Solver"},
    config=MifoConfig,
    episode=solo.episode,
    credit=credit,
    words=solo.words,
    fits=solo.fits,
)


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    if arguments[:1] == ["table"]:
        try:
            table(arguments[1:])
        except (UserError, KeyError) as error:
            return fail(f"name folders of runs of MIFO ({error})")
        return 0
    return train.main(
        replace(METHOD, play_step=functools.partial(rollouts, phases=Phases())),
        arguments,
        __doc__,
        base_model=mifo_toy.build,
        language=solo.Language,
        questions=mifo_toy.questions,
        more_tools=[solo.NO_TOOL],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
