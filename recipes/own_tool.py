"""A tool of your own: any function from text to documents.

    python -m recipes.own_tool --steps 20 --name archive
    python -m recipes.own_tool eval runs/archive        with the tool; mars.py refuses this run

The toy's base model has never seen this tool and will hardly call it. A chat model reads about
it in its system prompt.
"""

import dataclasses
import sys

import mars
import train
from tools import Document, Tool, ToolError


def archive(argument: str) -> list[Document]:
    """Knows one document. An empty list means "found nothing", ToolError means "failed"."""
    if not argument.isascii():
        raise ToolError("the archive reads ASCII only")
    if "weather" not in argument:
        return []
    return [Document("archive-1", "Archive", "", "the weather was mild that week .")]


ARCHIVE = Tool("archive", "query", "searches the town's archive", archive)

if __name__ == "__main__":
    # The name keeps mars.py, which lacks the tool, from evaluating or resuming such a run.
    method = dataclasses.replace(mars.METHOD, name="own-tool")
    sys.exit(train.main(method, sys.argv[1:], __doc__, more_tools=[ARCHIVE]))
