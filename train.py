"""The loop that all methods share: rollouts, credit, one update of the weights.

A method (rollout.Method) is handed in: nothing here knows a role's name. `train_step` is the whole
of a step; `update` and `prepare` are the next screen. Each token's weight is divided by counts over
all ranks beforehand, so losses and gradients are only summed: ranks, packing and micro-batches do
not change the result.

Run by a method's file: python mars.py. Tests: pytest tests/test_credit.py tests/test_mars.py
"""

import dataclasses
import itertools
import math
import sys
import time
from collections import Counter

import torch
import torch.distributed as dist
from tqdm import tqdm

import grpo
import trainer
from config import UserError, fail, parse, parser, resolve
from plumbing import evaluation, logbook
from plumbing.build import build
from plumbing.metrics import (
    batch_sums,
    flat_questions,
    method_shares,
    reduced,
    rollout_metrics,
    rollout_sums,
    share,
    update_metrics,
)
from plumbing.records import record
from plumbing.run import Run
from rollout import Method, Sample, Trajectory
from tasks.questions import Question

# ----------------------------------------------------------------------------------------- one step


def all_attempts(run: Run, step: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """A step's rollouts: G attempts at each of its questions, and those that --refill replaced."""
    trajectories = attempts(run, step, questions_of(run, step))
    replaced = refill(run, step, trajectories)
    return trajectories, replaced


def train_step(run: Run, step: int, rollouts=all_attempts) -> tuple[dict, list[Trajectory]]:
    """One step: rollouts with rewards, credit, an update, new weights in the sampler.

    Returns the step's metrics and this rank's trajectories. `rollouts`: for a method whose batches
    are not G attempts at each question.
    """
    config = run.config
    start = time.perf_counter()
    trajectories, replaced = rollouts(run, step)
    seconds_rollout = time.perf_counter() - start
    metrics = rollout_metrics(trajectories, replaced, run.method, seconds_rollout)
    # KV pages: 0 unless an episode left a context open. The sync below empties the pool.
    metrics["pages_in_use"] = sum(sampler.pages_in_use for sampler in run.driver.samplers)

    start = time.perf_counter()
    graded = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    terms = run.method.credit(config, graded, step)
    metrics |= update(run, terms, step)
    start_sync = time.perf_counter()
    run.sampler.load_weights(trainer.unwrap(run.policy).model)
    metrics["seconds_sync"] = time.perf_counter() - start_sync
    metrics["seconds_rollout"] = seconds_rollout
    metrics["seconds_train"] = time.perf_counter() - start
    return metrics, replaced + trajectories


def attempts(run: Run, step: int, batch: list[tuple[int, Question]]) -> list[Trajectory]:
    """G trajectories for each (place, question)."""
    return run.rollouts(
        batch,
        run.config.group,
        step=step,
        tools=run.tools,
        temperature=run.config.temperature,
    )


def refill(run: Run, step: int, trajectories: list[Trajectory]) -> list[Trajectory]:
    """Bounded dynamic sampling (DAPO): other questions for those that teach nothing.

    Where all G attempts earned the same, they leave `trajectories` for attempts at another
    question, --refill times at most. Returns those that left. A rank refills its own places, so
    nothing is communicated.
    """
    left = []
    for again in range(1, run.config.refill + 1):
        ids = flat_questions(trajectories)
        if not ids:
            break
        flat = [t for t in trajectories if t.question.id in ids]
        places = {t.question_index for t in flat}
        batch = [asked for asked in questions_of(run, step, again) if asked[0] in places]
        kept = [t for t in trajectories if t.question_index not in places]
        kept += attempts(run, step, batch)
        trajectories[:] = sorted(kept, key=lambda t: (t.question_index, t.attempt))
        left += flat
    return left


def questions_of(run: Run, step: int, again: int = 0) -> list[tuple[int, Question]]:
    """This rank's questions of a step with their places in its batch.

    A rank gets whole questions, so that advantage groups need no communication. Across the end of
    an epoch a question can come twice. Draws are named by its id, so the second one gets an id of
    its own. With `again` it is what the `again`-th refill asks at each place.
    """
    count = run.config.questions
    batch = [run.question(step * count + place) for place in range(count)]
    seen = set()
    if again:
        seen = {question.id for question in batch}
        batch = spare_questions(run, step, again, seen)
    taken = seen | {question.id for question in batch}
    for place, question in enumerate(batch):
        name = question.id
        if name in seen:
            name = next(f"{name}#{n}" for n in itertools.count(2) if f"{name}#{n}" not in taken)
            batch[place] = dataclasses.replace(question, id=name)
        seen.add(name)
        taken.add(name)
    first = count * run.rank // run.ranks
    end = count * (run.rank + 1) // run.ranks
    return list(enumerate(batch))[first:end]


def spare_questions(run: Run, step: int, again: int, asked: set[str]) -> list[Question]:
    """What the `again`-th refill of a step asks: neither `asked` nor spared before, if possible.

    They stand far ahead in the stream, in an order of their own, so that what a step asks does not
    depend on what earlier steps have used up. In a data set that is too small questions repeat.
    """
    wanted = again * run.config.questions
    first = 2**60 + step * 2**20
    found = {}
    for index in range(first, first + 4 * wanted):
        question = run.question(index)
        if question.id not in asked:
            found.setdefault(question.id, question)
        if len(found) == wanted:
            break
    spares = list(found.values())
    index = first
    while len(spares) < wanted:
        spares.append(run.question(index))
        index += 1
    spares = spares[-run.config.questions :]
    return [dataclasses.replace(q, id=f"{q.id}, refill {again}") for q in spares]


def update(run: Run, terms: dict[str, list[Sample]], step: int) -> dict:
    """One optimizer step on L = Σ over the terms; with `inner_steps` several, on parts of them."""
    config = run.config
    objective = {
        "clip_low": config.clip_low,
        "clip_high": config.clip_high,
        "kl_beta": config.kl_beta,
        "temperature": config.temperature,
    }
    # All parts are prepared first: the old log-probs are those of the weights that sampled.
    parts = []
    for inner in range(config.inner_steps):
        part = {
            term: [
                sample for sample in samples if sample.question_index % config.inner_steps == inner
            ]
            for term, samples in terms.items()
        }
        parts.append(prepare(run, part))
    decay_steps = config.steps if config.decay else None
    for parameters in run.optimizer.param_groups:
        parameters["lr"] = config.lr * trainer.schedule(step, config.warmup, decay_steps)
    sums = Counter()  # of this rank
    norms = []  # equal on all ranks
    skipped = 0
    for inner, (samples, batches, references) in enumerate(parts):
        run.optimizer.zero_grad(set_to_none=True)
        # -> Policy.forward -> kernels.linear_grpo_loss -> grpo.grpo_loss
        stats = trainer.backward(run.policy, batches, references, **objective)
        if inner == 0 and config.server:
            logbook.stop_if_mismatched(run, batches, stats, samples)
        norms.append(trainer.gradient_norm(run.policy, config.clip_grad))
        loss = sum(float(numbers["loss"]) for numbers in stats)
        if math.isfinite(norms[-1]) and math.isfinite(reduced({"loss": loss})["loss"]):
            run.optimizer.step()
            run.skipped = 0
        else:
            skipped += 1
            skip(run, step, samples)
        for batch, numbers in zip(batches, stats):
            # Before the first optimizer step sampler and trainer hold the same weights, so that a
            # gap between their log-probs is numerical.
            sums.update(batch_sums(batch, numbers, samples, run.method.roles, mismatch=inner == 0))
    metrics = update_metrics(sums, run.method.roles)
    # Each part's loss is a mean of its own; the step's is the mean of the parts'.
    metrics["loss"] /= config.inner_steps
    metrics["grad_norm"] = sum(norms) / len(norms)
    metrics["skipped_steps"] = skipped
    return metrics


def prepare(run: Run, terms: dict[str, list[Sample]]) -> tuple[list[Sample], list, list]:
    """This rank's trained samples, their micro-batches, and the reference's log-probs of each.

    Weights are divided by counts over all ranks. A sample of advantage 0 counts in the mean but has
    no gradient, so it is left out unless there is a KL term.
    """
    config = run.config
    per_token = config.loss_mean == "token"
    counts = dict.fromkeys(terms, 0)
    for term, samples in terms.items():
        for sample in samples:
            size = sum(sample.mask) if per_token else 1
            counts[term] += sample.copies * sample.weight * size
    counts = reduced(counts)
    kept = []
    weights = []
    for term, samples in terms.items():
        if not config.kl_beta:
            samples = [sample for sample in samples if sample.advantage]
        samples = [sample for sample in samples if sample.copies]
        masks = [torch.tensor(sample.mask) for sample in samples]  # [T] each
        kept += samples
        shares = grpo.token_weights(masks, counts[term], mean=config.loss_mean)
        for sample, share_of_copy in zip(samples, shares):
            weights.append(share_of_copy * sample.copies * sample.weight)
    batches = trainer.micro_batches(
        kept,
        weights,
        config.micro_tokens,
        run.device,
        pack=trainer.unwrap(run.policy).packs,
        share_prefixes=config.share_prefixes,
    )
    # Every rank needs as many, at least one: the collectives of `backward` pair up.
    number = torch.tensor(max(1, len(batches)), device=run.device)
    if run.ranks > 1:
        dist.all_reduce(number, dist.ReduceOp.MAX)
    while len(batches) < number:
        batches.append(trainer.make_micro_batch([], [], [], run.device))
    importance = config.correction()
    if importance != "off":
        # The trainer's log-probs become the old ones; the gap to the sampler's enters the weight.
        for batch in batches:
            batch.old_logprob = trainer.logprob(run.policy, batch, config.temperature)
            gap = batch.old_logprob - batch.behaviour_logprob
            owner = batch.owner if importance == "sequence" else None
            batch.weight = batch.weight * grpo.importance_weights(gap, config.importance_cap, owner)
    references = [None] * len(batches)
    if run.reference:
        references = [trainer.logprob(run.reference, b, config.temperature) for b in batches]
    return kept, batches, references


def skip(run: Run, step: int, samples: list[Sample]) -> None:
    """Counts and reports an update that is left out; the third in a row stops the run."""
    run.skipped += 1
    names = ", ".join(f"{s.role} {s.question_index}.{s.attempt}" for s in samples if s.advantage)
    print(
        f"step {step}: loss or gradient is not finite, step skipped; samples (role "
        f"question.attempt): {names}",
        flush=True,
    )
    if run.skipped == 3:
        raise UserError(
            "three steps in a row without a finite gradient; the last state on disk is whole, and "
            "the run's rollouts show what was sampled"
        )


# ------------------------------------------------------------------------------------------ the run


def train(run: Run, one_step=train_step) -> None:
    """The whole run: steps, evaluations, states on disk, pictures.

    `one_step`: for a method whose batches are not G attempts at each question.
    """
    config = run.config
    first = logbook.open_folder(run)
    quiet = run.rank > 0 or not sys.stderr.isatty()
    bar = tqdm(range(first, config.steps), initial=first, total=config.steps, disable=quiet)
    for step in bar:
        scores = {}
        if step % config.eval_every == 0:
            scores = evaluate(run, step)
        metrics, trajectories = one_step(run, step)
        if step == config.steps - 1:
            # No later line will come, so the last one carries the end result.
            scores = {f"{key}_before": value for key, value in scores.items()}
            scores |= evaluate(run, config.steps)
        metrics = {"step": step, **metrics, **scores}
        records = [record(trajectory, run.chat, step, "train") for trajectory in trajectories]
        logbook.write(run, records, metrics)
        logbook.report(run, bar, metrics)
        logbook.warn(run)
        logbook.stop_if_blind(run, metrics)
        if (step + 1) % config.save_every == 0 or step == config.steps - 1:
            trainer.save(run.folder, step + 1, run.policy, run.optimizer, run.tokenizer)
    logbook.summary(run)


def evaluate(run: Run, updates: int) -> dict:
    """Held-out accuracy after `updates` steps, sampled and greedy; records a few trajectories."""
    config = run.config
    start = time.perf_counter()
    batch = list(enumerate(run.eval_questions))[run.rank :: run.ranks]
    draws = {"accuracy": (config.temperature, config.top_p), "greedy": (0.0, 1.0)}
    scores = {"eval_step": updates}
    worst = Counter()  # of the two evaluations
    for name, (temperature, top_p) in draws.items():
        trajectories = run.rollouts(
            batch, 1, step="eval", tools=run.eval_tools, temperature=temperature, top_p=top_p
        )
        sums = rollout_sums(trajectories, run.method.roles)
        # An answer that nobody could grade is not right; how many there were stands beside it.
        scores[f"eval_{name}"] = share(sums["reward"], sums["trajectories"])
        troubles = {
            "eval_tool_error_share": share(sums["failed"], sums["calls"]),
            "eval_judge_failures": int(sums["unjudged"]),
            "eval_judge_failure_share": share(sums["unjudged"], sums["answered"]),
            "eval_lost_share": share(sums["lost"], sums["trajectories"]),
        }
        for key, value in troubles.items():
            worst[key] = max(worst[key], value)
        if name == "accuracy":
            shares = method_shares(trajectories, run.method)
            scores |= {f"eval_{key}": value for key, value in shares.items()}
            logbook.write(run, [record(t, run.chat, updates, "eval") for t in trajectories[:8]])
    scores |= worst
    scores["seconds_eval"] = time.perf_counter() - start
    logbook.report_scores(run, scores)
    return scores


# --------------------------------------------------------------------------------- the command line


def main(
    method: Method, arguments: list[str], description: str, *, one_step=train_step, **additions
) -> int:
    """Trains, or evaluates or asks what was trained; returns the exit code.

    `[options]` trains, `eval CKPT …` and `ask CKPT "question"` use a checkpoint. `additions` are
    those of `build`: tools, questions, a grader, a base model or a language of one's own.
    """
    command = "train"
    if arguments[:1] in (["eval"], ["ask"]):
        command = arguments[0]
    try:
        if command != "train":
            return evaluation.main(method, arguments, **additions)
        given = parse(parser(method.config, description), arguments)
        config = resolve(method.config, given, presets=method.presets)
        train(build(method, config, training=True, **additions), one_step)
        return 0
    # FloatingPointError: the sampler met logits that are no numbers.
    except (UserError, FloatingPointError) as error:
        return fail(error)
    except KeyboardInterrupt:
        advice = "; go on with --resume and the run's --name" if command == "train" else ""
        fail(f"interrupted{advice}")
        return 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
