"""The README's forks run as they stand, and stay short."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

from toy import base_model as toy_base
from test_mars import SMALL

REPO = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return toy_base.build(tmp_path_factory.mktemp("base"), threads=1, steps=(8, 8))


@pytest.mark.parametrize("name", ["own_tool", "own_task", "own_protocol"])
def test_example(base, tmp_path, name):
    command = [sys.executable, "-m", f"recipes.{name}", "--model", base, "--runs", tmp_path, "--name", name, "--steps", "1"]
    done = subprocess.run([*command, *SMALL], cwd=REPO, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in open(tmp_path / name / "rollouts" / "step_0.jsonl")]
    if name == "own_task":
        assert {r["question_id"] for r in records if r["split"] == "train"} == {"sum-0", "sum-1", "sum-2", "sum-3"}
    if name == "own_protocol":
        assert all(len(r["turns"]) == 2 and len(r["turns"][0]["chunks"]) == 1 for r in records)


@pytest.mark.parametrize("name", ["own_tool", "own_task", "own_protocol"])
def test_example_is_under_20_lines(name):
    lines = (REPO / "recipes" / f"{name}.py").read_text().splitlines()
    own = [line for line in lines if line.strip() and not line.startswith(("import ", "from ", '"""'))]
    assert len(own) < 20


def test_a_tool_of_ones_own_can_be_called():
    """In the toy a tool's name must be a word of the toy's vocabulary; an unknown one is a malformed call."""
    from toy import language
    from recipes.own_tool import archive
    form = language.ToyFormat(language.make_tokenizer())
    said = form.tokenizer.encode("<call> archive weather <purpose> anything about ada <eot>", add_special_tokens=False)
    assert "unknown tool" in form.parse(said).error
    form.tools += ("archive",)
    call = form.parse(said).call
    assert call.tool == "archive" and archive(call.argument)[0].id == "archive-1" and archive("ada") == []


def test_a_chat_model_is_told_of_a_tool_of_ones_own(monkeypatch):
    """As the example does it: an entry of prompts.TOOLS, and a format that knows the name."""
    import prompts
    from test_prompts import QWEN3, tokenizer
    monkeypatch.setitem(prompts.TOOLS, "archive", ("query", "searches the town's archive"))
    form = prompts.ChatFormat(tokenizer(QWEN3), tools=["search", "archive"])
    assert "- archive" in form.decode(form.system2_prompt("Who?")) and "town's archive" in form.decode(form.system2_prompt("Who?"))
    said = '<tool_call>{"name": "archive", "arguments": {"query": "weather"}, "purpose": "the weather"}</tool_call>'
    assert prompts.read_step(said, form.tools).call == prompts.Call("archive", "weather", "the weather")
