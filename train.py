"""The loop that all methods share: rollouts, credit, one update of the weights.

A method (rollout.Method) is handed in: nothing here knows a role's name. `train_step` is the whole
of a step; read `update` and `prepare` after it. Token weights already divide by counts over all
ranks, so losses and gradients are only summed. Therefore the number of ranks, the packing and the
micro-batches do not change the result.

Run by a method's file: python mars.py. Tests: pytest tests/test_credit.py tests/test_mars.py
"""

import dataclasses
import errno
import io
import itertools
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch
from tqdm import tqdm

import grpo
import processes
import trainer
from config import UserError, discard_output, fail, parse, parser, resolve
from plumbing import evaluation, logbook
from plumbing.metrics import (
    differing,
    failures,
    method_metrics,
    owned_by,
    ratio,
    right_by_kind,
    rollout_metrics,
    rollout_sums,
    update_metrics,
)
from plumbing.sharing import play_shared
from plumbing.start import Run, build, take_options
from processes import sum_over_ranks
from rollout import Method, Sample, Trajectory, play_batch
from tasks.questions import Question
from tools import web

MAX_NORM = 1.0  # of the gradient
# A state is saved before each evaluation, and when the newest state on disk is this old. If the
# last evaluation fails, the newest state lacks at most two steps.
SAVE_EVERY = 10  # in steps
SAVE_SECONDS = 3600

# ----------------------------------------------------------------------------------------- one step


def train_step(run: Run, step: int) -> tuple[dict, list[Trajectory]]:
    """One step: rollouts with rewards, credit, an update, new weights in the sampler.

    Returns the step's metrics and this rank's trajectories.
    """
    config = run.config
    start = time.perf_counter()
    play = run.method.play_step or play_groups
    resampled_before = run.resampled
    trajectories = play(run, step)
    seconds_rollout = time.perf_counter() - start
    metrics = rollout_metrics(trajectories, run.method, seconds_rollout)
    # Pages are counted before the pool is emptied: 0 unless an episode left a context open.
    metrics["pages_in_use"] = sum(sampler.pages_in_use for sampler in run.driver.samplers)
    check_rollouts(run, step, metrics, trajectories)

    start = time.perf_counter()
    graded = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    if config.resample:
        metrics["resampled"] = run.resampled - resampled_before
        graded = first_groups(graded, config.questions)
    terms = run.method.credit(config, graded, step)
    # On a GPU the KV pool and the update do not fit together. On every device the cached pages of
    # frozen roles must go too: a resumed run begins without them and must compute the same bits.
    for sampler in run.driver.samplers:
        sampler.lend_pool()
    metrics |= update(run, terms, step)
    run.optimizer.zero_grad(set_to_none=True)  # makes room for the pools of the next rollouts
    start_sync = time.perf_counter()
    run.sampler.load_weights(trainer.unwrap(run.policy).model)
    metrics["seconds_sync"] = time.perf_counter() - start_sync
    metrics["seconds_rollout"] = seconds_rollout
    metrics["seconds_train"] = time.perf_counter() - start  # the sync included
    return metrics, trajectories


def play_groups(run: Run, step: int) -> list[Trajectory]:
    """G trajectories for each of this rank's questions.

    With --resample further questions are played until enough groups differ in reward (DAPO): as
    many as fill the gap if their groups differ as often as those before.
    """
    config = run.config
    most = config.questions * (1 + config.resample)
    trajectories = []
    asked, count = 0, config.questions
    while count:
        shares = questions_of(run, step, asked, count)
        # With play_shared the last bits differ from run to run. On GPUs they do anyway.
        if run.ranks > 1 and run.device.type == "cuda" and not config.server:
            trajectories += play_shared(run, shares, config.group, run.tools, step=step)
        else:
            trajectories += play_batch(run, shares[run.rank], config.group, run.tools, step=step)
        asked += count
        useful = sum_over_ranks(differing(trajectories)).total()
        missing = max(0, config.questions - useful)
        count = min(math.ceil(missing * asked / max(1, useful)), most - asked)
    run.resampled += asked - config.questions
    return trajectories


def first_groups(graded: list[Trajectory], count: int) -> list[Trajectory]:
    """This rank's part of the first `count` groups that differ in reward, numbered from 0."""
    indices = sorted(+sum_over_ranks(differing(graded)))  # + drops the groups that do not differ
    places = {index: place for place, index in enumerate(indices[:count])}
    part = [trajectory for trajectory in graded if trajectory.question_index in places]
    for trajectory in part:
        for sample in trajectory.samples():
            sample.question_index = places[sample.question_index]
    return part


def questions_of(
    run: Run, step: int, first: int = 0, count: int | None = None
) -> list[list[tuple[int, Question]]]:
    """Each rank's (index in the step, question) pairs of `count` questions of a step from `first`.

    A rank gets whole questions, so that advantage groups need no communication. At the end of an
    epoch a question can come twice in a step. Its draws depend on its id, so the second time it
    gets another id.
    """
    count = run.config.questions if count is None else count
    batch = []
    times = Counter()
    for index in range(first + count):  # `times` needs the earlier questions too
        question = run.question(step * run.config.questions + run.resampled + index)
        times[question.id] += 1
        if times[question.id] > 1:
            question = dataclasses.replace(question, id=f"{question.id}#{times[question.id]}")
        batch.append((index, question))
    bounds = [first + count * rank // run.ranks for rank in range(run.ranks + 1)]
    return [batch[begin:end] for begin, end in itertools.pairwise(bounds)]


def check_rollouts(run: Run, step: int, metrics: dict, trajectories: list[Trajectory]) -> None:
    """UserError if tools, judges or servers failed too often. The step is not trained on then.

    Its rollouts, which have the reasons, and the state before the step are written first.
    """
    try:
        logbook.check_failure_rate(metrics, f"step {step}")
    except UserError:
        logbook.write(run, trajectories, step, "train", {"step": step, **metrics})
        if step:
            trainer.save(run.folder, step, run.policy, run.optimizer, run.tokenizer)
        raise


def update(run: Run, terms: dict[str, list[Sample]], step: int) -> dict:
    """`inner_steps` optimizer steps on the sum of the terms. Each takes a part of the questions."""
    config = run.config
    objective = {
        "clip_low": config.clip,
        "clip_high": config.clip,
        "kl_beta": config.kl_beta,
        "temperature": config.temperature,
    }
    # All parts are prepared before any update: old log-probs are of the weights that sampled.
    parts = []
    for inner in range(config.inner_steps):
        part = {
            term: [s for s in samples if s.question_index % config.inner_steps == inner]
            for term, samples in terms.items()
        }
        parts.append(prepare(run, part))
    # check_mismatch compares sampler and trainer in the first part, so empty parts come last.
    sizes = sum_over_ranks({inner: len(samples) for inner, (samples, _) in enumerate(parts)})
    order = sorted(range(len(parts)), key=lambda inner: sizes[inner] == 0)
    parts = [parts[inner] for inner in order]
    decay_steps = config.steps if config.decay else None
    for param_group in run.optimizer.param_groups:
        param_group["lr"] = config.lr * trainer.schedule(step, config.warmup, decay_steps)
    outputs = []  # of this rank: (micro-batch, its stats, the samples of its part)
    norms = []  # equal on all ranks
    skipped = 0
    for inner, (samples, batches) in enumerate(parts):
        run.optimizer.zero_grad(set_to_none=True)
        # -> Policy.forward -> kernels.linear_grpo_loss -> grpo.grpo_loss
        stats = trainer.backward(run.policy, batches, **objective)
        if inner == 0:
            mismatch_kl = check_mismatch(run, batches, stats, samples)
        norms.append(trainer.clip_gradient(run.policy, MAX_NORM))
        # Loss and norm are over all ranks, so that all ranks skip the update or none does.
        loss = sum(float(numbers["loss"]) for numbers in stats)
        if math.isfinite(norms[-1]) and math.isfinite(sum_over_ranks({"loss": loss})["loss"]):
            if norms[-1]:  # With a gradient of 0 only momentum would move the weights.
                run.optimizer.step()
            run.skipped = 0
        else:
            skipped += 1
            skip(run, step)
        outputs += [(batch, numbers, samples) for batch, numbers in zip(batches, stats)]
    metrics = update_metrics(outputs, run.method.roles) | {"mismatch_kl": mismatch_kl}
    metrics["loss"] /= config.inner_steps  # from the sum over the parts to their mean
    metrics["grad_norm"] = sum(norms) / len(norms)
    metrics["skipped_steps"] = skipped
    return metrics


def prepare(
    run: Run, terms: dict[str, list[Sample]]
) -> tuple[list[Sample], list[trainer.MicroBatch]]:
    """The samples that this rank trains on and their micro-batches.

    Weights are divided by counts over all ranks. A sample of advantage 0 counts in the mean but has
    no gradient, so it is left out unless there is a KL term.
    """
    config = run.config
    by_token = config.loss_mean == "token"
    counts = {
        term: sum(s.loss_weight * (sum(s.mask) if by_token else 1) for s in members)
        for term, members in terms.items()
    }
    counts = sum_over_ranks(counts)
    samples = []
    weights = []
    for term, members in terms.items():
        members = [s for s in members if s.loss_weight and (s.advantage or config.kl_beta)]
        masks = [torch.tensor(sample.mask) for sample in members]  # [T] each
        loss_weights = [sample.loss_weight for sample in members]
        samples += members
        weights += grpo.token_weights(
            masks, counts[term], loss_weights=loss_weights, mean=config.loss_mean
        )
    pack = trainer.unwrap(run.policy).can_pack
    samples, weights = trainer.even_out(samples, weights, pack=pack)
    batches = trainer.micro_batches(samples, weights, config.micro_tokens, run.device, pack=pack)
    # `backward` is collective: every rank needs the same number of micro-batches, at least one.
    lengths = sum_over_ranks({run.rank: len(batches)}).values()
    while len(batches) < max(1, *lengths):
        batches.append(trainer.make_micro_batch([], [], [], run.device))
    importance = config.correction()
    if importance != "off":
        # The trainer's log-probs become the old ones. Weights make up for the sampler's gap.
        for batch in batches:
            batch.old_logprob = trainer.logprob(run.policy, batch, config.temperature)
            gap = batch.old_logprob - batch.behaviour_logprob
            owner = batch.owner if importance == "sequence" else None
            batch.weight = batch.weight * grpo.importance_weights(gap, config.importance_cap, owner)
    if run.reference:
        for batch in batches:
            batch.ref_logprob = trainer.logprob(run.reference, batch, config.temperature)
    return samples, batches


def check_mismatch(run: Run, batches: list, stats: list[dict], samples: list[Sample]) -> float:
    """Returns mismatch_kl. UserError if the sampler's distribution is not the one that is trained.

    The first part of a step is scored before the optimizer moves, so sampler and trainer should
    hold the same weights. The owners in `batches` are indices into `samples`. Each server is
    measured separately. The KL is estimated by k3 as a mean over the part's tokens, including those
    with an importance weight of 0. It is 0 if the step trains nothing.
    """
    gaps = Counter()
    counts = Counter()
    correction = run.config.correction() != "off"  # then old_logprob is the trainer's
    for server in dict.fromkeys(sample.server for sample in samples):
        own = [index for index, sample in enumerate(samples) if sample.server == server]
        for batch, numbers in zip(batches, stats):
            logprob = batch.old_logprob if correction else numbers["logprob"]
            gap = (logprob - batch.behaviour_logprob)[owned_by(batch, own)]
            gaps[server] += float((torch.expm1(gap) - gap).sum())
            counts[server] += len(gap)
    gaps = sum_over_ranks(gaps)
    counts = sum_over_ranks(counts)
    # Rounding alone gives less than 1e-12 in fp32, and 1e-4 to 1e-3 if either side uses bf16.
    limit = run.config.max_mismatch_kl or (0.01 if run.bf16 else 1e-6)
    for server, gap in gaps.items():
        kl = ratio(gap, counts[server])
        if not kl <= limit:  # also if it is NaN
            advice = "use another model, or report this: sampler and trainer compute it differently"
            if server:
                advice = (
                    "likely its log-probs leave the temperature out (vLLM: --logprobs-mode "
                    "processed_logprobs), it cuts the distribution (--generation-config vllm), it "
                    "holds other weights or another vocabulary, or its dtype is coarser"
                )
            raise UserError(
                f"{server or 'the sampler'} does not sample what is trained: mismatch_kl {kl:.2g} "
                f"in the first batch after new weights, above --max_mismatch_kl {limit:g}; {advice}"
            )
    return ratio(gaps.total(), counts.total())


def skip(run: Run, step: int) -> None:
    """Counts and reports an update that is left out; the third in a row stops the run."""
    run.skipped += 1
    logbook.print_line(run, f"step {step}: loss or gradient is not finite, update skipped")
    if run.skipped == 3:
        raise UserError(
            "three updates in a row without a finite loss and gradient: begin a new run with a "
            "lower --lr; states on disk are whole"
        )


# ------------------------------------------------------------------------------------------ the run


def train(run: Run, sigterms: list) -> int:
    """The whole run: steps, evaluations, states on disk, pictures; returns the exit code.

    `sigterms` has an entry for each SIGTERM of this rank. After a SIGTERM on any rank the run saves
    its state at the end of the step and returns 75 (EX_TEMPFAIL), unless it was the last step. A
    second SIGTERM changes nothing, because Slurm and torchrun may both send one.
    """
    config = run.config
    first = logbook.open_folder(run)
    quiet = run.rank > 0 or not sys.stderr.isatty()
    web.METER.begin(config.max_calls, run.ranks)
    last_save, last_save_at = first, time.monotonic()
    for step in tqdm(range(first, config.steps), initial=first, total=config.steps, disable=quiet):
        scores = {}
        if step % config.eval_every == 0:
            scores = evaluate(run, step)
        metrics, trajectories = train_step(run, step)
        if step == config.steps - 1:
            # The last line of metrics.jsonl gets the final evaluation too.
            scores = {f"{key}_before": value for key, value in scores.items()}
            scores |= evaluate(run, config.steps)
        calls = dict(sum_over_ranks(web.METER.sent))
        web.METER.sent.clear()
        metrics = {"step": step, **metrics, **scores, "service_calls": calls}
        logbook.write(run, trajectories, step, "train", metrics)
        logbook.report(run, metrics)
        updates = step + 1
        late = time.monotonic() - last_save_at > SAVE_SECONDS
        wishes = sum_over_ranks({"stop": len(sigterms), "save": late})  # of all ranks
        regular = updates % config.eval_every == 0 or updates - last_save >= SAVE_EVERY
        regular |= updates == config.steps - 1 and updates - last_save > 1
        permanent = config.keep_every and updates % config.keep_every == 0
        # --max_calls can stop a rank within a step, so a state is saved after each.
        if wishes.total() or regular or permanent or config.max_calls or updates == config.steps:
            trainer.save(run.folder, updates, run.policy, run.optimizer, run.tokenizer)
            processes.on_first_rank(lambda: logbook.remove_states(run))
            last_save, last_save_at = updates, time.monotonic()
        if wishes["stop"] and updates < config.steps:
            logbook.print_line(run, f"SIGTERM: state {updates} is saved; {GO_ON}")
            return os.EX_TEMPFAIL
    logbook.summary(run)
    return 0


def evaluate(run: Run, updates: int) -> dict:
    """Held-out accuracy after `updates` steps, sampled and greedy; records a few trajectories."""
    config = run.config
    start = time.perf_counter()
    batch = list(enumerate(run.eval_questions))[run.rank :: run.ranks]
    draws = {"accuracy": (config.temperature, config.top_p), "greedy": (0.0, 1.0)}
    scores = {"eval_step": updates}
    total = Counter()  # of both evaluations
    for name, (temperature, top_p) in draws.items():
        options = {"step": "eval", "temperature": temperature, "top_p": top_p}
        trajectories = play_batch(run, batch, 1, run.eval_tools, **options)
        sums = rollout_sums(trajectories)
        total.update(sums)
        # An answer that nobody could grade is not right. `failures` counts such answers.
        scores[f"eval_{name}"] = ratio(sums["reward"], sums["trajectories"])
        kinds = right_by_kind(trajectories, run.eval_questions)
        if kinds:
            scores[f"eval_{name}_by_kind"] = kinds
        if name == "accuracy":
            own = method_metrics(trajectories, run.method)
            scores |= {f"eval_{key}": value for key, value in own.items()}
            logbook.write(run, trajectories[:8], updates, "eval")
    counts = failures(total)
    logbook.check_failure_rate(counts, f"the evaluation after {updates} steps")
    scores |= {f"eval_{key}": value for key, value in counts.items()}
    scores["seconds_eval"] = time.perf_counter() - start
    logbook.report_scores(run, scores)
    return scores


# --------------------------------------------------------------------------------- the command line

GO_ON = "a run that has begun goes on with --resume and its --name"
OUT_OF_MEMORY = (
    "out of memory within a step: lower --kv_tokens (the sampler's pool), then --micro_tokens "
    "(activations; no use below the longest sample), or train adapters (--lora_rank 16); on GPUs "
    f"try --recompute_activations and --fsdp first; {GO_ON}"
)

# Standard output cannot be written: a full disk, a limit, a pipe that nobody reads, a terminal
# that is gone. A file of the run that cannot be written raises UserError instead.
OUTPUT_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE, errno.EIO)


def main(
    method: Method,
    arguments: list[str],
    description: str | None,
    *,
    complete: Callable[[str, dict], dict] = lambda command, options: options,
    **additions,
) -> int:
    """The command line of a method. Returns the exit code; a rank of several ends with it instead.

    `[options]` trains, `eval CKPT …` and `ask CKPT "question"` use a checkpoint. `complete(command,
    options)` returns the options with others added; it may take minutes to make the model that they
    name. `additions` are those of `build`: tools, questions, a grader, a base model or a language.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # It may be closed, or a notebook's.
        # A character that the terminal cannot show must not end a run.
        sys.stdout.reconfigure(errors="backslashreplace")
    code = 0
    training = arguments[:1] not in (["eval"], ["ask"])
    resumable = training or arguments[0] == "eval"
    try:
        if not training:
            evaluation.main(method, arguments, complete, **additions)
        else:
            given = parse(parser(method.config, description), arguments)
            options = complete("train", take_options(given))
            config = resolve(method.config, options, presets=method.presets)
            if given.get("resume"):  # `take_options` has cleared it at a first start; MIFO refuses.
                dataclasses.replace(config, resume=True).check(training=True)
            if config.resample and method.play_step:
                raise UserError(f"--resample has no use: {method.name} plays its steps by itself")
            run = build(method, config, training=True, **additions)
            sigterms = []
            former_handler = signal.signal(signal.SIGTERM, lambda *_: sigterms.append(True))
            try:
                code = train(run, sigterms)
            finally:  # A second SIGTERM may come until the process has ended.
                signal.signal(signal.SIGTERM, signal.SIG_IGN if code else former_handler)
    # FloatingPointError: the sampler's logits are NaN.
    except (UserError, FloatingPointError) as error:
        code = fail(error)
    except (RuntimeError, MemoryError) as error:
        out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if "gloo/transport" in str(error):  # the other end of a connection between ranks is gone
            code = fail(f"another process of this run has ended; {GO_ON}")
        elif out_of_memory or "can't allocate memory" in str(error):  # a CPU's message
            code = fail(OUT_OF_MEMORY if training else "out of memory: lower --kv_tokens")
        else:
            raise
    except OSError as error:
        if error.errno not in OUTPUT_LOST:
            raise
        discard_output()
        message = f"what is printed cannot be written ({error.strerror})"
        code = fail(f"{message}; {GO_ON}" if resumable else message)
    except KeyboardInterrupt:
        fail(f"interrupted; {GO_ON}" if resumable else "interrupted")
        code = 130
    processes.leave(code)
    return code
