"""MarsRL: solver, verifier and corrector are one model, and each has its own reward.

arXiv 2511.11373. A solver answers, a verifier checks the solution, a corrector reads the report and
answers again. The last two act at most twice (`solve`), until the verifier finds no error. Let c(x)
be 1 if solution x is right, else 0. Each agent has a reward of its own:

    r(solver: x) = c(x)      r(corrector: x) = c(x)
    r(verifier on x) = 1 if it says "wrong" and c(x) = 0, or "right" and c(x) = 1; else 0

In training each agent answers each of its inputs G times, and an advantage group is one input:

    A_i = (r_i − mean_g r) / std_g r,      g = (question, stage, input)

The solver's input is the question. The inputs of each later stage are two outputs of the stage
before it (`choose`); a corrector gets only reports that say "wrong". With G = 8 a question has at
most 8 + 4 · 2 · 8 = 72 samples, all in one mean of the loss.

    python -m siblings.marsrl                            the paper's method, on a toy
    python -m siblings.marsrl --choice random            random inputs; or: balanced
    python -m siblings.marsrl --rollouts pipelined       step t trains the solver on batch t, the
                                                        first verifier on batch t − 1, …
    python -m siblings.marsrl --rollouts linear --credit own        no groups by input
    python -m siblings.marsrl --rollouts linear --credit role       MARS's rule: a shared outcome
    python -m siblings.marsrl --learners solver          only the solver learns; or: checkers

From the paper: the stages, the rewards, the groups, the three choices, the pipeline over agents.
Ours: we understand that there are two inputs for each question and stage. Equal inputs count once,
so that no two groups have the same input. The paper does not mention clipping or a KL term: we clip
at 0.2 and have no KL term. The pipeline within an agent (segments of 16k tokens) is left out: it
would not be on policy.

In the pipeline only an agent's input comes from an earlier step. Its samples are of the same step,
so ρ is 1. The first four steps of a resumed run train fewer stages, until the pipeline is full.

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
from siblings.solo import NO_TOOL, UNREAD, refuse_others
from tasks.chat import Template, Words
from tasks.format import Action, Format
from tasks.questions import Question
from tools import Tool

STAGES = ("solver", "verifier1", "corrector1", "verifier2", "corrector2")


def role_of(stage: str) -> str:
    """A stage's agent: both verifiers are one agent, and so are both correctors."""
    return stage.rstrip("12")


@dataclass
class MarsrlConfig(Config):
    """MarsRL's own options. Those of all methods have defaults for its toy."""

    steps: int = 60
    questions: int = 8
    eval_every: int = 15
    tools: str = ""  # nobody calls one

    rollouts: Literal["grouped", "pipelined", "linear"] = option(
        "grouped", "linear: G runs of the whole system", TRAIN, heading="arms for study"
    )
    credit: Literal["own", "role", "attempt", "pooled"] = option(
        "own", "whose reward, in which group; all but own: --rollouts linear", TRAIN
    )
    choice: Literal["adaptive", "balanced", "random"] = option(
        "adaptive", "how a stage's inputs are chosen", TRAIN
    )
    inputs: int = option(2, "inputs for each question and stage after the solver", TRAIN)
    learners: Literal["all", "solver", "checkers"] = option(
        "all", "checkers: verifier and corrector", TRAIN
    )

    context: int = option(
        112, "tokens of the longest sample; the toy's have under 100", heading="limits"
    )
    solution_tokens: int = option(4, "tokens of a solution")
    report_tokens: int = option(16, "tokens of a report")

    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.context

    def check(self, training: bool) -> None:
        """Refuses values that contradict each other, MarsRL's own included."""
        super().check(training)
        self.at_least(1, "inputs", "solution_tokens", "report_tokens")
        refuse_others(self, UNREAD if training else {})
        if self.grader != "em":
            raise UserError("verdicts need --grader em: leave --grader out")
        if self.rollouts != "linear" and self.credit != "own":
            raise UserError(f"--credit {self.credit} needs whole systems: add --rollouts linear")
        if self.rollouts != "linear" and self.questions % self.inner_steps:
            raise UserError("--inner_steps must divide --questions, so that a question stays whole")
        if self.rollouts == "linear" and (self.choice != "adaptive" or self.inputs != 2):
            raise UserError("--choice and --inputs are not for --rollouts linear")


# ------------------------------------------------------------------------- inputs and rewards


@dataclass(frozen=True)
class Task(Question):
    """One agent's task at one stage; the golden answer gives the agent's own reward.

    For the loop it is a question like any other, whose G attempts are an advantage group.
    """

    asked: Question  # the user's question
    stage: str
    number: int  # of the input, among this stage's for this question, from 0
    answer: tuple[int, ...] | None = None  # the solution in the prompt, as ids
    report: tuple[int, ...] | None = None

    @property
    def key(self) -> tuple:
        """The key of the task's advantage group: (question, stage, input)."""
        return self.asked.id, self.stage, self.number


def first_task(asked: Question) -> Task:
    """The solver's task: the question itself."""
    name = f"{asked.id}/solver/0"
    return Task(name, asked.text, asked.golden_answers, asked.source, asked, "solver", 0)


@dataclass(kw_only=True)
class Output(Turn):
    """An agent's output for its task, and the agent's own reward."""

    task: Task
    own: float  # r of the module's docstring, not the system's reward

    @property
    def flags(self) -> bool:
        """Whether a verifier calls the solution wrong."""
        return self.action.answer == "wrong"


def follow(chat: Format, output: Output, stage: str, number: int = 0) -> Task:
    """The next stage's task: to check a solution, or to correct one after its report."""
    asked = output.task.asked
    text = tuple(chat.note(output.sampled))
    golden = asked.golden_answers
    inputs = (output.task.answer, text)
    if role_of(stage) == "verifier":
        golden = ("right",) if output.own else ("wrong",)
        inputs = (text, None)
    name = f"{asked.id}/{stage}/{number}"
    return Task(name, asked.text, golden, asked.source, asked, stage, number, *inputs)


# ---------------------------------------------------------------------------------- the episode


async def speak(env: Env, trajectory: Trajectory, task: Task) -> Output:
    """One agent reads its task and writes its output."""
    role = role_of(task.stage)
    config = env.config
    limit = config.report_tokens if role == "verifier" else config.solution_tokens
    async with Context(env, trajectory, role) as agent:
        prompt = env.chat.prompt(role, question=task.text, answer=task.answer, report=task.report)
        completion = await agent.write(prompt, limit, STAGES.index(task.stage))
    action = Action(error="it was cut")
    if completion.finish != "length":
        action = env.chat.parse(completion.tokens, final=True)
    if action.answer and role == "verifier":
        # The verdict is the last word of a report.
        action = Action(answer=action.answer.split()[-1].strip(".").lower())
    own = 0.0
    if action.answer:
        own = env.grade(task, action.answer)
    output = Output(completion.tokens, action, task=task, own=own)
    if action.error:
        output.problem = f"malformed: {action.error}"
    agent.turns.append(output)
    env.on_event(task.stage, env.chat.text(completion.tokens))
    return output


async def episode(env: Env, trajectory: Trajectory) -> None:
    """The whole system answers a question; a Task has one output of its agent."""
    asked = trajectory.question
    if isinstance(asked, Task):
        solution = await speak(env, trajectory, asked)
    else:
        solution = await solve(env, trajectory, asked)
    trajectory.answer = solution.action.answer
    trajectory.ended = "no answer" if solution.action.error else "answer"


async def solve(env: Env, trajectory: Trajectory, asked: Question) -> Output:
    """The system's final solution."""
    solution = await speak(env, trajectory, first_task(asked))
    for verifier, corrector in (STAGES[1:3], STAGES[3:5]):
        report = await speak(env, trajectory, follow(env.chat, solution, verifier))
        show_below(trajectory)
        if not report.flags:
            break
        solution = await speak(env, trajectory, follow(env.chat, report, corrector))
        show_below(trajectory)
    return solution


def show_below(trajectory: Trajectory) -> None:
    """Makes pages show the newest agent below the solver."""
    trajectory.contexts[0].turns[0].readers.append(trajectory.contexts[-1])


# --------------------------------------------------------------------- training on groups by input


def grouped(run: Run, step: int) -> list[Trajectory]:
    """A step's rollouts: one stage after the other, each on outputs of the stage before it."""
    trajectories = []
    tasks = solver_tasks(run, step)
    while tasks:
        outputs = play(run, tasks, step)
        trajectories += outputs
        tasks = next_tasks(run, outputs, step)
    return trajectories


def pipelined(run: Run, step: int, *, waiting: list) -> list[Trajectory]:
    """A step's rollouts: all stages at once, each on outputs of the step before.

    `waiting` holds the tasks for the next step.
    """
    outputs = play(run, solver_tasks(run, step) + waiting, step)
    waiting[:] = next_tasks(run, outputs, step)
    return outputs


def solver_tasks(run: Run, step: int) -> list[tuple[int, Task]]:
    """The solver's tasks: the step's questions, with their places."""
    return [(place, first_task(asked)) for place, asked in train.questions_of(run, step)[run.rank]]


def play(run: Run, tasks: list[tuple[int, Task]], step: int) -> list[Trajectory]:
    """G outputs for each task."""
    return play_batch(run, tasks, run.config.group, [], step=step)


def next_tasks(run: Run, trajectories: list[Trajectory], step: int) -> list[tuple[int, Task]]:
    """The tasks that follow from some outputs, with their places."""
    config = run.config
    outputs: dict[tuple, list[Trajectory]] = {}
    for trajectory in trajectories:
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
        for number, output in enumerate(choose(config, run.chat, candidates, follower, rng)):
            # Each input has a place of its own. --inner_steps divides --questions, so all groups
            # of a question are in the same inner step.
            place = output.question_index % config.questions
            place += config.questions * (STAGES.index(follower) * config.inputs + number)
            tasks.append((place, follow(run.chat, output.turns[0], follower, number)))
    return tasks


def choose(
    config: MarsrlConfig,
    chat: Format,
    outputs: list[Trajectory],
    follower: str,
    rng: random.Random,
) -> list[Trajectory]:
    """The outputs of a stage that are inputs of the next stage, for one question.

    Of outputs from which the follower would read the same, one is kept.
    adaptive: first wrong solutions (for a verifier) or true alarms (for a corrector), then others.
    balanced: as many of these as of the others. random: any.
    """
    correcting = role_of(follower) == "corrector"
    distinct = {}
    for output in rng.sample(outputs, len(outputs)):
        turn = output.turns[0]
        if turn.flags or not correcting:
            task = follow(chat, turn, follower)
            distinct.setdefault((task.answer, task.report), output)
    candidates = list(distinct.values())
    count = config.inputs
    if config.choice == "random":
        return candidates[:count]
    # A wrong solution has reward 0, a true alarm 1.
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
    """Advantages by one of four rules; the samples of all agents share one mean of the loss.

    own      the agent's own reward; a group is (question, stage, input). With --rollouts linear
             inputs do not repeat, and a group is a question's samples of a stage
    role     the system's reward; a group is a question's samples of a role: MARS
    attempt  the system's reward; a group is a question's attempts, and samples inherit: MATPO
    pooled   the system's reward; a group is all samples of a question
    """
    samples = []
    rewards = []
    groups = []
    for trajectory in trajectories:
        for context in trajectory.contexts:
            output = context.turns[0]
            reward = trajectory.reward
            group = (trajectory.question_index,)
            if config.credit == "own":
                reward = output.own
                group = output.task.key
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
    """name -> (sum, count): accuracies, and the verifier's alarms on right and wrong solutions."""
    sums, counts = Counter(), Counter()

    def count(name: str, value: float) -> None:
        sums[name] += value
        counts[name] += 1

    for trajectory in trajectories:
        if trajectory.reward is None:
            continue  # no server answered, or the grader failed
        if not isinstance(trajectory.question, Task):
            count("system", trajectory.reward)
        for context in trajectory.contexts:
            output = context.turns[0]
            if context.role != "verifier":
                count(context.role, output.own)
                continue
            count("verifier_accuracy", output.own)
            solution_is_right = output.task.golden_answers == ("right",)
            count("false_alarm_share" if solution_is_right else "recall", output.flags)
    names = ("solver", "corrector", "system", "verifier_accuracy", "recall", "false_alarm_share")
    return {name: (sums[name], counts[name]) for name in names}


# ------------------------------------------------------------------------ words and the command

SOLVER = "Solve the problem. Think first, then give your solution: <answer>the solution</answer>"
VERIFIER = """You check a solution to a problem. Find out by yourself what is right and say where \
the solution errs. Then give your verdict, <answer>right</answer> or <answer>wrong</answer>."""
CORRECTOR = """You are shown a problem, a solution and a report on its errors. The report may be \
mistaken. Solve the problem and end with <answer>the solution</answer>"""


def words(config: MarsrlConfig, tools: list[Tool]) -> Words:
    """The prompts of a chat model in each role."""
    check = "The problem:\n\n{question}\n\nThe solution:\n\n{answer}"

    def fill(question: str, answer=None, report=None) -> dict:
        return {"question": question.strip(), "answer": answer, "report": report}

    prompts = {
        "solver": Template(SOLVER, "{question}", fill),
        "verifier": Template(VERIFIER, check, fill),
        "corrector": Template(CORRECTOR, check + "\n\nThe report:\n\n{report}", fill),
    }
    return Words(prompts, "Give your answer now.", "(nothing)")


def fits(config: MarsrlConfig, chat: Format, question: Question) -> None:
    """Raises UserError if a question leaves no room for its solution and a report."""
    solution = [0] * config.solution_tokens
    report = [0] * config.report_tokens
    slots = {"question": question.text, "answer": solution}
    longest = max(
        len(chat.prompt("verifier", **slots)) + config.report_tokens,
        len(chat.prompt("corrector", report=report, **slots)) + config.solution_tokens,
    )
    if longest > config.context:
        raise UserError(
            f"question {question.id} with a solution and a report takes up to {longest} tokens, "
            f"more than --context {config.context}: raise it"
        )


def questions(config: MarsrlConfig, tools: list[str], training: bool) -> tuple:
    """The stream of training questions and the held-out ones: the toy's, or those of --data."""
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
    play_steps = {
        "linear": train.play_groups,
        "grouped": grouped,
        "pipelined": functools.partial(pipelined, waiting=[]),
    }
    return train.main(
        dataclasses.replace(
            METHOD, play_step=lambda run, step: play_steps[run.config.rollouts](run, step)
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
