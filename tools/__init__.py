"""The interface of the tools that System 2 calls, of their results and of their failures.

A tool is a blocking, thread-safe function `call(argument: str) -> list[Document]`. An empty
list means that it ran and found nothing. A failure of the outside world raises ToolError, so
that it is never mistaken for an empty result.
"""

import sys
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from config import UserError, discard_output


class ToolError(Exception):
    """The outside world failed (network, quota, sandbox). System 2 sees it; the run counts it."""


@dataclass(frozen=True)
class Document:
    """One result of a tool: `text` is what System 1 reads, `id` names it in the rollout record."""

    id: str
    title: str
    url: str
    text: str


@dataclass(frozen=True)
class Tool:
    """A tool as a role sees it, and the function behind it."""

    name: str
    argument: str  # the name of its one argument
    about: str  # its description in the role's prompt
    call: Callable[[str], list[Document]]


# The tools that --tools can name: name -> (argument, description in the role's prompt).
KNOWN = {
    "search": ("query", "searches the web and reads the pages found"),
    "scholar": ("query", "searches scientific papers and reads what is found of them"),
    "python": (
        "code",
        "runs a Python program and returns what it prints and the value of its last expression",
    ),
}


def one_line(text: str, longest: int) -> str:
    """The text in one line of at most `longest` characters, without invisible characters."""
    visible = [" " if unicodedata.category(c)[0] in "CZ" else c for c in text]
    line = " ".join("".join(visible).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def show(line: str) -> None:
    """Prints a line. Raises UserError if that fails, and exits if the reader closed the pipe."""
    try:
        print(line, flush=True)
    except OSError as error:
        discard_output()
        if isinstance(error, BrokenPipeError):
            sys.exit(0)
        raise UserError(f"standard output cannot be written ({error.strerror})") from None
