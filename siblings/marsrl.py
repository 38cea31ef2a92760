"""MarsRL: solver, verifier and corrector are one model, each with a reward of its own.

arXiv 2511.11373. A solver answers, a verifier checks, a corrector answers again having read the
verifier's report, and so once more (`solve`); it ends when the verifier finds no error. Let c(x)
be 1 if solution x is right. The rewards are the agents' own:

    r(solver: x) = c(x)      r(corrector: x) = c(x)
    r(verifier on x) = 1 if it says "wrong" and c(x) = 0, or "right" and c(x) = 1; else 0

In training every agent answers the same input G times, and the group of an advantage is one input:

    A_i = (r_i − mean_g r) / std_g r,      g = (question, stage, input)

The solver's input is the question. Each later stage takes two outputs of the stage before it for
its inputs (`choose`); a corrector takes reports that say "wrong" and no others. So a question has
at most 8 + 4 · 2 · 8 = 72 samples, all in one mean of the loss.

    python -m siblings.marsrl                            the arm that the paper proposes, on a toy
    python -m siblings.marsrl --choice random            inputs drawn blindly, or balanced
    python -m siblings.marsrl --rollouts pipelined       step t trains the solver on batch t, the
                                                        first verifier on batch t − 1, …
    python -m siblings.marsrl --rollouts linear --credit own        no groups by input
    python -m siblings.marsrl --rollouts linear --credit role       MARS's rule: a shared outcome
    python -m siblings.marsrl --learners solver          the others stay; or: checkers

From the paper: the stages, the rewards, the groups, the three choices, the pipeline over agents.
Ours: that two inputs per question and stage are meant. Equal outputs count once, so that no two
groups have the same input. The paper says nothing of clipping or of a KL term: we clip at 0.2 and
have none. Left out: the
pipeline within an agent (segments of 16k tokens), which would not be on policy.

In the pipeline only an input is old. What is trained was sampled in the same step, so ρ stays 1. A
resumed run refills the pipe: its first four steps train fewer stages.

The toy is siblings/marsrl_toy.py. Tests: pytest tests/test_marsrl.py
"""

import dataclasses
import functools
import random
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch

import grpo
import train
from config import TRAIN, Config, UserError, option
from plumbing import outside
from plumbing.start import Run
from rollout import Context, Env, Method, Sample, Trajectory, Turn, play_batch
from siblings import marsrl_toy
from siblings.solo import NO_TOOL
from tasks.chat import Template, Words
from tasks.format import Action, Format
from tasks.questions import Question
from tools import Tool

STAGES = ("solver", "verifier1", "corrector1", "verifier2", "corrector2")


def role_of(stage: str) -> str:
    """The two verifiers are one agent, and so are the correctors."""
    return stage.rstrip("12")


@dataclass
class MarsrlConfig(Config):
    """MarsRL's own options. Those of all methods have defaults for its toy."""

    steps: int = 60
    questions: int = 8
    eval_every: int = 15
    tools: str = ""  # nobody calls one

    rollouts: Literal["grouped", "pipelined", "linear"] = option(
        "grouped", "linear: G whole systems", TRAIN, heading="arms for study"
    )
    credit: Literal["own", "role", "attempt", "pooled"] = option("own", "see `credit`", TRAIN)
    choice: Literal["adaptive", "balanced", "random"] = option(
        "adaptive", "of a stage's inputs", TRAIN
    )
    inputs: int = option(2, "of a question, at each stage behind the solver", TRAIN)
    learners: Literal["all", "solver", "checkers"] = option(
        "all", "checkers: verifier and corrector", TRAIN
    )

    context: int = option(112, "the longest sample; the toy's have under 100", heading="limits")
    solution_tokens: int = option(4, "what a solver or a corrector writes")
    report_tokens: int = option(16, "what a verifier writes")

    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.context

    def check(self, training: bool) -> None:
        """Refuses values that contradict each other, MarsRL's own included."""
        super().check(training)
        self.at_least(1, "inputs", "solution_tokens", "report_tokens")
        if self.grader != "em":
            raise UserError("a verdict is graded by --grader em, and so is a solution: leave it")
        if self.rollouts != "linear" and self.credit != "own":
            raise UserError(f"--credit {self.credit} needs whole systems: add --rollouts linear")
        if self.rollouts != "linear" and self.questions % self.inner_steps:
            raise UserError("--inner_steps must divide --questions: a question's groups stay whole")
        if self.rollouts == "linear" and (self.choice != "adaptive" or self.inputs != 2):
            raise UserError("--choice and --inputs choose inputs: leave out --rollouts linear")


# ------------------------------------------------------------------------- inputs and rewards


@dataclass(frozen=True)
class Task(Question):
    """What one agent is asked at one stage. Its golden answer makes its reward.

    A question for the loop like any other, so that G attempts at it are an advantage group.
    """

    asked: Question  # by the user
    stage: str
    number: int  # which of the stage's inputs at this question, from 0
    answer: tuple[int, ...] | None = None  # the solution that is shown, as ids
    report: tuple[int, ...] | None = None

    @property
    def key(self) -> tuple:
        """The key of its advantage group: (question, stage, input)."""
        return self.asked.id, self.stage, self.number


def first_task(asked: Question) -> Task:
    """The solver's: the question as it is."""
    name = f"{asked.id}/solver/0"
    return Task(name, asked.text, asked.golden_answers, asked.source, asked, "solver", 0)


@dataclass(kw_only=True)
class Said(Turn):
    """What an agent said of its task, and what that earns by itself."""

    task: Task
    own: float  # r of the module's docstring: its own reward, not the system's

    @property
    def flags(self) -> bool:
        """Whether a verifier says that the solution is wrong."""
        return self.action.answer == "wrong"


def follow(chat: Format, said: Said, stage: str, number: int = 0) -> Task:
    """The task to check a solution, or to correct what a report finds wrong."""
    asked = said.task.asked
    written = tuple(chat.note(said.sampled))
    golden = asked.golden_answers
    shown = (said.task.answer, written)
    if role_of(stage) == "verifier":
        golden = ("right",) if said.own else ("wrong",)  # what it has to find out
        shown = (written, None)
    name = f"{asked.id}/{stage}/{number}"
    return Task(name, asked.text, golden, asked.source, asked, stage, number, *shown)


# ---------------------------------------------------------------------------------- the episode


async def speak(env: Env, trajectory: Trajectory, task: Task) -> Said:
    """One agent reads its task and writes."""
    role = role_of(task.stage)
    config = env.config
    limit = config.report_tokens if role == "verifier" else config.solution_tokens
    async with Context(env, trajectory, role) as agent:
        given = env.chat.prompt(role, question=task.text, answer=task.answer, report=task.report)
        written = await agent.write(given, limit, STAGES.index(task.stage))
    action = Action(error="it was cut")
    if written.finish != "length":
        action = env.chat.parse(written.tokens, final=True)
    if action.answer and role == "verifier":
        # The verdict is the last word, behind the report.
        action = Action(answer=action.answer.split()[-1].strip(".").lower())
    own = 0.0
    if action.answer:
        own = env.grade(task, action.answer)
    said = Said(written.tokens, action, task=task, own=own)
    if action.error:
        said.problem = f"malformed: {action.error}"
    agent.turns.append(said)
    env.on_event(task.stage, env.chat.text(written.tokens))
    return said


async def episode(env: Env, trajectory: Trajectory) -> None:
    """The whole system answers a question; of a Task only its agent speaks."""
    asked = trajectory.question
    if isinstance(asked, Task):
        solution = await speak(env, trajectory, asked)
    else:
        solution = await solve(env, trajectory, asked)
    trajectory.answer = solution.action.answer
    trajectory.ended = "no answer" if solution.action.error else "answer"


async def solve(env: Env, trajectory: Trajectory, asked: Question) -> Said:
    """The solution that the system ends with."""
    solution = await speak(env, trajectory, first_task(asked))
    for verifier, corrector in (STAGES[1:3], STAGES[3:5]):
        checked = await speak(env, trajectory, follow(env.chat, solution, verifier))
        show_below(trajectory)
        if not checked.flags:
            break
        solution = await speak(env, trajectory, follow(env.chat, checked, corrector))
        show_below(trajectory)
    return solution


def show_below(trajectory: Trajectory) -> None:
    """On pages the newest agent stands below the solver."""
    trajectory.contexts[0].turns[0].readers.append(trajectory.contexts[-1])


# --------------------------------------------------------------------- training on groups by input


def grouped(run: Run, step: int) -> list[Trajectory]:
    """A step's rollouts: stage by stage, each on outputs of the one before."""
    trajectories = []
    tasks = solver_tasks(run, step)
    while tasks:
        played = play(run, tasks, step)
        trajectories += played
        tasks = next_tasks(run, played, step)
    return trajectories


def pipelined(run: Run, step: int, *, waiting: list) -> list[Trajectory]:
    """A step's rollouts: all stages at once, each on outputs of the step before.

    `waiting`: the tasks that this step leaves to the next one.
    """
    played = play(run, solver_tasks(run, step) + waiting, step)
    waiting[:] = next_tasks(run, played, step)
    return played


def solver_tasks(run: Run, step: int) -> list[tuple[int, Task]]:
    """The step's questions with their places, as the solver's tasks."""
    return [(place, first_task(asked)) for place, asked in train.questions_of(run, step)]


def play(run: Run, tasks: list[tuple[int, Task]], step: int) -> list[Trajectory]:
    """G outputs for each task."""
    return play_batch(run, tasks, run.config.group, [], step=step)


def next_tasks(run: Run, played: list[Trajectory], step: int) -> list[tuple[int, Task]]:
    """The tasks that follow from some outputs, with their places."""
    config = run.config
    outputs: dict[tuple, list[Trajectory]] = {}
    for trajectory in played:
        if trajectory.reward is None:
            continue
        task = trajectory.question
        outputs.setdefault((task.asked.id, task.stage), []).append(trajectory)
    tasks = []
    for (name, stage), candidates in outputs.items():
        if stage == STAGES[-1] or config.learners == "solver":
            continue
        follower = STAGES[STAGES.index(stage) + 1]
        rng = random.Random(f"{config.seed} {step} {name} {follower}")
        for number, output in enumerate(choose(config, candidates, follower, rng)):
            # Each input has a place of its own. As --inner_steps divides --questions, all groups
            # of a question are trained in the same inner step.
            place = output.question_index % config.questions
            place += config.questions * (STAGES.index(follower) * config.inputs + number)
            tasks.append((place, follow(run.chat, output.turns[0], follower, number)))
    return tasks


def choose(
    config: MarsrlConfig, outputs: list[Trajectory], follower: str, rng: random.Random
) -> list[Trajectory]:
    """The outputs of a question's stage that the following stage gets for its inputs.

    adaptive: wrong solutions for a verifier, true alarms for a corrector, as long as there are any.
    balanced: as many of these as of the others. random: any.
    """
    correcting = role_of(follower) == "corrector"
    distinct = {}
    for output in rng.sample(outputs, len(outputs)):
        said = output.turns[0]
        if said.flags or not correcting:
            distinct.setdefault((said.task.answer, tuple(said.sampled)), output)
    candidates = list(distinct.values())
    count = config.inputs
    if config.choice == "random":
        return candidates[:count]
    # Wanted are wrong solutions for a verifier (reward 0), true alarms for a corrector (reward 1).
    wanted_reward = float(correcting)
    wanted = [output for output in candidates if output.turns[0].own == wanted_reward]
    others = [output for output in candidates if output.turns[0].own != wanted_reward]
    if config.choice == "adaptive":
        return (wanted + others)[:count]
    half = count // 2
    rest = count - half
    return (wanted[:half] + others[:rest] + wanted[half:] + others[rest:])[:count]


# --------------------------------------------------------------------------------------- credit


def credit(
    config: MarsrlConfig, trajectories: list[Trajectory], step: int
) -> dict[str, list[Sample]]:
    """Advantages by one of four rules; all agents' samples share one mean.

    own      an agent's own reward, in groups by (question, stage, input). With --rollouts linear
             no input is repeated, and the group is the question's samples of the stage
    role     the system's reward, among the question's samples of its role: MARS
    attempt  the system's reward, among the question's attempts, whose samples inherit it: MATPO
    pooled   the system's reward, among all samples of the question
    """
    samples = []
    rewards = []
    groups = []
    for trajectory in trajectories:
        for context in trajectory.contexts:
            said = context.turns[0]
            reward = trajectory.reward
            group = (trajectory.question_index,)
            if config.credit == "own":
                reward = said.own
                group = said.task.key
            elif config.credit == "role":
                group = (trajectory.question_index, context.role)
            samples.append(context.sample)
            rewards.append(reward)
            groups.append(group)
    divide = config.advantage == "std"
    advantages = grpo.group_advantages(torch.tensor(rewards), groups, divide=divide).tolist()
    if config.credit == "attempt":
        attempts = torch.tensor([trajectory.reward for trajectory in trajectories])
        places = [trajectory.question_index for trajectory in trajectories]
        inherited = grpo.group_advantages(attempts, places, divide=divide).tolist()
        advantages = [x for x, t in zip(inherited, trajectories) for _ in t.contexts]
    for sample, reward, advantage in zip(samples, rewards, advantages, strict=True):
        sample.reward = reward
        sample.advantage = advantage
        solves = sample.role == "solver"
        learns = {"all": True, "solver": solves, "checkers": not solves}
        sample.loss_weight = int(learns[config.learners])
    return {"all": samples}


def own_metrics(trajectories: list[Trajectory]) -> dict[str, tuple[float, float]]:
    """Accuracies, and what a verifier says of right and of wrong solutions."""
    part = Counter()
    whole = Counter()

    def count(name: str, value: float) -> None:
        part[name] += value
        whole[name] += 1

    for trajectory in trajectories:
        if trajectory.reward is None:
            continue  # no server answered, or nobody could grade it
        if not isinstance(trajectory.question, Task):
            count("system", trajectory.reward)
        for context in trajectory.contexts:
            said = context.turns[0]
            if context.role != "verifier":
                count(context.role, said.own)
                continue
            count("verifier_accuracy", said.own)
            shown_right = said.task.golden_answers == ("right",)
            count("false_alarm_share" if shown_right else "recall", said.flags)
    names = ("solver", "corrector", "system", "verifier_accuracy", "recall", "false_alarm_share")
    return {name: (part[name], whole[name]) for name in names}


# ------------------------------------------------------------------------ words and the command

SOLVER = "Solve the problem. Think first, then give your solution: <answer>the solution</answer>"
VERIFIER = """You check a solution to a problem. Find out by yourself what is right and say where \
the solution errs. Then give your verdict, <answer>right</answer> or <answer>wrong</answer>."""
CORRECTOR = """You are shown a problem, a solution and a report on its errors. The report may be \
mistaken. Solve the problem and end with <answer>the solution</answer>"""


def words(config: MarsrlConfig, tools: list[Tool]) -> Words:
    """How a chat model is addressed in each role."""
    shown = "The problem:\n\n{question}\n\nThe solution:\n\n{answer}"

    def fill(question: str, answer=None, report=None) -> dict:
        return {"question": question.strip(), "answer": answer, "report": report}

    prompts = {
        "solver": Template(SOLVER, "{question}", fill),
        "verifier": Template(VERIFIER, shown, fill),
        "corrector": Template(CORRECTOR, shown + "\n\nThe report:\n\n{report}", fill),
    }
    return Words(prompts, "Give your answer now.", "(nothing)")


def fits(config: MarsrlConfig, chat: Format, question: Question) -> None:
    """UserError if a question leaves no room for its solution and a report on it."""
    solution = [0] * config.solution_tokens
    report = [0] * config.report_tokens
    shown = {"question": question.text, "answer": solution}
    longest = max(
        len(chat.prompt("verifier", **shown)) + config.report_tokens,
        len(chat.prompt("corrector", report=report, **shown)) + config.solution_tokens,
    )
    if longest > config.context:
        raise UserError(
            f"question {question.id} with a solution and a report takes up to {longest} tokens, "
            f"more than --context {config.context}: raise it"
        )


def questions(config: MarsrlConfig, tools: list[str], training: bool) -> tuple:
    """Training questions and held-out ones: the toy's pages, or those of --data."""
    if config.data != "toy":
        return outside.training_and_held_out(config, tools, training)
    numbers = range(config.eval_questions)
    held_out = [marsrl_toy.question("eval", config.seed, i) for i in numbers]
    return lambda i: marsrl_toy.question("train", config.seed, i), held_out


METHOD = Method(
    name="marsrl",
    roles={"solver": "Solver", "verifier": "Verifier", "corrector": "Corrector"},
    config=MarsrlConfig,
    episode=episode,
    credit=credit,
    words=words,
    fits=fits,
    metrics=own_metrics,
)


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    ways = {
        "linear": train.play_groups,
        "grouped": grouped,
        "pipelined": functools.partial(pipelined, waiting=[]),
    }
    return train.main(
        dataclasses.replace(
            METHOD, play_step=lambda run, step: ways[run.config.rollouts](run, step)
        ),
        arguments,
        __doc__,
        base_model=marsrl_toy.build,
        language=marsrl_toy.Language,
        questions=questions,
        more_tools=[NO_TOOL],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
