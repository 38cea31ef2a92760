"""What the sampler is asked, and what it answers. Test: pytest tests/test_sampler.py -k refused"""

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field

# Beyond these, fp32 logits divided by the temperature overflow or lose their differences.
COLDEST = 1e-4
HOTTEST = 1e4
SMALLEST_TOP_P = 1e-6  # in fp32 a very small one is 0 and would allow no token at all


class Lost(Exception):
    """No server answered a request; the message says why."""


@dataclass
class Completion:
    """What was sampled: tokens (a stop token included) and the log-prob of each.

    Log-probs are those of the full vocabulary at the temperature. finish: 'stop' or 'length'.
    server: the URL of the server that sampled it, if it was not this process.
    """

    tokens: list[int]
    logprobs: list[float]
    finish: str
    server: str = ""


@dataclass(eq=False)
class Conversation:
    """A context that grows: given and sampled ids in order, and the pages of their keys and values.

    age: smaller is older. prompt: the tokens submitted first; conversations whose prompts begin
    alike share pages. request: the open one.
    """

    age: int = field(default_factory=itertools.count().__next__)
    tokens: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt: tuple[int, ...] = ()
    request: "Request | None" = None
    closed: bool = False

    @property
    def idle(self) -> bool:
        """It has no row: nothing was asked of it, or its request waits."""
        return self.request is None or self.request.row is None


@dataclass(eq=False)
class Request:
    """One answer to be sampled. When step() returns it, `completion` or `error` is set.

    given: the tokens that it appends to its conversation. number: counts submissions, so the
    smallest is the oldest. row: its place among the running sequences, while it runs.
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
        """Why its last token is its last: 'stop', 'length', or '' if more are to come."""
        if self.tokens and self.tokens[-1] in self.stop_ids:
            return "stop"
        if len(self.tokens) == self.max_new_tokens:
            return "length"
        return ""


def check(request: Request, vocabulary: int, pool: int) -> None:
    """ValueError for what cannot be done.

    vocabulary: tokens that the model knows. pool: tokens that a conversation may have.
    """
    conversation = request.conversation
    if conversation.closed or conversation.request:
        raise ValueError("the conversation is closed, or has an open request")
    if not request.given or not 0 <= min(request.given) <= max(request.given) < vocabulary:
        raise ValueError(f"tokens must be at least one id, each from 0 to {vocabulary - 1}")
    outside = request.temperature != 0 and not COLDEST <= request.temperature <= HOTTEST
    if outside or request.max_new_tokens < 1 or not SMALLEST_TOP_P <= request.top_p <= 1:
        raise ValueError(
            f"max_new_tokens {request.max_new_tokens}, temperature {request.temperature} and top_p "
            f"{request.top_p}: the first must be at least 1, the second 0 (greedy) or {COLDEST:g} "
            f"to {HOTTEST:g}, the third {SMALLEST_TOP_P:g} to 1"
        )
    context = len(conversation.tokens) + len(request.given)
    if context + request.max_new_tokens - 1 > pool:  # the newest token needs no slot
        raise ValueError(
            f"{context} tokens and {request.max_new_tokens} new ones can never fit the KV pool of "
            f"{pool} tokens; raise max_tokens or ask for less"
        )
