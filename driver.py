"""Runs many episodes at once: one running batch in the sampler, tools in threads.

An episode is a coroutine. When every episode waits, and only then, `Driver` decodes one token for
each open request. So every episode that can submit a request has done so before the next batch,
however deep its awaits are nested.

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

from sampler import Completion, Conversation, Lost, Request, Sampler, vllm
from tools import ToolError

AnySampler = Sampler | vllm.Remote


@dataclass
class ToolCall:
    """A function that runs in its own daemon thread, and the future that gets its outcome.

    A thread that has not returned at its deadline is abandoned. It does not keep the process alive.
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
            if not self.over():  # A result that comes after the deadline is ignored.
                self.outcome = outcome
            finished.set()

        self.deadline = time.monotonic() + self.seconds
        try:
            threading.Thread(target=work, daemon=True).start()
        except RuntimeError:
            self.outcome = (None, ToolError("this machine has no thread left for the call"))
            finished.set()

    def over(self) -> bool:
        """Whether the call has ended. A call past its deadline ends here, as a failure."""
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
    """A selector that calls `on_idle` when an event loop has nothing left to do.

    A loop with work asks its selector to wait 0 seconds. Any other wait means that all coroutines
    wait for a request or a tool. A sleep would look the same, so no episode may await one.
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

    With `deterministic` an episode gets its tool's result only when nothing is left to decode and
    every tool has returned. So the batches, and with them the last bits of every log-prob, do not
    depend on how long a tool took. Without it an episode gets a result at once, and other episodes
    decode while a tool runs.
    """

    def __init__(self, samplers: list[AnySampler], *, deterministic: bool, max_calls: int = 32):
        self.samplers = samplers
        self.deterministic = deterministic
        self.max_calls = max_calls
        self._clear()

    def _clear(self) -> None:
        self.waiting: dict[Request, asyncio.Future] = {}  # the future of the request's episode
        self.queued: collections.deque[ToolCall] = collections.deque()
        self.running: list[ToolCall] = []  # started, and not delivered yet
        self.finished = threading.Event()  # set if a call has ended since the last check

    async def sample(
        self, sampler: AnySampler, conversation: Conversation, tokens: list[int], **options
    ) -> Completion:
        """Appends `tokens` to the conversation and samples; see Sampler.submit."""
        future = asyncio.get_running_loop().create_future()
        request = sampler.submit(conversation, tokens, **options)
        self.waiting[request] = future
        return await future

    async def call(self, function: Callable[[], Any], seconds: float) -> Any:
        """The result of a blocking function of the outside world; ToolError after `seconds`."""
        future = asyncio.get_running_loop().create_future()
        self.queued.append(ToolCall(function, seconds, future))
        return await future

    def run(
        self, episodes: list[Coroutine], on_progress: Callable[[], None] = lambda: None
    ) -> list:
        """Runs the episodes to their ends and returns their results in order.

        An error in one episode ends all of them. `on_progress` is called between decoding steps.
        """

        def on_idle() -> None:
            self._advance()
            on_progress()

        async def play_all() -> list:
            return await asyncio.gather(*episodes)

        new_loop = functools.partial(asyncio.SelectorEventLoop, IdleSelector(on_idle))
        try:
            # The runner ends by cancelling the episodes that are still open after an error.
            with asyncio.Runner(loop_factory=new_loop) as runner:
                return runner.run(play_all())
        finally:
            for episode in episodes:
                episode.close()
            self._clear()

    def _advance(self) -> None:
        """Every episode waits: decode one token for each open request, or wait for the tools."""
        self._start_calls()
        busy = [sampler for sampler in self.samplers if sampler.busy]
        for sampler in busy:
            for request in sampler.step():
                error = Lost(request.error) if request.error else None
                wake(self.waiting.pop(request), request.completion, error)
        if busy and self.deterministic:
            return  # Results of tools wait until nothing is left to decode.
        if not busy:
            self._wait_for_calls()
        self._deliver()

    def _deliver(self) -> None:
        """Delivers the tools' results; if deterministic, only when all tools have returned."""
        under_way = self.queued or not all(call.over() for call in self.running)
        if self.deterministic and under_way:
            return
        for call in self.running:
            if call.over():
                wake(call.future, *call.outcome)
        self.running = [call for call in self.running if not call.future.done()]

    def _start_calls(self) -> None:
        """Starts queued calls. Calls that were abandoned at their deadline do not count."""
        under_way = sum(not call.over() for call in self.running)
        while self.queued and under_way < self.max_calls:
            call = self.queued.popleft()
            call.start(self.finished)
            self.running.append(call)
            under_way += 1

    def _wait_for_calls(self) -> None:
        """Waits for a call to return, but only a moment, so that Ctrl-C works."""
        if not self.running:
            raise RuntimeError("every episode waits, but no request and no call is under way")
        if any(call.over() for call in self.running) and not self.deterministic:
            return
        self.finished.wait(0.1)
        self.finished.clear()
