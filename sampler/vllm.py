"""Rollouts on vLLM servers, with the methods of `Sampler` that the driver calls.

A conversation is a list of token ids in this process. Each request sends all of them and gets ids
and log-probs, never text. So an answer does not depend on the server's state.

New weights are written to a folder that the servers can read. vLLM loads a model of another shape
without an error. So a load counts only if the server's log-probs of a fixed prompt, the probe, are
those of our own weights. The server stores a new version for each load, and an answer counts only
if the version is still the same after it. A server that was restarted with other weights has
another version, so its first answer does not count, and it loads the weights again. Any other
difference of the distributions shows in each step's mismatch_kl (--max_mismatch_kl).

A request that fails (lost connection, timeout, HTTP 408, 429 or 5xx, an answer that is not valid)
is sent again, to the next server. When its time is over, `Lost` ends its trajectory alone.

Departures from `Sampler`: draws are those of vLLM; with top_p below 1 the log-probs are those of
the nucleus; the composition of batches depends on when requests arrive.

docs/engines.md tells how to start servers, also on a CPU. Tests, with a small server of their own:
pytest tests/test_vllm.py
"""

import concurrent.futures
import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from atomic import reason
from config import UserError, key_of
from processes import from_first_rank, is_first
from sampler.request import Completion, Conversation, Lost, Request

PAUSE = 0.5  # seconds before a failed exchange is tried again
MIN_LOGPROB, MAX_LOGPROB = -1e6, 1e-3  # bf16 may round a log-prob to slightly more than 0


class Refused(Exception):
    """The server has refused a request, and trying again would not help."""


@dataclass(eq=False)
class Server:
    """`vllm serve` with VLLM_SERVER_DEV_MODE=1 (tested: 0.32). Its methods may raise anything."""

    url: str
    client: Any  # an httpx2.Client
    model: str = ""  # its name for its model
    positions: int = 0  # the most tokens of a context with its answer
    version: str = ""  # the last version of its weights that it reported; empty: unknown
    loading: threading.Lock = field(default_factory=threading.Lock)

    def send(self, path: str, body: dict | None = None):
        """The httpx2.Response to a POST of `body`, or to a GET. Raises unless it is a success."""
        method = "GET" if body is None else "POST"
        answer = self.client.request(method, self.url + path, json=body)
        if answer.status_code == 401:
            advice = "set MARS_SERVER_KEY to the key of its --api-key"
            raise UserError(f"--server {self.url} answers HTTP 401: {advice}")
        if not answer.is_success:
            final = answer.is_client_error and answer.status_code not in (408, 429)
            kind = Refused if final else ConnectionError
            raise kind(f"HTTP {answer.status_code} {answer.text:.200}")
        return answer

    def weight_version(self) -> str:
        """The version of the weights that it has now."""
        return str(self.send("/weight_info").json()["weight_version"])

    def load(self, folder: str, check: Callable[["Server"], None]) -> None:
        """Loads the weights in a folder. They have a version only if `check` raises nothing."""
        self.send("/pause?mode=wait", {})
        reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        results = self.send("/collective_rpc", reload).json()["results"]
        if not isinstance(results, list):
            raise ValueError(f"its answer to a reload is {results!r:.200}")
        self.send("/reset_prefix_cache", {})
        self.send("/resume", {})
        check(self)
        # The version comes last, so that an interrupted load does not count. Each load has a new
        # version, so that an answer that was sampled before and after a load does not count either.
        version = f"{folder}@{time.time_ns()}"
        self.send("/update_weight_version", {"new_version": version})
        self.version = version

    def complete(self, prompt: list[int], **options) -> dict:
        """The server's continuation of a prompt, as the first of vLLM's `choices`."""
        defaults = {  # The model's generation_config would decide an option that is not given.
            "model": self.model,
            "prompt": prompt,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": True,  # Only stop_token_ids end an answer.
            "return_token_ids": True,
            "logprobs": 0,  # of the sampled token alone
        }
        choice = self.send("/v1/completions", defaults | options).json()["choices"][0]
        if choice["prompt_token_ids"] != prompt:
            raise ValueError("the answer is one to another request")
        return choice

    def score(self, tokens: list[int]) -> list[float]:
        """The log-probs of tokens[1:], each given all tokens before it."""
        choice = self.complete(tokens, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        pairs = zip(choice["prompt_logprobs"][1:], tokens[1:], strict=True)
        return [entry[str(token)]["logprob"] for entry, token in pairs]  # {"17": {"logprob": -1.5}}


def connect(urls: list[str], seconds: float) -> list[Server]:
    """The servers at these URLs. UserError for a URL without a vLLM server.

    seconds: the time limit of one exchange. Exchanges use the environment's proxies, and its
    MARS_SERVER_KEY as the API key, or else VLLM_API_KEY, which vLLM itself reads.
    """
    import httpx2  # A run without servers does not need it.

    if not urls:
        raise UserError("--server names no URL: give http://host:port, or several comma-separated")
    keys = [name for name in ("MARS_SERVER_KEY", "VLLM_API_KEY") if os.environ.get(name)]
    headers = {"Authorization": f"Bearer {key_of(keys[0])}"} if keys else {}
    # Remote.parallel limits the number of connections.
    client = httpx2.Client(headers=headers, timeout=seconds, limits=httpx2.Limits())
    servers = []
    for url in dict.fromkeys(one.strip().rstrip("/").removesuffix("/v1") for one in urls):
        try:
            server = Server(url, client)
            card = server.send("/v1/models").json()["data"][0]
            server.model, server.positions = card["id"], int(card["max_model_len"])
        except UserError:
            raise
        except Exception as error:  # Any program at that URL may give any answer.
            raise UserError(f"--server {url} is no vLLM server: {reason(error)}") from None
        servers.append(server)
    return servers


@dataclass(eq=False)
class Remote:
    """Samples on servers, with the methods of `Sampler` that the driver calls."""

    servers: list[Server]
    vocabulary: int  # the number of token ids
    seconds: float  # after which a request, or loading new weights, is not tried again
    parallel: int  # the most requests that are sent at once
    # `write` writes the model's weights and returns their folder, which all servers can read;
    # `score` returns the log-probs of tokens[1:] under these weights. Every rank calls both.
    write: Callable
    score: Callable[[list[int]], list[float]]
    tolerance: float  # the largest mean difference, in nats, of the probe's log-probs

    folder: str = ""  # the current weights
    expected: list[float] = field(default_factory=list)  # their log-probs of the probe
    requests: set[Request] = field(default_factory=set)  # all open requests
    answers: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)

    pages_in_use = 0  # The servers have the pages.

    def __post_init__(self):
        self.label = f"vLLM at {', '.join(server.url for server in self.servers)}"
        self.positions = min(server.positions for server in self.servers)
        length = min(32, self.positions - 1)
        self.probe = [37 * i % min(self.vocabulary, 1000) for i in range(1, length + 1)]
        self.semaphore = threading.Semaphore(self.parallel)

    # ---- the methods of Sampler

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    def open(self) -> Conversation:
        return Conversation()

    def close(self, conversation: Conversation) -> None:
        """Ends a conversation. Its open request, if any, ends with an error."""
        if request := conversation.request:
            request.error = "the conversation was closed"
            self.requests.discard(request)
            conversation.request = None

    def submit(self, conversation: Conversation, tokens: list[int], **options) -> Request:
        """Appends `tokens` to the conversation and asks for an answer, as Sampler.submit does."""
        request = Request(conversation, list(tokens), **options)
        context = conversation.tokens + request.given
        # Unlike our own sampler's pool, a server's limit counts the last token too.
        if len(context) + request.max_new_tokens > self.positions:
            raise ValueError(
                f"{len(context)} tokens and {request.max_new_tokens} new ones exceed the servers' "
                f"limit of {self.positions} (vLLM: --max-model-len)"
            )
        conversation.tokens = context
        conversation.request = request
        self.requests.add(request)
        threading.Thread(target=self._work, args=(request, list(context)), daemon=True).start()
        return request

    def step(self) -> list[Request]:
        """The requests that have been answered. If there is none, it waits 10 ms for one."""
        done = []
        with contextlib.suppress(queue.Empty):
            while True:
                request, outcome = self.answers.get(timeout=0 if done else 0.01)
                if request not in self.requests:  # Its conversation was closed.
                    continue
                if isinstance(outcome, Completion):
                    request.completion = outcome
                    request.conversation.tokens += outcome.tokens
                elif isinstance(outcome, Lost):
                    request.error = str(outcome)
                else:
                    raise outcome
                request.conversation.request = None
                self.requests.remove(request)
                done.append(request)
        return done

    # ---- new weights

    def lend_pool(self) -> None:
        """Nothing: the pages are in the servers' memory."""

    def load_weights(self, model) -> None:
        """Writes the weights to disk, and returns when the servers have loaded them."""
        self.load_folder(self.write(model))

    def load_folder(self, folder: str) -> None:
        """Makes the servers load a folder. A server that does not answer loads it later.

        UserError, on all ranks, if a server refuses the folder, has other weights after the load,
        or if no server has loaded it in time.
        """
        self.folder = folder
        self.expected = self.score(self.probe)
        problem = from_first_rank(self._load_all() if is_first() else None)
        if problem:
            raise UserError(problem)

    def _load_all(self) -> str | None:
        """Makes every server load the weights. Returns the problem, or None if at least one did."""
        end = time.monotonic() + self.seconds
        while True:
            with concurrent.futures.ThreadPoolExecutor(len(self.servers)) as threads:
                loads = [threads.submit(self._update, server, True) for server in self.servers]
            pairs = zip(self.servers, loads)
            errors = {server.url: load.exception() for server, load in pairs if load.exception()}
            final = any(isinstance(error, (UserError, Refused)) for error in errors.values())
            if not final and len(errors) < len(loads):
                return None
            if final or time.monotonic() > end:
                reasons = "; ".join(f"{url}: {reason(error)}" for url, error in errors.items())
                return (
                    f"the weights in {self.folder} were not loaded ({reasons}): repair the servers "
                    "(docs/engines.md tells how to start them), then --resume"
                )
            time.sleep(PAUSE)

    def _update(self, server: Server, always: bool = False) -> str:
        """Loads the current weights if the server has others or `always`. Returns their version."""
        with server.loading:
            if not always and not server.version.startswith(f"{self.folder}@"):
                server.version = server.weight_version()
            if always or not server.version.startswith(f"{self.folder}@"):
                server.load(self.folder, self._check)
            return server.version

    def _check(self, server: Server) -> None:
        """UserError unless the server's log-probs of the probe are those of our own weights."""
        pairs = zip(server.score(self.probe), self.expected, strict=True)
        mean = sum(abs(theirs - ours) for theirs, ours in pairs) / len(self.expected)
        if not mean <= self.tolerance:
            raise UserError(
                f"{server.url} answers that it has loaded {self.folder}, but its log-probs of a "
                f"fixed prompt differ by {mean:.2g} nats in the mean from those of the run's "
                f"weights, more than {self.tolerance:g}: it has another model than the run, a "
                "coarser dtype, or still its former weights"
            )

    # ---- in threads

    def _work(self, request: Request, context: list[int]) -> None:
        """Answers one request, in a thread of its own."""
        with self.semaphore:
            try:
                outcome = self._sample(request, context)
            except Exception as error:
                outcome = error
        self.answers.put((request, outcome))

    def _sample(self, request: Request, context: list[int]) -> Completion:
        """The answer to one request, from the first server that gives one. Lost if none does."""
        end = time.monotonic() + self.seconds
        for attempt in itertools.count():
            # A conversation uses the same server each time, for its prefix cache.
            server = self.servers[(request.conversation.born + attempt) % len(self.servers)]
            try:
                return self._ask(server, request, context)
            except UserError:
                raise
            except Exception as error:  # An answer that is not valid may raise anything.
                problem = f"{server.url}: {reason(error)}"
                if isinstance(error, Refused):
                    raise Lost(problem) from None
            server.version = ""  # It may have been restarted.
            if request.done or (attempt and time.monotonic() > end):
                raise Lost(f"no answer within {self.seconds:g} seconds ({problem})")
            time.sleep(PAUSE)

    def _ask(self, server: Server, request: Request, context: list[int]) -> Completion:
        """The answer of one server. ValueError unless it had the current weights all the time."""
        version = self._update(server)
        choice = server.complete(
            context,
            max_tokens=request.max_new_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            stop_token_ids=sorted(request.stop_ids),
        )
        if server.weight_version() != version:
            raise ValueError("it sampled with other weights than the run's")
        return read_answer(choice, request, self.vocabulary, server.url)


def read_answer(choice: dict, request: Request, vocabulary: int, url: str) -> Completion:
    """A server's answer as a completion. ValueError unless it is complete and fits the request."""
    tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    for token, logprob in zip(tokens, logprobs, strict=True):
        is_token = type(token) is int and 0 <= token < vocabulary
        if not is_token or not MIN_LOGPROB < logprob <= MAX_LOGPROB:
            raise ValueError(f"it sent token {token!r} with log-prob {logprob!r}")
    stops = [i for i, token in enumerate(tokens) if token in request.stop_ids]
    if stops == [len(tokens) - 1]:
        return Completion(tokens, logprobs, "stop", url)
    if not stops and len(tokens) == request.max_new_tokens:
        return Completion(tokens, logprobs, "length", url)
    raise ValueError(f"{len(tokens)} tokens end neither at a stop token nor at the limit")
