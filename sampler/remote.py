"""Rollouts on serving engines: vLLM or SGLang servers behind the face of `Sampler`.

A conversation lives here as token ids. Each request sends all of them and gets ids and log-probs
back, never text, so a server holds nothing that could be lost: its prefix cache only spares work.
Conversations are shared out over the servers and stay where they are until their server fails.

New weights go by way of a model folder that the servers can read. Each server pauses, reloads,
forgets its prefix cache, resumes and takes a version of ours. An answer counts only if its server
still holds that version afterwards. So a server that was started anew, with the weights of its
start, is noticed at its first answer and loads again.

Whatever goes wrong (a lost or slow server, 429, 5xx, an answer that is cut or does not hold what
was asked for) is tried again, on another server if there is one, within one deadline for a request.
A try gets half of the time that is left. Then `Lost` ends this trajectory and no other.

Departures from `Sampler`: draws are the engine's own; with top_p below 1 the log-probs are those of
the nucleus; how requests share batches depends on when they arrive.

Protocols: servers.py. How servers are started: docs/engines.md. Tests: pytest tests/test_remote.py
"""

import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

from config import UserError
from processes import from_first_rank
from sampler.request import Completion, Conversation, Lost, Request, make_request
from sampler.servers import Server, checked, final, reason
from tools.web import Refused, in_threads, retry_after

FIRST_REST = 0.25  # seconds that a server is left alone after a failure
LONGEST_REST = 30.0  # after many in a row
PREFIX = "mars-"  # of the versions of all runs' weights


class Remote:
    """Samples on `servers`, with the face that `Sampler` shows the driver.

    vocabulary: token ids are below it. seconds: the deadline of one request, and of one round of
    new weights. parallel: requests under way at once, at most. write(model): the path of a folder
    with the model's weights that all servers can read; every rank calls it.
    """

    failure = Lost  # what a request that has failed raises

    def __init__(
        self,
        servers: list[Server],
        *,
        vocabulary: int,
        seconds: float,
        parallel: int,
        write: Callable,
    ):
        self.servers = servers
        self.vocabulary = vocabulary
        self.positions = min(server.positions for server in servers)
        self.seconds = seconds
        self.parallel = parallel
        self.write = write
        kind = type(servers[0]).__name__
        # What the start's line prints as the sampler.
        self.path = f"{kind} at {', '.join(server.url for server in servers)}"
        self.name = ""  # of this run, in the versions of its weights
        self.folder = ""  # the weights that are to be sampled with
        self.syncs = 0  # rounds of new weights so far
        names = ("decoded_tokens", "running", "waiting", "pages_in_use", "failures", "loads")
        self.stats = dict.fromkeys(names, 0)
        self.homes: dict[Conversation, Server] = {}  # where each conversation is sent
        self.requests: set[Request] = set()  # open ones
        self.threads = 0
        self.todo: queue.SimpleQueue = queue.SimpleQueue()
        self.answers: queue.SimpleQueue = queue.SimpleQueue()
        self.guard = threading.Lock()  # of `homes` and of what the threads count

    # ---- what callers use

    @property
    def busy(self) -> bool:
        """True while a request is open that step() has not returned yet."""
        return bool(self.requests)

    @property
    def pages_in_use(self) -> int:
        """Open conversations that a server was asked to continue; the pages are the servers'."""
        return len(self.homes)

    def open(self) -> Conversation:
        """A new, empty conversation."""
        return Conversation()

    def close(self, conversation: Conversation) -> None:
        """Ends a conversation; its open request, if any, ends with an error."""
        request = conversation.request
        with self.guard:
            conversation.closed = True
            self._move(conversation, None)
        if request:
            request.error = "the conversation was closed"
            self.requests.discard(request)
            conversation.request = None

    def submit(self, conversation: Conversation, tokens, **options) -> Request:
        """Appends `tokens` to the conversation and asks for an answer; see Sampler.submit."""
        request = make_request(
            conversation,
            tokens,
            vocabulary=self.vocabulary,
            pool=self.positions,
            **{"temperature": 1.0, "top_p": 1.0, "stop_ids": (), "seed": 0} | options,
        )
        conversation.tokens += request.given
        conversation.request = request
        self.requests.add(request)
        self.todo.put((request, list(conversation.tokens)))
        if self.threads < min(self.parallel, len(self.requests)):
            self.threads += 1
            threading.Thread(target=self._work, daemon=True).start()
        return request

    def step(self) -> list[Request]:
        """The requests that have been answered; waits a moment for one if there is none."""
        done = []
        try:
            answer = self.answers.get(timeout=0.01)
            while True:
                if answer[0] in self.requests:  # else its conversation was closed
                    done.append(self._finish(*answer))
                answer = self.answers.get_nowait()
        except queue.Empty:
            pass
        running = sum(server.running for server in self.servers)
        waiting = max(0, len(self.requests) - running)
        self.stats |= {"running": running, "waiting": waiting, "pages_in_use": self.pages_in_use}
        return done

    def _finish(self, request: Request, completion: Completion | None, error: Exception | None):
        if isinstance(error, UserError):
            raise error
        self.requests.remove(request)
        request.conversation.request = None
        request.completion = completion
        request.error = str(error) if error else None
        if completion:
            request.conversation.tokens += completion.tokens
            self.stats["decoded_tokens"] += len(completion.tokens)
        return request

    # ---- new weights

    def load_weights(self, model) -> None:
        """Writes the weights to disk, and returns when the servers hold them."""
        self.load_folder(self.write(model))

    def load_folder(self, folder: str) -> None:
        """Has the servers load a model folder. One that is away loads it when it is back.

        UserError, on all ranks, if a server refuses it for good, or if none has loaded it in time.
        """
        if self.busy:
            raise RuntimeError("new weights while requests are open")
        self.name = self.name or from_first_rank(f"{PREFIX}{uuid.uuid4().hex}")
        self.folder = folder
        self.syncs += 1
        problem = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            problem = self._load_all()
        problem = from_first_rank(problem)
        if problem:
            raise UserError(problem)

    def _load_all(self) -> str | None:
        """Brings the weights to every server that answers.

        Returns what is wrong if one refuses them, or if none has taken them in time.
        """
        deadline = time.monotonic() + self.seconds

        def attempt(server: Server) -> Exception | None:
            try:
                self._bring(server, (time.monotonic() + deadline) / 2)
            except Exception as error:
                return error

        while True:
            errors = in_threads(attempt, self.servers)
            refused = any(map(final, errors))
            if None in errors and not refused:
                return None
            if refused or time.monotonic() + 1 > deadline:
                break
            time.sleep(1)
        pairs = [(server, error) for server, error in zip(self.servers, errors) if error]
        listed = "; ".join(f"{server.url}: {reason(error)}" for server, error in pairs)
        return (
            f"the weights in {self.folder} were not loaded ({listed}): see to the servers "
            "(docs/engines.md says how they are started), then --resume"
        )

    def _bring(self, server: Server, deadline: float) -> str:
        """The version that a server holds, once it is one of the current weights.

        Every load has a version of its own. So a sample that was drawn before a load is told from
        one that was drawn after it, also when both loads were of the same weights.
        """
        current = f"{self.name}.{self.syncs}."
        with server.loading:
            if not server.version.startswith(current):
                server.version = server.held(deadline)
            if not server.version.startswith(current):
                self._check_owner(server)
                version = f"{current}{uuid.uuid4().hex}"
                server.load(self.folder, version, deadline)
                server.version = server.held(deadline)
                self.stats["loads"] += 1
                if server.version != version:
                    raise ValueError(f"it holds {server.version!r} after loading {version!r}")
            server.ours = True
            return server.version

    def _check_owner(self, server: Server) -> None:
        """UserError if another run has taken the server over: each would undo the other's loads."""
        others = server.version.startswith(PREFIX) and not server.version.startswith(self.name)
        if server.ours and others:
            raise UserError(
                f"another run loads its weights into {server.url}: give each run servers of its "
                "own, then --resume"
            )

    # ---- in threads

    def _work(self) -> None:
        """One of the threads that ask the servers, for ever."""
        while True:
            request, context = self.todo.get()
            try:
                self.answers.put((request, self._sample(request, context), None))
            except (Lost, UserError) as error:
                self.answers.put((request, None, error))

    def _sample(self, request: Request, context: list[int]) -> Completion:
        """The answer to one request, from whichever server gives it; Lost at the deadline."""
        deadline = time.monotonic() + self.seconds
        why = "all servers rest after a failure"
        while (left := deadline - time.monotonic()) > 0 and not request.done:
            server = self._choose(request.conversation)
            if server is None:
                time.sleep(min(0.05, left))
                continue
            try:
                completion = self._ask(server, request, context, time.monotonic() + left / 2)
                server.failures = 0
                return completion
            except UserError:
                raise
            except Exception as error:  # whatever a server sends reaches the parsers
                why = f"{server.url}: {reason(error)}"
                if final(error):
                    raise Lost(why) from None
                self._rest(server, error)
            finally:
                with self.guard:
                    server.running -= 1
        raise Lost(f"no answer within {self.seconds:g} seconds ({why})")

    def _ask(
        self, server: Server, request: Request, context: list[int], deadline: float
    ) -> Completion:
        """One try, which counts only if the server held the same current weights throughout."""
        version = self._bring(server, deadline)
        try:
            tokens, logprobs, after = server.ask(context, request, deadline)
        except Refused as error:
            # A server that was started anew has no adapters yet and refuses for good. Its version
            # tells.
            if not final(error):
                raise
            after = server.held(deadline)
            if after == version:
                raise
            tokens, logprobs = [], []
        if after != version:
            server.version = after
            raise ValueError(f"it sampled with the weights {after!r} and not {version!r}")
        completion = checked(tokens, logprobs, request, self.vocabulary)
        completion.server = server.url
        return completion

    def _choose(self, conversation: Conversation) -> Server | None:
        """Where the conversation was, or the emptiest server; None while all rest.

        The server's `running` counts one more, which `_sample` takes back.
        """
        with self.guard:
            awake = [server for server in self.servers if server.rests_until <= time.monotonic()]
            if not awake:
                return None
            server = self.homes.get(conversation)
            if server not in awake:
                server = min(awake, key=lambda server: server.conversations)
                if not conversation.closed:
                    self._move(conversation, server)
            server.running += 1
            return server

    def _move(self, conversation: Conversation, server: Server | None) -> None:
        """Gives a conversation another home, or none."""
        left = self.homes.pop(conversation, None)
        if left:
            left.conversations -= 1
        if server:
            self.homes[conversation] = server
            server.conversations += 1

    def _rest(self, server: Server, error: Exception) -> None:
        """Leaves a server alone for a while, longer after each failure in a row."""
        with self.guard:
            self.stats["failures"] += 1
            now = time.monotonic()
            if server.rests_until > now:  # another thread has just met the same failure
                return
            server.failures += 1
            rest = min(LONGEST_REST, FIRST_REST * 2 ** (server.failures - 1))
            if isinstance(error, Refused):
                rest = max(rest, retry_after(error.headers.get("Retry-After")))
            server.rests_until = now + rest
        if server.failures == 4:  # it may pass at once, and then nobody need know
            print(f"{server.url} fails: {reason(error)}; trying again", file=sys.stderr, flush=True)
