"""What a run writes as it goes: its folder's files, a line a step, trajectories, a live view.

Rank 0 writes for all ranks. Tests: pytest tests/test_mars.py tests/test_metrics.py
"""

import dataclasses
import json
import math
import secrets

import torch
import torch.distributed as dist
from tqdm import tqdm

import trainer
from config import UserError, uses_bf16
from plumbing import folders
from plumbing.folders import read_lines, write_json, write_whole
from plumbing.metrics import ratio, reduced
from plumbing.outside import tracker_init
from plumbing.start import Questions, Run
from rollout import Context, Sample, Trajectory, Turn
from tasks.format import Format

MOST_FAILED = 0.5  # share of a step's tool calls, judgements or rollouts; above it a run stops

# ------------------------------------------------------------------------------ the run's folder


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
        settings(run)
        start_tracker(run)
        take_back(run, first)
    if frozen and not run.config.resume:  # a run has its options first: else none could go on
        trainer.keep_frozen(run.folder, run.start, run.tokenizer)
    if run.ranks > 1:
        dist.barrier()
    return first


def settings(run: Run) -> None:
    """Writes the run's options, how its roles are called, and what it is trained on."""
    write_json(run.folder / "config.json", dataclasses.asdict(run.config))
    method = {"name": run.method.name, "roles": run.method.roles}
    write_json(run.folder / "method.json", method)
    if isinstance(run.question, Questions):
        write_json(run.folder / "questions.json", run.question.fingerprints(run.eval_questions))


def take_back(run: Run, first: int) -> None:
    """Removes what was written by steps that will be done again, and the report."""
    folders.remove(run.folder / "report.md")
    path = run.folder / "metrics.jsonl"
    kept = [line for line in metric_lines(run) if line.get("step", first) < first]
    write_whole(path, as_lines(kept))
    for file in (run.folder / "rollouts").glob("step_*.jsonl"):
        number = file.stem.removeprefix("step_")
        if not number.isdecimal() or int(number) < first:
            continue
        kept = []
        if int(number) == first and first % run.config.eval_every:
            # The last evaluation of a run that goes on stays, for it will not be made again.
            kept = [one for one in read_lines(file) if one.get("split") == "eval"]
        if kept:
            write_whole(file, as_lines(kept))
        else:
            folders.remove(file)


def metric_lines(run: Run) -> list[dict]:
    """The lines of metrics.jsonl so far."""
    path = run.folder / "metrics.jsonl"
    return read_lines(path) if path.exists() else []


def as_lines(records: list[dict]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


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
        folders.append_lines(run.folder / "rollouts" / name, records)
    if metrics is not None:
        folders.append_lines(run.folder / "metrics.jsonl", [metrics])
        track(run, metrics)


# ------------------------------------------------------------------- a trajectory as a JSON line


def record(trajectory: Trajectory, chat: Format, step: int, split: str) -> dict:
    """The line of one trajectory in rollouts/step_N.jsonl; `split` is "train" or "eval"."""
    sample = trajectory.contexts[0].sample
    return {
        "step": step,
        "split": split,
        "question_id": trajectory.question.id,
        "question": trajectory.question.text,
        "gold": list(trajectory.question.golden_answers),
        "trajectory": trajectory.attempt,
        "answer": trajectory.answer,
        "ended": trajectory.ended,
        "reward": trajectory.reward,
        "advantage": sample.advantage,
        "trained": bool(sample.copies),
        "segments": segments(sample, chat),
        "turns": [turn_record(turn, chat) for turn in trajectory.turns],
    }


def segments(sample: Sample, chat: Format) -> list[dict]:
    """A sample's text, cut where it changes between given and sampled."""
    cut = []
    start = 0
    for end in range(1, len(sample.tokens) + 1):
        if end == len(sample.tokens) or sample.mask[end] != sample.mask[start]:
            text = chat.text(sample.tokens[start:end])
            cut.append({"text": text, "trained": sample.mask[start]})
            start = end
    return cut


def turn_record(turn: Turn, chat: Format) -> dict:
    """One turn, with the contexts that it opened."""
    documents = zip(turn.documents, turn.lengths)
    return {
        "text": chat.text(turn.sampled),
        "call": turn.action.call and vars(turn.action.call),
        "answer": turn.action.answer,
        "error": turn.problem,
        "seconds_tool": round(turn.seconds, 4),
        "documents": [{**vars(document), "tokens": length} for document, length in documents],
        "chunks": [reader_record(reader, chat) for reader in turn.readers],
    }


def reader_record(reader: Context, chat: Format) -> dict:
    """A context that a turn opened: what it was given and wrote, and its turns if any."""
    sample = reader.sample
    prompt = [*sample.mask, True].index(True)  # a reader whose server was lost wrote nothing
    made = {
        "role": reader.role,
        "prompt": chat.text(sample.tokens[:prompt]),
        "note": chat.text(sample.tokens[prompt:]),
        "note_tokens": len(sample.tokens) - prompt,
        "advantage": sample.advantage,
        "drawn": sample.copies,
    }
    if reader.chunk:
        made |= vars(reader.chunk)
    if reader.turns:
        made["turns"] = [turn_record(turn, chat) for turn in reader.turns]
    return made


# ------------------------------------------------------------------------------ lines on the screen


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


# ------------------------------------------------------------------------- what ends a run at once


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
        if failed > MOST_FAILED:
            raise UserError(
                f"{failed:.0%} of the {kind} of step {metrics['step']} failed; see the run's "
                "rollouts for the reasons, then --resume"
            )


def stop_if_mismatched(run: Run, batches: list, stats: list[dict], samples: list[Sample]) -> None:
    """UserError if what was sampled from is not the distribution that is trained.

    A step's batch is the first one after new weights. It is scored before the optimizer moves, so
    that sampler and trainer should hold the same weights: `stats` are those of `batches`, and
    `samples` what their owners point into. Each server is measured by itself.
    """
    # Every rank brings the same keys.
    sources = [server.url for server in getattr(run.sampler, "servers", ())] or [""]
    sums = {}
    for source in sources:
        own = [index for index, sample in enumerate(samples) if sample.server == source]
        sums |= {f"kl {source}": 0.0, f"tokens {source}": 0.0}
        for batch, numbers in zip(batches, stats):
            live = torch.isin(batch.owner, torch.tensor(own, device=batch.owner.device))  # [N]
            live &= batch.weight != 0
            gap = (numbers["logprob"] - batch.behaviour_logprob)[live]
            sums[f"kl {source}"] += float((torch.expm1(gap) - gap).sum())
            sums[f"tokens {source}"] += len(gap)
    totals = reduced(sums)
    # What rounding makes: below 1e-12 in fp32, and 1e-4 to 1e-3 where either side rounds to bf16.
    rounding = 0.01 if uses_bf16(run.config, run.device.type == "cuda") else 1e-6
    most = run.config.max_mismatch_kl or rounding
    for source in sources:
        kl = ratio(totals[f"kl {source}"], totals[f"tokens {source}"])
        if not kl <= most:  # NaN included
            advice = "use another model, or report this: sampler and trainer compute it differently"
            if source:
                advice = (
                    "likely its log-probs leave the temperature out (vLLM: --logprobs-mode "
                    "processed_logprobs), it cuts the distribution (--generation-config vllm), it "
                    "holds other weights or another vocabulary, or its dtype is coarser"
                )
            raise UserError(
                f"{source or 'the sampler'} does not sample what is trained: mismatch_kl {kl:.2g} "
                f"in the first batch after new weights, above --max_mismatch_kl {most:g}; {advice}"
            )


# ------------------------------------------------------------------------------------ a live view


def start_tracker(run: Run) -> None:
    """Opens the tracker's run, in the project that is called after the method.

    Its name is the folder's and a random suffix, so that an earlier folder of the same name stays
    apart; a resumed run goes on with its own. UserError if it cannot be opened.
    """
    config = run.config
    if config.track == "none":
        return
    kept = run.folder / "tracker.json"
    name = f"{config.name}-{secrets.token_hex(4)}"
    if kept.exists():
        name = folders.read_json(kept)["name"]
        run.tracked = max((line.get("step", -1) for line in metric_lines(run)), default=-1)
    options = {"project": run.method.name, "name": name, "resume": "allow"}
    if config.track == "wandb":
        # wandb writes files, and must accept what a resumed run may change, such as --steps.
        options |= {"id": name, "dir": config.cache, "allow_val_change": True}
    try:
        run.tracker = tracker_init(config.track)(config=dataclasses.asdict(config), **options)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"--track {config.track} cannot start ({folders.reason(error)}): mend that, or leave "
            "--track out, and go on with --resume"
        ) from error
    write_json(kept, {"name": name})


def track(run: Run, metrics: dict) -> None:
    """Sends the numbers of a line that the tracker has not got yet.

    A tracker that fails is given up, since metrics.jsonl holds everything.
    """
    if run.tracker is None or metrics["step"] <= run.tracked:
        return
    numbers = {
        key: value
        for key, value in metrics.items()
        if isinstance(value, (int, float)) and math.isfinite(value) and key != "step"
    }
    try:
        run.tracker.log(numbers, step=metrics["step"])
    except (Exception, SystemExit) as error:
        run.tracker = None
        tqdm.write(
            f"--track {run.config.track} failed ({folders.reason(error)}): the run goes on "
            "without it, and metrics.jsonl holds everything"
        )
