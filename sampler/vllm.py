"""Rollouts on vLLM servers, behind the face that `Sampler` shows the driver.

A conversation lives here as token ids. Each request sends all of them and gets ids and log-probs
back, never text, so a server holds nothing that could be lost: its prefix cache only spares work.

New weights go by way of a folder that the servers can read. vLLM takes a model of another shape
without a word. So a load counts only when the server's log-probs of a fixed prompt, the probe, are
those of our own weights. A server is told a version of its own for each load, and an answer counts
only if it holds that version afterwards: one that was started anew, with the weights of its start,
is noticed at its first answer and loads again. All else that can be wrong with a distribution is
found in each step's batch (--max_mismatch_kl).

Whatever goes wrong (a server that is lost or slow, 429, 5xx, an answer that does not hold what was
asked for) is asked again, of the next server. Then `Lost` ends this trajectory and no other.

Departures from `Sampler`: draws are the engine's own; with top_p below 1 the log-probs are those of
the nucleus; how requests share batches depends on when they arrive.

How servers are started, on a CPU too: docs/engines.md. Tests, with a stand-in: pytest
tests/test_vllm.py
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

PAUSE = 0.5  # seconds before what has failed is asked again
LEAST, SLACK = -1e6, 1e-3  # a log-prob lies between them: bf16 rounds, also to above 0


class Refused(Exception):
    """The server has understood what was asked, and refused it for good."""


@dataclass(eq=False)
class Server:
    """`vllm serve` with VLLM_SERVER_DEV_MODE=1 (run here: 0.32). Its methods may raise anything."""

    url: str
    client: Any  # an httpx2.Client
    model: str = ""  # what it calls its model
    positions: int = 0  # tokens of its longest context, the answer included
    version: str = ""  # of the weights that it held when it was last asked; empty: ask
    loading: threading.Lock = field(default_factory=threading.Lock)

    def send(self, path: str, body: dict | None = None):
        """Its httpx2.Response to a POST of `body`, or to a GET; an error unless it is a success."""
        method = "GET" if body is None else "POST"
        answer = self.client.request(method, self.url + path, json=body)
        if answer.status_code == 401:
            wanted = "it wants the key of its --api-key in MARS_SERVER_KEY"
            raise UserError(f"--server {self.url} answers HTTP 401: {wanted}")
        if not answer.is_success:
            final = answer.is_client_error and answer.status_code not in (408, 429)
            kind = Refused if final else ConnectionError
            raise kind(f"HTTP {answer.status_code} {answer.text:.200}")
        return answer

    def held(self) -> str:
        """The version of the weights that it holds now."""
        return str(self.send("/weight_info").json()["weight_version"])

    def load(self, folder: str) -> None:
        """Loads the weights in a folder."""
        self.send("/pause?mode=wait", {})
        reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        results = self.send("/collective_rpc", reload).json()["results"]
        if not isinstance(results, list):
            raise ValueError(f"it answers a reload with {results!r:.200}")
        self.send("/reset_prefix_cache", {})
        self.send("/resume", {})
        # Last, so that a load which was cut short is not taken for whole. Each load has a version
        # of its own, so what was sampled before it is told from what was sampled after it.
        version = f"{folder}@{time.time_ns()}"
        self.send("/update_weight_version", {"new_version": version})
        self.version = version

    def complete(self, prompt: list[int], **options) -> dict:
        """What follows a prompt. The model's generation_config fills all that a request omits."""
        fixed = {
            "model": self.model,
            "prompt": prompt,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": True,  # only stop_token_ids end an answer
            "return_token_ids": True,
            "logprobs": 0,  # the sampled token's alone
        }
        choice = self.send("/v1/completions", fixed | options).json()["choices"][0]
        if choice["prompt_token_ids"] != prompt:
            raise ValueError("the answer is one to another request")
        return choice

    def score(self, tokens: list[int]) -> list[float]:
        """Log-probs of tokens[1:], each given those before it."""
        choice = self.complete(tokens, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        told = choice["prompt_logprobs"]  # [None, {"17": {"logprob": -1.5, …}}, …]
        return [at[str(token)]["logprob"] for at, token in zip(told[1:], tokens[1:], strict=True)]


def connect(urls: list[str], seconds: float) -> list[Server]:
    """The servers at these URLs. UserError for what is none. seconds: the limit of one exchange.

    Exchanges obey the environment's proxies, and carry its MARS_SERVER_KEY, or else VLLM_API_KEY,
    from which vLLM itself takes its key.
    """
    import httpx2  # here, so that a run without servers does not need it

    if not urls:
        raise UserError("--server names no URL: give http://host:port, or several comma-separated")
    keys = [name for name in ("MARS_SERVER_KEY", "VLLM_API_KEY") if os.environ.get(name)]
    headers = {"Authorization": f"Bearer {key_of(keys[0])}"} if keys else {}
    # No limit of connections: see Remote.parallel.
    client = httpx2.Client(headers=headers, timeout=seconds, limits=httpx2.Limits())
    servers = []
    for url in dict.fromkeys(one.strip().rstrip("/").removesuffix("/v1") for one in urls):
        try:
            server = Server(url, client)
            card = server.send("/v1/models").json()["data"][0]
            server.model, server.positions = card["id"], int(card["max_model_len"])
        except UserError:
            raise
        except Exception as error:  # whatever listens there may answer anything
            raise UserError(f"--server {url} is no vLLM server: {reason(error)}") from None
        servers.append(server)
    return servers


@dataclass(eq=False)
class Remote:
    """Samples on servers, with the face that `Sampler` shows the driver."""

    servers: list[Server]
    vocabulary: int  # token ids are below it
    seconds: float  # a request, or a round of new weights, is tried again for so long
    parallel: int  # requests under way at once, at most
    # The path of a folder with the model's weights that all servers can read. Every rank calls it.
    write: Callable
    # Log-probs of tokens[1:] under the weights that are loaded next. Every rank calls it.
    score: Callable[[list[int]], list[float]]
    tolerance: float  # nats between the two sides' log-probs of the probe, in the mean, at most

    folder: str = ""  # the weights that are to be sampled with
    expected: list[float] = field(default_factory=list)  # their log-probs of the probe
    requests: set[Request] = field(default_factory=set)  # open ones
    answers: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)

    failure = Lost  # what a request that has failed raises
    pages_in_use = 0  # the pages are the servers'

    def __post_init__(self):
        self.path = f"vLLM at {', '.join(server.url for server in self.servers)}"
        self.positions = min(server.positions for server in self.servers)
        length = min(32, self.positions - 1)
        self.probe = [37 * i % min(self.vocabulary, 1000) for i in range(1, length + 1)]
        self.turns = threading.Semaphore(self.parallel)

    # ---- what callers use: Sampler's

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    def open(self) -> Conversation:
        return Conversation()

    def close(self, conversation: Conversation) -> None:
        """Ends a conversation; its open request, if any, ends with an error."""
        if request := conversation.request:
            request.error = "the conversation was closed"
            self.requests.discard(request)
            conversation.request = None

    def submit(self, conversation: Conversation, tokens: list[int], **options) -> Request:
        """Appends `tokens` to the conversation and asks for an answer; see Sampler.submit."""
        request = Request(conversation, list(tokens), **options)
        context = conversation.tokens + request.given
        # Unlike our own sampler's pool, a server's limit counts the last token too.
        if len(context) + request.max_new_tokens > self.positions:
            raise ValueError(
                f"{len(context)} tokens and {request.max_new_tokens} new ones pass the servers' "
                f"limit of {self.positions} (vLLM: --max-model-len)"
            )
        conversation.tokens = context
        conversation.request = request
        self.requests.add(request)
        threading.Thread(target=self._work, args=(request, list(context)), daemon=True).start()
        return request

    def step(self) -> list[Request]:
        """The requests that have been answered; waits a moment for one if there is none."""
        done = []
        with contextlib.suppress(queue.Empty):
            while True:
                request, outcome = self.answers.get(timeout=0 if done else 0.01)
                if request not in self.requests:  # its conversation was closed
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

    def load_weights(self, model) -> None:
        """Writes the weights to disk, and returns when the servers hold them."""
        self.load_folder(self.write(model))

    def load_folder(self, folder: str) -> None:
        """Has the servers load a folder. One that is away loads it when it is back.

        UserError, on all ranks, if a server refuses it, or holds something else afterwards, or if
        none has loaded it in time.
        """
        self.folder = folder
        self.expected = self.score(self.probe)
        problem = from_first_rank(self._load_all() if is_first() else None)
        if problem:
            raise UserError(problem)

    def _load_all(self) -> str | None:
        """Has every server load the weights. None if enough did to go on, else what is wrong."""
        end = time.monotonic() + self.seconds
        while True:
            with concurrent.futures.ThreadPoolExecutor(len(self.servers)) as threads:
                loads = [threads.submit(self._bring, server, True) for server in self.servers]
            failed = [(server, load.exception()) for server, load in zip(self.servers, loads)]
            failed = [(server, error) for server, error in failed if error]
            for _, error in failed:
                if isinstance(error, UserError):
                    return str(error)
            refused = any(isinstance(error, Refused) for _, error in failed)
            if not refused and len(failed) < len(loads):
                return None
            if refused or time.monotonic() > end:
                break
            time.sleep(PAUSE)
        listed = "; ".join(f"{server.url}: {reason(error)}" for server, error in failed)
        return (
            f"the weights in {self.folder} were not loaded ({listed}): see to the servers "
            "(docs/engines.md says how they are started), then --resume"
        )

    def _bring(self, server: Server, anew: bool = False) -> str:
        """The version of the current weights that a server holds; loads them if it has others."""
        with server.loading:
            if not anew and not server.version.startswith(f"{self.folder}@"):
                server.version = server.held()
            if anew or not server.version.startswith(f"{self.folder}@"):
                server.load(self.folder)
                self._check(server)
            return server.version

    def _check(self, server: Server) -> None:
        """UserError unless a server that has loaded gives the probe our own weights' log-probs."""
        pairs = zip(server.score(self.probe), self.expected, strict=True)
        mean = sum(abs(theirs - ours) for theirs, ours in pairs) / len(self.expected)
        if not mean <= self.tolerance:
            raise UserError(
                f"{server.url} says that it has loaded {self.folder}, and its log-probs of a fixed "
                f"prompt are {mean:.2g} nats from our own weights' in the mean, more than "
                f"{self.tolerance:g}: it has another model than the run, a coarser dtype, or kept "
                "its former weights"
            )

    # ---- in threads

    def _work(self, request: Request, context: list[int]) -> None:
        """One request, in a thread of its own."""
        with self.turns:
            try:
                outcome = self._sample(request, context)
            except Exception as error:
                outcome = error
        self.answers.put((request, outcome))

    def _sample(self, request: Request, context: list[int]) -> Completion:
        """The answer to one request, from whichever server gives it; else Lost."""
        end = time.monotonic() + self.seconds
        for attempt in itertools.count():
            # A conversation stays with one server, whose prefix cache holds it.
            server = self.servers[(request.conversation.age + attempt) % len(self.servers)]
            try:
                return self._ask(server, request, context)
            except UserError:
                raise
            except Exception as error:  # whatever a server sends reaches the parsers
                why = f"{server.url}: {reason(error)}"
                if isinstance(error, Refused):
                    raise Lost(why) from None
            server.version = ""  # it may have been started anew
            if request.done or attempt and time.monotonic() > end:
                raise Lost(f"no answer within {self.seconds:g} seconds ({why})")
            time.sleep(PAUSE)

    def _ask(self, server: Server, request: Request, context: list[int]) -> Completion:
        """One try, which counts only if the server held the same current weights throughout."""
        version = self._bring(server)
        choice = server.complete(
            context,
            max_tokens=request.max_new_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            stop_token_ids=sorted(request.stop_ids),
        )
        if server.held() != version:
            raise ValueError("it sampled with other weights than the run's")
        return read_answer(choice, request, self.vocabulary, server.url)


def read_answer(choice: dict, request: Request, vocabulary: int, url: str) -> Completion:
    """A server's answer as a completion; ValueError unless it is whole and what was asked for."""
    tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    for token, logprob in zip(tokens, logprobs, strict=True):
        if type(token) is not int or not 0 <= token < vocabulary or not LEAST < logprob <= SLACK:
            raise ValueError(f"a token {token!r} of log-prob {logprob!r}")
    stops = [i for i, token in enumerate(tokens) if token in request.stop_ids]
    if tokens and stops == [len(tokens) - 1]:
        return Completion(tokens, logprobs, "stop", url)
    if not stops and len(tokens) == request.max_new_tokens:
        return Completion(tokens, logprobs, "length", url)
    raise ValueError(f"{len(tokens)} tokens, which end at no stop token of ours nor at the limit")
