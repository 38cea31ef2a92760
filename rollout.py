"""What an episode of any method is made of; mars.py shows one.

Tokens, masks and log-probs are stored as they arise, in `Context.write`, and never remade: no
context is decoded and encoded again. An episode is a straight-line coroutine, and a new multi-agent
method is a new `async def`. driver.py runs hundreds of them over one sampler.

Tests: pytest tests/test_rollout.py
"""

import contextlib
import functools
import hashlib
import math
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from config import Config, UserError
from driver import AnySampler, Driver
from sampler import Completion, Conversation, Lost
from tasks.chat import Words
from tasks.format import Action, Format
from tasks.questions import Question
from tools import Document, Tool, ToolError

# ---------------------------------------------------------------------------------- what is written


@dataclass
class Sample:
    """What one role read and wrote in one context. The three lists have one entry per token."""

    role: str
    question_index: int  # in the step's batch: the key of its advantage groups
    attempt: int  # which of the question's G, from 0
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)  # True: sampled by this role, carries loss
    logprobs: list[float] = field(default_factory=list)  # the sampler's; 0 where given
    server: str = ""  # URL of the last that sampled for it; empty: this process
    reward: float | None = None
    advantage: float = 0.0
    loss_weight: float = 0  # its weight in the mean of its term of the loss; `credit` sets it

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
    """The documents that a reader got at once."""

    documents: list[int]  # indices into the turn's documents
    tokens: int
    capacity: int  # tokens that would have fitted
    truncated: bool  # a document in it was longer than the capacity


@dataclass
class Turn:
    """One action of a context and what came of it."""

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
    # In the order of their opening. Not in repr: asyncio prints results when it restores Ctrl-C's
    # handler, and all these tokens took seconds.
    contexts: list["Context"] = field(default_factory=list, repr=False)
    answer: str | None = None
    ended: str = ""  # "answer", "answer on demand", "no answer", "lost: …"
    # None: nobody could grade it, or no server answered. Then it belongs to no group.
    reward: float | None = None

    @property
    def turns(self) -> list[Turn]:
        """The turns of the context that answers."""
        return self.contexts[0].turns

    def samples(self, *roles: str) -> list[Sample]:
        """The samples of these roles, or of all, in the order of their opening."""
        samples = [context.sample for context in self.contexts]
        return [sample for sample in samples if not roles or sample.role in roles]


@dataclass
class Context:
    """One role's growing context. Its KV pages are held from `async with` to its end."""

    env: "Env"
    trajectory: Trajectory
    role: str
    chunk: Chunk | None = None  # what a reader was given
    turns: list[Turn] = field(default_factory=list)
    sample: Sample = field(init=False)
    conversation: Conversation = field(init=False, repr=False)

    def __post_init__(self):
        self.sample = Sample(self.role, self.trajectory.question_index, self.trajectory.attempt)
        self.trajectory.contexts.append(self)

    async def __aenter__(self) -> "Context":
        self.conversation = self.env.samplers[self.role].open()
        return self

    async def __aexit__(self, *error) -> None:
        self.env.samplers[self.role].close(self.conversation)

    async def write(self, given: list[int], limit: int, *key: int) -> Completion:
        """Reads the tokens `given`, then samples up to `limit` tokens or the stop token.

        The seed of the draws depends on `key`, which must differ from that of every other `write`
        of this role in the attempt. In a role's only context the turn's number does.
        """
        env = self.env
        self.sample.append_given(given)
        completion = await env.driver.sample(
            env.samplers[self.role],
            self.conversation,
            given,
            max_new_tokens=limit,
            temperature=env.temperature,
            top_p=env.top_p,
            stop_ids=env.chat.stop_ids,
            seed=env.seed(self.trajectory, self.role, *key),
        )
        self.sample.append_sampled(completion)
        return completion


# ----------------------------------------------------------------------------- what an episode uses


@dataclass
class Env:
    """Everything that the episodes of one batch may use."""

    driver: Driver
    samplers: dict[str, AnySampler]  # role -> who plays it
    chat: Format
    tools: dict[str, Callable[[str], list[Document]]]
    grade: Callable[[Question, str], float | None]  # may block; ToolError or None: it cannot tell
    config: Any  # the method's: a subclass of Config
    step: int | str  # names the draws: the training step, "eval", "ask" or "demonstration"
    temperature: float = 1.0
    top_p: float = 1.0
    on_event: Callable[[str, str], None] = lambda kind, text: None  # for somebody who watches

    def seed(self, trajectory: Trajectory, *key: int | str) -> int:
        """The seed of one `write`: a hash of its key, whatever else was drawn before."""
        whole = (self.config.seed, self.step, trajectory.question.id, trajectory.attempt, *key)
        digest = hashlib.blake2b(repr(whole).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    async def call(self, turn: Turn) -> list[Document]:
        """The documents of the turn's tool call. ToolError if it fails; `turn` keeps the reason."""
        call = turn.action.call

        def timed() -> list[Document]:
            turn.seconds = self.config.tool_seconds  # unless it ends before its deadline
            start = time.perf_counter()
            try:
                documents = self.tools[call.tool](call.argument)
            finally:
                turn.seconds = time.perf_counter() - start
            for document in documents:  # encoded in this thread; the format keeps the ids
                self.chat.document(document)
            return documents

        try:
            turn.documents = await self.driver.call(timed, self.config.tool_seconds)
        except ToolError as error:
            turn.problem = f"tool failed: {error}"
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
        try:
            await method.episode(self, trajectory)
        except Lost as error:
            trajectory.ended = f"lost: {error}"
            self.on_event("lost", str(error))
            return trajectory
        self.on_event("answer", trajectory.answer or "")
        trajectory.reward = await self.reward(trajectory)
        for sample in trajectory.samples():
            sample.reward = trajectory.reward
        return trajectory

    async def reward(self, trajectory: Trajectory) -> float | None:
        """The grade of the answer, 0 if there is none; None if nobody could grade it."""
        if trajectory.answer is None:
            return 0.0
        grade = functools.partial(self.grade, trajectory.question, trajectory.answer)
        try:
            reward = await self.driver.call(grade, self.config.tool_seconds)
        except ToolError as error:
            trajectory.turns[-1].problem = f"judge failed: {error}"
            return None
        return reward if reward is None else finite(reward)


def finite(reward) -> float:
    """What a grader returned, also of NumPy or PyTorch, as a float; UserError if it is none."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
        if math.isfinite(number := float(reward)):
            return number
    raise UserError(
        f"the grader returned {reward!r:.100}: return a finite number, or raise ToolError"
    )


@dataclass(frozen=True)
class Method:
    """A method: words, `episode` and `credit`, with the options that are its own."""

    name: str
    roles: dict[str, str]  # role -> caption on pages and curves; the first role answers
    config: type[Config]
    episode: Callable[[Env, Trajectory], Coroutine]
    # (options, graded trajectories, step) -> {term: its samples}, with advantages and weights set.
    # The loss is the sum of the terms, each a mean over its samples. It sees this rank's questions
    # only, each with all its attempts: what needs all ranks' goes through processes.sum_over_ranks.
    credit: Callable[[Any, list[Trajectory], int], dict[str, list[Sample]]]
    words: Callable[[Any, list[Tool]], Words]  # how a chat model is addressed
    fits: Callable[[Any, Format, Question], None]  # UserError if a question leaves no room
    presets: dict[str, dict] = field(default_factory=dict)
    # (run, step) -> this rank's trajectories of a step; None: G attempts at each of its questions.
    play_step: Callable[..., list[Trajectory]] | None = None
    # Metrics of the method's own: {name: (numerator, denominator)} of a batch. Both are summed over
    # the ranks, and metrics.jsonl gets their ratio, an evaluation's under eval_{name}.
    metrics: Callable[[list[Trajectory]], dict[str, tuple[float, float]]] = lambda attempts: {}


def play_batch(
    run, batch: list[tuple[int, Question]], attempts: int, tools: list[Tool], **options
) -> list[Trajectory]:
    """`attempts` trajectories for each (index, question), all in one running batch.

    `run` is a plumbing.start.Run. `options` are those of Env: the step, the temperature (the run's
    unless given), …
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
    episodes = [
        env.play(run.method, question, index, attempt)
        for index, question in batch
        for attempt in range(attempts)
    ]
    quiet = run.rank > 0 or "on_event" in options or not sys.stderr.isatty()
    with tqdm(desc="rollouts", total=len(episodes), leave=False, disable=quiet) as bar:
        return run.driver.run(episodes, lambda done: bar.update(done - bar.n))
