"""MATPO: who sees what, who gets which credit, and a run of two steps."""

import functools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from helpers.chat import QWEN3, TOOLS, tokenizer
from helpers.samples import prepared, stock_scores, text_of
from helpers.script import Script
from helpers.tiny import OBJECTIVE, model
from test_mars import SMALL, metrics

import trainer
from rollout import Sample, Trajectory, Turn
from sampler import Completion
from siblings import matpo, matpo_toy
from tasks.chat import ChatFormat
from tasks.format import Action
from tasks.questions import Question
from tools import Document, ToolError
from toy import world

FORMAT = matpo_toy.Language(matpo_toy.make_tokenizer(), [*world.TOOLS, "work"])
QUESTION = Question("q", "where is the employer of ada baker based ?", ("dover",), "toy")
PAGES = [
    Document("d1", "", "", "ada baker born 1968 . ada baker joined acro corp ."),
    Document("d2", "", "", "bob cohen wrote about ada baker ."),
]
DOCUMENTS = " ".join(f"<doc> {page.text}" for page in PAGES)


def play(planner: list[str], worker: list[str], search=lambda query: PAGES, **options):
    """One scripted episode: the trajectory, and the script. Each role says its texts in turn."""
    left = {"planner": list(planner), "worker": list(worker)}

    def say(tokens, seed):
        return left["worker" if tokens[0] == FORMAT.control["<s1>"] else "planner"].pop(0)

    script = Script(FORMAT, say)
    config = matpo.MatpoConfig(**options)
    tools = {"search": search, "scholar": search, "python": search, "work": matpo.refuse}
    trajectory = script.play(matpo.METHOD, config, QUESTION, tools)
    assert not any(left.values()), f"not said: {left}"
    return trajectory, script


text = functools.partial(text_of, FORMAT)

PLANNER = [
    "<call> work anything about ada baker <eot>",
    "<call> work base of acro corp <eot>",
    "<answer> dover <eot>",
]
WORKERS = [
    "<call> search ada baker <eot>",
    "<answer> ada baker born 1968 . bob cohen wrote about ada baker . <eot>",
    "ada baker joined acro corp . <eot>",
    "<call> search acro corp <eot>",
    "<call> search acro corp <eot>",
    "acro corp occupies dover . <eot>",
]


def test_the_planner_sees_summaries_only_and_nothing_of_a_worker_is_its_own():
    trajectory, script = play(PLANNER, WORKERS, sys2_context=256)
    assert (trajectory.answer, trajectory.ended, trajectory.reward) == ("dover", "answer", 1.0)
    planner, first, second = [context.sample for context in trajectory.contexts]
    assert text(planner, True) == " ".join(PLANNER)
    assert text(planner, False) == (
        f"<s2> {QUESTION.text} <eot> <resp> ada baker joined acro corp . <eot> "
        "<resp> acro corp occupies dover . <eot>"
    )
    assert text(first, True) == " ".join(WORKERS[:3])
    # The demand for the summary follows the worker's message, or the last search it may make.
    assert text(first, False) == (
        f"<s1> {QUESTION.text} <purpose> anything about ada baker <eot> "
        f"<resp> {DOCUMENTS} <eot> <resp> <eot> <answer>"
    )
    assert text(second, False).endswith(
        f"<resp> {DOCUMENTS} <eot> <resp> {DOCUMENTS} <eot> <answer>"
    )
    assert [turn.readers[0].sample for turn in trajectory.turns[:2]] == [first, second]
    seeds = [seed for *_, seed in script.asked]
    assert len(set(seeds)) == len(seeds) == 9, "every draw has a name of its own"


def test_without_a_summary_the_last_message_goes_up_and_without_recap_no_question_goes_down():
    workers = [*WORKERS[:2], *WORKERS[3:5]]  # nobody is asked for a summary
    trajectory, _ = play(PLANNER, workers, sys2_context=256, summary=False, recap=False)
    assert text(trajectory.contexts[0].sample, False) == (
        f"<s2> {QUESTION.text} <eot> "
        "<resp> ada baker born 1968 . bob cohen wrote about ada baker . <eot> "
        "<resp> search acro corp <eot>"
    )
    for worker in trajectory.samples("worker"):
        assert not text(worker, False).endswith("<answer>"), "nobody demands"
        assert QUESTION.text not in text(worker, False)


def test_a_single_agent_reads_everything_itself():
    texts = ["<call> search ada baker <eot>", "ada baker joined acro corp . <answer> dover <eot>"]
    trajectory, _ = play(texts, [], delegate=False)
    (context,) = trajectory.contexts
    given = f"<s2> <s1> {QUESTION.text} <eot> <resp> {DOCUMENTS} <eot>"
    assert text(context.sample, False) == given and trajectory.answer == "dover"


def test_nobody_calls_a_tool_that_is_not_its_own():
    planner = ["<call> search ada baker <eot>", PLANNER[0], "<answer> dover <eot>"]
    worker = ["<call> work ada baker <eot>", WORKERS[0], WORKERS[2]]
    trajectory, _ = play(planner, worker)
    first, second, _ = trajectory.turns
    assert "search is not your tool; yours: work" in first.problem and not first.documents
    turns = second.readers[0].turns
    assert "yours: search, scholar, python" in turns[0].problem
    assert [turn.problem for turn in turns[1:]] == [None, None]


def test_what_goes_wrong_stays_within_the_worker():
    def away(query):
        raise ToolError("away")

    workers = [WORKERS[0], "nothing here", "<eot>"]
    trajectory, _ = play([PLANNER[0], "<answer> dover <eot>"], workers, away)
    planner, worker = trajectory.contexts
    assert text(planner.sample, False).endswith("<resp> error <eot>"), "it gave no summary"
    given = text(worker.sample, False)
    assert "anything about ada baker <eot> <resp> error <eot>" in given, "not an empty result"
    problems = [turn.problem.split(":")[0] for turn in worker.turns]
    assert problems == ["tool failed", "malformed", "malformed"]


def sample(role: str, place: int, attempt: int, lengths: list[int], seed: int) -> Sample:
    """One given and one sampled part for each length, of ids that the tiny models know."""
    rng = random.Random(seed)
    new = Sample(role, place, attempt)
    for length in lengths:
        new.append_given(rng.choices(range(61), k=3))
        sampled = rng.choices(range(61), k=length)
        new.append_sampled(Completion(sampled, [-4.0] * length, "stop"))
    return new


def context(role: str, sample: Sample, *errors: str | None) -> SimpleNamespace:
    turns = [Turn([], Action(error=error) if error else Action(answer="x")) for error in errors]
    return SimpleNamespace(role=role, sample=sample, chunk=None, turns=turns)


def attempt(place: int, number: int, reward: float, workers: list[list[int]]) -> Trajectory:
    """A planner of two sampled tokens, and workers with turns of these lengths."""
    question = Question(f"q{place}", "?", ("x",), "own")
    trajectory = Trajectory(question, place, number, ended="answer", reward=reward)
    planner = sample("planner", place, number, [1, 1], number)
    trajectory.contexts = [context("planner", planner, None)]
    for index, lengths in enumerate(workers):
        worker = sample("worker", place, number, lengths, 100 * number + index)
        trajectory.contexts.append(context("worker", worker, None))
    return trajectory


def credited(**options) -> tuple[list[Trajectory], dict[str, list[Sample]], matpo.MatpoConfig]:
    config = matpo.MatpoConfig(questions=2, **options)
    trajectories = [
        attempt(0, 0, 1.0, [[5, 4], [2]]),
        attempt(0, 1, 0.0, [[3]]),
        attempt(0, 2, 0.0, []),
        attempt(1, 3, 1.0, [[9, 2], [1], [4]]),
        attempt(1, 4, 0.0, [[6], [2, 2]]),
    ]
    return trajectories, matpo.credit(config, trajectories, 0), config


def test_the_gradient_is_that_of_the_papers_objective_also_beyond_the_planners_end():
    """At ρ = 1, by one plain sum over all tokens.

    Workers are longer than planners here; the official code leaves their ends untrained.
    """
    trajectories, terms, config = credited()
    planners = [trajectory.contexts[0].sample.advantage for trajectory in trajectories]
    a, b = math.sqrt(2), -1 / math.sqrt(2)
    assert planners == pytest.approx([a, b, b, 1.0, -1.0])
    policy = trainer.Policy(model("qwen3"), bf16=False)
    _, batches = prepared(config, terms)
    trainer.backward(policy, batches, on_policy=True, **OBJECTIVE)

    reference = trainer.Policy(model("qwen3"), bf16=False)
    loss = 0.0
    for trajectory, advantage in zip(trajectories, planners):
        scores = [stock_scores(reference, sample) for sample in trajectory.samples()]
        loss -= advantage * torch.cat([logprobs for logprobs, _ in scores]).mean()
    (loss / len(trajectories)).backward()
    for own, other in zip(policy.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=0, atol=1e-5)


def test_the_reward_for_form_by_hand():
    def score(accuracy, planner, workers, **options):
        trajectory = attempt(0, 0, accuracy, [])
        trajectory.contexts = [context("planner", Sample("planner", 0, 0), *planner)]
        for turns in workers:
            trajectory.contexts.append(context("worker", Sample("worker", 0, 0), *turns))
        return matpo.reward(matpo.MatpoConfig(**{"format_share": 0.1, **options}), trajectory)

    good = [None, None]
    bad = [None, "malformed"]
    assert score(1.0, good, []) == pytest.approx(0.9 + 0.05)  # nobody was asked: half is missing
    assert score(0.0, bad, [good, bad, bad]) == pytest.approx(0.1 * 0.5 / 3)
    assert score(0.0, good, [good, bad]) == pytest.approx(0.1 * (1 + 1 / 2) / 2)
    assert score(0.0, good, [], delegate=False) == pytest.approx(0.1)


def test_mars_groups_compare_workers_with_workers():
    trajectories, terms, config = credited(own_groups=True, balance="uniform")
    workers = [sample for t in trajectories[:3] for sample in t.samples("worker")]
    half = 1 / math.sqrt(2)
    assert [sample.advantage for sample in workers] == pytest.approx([half, half, -2 * half])
    assert list(terms) == ["planner", "worker"]
    copies = [sum(s.loss_weight for s in terms["worker"] if s.question_index == q) for q in (0, 1)]
    assert copies == [3, 2]


def test_frozen_workers_are_not_trained():
    trajectories, terms, _ = credited(workers="frozen")
    assert len(terms["rollout"]) == len(trajectories)
    assert not any(sample.loss_weight for t in trajectories for sample in t.samples("worker"))


def test_a_chat_models_prompt_names_its_task_and_its_own_tools_only():
    tools = [*TOOLS, matpo.WORKER_TOOL]
    chat = ChatFormat(tokenizer(QWEN3), matpo.words(matpo.MatpoConfig(), tools), tools)
    for role in ("planner", "worker", "agent"):
        own, other = ("work", "search") if role == "planner" else ("search", "work")
        more = {"task": "find her"} if role == "worker" else {}
        prompt = chat.text(chat.prompt(role, question="Who was it?", **more))
        assert f"- {own}" in prompt and f"- {other}" not in prompt
        assert all(word in prompt for word in ("Who was it?", *more.values()))


@pytest.fixture(scope="module")
def novice(tmp_path_factory):
    """A base model that has learned next to nothing."""
    return matpo_toy.build(tmp_path_factory.mktemp("novice"), steps=(2, 2))


@pytest.mark.parametrize("workers", ["train", "frozen"])
def test_a_run_trains_and_is_evaluated(novice, tmp_path, workers):
    runs = ["--runs", str(tmp_path)]
    options = ["--model", str(novice), "--name", "x", "--steps", "1", "--workers", workers]
    assert matpo.main([*runs, *options, *SMALL]) == 0
    (line,) = metrics(tmp_path / "x")
    assert line["planner_samples"] == 16 and line["mismatch_kl"] < 1e-8
    assert (tmp_path / "x/frozen").exists() == (workers == "frozen")
    assert matpo.main(["eval", str(tmp_path / "x"), *runs, "--eval_questions", "3"]) == 0
    assert "planner_tokens" in (tmp_path / "eval-x/table.json").read_text()
