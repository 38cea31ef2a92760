"""The loop that all methods share: rollouts, credit, one update of the weights; evaluation; the
run's folder.

A method (rollout.Method) is handed in: nothing here knows a role's name. `train_step` is the
whole of a step; `update` and `prepare` are the next screen. Sums travel and there is one
division: every token brings a weight that is already divided by global counts, so ranks,
packing and micro-batches do not change the result.

Run by a method's file: python mars.py. Tests: pytest tests/test_train.py tests/test_mars.py
"""

import dataclasses
import sys
import time
from collections import Counter

import torch
import torch.distributed as dist
from tqdm import tqdm

import grpo
import trainer
import view
from config import UserError, fail, parse, parser, resolve
from plumbing import evaluation, files
from plumbing.build import Run, build
from plumbing.metrics import reduced, rollout_metrics, rollout_sums, share
from plumbing.records import record
from rollout import Method, Sample, Trajectory
from tasks.questions import Question

# ----------------------------------------------------------------------------------------- one step


def train_step(run: Run, step: int) -> tuple[dict, list[Trajectory]]:
    """One step: rollouts with their rewards, the method's credit, an update, new weights in the
    sampler.

    Returns the step's metrics and this rank's trajectories.
    """
    config = run.config
    start = time.perf_counter()
    trajectories = run.rollouts(
        questions_of(run, step),
        config.group,
        step=step,
        tools=run.tools,
        temperature=config.temperature,
    )
    rolled_out = time.perf_counter()
    # 0 unless an episode left a context open. New weights empty the pool, so it is counted here.
    pages_in_use = sum(sampler.pages_in_use for sampler in run.driver.samplers)
    graded = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    terms = run.method.credit(config, graded, step)
    numbers = update(run, terms, step)
    run.sampler.load_weights(trainer.unwrap(run.policy).model)
    trained = time.perf_counter()
    metrics = rollout_metrics(trajectories, run.method.roles, rolled_out - start)
    metrics |= numbers
    metrics["seconds_rollout"] = rolled_out - start
    metrics["seconds_train"] = trained - rolled_out
    metrics["pages_in_use"] = pages_in_use
    return metrics, trajectories


def questions_of(run: Run, step: int) -> list[tuple[int, Question]]:
    """This rank's questions of a step with their places in its batch.

    A rank gets whole questions, so that advantage groups need no communication. Across the end
    of an epoch a question can come twice. Draws are named by its id, so the second one gets an
    id of its own.
    """
    count = run.config.questions
    batch = [run.question(step * count + place) for place in range(count)]
    seen = Counter()
    for place, question in enumerate(batch):
        seen[question.id] += 1
        if seen[question.id] > 1:
            batch[place] = dataclasses.replace(question, id=f"{question.id}#{seen[question.id]}")
    first = count * run.rank // run.world
    end = count * (run.rank + 1) // run.world
    return list(enumerate(batch))[first:end]


def update(run: Run, terms: dict[str, list[Sample]], step: int) -> dict:
    """One optimizer step on L = Σ over the terms, or `inner_steps` of them on as many shares of
    the questions.
    """
    config = run.config
    objective = {
        "clip_low": config.clip_low,
        "clip_high": config.clip_high,
        "kl_beta": config.kl_beta,
        "temperature": config.temperature,
    }
    shares = []
    for inner in range(config.inner_steps):
        part = {
            role: [sample for sample in samples if sample.question % config.inner_steps == inner]
            for role, samples in terms.items()
        }
        shares.append(prepare(run, part))
    sums = Counter()  # partial sums of this rank
    norms = []  # equal on all ranks
    skipped = 0
    for inner, (samples, batches, references) in enumerate(shares):
        for parameters in run.optimizer.param_groups:
            parameters["lr"] = config.lr * min(1.0, (step + 1) / max(1, config.warmup))
        run.optimizer.zero_grad(set_to_none=True)
        # -> Policy.forward -> kernels.linear_grpo_loss -> grpo.grpo_loss
        stats = trainer.backward(run.policy, batches, references, **objective)
        norms.append(trainer.gradient_norm(run.policy, config.clip_grad))
        loss = sum(float(numbers["loss"]) for numbers in stats)
        total = reduced({"loss": loss})["loss"]
        if torch.isfinite(torch.tensor([norms[-1], total])).all():
            run.optimizer.step()
            run.skipped = 0
        else:
            skipped += 1
            skip(run, step, samples)
        sums["loss"] += loss
        for batch, numbers in zip(batches, stats):
            # Before the first optimizer step sampler and trainer hold the same weights: a gap
            # between their log-probs is then numerical.
            sums.update(batch_sums(run, samples, batch, numbers, mismatch=inner == 0))
    for name in ("tokens", "clipped", "kl", "drift", "drifted"):
        sums.setdefault(name, 0)
    for role in run.method.roles:
        sums.setdefault(f"{role}_entropy", 0)
        sums.setdefault(f"{role}_trained", 0)
    t = reduced(dict(sorted(sums.items())))
    metrics = {
        "loss": t["loss"] / config.inner_steps,
        "grad_norm": sum(norms) / len(norms),
        "clip_share": share(t["clipped"], t["tokens"]),
        "kl": share(t["kl"], t["tokens"]),
        "mismatch_kl": share(t["drift"], t["drifted"]),
        "trained_tokens": int(t["tokens"]),
        "skipped_steps": skipped,
    }
    for role in run.method.roles:
        trained = t[f"{role}_trained"]
        metrics[f"{role}_entropy"] = t[f"{role}_entropy"] / trained if trained else None
    return metrics


def batch_sums(run: Run, samples: list[Sample], batch, numbers: dict, *, mismatch: bool) -> dict:
    """What one micro-batch adds to the step's sums."""
    tokens = len(batch.target)
    sums = {
        "tokens": tokens,
        "clipped": float(numbers["clip_share"]) * tokens,
        "kl": float(numbers["kl"]) * tokens,
    }
    if mismatch:
        drift = numbers["logprob"] - batch.sampler_logprob  # [N]
        sums["drift"] = float((torch.expm1(drift) - drift).sum())
        sums["drifted"] = tokens
    for role in run.method.roles:
        owners = [index for index, sample in enumerate(samples) if sample.role == role]
        owned = torch.isin(batch.owner, torch.tensor(owners, device=batch.owner.device))  # [N]
        sums[f"{role}_entropy"] = float(numbers["entropy"][owned].sum())
        sums[f"{role}_trained"] = int(owned.sum())
    return sums


def prepare(run: Run, terms: dict[str, list[Sample]]) -> tuple[list[Sample], list, list]:
    """(samples, micro-batches of them, the reference's log-probs for each).

    Weights are divided by counts over all ranks. A sample of advantage 0 counts in the mean but
    has no gradient, so it is left out unless there is a KL term.
    """
    config = run.config
    counts = reduced({role: sum(s.copies for s in samples) for role, samples in terms.items()})
    kept = []
    weights = []
    for role, samples in terms.items():
        live = [s for s in samples if s.copies and (s.advantage or config.kl_beta)]
        masks = [torch.tensor(sample.mask) for sample in live]  # [T] each
        kept += live
        for sample, weight in zip(live, grpo.token_weights(masks, int(counts[role]))):
            weights.append(weight * sample.copies)
    batches = trainer.micro_batches(kept, weights, config.micro_tokens, run.device)
    # Every rank needs as many, at least one: the collectives of `backward` pair up.
    number = torch.tensor(max(1, len(batches)), device=run.device)
    if run.world > 1:
        dist.all_reduce(number, dist.ReduceOp.MAX)
    while len(batches) < number:
        batches.append(trainer.make_micro_batch([], [], [], run.device))
    if config.importance_cap:
        # The trainer's log-probs become the old ones, and the gap to the sampler's enters the
        # weight.
        for batch in batches:
            batch.old_logprob = trainer.logprob(run.policy, batch, config.temperature)
            ratio = torch.exp(batch.old_logprob - batch.sampler_logprob)
            batch.weight = batch.weight * ratio.clamp(max=config.importance_cap)
    references = [None] * len(batches)
    if run.reference:
        references = [trainer.logprob(run.reference, b, config.temperature) for b in batches]
    return kept, batches, references


def skip(run: Run, step: int, samples: list[Sample]) -> None:
    """A step whose loss or gradient is not finite is left out and reported; the third in a row
    stops the run.
    """
    run.skipped += 1
    names = ", ".join(f"{s.role} {s.question}.{s.attempt}" for s in samples if s.advantage)
    print(
        f"step {step}: loss or gradient is not finite, step skipped; samples (role "
        f"question.attempt): {names}",
        flush=True,
    )
    if run.skipped == 3:
        raise UserError(
            "three steps in a row without a finite gradient; the last state on disk is whole, "
            "and the "
            "run's rollouts show what was sampled"
        )


# ------------------------------------------------------------------------------------------ the run


def train(run: Run) -> None:
    """The whole run: steps, evaluations, states on disk, pictures."""
    config = run.config
    first = prepare_folder(run)
    quiet = run.rank > 0 or not sys.stderr.isatty()
    bar = tqdm(range(first, config.steps), initial=first, total=config.steps, disable=quiet)
    for step in bar:
        scores = {}
        if step % config.eval_every == 0:
            scores = evaluate(run, step)
        metrics, trajectories = train_step(run, step)
        if step == config.steps - 1:
            # No later line will come, so the last one carries the end result.
            scores = {f"{key}_before": value for key, value in scores.items()}
            scores |= evaluate(run, config.steps)
        metrics = {"step": step, **metrics, **scores}
        write(run, metrics, [record(t, run.chat, step, "train") for t in trajectories])
        report(run, bar, metrics)
        stop_if_blind(run, metrics)
        if (step + 1) % config.save_every == 0 or step == config.steps - 1:
            trainer.save(run.folder, step + 1, run.policy, run.optimizer, run.tokenizer)
    if run.rank == 0:
        summary(run)


def report(run: Run, bar: tqdm, metrics: dict) -> None:
    """One line a step, or the end of the progress bar."""
    if run.rank:
        return
    entropies = [metrics[f"{role}_entropy"] for role in run.method.roles]
    shown = "/".join("-" if value is None else f"{value:.2f}" for value in entropies)
    line = (
        f"reward {metrics['reward']:.3f}  calls {metrics['calls_per_question']:.2f}  "
        f"malformed {metrics['malformed_share']:.3f}  entropy {shown}  "
        f"{metrics['seconds_rollout']:.1f}+{metrics['seconds_train']:.1f} s"
    )
    if metrics["judge_failures"]:
        line += f"  not judged {metrics['judge_failures']}"
    if bar.disable:
        print(f"step {metrics['step']}/{run.config.steps}  {line}", flush=True)
    else:
        bar.set_postfix_str(line)


def stop_if_blind(run: Run, metrics: dict) -> None:
    """UserError when too many tool calls or judgements of a step, or of its evaluation, failed."""
    limit = run.config.max_tool_error_share
    for kind, name in (("tool calls", "tool_error_share"), ("judgements", "judge_failure_share")):
        failed = max(metrics[name], metrics.get(f"eval_{name}", 0.0))
        if failed > limit:
            raise UserError(
                f"{failed:.0%} of the {kind} of step {metrics['step']} failed, more than "
                f"--max_tool_error_share; "
                "see the run's rollouts for the reasons, then --resume"
            )


def summary(run: Run) -> None:
    """The last lines: held-out accuracy before and after, and where to look."""
    ends = [m for m in files.read_lines(run.folder / "metrics.jsonl") if "eval_accuracy" in m]
    names = {"accuracy": f"temperature {run.config.temperature:g}", "greedy": "greedy"}
    for name, label in names.items():
        if not ends or ends[-1].get("eval_step") != run.config.steps:
            break  # a damaged metrics.jsonl: nothing is said rather than something wrong
        before = ends[0].get(f"eval_{name}_before", ends[0][f"eval_{name}"])
        after = ends[-1][f"eval_{name}"]
        print(
            f"held-out accuracy, {label}: {before:.3f} before, {after:.3f} after "
            f"{run.config.steps} steps"
        )
    print(f"{'curves':<14}{view.curves(run.folder)}")
    print(f"{'trajectories':<14}{view.page(run.folder)}")
    print(f"{'checkpoint':<14}{run.folder / 'checkpoint'}")


def evaluate(run: Run, updates: int) -> dict:
    """Held-out accuracy of the policy after `updates` steps, sampled and greedy; a few
    trajectories are recorded.
    """
    config = run.config
    start = time.perf_counter()
    batch = list(enumerate(run.eval_questions))[run.rank :: run.world]
    scores = {}
    failed = []
    unjudged = []
    draws = {"accuracy": (config.temperature, config.top_p), "greedy": (0.0, 1.0)}
    for name, (temperature, top_p) in draws.items():
        trajectories = run.rollouts(
            batch, 1, step="eval", tools=run.eval_tools, temperature=temperature, top_p=top_p
        )
        sums = rollout_sums(trajectories, run.method.roles)
        # An answer that nobody could grade does not count as right; how many there were stands
        # beside it.
        scores[f"eval_{name}"] = share(sums["reward"], sums["trajectories"])
        failed.append(share(sums["failed"], sums["calls"]))
        unjudged.append(sums["trajectories"] - sums["graded"])
        if name == "accuracy":
            write(run, None, [record(t, run.chat, updates, "eval") for t in trajectories[:8]])
    if run.rank == 0:
        missing = f"; {unjudged[0]:.0f} answers could not be judged" if unjudged[0] else ""
        tqdm.write(
            f"after {updates} steps: held-out accuracy {scores['eval_accuracy']:.3f} at "
            f"temperature "
            f"{config.temperature:g}, {scores['eval_greedy']:.3f} greedy "
            f"({len(run.eval_questions)} questions{missing})"
        )
    scores["eval_step"] = updates
    scores["eval_tool_error_share"] = max(failed)
    scores["eval_judge_failures"] = int(max(unjudged))
    scores["eval_judge_failure_share"] = max(unjudged) / len(run.eval_questions)
    scores["seconds_eval"] = time.perf_counter() - start
    return scores


def write(run: Run, metrics: dict | None, records: list[dict]) -> None:
    """Appends to metrics.jsonl and rollouts/step_N.jsonl; rank 0 writes for all."""
    if run.world > 1:
        gathered = [None] * run.world if run.rank == 0 else None
        dist.gather_object(records, gathered)
        records = [one for part in gathered or [] for one in part]
    if run.rank:
        return
    if records:
        name = f"step_{records[0]['step']}.jsonl"
        files.append_lines(run.folder / "rollouts" / name, records)
    if metrics is not None:
        files.append_lines(run.folder / "metrics.jsonl", [metrics])


def prepare_folder(run: Run) -> int:
    """Fills the run's folder, or takes up the newest whole state in it; returns the first step
    to do.
    """
    config = run.config
    state = trainer.newest(run.folder) if config.resume else None
    first = state[0] if state else 0
    if run.rank == 0 and not (state and first >= config.steps):
        rollouts = run.folder / "rollouts"
        rollouts.mkdir(parents=True, exist_ok=True)
        files.write_json(run.folder / "config.json", dataclasses.asdict(config))
        files.write_json(
            run.folder / "method.json", {"name": run.method.name, "roles": run.method.roles}
        )
        # What steps that will be done again have written is taken back.
        lines = []
        if (run.folder / "metrics.jsonl").exists():
            lines = files.read_lines(run.folder / "metrics.jsonl")
        files.write_whole(run.folder / "metrics.jsonl", b"")
        files.append_lines(
            run.folder / "metrics.jsonl", [m for m in lines if m.get("step", first) < first]
        )
        for file in rollouts.glob("step_*.jsonl"):
            number = file.stem.removeprefix("step_")
            if number.isdecimal() and int(number) >= first:
                file.unlink()
    if run.world > 1:
        dist.barrier()
    return first


# --------------------------------------------------------------------------------- the command line


def main(method: Method, arguments: list[str], description: str, **additions) -> int:
    """`[options]` trains, `eval CKPT …` and `ask CKPT "question"` use what was trained; returns
    the exit code.

    `additions`: more_tools, for build; or fields of Run to replace, such as question,
    eval_questions and grade.
    """
    command = arguments[0] if arguments[:1] in (["eval"], ["ask"]) else "train"
    try:
        if command != "train":
            return evaluation.main(method, arguments)
        given = parse(parser(method.config, description), arguments)
        config = resolve(method.config, given, presets=method.presets)
        more_tools = additions.pop("more_tools", ())
        run = build(method, config, training=True, more_tools=more_tools)
        for name, value in additions.items():
            setattr(run, name, value)
        train(run)
        return 0
    except (
        UserError,
        FloatingPointError,
    ) as error:  # the second: the sampler met logits that are no numbers
        return fail(error)
    except KeyboardInterrupt:
        advice = "; go on with --resume and the run's --name" if command == "train" else ""
        fail(f"interrupted{advice}")
        return 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
