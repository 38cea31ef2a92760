"""A trained checkpoint on questions: `mars.py eval CKPT` and `mars.py ask CKPT "question"`.

CKPT is a run (runs/NAME), its checkpoint/ folder, or any model that transformers loads. A run
brings its own settings, held-out questions and frozen model. Any other model takes the defaults, or
a preset's limits; `eval` then needs `--data`, and `ask` something to search. `--docs FOLDER`
searches your own documents.

    python mars.py eval runs/toy --temperature 0 --eval_questions 500
    torchrun --nproc_per_node=8 mars.py eval runs/toy --group 16 --name toy-16 --resume
    python mars.py eval Qwen/Qwen3-8B --preset paper --data bamboogle
    python mars.py ask runs/toy "when was omar engel born ?" --docs FOLDER

`eval` writes runs/eval-CKPT/, or what --name says, with table.json, rollouts/ (a file of each
process) and trajectories.html. Questions without a right answer are answered in answers.jsonl and
have no accuracy. --group K makes K attempts at each question: avg@K is the mean accuracy of an
attempt, pass@K the share of questions that some attempt has right. With --resume an evaluation that
was stopped, for example by --max_calls, goes on; if there is none yet, it begins.

`ask` without a question answers one line of standard input after another, typed or from a pipe,
each on its own: a follow-up must name what it is about. With `--data` it is `eval`.

Tests: pytest tests/test_mars.py tests/test_frozen.py
"""

import asyncio
import functools
import hashlib
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import trainer
from config import TRAIN, Config, UserError, fail, fields_with, parser, resolve
from plumbing import folders, logbook, models, pages
from plumbing.metrics import clustered_interval, failures, local_sums, ratio, wilson_interval
from plumbing.start import Run, build, new_folder, reclaim, refuse_other_questions
from processes import from_first_rank, on_first_rank, sum_over_ranks
from rollout import Method, Trajectory, play_batch
from tasks.questions import Question
from tools import documents, web

# Options that ask does not read, beside those that only training reads.
NOT_FOR_ASK = {"name", "runs", "resume", "grader", "eval_questions", "group", "max_calls"}
BATCH = 512  # attempts that a rank plays together and then writes; a kill loses at most one batch


def main(
    method: Method, arguments: list[str], complete: Callable[[str, dict], dict], **additions
) -> None:
    """`eval CKPT [options]` or `ask CKPT ["question"] [options]`, for train.main."""
    has_data = any(argument.partition("=")[0] == "--data" for argument in arguments)
    asking = arguments[0] == "ask" and not has_data
    command = "ask" if asking else "eval"
    if asking and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("ask runs in one process: start it without torchrun")
    ignored = fields_with(method.config, TRAIN) | (NOT_FOR_ASK if asking else set())
    command_line = parser(method.config, __doc__, ignored)
    command_line.add_argument("checkpoint")
    if asking:
        command_line.add_argument("question", nargs="?")
    # "Intermixed": the question may come after options.
    options = vars(command_line.parse_intermixed_args(arguments[1:]))
    for name in sorted(ignored.intersection(options)):
        raise UserError(f"{command} does not read --{name}; leave it out")
    options = complete(command, options)
    resume = options.pop("resume", False)
    config = settings(method, options, asking)
    if config.frozen():  # else every role is played by the checkpoint
        additions["frozen"] = frozen_model(Path(options["checkpoint"]))
    if asking:
        ask(method, config, options.get("question"), **additions)
    else:
        evaluate(method, config, resume, **additions)


def settings(method: Method, options: dict, asking: bool) -> Config:
    """The checkpoint's own settings, or a preset's, overridden by the given options."""
    model, saved = models.find_checkpoint(method.name, options["checkpoint"])
    is_run = saved is not None
    if not is_run:
        saved = dict(method.presets.get(options.get("preset"), {}))
        if not asking and not options.get("data", saved.get("data")):
            raise UserError("--data is missing: the questions to evaluate this model on")
    elif "preset" in options:
        raise UserError("a run has its own settings: leave --preset out")
    other_search = "search" in options and options["search"] != saved.get("search")
    if other_search:  # The options of one search mean nothing to another.
        saved |= {"docs": "", "eval_docs": "", "pages": "none", "block": ""}
    local = options.get("search", saved.get("search", "local")) == "local"
    no_documents = local and not options.get("docs", saved.get("docs"))
    if asking and no_documents and (other_search or not is_run):
        raise UserError(
            "there is nothing to search: name documents with --docs, or use --search serper"
        )
    if "docs" in options:
        saved["eval_docs"] = ""  # --docs is for all questions
    # The checkpoint has the adapters merged in, and the run's servers may hold other weights now.
    saved |= {"model": str(model), "name": "", "resume": False, "kl_beta": 0.0, "fsdp": False}
    saved |= {"lora_rank": 0, "server": "", "group": 1, "max_calls": 0}
    if asking:  # needs neither questions nor a judge
        saved |= {"data": "toy", "eval_data": "", "grader": "em", "eval_questions": 0}
    elif "data" in options:
        saved["eval_data"] = ""
        if options["data"] != "toy":
            saved["eval_questions"] = 0  # all questions, unless the option is given
    elif saved.get("data", "toy") != "toy" and not saved.get("eval_data"):
        for name in sorted({"eval_questions", "seed"}.intersection(options)):
            raise UserError(f"--{name} draws other questions than those held out: leave it out")
    config = resolve(method.config, options, presets=method.presets, saved=saved, training=False)
    if not asking and config.data == "toy":
        config.at_least(1, "eval_questions")
    return config


def frozen_model(checkpoint: Path) -> Path:
    """The model that plays the checkpoint's frozen roles; UserError if it is not there."""
    run = models.run_of(checkpoint)
    if run is None or not (run / trainer.FROZEN).exists():
        raise UserError(
            f"{run or checkpoint}/{trainer.FROZEN} is missing, the model that plays the frozen "
            f"role: copy the run's first model there, or let {checkpoint} play all roles"
        )
    return run / trainer.FROZEN


# --------------------------------------------------------------------------------------------- eval


def evaluate(method: Method, config: Config, resume: bool, **additions) -> None:
    """Makes --group attempts at every held-out question; prints and writes the table and the page.

    With `resume` an evaluation that has begun goes on.
    """
    source = models.run_of(Path(config.model)) or Path(config.model)
    base = f"eval-{source.resolve().name}"
    if resume:
        config.name = config.name or base
    begun = resume and folders.resumable(Path(config.runs) / config.name, evaluation=True)
    if not begun:
        folders.refuse_run(Path(config.runs), config.name, evaluation=True)
    run = build(method, config, training=False, **additions)
    run.fingerprint = fingerprint(run, additions.get("frozen"))
    run.lock = on_first_rank(
        lambda: reclaim(config, method.name) if begun else new_folder(config, base)
    )
    config.name = from_first_rank(config.name)
    run.folder = Path(config.runs) / config.name
    finished = from_first_rank(on_first_rank(lambda: open_files(run, begun)))

    batch = [(i, question) for i, question in enumerate(run.eval_questions) if i not in finished]
    batch = batch[run.rank :: run.ranks]
    size = max(1, BATCH // config.group)
    web.METER.begin(config.max_calls, run.ranks)
    problems = {}
    for first in range(0, len(batch), size):
        ended: list[Trajectory] = []
        options = {"step": "eval", "top_p": config.top_p, "on_end": ended.append}
        try:
            play_batch(run, batch[first : first + size], config.group, run.eval_tools, **options)
        except UserError as error:  # such as --max_calls
            problems[str(error)] = 1
            break
        finally:  # what has ended is kept, also after Ctrl-C
            ended.sort(key=lambda trajectory: (trajectory.question_index, trajectory.attempt))
            lines = [attempt_record(run, t, "grade" in additions) for t in ended]
            folders.append_lines(run.folder / "rollouts" / f"step_{run.rank}.jsonl", lines)
    for problem in sum_over_ranks(problems):  # of any rank; all have written by now
        raise UserError(f"{problem} (--name {config.name})")
    on_first_rank(lambda: report(run))


def fingerprint(run: Run, frozen: Path | None) -> str:
    """A hash of what an evaluation that goes on must find unchanged.

    It is of the questions, and of the names and times of the files behind weights and documents.
    """
    paths = [run.config.model, run.config.docs, run.config.eval_docs, frozen]
    paths = [Path(path) for path in paths if path]
    files = [f for path in paths for f in (path, *documents.files_below(path))]
    times = sorted((f.name, f.stat().st_mtime_ns) for f in files if f.is_file())
    return hashlib.sha256(f"{run.fingerprint} {times}".encode()).hexdigest()


def open_files(run: Run, begun: bool) -> set[int]:
    """The indices of finished questions. Lines of questions that lack a grade are removed."""
    if begun:
        refuse_other_questions(run.folder, run.fingerprint)
    else:
        folders.write_json(run.folder / "table.json", [])  # marks the folder as an evaluation
        logbook.write_settings(run)
    done = set()
    for path in folders.rollout_files(run.folder).values():
        lines = folders.read_lines(path)
        grades = Counter(line["index"] for line in lines if line["sums"].get("graded"))
        lines = [line for line in lines if grades[line["index"]] == run.config.group]
        folders.write_whole(path, folders.as_lines(lines))
        done.update(line["index"] for line in lines)
    return done


def attempt_record(run: Run, trajectory: Trajectory, own_grader: bool) -> dict:
    """The line of an attempt in rollouts/. A method's own grader needs no golden answers."""
    record = logbook.record(trajectory, run.chat, 0, "eval")
    known = own_grader or bool(trajectory.question.golden_answers)
    record |= {"index": trajectory.question_index, "known": known, "sums": local_sums([trajectory])}
    return record if known else record | {"reward": None}


def report(run: Run) -> None:
    """Writes and prints the table, the page, and the answers that nobody can grade."""
    sets: dict[str, list[dict]] = {}
    unknown = []
    columns = ["question_id", "question", "answer"]
    for path in folders.rollout_files(run.folder).values():
        for line in folders.read_lines(path):
            source = run.eval_questions[line["index"]].source
            attempts = sets.setdefault(source, []) if line["known"] else unknown
            attempts.append({key: line[key] for key in [*columns, "index", "reward", "sums"]})
    if len(unknown) + sum(map(len, sets.values())) < len(run.eval_questions) * run.config.group:
        raise UserError(f"{run.folder} lacks attempts of other machines: let all share one --runs")
    rows = [row(run, name, attempts) for name, attempts in sorted(sets.items())]
    if len(sets) > 1:
        rows.append(row(run, "all", sum(sets.values(), [])))
    files = {"table": folders.write_json(run.folder / "table.json", rows)}
    lines = [table(rows)] if rows else []
    if unknown:
        unknown.sort(key=lambda attempt: attempt["index"])
        answers = folders.as_lines([{key: attempt[key] for key in columns} for attempt in unknown])
        files["answers"] = folders.write_whole(run.folder / "answers.jsonl", answers)
        rows.append(row(run, "without answers", unknown))
    files["trajectories"] = pages.of_run(run.folder, questions=12)
    lines += [f"{name:<14}{path}" for name, path in files.items()]
    print("\n".join(lines), flush=True)  # last, since printing fails if nobody reads
    for line in rows:
        cure = "evaluate under another --name"  # --resume would keep the failed attempts
        logbook.check_failure_rate(line, f"set {line['set']}", cure)


def row(run: Run, name: str, attempts: list[dict]) -> dict:
    """One line of the table. An answer that no judge could grade counts as wrong."""
    sums = Counter()
    rewards: dict[int, list[float]] = {}  # of each question
    for attempt in attempts:
        sums.update(attempt["sums"])
        rewards.setdefault(attempt["index"], []).append(attempt["reward"] or 0.0)
    n = len(attempts)
    pass_at_k = {}
    low, high = wilson_interval(sums["reward"], n)
    if run.config.group > 1:
        passes = sum(max(own) > 0.5 for own in rewards.values())
        pass_low, pass_high = wilson_interval(passes, len(rewards))
        pass_at_k = {"attempts": run.config.group, "passed": passes / len(rewards)}
        pass_at_k |= {"passed_low": pass_low, "passed_high": pass_high}
        means = [statistics.fmean(own) for own in rewards.values()]
        low, high = clustered_interval(means, run.config.group)
    return {
        "set": name,
        "questions": len(rewards),
        "accuracy": sums["reward"] / n,
        "low": low,
        "high": high,
        **pass_at_k,
        **failures(sums),
        "calls": sums["calls"] / n,
        "malformed": ratio(sums["malformed"], sums["steps"]),
        "tool_errors": sums["failed"],
        "truncated_chunks": sums["cut"],
        **{f"{role}_tokens": sums[f"{role}_tokens"] / n for role in run.method.roles},
    }


def table(rows: list[dict]) -> str:
    """The rows as text: shares in percent, their 95 % intervals, calls an attempt."""
    total = rows[-1]
    shares = {"accuracy": ("accuracy", "low", "high")}
    if k := total.get("attempts"):
        shares = {
            f"avg@{k}": shares["accuracy"],
            f"pass@{k}": ("passed", "passed_low", "passed_high"),
        }
    head = "".join(f"{f'{share} (95 %)':<22}" for share in shares)
    lines = [f"{'set':<14}{'n':>6}  {head}{'calls':>8}{'malformed':>11}"]
    for r in rows:
        line = f"{r['set']:<14}{r['questions']:>6}  "
        for share, low, high in shares.values():
            line += f"{f'{r[share]:.1%} ({r[low]:.1%}–{r[high]:.1%})':<22}"
        lines.append(f"{line}{r['calls']:>8.2f}{r['malformed']:>11.1%}")
    if total["judge_failures"]:
        lines.append(f"{total['judge_failures']} answers not judged, so counted as not right")
    if total["tool_errors"]:
        lines.append(f"{total['tool_errors']} tool calls failed; the page has the reasons")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------- ask


def ask(method: Method, config: Config, text: str | None, **additions) -> None:
    """Answers a question, or the lines of standard input, and prints each step as it happens."""
    run = build(method, config, training=False, **additions)
    run.grade = lambda question, answer: 0.0  # nobody knows the right answer here
    if text is not None:
        return answer(run, text)
    if sys.stdin is None:
        raise UserError("standard input is closed: give a question, or lines of questions")
    sys.stdin.reconfigure(errors="surrogateescape")  # `answer` refuses a line that is not UTF-8.
    prompt = "> " if sys.stdin.isatty() else ""
    unanswered = 0
    stopped = False
    while True:
        try:
            line = input(prompt).removeprefix("\ufeff")  # a byte order mark
            if line.strip():
                if not prompt:
                    say(run, "question", line)
                answer(run, line)
                stopped = False
        except EOFError:
            if unanswered and not prompt:
                raise UserError(f"{unanswered} lines have no answer: see above") from None
            return
        except UserError as error:  # The next line may be a valid question.
            fail(error)
            unanswered += 1
        except KeyboardInterrupt as error:
            # The first Ctrl-C cancels the episode. A second one may damage the sampler's state.
            if stopped or not isinstance(error.__context__, asyncio.CancelledError):
                raise
            stopped = True
            unanswered += 1
            print("stopped; Ctrl-C once more ends", flush=True)


def answer(run: Run, text: str) -> None:
    """Answers one question on its own. UserError if it is no text, or too long."""
    if not text.strip():
        raise UserError("the question is empty")
    if text != text.encode("utf-8", "ignore").decode():
        raise UserError("the question is not text in UTF-8")
    question = Question("asked", text, (), "asked")
    run.method.fits(run.config, run.chat, question)
    options = {"step": "ask", "top_p": run.config.top_p, "on_event": functools.partial(say, run)}
    play_batch(run, [(0, question)], 1, run.eval_tools, **options)


def say(run: Run, kind: str, text: str) -> None:
    """Prints an event in one line, without control characters of foreign text."""
    name = run.method.roles.get(kind, kind).lower()
    print(f"{name:>9} | {pages.plain(' '.join(text.split()))}", flush=True)
