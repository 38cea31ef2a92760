"""A trained checkpoint on questions: `mars.py eval CKPT` and `mars.py ask CKPT "question"`.

CKPT is a run (runs/NAME), its checkpoint/ folder, or any chat model that transformers loads. A run brings its own settings and
held-out questions; a plain model gets the paper's limits and needs `--data`. Options as for training; `--docs FOLDER` searches
your own documents. One process.

    python mars.py eval runs/toy
    python mars.py eval runs/toy --temperature 0 --eval_questions 500
    python mars.py eval Qwen/Qwen3-8B --data bamboogle --search serper --grader judge
    python mars.py ask runs/toy "when was ada baker born ?" --docs my_notes/

Written: runs/NAME/ with predictions.json (HLE's format), table.json, rollouts/ and trajectories.html; `ask` writes one page.
"""
import dataclasses
import json
import os
import time
from pathlib import Path

from plumbing import statistics
from tasks import grading
import view
from plumbing.build import build, check_lengths, free_name
from config import PAPER, Config, UserError, parser, resolve
from plumbing.metrics import rollout_sums
from rollout import Trajectory, record
from tasks.judge import Judge
from tasks.questions import Question

LIMITS = ("max_turns", "sys2_context", "step_tokens", "answer_tokens", "sys1_prompt", "sys1_response", "top_k", "distill",
          "question_in_system1")


def main(arguments: list[str]) -> int:
    """`eval CKPT [options]` or `ask CKPT "question" [options]`."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("eval and ask run in one process: start them without torchrun")
    asking = arguments[0] == "ask"
    options = parser(__doc__)
    options.add_argument("checkpoint", help="a run, a checkpoint folder, or a model that transformers loads")
    if asking:
        options.add_argument("question")
    given = vars(options.parse_args(arguments[1:]))
    config = settings(given, asking)
    if asking:
        if not given["question"].strip():
            raise UserError("the question is empty")
        return ask(config, given["question"], Path(given["checkpoint"]))
    return evaluate(config)


def settings(given: dict, asking: bool) -> Config:
    """The checkpoint's own settings (or the paper's limits), then what was given."""
    model, saved = find_checkpoint(given["checkpoint"])
    if saved is None:
        saved = {name: PAPER[name] for name in LIMITS}
        saved |= {"kv_tokens": 2 * saved["sys2_context"]} if asking else {}
        if not asking and "data" not in given:
            raise UserError("--data is missing: name the questions to evaluate this model on (a JSONL file, nq, hle, …)")
        if asking and not given.get("docs") and given.get("search", "local") == "local":
            raise UserError("there is nothing to search: name your documents with --docs, or use --search serper")
    if saved.get("system1") == "frozen" and "system1" not in given:
        raise UserError("System 1 was the start's model in this run, and only the trained one is saved: add --system1 train to "
                        "let it play both roles, or see eval_accuracy in the run's metrics.jsonl")
    if given.get("eval_data"):
        raise UserError("evaluation reads its questions from --data; leave --eval_data out")
    saved |= {"model": str(model), "name": "", "resume": False, "kl_beta": 0.0, "fsdp": False}
    if asking:                                              # needs neither questions nor a judge
        saved |= {"data": "toy", "grader": "em", "eval_questions": 0}
    elif "data" in given:
        saved["eval_data"] = ""
        if given["data"] != "toy":
            saved["eval_questions"] = 0                     # all of them, unless told otherwise
    return resolve(given, saved, training=False)


def find_checkpoint(name: str) -> tuple[Path | str, dict | None]:
    """(model folder or hub name, the settings of the run that made it if there is one)."""
    path = Path(name)
    if not path.exists():
        if name.count("/") == 1 and not name.startswith((".", "/", "runs/")):
            return name, None                               # a name on the hub
        raise UserError(f"there is no checkpoint at {name}")
    model = path / "checkpoint" if (path / "checkpoint").exists() else path
    if not (model / "config.json").exists() or "model_type" not in json.loads((model / "config.json").read_text()):
        raise UserError(f"{name} holds no checkpoint yet: a run writes its first after --save_every steps")
    settings_file = (path if model is not path else path.parent) / "config.json"
    saved = json.loads(settings_file.read_text()) if settings_file.exists() else {}
    return model, saved if "max_turns" in saved else None


# ---------------------------------------------------------------------------------------------- eval

def evaluate(config: Config) -> int:
    """Answers every held-out question once; prints and writes the table, predictions, records and page."""
    if not config.name:
        model = Path(config.model)
        config.name = free_name(Path(config.runs), f"eval-{model.parent.name if model.name == 'checkpoint' else model.name}")
    run = build(config, training=False)
    confidences = {}
    if config.grader == "judge":
        judge = Judge.from_environment()

        def grade(question: Question, answer: str) -> float:
            verdict = judge(question, answer)
            confidences[question.id] = verdict.confidence
            return float(verdict.correct)
        run.grade = grade
    start = time.perf_counter()
    trajectories = run.rollouts(list(enumerate(run.eval_questions)), 1, step="eval", tools=run.eval_tools,
                                temperature=config.temperature, top_p=config.eval_top_p)
    seconds = time.perf_counter() - start
    rows = [row(name, members, confidences, seconds * len(members) / len(trajectories))
            for name, members in by_set(trajectories)]
    folder = run.folder
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1) + "\n")
    predictions = {t.question.id: {"model": str(config.model), "response": run.format.decode(t.turns[-1].sampled),
                                   "answer": t.answer, "usage": {"sys2_tokens": sum(t.sample.mask), "sys1_tokens": sum(
                                       sum(s.mask) for s in t.sys1_samples())}} for t in trajectories}
    (folder / "predictions.json").write_text(json.dumps(predictions, ensure_ascii=False, indent=1) + "\n")
    (folder / "table.json").write_text(json.dumps(rows, indent=1) + "\n")
    with open(folder / "rollouts" / "step_0.jsonl", "w") as f:
        f.writelines(json.dumps(record(t, run.format, 0, "eval"), ensure_ascii=False) + "\n" for t in trajectories)
    print(table(rows))
    for name, path in (("predictions", folder / "predictions.json"), ("table", folder / "table.json"),
                       ("trajectories", view.page(folder, questions=12))):
        print(f"{name:<14}{path}")
    return 0


def by_set(trajectories: list[Trajectory]) -> list[tuple[str, list[Trajectory]]]:
    """The trajectories of each set of questions, and of all if there are several sets."""
    sets: dict[str, list[Trajectory]] = {}
    for t in trajectories:
        sets.setdefault(t.question.source, []).append(t)
    return sorted(sets.items()) + ([("all", trajectories)] if len(sets) > 1 else [])


def row(name: str, trajectories: list[Trajectory], confidences: dict, seconds: float) -> dict:
    """One line of the table. Accuracy is over all questions: an answer that no judge could grade counts as wrong."""
    s, n = rollout_sums(trajectories), len(trajectories)
    low, high = statistics.wilson_interval(int(s["reward"]), n)
    golds = [(t.answer, t.question.golden_answers) for t in trajectories]
    sure = [(confidences[t.question.id], bool(t.reward)) for t in trajectories if confidences.get(t.question.id) is not None]
    return {"set": name, "questions": n, "accuracy": s["reward"] / n, "low": low, "high": high,
            "em": sum(grading.exact_match(*g) for g in golds) / n, "f1": sum(grading.f1(*g) for g in golds) / n,
            "cover": sum(grading.cover_match(*g) for g in golds) / n, "judge_failures": int(s["trajectories"] - s["graded"]),
            "calibration_error": statistics.calibration_error(*zip(*sure)) if sure else None,
            "calls": s["calls"] / n, "sys2_tokens": s["sys2_tokens"] / n, "sys1_tokens": s["sys1_tokens"] / n,
            "malformed": s["malformed"] / max(s["steps"], 1), "tool_errors": int(s["failed"]), "seconds": seconds}


def table(rows: list[dict]) -> str:
    """The rows as text: shares in percent, the interval in brackets; calls and tokens are means per question."""
    lines = [f"{'set':<14}{'n':>6}  {'accuracy (95 %)':<22}{'EM':>6}{'F1':>7}{'cover':>7}{'calls':>7}{'sys2 tok':>10}"
             f"{'sys1 tok':>10}{'malformed':>11}{'seconds':>9}"]
    for r in rows:
        interval = f"{r['accuracy']:.1%} ({r['low']:.1%}–{r['high']:.1%})"
        lines.append(f"{r['set']:<14}{r['questions']:>6}  {interval:<22}{r['em']:>6.1%}{r['f1']:>7.1%}{r['cover']:>7.1%}"
                     f"{r['calls']:>7.2f}{r['sys2_tokens']:>10.0f}{r['sys1_tokens']:>10.0f}{r['malformed']:>11.1%}{r['seconds']:>9.1f}")
    notes = [f"{r['set']}: the judge could not be asked about {r['judge_failures']} answers, counted as not right"
             for r in rows if r["judge_failures"]]
    failed = [f"{r['set']}: {r['tool_errors']} tool calls failed, see the page for the reasons" for r in rows if r["tool_errors"]]
    return "\n".join(lines + notes + failed)


# ---------------------------------------------------------------------------------------------- ask

def ask(config: Config, text: str, checkpoint: Path) -> int:
    """Answers one question and shows how, line by line as it happens; the page of the trajectory is written at the end."""
    run = build(config, training=False, folder=checkpoint)
    run.grade = lambda question, answer: 0.0                # nobody knows the right answer here

    def say(kind: str, said: str) -> None:
        print(f"{kind:>9} | {' '.join(said.split())}", flush=True)
    question = Question("asked", text, (), "asked")
    check_lengths(config, run.format, [question])
    (trajectory,) = run.rollouts([(0, question)], 1, step="ask", tools=run.eval_tools, temperature=config.temperature,
                                 top_p=config.eval_top_p, say=say)
    trajectory.reward = None
    page = (checkpoint if (checkpoint / "rollouts").is_dir() else Path(config.runs)) / "ask.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    print(f"{'page':>9} | {view.trajectory_page([record(trajectory, run.format, 0, 'eval')], page)}")
    return 0
