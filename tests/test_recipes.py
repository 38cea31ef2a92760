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


def test_a_tool_of_ones_own_is_named_and_called():
    """A call of a tool that is not there is malformed, in the toy's language too."""
    from helpers.chat import QWEN3, TOOLS, chat_format, tokenizer

    from recipes.own_tool import ARCHIVE
    from toy import language

    chat = chat_format(tokenizer(QWEN3), [*TOOLS, ARCHIVE])
    prompt = chat.text(chat.prompt("sys2", question="Who?"))
    assert "- archive" in prompt and "town's archive" in prompt
    call = {"name": "archive", "arguments": {"query": "weather"}, "purpose": "the weather"}
    toy = language.ToyFormat(language.make_tokenizer())
    for form, text, told in (
        (chat, f"<tool_call>{json.dumps(call)}</tool_call>", "the weather"),
        (toy, "<call> archive weather <purpose> weather <eot>", "weather"),
    ):
        said = form.tokenizer.encode(text, add_special_tokens=False)
        if form is toy:
            assert "unknown tool" in form.parse(said).error
            form.tools += ("archive",)
        assert form.parse(said).call == Call("archive", "weather", told)
    assert ARCHIVE.call("weather")[0].id == "archive-1" and ARCHIVE.call("ada") == []
