"""Which rule of credit rewards the notes that helped? Replayed answers show the worth of notes.

    python -m bench.fidelity runs/almanac --name end               a run's last weights
    python -m bench.fidelity runs/almanac --name start --start     the weights that it began with

Each of `--questions` held-out questions of the almanac is attempted `--group` times. Then System 2
answers each attempt `--draws` times with all its notes, and `--draws` times for each note with that
note replaced by "Nothing here.". A note's worth is the difference of the shares of right answers.
The look-up and the other notes stay as they were sampled.

A rule's fidelity is the correlation, over all notes, of its advantage (times the weight in the
loss) with the worth. Intervals are a bootstrap over questions, 95 %. `infomem` is the gain in the
log-likelihood of the right answer through the note (InfoMem, arXiv 2606.03329). `other draws` is
the correlation r between two halves of the draws. Noise keeps every rule below √(2r / (1 + r))
(Spearman and Brown).

Results: fidelity-NAME.json in --out. Tests: pytest tests/test_almanac.py
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

import mars
import trainer
from bench.arms import weights_of
from bench.common import RESULTS, publish
from config import UserError, fail
from plumbing import evaluation, folders
from plumbing.start import Run, build
from recipes import almanac
from rollout import Context, Env, Sample, Trajectory, play_batch

# rule -> the options that choose it
NAMES = ("mars", "pooled", "own", "candid")
RULES = {rule: {"credit": rule, "shared_group": False} for rule in NAMES}
RULES["inherited"] = {"credit": "mars", "shared_group": True}


class Replay(NamedTuple):
    """An attempt up to its answer: with all notes (index 0), and with each note silenced."""

    trajectory: Trajectory
    prompts: list[list[int]]  # System 2's context before the answer, token ids
    readers: list[Sample]  # the samples that wrote the notes, in their order


def open_run(checkpoint: str, options: dict, frozen: Path | None = None) -> Run:
    """A run that only samples, with the checkpoint's settings. `frozen` plays frozen roles."""
    tools = []  # `complete` adds the look-up
    options = almanac.complete(tools, "eval", {"checkpoint": checkpoint, **options})
    config = evaluation.settings(almanac.METHOD, options, asking=False)
    additions = {"more_tools": tools, "questions": almanac.questions}
    return build(almanac.METHOD, config, training=False, frozen=frozen, **additions)


def replay_of(env: Env, trajectory: Trajectory) -> Replay | None:
    """The attempt's replay; None if it answered without a note."""
    sample = trajectory.contexts[0].sample
    turn = trajectory.turns[0]
    if not turn.readers or len(trajectory.turns) < 2:
        return None
    end = sample.mask.index(True) + len(turn.sampled)
    context = Context(env, Trajectory(trajectory.question, 0, 0), "sys2", turns=[turn])
    context.sample.tokens = sample.tokens[:end]
    readers = [reader.sample for reader in turn.readers]
    notes = [env.chat.note(reader.tokens[reader.mask.index(True) :]) for reader in readers]
    silence = env.chat.encode(almanac.IDLE)
    variants = [notes]
    variants += [[*notes[:n], silence, *notes[n + 1 :]] for n in range(len(notes))]
    prompts = [mars.extend(env, context, variant) for variant in variants]
    return Replay(trajectory, [sample.tokens[:end] + one.tokens for one in prompts], readers)


def answer_again(run: Run, replay: Replay, draws: int, seed: int) -> np.ndarray:
    """Whether `draws` answers to each prompt are right: 0 or 1, [1 + notes, draws]."""
    completions = run.sampler.generate(
        [prompt for prompt in replay.prompts for _ in range(draws)],
        max_new_tokens=run.config.step_tokens,
        temperature=run.config.temperature,
        stop_ids=run.chat.stop_ids,
        seed=seed,
    )
    # As in an episode, an answer that was cut does not count.
    answers = [
        run.chat.parse(one.tokens, final=True).answer if one.finish == "stop" else None
        for one in completions
    ]
    question = replay.trajectory.question
    right = [answer is not None and run.grade(question, answer) for answer in answers]
    return np.array(right, dtype=float).reshape(-1, draws)


def likelihood_gains(run: Run, policy: trainer.Policy, replay: Replay) -> list[float]:
    """How many nats each note adds to log p(right answer | all notes)."""
    gold = replay.trajectory.question.golden_answers[0]
    answer = run.chat.encode_own(f"<answer> {gold}</answer>")
    with_all, *without = (
        sum(trainer.score(policy, prompt + answer)[-len(answer) :]) for prompt in replay.prompts
    )
    return [with_all - score for score in without]


def advantages(run: Run, trajectories: list[Trajectory], readers: list[Sample]) -> dict:
    """rule -> each note's advantage times its loss weight: the push on its log-probability."""
    pushes = {}
    for rule, options in RULES.items():
        config = dataclasses.replace(run.config, balance="none", **options)
        almanac.credit(config, trajectories, 0)
        pushes[rule] = np.array([reader.advantage * reader.loss_weight for reader in readers])
    return pushes


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's correlation; 0 if either is constant."""
    return float(np.corrcoef(a, b)[0, 1]) if a.std() and b.std() else 0.0


def fidelity(push: np.ndarray, worth: np.ndarray, questions: np.ndarray) -> dict:
    """The correlation and its interval by a bootstrap over questions. All arguments: [notes]."""
    generator = np.random.default_rng(0)
    groups = [np.flatnonzero(questions == q) for q in np.unique(questions)]
    samples = []
    for _ in range(1000):
        choice = generator.integers(len(groups), size=len(groups))
        members = np.concatenate([groups[i] for i in choice])
        samples.append(correlation(push[members], worth[members]))
    low, high = np.quantile(samples, [0.025, 0.975])
    return {"correlation": correlation(push, worth), "low": float(low), "high": float(high)}


def measure(run: Run, questions: int, group: int, draws: int) -> list[dict]:
    """The rows: each rule's fidelity, and what limits it."""
    batch = list(enumerate(run.eval_questions[:questions]))
    trajectories = play_batch(run, batch, group, run.eval_tools, step="fidelity")
    env = Env(run.driver, run.samplers, run.chat, {}, run.grade, run.config, "fidelity")
    replays = [replay for t in trajectories if (replay := replay_of(env, t))]
    if not replays:
        raise UserError("no attempt looked anything up, so there is no note to replay")
    right = [answer_again(run, replay, draws, number) for number, replay in enumerate(replays)]
    model = trainer.load_model(run.start, run.device, dtype=run.dtype)
    policy = trainer.Policy(model, bf16=run.bf16)

    def worth(part: slice) -> np.ndarray:
        """The worth of each note [notes], from these draws only."""
        shares = [marks[:, part].mean(axis=1) for marks in right]
        return np.concatenate([share[0] - share[1:] for share in shares])

    readers = [reader for replay in replays for reader in replay.readers]
    indices = np.array([reader.question_index for reader in readers])
    note_of = {id(note.sample): note for t in trajectories for note in t.notes}
    notes = [note_of[id(reader)] for reader in readers]
    rules = advantages(run, trajectories, readers)
    rules["infomem"] = np.concatenate([likelihood_gains(run, policy, one) for one in replays])
    worths = worth(slice(None))
    rows = [{"rule": rule, **fidelity(push, worths, indices)} for rule, push in rules.items()]
    halves = worth(slice(0, None, 2)), worth(slice(1, None, 2))
    rows.append({"rule": "other draws", **fidelity(*halves, indices)})
    kinds = np.array(["telling" if n.tells else "silent" if n.silent else "neither" for n in notes])
    for kind in np.unique(kinds):
        own = worths[kinds == kind]
        rows.append({"notes": str(kind), "count": len(own), "mean worth": float(own.mean())})
    return rows


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--start", action="store_true", help="the weights that the run began with")
    parser.add_argument("--name", required=True, help="of the results' file")
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--group", type=int, default=8, help="attempts at a question")
    parser.add_argument("--draws", type=int, default=8, help="answers to each context; even")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "almanac", help="folder of the results' file"
    )
    options = parser.parse_args(arguments)
    try:
        if options.draws < 2 or options.draws % 2:
            raise UserError("--draws must be even and above 0: the halves are compared")
        if folders.read_json(options.run / "config.json")["system1"] != "train":
            raise UserError(
                "no rule of credit rewards a reader that is not trained: give another run"
            )
        checkpoint, settings = weights_of(options.run, options.start)
        run = open_run(checkpoint, settings | {"eval_questions": options.questions})
        rows = measure(run, options.questions, options.group, options.draws)
    except UserError as error:
        return fail(str(error))
    publish(f"fidelity-{options.name}", rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
