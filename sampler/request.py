"""What the sampler is asked and what it answers. Test: pytest tests/test_sampler.py -k refused"""

import itertools
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

    given: the tokens that it appends to its conversation. row: its number among the running
    sequences, while it runs.
    """

    conversation: Conversation
    given: list[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    stop_ids: frozenset[int]
    seed: int
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


def make_request(
    conversation: Conversation,
    tokens: list[int],
    *,
    vocabulary: int,
    pool: int,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    stop_ids,
    seed: int,
) -> Request:
    """A checked request; the conversation is only looked at. ValueError for what cannot be done.

    vocabulary: tokens that the model knows. pool: tokens that a conversation may have.
    """
    if conversation.closed:
        raise ValueError("the conversation is closed")
    if conversation.request is not None:
        raise ValueError("the conversation has an open request")
    if not tokens:
        raise ValueError("tokens is empty; a request needs at least one token")
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocabulary:
            raise ValueError(f"token id {token} is outside the model's vocabulary of {vocabulary}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    context = len(conversation.tokens) + len(tokens)
    if context + max_new_tokens - 1 > pool:  # the newest token needs no slot
        raise ValueError(
            f"{context} tokens and {max_new_tokens} new ones can never fit the KV pool of {pool} "
            "tokens; raise max_tokens or ask for less"
        )
    if temperature != 0 and not COLDEST <= temperature <= HOTTEST:
        raise ValueError(
            f"temperature must be 0 (greedy) or from {COLDEST:g} to {HOTTEST:g}, not {temperature}"
        )
    if not SMALLEST_TOP_P <= top_p <= 1:
        raise ValueError(f"top_p must be from {SMALLEST_TOP_P:g} to 1, not {top_p}")
    return Request(
        conversation, list(tokens), max_new_tokens, temperature, top_p, frozenset(stop_ids), seed
    )
