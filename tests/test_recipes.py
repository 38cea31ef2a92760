"""The README's forks run as they stand."""

import json
import runpy
import sys

import pytest
from test_mars import SMALL

from tasks.format import Call


@pytest.mark.parametrize("name", ["own_tool", "own_task", "own_protocol"])
def test_example(base, tmp_path, monkeypatch, name):
    options = ["--model", str(base), "--runs", str(tmp_path), "--name", name, "--steps", "1"]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options, *SMALL])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"recipes.{name}", run_name="__main__")
    assert ended.value.code == 0
    records = [json.loads(line) for line in open(tmp_path / name / "rollouts" / "step_0.jsonl")]
    if name == "own_task":
        asked = {r["question_id"] for r in records if r["split"] == "train"}
        assert asked == {f"year-{year}" for year in range(1970, 1974)}
    if name == "own_protocol":
        assert all(len(r["turns"]) == 2 and len(r["turns"][0]["chunks"]) == 1 for r in records)


def test_a_tool_of_ones_own_can_be_called():
    """The toy must know a tool's name as a word; a call of an unknown one is malformed."""
    from recipes.own_tool import archive
    from toy import language

    chat = language.ToyFormat(language.make_tokenizer())
    text = "<call> archive weather <purpose> anything about ada <eot>"
    said = chat.tokenizer.encode(text, add_special_tokens=False)
    assert "unknown tool" in chat.parse(said).error
    chat.tools += ("archive",)
    call = chat.parse(said).call
    assert call.tool == "archive" and archive(call.argument)[0].id == "archive-1"
    assert archive("ada") == []


def test_a_chat_model_is_told_of_a_tool_of_ones_own():
    from helpers.chat import QWEN3, TOOLS, chat_format, tokenizer

    from recipes.own_tool import ARCHIVE

    chat = chat_format(tokenizer(QWEN3), [*TOOLS, ARCHIVE])
    prompt = chat.text(chat.prompt("sys2", question="Who?"))
    assert "- archive" in prompt and "town's archive" in prompt
    call = {"name": "archive", "arguments": {"query": "weather"}, "purpose": "the weather"}
    said = f"<tool_call>{json.dumps(call)}</tool_call>"
    action = chat.parse(chat.tokenizer.encode(said, add_special_tokens=False))
    assert action.call == Call("archive", "weather", "the weather")
