"""One question, followed through one training step: writes docs/walkthrough.md.

The prose is walkthrough_template.md, and its slots are filled from a real step of the default run.
The functions that train.train_step calls are called here in its order, and what they made is shown
as it lies there. One formula is worked out by hand, a token's loss, to be compared with
grpo.grpo_loss.

    python -m bench.walkthrough            seconds, once the toy's base model is there
    python -m bench.walkthrough --out FILE --cache FOLDER

Tests: pytest tests/test_walkthrough.py
"""

import argparse
import math
import re
import statistics
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from plumbing.start import build
from plumbing.logbook import segments
from plumbing.start import Run
from torch import Tensor

import grpo
import mars
import train
import trainer
from bench import common
from config import UserError, fail
from plumbing.folders import write_whole
from rollout import Context, Sample, Trajectory

TEMPLATE = Path(__file__).parent / "walkthrough_template.md"
PAGE = Path(__file__).parent.parent / "docs" / "walkthrough.md"
COMMAND = "python -m bench.walkthrough"


# --------------------------------------------------------------------------------------- the step


@dataclass
class Walk:
    """A training step with all that it made, and the attempt that is followed."""

    step: int
    trajectories: list[Trajectory]
    terms: dict[str, list[Sample]]  # role -> all its samples
    attempt: Trajectory  # the one that is followed
    reader: Context  # who read the answer for it
    trained: list[Sample]  # those that are in the micro-batches
    batches: list[trainer.MicroBatch]
    before: list[Tensor]  # the trainer's log-probs of each sample in `trained`
    after: list[Tensor]
    metrics: dict
    again: list[Trajectory]  # the same draws with the new weights

    def index(self, sample: Sample) -> int:
        """Where a sample stands in `trained`."""
        return [id(one) for one in self.trained].index(id(sample))

    def weights(self, sample: Sample) -> Tensor:
        """What each of a sample's own tokens weighs in the loss."""
        index = self.index(sample)
        return torch.cat([batch.weight[batch.owner == index] for batch in self.batches])


def follow(run: Run) -> Walk:
    """Steps of a run, until one has an attempt worth following."""
    for step in range(run.config.steps):
        asked = train.questions_of(run, step)
        trajectories = train.attempts(run, step, asked)
        terms = run.method.credit(run.config, trajectories, step)
        chosen = choose(run, trajectories)
        trained, batches, _ = train.prepare(run, terms)
        before = logprobs(run, batches, trained)
        metrics = train.update(run, terms, step)
        run.sampler.load_weights(trainer.unwrap(run.policy).model)
        if chosen:
            after = logprobs(run, batches, trained)
            again = train.attempts(run, step, asked)
            made = (trained, batches, before, after, metrics, again)
            return Walk(step, trajectories, terms, *chosen, *made)
    raise UserError("no step of the run has an attempt that shows everything")


def choose(run: Run, trajectories: list[Trajectory]) -> tuple[Trajectory, Context] | None:
    """The attempt to follow, and the reader that told it the answer.

    It is the first right one with a single call, where packing saved a chunk and left several, the
    note is trained on, and at least two attempts at the question are right and two wrong.
    """
    for attempt in trajectories:
        right = sum(t.reward for t in trajectories if t.question_index == attempt.place)
        mixed = 2 <= right <= run.config.group - 2
        call = attempt.turns[0]
        packed = 1 < len(call.readers) < len(call.documents)
        if not (attempt.reward == 1 and mixed and packed and len(attempt.turns) == 2):
            continue
        for reader in call.readers:
            sample = reader.sample
            note = f" {run.chat.text(sampled(sample))} "
            if f" {attempt.answer} " in note and sample.copies == 1 and sample.advantage:
                return attempt, reader
    return None


def logprobs(run: Run, batches: list, trained: list[Sample]) -> list[Tensor]:
    """The trainer's log-probs of each sample's own tokens, under its weights of this moment."""
    found = [None] * len(trained)
    for batch in batches:
        values = trainer.logprob(run.policy, batch, run.config.temperature)  # [N]
        for index in batch.owner.unique().tolist():
            found[index] = values[batch.owner == index]
    return found


def sampled(sample: Sample) -> list[int]:
    """The tokens that its role sampled."""
    return [token for token, mask in zip(sample.tokens, sample.mask) if mask]


# --------------------------------------------------------------------------------------- the page


def columns(**rows: list) -> str:
    """Rows with a name each, the cells of a column below each other."""
    cells = [[name, *map(str, row)] for name, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return "\n".join(lines)


def table(head: str, rows: list[list]) -> str:
    """A Markdown table; the words of `head` name its columns."""
    lines = [head.split(), ["---"] * len(head.split()), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def decimals(values: Iterable[float], digits: int = 3) -> list[str]:
    """Numbers as text."""
    return [f"{float(value):z.{digits}f}" for value in values]


def tokens_of(run: Run, sample: Sample, start: int, end: int | None) -> str:
    """A stretch of a sample's tokens with all that is stored for each."""
    tokens = sample.tokens[start:end]
    rows = {
        "token": [run.chat.text([token]) for token in tokens],
        "id": tokens,
        "mask": [int(mask) for mask in sample.mask[start:end]],
    }
    if sample.mask[start]:
        rows["log-prob"] = decimals(sample.logprobs[start:end])
        rows["probability"] = decimals(map(math.exp, sample.logprobs[start:end]), 2)
    return columns(**rows)


def episode(run: Run, walk: Walk) -> dict:
    """What sections 2 to 5 show of the attempt."""
    sample = walk.attempt.contexts[0].sample
    note = walk.reader.sample
    start = sample.mask.index(True)
    begin = note.mask.index(True)
    call = walk.attempt.turns[0]
    readers = call.readers
    packing = []
    for i, document in enumerate(call.documents):
        chunk = [i in reader.chunk.documents for reader in readers].index(True)
        packing.append([f"{i}: {document.title or document.id}", call.lengths[i], chunk])
    notes = [run.chat.note(sampled(reader.sample)) for reader in readers]
    context = []
    for part in segments(sample, run.chat):
        kind = "sampled" if part["trained"] else "given"
        context.append(f"{kind:<9}{part['text']}")
    return {
        "prompt": tokens_of(run, sample, 0, start),
        "call": tokens_of(run, sample, start, start + len(call.sampled)),
        "documents": len(call.documents),
        "wording": run.config.sys1_prompt - walk.reader.chunk.capacity,
        "packing": table("document tokens chunk", packing),
        "chunks": len(readers),
        "chunk": readers.index(walk.reader),
        "reader_prompt": textwrap.fill(run.chat.text(note.tokens[:begin]), 96),
        "note": tokens_of(run, note, begin, None),
        "notes": "\n".join(f"chunk {i}: {run.chat.text(note)}" for i, note in enumerate(notes)),
        "note_tokens": sum(map(len, notes)),
        "document_tokens": sum(call.lengths),
        "context": "\n".join(context),
    }


def credit(run: Run, walk: Walk) -> dict:
    """Sections 7 to 9: advantages, balance and weights."""
    group = [t for t in walk.trajectories if t.question_index == walk.attempt.question_index]
    slots = {"right": int(sum(t.reward for t in group))}
    attempts = []
    notes = []
    for t in group:
        calls = sum(turn.action.call is not None for turn in t.turns)
        first, *readers = t.contexts
        row = [t.attempt, calls, len(readers), t.answer, int(t.reward)]
        attempts.append([*row, *decimals([first.sample.advantage])])
        for reader in readers:
            note = run.chat.text(run.chat.note(sampled(reader.sample)))
            row = [t.attempt, note, int(t.reward), *decimals([reader.sample.advantage])]
            notes.append([*row, reader.sample.copies])
    slots["attempts"] = table("attempt calls notes answer r A", attempts)
    slots["samples"] = table("attempt note r A drawn", notes)
    slots["drawn"] = sum(row[-1] for row in notes)
    followed = {"sys2": walk.attempt.contexts[0].sample, "sys1": walk.reader.sample}
    for role, own in followed.items():
        samples = [s for t in group for s in t.samples(role)]
        rewards = [s.reward for s in samples]
        everyone = walk.terms[role]
        count = sum(s.copies for s in everyone)
        weights = grpo.token_weights([torch.tensor(s.mask) for s in everyone], count)
        slots[role] = {
            "number": len(samples),
            "right": int(sum(rewards)),
            "mean": statistics.mean(rewards),
            "std": statistics.pstdev(rewards),
            "A": own.advantage,
            "A_wrong": next((s.advantage for s in samples if s.reward == 0), 0.0),
            "count": count,
            "tokens": sum(own.mask),
            "weight": float(walk.weights(own)[0]),
            "sum": sum(float(w.sum()) * s.copies for w, s in zip(weights, everyone)),
        }
    return slots


def token_loss(run: Run, walk: Walk) -> dict:
    """Section 10: the loss of one token, by hand and by grpo.grpo_loss."""
    config = run.config
    sample = walk.reader.sample
    own = torch.tensor(sample.logprobs)[torch.tensor(sample.mask)]
    place = int(own.argmin())
    old = own[place]
    new = walk.before[walk.index(sample)][place]
    weight = walk.weights(sample)[place]
    limits = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    advantage = torch.tensor(sample.advantage)
    kernel, _ = grpo.grpo_loss(new[None], old[None], advantage[None], weight[None], **limits)
    low = 1 - config.clip_low
    high = 1 + config.clip_high
    ratio = math.exp(new - old)
    clipped = min(max(ratio, low), high)
    loss = -min(ratio * sample.advantage, clipped * sample.advantage)
    return {
        "word": run.chat.text([sampled(sample)[place]]),
        "new": float(new),
        "old": float(old),
        "low": low,
        "high": high,
        "ratio": ratio,
        "clipped": clipped,
        "A": sample.advantage,
        "l": loss,
        "w": float(weight),
        "term": float(weight) * loss,
        "kernel": float(kernel),
    }


def effect(run: Run, walk: Walk) -> dict:
    """Sections 11 and 12: what the step did to the log-probs, and to the answers."""
    place = walk.attempt.question_index
    # Per sample, the mean over its tokens.
    before = [float(values.mean()) for values in walk.before]
    after = [float(values.mean()) for values in walk.after]
    rows = []
    for role, name in run.method.roles.items():
        for kind, reward in (("right", 1), ("wrong", 0)):
            key = (place, role, reward)
            those = [
                i for i, s in enumerate(walk.trained) if (s.question_index, s.role, s.reward) == key
            ]
            if those:
                advantage = walk.trained[those[0]].advantage
                means = [statistics.mean(m[i] for i in those) for m in (before, after)]
                rows.append([f"{name}, {kind}", len(those), *decimals([advantage, *means])])
    rose = {True: [], False: []}  # by the advantage's sign
    for sample, old, new in zip(walk.trained, before, after):
        rose[sample.advantage > 0].append(new > old)
    first_step = len(walk.attempt.turns[0].sampled)
    return {
        "effect_sys2": chances(run, walk, walk.attempt.contexts[0].sample, first_step),
        "effect_sys1": chances(run, walk, walk.reader.sample, None),
        "groups": table("samples number A before after", rows),
        "positive": len(rose[True]),
        "risen": sum(rose[True]),
        "negative": len(rose[False]),
        "fallen": rose[False].count(False),
        "again_here": int(sum(t.reward for t in walk.again if t.question_index == place)),
        "again": int(sum(t.reward for t in walk.again)),
        "once": int(sum(t.reward for t in walk.trajectories)),
        "all": len(walk.trajectories),
    }


def chances(run: Run, walk: Walk, sample: Sample, end: int | None) -> str:
    """The probabilities of a sample's first tokens, before the step and after it."""
    index = walk.index(sample)
    return columns(
        token=[run.chat.text([token]) for token in sampled(sample)[:end]],
        before=decimals(walk.before[index][:end].exp(), 2),
        after=decimals(walk.after[index][:end].exp(), 2),
    )


def fill(run: Run, walk: Walk) -> str:
    """The template with its slots filled, and with real minus signs."""
    page = TEMPLATE.read_text().format(
        config=run.config,
        walk=walk,
        trained=len(walk.trained),
        row_tokens=sum(sum(batch.lengths) for batch in walk.batches),
        loss=token_loss(run, walk),
        lr=run.optimizer.param_groups[0]["lr"],
        command=COMMAND,
        machine=common.provenance(),
        step_reward=statistics.mean(t.reward for t in walk.trajectories),
        **episode(run, walk),
        **credit(run, walk),
        **effect(run, walk),
    )
    return re.sub(r"(?<![\w-])-(?=\d)", "−", page)


def main(arguments: list[str], **additions) -> int:
    """Writes the page; `additions` are those of `build`."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--cache", default=".cache", help="where the toy's base model lies")
    options.add_argument("--out", type=Path, default=PAGE)
    given = options.parse_args(arguments)
    try:
        config = mars.MarsConfig(cache=given.cache)
        run = build(mars.METHOD, config, training=True, folder=given.out.parent, **additions)
        write_whole(given.out, fill(run, follow(run)).encode())
    except UserError as error:
        return fail(error)
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
