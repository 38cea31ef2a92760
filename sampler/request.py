"""Requests to the sampler and their completions. Tests: pytest tests/test_sampler.py -k refused"""

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field

# Far outside this range, fp32 logits divided by the temperature overflow or lose their differences.
MIN_TEMPERATURE = 1e-3
MAX_TEMPERATURE = 1e4
MIN_TOP_P = 1e-6  # A much smaller number would be 0 in fp32 and exclude every token.


class Lost(Exception):
    """A request has no completion; the message says why."""


@dataclass
class Completion:
    """The sampled tokens (with the stop token) and the log-prob of each.

    Log-probs are those of the full vocabulary at the temperature (a server's: of the nucleus, if
    top_p is below 1). finish: 'stop' or 'length'.
    server: the URL of the server that sampled the tokens, empty for this process.
    """

    tokens: list[int]
    logprobs: list[float]
    finish: str
    server: str = ""


@dataclass(eq=False)
class Conversation:
    """A context that grows: its token ids in order, and the pages of their keys and values.

    born: a smaller number is older. prompt: the tokens of the first request; conversations whose
    prompts have a common beginning share pages. request: the open request.
    """

    born: int = field(default_factory=itertools.count().__next__)
    tokens: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt: tuple[int, ...] = ()
    request: "Request | None" = None
    closed: bool = False

    @property
    def idle(self) -> bool:
        """Whether it has no row: it has no open request, or the request is waiting."""
        return self.request is None or self.request.row is None


@dataclass(eq=False)
class Request:
    """A request for one completion. When step() returns it, `completion` or `error` is set.

    given: the tokens that it appends to its conversation. number: its number in the order of
    submission. row: the index of its row in `plan.Rows` while it runs.
    """

    conversation: Conversation
    given: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: Collection[int] = ()
    seed: int = 0
    number: int = -1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    row: int | None = None
    completion: Completion | None = None
    error: str | None = None

    @property
    def done(self) -> bool:
        return self.completion is not None or self.error is not None

    @property
    def finish(self) -> str:
        """'stop' if the last token is a stop token, 'length' at the limit, otherwise ''."""
        if self.tokens and self.tokens[-1] in self.stop_ids:
            return "stop"
        if len(self.tokens) == self.max_new_tokens:
            return "length"
        return ""


def check(request: Request, vocabulary: int, pool: int) -> None:
    """ValueError for a request that cannot be served.

    vocabulary: the number of token ids. pool: the number of tokens that a conversation may have.
    """
    conversation = request.conversation
    if conversation.closed or conversation.request:
        raise ValueError("the conversation is closed, or has an open request")
    if not request.given or not 0 <= min(request.given) <= max(request.given) < vocabulary:
        raise ValueError(f"tokens must be at least one id, each from 0 to {vocabulary - 1}")
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {request.max_new_tokens} and must be at least 1")
    temperature = request.temperature
    if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        limits = f"0 (greedy) or between {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}"
        raise ValueError(f"temperature is {temperature} and must be {limits}")
    if not MIN_TOP_P <= request.top_p <= 1:
        raise ValueError(f"top_p is {request.top_p} and must be between {MIN_TOP_P:g} and 1")
    context = len(conversation.tokens) + len(request.given)
    if context + request.max_new_tokens - 1 > pool:  # The last token needs no slot.
        raise ValueError(
            f"{context} tokens and {request.max_new_tokens} new ones can never fit the KV pool of "
            f"{pool} tokens; raise max_tokens or ask for less"
        )
