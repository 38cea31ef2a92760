"""The parts of an episode, for any method; mars.py has an example.

`Context.write` stores tokens, masks and log-probs at the moment when they are sampled. They are
never made again: no context is decoded and encoded. An episode is one coroutine, and a new
multi-agent method is a new `async def`. driver.py runs hundreds of them over one sampler.

Tests: pytest tests/test_rollout.py
"""

import contextlib
import functools
import hashlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from config import Config, UserError
from sampler import Completion, Lost
from tasks.chat import Words
from tasks.format import Action, Format
from tasks.questions import Question
from tools import Document, Tool, ToolError

# ------------------------------------------------------------------------------------------ records


@dataclass
class Sample:
    """One role's tokens in one context. The three lists have one entry per token."""

    role: str
    question_index: int  # in the step's batch; advantages compare samples of one index
    attempt: int  # 0 to G - 1
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)  # True: sampled by this role, carries loss
    logprobs: list[float] = field(default_factory=list)  # the sampler's; 0 where mask is False
    server: str = ""  # URL of the server that sampled last; empty: this process
    reward: float | None = None
    advantage: float = 0.0
    loss_weight: float = 0  # how often it counts in the mean of its loss term; set by `credit`

    def append_given(self, tokens: Sequence[int]) -> None:
        """Appends tokens that this role only reads: its prompt, documents, notes."""
        self.tokens += tokens
        self.mask += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def append_sampled(self, completion: Completion) -> None:
        """Appends tokens that this role sampled, the stop token included."""
        self.tokens += completion.tokens
        self.mask += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs
        self.server = completion.server


@dataclass
class Chunk:
    """The documents in one reader's prompt."""

    documents: list[int]  # indices into the turn's documents
    tokens: int
    capacity: int  # the most tokens of documents that the prompt can hold
    truncated: bool  # whether a document was cut at the capacity


@dataclass
class Turn:
    """One action of a context and its outcome."""

    sampled: list[int]
    action: Action
    # "malformed: …", "tool failed: …", "no results" or "judge failed: …"
    problem: str | None = None
    documents: list[Document] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # number of tokens of each document
    readers: list["Context"] = field(default_factory=list)  # contexts that this turn opened
    seconds: float = 0.0  # spent in the tool


@dataclass
class Trajectory:
    """One attempt at a question. The first context is the one that answers."""

    question: Question
    question_index: int  # in the step's batch
    attempt: int
    # In the order in which they were opened. repr leaves them out, because asyncio formats every
    # result when it restores the handler of Ctrl-C, and that took seconds.
    contexts: list["Context"] = field(default_factory=list, repr=False)
    answer: str | None = None
    ended: str = ""  # "answer", "answer on demand", "no answer", "lost: …"
    # None if the grader failed or no server answered; the trajectory then belongs to no group.
    reward: float | None = None

    @property
    def turns(self) -> list[Turn]:
        """The turns of the context that answers."""
        return self.contexts[0].turns

    def samples(self, *roles: str) -> list[Sample]:
        """The samples of these roles, or of all roles, in the order of `contexts`."""
        samples = [context.sample for context in self.contexts]
        return [sample for sample in samples if not roles or sample.role in roles]


@dataclass
class Context:
    """One role's growing context. Its KV pages are held from `async with` to its end."""

    env: "Env"
    trajectory: Trajectory
    role: str
    chunk: Chunk | None = None  # a reader's documents
    turns: list[Turn] = field(default_factory=list)
    sample: Sample = field(init=False)
    conversation: Any = field(init=False, repr=False)  # as its sampler opened it

    def __post_init__(self):
        self.sample = Sample(self.role, self.trajectory.question_index, self.trajectory.attempt)
        self.trajectory.contexts.append(self)

    def __getstate__(self) -> dict:
        """What is sent to another rank: the record without its environment and conversation."""
        return vars(self) | {"env": None, "conversation": None}

    async def __aenter__(self) -> "Context":
        self.conversation = self.env.samplers[self.role].open()
        return self

    async def __aexit__(self, *error) -> None:
        self.env.samplers[self.role].close(self.conversation)

    async def write(self, prompt: list[int], limit: int, *key: int) -> Completion:
        """Reads the tokens of `prompt`, then samples up to the stop token or `limit` tokens.

        The seed of the draws depends on `key`. Every `write` of this role in the attempt needs a
        `key` of its own. Where the role has only one context, the number of the turn is enough.
        """
        env = self.env
        self.sample.append_given(prompt)
        completion = await env.driver.sample(
            env.samplers[self.role],
            self.conversation,
            prompt,
            max_new_tokens=limit,
            temperature=env.temperature,
            top_p=env.top_p,
            stop_ids=env.chat.stop_ids,
            seed=env.seed(self.trajectory, self.role, *key),
        )
        self.sample.append_sampled(completion)
        env.counts["tokens"] += len(completion.tokens)
        return completion


# ------------------------------------------------------------------------ an episode's environment


@dataclass
class Env:
    """Everything that the episodes of one batch share."""

    driver: Any  # a driver.Driver, or warm_start.Demonstrator in its place
    samplers: dict[str, Any]  # role -> its driver.AnySampler, or what a Demonstrator takes for it
    chat: Format
    tools: dict[str, Callable[[str], list[Document]]]
    grade: Callable[[Question, str], float | None]  # may block; ToolError or None if it fails
    config: Any  # the method's own subclass of Config
    step: int | str  # part of every seed: the training step, "eval", "ask" or "demonstration"
    temperature: float = 1.0
    top_p: float = 1.0
    on_event: Callable[[str, str], None] = lambda kind, text: None  # called for a viewer
    on_end: Callable[[Trajectory], None] = lambda trajectory: None  # called at an attempt's end
    # Attempts "begun" and "done", sampled "tokens", tool "calls" and how many of them "failed".
    counts: Counter = field(default_factory=Counter)

    def seed(self, trajectory: Trajectory, *key: int | str) -> int:
        """The seed of one `write`: a hash of its key, independent of all earlier draws."""
        full_key = (self.config.seed, self.step, trajectory.question.id, trajectory.attempt, *key)
        digest = hashlib.blake2b(repr(full_key).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    async def call(self, turn: Turn) -> list[Document]:
        """The documents of the turn's tool call. ToolError if it fails; `turn` keeps the reason."""
        call = turn.action.call

        def call_tool() -> list[Document]:
            turn.seconds = self.config.tool_seconds  # in case the call runs into its deadline
            start = time.perf_counter()
            try:
                documents = self.tools[call.tool](call.argument)
            finally:
                if not turn.problem:  # else the deadline has passed, and nobody waits any more
                    turn.seconds = time.perf_counter() - start
            for document in documents:  # fills the format's cache here, not in the event loop
                self.chat.document(document)
            return documents

        self.counts["calls"] += 1
        try:
            turn.documents = await self.driver.call(call_tool, self.config.tool_seconds)
        except ToolError as error:
            turn.problem = f"tool failed: {error}"
            self.counts["failed"] += 1
            self.on_event("failed", str(error))
            raise
        if not turn.documents:
            turn.problem = "no results"
            return []
        titles = [document.title or document.id for document in turn.documents]
        self.on_event("found", "; ".join(titles))
        return turn.documents

    async def play(
        self, method: "Method", question: Question, question_index: int, attempt: int
    ) -> Trajectory:
        """One attempt from the question to its reward."""
        trajectory = Trajectory(question, question_index, attempt)
        self.counts["begun"] += 1
        try:
            await method.episode(self, trajectory)
            self.on_event("answer", trajectory.answer or "(none)")
            trajectory.reward = await self.reward(trajectory)
        except Lost as error:
            trajectory.ended = f"lost: {error}"
            self.on_event("lost", str(error))
        for sample in trajectory.samples():
            sample.reward = trajectory.reward
        self.counts["done"] += 1
        self.on_end(trajectory)
        return trajectory

    async def reward(self, trajectory: Trajectory) -> float | None:
        """The grade of the answer: 0 if there is no answer, None if the grader failed."""
        if trajectory.answer is None:
            return 0.0
        grade = functools.partial(self.grade, trajectory.question, trajectory.answer)
        try:
            reward = await self.driver.call(grade, self.config.tool_seconds)
        except ToolError as error:
            trajectory.turns[-1].problem = f"judge failed: {error}"
            return None
        return None if reward is None else check_reward(reward)


def check_reward(reward) -> float:
    """A grader's result (also of NumPy or PyTorch) as a float. UserError if it is not in 0..1."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
        if 0 <= (number := float(reward)) <= 1:
            return number
    raise UserError(
        f"the grader returned {reward!r:.100}: return a number from 0 to 1, or raise ToolError"
    )


@dataclass(frozen=True)
class Method:
    """A method: its words, its `episode`, its `credit`, and its own options."""

    name: str
    roles: dict[str, str]  # role -> caption on pages and curves; the first role answers
    config: type[Config]
    episode: Callable[[Env, Trajectory], Coroutine]
    # (options, graded trajectories, step) -> {term: its samples}, with advantages and weights set.
    # The loss is the sum of the terms, each a mean over its samples. `credit` sees only this rank's
    # questions, with all their attempts. For sums over all ranks it can call sum_over_ranks.
    credit: Callable[[Any, list[Trajectory], int], dict[str, list[Sample]]]
    words: Callable[[Any, list[Tool]], Words]  # how a chat model is addressed
    fits: Callable[[Any, Format, Question], None]  # UserError if a question leaves no room
    presets: dict[str, dict] = field(default_factory=dict)
    # (run, step) -> this rank's trajectories of a step; None: G attempts at each of its questions.
    play_step: Callable[..., list[Trajectory]] | None = None
    # The method's own metrics of a batch, {name: (numerator, denominator)}. Both are summed over
    # the ranks. metrics.jsonl has their ratio as {name}, or as eval_{name} for an evaluation.
    metrics: Callable[[list[Trajectory]], dict[str, tuple[float, float]]] = lambda attempts: {}


def play_batch(
    run, batch: list[tuple[int, Question]], attempts: int, tools: list[Tool], start=None, **options
) -> list[Trajectory]:
    """`attempts` trajectories for each (index, question), all in one running batch.

    `run` is a plumbing.start.Run. `options` are fields of Env, such as `step`; the default of
    `temperature` is the run's. `start`, if given, makes other coroutines to run from the Env.
    """
    env = Env(
        driver=run.driver,
        samplers=run.samplers,
        chat=run.chat,
        tools={tool.name: tool.call for tool in tools},
        grade=run.grade,
        config=run.config,
        **{"temperature": run.config.temperature} | options,
    )
    keys = [(question, index, attempt) for index, question in batch for attempt in range(attempts)]
    episodes = start(env) if start else [env.play(run.method, *key) for key in keys]
    quiet = run.rank > 0 or "on_event" in options
    terminal = sys.stderr.isatty()  # It shows a bar. Elsewhere a line is printed every minute.
    next_line = math.inf if quiet or terminal else time.monotonic() + 60
    with tqdm(desc="rollouts", leave=False, disable=quiet or not terminal) as bar:

        def show() -> None:
            nonlocal next_line
            bar.total = env.counts["begun"]
            bar.update(env.counts["done"] - bar.n)
            if time.monotonic() >= next_line:
                next_line += 60
                line = "{done} of {begun} attempts, {tokens} tokens, {calls} calls, {failed} failed"
                print("rollouts:", line.format_map(env.counts), file=sys.stderr, flush=True)

        return run.driver.run(episodes, show)
