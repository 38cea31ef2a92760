"""Every command of docs/real_models.md is accepted, up to the point where a model would be loaded.

Its own code parses and resolves the options; no model, no world and no GPU is needed for that.
What the toy is asked in README.md and docs/running.md can be found in its world, and
docs/walkthrough.md and docs/choices.md name only what exists: functions, files, options.
"""

import dataclasses
import json
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
import test_memory
from helpers import chat
from helpers.stopped import options_of, stop

import mars
import train
import warm_start
from config import parser
from plumbing import models
from recipes import almanac
from tasks.chat import ChatFormat
from tasks.questions import Question
from toy import world
from trainer import memory

REPO = Path(__file__).parent.parent
PAGE = (REPO / "docs" / "real_models.md").read_text()
WALKTHROUGH = (REPO / "docs" / "walkthrough.md").read_text()
CHOICES = (REPO / "docs" / "choices.md").read_text()
TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def commands(text: str) -> list[str]:
    """The lines of the code blocks that start a program of this repository."""
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    lines = blocks.replace("\\\n", " ").splitlines()
    started = [line.partition("  #")[0] for line in lines]
    return [line for line in started if line.startswith(("python ", "torchrun "))]


@pytest.fixture
def accept(tmp_path, monkeypatch):
    """A function that runs a command up to there, and returns its options."""

    made = dataclasses.asdict(almanac.AlmanacConfig(**almanac.ALMANAC, preset="almanac"))

    def find_checkpoint(method, name):
        return name, dict(made) if name.startswith("runs/") else None

    def run_of(path):
        return path if path.parts[0] == "runs" else None

    (tmp_path / "runs" / "almanac").mkdir(parents=True)
    (tmp_path / "runs" / "almanac" / "config.json").write_text(json.dumps(made))
    (tmp_path / "demonstrations.jsonl").write_text(json.dumps({"messages": TALK}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "find_checkpoint", find_checkpoint)
    monkeypatch.setattr(models, "run_of", run_of)
    # A run of that name may lie here, and the pages may not be installed.
    monkeypatch.setattr(almanac.folders, "refuse_run", lambda runs, name: None)
    monkeypatch.setattr(almanac, "make_tool", lambda preset, page_fields: None)
    monkeypatch.setattr(almanac, "warm_model", lambda config, tools: config.model)
    monkeypatch.setattr(warm_start, "train", stop)
    return lambda command: options_of(*program_of(command))


def program_of(command: str):
    """(its main, its arguments)"""
    words = [word for word in shlex.split(command) if word != "…"]
    if words[0] == "torchrun":
        starts = "-m" if "-m" in words else "mars.py"
        words = ["python", *words[words.index(starts) :]]
    if words[1] == "mars.py":
        return (lambda given: train.main(mars.METHOD, given, "")), words[2:]
    if words[1] == "warm_start.py":
        return warm_start.main, words[2:]
    assert words[1:3] == ["-m", "recipes.almanac"], command
    return almanac.main, words[3:]


@pytest.mark.parametrize("command", commands(PAGE))
def test_it_is_accepted_and_leaves_room_for_a_chat_models_prompts(command, accept):
    """By a tokenizer that needs more tokens for them than any model's."""
    config = accept(command)
    assert config.bf16 in ("auto", "on")
    if "mars.py" in command:
        assert config.longest() <= (config.kv_tokens or memory.CPU_KV_TOKENS)
        words = chat.tokenizer(chat.QWEN25)
        question = Question("q", "What did we decide about pricing?", (), "q")
        mars.fits(config, ChatFormat(words, mars.words(config, chat.TOOLS), chat.TOOLS), question)


ONE_GPU = PAGE.partition("## One GPU of 24 GB")[2].partition("\n## ")[0]
PLANNED = [command for command in commands(ONE_GPU) if "Qwen/" in command]


@pytest.mark.parametrize("command", PLANNED)
def test_what_is_offered_for_one_gpu_fits(command, accept, tmp_path, monkeypatch):
    config = accept(command)
    assert "of 22.0" in test_memory.plan_with(config, 22, 1, monkeypatch, tmp_path)[1]


def test_what_the_toy_is_asked_is_in_its_world():
    told = world.world("eval", 0)
    pages = [(REPO / name).read_text() for name in ("README.md", "docs/running.md")]
    asked = re.findall(r'mars.py ask runs/toy "(.*?)"', "\n".join(pages))
    assert len(asked) >= 2
    for question in asked:
        assert any(name in question for name in (*told.people, *told.companies)), question


def test_what_the_pages_name_exists():
    """Functions such as `rollout.Env.reward`: a module, then attributes."""
    functions = re.findall(r"`((?:\w+\.)+(?!(?:md|py|jsonl)`)\w+)`", WALKTHROUGH)
    assert len({*functions}) > 15
    for name in functions:
        pkgutil.resolve_name(name)
    for file in re.findall(r"`([\w/]+\.(?:py|md))`", WALKTHROUGH + CHOICES):
        assert (REPO / file).exists(), file
    made = parser(mars.MarsConfig, "")
    options = {option for action in made._actions for option in action.option_strings}
    for option in re.findall(r"`(--\w+)", WALKTHROUGH + CHOICES):
        assert option in options, option
