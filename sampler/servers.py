"""Serving engines: what is asked of a vLLM and of an SGLang server, and how they take new weights.

Token ids go out, ids and log-probs come back, never text. New weights lie in a folder that the
server can read: a model, or LoRA adapters beside the model that it was started with. A server takes
a version of ours last, when all else is done, so a load that was cut short is noticed.

Tests: pytest tests/test_remote.py, with a stand-in that speaks both protocols.
"""

import contextlib
import json
import threading
import time
import uuid
from dataclasses import dataclass, field

from config import UserError
from sampler.request import Completion, Request
from tools import one_line
from tools.web import Refused, check_base_url, seconds_left, service

LEAST = -1e6  # a log-prob lies above it
SLACK = 1e-3  # and may lie so far above 0: bf16 rounds


@dataclass(eq=False)
class Server:
    """One server. A subclass speaks an engine's protocol.

    adapters: new weights are LoRA adapters, each of which has its version as its name.
    """

    url: str
    adapters: bool = False
    model: str = ""  # what it calls its model
    positions: int = 0  # tokens of its longest context
    version: str = ""  # of the weights that it held when it was last asked
    ours: bool = False  # it has held weights of this run
    conversations: int = 0  # that have it as their home
    running: int = 0  # requests under way
    failures: int = 0  # in a row
    rests_until: float = 0.0  # by time.monotonic
    loading: threading.Lock = field(default_factory=threading.Lock)

    def get(self, path: str, deadline: float) -> dict:
        return json_object(self.send(path, None, deadline))

    def post(self, path: str, body: dict, deadline: float) -> dict:
        return json_object(self.send(path, body, deadline))

    def send(self, path: str, body: dict | None, deadline: float) -> bytes:
        """What the server answers; to a command, that may be nothing or a few words."""
        raw, _ = service(self.url + path, body, {}, seconds_left(deadline))
        return raw

    def change_adapter(self, paths: str, folder: str, version: str, deadline: float) -> None:
        """Loads the adapters in `folder` by the name `version`, and drops the former ones."""
        new = {"lora_name": version, "lora_path": folder}
        self.send(f"{paths}/load_lora_adapter", new, deadline)
        with contextlib.suppress(Refused):  # a server that was just started has none
            self.send(f"{paths}/unload_lora_adapter", {"lora_name": self.version}, deadline)

    def meet(self, deadline: float) -> None:
        """Asks for the model's name and its longest context."""
        card = self.get("/v1/models", deadline)["data"][0]
        self.model = card["id"]
        self.positions = int(card["max_model_len"])

    def ask(self, context: list[int], request: Request, deadline: float) -> tuple:
        """(tokens, log-probs, the version of the weights that drew them)."""
        raise NotImplementedError

    def load(self, folder: str, version: str, deadline: float) -> None:
        """Loads the weights in `folder`; the version is set when all else is done."""
        raise NotImplementedError

    def held(self, deadline: float) -> str:
        """The version of the weights that it holds now."""
        raise NotImplementedError


class VLLM(Server):
    """`vllm serve` with VLLM_SERVER_DEV_MODE=1 (read and run: 0.32)."""

    def ask(self, context, request, deadline):
        # All that a request omits is filled from the model's generation_config.
        body = {
            "model": self.version if self.adapters else self.model,
            "prompt": context,
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": request.seed,
            "stop_token_ids": sorted(request.stop_ids),
            "ignore_eos": True,  # only stop_token_ids end an answer
            "return_token_ids": True,
            "logprobs": 0,  # the sampled token's alone
        }
        choice = self.post("/v1/completions", body, deadline)["choices"][0]
        check_reply(choice["prompt_token_ids"], context)
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], self.held(deadline)

    def load(self, folder, version, deadline):
        self.send("/pause?mode=wait", {}, deadline)
        self.change_weights(folder, version, deadline)
        self.send("/reset_prefix_cache", {}, deadline)
        self.send("/resume", {}, deadline)
        # Last, so that a load which was cut short, also before it resumed, is not taken for whole.
        self.send("/update_weight_version", {"new_version": version}, deadline)

    def change_weights(self, folder: str, version: str, deadline: float) -> None:
        if self.adapters:
            self.change_adapter("/v1", folder, version, deadline)
            return
        reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self.send("/collective_rpc", reload, deadline)

    def held(self, deadline):
        return self.get("/weight_info", deadline)["weight_version"]


class SGLang(Server):
    """`sglang.launch_server` (read: 0.5; not run here). It pauses by itself while it loads."""

    def ask(self, context, request, deadline):
        # No ignore_eos: with it, stop_token_ids would be ignored as well.
        parameters = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "sampling_seed": request.seed,
            "stop_token_ids": sorted(request.stop_ids),
        }
        name = uuid.uuid4().hex
        body = {
            "rid": name,
            "input_ids": context,
            "sampling_params": parameters,
            "return_logprob": True,
        }
        if self.adapters:
            body["lora_path"] = self.version
        about = self.post("/generate", body, deadline)["meta_info"]
        check_reply(about["id"], name)
        drawn = about["output_token_logprobs"]  # [[log-prob, token, text], …]
        return [one[1] for one in drawn], [one[0] for one in drawn], about["weight_version"]

    def load(self, folder, version, deadline):
        if self.adapters:
            self.change_adapter("", folder, version, deadline)
            self.send("/flush_cache", {}, deadline)
            self.send("/update_weight_version", {"new_version": version}, deadline)
            return
        body = {"model_path": folder, "weight_version": version, "flush_cache": True}
        self.send("/update_weights_from_disk", body, deadline)

    def held(self, deadline):
        return self.get("/model_info", deadline)["weight_version"]


def connect(
    urls: list[str], engine: type[Server], seconds: float, *, adapters: bool = False
) -> list[Server]:
    """The servers at these URLs; of a router, those behind it. UserError for one that is away."""
    if not urls:
        raise UserError("--server names no URL: give http://host:port, or several by commas")
    deadline = time.monotonic() + seconds
    servers = {}  # by URL, each once
    for url in urls:
        url = check_base_url("--server", url).removesuffix("/v1")
        try:
            found = [engine(worker, adapters) for worker in workers(url, deadline)]
            for server in found:
                server.meet(deadline)
            servers |= {server.url: server for server in found}
        except Exception as error:  # whatever listens there may answer anything
            raise UserError(
                f"--server {url} is no {engine.__name__} server: {reason(error)}"
            ) from None
    return list(servers.values())


def workers(url: str, deadline: float) -> list[str]:
    """The URLs of a router's servers, or the URL itself. New weights must reach each of them."""
    try:
        listed = Server(url).get("/workers", deadline)["workers"]
    except Refused:
        return [url]
    return [worker["url"].rstrip("/") for worker in listed]


def json_object(raw: bytes) -> dict:
    answer = json.loads(raw)
    if not isinstance(answer, dict):
        raise ValueError("the answer is no JSON object")
    return answer


def check_reply(said, asked) -> None:
    if said != asked:
        raise ValueError("the answer is one to another request")


def checked(tokens: list, logprobs: list, request: Request, vocabulary: int) -> Completion:
    """A server's answer as a completion; ValueError unless it is whole and what was asked for."""
    if len(tokens) != len(logprobs):
        raise ValueError(f"{len(logprobs)} log-probs for {len(tokens)} tokens")
    for token, logprob in zip(tokens, logprobs):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ValueError(f"the token {token!r} is outside the vocabulary of {vocabulary}")
        if not isinstance(logprob, (int, float)) or not LEAST < logprob <= SLACK:
            raise ValueError(f"{logprob!r} is no log-prob")
    stops = [place for place, token in enumerate(tokens) if token in request.stop_ids]
    if tokens and stops == [len(tokens) - 1]:
        return Completion(tokens, logprobs, "stop")
    if not stops and len(tokens) == request.max_new_tokens:
        return Completion(tokens, logprobs, "length")
    raise ValueError(
        f"{len(tokens)} tokens that end neither at a stop token of ours nor at the limit of "
        f"{request.max_new_tokens}"
    )


def reason(error: Exception) -> str:
    """Why an exchange failed, on one short line."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, Refused):
        said = error.body.decode("utf-8", "replace")
        return one_line(f"HTTP {error.status} {said}", 200)
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return one_line(f"{error} ({type(error).__name__})", 200)


def final(error: Exception) -> bool:
    """Whether trying again would not help: the server has understood and refused."""
    if isinstance(error, UserError):
        return True
    return isinstance(error, Refused) and error.status in (400, 401, 403, 404, 413, 422)
