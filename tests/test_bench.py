"""The benches that a CPU runs: tables of arms, forms that agree."""

import json
import math
import sys
from argparse import Namespace
from dataclasses import asdict
from functools import partial

import pytest

import mars
from bench import arms, common, cost, toy, train_step
from bench import kernels as loss
from bench import sampler as bench
from config import parse, parser, resolve
from siblings import marsrl, matpo


def test_a_row_is_written_when_it_is_measured_and_a_failure_is_a_row(tmp_path, monkeypatch):
    def saved():
        return json.loads((tmp_path / "new" / "name.json").read_text())

    def part(tiny):
        yield {"form": "good"}, lambda: {"ms": 3.0, "peak GB": math.nan}
        assert saved()["rows"] == [{"form": "good", "ms": 3.0}]
        yield {"form": "bad"}, lambda: {}["no such peer"]

    monkeypatch.setattr(sys, "argv", ["/a/gpu.py", "--out", "/a/folder"])
    common.run("name", part, tmp_path / "new")
    assert "KeyError" in saved()["rows"][1]["failed"]
    assert saved()["command"] == "python -m bench.gpu --out …"
    assert saved()["rates"]["copy"] > 0 and saved()["versions"]["torch"]


def test_the_first_round_is_not_counted(monkeypatch):
    calls = []
    monkeypatch.setattr(common, "clock", lambda: len(calls) ** 2)
    times = common.timed(lambda: calls.append(1), rounds=2)
    assert times == [3, 5]
    assert common.spread("s", times) == {"s, median": 4, "s, min": 3, "s, max": 5}


@pytest.mark.parametrize("method", [mars.METHOD, matpo.METHOD, marsrl.METHOD])
def test_every_arm_is_accepted_and_changes_something(method):
    settings = []
    for changed in arms.ARMS[method.name].values():
        given = parse(parser(method.config, ""), ["--steps", "9", *changed])
        settings.append(asdict(resolve(method.config, given, presets=method.presets)))
    assert settings[0] not in settings[1:]


def invent(runs, name: str, score: float, evaluated: int = 4) -> None:
    """A run of 4 steps, evaluated after the last one unless said."""
    (runs / name).mkdir()
    (runs / name / "config.json").write_text("{}")
    line = {"step": 3, "eval_step": evaluated} | dict.fromkeys(arms.SCORES["mars"], score)
    (runs / name / "metrics.jsonl").write_text(json.dumps(line))


def test_arms_are_tabulated_and_only_missing_runs_are_started(tmp_path, monkeypatch):
    for name, score in (("full-0", 0.9), ("full-1", 0.7), ("purpose_off-0", 0.4)):
        invent(tmp_path, name, score)
    invent(tmp_path, "purpose_off-2", 0.2, evaluated=2)  # killed
    full, off = arms.summarise_toy("mars", tmp_path)
    assert (full["arm"], full["seeds"], full["eval_greedy"]) == ("full", "0 1", "80.0 (90.0 70.0)")
    assert (off["arm"], off["seeds"], off["eval_greedy"]) == ("purpose_off", "0", "40.0 (40.0)")
    for step in (2, 4):  # for the last state there may have been no room
        state = tmp_path / "full-0" / "state" / f"step_{step:06d}"
        state.mkdir(parents=True)
        (state / "state.json").touch()
        assert arms.is_complete(tmp_path / "full-0") == (step == 4)

    with pytest.raises(SystemExit, match="bad.log"):
        arms.call_python(Namespace(runs=tmp_path, cache=""), ["-c", "1/0"], "bad")
    started = []
    monkeypatch.setattr(arms, "call_python", lambda options, line, name: started.append(line))
    monkeypatch.setattr(arms, "publish", lambda *given: None)
    line = f"arms mars --arms full purpose_off --seeds 0 2 --runs {tmp_path} --lr 1e-3"
    monkeypatch.setattr(sys, "argv", line.split())
    arms.main()
    full, off = started
    assert "full-2" in full and "--resume" not in full
    assert {"purpose_off-2", "--no-purpose", "--resume"} <= set(off)
    assert all("--lr 1e-3" in " ".join(line) for line in started)


def test_seeds_are_pooled_and_models_compared_question_by_question(tmp_path, monkeypatch):
    """Of each evaluation a small record stays, which is all that the table needs."""
    marks = {"start-0": "1100", "start-1": "0000"}  # questions 0, 1, …: a 1 for each right answer
    marks |= {"mars-0": "0111", "mars-1": "1111", "frozen-0": "0011", "none-0": "0001"}
    records = tmp_path / "records"
    records.mkdir()
    for name, right in marks.items():
        costs = {} if "start" in name else dict.fromkeys(arms.COSTS, 2)
        record = {"cells": {"all": [right.count("1"), 4]}, "right": right, "of a step": costs}
        (records / f"{name}-sampled.json").write_text(json.dumps(record))
    monkeypatch.setattr(sys, "argv", ["", "almanac", "--table", "--records", str(records)])
    arms.main()  # of all seeds that have a record
    start, run, frozen, _ = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert run["seeds"] == 2 and run["read tokens an attempt"] == run["trained tokens"] == 2
    assert not start.keys() & arms.COSTS.keys()
    assert start["all"].startswith("25.0% (") and run["all"] == "87.5% (52.9%–97.8%)"
    assert run["against start"] == "+6 −1" and "against mars" not in run
    assert run["p start"] == pytest.approx(2 * 8 / 2**7)
    assert (frozen["arm"], frozen["against mars"]) == ("frozen", "+0 −1")
    assert (tmp_path / "arms.png").read_bytes().startswith(b"\x89PNG")


def test_toy_runs_are_tabulated_by_arithmetic_and_summarised(tmp_path, monkeypatch, capsys):
    for name, score in (("plain-0", 0.75), ("native-1", 0.5), ("native-0", 1.0)):
        invent(tmp_path, name, score)
    monkeypatch.setattr(common, "write_json", lambda path, content: path.name)
    monkeypatch.setattr(sys, "argv", ["", "--table", "--runs", str(tmp_path)])
    toy.main()
    _, *rows, saved, accuracy, _ = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["native-0", "native-1", "plain-0"]
    assert (saved, accuracy) == ("toy.json", "eval_accuracy: 0.5 to 1, median 0.75")


def test_weights_and_pages_are_counted():
    """Qwen3-8B reads 7.57e9 weights in a decode step, and 144 KiB of keys and values a token."""
    assert bench.weight_bytes(bench.QWEN3_8B) == pytest.approx(2 * 7.57e9, rel=1e-3)
    assert bench.weight_bytes(bench.QWEN3_0_6B) == pytest.approx(2 * 0.596e9, rel=1e-3)
    assert bench.token_bytes(bench.QWEN3_8B) == 144 * 1024


def test_our_loss_is_nearer_to_float64_than_bf16_logits():
    ours, plain, liger = common.measure(loss.accuracy, tiny=True)
    for key in ("log-prob error, mean", "max"):
        assert ours[key] < 1e-5 < plain[key] < 0.1
    assert ours["gradient error, hidden"] < 0.01 and ours["gradient error, weight"] < 0.01
    assert "liger" in liger.get("failed", "liger")


def test_a_form_with_another_loss_is_a_failure(monkeypatch):
    """test_bench_gpu.py runs all forms unspoilt, and none fails."""
    padded_step = train_step.padded_step
    padded = []  # tokens computed by each padded form

    def wrong(*given):
        loss, computed = padded_step(*given)
        padded.append(computed)
        return loss + 1e-3, computed

    monkeypatch.setattr(train_step, "padded_step", wrong)
    names = "packed, not compiled", "padded, random order", "padded, sorted by length"
    forms = {name: train_step.FORMS[name] for name in names}
    packed, *others = common.measure(partial(train_step.steps, forms=forms), tiny=True)
    assert all("differs" in row["failed"] for row in others)
    in_random_order, by_length = padded
    assert packed["tokens computed"] < by_length <= in_random_order


def test_the_cost_model_is_near_what_an_h200_took(monkeypatch):
    """Decode steps of Qwen3-8B, as in bench/results/h200_decode.json."""
    monkeypatch.setattr(cost, "READ", 4.198e12)  # an H200's copy
    for rows, seconds in ((3, 0.007604), (12, 0.015209)):
        assert cost.decode_seconds(rows * 24_576) == pytest.approx(seconds, rel=0.02)


def test_lent_memory_and_shared_attempts_shorten_a_step(monkeypatch):
    """The real scheduler, 2 GPUs with two questions of 8 attempts each."""
    for name, value in {"questions": 4, "group": 8}.items():
        monkeypatch.setattr(cost.CONFIG, name, value)
    monkeypatch.setattr(cost, "GPUS", 2)
    small, large, helped = (
        cost.play_step(*setting) for setting in ((80_000, 8, 2), (300_000, 8, 2), (300_000, 2, 4))
    )
    assert len({tuple(sorted(a.samples + b.samples)) for a, b in (small, large, helped)}) == 1
    hours = [max(rank.clock for rank in ranks) / 3600 for ranks in (small, large, helped)]
    assert hours[0] > 1.3 * hours[1] and hours[1] > hours[2]
    assert all(sum(rank.rows) / len(rank.rows) < 80_000 / 20_000 for rank in small)
