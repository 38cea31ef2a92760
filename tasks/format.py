"""How roles speak: the actions that a step can contain, and the methods that every format has.

There are two formats: tasks/chat.py uses a chat model's template, and toy/language.py the toy's
words. The siblings' toys adapt toy/language.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tools import Document


@dataclass(frozen=True)
class Call:
    """One tool call, (t_i, p_i) of the paper: `purpose` says what to find in the result."""

    tool: str
    argument: str
    purpose: str = ""


@dataclass(frozen=True)
class Action:
    """The parsed form of one sampled step. Exactly one of the three fields is set.

    `error` is one sentence that names the fault. The role gets it as its observation, and the run
    counts the step as malformed.
    """

    call: Call | None = None
    answer: str | None = None
    error: str | None = None


class Format(Protocol):
    """How roles speak. All data is token ids; only `parse`, records and pages read text."""

    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """The ids of plain text from outside. None of them is a mark."""

    def text(self, tokens: list[int]) -> str:
        """The text of ids, with marks."""

    def prompt(self, role: str, **slots: Any) -> list[int]:
        """A role's first tokens."""

    def parse(self, tokens: list[int], *, final: bool = False) -> Action:
        """Parses a sampled step. `final`: an answer was demanded before it."""

    def observation(self, notes: list[Sequence[int]], *, final: bool = False) -> list[int]:
        """The ids between two steps: the wrapped notes. `final` adds the demand for an answer."""

    def message(self, text: str) -> list[int]:
        """A note in our own words: a correction, a failure, "no results"."""

    def close_step(self) -> list[int]:
        """The ids that end a step which was cut before its stop token."""

    def document(self, document: Document) -> Sequence[int]:
        """The ids of a document in a chunk. Several threads call it."""

    def note(self, tokens: list[int]) -> list[int]:
        """The sampled ids that other roles may read."""
