"""What the sampler is asked and what it answers, and the checks of what callers pass.

Every value is checked and brought to a plain Python type before the sampler changes anything, so a
refused request leaves no trace. TypeError: a value is of the wrong kind. ValueError: it is out of
range. Test: pytest tests/test_sampler.py -k "refused or accepted"
"""

import itertools
import numbers
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

# Beyond these, fp32 logits divided by the temperature overflow or lose their differences.
COLDEST = 1e-4
HOTTEST = 1e4


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
    alike share pages. request: the open one. temporary: `generate` made it and closes it.
    """

    age: int = field(default_factory=itertools.count().__next__)
    temporary: bool = False
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

    given: the tokens that it appends to its conversation. num_context_tokens: the conversation's
    length with them; the sampled `tokens` stand behind. row: its place among the running sequences,
    while it runs.
    """

    conversation: Conversation
    given: list[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    stop_ids: frozenset[int]
    seed: int
    number: int = -1
    num_context_tokens: int = 0
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


# ---------------------------------------------------------------- checks


def make_request(
    conversation: Conversation,
    tokens,
    *,
    vocabulary: int,
    positions: int | None,
    pool: int,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    stop_ids,
    seed: int,
) -> Request:
    """A checked request of plain Python values; the conversation is only looked at.

    vocabulary: tokens the model knows. positions: where its table of positions ends, if it has
    one. pool: tokens that the KV pool holds.
    """
    # Iterators may themselves submit or close, so they are read first.
    given = token_ids(tokens, "tokens")
    stop_ids = frozenset(token_ids(stop_ids, "stop_ids"))
    if conversation.closed:
        raise ValueError("the conversation is closed")
    if conversation.request is not None:
        raise ValueError("the conversation has an open request")
    if not given:
        raise ValueError("tokens is empty; a request needs at least one token")
    for token in given:
        if not 0 <= token < vocabulary:
            raise ValueError(f"token id {token} is outside the model's vocabulary of {vocabulary}")
    max_new_tokens = integer(max_new_tokens, "max_new_tokens")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    context = len(conversation.tokens) + len(given)
    if context + max_new_tokens - 1 > pool:  # the newest token needs no slot
        raise ValueError(
            f"{context} tokens and {max_new_tokens} new ones can never fit the KV pool of {pool} "
            "tokens; raise max_tokens or ask for less"
        )
    if positions is not None and context + max_new_tokens - 1 > positions:
        raise ValueError(
            f"{context} tokens and {max_new_tokens} new ones pass the model's table of {positions} "
            "positions; ask for less"
        )
    temperature = real(temperature, "temperature")
    if temperature != 0 and not COLDEST <= temperature <= HOTTEST:
        raise ValueError(
            f"temperature must be 0 (greedy) or from {COLDEST:g} to {HOTTEST:g}, not {temperature}"
        )
    top_p = real(top_p, "top_p")
    # The device gets it in fp32, where very small numbers are 0 and would allow no token at all.
    if not 0 < np.float32(top_p) or not top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, not {top_p}")
    return Request(
        conversation,
        given,
        max_new_tokens,
        temperature,
        top_p,
        stop_ids,
        integer(seed, "seed"),
        num_context_tokens=context,
    )


def token_ids(values, name: str) -> list[int]:
    """Token ids from a list, a tensor, an array or any other iterable of integers."""
    if hasattr(values, "tolist"):  # a tensor or an array: its items are Python numbers then
        values = values.tolist()
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a collection of token ids, not {values!r}")
    return [integer(value, f"each of {name}") for value in values]


def integer(value, name: str) -> int:
    """Any Python or numpy integer as a Python one; TypeError for anything else, bools included."""
    if type(value) is int:
        return value
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, not {value!r}")


def real(value, name: str) -> float:
    """Any Python or numpy number as a float; TypeError for anything else, bools included."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is beyond every float") from None
