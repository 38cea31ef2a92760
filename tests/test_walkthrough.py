"""docs/walkthrough.md and docs/choices.md name only what exists: functions, files, options."""

import pkgutil
import re
from pathlib import Path

import mars
from config import parser

REPO = Path(__file__).parent.parent
WALKTHROUGH = (REPO / "docs" / "walkthrough.md").read_text()
CHOICES = (REPO / "docs" / "choices.md").read_text()


def test_every_function_that_the_walkthrough_names_exists():
    """`rollout.Env.reward`: the longest beginning that is a module, then attributes."""
    names = re.findall(r"`((?:\w+\.)+\w+)`", WALKTHROUGH)
    names = {name for name in names if not name.endswith((".md", ".py", ".jsonl"))}
    assert len(names) > 15
    for name in sorted(names):
        pkgutil.resolve_name(name)


def test_files_and_options_that_the_pages_name_exist():
    for file in re.findall(r"`([\w/]+\.(?:py|md))`", WALKTHROUGH + CHOICES):
        assert (REPO / file).exists(), file
    made = parser(mars.MarsConfig, "")
    options = {option for action in made._actions for option in action.option_strings}
    for option in re.findall(r"`(--\w+)", WALKTHROUGH + CHOICES):
        assert option in options, option
