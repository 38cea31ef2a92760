"""A trained checkpoint on questions: `mars.py eval CKPT` and `mars.py ask CKPT "question"`.

CKPT is a run (runs/NAME), its checkpoint/ folder, or any chat model that transformers loads. A
run brings its own settings, held-out questions and frozen model. A plain model gets the paper's
limits; `eval` then needs `--data`, and `ask` something to search. `--docs FOLDER` searches your own
documents. One process.

    python mars.py eval runs/toy
    python mars.py eval runs/toy --temperature 0 --eval_questions 500
    python mars.py eval runs/toy --eval_samples 4        avg@4 and pass@4 instead of the accuracy
    python mars.py eval Qwen/Qwen3-8B --data bamboogle --search serper --grader judge
    python mars.py ask runs/toy "when was ada baker born ?" --docs my_notes/

Written: runs/eval-CKPT/, or what --name says, with predictions.json (HLE's format: the first
attempt at each question; the others follow it as "further"), table.json, rollouts/ and
trajectories.html; `ask` writes one page.
"""

import dataclasses
import time
from collections import Counter
from pathlib import Path
from typing import get_args

import trainer
import view
from config import Config, UserError, parse, parser, resolve
from plumbing import files, logbook, smollm2
from plumbing.build import build, number_from
from plumbing.metrics import rollout_sums, share
from plumbing.records import record
from plumbing.run import Run
from plumbing.statistics import average_interval, calibration_error, pass_at, wilson_interval
from plumbing.surroundings import fingerprints
from rollout import Method, Trajectory
from tasks import grading
from tasks.judge import Judge
from tasks.questions import Question

# What a plain model takes over from the paper's preset.
LIMITS = (
    "max_turns sys2_context step_tokens answer_tokens sys1_prompt sys1_response top_k distill "
    "question_in_system1".split()
)


def main(method: Method, arguments: list[str], **additions) -> int:
    """`eval CKPT [options]` or `ask CKPT "question" [options]`; `additions` are build's."""
    if number_from("WORLD_SIZE", 1) > 1:
        raise UserError("eval and ask run in one process: start them without torchrun")
    asking = arguments[0] == "ask"
    options = parser(method.config, __doc__)
    options.add_argument(
        "checkpoint", help="a run, a checkpoint folder, or a model that transformers loads"
    )
    if asking:
        options.add_argument("question")
    given = parse(options, arguments[1:])
    refuse_ignored(method.config, given, asking)
    try:
        config = settings(method, given, asking)
        if config.frozen():  # else every role is played by the checkpoint
            additions["frozen"] = frozen_model(config, Path(given["checkpoint"]))
    except PermissionError as error:
        raise UserError(f"cannot read {error.filename} ({error.strerror})") from None
    if asking:
        return ask(method, config, given["question"], Path(given["checkpoint"]), **additions)
    return evaluate(method, config, **additions)


def refuse_ignored(config: type[Config], given: dict, asking: bool) -> None:
    """UserError for options that would be read by nobody."""
    ignored = sorted(config.for_training.intersection(given))
    if asking:
        ignored += sorted(
            {"name", "data", "grader", "eval_questions", "eval_samples"}.intersection(given)
        )
    if ignored:
        command = "ask" if asking else "eval"
        raise UserError(f"{command} does not read --{ignored[0]}; leave it out")
    if asking and not given["question"].strip():
        raise UserError("the question is empty")
    if asking and given["question"].encode("utf-8", "ignore").decode() != given["question"]:
        raise UserError("the question is not valid UTF-8")


def settings(method: Method, given: dict, asking: bool) -> Config:
    """The checkpoint's own settings (or the paper's limits), then what was given."""
    model, saved = find_checkpoint(method, given["checkpoint"])
    if saved is None:
        saved = plain_model_settings(method, given, asking)
    elif not asking:
        refuse_another_draw(given, saved)
    saved |= {"model": str(model), "name": "", "resume": False, "kl_beta": 0.0, "fsdp": False}
    saved["lora_rank"] = 0  # the checkpoint has the adapters merged in
    saved["server"] = ""  # the run's servers may hold anything now
    for name in ("engine", "max_mismatch_kl"):
        saved[name] = getattr(method.config, name)
    forget_other_search(given, saved)
    if asking:  # needs neither questions nor a judge
        saved |= {"data": "toy", "eval_data": "", "grader": "em", "eval_questions": 0}
    elif "data" in given:
        saved["eval_data"] = ""
        if given["data"] != "toy":
            saved["eval_questions"] = 0  # all of them, unless told otherwise
    config = resolve(method.config, given, presets=method.presets, saved=saved, training=False)
    if not asking and config.data == "toy" and config.eval_questions < 1:
        raise UserError("--eval_questions must be at least 1")
    return config


def forget_other_search(given: dict, saved: dict) -> None:
    """Takes out of a run's settings what belongs to another search than the one given."""
    search = given.get("search")
    web = search not in (None, "local")
    if web and "docs" not in given:
        saved["docs"] = ""
    if web or "docs" in given:
        saved["eval_docs"] = ""  # given documents are for all questions
    if search not in (None, "serper"):
        saved["pages"] = "none"  # only serper's results have pages behind them
    if search == "local":
        saved["block"] = ""


def frozen_model(config: Config, checkpoint: Path) -> Path:
    """The model that plays the checkpoint's frozen roles; UserError if it is not there."""
    fields = dataclasses.fields(config)
    option = next(field.name for field in fields if "frozen" in get_args(field.type))
    run = run_of(checkpoint)
    saved = files.read_json(run / "config.json") if run else {}
    if saved.get(option) != "frozen":
        raise UserError(f"{checkpoint} was not trained with --{option} frozen: leave it out")
    frozen = run / trainer.FROZEN
    if not frozen.exists():
        raise UserError(
            f"{frozen} is missing, the frozen model: copy the one there that the run began with "
            f"({saved.get('model')}), or let the trained one play all roles with --{option} train"
        )
    return frozen


def plain_model_settings(method: Method, given: dict, asking: bool) -> dict:
    """For a model that no run made: the paper's limits."""
    paper = method.presets.get("paper", {})
    saved = {name: paper[name] for name in LIMITS if name in paper}
    if asking and "sys2_context" in saved:
        saved["kv_tokens"] = 2 * saved["sys2_context"]
    if not asking and "data" not in given:
        raise UserError(
            "--data is missing: name the questions to evaluate this model on (a JSONL file, "
            "nq, hle, …)"
        )
    if asking and not given.get("docs") and given.get("search", "local") == "local":
        raise UserError(
            "there is nothing to search: name your documents with --docs, or use --search serper"
        )
    return saved


def refuse_what_it_was_trained_on(run: Run) -> None:
    """UserError if a question was among those that the checkpoint was trained on."""
    made = run_of(Path(run.config.model))
    if made is None or not (made / "questions.json").exists():
        return
    trained = files.read_json(made / "questions.json").get("trained")
    if not isinstance(trained, list):
        run.claim.release()
        raise UserError(f"{made}/questions.json is damaged: it does not list what was trained on")
    trained = set(trained)
    asked = fingerprints(run.eval_questions)
    known = sum(mark in trained for mark in asked)
    if known:
        run.claim.release()
        raise UserError(
            f"{made} was trained on {known} of these {len(asked)} questions: name others with "
            "--data, or the file that it was trained with, unchanged, by leaving --data out"
        )


def refuse_another_draw(given: dict, saved: dict) -> None:
    """UserError for options that draw held-out questions anew: some were trained on.

    The toy's worlds are disjoint, so there any draw will do.
    """
    own_data = "data" not in given and saved.get("data") != "toy"
    if not own_data:
        return
    if given.get("seed", saved.get("seed")) != saved.get("seed"):
        raise UserError(
            "another --seed would draw other held-out questions, and the run was trained on some "
            "of them; leave it out, or name other questions with --data"
        )
    if saved.get("eval_data"):
        return
    held_out = saved.get("eval_questions")
    if given.get("eval_questions", held_out) != held_out:
        # A smaller number is another draw, not a part of the larger one.
        raise UserError(
            f"this run held out {held_out} questions and was trained on the others: leave "
            "--eval_questions out, or name other questions with --data"
        )


def find_checkpoint(method: Method, name: str) -> tuple[Path | str, dict | None]:
    """(model folder or hub name, the settings of the run that made it if there is one)."""
    if name == smollm2.NAME:
        return name, None
    path = Path(name)
    try:
        exists = path.exists()
    except PermissionError:
        raise
    except (OSError, ValueError):  # a name that no file system takes
        exists = False
    if not exists:
        if name.count("/") == 1 and not name.startswith((".", "/", "runs/")):
            return name, None  # a name on the hub
        raise UserError(f"there is no checkpoint at {name}")
    model = path
    if (path / "method.json").exists():
        # A kill may have left the link checkpoint/ one state behind.
        model = trainer.newest_model(path) or path / "checkpoint"
    settings = model / "config.json"
    if not settings.exists() or "model_type" not in files.read_json(settings):
        raise UserError(
            f"{name} holds no checkpoint: name a run that has written one (after --save_every "
            "steps), its checkpoint folder, or a model's folder"
        )
    run = run_of(path)
    if run is None:
        return model, None
    made_by = files.read_json(run / "method.json").get("name")
    if made_by != method.name:
        raise UserError(f"{run} was made by the method {made_by}: use that method's own file")
    return model, files.read_json(run / "config.json")


def run_of(path: Path) -> Path | None:
    """The run's folder, seen from the run, from its checkpoint or from the model of a state.

    Its frozen model is none of the run's: it is what the run began with.
    """
    path = path.resolve()  # its name alone would not say where a link or ".." leads
    above = [path, *path.parents][:4]  # runs/x/state/step_1/model lies three below the run
    for folder in above[:1] if path.name == trainer.FROZEN else above:
        if (folder / "config.json").exists() and (folder / "method.json").exists():
            return folder
    return None


# --------------------------------------------------------------------------------------------- eval


def evaluate(method: Method, config: Config, **additions) -> int:
    """Answers every held-out question; prints and writes table, predictions and page."""
    made = run_of(Path(config.model)) or Path(config.model)
    base = f"eval-{made.resolve().name}"
    run = build(method, config, training=False, base=base, **additions)
    refuse_what_it_was_trained_on(run)
    confidences = {}
    if config.grader == "judge" and "grade" not in additions:
        run.grade = judge_with_confidence(confidences)
    start = time.perf_counter()
    trajectories = run.rollouts(
        list(enumerate(run.eval_questions)),
        config.eval_samples,
        step="eval",
        tools=run.eval_tools,
        temperature=config.temperature,
        top_p=config.top_p,
    )
    seconds = time.perf_counter() - start
    rows = [
        row(run, name, members, confidences, seconds * len(members) / len(trajectories))
        for name, members in by_set(trajectories)
    ]
    write(run, trajectories, rows)
    print(table(run, rows))
    print(f"{'predictions':<14}{run.folder / 'predictions.json'}")
    print(f"{'table':<14}{run.folder / 'table.json'}")
    print(f"{'trajectories':<14}{view.page(run.folder, questions=12)}")
    for kind in ("tool_error_share", "judge_failure_share", "lost_share"):
        failed = max(line[kind] for line in rows)
        if failed > config.max_tool_error_share:
            raise UserError(
                f"{kind} is {failed:.0%}, so the table says little about the model; see the page "
                "for the reasons"
            )
    return 0


def judge_with_confidence(confidences: dict[tuple[str, str], float | None]):
    """A grader that also keeps each verdict's confidence, by question id and answer."""
    judge = Judge.from_environment()

    def grade(question: Question, answer: str) -> float:
        verdict = judge(question, answer)
        confidences[question.id, answer] = verdict.confidence
        return float(verdict.correct)

    return grade


def write(run: Run, trajectories: list[Trajectory], rows: list[dict]) -> None:
    """The evaluation's files."""
    logbook.settings(run)
    predictions = {}
    for trajectory in trajectories:
        usage = {
            f"{role}_tokens": sum(sum(sample.mask) for sample in trajectory.samples(role))
            for role in run.method.roles
        }
        prediction = {
            "model": str(run.config.model),
            "response": "".join(run.chat.decode(t.sampled) for t in trajectory.turns[-1:]),
            "answer": trajectory.answer,
            "usage": usage,
        }
        first = predictions.setdefault(trajectory.question.id, prediction)
        if first is not prediction:
            first.setdefault("further", []).append(prediction)
    files.write_json(run.folder / "predictions.json", predictions)
    files.write_json(run.folder / "table.json", rows)
    records = [record(trajectory, run.chat, 0, "eval") for trajectory in trajectories]
    files.append_lines(run.folder / "rollouts" / "step_0.jsonl", records)


def by_set(trajectories: list[Trajectory]) -> list[tuple[str, list[Trajectory]]]:
    """The trajectories of each set of questions, and of all if there are several sets."""
    sets: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        sets.setdefault(trajectory.question.source, []).append(trajectory)
    listed = sorted(sets.items())
    if len(sets) > 1:
        listed.append(("all", trajectories))
    return listed


def row(
    run: Run, name: str, trajectories: list[Trajectory], confidences: dict, seconds: float
) -> dict:
    """One line of the table.

    Accuracy is over all attempts: an answer that no judge could grade counts as wrong. So are the
    other shares, calls and tokens.
    """
    sums = rollout_sums(trajectories, run.method.roles)
    n = len(trajectories)
    low, high = wilson_interval(int(sums["reward"]), n)
    golds = [(t.answer, t.question.golden_answers) for t in trajectories]
    sure = [
        (confidences[t.question.id, t.answer], bool(t.reward))
        for t in trajectories
        if confidences.get((t.question.id, t.answer)) is not None
    ]
    made = {
        "set": name,
        "questions": n // run.config.eval_samples,
        "accuracy": sums["reward"] / n,
        "low": low,
        "high": high,
        "em": sum(grading.exact_match(*gold) for gold in golds) / n,
        "f1": sum(grading.f1(*gold) for gold in golds) / n,
        "cover": sum(grading.cover_match(*gold) for gold in golds) / n,
        "judge_failures": int(sums["unjudged"]),
        "judge_failure_share": share(sums["unjudged"], sums["answered"]),
        "lost_share": sums["lost"] / n,
        "calibration_error": calibration_error(*zip(*sure)) if sure else None,
        "calls": sums["calls"] / n,
        "malformed": share(sums["malformed"], sums["steps"]),
        "tool_errors": int(sums["failed"]),
        "tool_error_share": share(sums["failed"], sums["calls"]),
        "truncated_chunks": int(sums["cut"]),
        "seconds": seconds,
    }
    for role in run.method.roles:
        made[f"{role}_tokens"] = sums[f"{role}_tokens"] / n
    if run.config.eval_samples > 1:
        made |= repeated(trajectories, run.config.eval_samples)
    return made


def repeated(trajectories: list[Trajectory], attempts: int) -> dict:
    """What k attempts at each question change in a row: avg@k's interval, pass@1 to pass@k."""
    right = Counter()  # place of a question -> how many of its attempts are
    for trajectory in trajectories:
        right[trajectory.question_index] += bool(trajectory.reward)
    right = list(right.values())
    low, high = average_interval(right, attempts)
    pass_low, pass_high = wilson_interval(sum(count > 0 for count in right), len(right))
    return {
        "low": low,
        "high": high,
        "attempts": attempts,
        "pass_at": {str(k): pass_at(right, attempts, k) for k in range(1, attempts + 1)},
        "pass_low": pass_low,
        "pass_high": pass_high,
    }


def table(run: Run, rows: list[dict]) -> str:
    """The rows as text: shares in percent, with intervals; calls and tokens per attempt."""
    roles = list(run.method.roles)
    k = run.config.eval_samples
    shares = ["accuracy (95 %)"]
    if k > 1:
        shares = [f"avg@{k} (95 %)", f"pass@{k} (95 %)"]
    head = f"{'set':<14}{'n':>6}  " + "".join(f"{name:<22}" for name in shares)
    head += f"{'EM':>6}{'F1':>7}{'cover':>7}{'calls':>7}"
    head += "".join(f"{role + ' tok':>10}" for role in roles) + f"{'malformed':>11}{'seconds':>9}"
    lines = [head]
    notes = []
    for r in rows:
        shares = [with_interval(r["accuracy"], r["low"], r["high"])]
        if k > 1:
            shares.append(with_interval(r["pass_at"][str(k)], r["pass_low"], r["pass_high"]))
        line = f"{r['set']:<14}{r['questions']:>6}  " + "".join(f"{text:<22}" for text in shares)
        line += f"{r['em']:>6.1%}{r['f1']:>7.1%}"
        line += f"{r['cover']:>7.1%}{r['calls']:>7.2f}"
        line += "".join(f"{r[f'{role}_tokens']:>10.0f}" for role in roles)
        lines.append(line + f"{r['malformed']:>11.1%}{r['seconds']:>9.1f}")
        if r["judge_failures"]:
            notes.append(
                f"{r['set']}: {r['judge_failures']} answers could not be judged, counted as "
                "not right"
            )
        if r["tool_errors"]:
            notes.append(
                f"{r['set']}: {r['tool_errors']} tool calls failed, see the page for the reasons"
            )
        if r["truncated_chunks"]:
            notes.append(
                f"{r['set']}: {r['truncated_chunks']} chunks held a document that was cut off "
                "at their end"
            )
    return "\n".join(lines + notes)


def with_interval(share: float, low: float, high: float) -> str:
    return f"{share:.1%} ({low:.1%}–{high:.1%})"


# ---------------------------------------------------------------------------------------------- ask


def ask(method: Method, config: Config, text: str, checkpoint: Path, **additions) -> int:
    """Answers one question, showing how as it happens; writes the trajectory's page at the end."""
    run = build(method, config, training=False, folder=checkpoint, **additions)
    run.grade = lambda question, answer: 0.0  # nobody knows the right answer here
    question = Question("asked", text, (), "asked")
    method.fits(config, run.chat, question)
    folder = Path(config.runs)
    if (checkpoint / "rollouts").is_dir():
        folder = checkpoint
    files.make_folder(folder)
    (trajectory,) = run.rollouts(
        [(0, question)],
        1,
        step="ask",
        tools=run.eval_tools,
        temperature=config.temperature,
        top_p=config.top_p,
        on_event=lambda kind, text: say(method.roles.get(kind, kind).lower(), text),
    )
    trajectory.reward = None
    captions = view.Method(method.name, method.roles)
    line = record(trajectory, run.chat, 0, "eval")
    page = view.trajectory_page([line], folder / "ask.html", captions)
    say("page", str(page))
    return 0


def say(kind: str, text: str) -> None:
    """One line for somebody who watches. What strangers wrote cannot speak to the terminal."""
    print(f"{kind:>9} | {view.plain(' '.join(text.split()))}", flush=True)
