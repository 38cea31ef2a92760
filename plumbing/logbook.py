"""What a run writes: the files of its folder, lines on the screen, and a report at its end.

Each rank writes its own rollouts. Rank 0 writes everything else.
Tests: pytest tests/test_mars.py tests/test_metrics.py
"""

import base64
import importlib
import itertools
import math
import os
import platform
import resource
import shlex
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm

import trainer
from atomic import on_disk, reason
from config import UserError
from plumbing import folders, pages
from plumbing.folders import append_lines, as_lines, read_lines, write_json, write_whole
from plumbing.metrics import with_interval
from plumbing.start import Run
from processes import on_first_rank
from rollout import Context, Sample, Trajectory, Turn
from tasks.format import Format
from tools import web

MOST_FAILED = 0.5  # a run stops if more of a step's tool calls, judgements or rollouts failed

# ------------------------------------------------------------------------------ the run's folder


def open_folder(run: Run) -> int:
    """Prepares the folder of a new or a resumed run. Returns the number of the first step to do."""
    state = trainer.newest(run.folder) if run.config.resume else None
    first = state[0] if state else 0

    def fill() -> None:
        if state:
            with on_disk(f"write {run.folder / 'checkpoint'}"):
                trainer.link_checkpoint(run.folder)  # a kill may have left it one state behind
        if first < run.config.steps:
            write_settings(run)
            start_tracker(run)
            take_back(run, first)

    on_first_rank(fill)
    if run.config.resample:  # The stream of questions goes on after the further questions.
        path = run.folder / "metrics.jsonl"
        lines = [line for line in read_lines(path) if line["step"] < first]
        if len(lines) < first:  # else it would ask again what it has trained on
            raise UserError(f"{path} lacks steps of this run: put them back, or start anew")
        run.resampled = sum(line["resampled"] for line in lines)
    # frozen/ comes after config.json: with frozen/ alone no run could go on or begin here.
    if run.config.needs_start():
        trainer.keep_frozen(run.folder, run.start, run.tokenizer)
    return first


def write_settings(run: Run) -> None:
    """Writes method.json, then config.json, which makes the run resumable."""
    about = {"name": run.method.name, "roles": run.method.roles, "questions": run.fingerprint}
    write_json(run.folder / "method.json", about)
    write_json(run.folder / "config.json", vars(run.config))


def take_back(run: Run, first: int) -> None:
    """Removes the report, and all lines and files of steps that will be done again."""
    path = run.folder / "metrics.jsonl"
    append_lines(path, [])  # makes the file if it does not exist
    write_whole(path, as_lines([line for line in read_lines(path) if line["step"] < first]))
    files = folders.rollout_files(run.folder)
    # The final evaluation of a run that ended after `first` steps is in the file of step `first`.
    # If the resumed run evaluates at that step too, the file goes. Else its evaluation stays.
    if first in files and first % run.config.eval_every:
        evaluation = [line for line in read_lines(files[first]) if line["split"] == "eval"]
        write_whole(files.pop(first), as_lines(evaluation))
    for file in (run.folder / "report.md", *(files[step] for step in files if step >= first)):
        with on_disk(f"remove {file}"):
            file.unlink(missing_ok=True)


def write(
    run: Run, trajectories: list[Trajectory], step: int, split: str, metrics: dict | None = None
) -> None:
    """Appends trajectories to rollouts/step_N.jsonl, and a line of metrics to metrics.jsonl.

    Ranks write in turn. If rank 0 wrote all records, long pages would take gigabytes of its memory.
    """
    records = [record(trajectory, run.chat, step, split) for trajectory in trajectories]
    for rank in range(run.ranks):
        if records and rank == run.rank:
            append_lines(run.folder / "rollouts" / f"step_{step}.jsonl", records)
        if run.ranks > 1:
            dist.barrier()
    if metrics is None or run.rank:
        return
    for name, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            metrics[name] = None  # JSON has no NaN
    append_lines(run.folder / "metrics.jsonl", [metrics])
    track(run, metrics)


def remove_states(run: Run) -> None:
    """Removes old states. The accuracies in metrics.jsonl say which state is the best one.

    A step's line may have an evaluation of the weights before that step, which the state of the
    same number holds. The run's last line also has the evaluation of the final weights.
    """
    lines = read_lines(run.folder / "metrics.jsonl")
    keys = [(f"eval_step{end}", f"eval_accuracy{end}") for end in ("_before", "")]
    scores = {line[step]: line[key] for line in lines for step, key in keys if step in line}
    trainer.remove_states(run.folder, scores, run.config.keep_every)


# ------------------------------------------------------------------- a trajectory as a JSON line


def record(trajectory: Trajectory, chat: Format, step: int, split: str) -> dict:
    """The line of one trajectory in rollouts/step_N.jsonl; `split` is "train" or "eval"."""
    sample = trajectory.contexts[0].sample
    segments = enumerate(pieces(sample))  # the first one was given
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
        "trained": bool(sample.loss_weight),
        "role": sample.role,
        "segments": [{"text": chat.text(ids), "trained": bool(n % 2)} for n, ids in segments],
        "ids": pack_ids(sample),
        "turns": [turn_record(turn, chat) for turn in trajectory.turns],
    }


def pieces(sample: Sample) -> list[list[int]]:
    """A sample's token ids in pieces, given and sampled ones in turn."""
    groups = itertools.groupby(zip(sample.mask, sample.tokens), key=lambda pair: pair[0])
    return [[token for _, token in pairs] for _, pairs in groups]


def pack_ids(sample: Sample) -> list[str]:
    """Each of a sample's pieces as text: a third of the bytes of their numbers in JSON."""
    raw = [np.array(ids, "<i4").tobytes() for ids in pieces(sample)]
    return [base64.b64encode(zlib.compress(part)).decode() for part in raw]


def unpack_ids(text: str) -> list[int]:
    """The token ids of one piece."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i4").tolist()


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
    # The number of tokens before the first sampled one; all if no token was sampled.
    given = [*sample.mask, True].index(True)
    turns = {"turns": [turn_record(turn, chat) for turn in reader.turns]} if reader.turns else {}
    return {
        "role": reader.role,
        "prompt": chat.text(sample.tokens[:given]),
        "note": chat.text(sample.tokens[given:]),
        "ids": pack_ids(sample),
        "advantage": sample.advantage,
        "drawn": sample.loss_weight,
        **(vars(reader.chunk) if reader.chunk else {}),
        **turns,
    }


# ------------------------------------------------------------------------------ lines on the screen


def report(run: Run, metrics: dict) -> None:
    """One line a step."""
    entropies = [format_number(metrics[f"{role}_entropy"], 2) for role in run.method.roles]
    print_line(
        run,
        f"step {metrics['step']}/{run.config.steps}  reward {format_number(metrics['reward'], 3)}  "
        f"calls {metrics['calls_per_question']:.2f}  malformed {metrics['malformed_share']:.3f}  "
        f"entropy {'/'.join(entropies)}  "
        f"{metrics['seconds_rollout']:.1f}+{metrics['seconds_train']:.1f} s",
    )


def format_number(value: float | None, digits: int) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def report_scores(run: Run, scores: dict) -> None:
    """One line an evaluation."""
    print_line(
        run,
        f"after {scores['eval_step']} steps: held-out accuracy {scores['eval_accuracy']:.3f} at "
        f"temperature {run.config.temperature:g}, {scores['eval_greedy']:.3f} greedy "
        f"({len(run.eval_questions)} questions)",
    )


def print_line(run: Run, line: str) -> None:
    """Prints a line on rank 0, above the progress bar if there is one."""
    if run.rank == 0:
        with tqdm.external_write_mode():
            print(line, flush=True)


# ------------------------------------------------------------------------- what ends a run at once


def check_failure_rate(metrics: dict, what: str, cure: str = "--resume") -> None:
    """UserError if a share of failures in `metrics`, those of `what`, is above MOST_FAILED."""
    kinds = {
        "tool_error_share": "tool calls",
        "unread_share": "pages",
        "judge_failure_share": "judgements",
        "lost_share": "trajectories",
    }
    for name, kind in kinds.items():
        share = metrics[name]
        if share > MOST_FAILED:
            raise UserError(
                f"{share:.0%} of the {kind} of {what} failed (rollouts/ has the reasons"
                f"{web.METER.last_failure()}): mend that, then {cure}"
            )


# ------------------------------------------------------------------------------------ a live view


def start_tracker(run: Run) -> None:
    """Opens a run of the tracker, a new one if the run is resumed. UserError if that fails."""
    config = run.config
    if config.track == "none":
        return
    options = {"project": run.method.name, "name": config.name, "config": dict(vars(config))}
    try:
        run.tracker = importlib.import_module(config.track).init(**options)
    except (Exception, SystemExit) as error:
        problem = f"--track {config.track} cannot start ({reason(error)}); mend that, then --resume"
        raise UserError(problem) from error


def track(run: Run, metrics: dict) -> None:
    """Sends a line's numbers. A tracker that fails is not used again: metrics.jsonl has all."""
    if run.tracker is None:
        return
    numbers = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
    step = numbers.pop("step")
    try:
        run.tracker.log(numbers, step=step)
    except (Exception, SystemExit) as error:
        run.tracker = None
        print_line(run, f"--track {run.config.track} failed ({reason(error)}): going on without")


# ------------------------------------------------------------------------------------- at the end


def summary(run: Run) -> None:
    """The last lines: held-out accuracy before and after, and where to look."""
    if run.rank:
        return
    lines = read_lines(run.folder / "metrics.jsonl")
    if not lines or "eval_step" not in lines[-1]:  # the last line has the final evaluation
        raise UserError(f"{run.folder / 'metrics.jsonl'} is damaged: its last line is missing")
    steps = lines[-1]["eval_step"]
    for name, draw in draws(run).items():
        before, after = ends(lines, f"eval_{name}")
        print(f"held-out accuracy, {draw}: {before:.3f} before, {after:.3f} after {steps} steps")
    if not (run.folder / "report.md").exists():  # a finished run keeps its report
        write_whole(run.folder / "report.md", report_card(run, lines).encode())
    from plumbing import curves  # loads matplotlib

    print(f"{'report':<14}{run.folder / 'report.md'}")
    print(f"{'curves':<14}{curves.of_run(run.folder)}")
    print(f"{'trajectories':<14}{pages.of_run(run.folder)}")
    print(f"{'checkpoint':<14}{run.folder / 'checkpoint'}")
    if run.tracker:
        run.tracker.finish()


def draws(run: Run) -> dict[str, str]:
    """The name in metrics.jsonl -> how held-out answers are drawn, in words."""
    return {"accuracy": f"temperature {run.config.temperature:g}", "greedy": "greedy"}


def ends(lines: list[dict], key: str) -> tuple:
    """A key's values in the first and in the last evaluation. None if it was not logged."""
    evaluations = [line for line in lines if "eval_step" in line]
    # A run of one step has both evaluations in one line.
    first = evaluations[0].get(f"{key}_before", evaluations[0].get(key))
    return first, evaluations[-1].get(key)


def report_card(run: Run, lines: list[dict]) -> str:
    """A page on the run in Markdown: its command, its costs, its accuracies."""
    sums = Counter()
    for line in lines:
        sums.update({key: value for key, value in line.items() if isinstance(value, (int, float))})
    seconds_eval = sums["seconds_eval"] + sums["seconds_eval_before"]
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    unit = 2**30 if sys.platform == "darwin" else 2**20  # macOS counts bytes, Linux KiB
    memory = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit:.1f} GiB"
    if run.device.type == "cuda":
        machine = torch.cuda.get_device_name(run.device)
        memory += f", {torch.cuda.max_memory_allocated(run.device) / 2**30:.1f} GiB on the GPU"
    calls = sum((Counter(line.get("service_calls")) for line in lines), Counter())
    sampled = [f"{sums[f'{role}_tokens']:,.0f} by {role}" for role in run.method.roles]
    sent = ", ".join(f"{calls[site]:,} to {site}" for site in sorted(calls)) or "none sent"
    asked = len(run.eval_questions)
    page = [
        f"# Run {run.config.name}\n",
        f"- command: `{shlex.join(['python', *sys.orig_argv[1:]])}`",
        f"- commit: {commit()}",
        f"- machine: {machine}, {run.ranks} process(es)",
        f"- versions: Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        f"- seconds: {sums['seconds_rollout']:,.0f} rollouts, {sums['seconds_train']:,.0f} "
        f"training, {seconds_eval:,.0f} evaluations",
        f"- tokens: sampled in training {', '.join(sampled)}; trained "
        f"{sums['trained_tokens']:,.0f}",
        f"- calls: {sent}",
        f"- peak memory: {memory} (first process, since it last started)",
        f"\nHeld-out accuracy on {asked} questions, with its 95 % interval:\n",
    ]
    for name, draw in draws(run).items():
        shares = [with_interval(part * asked, asked) for part in ends(lines, f"eval_{name}")]
        page.append(f"- {draw}: {shares[0]} before, {shares[1]} after")
        before, after = (kinds or {} for kinds in ends(lines, f"eval_{name}_by_kind"))
        for kind in sorted(before.keys() & after.keys()):
            shares = [with_interval(*counts[kind]) for counts in (before, after)]
            page.append(f"- {draw}, {kind}: {shares[0]} before, {shares[1]} after")
    return pages.plain("\n".join(page) + "\n")


def commit() -> str:
    """The commit of these files, with "-dirty" behind it if they have been changed since."""
    command = "git describe --always --dirty --exclude='*'"  # by a shell, in case there is no git
    options = {"cwd": Path(__file__).parent, "shell": True, "capture_output": True, "text": True}
    return subprocess.run(command, **options).stdout.strip() or "unknown"
