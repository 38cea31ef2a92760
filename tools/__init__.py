"""What System 2 can call.

A *tool* is a blocking, thread-safe callable `tool(argument: str) -> list[Document]`. An empty list means "it ran and found
nothing"; a failure of the outside world raises ToolError, so that the two can never be confused.
"""
from dataclasses import dataclass


class ToolError(Exception):
    """The outside world failed (network, quota, sandbox). System 2 is told so and the run counts it."""


@dataclass(frozen=True)
class Document:
    """One result of a tool: `text` is what System 1 reads, `id` names it in the rollout record."""
    id: str
    title: str
    url: str
    text: str
