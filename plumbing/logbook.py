"""What a run writes: its folder's files, a line a step, records of trajectories, a summary.

Rank 0 writes for all ranks.
"""

import dataclasses
import json

import torch
import torch.distributed as dist
from tqdm import tqdm

import trainer
import view
from config import UserError
from plumbing import collapse, files, tracker
from plumbing.metrics import reduced, share
from plumbing.run import Run
from plumbing.surroundings import Questions
from rollout import Sample


def open_folder(run: Run) -> int:
    """Fills the run's folder, or takes up its newest whole state; returns the first step to do."""
    state = trainer.newest(run.folder) if run.config.resume else None
    first = state[0] if state else 0
    finished = first >= run.config.steps
    frozen = bool(run.config.frozen())
    if frozen and run.config.resume:  # before anything of the run is changed
        trainer.keep_frozen(run.folder, run.start, run.tokenizer)
    if run.rank == 0 and state:
        trainer.link_checkpoint(run.folder)  # a kill may have left it one state behind
    if run.rank == 0 and not finished:
        run.tracker = tracker.start(run.config, run.method.name, run.folder, first)
        settings(run)
        take_back(run, first)
    if frozen and not run.config.resume:  # a run has its options first: else none could go on
        trainer.keep_frozen(run.folder, run.start, run.tokenizer)
    if run.ranks > 1:
        dist.barrier()
    return first


def settings(run: Run) -> None:
    """Writes the run's options, and how its roles are called."""
    files.write_json(run.folder / "config.json", dataclasses.asdict(run.config))
    files.make_folder(run.folder / "rollouts")
    method = {"name": run.method.name, "roles": run.method.roles}
    files.write_json(run.folder / "method.json", method)
    if isinstance(run.question, Questions):
        files.write_json(
            run.folder / "questions.json", run.question.fingerprints(run.eval_questions)
        )


def take_back(run: Run, first: int) -> None:
    """Removes what was written by steps that will be done again."""
    path = run.folder / "metrics.jsonl"
    lines = files.read_lines(path) if path.exists() else []
    kept = [json.dumps(line) + "\n" for line in lines if line.get("step", first) < first]
    files.write_whole(path, "".join(kept).encode())
    for file in (run.folder / "rollouts").glob("step_*.jsonl"):
        number = file.stem.removeprefix("step_")
        if not number.isdecimal() or int(number) < first:
            continue
        kept = []
        if int(number) == first and first % run.config.eval_every:
            # The last evaluation of a run that goes on stays, for it will not be made again.
            kept = [one for one in files.read_lines(file) if one.get("split") == "eval"]
        if kept:
            files.write_whole(file, "".join(json.dumps(one) + "\n" for one in kept).encode())
        else:
            file.unlink()


def write(run: Run, records: list[dict], metrics: dict | None = None) -> None:
    """Appends records to rollouts/step_N.jsonl, and a line of metrics to metrics.jsonl."""
    if run.ranks > 1:
        gathered = [None] * run.ranks if run.rank == 0 else None
        dist.gather_object(records, gathered)
        records = [one for part in gathered or [] for one in part]
    if run.rank:
        return
    if records:
        name = f"step_{records[0]['step']}.jsonl"
        files.append_lines(run.folder / "rollouts" / name, records)
    if metrics is not None:
        files.append_lines(run.folder / "metrics.jsonl", [metrics])
        if run.tracker:
            run.tracker.log(metrics)


def report(run: Run, bar: tqdm, metrics: dict) -> None:
    """One line a step, or the end of the progress bar."""
    if run.rank:
        return
    entropies = [shown(metrics[f"{role}_entropy"], 2) for role in run.method.roles]
    line = (
        f"reward {shown(metrics['reward'], 3)}  calls {metrics['calls_per_question']:.2f}  "
        f"malformed {metrics['malformed_share']:.3f}  entropy {'/'.join(entropies)}  "
        f"{metrics['seconds_rollout']:.1f}+{metrics['seconds_train']:.1f} s"
    )
    if metrics["judge_failures"]:
        line += f"  not judged {metrics['judge_failures']}"
    if bar.disable:
        print(f"step {metrics['step']}/{run.config.steps}  {line}", flush=True)
    else:
        bar.set_postfix_str(line)


def warn(run: Run) -> None:
    """One line for each sign of a collapse that this step has brought beyond its limit."""
    if run.rank:
        return
    lines = files.read_lines(run.folder / "metrics.jsonl")
    for sign in collapse.warnings(lines, run.method.roles):
        tqdm.write(f"warning: {sign}; see diagnostics.png, and docs/running.md on what to do")


def shown(value: float | None, digits: int) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def report_scores(run: Run, scores: dict) -> None:
    """One line an evaluation."""
    if run.rank:
        return
    line = (
        f"after {scores['eval_step']} steps: held-out accuracy {scores['eval_accuracy']:.3f} at "
        f"temperature {run.config.temperature:g}, {scores['eval_greedy']:.3f} greedy "
        f"({len(run.eval_questions)} questions)"
    )
    if scores["eval_judge_failures"]:
        line += f"; {scores['eval_judge_failures']} answers could not be judged"
    tqdm.write(line)


def stop_if_blind(run: Run, metrics: dict) -> None:
    """UserError when too many tool calls, judgements or rollouts of a step failed.

    Those of its evaluation count as well.
    """
    kinds = {
        "tool calls": "tool_error_share",
        "judgements": "judge_failure_share",
        "trajectories": "lost_share",
    }
    for kind, name in kinds.items():
        failed = max(metrics[name], metrics.get(f"eval_{name}", 0.0))
        if failed > run.config.max_tool_error_share:
            raise UserError(
                f"{failed:.0%} of the {kind} of step {metrics['step']} failed, more than "
                "--max_tool_error_share; see the run's rollouts for the reasons, then --resume"
            )


def stop_if_mismatched(run: Run, batches: list, stats: list[dict], samples: list[Sample]) -> None:
    """UserError if what a server says that it drew from is not the distribution that is trained.

    Each step's batch is the first one after new weights. It is scored before the optimizer moves:
    `stats` are those of `batches`, and `samples` what their owners point into.
    """
    sums = {}
    for server in run.sampler.servers:  # every rank brings the same keys
        own = [index for index, sample in enumerate(samples) if sample.server == server.url]
        sums |= {f"kl {server.url}": 0.0, f"tokens {server.url}": 0.0}
        for batch, numbers in zip(batches, stats):
            mine = torch.isin(batch.owner, torch.tensor(own, device=batch.owner.device))  # [N]
            gap = (numbers["logprob"] - batch.behaviour_logprob)[mine]
            sums[f"kl {server.url}"] += float((torch.expm1(gap) - gap).sum())
            sums[f"tokens {server.url}"] += len(gap)
    totals = reduced(sums)
    # What rounding makes: below 1e-12 in fp32, and 1e-4 to 1e-3 where either side rounds to bf16.
    rounding = 0.01 if run.device.type == "cuda" else 1e-6
    most = run.config.max_mismatch_kl or rounding
    for server in run.sampler.servers:
        kl = share(totals[f"kl {server.url}"], totals[f"tokens {server.url}"])
        if kl > most:
            raise UserError(
                f"{server.url} does not sample what is trained: mismatch_kl {kl:.2g} in the first "
                f"batch after new weights, above --max_mismatch_kl {most:g}. Likely its log-probs "
                "leave the temperature out (vLLM: --logprobs-mode processed_logprobs), it cuts the "
                "distribution (--generation-config vllm), it holds other weights or another "
                "vocabulary, or its dtype is coarser"
            )


def summary(run: Run) -> None:
    """The last lines: held-out accuracy before and after, and where to look."""
    if run.rank:
        return
    path = run.folder / "metrics.jsonl"
    lines = files.read_lines(path) if path.exists() else []
    ends = [line for line in lines if "eval_accuracy" in line]
    names = {"accuracy": f"temperature {run.config.temperature:g}", "greedy": "greedy"}
    if not ends or ends[-1].get("eval_step") != run.config.steps:
        names = {}  # metrics.jsonl is damaged: better to say nothing than something wrong
    for name, label in names.items():
        before = ends[0].get(f"eval_{name}_before", ends[0][f"eval_{name}"])
        after = ends[-1][f"eval_{name}"]
        print(
            f"held-out accuracy, {label}: {before:.3f} before, {after:.3f} after "
            f"{run.config.steps} steps"
        )
    if lines:
        print(f"{'curves':<14}{view.curves(run.folder)}")
    print(f"{'trajectories':<14}{view.page(run.folder)}")
    print(f"{'checkpoint':<14}{run.folder / 'checkpoint'}")
    if run.tracker:
        run.tracker.close()
