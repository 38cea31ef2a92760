"""A trained checkpoint on questions: `mars.py eval CKPT` and `mars.py ask CKPT "question"`.

CKPT is a run (runs/NAME), its checkpoint/ folder, or any model that transformers loads. A run
brings its own settings, held-out questions and frozen model. Any other model takes the defaults, or
a preset's limits; `eval` then needs `--data`, and `ask` something to search. `--docs FOLDER`
searches your own documents. Both run in one process.

    python mars.py eval runs/toy --temperature 0 --eval_questions 500
    python mars.py eval Qwen/Qwen3-8B --preset paper --data bamboogle
    python mars.py ask runs/toy "when was omar engel born ?" --docs FOLDER

`eval` writes runs/eval-CKPT/, or what --name says, with table.json, rollouts/ and
trajectories.html. `ask` without a question answers one line of standard input after another, typed
or from a pipe, each on its own: a follow-up must name what it is about.
Tests: pytest tests/test_mars.py tests/test_frozen.py
"""

import asyncio
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import trainer
from config import TRAIN, Config, UserError, fail, flagged, parse, parser, resolve
from plumbing import folders, logbook, models, pages
from plumbing.metrics import failures, ratio, rollout_sums, wilson_interval
from plumbing.start import Run, build, new_folder
from rollout import Method, Trajectory, play_batch
from tasks.questions import Question

# What ask does not read, beside what only training does.
NOT_FOR_ASK = {"name", "runs", "data", "grader", "eval_questions"}


def main(
    method: Method, arguments: list[str], complete: Callable[[str, dict], dict], **additions
) -> None:
    """`eval CKPT [options]` or `ask CKPT ["question"] [options]`; the rest is train.main's."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("eval and ask run in one process: start them without torchrun")
    asking = arguments[0] == "ask"
    ignored = flagged(method.config, TRAIN) | (NOT_FOR_ASK if asking else set())
    options = parser(method.config, __doc__, ignored)
    options.add_argument("checkpoint")
    if asking:
        options.add_argument("question", nargs="?")
    given = parse(options, arguments[1:])
    for name in sorted(ignored.intersection(given)):  # nobody would read it
        raise UserError(f"{arguments[0]} does not read --{name}; leave it out")
    given = complete(arguments[0], given)
    config = settings(method, given, asking)
    if config.frozen():  # else every role is played by the checkpoint
        additions["frozen"] = frozen_model(Path(given["checkpoint"]))
    if asking:
        ask(method, config, given.get("question"), **additions)
    else:
        evaluate(method, config, **additions)


def settings(method: Method, given: dict, asking: bool) -> Config:
    """The checkpoint's own settings, or a preset's, then what was given."""
    model, saved = models.find_checkpoint(method.name, given["checkpoint"])
    if saved is None:
        saved = dict(method.presets.get(given.get("preset"), {}))
        if not asking and not given.get("data", saved.get("data")):
            raise UserError("--data is missing: the questions to evaluate this model on")
        local = given.get("search", saved.get("search", "local")) == "local"
        if asking and local and not given.get("docs", saved.get("docs")):
            raise UserError(
                "there is nothing to search: name documents with --docs, or use --search serper"
            )
    elif "preset" in given:
        raise UserError("a run has its own settings: leave --preset out")
    if given.get("search", saved.get("search")) != saved.get("search"):
        saved |= {"docs": "", "eval_docs": "", "pages": "none", "block": ""}
    if "docs" in given:
        saved["eval_docs"] = ""  # given documents are for all questions
    # The checkpoint has the adapters merged in, and the run's servers may hold anything now.
    saved |= {"model": str(model), "name": "", "resume": False, "kl_beta": 0.0, "fsdp": False}
    saved |= {"lora_rank": 0, "server": ""}
    if asking:  # needs neither questions nor a judge
        saved |= {"data": "toy", "eval_data": "", "grader": "em", "eval_questions": 0}
    elif "data" in given:
        saved["eval_data"] = ""
        if given["data"] != "toy":
            saved["eval_questions"] = 0  # all of them, unless told otherwise
    elif saved.get("data", "toy") != "toy" and not saved.get("eval_data"):
        for name in {"eval_questions", "seed"}.intersection(given):
            raise UserError(f"--{name} draws other questions than those held out: leave it out")
    config = resolve(method.config, given, presets=method.presets, saved=saved, training=False)
    if not asking and config.data == "toy":
        config.at_least(1, "eval_questions")
    return config


def frozen_model(checkpoint: Path) -> Path:
    """The model that plays the checkpoint's frozen roles; UserError if it is not there."""
    run = models.run_of(checkpoint)
    if run is None or not (run / trainer.FROZEN).exists():
        raise UserError(
            f"{run or checkpoint}/{trainer.FROZEN} is missing, the model that plays the frozen "
            f"role: copy the one there that the run began with, or let {checkpoint} play all roles"
        )
    return run / trainer.FROZEN


# --------------------------------------------------------------------------------------------- eval


def evaluate(method: Method, config: Config, **additions) -> None:
    """Answers every held-out question; prints and writes the table and the page."""
    source = models.run_of(Path(config.model)) or Path(config.model)
    folders.refuse_run(Path(config.runs), config.name)
    run = build(method, config, training=False, **additions)
    batch = list(enumerate(run.eval_questions))
    trajectories = play_batch(run, batch, 1, run.eval_tools, step="eval", top_p=config.top_p)
    rows = [row(run, name, members) for name, members in by_set(trajectories)]
    try:
        run.lock = new_folder(config, f"eval-{source.resolve().name}")
        run.folder = Path(config.runs) / config.name
        logbook.settings(run)
        folders.write_json(run.folder / "table.json", rows)
        logbook.write(run, trajectories, 0, "eval")
    finally:  # where the disk takes nothing, the result of hours is seen at least
        print(table(rows), flush=True)
    print(f"{'table':<14}{run.folder / 'table.json'}")
    print(f"{'trajectories':<14}{pages.of_run(run.folder, questions=12)}")
    for line in rows:
        logbook.check_failure_rate(line, f"set {line['set']}")


def by_set(trajectories: list[Trajectory]) -> list[tuple[str, list[Trajectory]]]:
    """The trajectories of each set of questions, and of all if there are several sets."""
    sets: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        sets.setdefault(trajectory.question.source, []).append(trajectory)
    listed = sorted(sets.items())
    if len(sets) > 1:
        listed.append(("all", trajectories))
    return listed


def row(run: Run, name: str, trajectories: list[Trajectory]) -> dict:
    """One line of the table. An answer that no judge could grade counts as wrong."""
    sums = rollout_sums(trajectories)
    n = len(trajectories)
    low, high = wilson_interval(sums["reward"], n)
    return {
        "set": name,
        "questions": n,
        "accuracy": sums["reward"] / n,
        "low": low,
        "high": high,
        **failures(sums),
        "calls": sums["calls"] / n,
        "malformed": ratio(sums["malformed"], sums["steps"]),
        "tool_errors": sums["failed"],
        "truncated_chunks": sums["cut"],
        **{f"{role}_tokens": sums[f"{role}_tokens"] / n for role in run.method.roles},
    }


def table(rows: list[dict]) -> str:
    """The rows as text: shares in percent, the accuracy's 95 % interval, calls an attempt."""
    lines = [f"{'set':<14}{'n':>6}  {'accuracy (95 %)':<22}{'calls':>8}{'malformed':>11}"]
    for r in rows:
        accuracy = f"{r['accuracy']:.1%} ({r['low']:.1%}–{r['high']:.1%})"
        calls = f"{r['calls']:>8.2f}{r['malformed']:>11.1%}"
        lines.append(f"{r['set']:<14}{r['questions']:>6}  {accuracy:<22}{calls}")
    whole = rows[-1]
    if whole["judge_failures"]:
        lines.append(f"{whole['judge_failures']} answers not judged, so counted as not right")
    if whole["tool_errors"]:
        lines.append(f"{whole['tool_errors']} tool calls failed; the page has the reasons")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------- ask


def ask(method: Method, config: Config, text: str | None, **additions) -> None:
    """Answers a question, or the lines of standard input, showing how as it happens."""
    run = build(method, config, training=False, **additions)
    run.grade = lambda question, answer: 0.0  # nobody knows the right answer here
    if text is not None:
        return answer(run, text)
    stopped = False
    for line in filter(str.strip, typed_lines()):
        try:
            answer(run, line)
            stopped = False
        except UserError as error:  # the next question may be a better one
            fail(error)
        except KeyboardInterrupt as error:
            # The first Ctrl-C cancels the episode. A second one during this breaks into a step.
            if stopped or not isinstance(error.__context__, asyncio.CancelledError):
                raise
            stopped = True
            print("stopped; Ctrl-C once more ends", flush=True)


def typed_lines() -> Iterator[str]:
    """The lines of standard input. On a terminal each is asked for."""
    sys.stdin.reconfigure(errors="surrogateescape")  # `answer` refuses such a line
    prompt = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError):
        while True:
            yield input(prompt)


def answer(run: Run, text: str) -> None:
    """Answers one question on its own. UserError if it is no text, or too long."""
    if not text.strip():
        raise UserError("the question is empty")
    if text != text.encode("utf-8", "ignore").decode():
        raise UserError("the question is not text in UTF-8")
    question = Question("asked", text, (), "asked")
    run.method.fits(run.config, run.chat, question)
    shown = {"step": "ask", "top_p": run.config.top_p, "on_event": functools.partial(say, run)}
    play_batch(run, [(0, question)], 1, run.eval_tools, **shown)


def say(run: Run, kind: str, text: str) -> None:
    """One line for somebody who watches. What strangers wrote cannot speak to the terminal."""
    name = run.method.roles.get(kind, kind).lower()
    print(f"{name:>9} | {pages.plain(' '.join(text.split()))}", flush=True)
