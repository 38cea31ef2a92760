"""Every command of the pages and of the modules' docstrings is run in small, or at least accepted.

What is only accepted stops where a model would be loaded: READ_ONLY says why. What the toy is asked
can be found in its world, and docs/walkthrough.md and docs/choices.md name only what exists.
"""

import argparse
import ast
import dataclasses
import importlib
import json
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

pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
REPO = Path(__file__).parent.parent
DOCS = {path.name: path.read_text() for path in REPO.glob("docs/*.md") if path.stem != "LOG"}
PAGE = DOCS["real_models.md"]
NAMING = DOCS["walkthrough.md"] + DOCS["choices.md"]
TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SMALL = "--model start/toy --steps 1 --questions 4 --group 2 --eval_questions 4 --kv_tokens 8192"
COMMAND = re.compile(
    r"(?:^|`|&& |  |: )(?:\.venv/bin/)?"
    r"((?:python3?|torchrun) [^`\n]+?|(?:bench|siblings)\.\w+(?: -[^`\n]*)?)(?=$|`|  | &&|\. |\.$)",
    re.MULTILINE,
)
FILL = {r"(--\w+) …": r"\1 own.jsonl", " …": "", r"\[|\]": "", r"\bN$": "9"}
FILL |= {r"\b(CKPT|RUN|runs/NAME)\b": "runs/toy", r"\b(FOLDER|my_notes/)": "notes"}
# Part of a command -> why it is not run here.
READ_ONLY = {
    "Qwen/": "a download",
    "--preset paper": "keys, eight GPUs",
    "torchrun": "several processes: test_mars.py starts them",
    "--server": "a vLLM server",
    "almanac": "a download and half an hour or more",
    "warm": "a download",
    "siblings.": "minutes: each has a test that runs it in small",
    "bench.": "minutes to hours, a GPU, peers: test_bench.py runs it in small",
}
# What .ci/run does, what tools/ starts with a protocol of its own, half a command.
LEFT_OUT = ("-m venv", "-m pytest", "jail.py", "reader.py", "--standalone")


def commands(text: str) -> list[str]:
    """The commands of this repository in a text, without placeholders."""
    found = COMMAND.findall(re.sub(r"\s*\\\n\s*", " ", text))
    found = [line for line in found if not any(part in line for part in LEFT_OUT)]
    for pattern, filling in FILL.items():
        found = [re.sub(pattern, filling, line) for line in found]
    return [line if line[0] in "pt" else f"python -m {line}" for line in found]


def every_command() -> list[str]:
    """Of all pages and docstrings, each once, in their order."""
    texts = [(REPO / name).read_text() for name in ("README.md", "AGENTS.md")] + [*DOCS.values()]
    files = sorted([*REPO.glob("*.py"), *REPO.glob("[a-z]*/*.py")])
    parsed = [ast.parse(path.read_text()) for path in files if path.parent.name != "tests"]
    texts += [ast.get_docstring(module) or "" for module in parsed]
    return list(dict.fromkeys(line for text in texts for line in commands(text)))


READ = [line for line in every_command() if any(part in line for part in READ_ONLY)]


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
    Path("program.py").write_text("print(6 * 7)")
    Path("quiet.py").write_text(re.search(r"```python\n(.*?)```", DOCS["running.md"], re.S)[1])
    monkeypatch.setattr(recipes, "__path__", [*recipes.__path__, str(tmp_path)])
    run = [line for line in every_command() if line not in READ]
    assert len(run) > 20
    for line in run:
        words, _, given = line.partition(" < ")
        if given and python.available():
            continue  # programs cannot be jailed here
        _, *words = shlex.split(words)
        if not {"eval", "ask", "view.py", "-c", "--help", "tools.python"} & {*words}:
            words += SMALL.split()
        words += ["--eval_questions", "4"] * ("eval" in words)
        with open(given or "program.py") as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            try:
                start(words)
            except SystemExit as ended:
                assert not ended.code, f"{line}: {capfd.readouterr().err}"
    runs = {
        folders.read_json(path)["name"]: path.parent for path in Path().glob("runs/*/method.json")
    }
    asked = {r["question_id"] for r in records_of(runs["own-task"], 0) if r["split"] == "train"}
    assert asked == {f"year-{year}" for year in range(1970, 1974)}
    for record in records_of(runs["draft-and-critique"], 0):
        assert len(record["turns"]) == 2 and len(record["turns"][0]["chunks"]) == 1
    assert mars.main(["eval", "runs/archive"]) == 2, "mars.py would leave the tool out"
    assert "made by the method own-tool" in capfd.readouterr().err


@pytest.fixture
def accept(tmp_path, monkeypatch):
    """A function that runs a command up to there, and returns its options."""
    of_almanac = almanac.AlmanacConfig(**almanac.ALMANAC, preset="almanac")
    for run, name, config in (
        ("almanac", "almanac", of_almanac),
        ("toy", "mars", mars.MarsConfig()),
    ):
        checkpoint = tmp_path / "runs" / run / "checkpoint"
        checkpoint.mkdir(parents=True)
        folders.write_json(checkpoint / "config.json", {"model_type": "qwen3"})
        folders.write_json(checkpoint.parent / "config.json", dataclasses.asdict(config))
        folders.write_json(checkpoint.parent / "method.json", {"name": name})
    (tmp_path / "demonstrations.jsonl").write_text(json.dumps({"messages": TALK}))
    monkeypatch.chdir(tmp_path)
    # The pages may not be installed.
    monkeypatch.setattr(almanac, "make_tool", lambda preset, page_fields: None)
    monkeypatch.setattr(almanac, "warm_model", lambda config, tools: config.model)
    monkeypatch.setattr(warm_start, "train", stop)
    return accepted


def accepted(command: str):
    """The options that reach the program; None where it only reads folders of runs."""
    words = shlex.split(command)
    if words[0] == "torchrun":
        words = words[words.index("mars.py") - 1 :]
    module, arguments = (words[2], words[3:]) if words[1] == "-m" else (words[1][:-3], words[2:])
    if module.startswith("bench") or module[-3:] in ("mux", "ing") or "measure" in arguments:
        return parsed(words[1:])
    main = importlib.import_module(module).main
    if "table" not in arguments:
        return options_of(main, arguments)
    assert main(arguments) == 2, "the runs are not there"


def parsed(words: list[str]):
    """What a program without `train.main` reads, up to its parser."""
    real = argparse.ArgumentParser.parse_known_args

    def stop(*given):
        raise Reached(*real(*given))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Reached) as reached:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        start(words)
    options, more = reached.value.args  # bench/arms.py hands `more` on to its runs
    assert not more or "bench.arms" in words and parse(parser(mars.MarsConfig, ""), more)
    return options


@pytest.mark.parametrize("command", READ)
def test_what_is_not_run_is_accepted_and_leaves_room_for_a_chat_models_prompts(command, accept):
    """By a tokenizer that needs more tokens for them than any model's."""
    config = accept(command)
    if command in commands(PAGE):
        assert config.bf16 in ("auto", "on")
    if command in commands(PAGE) and "mars.py" in command:
        assert config.longest() <= config.kv_tokens
        words = chat.tokenizer(chat.QWEN25)
        question = Question("q", "What did we decide about pricing?", (), "q")
        mars.fits(config, ChatFormat(words, mars.words(config, chat.TOOLS), chat.TOOLS), question)


ONE_GPU = PAGE.partition("## One GPU of 24 GB")[2].partition("\n## ")[0]
PLANNED = [command for command in commands(ONE_GPU) if "Qwen/" in command]


@pytest.mark.parametrize("command", PLANNED)
def test_what_is_offered_for_one_gpu_fits(command, accept, tmp_path, monkeypatch):
    config = accept(command)
    assert "of 22.0" in test_memory.plan_with(config, 22, 1, monkeypatch, tmp_path)


def test_what_the_toy_is_asked_is_in_its_world():
    told = world.world("eval", 0)
    asked = [
        shlex.split(line)[4]
        for line in every_command()
        if "mars.py ask runs/toy" in line and "--docs" not in line
    ]
    asked.remove("question")
    assert len(asked) >= 2
    for question in asked:
        assert any(name in question for name in (*told.people, *told.companies)), question


def test_what_the_pages_name_exists():
    """Functions such as `rollout.Env.reward`: a module, then attributes."""
    functions = re.findall(r"`((?:\w+\.)+(?!(?:md|py|jsonl)`)\w+)`", DOCS["walkthrough.md"])
    assert len({*functions}) > 15
    for name in functions:
        pkgutil.resolve_name(name)
    for file in re.findall(r"`([\w/]+\.(?:py|md))`", NAMING):
        assert (REPO / file).exists(), file
    made = parser(mars.MarsConfig, "")
    options = {option for action in made._actions for option in action.option_strings}
    for option in re.findall(r"`(--\w+)", NAMING):
        assert option in options, option
