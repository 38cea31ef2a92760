"""Every command of the pages and of the modules' docstrings is run in small, or at least accepted.

What is only accepted stops where a model would be loaded: READ_ONLY says why. What the toy is asked
can be found in its world, and docs/walkthrough.md and docs/choices.md name only what exists.
"""

import argparse
import ast
import dataclasses
import importlib
import pkgutil
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import test_memory
from helpers import chat
from helpers.stopped import Reached, options_of, stop
from test_mars import records_of

import mars
import recipes
import warm_start
from config import parse, parser
from plumbing import folders
from recipes import almanac
from tasks.chat import ChatFormat
from tasks.questions import Question
from tools import python
from toy import world
from trainer import memory

pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
REPO = Path(__file__).parent.parent
DOCS = {path.name: path.read_text() for path in REPO.glob("docs/*.md") if path.stem != "LOG"}
PAGE = DOCS["real_models.md"]
ONE_GPU = PAGE.partition("## One GPU\n")[2].partition("\n## ")[0]
NAMING = DOCS["walkthrough.md"] + DOCS["choices.md"]
SMALL = "--model start/toy --steps 1 --questions 4 --group 2 --eval_questions 2 --kv_tokens 8192"
COMMAND = re.compile(
    r"(?:^|`|&& |  |: )(?:\.venv/bin/)?"
    r"((?:python3?|torchrun) [^`\n]+?|(?:bench|siblings)\.\w+(?: -[^`\n]*)?)(?=$|`|  | &&|\. |\.$)",
    re.MULTILINE,
)
FILL = {r"(--\w+) …": r"\1 own.jsonl", " …": "", r"\[|\]": "", r"\bN$": "9"}
FILL |= {r"\b(CKPT|RUN|runs/NAME)\b": "runs/toy", "FOLDER": "notes"}
# Part of a command -> why it is not run here.
READ_ONLY = {
    "Qwen/": "a download",
    "--preset paper": "keys, eight GPUs",
    "torchrun": "several processes: test_mars.py starts two",
    "--server": "a vLLM server",
    "almanac": "a download and half an hour or more",
    "warm": "a download",
    "siblings.": "minutes: each has a test that runs it in small",
    "bench.": "minutes to hours, a GPU: test_bench.py runs it in small",
}
# What .ci/run does, what tools/ starts with a protocol of its own, half a command, and what
# needs right attempts (test_mars.py has them).
LEFT_OUT = ("-m venv", "-m pytest", "jail.py", "reader.py", "--standalone", "--from_run")


def commands(text: str) -> list[str]:
    """The commands of this repository in a text, without placeholders."""
    found = COMMAND.findall(re.sub(r"\s*\\\n\s*", " ", text))
    found = [line for line in found if not any(part in line for part in LEFT_OUT)]
    for pattern, filling in FILL.items():
        found = [re.sub(pattern, filling, line) for line in found]
    return [line if line[0] in "pt" else f"python -m {line}" for line in found]


FILES = sorted([*REPO.glob("*.py"), *REPO.glob("[a-z]*/*.py")])
MODULES = [ast.parse(path.read_text()) for path in FILES if path.parent.name != "tests"]
TEXTS = [(REPO / "README.md").read_text(), (REPO / "AGENTS.md").read_text(), *DOCS.values()]
TEXTS += [ast.get_docstring(module) or "" for module in MODULES]
EVERY = list(dict.fromkeys(line for text in TEXTS for line in commands(text)))
READ = [line for line in EVERY if any(part in line for part in READ_ONLY)]


def start(words: list[str]) -> None:
    """`python WORDS` in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words[words[0] == "-m" :])
        if words[0] == "-c":
            exec(words[1], {})
        elif words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__")
        else:
            runpy.run_path(str(REPO / words[0]), run_name="__main__")


def test_commands_run_as_they_are_typed(base, tmp_path, monkeypatch, capfd):
    """One after the other, in a folder with notes and the briefly trained model."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, "start/toy")  # so the first run is runs/toy
    Path("notes").mkdir()
    Path("notes/a.txt").write_text("ada baker born 1970 .")
    Path("questions.jsonl").write_text('{"question": "when was ada baker born ?"}')
    Path("program.py").write_text("print(6 * 7)")
    monkeypatch.setattr(sys, "stdin", open("program.py"))
    Path("quiet.py").write_text(re.search(r"```python\n(.*?)```", DOCS["running.md"], re.S)[1])
    monkeypatch.setattr(recipes, "__path__", [*recipes.__path__, str(tmp_path)])
    assert len(EVERY) - len(READ) > 20
    for line in [line for line in EVERY if line not in READ]:
        if " < " in line and python.available():
            continue  # programs cannot be jailed here
        _, *words = shlex.split(line.partition(" < ")[0])
        if not {"eval", "ask", "view.py", "-c", "--help", "tools.python"} & {*words}:
            words += SMALL.split()
        words += ["--eval_questions", "2"] * ("eval" in words)
        try:
            start(words)
        except SystemExit as ended:
            assert not ended.code, f"{line}: {capfd.readouterr().err}"
    files = Path().glob("runs/*/method.json")
    runs = {folders.read_json(file)["name"]: file.parent for file in files}
    asked = {r["question_id"] for r in records_of(runs["own-task"], 0) if r["split"] == "train"}
    assert asked == {f"year-{year}" for year in range(1970, 1974)}
    for record in records_of(runs["draft-and-critique"], 0):
        assert len(record["turns"]) == 2 and len(record["turns"][0]["chunks"]) == 1
    assert mars.main(["eval", "runs/archive"]) == 2, "mars.py would leave the tool out"
    assert "made by the method own-tool" in capfd.readouterr().err


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with what the commands name, and no package of the almanac."""
    monkeypatch.chdir(tmp_path)
    made = almanac.AlmanacConfig(**almanac.ALMANAC, preset="almanac")
    for run, method, config in (("almanac", "almanac", made), ("toy", "mars", mars.MarsConfig())):
        folder = Path("runs", run)
        (folder / "checkpoint").mkdir(parents=True)
        folders.write_json(folder / "checkpoint" / "config.json", {"model_type": "qwen3"})
        folders.write_json(folder / "config.json", dataclasses.asdict(config))
        folders.write_json(folder / "method.json", {"name": method})
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    folders.append_lines(Path("demonstrations.jsonl"), [{"messages": talk}])
    monkeypatch.setattr(almanac, "make_tool", lambda preset, page_fields: None)
    monkeypatch.setattr(almanac, "warm_model", lambda config, tools: config.model)
    monkeypatch.setattr(warm_start, "train", stop)


def options_given(command: str):
    """The options that reach the program; None where it only reads folders of runs."""
    words = shlex.split(command)
    if words[0] == "torchrun":
        words = words[words.index("mars.py") - 1 :]
    module, arguments = (words[2], words[3:]) if words[1] == "-m" else (words[1][:-3], words[2:])
    if "table" in arguments:
        assert importlib.import_module(module).main(arguments) == 2, "the runs are not there"
        return None
    # These have no `train.main`: they stop at their parser.
    if not (re.match("bench|siblings.(slm|moe)", module) or "measure" in arguments):
        return options_of(importlib.import_module(module).main, arguments)
    real = argparse.ArgumentParser.parse_known_args

    def stop_parser(*given):
        raise Reached(*real(*given))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Reached) as reached:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop_parser)
        start(words[1:])
    options, more = reached.value.args  # two benches hand `more` on to their runs
    hands_on = module in ("bench.arms", "bench.pages")
    assert not more or hands_on and parse(parser(mars.MarsConfig, ""), more)
    return options


@pytest.mark.parametrize("command", READ)
def test_what_is_not_run_is_accepted(command, place, tmp_path, monkeypatch):
    """A real model's prompts have room, by a tokenizer that needs more tokens than any model's."""
    config = options_given(command)
    if command in commands(PAGE) and "bench." not in command:
        assert config.bf16 in ("auto", "on")
    if command in commands(ONE_GPU) and "Qwen/" in command:
        assert "of 22.0" in test_memory.plan_with(config, 22, 1, monkeypatch, tmp_path)[1]
    if command in commands(PAGE) and "mars.py" in command:
        assert config.longest() <= (config.kv_tokens or memory.CPU_KV_TOKENS)
        words = chat.tokenizer(chat.QWEN25)
        question = Question("q", "What did we decide about pricing?", (), "q")
        mars.fits(config, ChatFormat(words, mars.words(config, chat.TOOLS), chat.TOOLS), question)


def test_what_the_toy_is_asked_is_in_its_world():
    told = world.world("eval", 0)
    asked = [line for line in EVERY if re.search('ask runs/toy "w', line)]
    assert asked
    for line in asked:
        assert any(name in line for name in (*told.people, *told.companies)), line


def test_what_the_pages_name_exists():
    """Functions such as `rollout.Env.reward`: a module, then attributes."""
    functions = re.findall(r"`((?:\w+\.)+(?!(?:md|py|jsonl)`)\w+)`", DOCS["walkthrough.md"])
    assert len({*functions}) > 15
    for name in functions:
        pkgutil.resolve_name(name)
    files = re.findall(r"`([\w/]+\.(?:py|md))`", NAMING)
    for file in files + re.findall(r"requirements[\w-]*\.txt|tests/[\w*]+\.py", "".join(TEXTS)):
        assert [*REPO.glob(file)], file
    made = parser(mars.MarsConfig, "")
    options = {option for action in made._actions for option in action.option_strings}
    for option in re.findall(r"`(--\w+)", NAMING):
        assert option in options, option
