"""What System 2 can call: the form of a tool, of its results and of its failures.

A tool is a blocking, thread-safe function `call(argument: str) -> list[Document]`. An empty
list means that it ran and found nothing. A failure of the outside world raises ToolError, so
that the two can never be confused.
"""

import sys
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from config import UserError, discard_output


class ToolError(Exception):
    """The outside world failed (network, quota, sandbox): System 2 is told, the run counts it."""


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
    about: str  # what the role is told about it
    call: Callable[[str], list[Document]]


# The tools that --tools can name: argument, and what a role is told.
KNOWN = {
    "search": ("query", "searches the web and reads the pages found"),
    "scholar": ("query", "searches scientific papers and reads what is found of them"),
    "python": (
        "code",
        "runs a Python program and returns what it prints and the value of its last expression",
    ),
}


def one_line(text: str, longest: int) -> str:
    """At most `longest` characters in one line: control and invisible characters become spaces."""
    visible = [" " if unicodedata.category(c)[0] in "CZ" else c for c in text]
    line = " ".join("".join(visible).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def show(line: str) -> None:
    """Prints a line; UserError if it cannot be written, a quiet exit if nobody reads on."""
    try:
        print(line, flush=True)
    except OSError as error:
        discard_output()
        if isinstance(error, BrokenPipeError):
            sys.exit(0)
        raise UserError(f"standard output cannot be written ({error.strerror})") from None
