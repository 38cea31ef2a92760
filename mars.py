"""MARS: one language model plays two roles and is trained in both at once (arXiv 2510.04935).

System 2 reasons over several turns and calls tools, stating a purpose with each call; System 1 (same weights, other prompt)
distils the packed output of the tools for that purpose. A binary reward on System 2's answer trains both with a GRPO that
normalises advantages per role, masks each role's loss to the tokens that it sampled, and balances the two numbers of samples.
The method is `train_step`, one screen; `draw`, `update` and `prepare` are the next.

    python mars.py                                      the embedded toy: CPU, no key, no download, minutes
    torchrun --nproc_per_node=8 mars.py                 the same on 8 processes (gloo on CPU, nccl on CUDA)
    torchrun --nproc_per_node=8 mars.py --preset paper --model Qwen/Qwen3-8B --data … --search serper
    python mars.py eval CKPT …      python mars.py ask CKPT "question"      python view.py RUN

Reading order: this file, rollout.py (formulas 1-3), grpo.py (the objective), binpack.py, sampler.py, policy.py, kernels/.

Shapes everywhere: B rows in a batch, T tokens, V vocabulary, D hidden size, H heads (Hq query, Hkv key/value), Dh head size,
N loss tokens, G trajectories per question, M System 1 samples per question.
"""
import dataclasses
import json
import random
import sys
import time

import torch
import torch.distributed as dist
from tqdm import tqdm

from plumbing import evaluation
import grpo
from trainer import policy as trainer
import view
from plumbing import files
from plumbing.build import Run, build
from config import UserError, fail, from_command_line
from plumbing.metrics import add, reduced, rollout_metrics, rollout_sums
from rollout import Sample, Trajectory, record


# ---------------------------------------------------------------------------------------------- the method

def train_step(run: Run, step: int) -> tuple[dict, list[Trajectory]]:
    """One step of MARS: rollouts, rewards, two advantage groups per question, balance, one objective for both roles."""
    config, start = run.config, time.perf_counter()
    # Whole questions for each rank, so the advantage groups need no communication
    mine = range(config.questions * run.rank // run.world, config.questions * (run.rank + 1) // run.world)
    batch = [(group, run.question(step * config.questions + group)) for group in mine]
    trajectories = run.rollouts(batch, config.group, step=step, tools=run.tools, temperature=config.temperature)
    seconds = {"seconds_rollout": time.perf_counter() - start}
    leaked = sum(s.pages.count - len(s.pages.free) for s in run.driver.samplers)        # 0 unless an episode forgot to close

    graded = [t for t in trajectories if t.reward is not None]              # a judge out of reach: not in the group
    sys2 = [t.sample for t in graded]
    sys1 = [sample for t in graded for sample in t.sys1_samples()]
    for samples in (sys2, sys1):                                            # A = (r − mean) / std, each role by itself
        advantages = grpo.group_advantages(torch.tensor([s.reward for s in samples]), [s.group for s in samples])
        for sample, advantage in zip(samples, advantages.tolist()):
            sample.advantage = advantage
    if config.shared_group:
        inherited = {(s.group, s.trajectory): s.advantage for s in sys2}
        for sample in sys1:
            sample.advantage = inherited[sample.group, sample.trajectory]
    draw(run, sys2, sys1, step)                                             # after the advantages, which saw all samples

    start = time.perf_counter()
    numbers = update(run, sys2, sys1, step)
    run.sampler.load_weights(trainer.unwrap(run.policy).model)
    seconds["seconds_train"] = time.perf_counter() - start
    numbers = {**rollout_metrics(trajectories, seconds["seconds_rollout"]), **numbers, **seconds, "pages_in_use": leaked}
    return numbers, trajectories


def draw(run: Run, sys2: list[Sample], sys1: list[Sample], step: int) -> None:
    """Sets `drawn`, how often each sample stands in the loss: System 2's once, System 1's resampled to System 2's number
    per question."""
    balanced, trained = run.config.balance == "on", sys1 if run.config.system1 == "train" else []
    for sample in sys2 if balanced else sys2 + trained:
        sample.drawn = 1
    for group in {s.group for s in trained} if balanced else ():            # a generator each: the same draw on any rank
        generator = torch.Generator().manual_seed(random.Random(f"{run.config.seed} {step} {group}").getrandbits(63))
        members = [s for s in trained if s.group == group]
        for index in grpo.balance(range(len(members)), sum(s.group == group for s in sys2), generator):
            members[index].drawn += 1


def update(run: Run, sys2: list[Sample], sys1: list[Sample], step: int) -> dict:
    """L = L_sys2 + L_sys1 on the drawn samples: one optimiser step, or `inner_steps` on as many shares of the questions."""
    config, totals = run.config, {}
    objective = {"clip_low": config.clip_low, "clip_high": config.clip_high, "kl_beta": config.kl_beta,
                 "temperature": config.temperature}
    shares = [prepare(run, [[s for s in role if s.group % config.inner_steps == inner] for role in (sys2, sys1)])
              for inner in range(config.inner_steps)]
    for inner, (batches, references) in enumerate(shares):
        for parameters in run.optimiser.param_groups:
            parameters["lr"] = config.lr * min(1.0, (step + 1) / max(1, config.warmup))
        run.optimiser.zero_grad(set_to_none=True)
        # -> Policy.forward -> kernels.linear_grpo_loss, the fused form of grpo.grpo_loss
        stats = trainer.backward(run.policy, batches, references, **objective)
        norm = trainer.gradient_norm(run.policy, config.clip_grad)
        loss = sum(float(s["loss"]) for s in stats)
        if torch.isfinite(torch.tensor([norm, reduced({"loss": loss})["loss"]])).all():
            run.optimiser.step()
            run.skipped = 0
        else:
            skip(run, step, sys2 + sys1)
        add(totals, {"loss": loss, "grad_norm": norm / run.world, "inner": 1 / run.world,      # loss: this rank's part; of
                     "skipped": bool(run.skipped) / run.world})             # what the ranks agree on each adds its share
        for batch, s in zip(batches, stats):
            tokens = len(batch.target)
            # Before the first optimiser step sampler and trainer hold the same weights: a gap between them is numerical
            drift = s["logprob"] - batch.sampler_logprob if inner == 0 else torch.zeros(0)                      # [N]
            add(totals, {"tokens": tokens, "clip": float(s["clip_share"]) * tokens, "kl": float(s["kl"]) * tokens,
                         "drift": float((torch.expm1(drift) - drift).sum()), "drifted": len(drift)})
    t = reduced(totals)
    tokens = max(t["tokens"], 1)
    return {"loss": t["loss"] / t["inner"], "grad_norm": t["grad_norm"] / t["inner"], "clip_share": t["clip"] / tokens,
            "kl": t["kl"] / tokens, "mismatch_kl": t["drift"] / max(t["drifted"], 1), "trained_tokens": int(t["tokens"]),
            "skipped_steps": round(t["skipped"])}


def prepare(run: Run, roles: list[list[Sample]]) -> tuple[list, list]:
    """Micro-batches of the drawn samples, weighted by counts over all ranks, and the reference's log-probs for each.

    A sample of advantage 0 counts in the mean but has no gradient, so it is left out (unless there is a KL term).
    """
    config = run.config
    counts = reduced({i: sum(s.drawn for s in role) for i, role in enumerate(roles)})
    samples, weights = [], []
    for i, role in enumerate(roles):
        drawn = [s for s in role if s.drawn and (s.advantage or config.kl_beta)]
        samples += drawn
        masks = [torch.tensor(s.mask) for s in drawn]                       # [T] each
        weights += [w * s.drawn for w, s in zip(grpo.token_weights(masks, int(counts[i])), drawn)]
    batches = trainer.micro_batches(samples, weights, config.micro_tokens, run.device)
    number = torch.tensor(len(batches), device=run.device)  # as many on every rank, for backward's collectives must pair up
    if run.world > 1:
        dist.all_reduce(number, dist.ReduceOp.MAX)
    batches += [trainer.make_micro_batch([], [], [], run.device) for _ in range(max(1, int(number)) - len(batches))]
    if config.tis:                                          # old log-probs by the trainer; the sampler's enter the weight
        for batch in batches:
            batch.old_logprob = trainer.logprob(run.policy, batch, config.temperature)
            batch.weight = batch.weight * torch.exp(batch.old_logprob - batch.sampler_logprob).clamp(max=config.tis)
    references = [trainer.logprob(run.reference, b, config.temperature) if run.reference else None for b in batches]
    return batches, references


def skip(run: Run, step: int, samples: list[Sample]) -> None:
    """A step whose loss or gradient is not finite is left out and reported; the third in a row stops the run."""
    run.skipped += 1
    names = ", ".join(f"{s.role} {s.group}.{s.trajectory}" for s in samples if s.drawn and s.advantage)
    print(f"step {step}: loss or gradient is not finite, step skipped; samples (role question.trajectory): {names}", flush=True)
    if run.skipped == 3:
        raise UserError("three steps in a row without a finite gradient; the last state on disk is whole, and the run's rollouts "
                        "show what was sampled")


# ---------------------------------------------------------------------------------------------- the run

def train(run: Run) -> None:
    """The whole run: steps, evaluations, states on disk, pictures."""
    config, start = run.config, prepare_folder(run)
    steps = tqdm(range(start, config.steps), initial=start, total=config.steps, disable=run.rank or not sys.stderr.isatty())
    for step in steps:
        scores = evaluate(run, step) if step % config.eval_every == 0 else {}
        metrics, trajectories = train_step(run, step)
        if step == config.steps - 1:                        # no later line: the last one carries the end result
            scores = {f"{key}_before": value for key, value in scores.items()} | evaluate(run, config.steps)
        write(run, {"step": step, **metrics, **scores}, [record(t, run.format, step, "train") for t in trajectories])
        line = (f"step {step}/{config.steps}  reward {metrics['reward']:.3f}  calls {metrics['calls_per_question']:.2f}  "
                f"malformed {metrics['malformed_share']:.3f}  "
                f"entropy {metrics['sys2_entropy']:.2f}/{metrics['sys1_entropy']:.2f}  "
                f"{metrics['seconds_rollout']:.1f}+{metrics['seconds_train']:.1f} s")
        if run.rank == 0:
            steps.set_postfix_str(line.split("  ", 1)[1]) if not steps.disable else print(line, flush=True)
        if (failed := max(metrics["tool_error_share"], scores.get("eval_tool_error_share", 0))) > config.max_tool_error_share:
            raise UserError(f"{failed:.0%} of the tool calls of step {step} failed, more than --max_tool_error_share; see the "
                            "run's rollouts for the reasons, then --resume")
        if (step + 1) % config.save_every == 0 or step == config.steps - 1:
            trainer.save(run.folder, step + 1, run.policy, run.optimiser, run.tokenizer)
    if run.rank == 0:
        summary(run)


def summary(run: Run) -> None:
    """The last lines: held-out accuracy before and after, and where to look."""
    ends = [m for m in files.read_lines(run.folder / "metrics.jsonl") if "eval_accuracy" in m]
    for name, label in (("accuracy", f"temperature {run.config.temperature:g}"), ("greedy", "greedy")):
        before = ends[0].get(f"eval_{name}_before", ends[0][f"eval_{name}"])
        print(f"held-out accuracy, {label}: {before:.3f} before, {ends[-1][f'eval_{name}']:.3f} after {run.config.steps} steps")
    for name, path in (("curves", view.curves(run.folder)), ("trajectories", view.page(run.folder)),
                       ("checkpoint", run.folder / "checkpoint")):
        print(f"{name:<14}{path}")


def evaluate(run: Run, updates: int) -> dict:
    """Held-out accuracy of the policy after `updates` steps, sampled and greedy; some sampled trajectories are recorded."""
    start, scores, failed = time.perf_counter(), {}, 0.0
    batch = list(enumerate(run.eval_questions))[run.rank::run.world]
    for name, temperature, top_p in (("accuracy", run.config.temperature, run.config.eval_top_p), ("greedy", 0.0, 1.0)):
        trajectories = run.rollouts(batch, 1, step="eval", tools=run.eval_tools, temperature=temperature, top_p=top_p)
        sums = rollout_sums(trajectories)
        scores[f"eval_{name}"] = sums["reward"] / max(sums["trajectories"], 1)      # what no judge could grade is not right
        failed = max(failed, sums["failed"] / max(sums["calls"], 1))
        if name == "accuracy":
            write(run, None, [record(t, run.format, updates, "eval") for t in trajectories[:8]])
    if run.rank == 0:
        tqdm.write(f"after {updates} steps: held-out accuracy {scores['eval_accuracy']:.3f} at temperature "
                   f"{run.config.temperature:g}, {scores['eval_greedy']:.3f} greedy ({len(run.eval_questions)} questions)")
    return {**scores, "eval_step": updates, "eval_tool_error_share": failed, "seconds_eval": time.perf_counter() - start}


def write(run: Run, metrics: dict | None, records: list[dict]) -> None:
    """Appends to metrics.jsonl and rollouts/step_N.jsonl; rank 0 writes for all."""
    if run.world > 1:
        gathered = [None] * run.world if run.rank == 0 else None
        dist.gather_object(records, gathered)
        records = [r for part in gathered for r in part] if run.rank == 0 else []
    if run.rank:
        return
    if records:
        with open(run.folder / "rollouts" / f"step_{records[0]['step']}.jsonl", "a") as f:
            f.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
    if metrics is not None:
        with open(run.folder / "metrics.jsonl", "a") as f:
            f.write(json.dumps(metrics) + "\n")


def prepare_folder(run: Run) -> int:
    """Creates the run's folder, or takes up the newest whole state in it; returns the first step to do."""
    config, folder = run.config, run.folder
    state = trainer.newest(folder) if config.resume else None
    step = state[0] if state else 0
    if run.rank == 0:
        (folder / "rollouts").mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1) + "\n")
        lines = files.read_lines(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
        files.write_whole(folder / "metrics.jsonl", "".join(json.dumps(m) + "\n" for m in lines if m["step"] < step).encode())
        for file in (folder / "rollouts").glob("step_*.jsonl"):             # of steps that will be done again
            if int(file.stem.removeprefix("step_")) >= step:
                file.unlink()
    if run.world > 1:
        dist.barrier()
    return step


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    try:
        if arguments[:1] in (["eval"], ["ask"]):
            return evaluation.main(arguments)
        train(build(from_command_line(arguments, __doc__), training=True))
        return 0
    except (UserError, FloatingPointError) as error:        # the second: the sampler met logits that are no numbers
        return fail(error)
    except KeyboardInterrupt:
        fail("interrupted; go on with --resume and the run's --name")
        return 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
