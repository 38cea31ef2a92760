"""Runs many episodes at once: one running batch in the sampler, tools in threads.

An episode is a coroutine. When every episode waits, the event loop would sleep; at that moment,
and only then, `Driver` decodes one token for each open request. So no episode is ever late for
a batch, however deep its awaits are nested.

Tests: pytest tests/test_driver.py
"""

import asyncio
import collections
import functools
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from sampler import Completion, Conversation, Request, Sampler, vllm
from tools import ToolError

AnySampler = Sampler | vllm.Remote


@dataclass
class ToolCall:
    """A function in a daemon thread of its own, and the future that waits for its outcome.

    A thread that never returns is given up at its deadline. It cannot keep the process from ending.
    """

    function: Callable
    seconds: float  # until its deadline, from its start
    future: asyncio.Future
    outcome: tuple[Any, BaseException | None] | None = None  # result, error
    deadline: float = float("inf")

    def start(self, finished: threading.Event) -> None:
        """Starts the thread, which sets `finished` at its end."""

        def work() -> None:
            try:
                outcome = (self.function(), None)
            except BaseException as error:
                outcome = (None, error)
            if not self.over():  # past the deadline it stays a failure
                self.outcome = outcome
            finished.set()

        self.deadline = time.monotonic() + self.seconds
        try:
            threading.Thread(target=work, daemon=True).start()
        except RuntimeError:
            self.outcome = (None, ToolError("this machine has no thread left for the call"))
            finished.set()

    def over(self) -> bool:
        """Whether the call has ended. Past its deadline it is ended here, as a failure."""
        if self.outcome is None and time.monotonic() > self.deadline:
            self.outcome = (None, ToolError(f"no answer within {self.seconds:g} seconds"))
        return self.outcome is not None


def wake(future: asyncio.Future, result: Any, error: BaseException | None) -> None:
    """Ends an episode's wait with a result or an error, if it still waits."""
    if future.done():  # cancelled
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


class IdleSelector(selectors.DefaultSelector):
    """Tells when an event loop has nothing left to do.

    A loop with work asks its selector to wait 0 seconds. Any other wait means that every
    coroutine waits for somebody else; then `on_idle` is called. So no episode may await a sleep.
    """

    def __init__(self, on_idle: Callable[[], None]):
        super().__init__()
        self.on_idle = on_idle

    def select(self, timeout: float | None = None):
        if timeout != 0:
            self.on_idle()
        return super().select(0)


class Driver:
    """Runs episodes over samplers: open requests share a running batch, tools run in threads.

    `deterministic`: a tool's result is handed over only when nothing is left to decode and every
    tool has returned. So the batches, and with them the last bits of every log-prob, do not depend
    on how long a tool took. Without it a result is handed over at once, and waiting for tools costs
    nothing.
    """

    def __init__(self, samplers: list[AnySampler], *, deterministic: bool, max_calls: int = 32):
        self.samplers = samplers
        self.deterministic = deterministic
        self.max_calls = max_calls
        self._clear()

    def _clear(self) -> None:
        # id(request) -> what an episode waits for; holding the request keeps its id unique.
        self.waiting: dict[int, tuple[Request, asyncio.Future]] = {}
        self.queued: collections.deque[ToolCall] = collections.deque()
        self.running: list[ToolCall] = []  # started, and not handed over yet
        self.finished = threading.Event()  # some call has ended since the last look

    async def sample(
        self, sampler: AnySampler, conversation: Conversation, tokens: list[int], **options
    ) -> Completion:
        """Appends `tokens` to the conversation and samples; see Sampler.submit."""
        future = asyncio.get_running_loop().create_future()
        request = sampler.submit(conversation, tokens, **options)
        self.waiting[id(request)] = request, future
        return await future

    async def call(self, function: Callable[[], Any], seconds: float) -> Any:
        """The result of a blocking function of the outside world; ToolError after `seconds`."""
        future = asyncio.get_running_loop().create_future()
        self.queued.append(ToolCall(function, seconds, future))
        self._start_calls()
        return await future

    def run(
        self, episodes: list[Coroutine], on_progress: Callable[[int], None] | None = None
    ) -> list:
        """Runs the episodes to their ends and returns their results in order.

        An error in one episode ends all. `on_progress` is told how many are done.
        """
        tasks: list[asyncio.Task] = []

        def on_idle() -> None:
            self._advance()
            if on_progress:
                on_progress(sum(task.done() for task in tasks))

        async def play_all() -> list:
            tasks.extend(asyncio.ensure_future(episode) for episode in episodes)
            return await asyncio.gather(*tasks)

        new_loop = functools.partial(asyncio.SelectorEventLoop, IdleSelector(on_idle))
        try:
            # At its end the runner cancels the episodes that an error in another one left open.
            with asyncio.Runner(loop_factory=new_loop) as runner:
                return runner.run(play_all())
        finally:
            for episode in episodes:
                episode.close()
            self._clear()

    def _advance(self) -> None:
        """Every episode waits: decode one token for each open request, or wait for the tools."""
        busy = [sampler for sampler in self.samplers if sampler.busy]
        for sampler in busy:
            for request in sampler.step():
                _, future = self.waiting.pop(id(request))
                error = sampler.failure(request.error) if request.error else None
                wake(future, request.completion, error)
        if busy and self.deterministic:
            return  # tools wait until nothing is left to decode
        if not busy:
            self._wait_for_calls()
        self._deliver()

    def _deliver(self) -> None:
        """Hands over what the tools have returned; deterministic: only when all of them have."""
        under_way = self.queued or not all(call.over() for call in self.running)
        if self.deterministic and under_way:
            return
        for call in self.running:
            if call.over():
                wake(call.future, *call.outcome)
        self.running = [call for call in self.running if not call.future.done()]
        self._start_calls()

    def _start_calls(self) -> None:
        """Starts queued calls. Those that were given up at their deadline no longer count."""
        under_way = sum(call.outcome is None for call in self.running)
        while self.queued and under_way < self.max_calls:
            call = self.queued.popleft()
            call.start(self.finished)
            self.running.append(call)
            under_way += 1

    def _wait_for_calls(self) -> None:
        """Waits for a call to return, at most a moment, so that Ctrl-C is heard in time."""
        if not self.running:
            raise RuntimeError("every episode waits, and nothing is under way that could wake one")
        if any(call.over() for call in self.running) and not self.deterministic:
            return
        self.finished.wait(0.1)
        self.finished.clear()
        # Later calls of a long queue start while the first ones wait to be handed over.
        self._start_calls()
