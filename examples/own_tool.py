"""A tool of your own: any function from text to documents.   python -m examples.own_tool --steps 20"""
import sys

import mars
from build import build
from config import from_command_line
from tools import Document, ToolError


def archive(argument: str) -> list[Document]:
    """Knows one thing; an empty list means "found nothing", ToolError means "failed"."""
    if not argument.isascii():
        raise ToolError("the archive reads ASCII only")
    return [Document("archive-1", "Archive", "", "the weather was mild that week .")] if "weather" in argument else []


if __name__ == "__main__":
    run = build(from_command_line(sys.argv[1:]), training=True)
    run.tools["archive"] = run.eval_tools["archive"] = archive
    run.format.tools += ("archive",)                        # what System 2 may call
    run.config.distill += ",archive"                        # System 1 reads what it returns
    mars.train(run)
