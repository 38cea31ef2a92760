"""How roles speak: the actions that a step can be, and the methods that every format has.

There are two formats: tasks/chat.py speaks through a chat model's template, toy/language.py in the
toy's words. Siblings' toys adapt the latter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tools import Document


@dataclass(frozen=True)
class Call:
    """One tool call, (t_i, p_i) of the paper: `purpose` says what to look for in the result."""

    tool: str
    argument: str
    purpose: str = ""


@dataclass(frozen=True)
class Action:
    """What one sampled step turned out to be; exactly one of the three is set.

    `error` is one sentence that says what was wrong. It goes back to the role as the
    observation, and the run counts the step as malformed.
    """

    call: Call | None = None
    answer: str | None = None
    error: str | None = None

    def __post_init__(self):
        if [self.call, self.answer, self.error].count(None) != 2:
            raise ValueError("an Action is exactly one of: a call, an answer, an error")


class Format(Protocol):
    """How roles speak. Everything is token ids; only `parse`, records and pages read text."""

    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Plain text from outside: no id of it is a mark."""

    def text(self, tokens: list[int]) -> str:
        """The text of ids, marks included."""

    def prompt(self, role: str, **slots: Any) -> list[int]:
        """A role's first tokens."""

    def parse(self, tokens: list[int], *, final: bool = False) -> Action:
        """What a sampled step says. `final`: an answer was demanded before it."""

    def observation(self, notes: list[Sequence[int]], *, final: bool = False) -> list[int]:
        """What stands between two steps: notes in their wrapping; `final` demands an answer."""

    def message(self, text: str) -> list[int]:
        """A note in our own words: a correction, a failure, "no results"."""

    def close_step(self) -> list[int]:
        """Ends a step that was cut before its stop token."""

    def document(self, document: Document) -> Sequence[int]:
        """A document as it stands in a chunk. Called from several threads."""

    def note(self, tokens: list[int]) -> list[int]:
        """What others may read of sampled ids."""
