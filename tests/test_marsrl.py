"""MarsRL: the reward table, groups by input, choice of inputs, the pipeline, a whole run."""

import math
import random
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
from helpers.chat import QWEN3, tokenizer
from helpers.samples import text_of
from helpers.script import Script
from test_mars import SMALL, metrics

from driver import Driver
from rollout import Trajectory, play_batch
from siblings import marsrl, marsrl_toy
from siblings.marsrl import METHOD, STAGES, MarsrlConfig
from tasks.chat import ChatFormat
from tasks.grading import grader
from tasks.questions import Question

CHAT = marsrl_toy.Language(marsrl_toy.make_tokenizer())
PAGE = "ada enjoys chess . ada born 1968 . ada makes lamps . "
QUESTION = Question("q0", f"{PAGE}hobby of ada", ("chess",), "own")


def scripted(say, **options) -> SimpleNamespace:
    """A run whose sampler is a script: `say(role, prompt, seed)` is what an agent writes.

    It can roll out and cannot update.
    """
    config = MarsrlConfig(**{"questions": 1, "group": 4, **options})

    def spoken(tokens, seed):
        (role,) = [role for role, mark in marsrl_toy.MARKS.items() if CHAT.control[mark] in tokens]
        return f"{run.say(role, CHAT.text(tokens), seed)} <eot>"

    script = Script(CHAT, spoken)
    script.pages_in_use = 0
    script.load_weights = lambda model: None
    run = SimpleNamespace(
        method=METHOD,
        config=config,
        rank=0,
        ranks=1,
        resampled=0,
        chat=CHAT,
        driver=Driver([script], deterministic=True),
        sampler=script,
        samplers=dict.fromkeys(METHOD.roles, script),
        grade=grader("em"),
        question=lambda i: Question(f"q{i}", QUESTION.text, ("chess",), "own"),
        say=say,
    )
    return run


def system(*words: str, **options) -> Trajectory:
    """One attempt of the whole system in which the agents say these things, one after the other."""
    lines = list(words)
    run = scripted(lambda role, prompt, seed: lines.pop(0), **options)
    (trajectory,) = play_batch(run, [(0, QUESTION)], 1, [], step=0)
    assert not lines
    return trajectory


# what is said -> the agents' own rewards, and the system's
TABLE = {
    ("chess", "chess right"): ([1, 1], 1),
    ("lamps", "lamps right"): ([0, 0], 0),
    # The case of the paper's section 3.2: a false alarm, and the corrector is right all the same.
    ("chess", "lamps wrong", "chess", "chess right"): ([1, 0, 1, 1], 1),
    ("chess", "lamps wrong", "lamps", "chess right"): ([1, 0, 0, 0], 0),
    ("lamps", "chess wrong", "chess", "chess right"): ([0, 1, 1, 1], 1),
    ("lamps", "chess wrong", "1968", "chess wrong", "chess"): ([0, 1, 0, 1, 1], 1),
    ("lamps", "chess wrong", "chess", "1968 wrong", "1968"): ([0, 1, 1, 0, 0], 0),
}


@pytest.mark.parametrize("words", TABLE, ids=" / ".join)
def test_each_agent_earns_its_own_reward(words):
    own, outcome = TABLE[words]
    trajectory = system(*words)
    assert [context.turns[0].own for context in trajectory.contexts] == own
    assert trajectory.reward == outcome
    METHOD.credit(MarsrlConfig(), [trajectory], 0)
    assert [sample.reward for sample in trajectory.samples()] == own


def test_agents_read_what_the_paper_lets_them_read():
    trajectory = system("lamps", "chess wrong", "1968", "chess wrong", "chess")
    page = f"<doc> {PAGE}"
    assert [text_of(CHAT, context.sample, False) for context in trajectory.contexts] == [
        f"{page}<solve> hobby of ada <eot>",
        f"{page}<verify> hobby of ada <answer> lamps <eot>",
        f"{page}<correct> hobby of ada <answer> lamps <resp> chess wrong <eot>",
        f"{page}<verify> hobby of ada <answer> 1968 <eot>",
        f"{page}<correct> hobby of ada <answer> 1968 <resp> chess wrong <eot>",
    ]


def test_rules_differ_where_attempts_have_different_lengths():
    """The right attempt has two samples, the wrong one five."""

    def advantages(rule):
        right = system("chess", "chess right")
        wrong = system("lamps", "1968 wrong", "1968", "lamps wrong", "lamps")
        samples = METHOD.credit(MarsrlConfig(rollouts="linear", credit=rule), [right, wrong], 0)
        return [sample.advantage for sample in samples["all"]]

    inherited = [1.0] * 2 + [-1.0] * 5
    assert advantages("attempt") == pytest.approx(inherited)
    mean = 2 / 7
    spread = math.sqrt(mean * (1 - mean))
    pooled = [(1 - mean) / spread] * 2 + [-mean / spread] * 5
    assert advantages("pooled") == pytest.approx(pooled)
    # solvers 1, 0; verifiers 1, 0, 0; correctors 0, 0
    a, b = math.sqrt(2), -1 / math.sqrt(2)
    assert advantages("role") == pytest.approx([1, a, -1, b, 0, b, 0])


def careless(role: str, prompt: str, seed: int) -> str:
    """Every agent draws one of its outputs by the seed."""
    rng = random.Random(seed)
    word = rng.choice(["chess", "lamps", "1968"])
    if role != "verifier":
        return word
    return f"{word} {rng.choice(['right', 'wrong'])}"


def test_a_group_is_one_input():
    """All members of a group have the same prompt, and other groups of the stage have others."""
    run = scripted(careless, questions=3, group=8)
    trajectories = marsrl.grouped(run, 0)
    METHOD.credit(run.config, trajectories, 0)
    groups = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.question.key].append(trajectory)
    assert {key[1] for key in groups} == set(STAGES)
    prompts = set()
    for key, members in groups.items():
        assert len(members) == 8
        assert len({member.question_index for member in members}) == 1
        (prompt,) = {text_of(CHAT, member.contexts[0].sample, False) for member in members}
        prompts.add((key[0], key[1], prompt))
        if "corrector" in key[1]:  # it is given alarms only
            assert prompt.endswith("wrong <eot>")
        advantages = [member.contexts[0].sample.advantage for member in members]
        assert sum(advantages) == pytest.approx(0, abs=1e-5)
        assert any(advantages) == (len({member.reward for member in members}) == 2)
    assert len(prompts) == len(groups)
    assert max(Counter(key[0] for key in groups).values()) <= 1 + 4 * run.config.inputs
    assert len({members[0].question_index for members in groups.values()}) == len(groups)


def outputs(run, stage, words, verdict="wrong", shown="lamps") -> list[Trajectory]:
    """Outputs of a stage, in this order. Its task shows the solution "lamps", which is wrong."""
    shown = {"answer": tuple(CHAT.encode(shown)), "report": tuple(CHAT.encode("chess wrong"))}
    golden = (verdict,) if "verifier" in stage else QUESTION.golden_answers
    task = marsrl.Task("t", QUESTION.text, golden, "own", QUESTION, stage, 0, **shown)
    lines = list(words)
    run.say = lambda role, prompt, seed: lines.pop(0)
    return play_batch(run, [(0, task)], len(words), [], step=0)


def chosen(choice, follower: str, words: list[str], inputs: int, seed: int) -> list[str]:
    run = scripted(None, choice=choice, inputs=inputs)
    stage = STAGES[STAGES.index(follower) - 1]
    rng = random.Random(seed)
    picked = marsrl.choose(run.config, CHAT, outputs(run, stage, words), follower, rng)
    return [CHAT.text(CHAT.note(output.turns[0].sampled)) for output in picked]


@pytest.mark.parametrize("seed", range(2))
def test_the_choice_of_inputs(seed):
    """Adaptive takes every wrong solution before any right one; correctors get true alarms only."""
    solutions = ["chess", "lamps", "chess", "1968", "dover", "chess", "lamps"]
    assert set(chosen("adaptive", "verifier1", solutions, 3, seed)) == {"lamps", "1968", "dover"}
    assert set(chosen("adaptive", "verifier2", solutions, 4, seed)) == {*solutions}
    # The task's solution is wrong, so every alarm is true, whatever answer the report names.
    reports = ["1968 right", "chess wrong", "1968 wrong", "chess right"]
    assert set(chosen("random", "corrector1", reports, 4, seed)) == {"chess wrong", "1968 wrong"}
    run = scripted(None, inputs=1)
    false = outputs(run, "verifier1", ["chess wrong"] * 3, verdict="right")
    true = outputs(run, "verifier1", ["1968 wrong"])
    rng = random.Random(seed)
    assert marsrl.choose(run.config, CHAT, false + true, "corrector1", rng) == true
    picked = chosen("balanced", "verifier1", solutions, 2, seed)
    assert picked.count("chess") == 1 and len(set(picked)) == 2
    assert len(chosen("balanced", "verifier1", ["lamps", "1968", "dover"], 2, seed)) == 2
    assert sorted(chosen("random", "verifier1", solutions, 4, seed)) == sorted(set(solutions))


def test_equal_corrections_of_two_solutions_are_one_input():
    run = scripted(None)
    corrections = [
        *outputs(run, "corrector1", ["1968"] * 2, shown="lamps"),
        *outputs(run, "corrector1", ["1968"] * 2, shown="dover"),
    ]
    picked = marsrl.choose(run.config, CHAT, corrections, "verifier2", random.Random(0))
    assert len(picked) == 1


def test_the_pipeline_shifts_each_stage_by_a_batch():
    """Step t: the solver on batch t, the first verifier on batch t − 1, and so on."""
    run = scripted(careless, group=8, choice="random")
    waiting = []
    for step in range(7):
        trajectories = marsrl.pipelined(run, step, waiting=waiting)
        parts = {(t.question.stage, t.question.asked.id) for t in trajectories}
        expected = {(stage, f"q{step - i}") for i, stage in enumerate(STAGES) if i <= step}
        assert parts == expected
        places = {t.question_index: t.question.key for t in trajectories}
        assert len(places) == len(set(places.values()))


def test_the_metrics_of_four_attempts_by_hand():
    trajectories = [
        system("chess", "chess right"),
        system("chess", "lamps wrong", "chess", "chess right"),
        system("lamps", "chess wrong", "1968", "1968 right"),
        system("chess", "1968 right"),
    ]
    # shown right: right, wrong (false alarm), right, right; shown wrong: wrong (found), right
    assert METHOD.metrics(trajectories) == {
        "solver": (3, 4),
        "corrector": (1, 2),
        "system": (3, 4),
        "verifier_accuracy": (4, 6),
        "recall": (1, 2),
        "false_alarm_share": (1, 4),
    }


def test_a_chat_model_is_shown_the_solution_and_the_report():
    chat = ChatFormat(tokenizer(QWEN3), METHOD.words(MarsrlConfig(), []), [])
    shown = {"answer": chat.encode("It is Ada."), "report": chat.encode("It is Bob.")}
    for role, visible in (("solver", []), ("verifier", ["Ada"]), ("corrector", ["Ada", "Bob"])):
        prompt = chat.text(chat.prompt(role, question="Who is it?", **shown))
        assert [name for name in ("Ada", "Bob") if f"It is {name}." in prompt] == visible


def test_runs_leave_their_folders_stay_on_policy_and_resume_to_the_same_bits(tmp_path):
    base = marsrl_toy.build(tmp_path, steps=(1, 1))

    def command(name: str, *more: str) -> list[dict]:
        line = ["--model", str(base), "--runs", str(tmp_path), "--name", name, *SMALL, *more]
        assert marsrl.main(line) == 0
        lines = metrics(tmp_path / name)
        assert all(line["mismatch_kl"] < 1e-8 for line in lines)
        return lines

    whole = command("whole", "--steps", "2")
    assert 0 <= whole[0]["solver"] <= 1 and "system" not in whole[0], "no system was played"
    assert whole[0]["eval_system"] == whole[0]["eval_accuracy"]
    command("halves", "--steps", "1")
    halves = command("halves", "--steps", "2", "--resume")
    assert halves[1] == whole[1]

    pipe = command("pipe", "--steps", "2", "--rollouts", "pipelined")
    assert pipe[0]["verifier_samples"] == 0 and "recall" not in pipe[0]
    assert pipe[1]["verifier_samples"] > 0 and pipe[1]["solver_samples"] == 16
