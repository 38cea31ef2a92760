"""What a run says at its end: its last lines, its pictures, and report.md, a page on all of it.

Tests: pytest tests/test_mars.py
"""

import os
import platform
import re
import resource
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
import transformers

from plumbing import pages
from plumbing.folders import write_whole
from plumbing.logbook import metric_lines
from plumbing.metrics import ratio, wilson_interval, with_interval
from plumbing.start import Run


def summary(run: Run) -> None:
    """The last lines: held-out accuracy before and after, and where to look."""
    if run.rank:
        return
    lines = metric_lines(run)
    for draw, (before, after) in accuracies(run, lines).items():
        print(
            f"held-out accuracy, {draw}: {before:.3f} before, {after:.3f} after "
            f"{run.config.steps} steps"
        )
    if lines:
        if not (run.folder / "report.md").exists():  # not where a finished run is only looked at
            write_whole(run.folder / "report.md", report_card(run, lines).encode())
        print(f"{'report':<14}{run.folder / 'report.md'}")
        from plumbing import curves  # loads matplotlib

        print(f"{'curves':<14}{curves.of_run(run.folder)}")
    print(f"{'trajectories':<14}{pages.of_run(run.folder)}")
    print(f"{'checkpoint':<14}{run.folder / 'checkpoint'}")
    if run.tracker:
        run.tracker.finish()


def accuracies(run: Run, lines: list[dict], suffix: str = "") -> dict[str, tuple]:
    """draw -> its held-out scores (before, after); empty if metrics.jsonl lacks the last one."""
    ends = [line for line in lines if "eval_accuracy" in line]
    if not ends or ends[-1].get("eval_step") != run.config.steps:
        return {}
    draws = {"accuracy": f"temperature {run.config.temperature:g}", "greedy": "greedy"}
    found = {}
    for name, draw in draws.items():
        key = f"eval_{name}{suffix}"
        if key in ends[0]:
            # A run of one step has both evaluations in one line.
            found[draw] = ends[0].get(f"{key}_before", ends[0][key]), ends[-1][key]
    return found


def report_card(run: Run, lines: list[dict]) -> str:
    """A page on the run, in Markdown: how it was made, what it took, what came of it."""
    config = run.config
    sums = Counter()
    for line in lines:
        sums.update({key: value for key, value in line.items() if isinstance(value, (int, float))})
    evaluated = sums["seconds_eval"] + sums["seconds_eval_before"]
    sampled = [f"{sums[f'{role}_tokens']:,.0f} by {role}" for role in run.method.roles]
    facts = {
        "command": code(shlex.join(["python", *sys.orig_argv[1:]])),
        "commit": commit(),
        "machine": machine(run),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        "model": literal(str(run.start)),
        "steps": f"{len(lines)}, each {config.questions} questions × {config.group} attempts",
        "seconds": f"{sums['seconds_rollout']:,.0f} rollouts, {sums['seconds_train']:,.0f} "
        f"training (of it {sums['seconds_sync']:,.0f} new weights for the sampler), "
        f"{evaluated:,.0f} evaluations",
        "tokens": f"sampled in training {', '.join(sampled)}; trained "
        f"{sums['trained_tokens']:,.0f}",
        "peak memory": peak_memory(run),
    }
    rows = [f"# Run {literal(config.name)}", "", "| | |", "|---|---|"]
    rows += [f"| {name} | {value} |" for name, value in facts.items()]
    asked = len(run.eval_questions)
    rows += ["", f"Held-out accuracy on {asked} questions, with its 95 % interval:", ""]
    rows += ["| | before | after |", "|---|---|---|"]
    for draw, ends in accuracies(run, lines).items():
        before, after = (sure(value * asked, asked) for value in ends)
        rows.append(f"| {draw} | {before} | {after} |")
    for draw, (before, after) in accuracies(run, lines, "_by_kind").items():
        for kind in after:
            cells = (sure(*before[kind]), sure(*after[kind]))
            rows.append(f"| {draw}, {literal(kind)} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def literal(text: str) -> str:
    """Foreign text in a line of Markdown or a cell of a table, where it makes no markup."""
    return re.sub(r"[\\`*<\[|]", r"\\\g<0>", pages.plain(" ".join(text.split())))


def code(text: str) -> str:
    """Text as code in a cell of a table, which ends at neither a backtick nor a bar in it."""
    text = pages.plain(" ".join(text.split())).replace("|", r"\|")
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {text} {fence}" if longest else f"{fence}{text}{fence}"


def sure(right: float, asked: int) -> str:
    """A share in percent with its interval."""
    return with_interval(ratio(right, asked), *wilson_interval(right, asked))


def commit() -> str:
    """The commit of these files, and whether they have been changed since."""
    here = Path(__file__).parent
    said = []
    for arguments in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "-uno"]):
        try:
            done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True)
        except OSError:  # there is no git
            return "unknown"
        if done.returncode:
            return "unknown"
        said.append(done.stdout.strip())
    return f"{said[0]}, with changes" if said[1] else said[0]


def machine(run: Run) -> str:
    """The processor or GPU, and how many processes."""
    name = f"{platform.machine()}, {os.cpu_count()} cores"
    if run.device.type == "cuda":
        name = torch.cuda.get_device_name(run.device)
    return f"{name}, {run.ranks} process(es)"


def peak_memory(run: Run) -> str:
    """What this process held at most."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    said = f"{resident * unit / 2**30:.1f} GiB"
    if run.device.type == "cuda":
        said += f", {torch.cuda.max_memory_allocated(run.device) / 2**30:.1f} GiB on the GPU"
    return f"{said} (first process, since it last started)"
