"""A tool of your own: any function from text to documents.   python -m recipes.own_tool --steps 20

The toy's base model has never seen this one and will hardly call it; a chat model reads of it in its system prompt.
"""
import sys

import mars
from tasks import chat as prompts
from plumbing.build import build, make_format
from config import from_command_line
from tools import Document, ToolError


def archive(argument: str) -> list[Document]:
    """Knows one thing; an empty list means "found nothing", ToolError means "failed"."""
    if not argument.isascii():
        raise ToolError("the archive reads ASCII only")
    return [Document("archive-1", "Archive", "", "the weather was mild that week .")] if "weather" in argument else []


if __name__ == "__main__":
    config = from_command_line(sys.argv[1:])
    config.distill += ",archive"                            # System 1 reads what it returns
    prompts.TOOLS["archive"] = ("query", "searches the town's archive")     # its argument, and what System 2 is told
    run = build(config, training=True)
    run.tools["archive"] = run.eval_tools["archive"] = archive
    run.format = make_format(config, run.tokenizer, list(run.tools))
    mars.train(run)
