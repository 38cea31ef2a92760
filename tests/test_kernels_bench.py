"""The GPU benches, as far as a machine without a GPU can tell: parts, limits, memory, files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import attention, common, gpu
from bench import kernels as loss
from bench import sampler as sampler_bench

ROOT = Path(__file__).parent.parent
GIB = 2**30
CARDS = {"80 GB card": 78 * GIB, "H200": 139 * GIB}  # what CUDA gives of them
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


# --- the parts ------------------------------------------------------------------------------------


def test_each_part_fits_ten_minutes():
    for steps in gpu.PARTS.values():
        assert sum(seconds for seconds, _ in steps.values()) <= gpu.PART_SECONDS < 600


def test_the_first_part_has_tests_loss_attention_and_a_run():
    commands = [" ".join(command) for _, command in gpu.PARTS[1].values()]
    for wanted in ("-m gpu", "bench.kernels", "bench.attention", "--row toy"):
        assert any(wanted in command for command in commands), wanted


@NO_GPU
@pytest.mark.parametrize("module", [attention, loss])
def test_the_benches_know_the_options_that_the_parts_give_them(module, monkeypatch, capsys):
    """Without a GPU each says so; the parts that a CPU can measure are left out here."""
    name = module.__name__
    commands = []
    for steps in gpu.PARTS.values():
        commands += [command[1:] for _, command in steps.values() if command[0] == name]
    assert commands
    for command in commands:
        arguments = [x for x in command if x != "accuracy"]
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        module.main()
        assert "not yet measured" in capsys.readouterr().out


@NO_GPU
def test_without_a_gpu_it_says_so_and_ends_with_2():
    command = [sys.executable, "-m", "bench.gpu", "--part", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert "no CUDA device" in result.stderr


def test_a_step_that_is_cut_leaves_what_it_had_and_the_next_one_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path / "out")
    save = "from bench.common import save; save('half', 'a test', [{'row': 1}])"
    steps = {
        "fails": (30, ["no_such_module"]),
        "cut": (-24, ["timeit", "-n1", "-r1", f"{save}; import time; time.sleep(60)"]),
        "well": (30, ["platform"]),
    }
    monkeypatch.setattr(gpu, "PARTS", {7: steps})
    assert not gpu.run_part(7)
    record = json.loads((tmp_path / "out" / "gpu_part_7.json").read_text())
    outcomes = [row["outcome"] for row in record["rows"]]
    assert outcomes[0] == "failed, exit 1"
    assert re.fullmatch(r"cut after \d+ s", outcomes[1])
    assert outcomes[2] == "ok"
    assert json.loads((tmp_path / "out" / "half.json").read_text())["rows"] == [{"row": 1}]
    assert "no_such_module" in (tmp_path / "out" / "gpu_part_7.log").read_text()


def test_seconds_a_step_leave_the_first_one_out():
    metrics = []
    for seconds in (9.0, 1.0, 2.0, 3.0):
        line = {"seconds_rollout": seconds, "seconds_train": seconds / 2}
        metrics.append(line | {"tokens_per_second": 100.0, "mismatch_kl": 1e-4})
    row = gpu.step_seconds(metrics)
    assert row["s rollout, first"] == 9 and row["s rollout"] == 2 and row["s train"] == 1


# --- files ----------------------------------------------------------------------------------------


def test_git_may_be_missing(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert common.commit() is None
    assert common.provenance()["python"]


def test_results_may_go_to_another_folder(tmp_path):
    code = "from bench import common; print(common.save('x', 'command', [{'a': 1}]))"
    environment = os.environ | {"MARS_BENCH_RESULTS": str(tmp_path / "new")}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.stdout.strip() == str(tmp_path / "new" / "x.json"), result.stderr
    assert json.loads((tmp_path / "new" / "x.json").read_text())["rows"] == [{"a": 1}]


def test_rows_are_seen_after_each_round():
    seen = []
    clock = iter(range(100))
    common.interleaved(
        {"a": lambda: None, "b": lambda: None},
        rounds=3,
        clock=lambda: next(clock),
        after_round=lambda times: seen.append(len(times["b"])),
    )
    assert seen == [1, 2, 3]


def test_a_table_takes_rows_with_different_columns():
    text = common.table([{"a": 1, "b": 0.5}, {"a": 2, "failed": "why"}])
    assert [line.split() for line in text.splitlines()] == [
        ["a", "b", "failed"],
        ["1", "0.5"],
        ["2", "why"],
    ]


# --- memory, by arithmetic ------------------------------------------------------------------------


@pytest.mark.parametrize("card", CARDS)
def test_the_loss_and_the_throughput_fit(card):
    assert loss.case_bytes(*loss.SHAPES["gpu"]) < 0.9 * CARDS[card]
    assert gpu.throughput_bytes() < 0.9 * CARDS[card]


@pytest.mark.parametrize("card", CARDS)
def test_every_shape_of_attention_fits(card):
    options = SimpleNamespace(quick=False, rows=None, context=None)
    for model, page_size, rows, context, mixed in attention.gpu_shapes(options):
        read, total = attention.case_bytes(rows, context, attention.HEADS[model], mixed)
        assert read <= total
        assert 2 * total < 0.9 * CARDS[card], (model, page_size, rows, context)


def test_page_tables_take_the_bytes_that_are_counted():
    heads = (4, 2, 16)
    q, k_pages, v_pages, tables, lengths = attention.make_case(
        3, 100, heads, 16, True, torch.float32, "cpu", sets=2
    )
    read, _ = attention.case_bytes(3, 100, heads, True, itemsize=4)
    assert read == 2 * int(lengths.sum()) * 2 * 16 * 4
    assert tables.shape[:2] == (2, 3)
    assert len(k_pages) == len(v_pages) == tables.numel()
    assert sorted(tables.flatten().tolist()) == list(range(tables.numel()))


def test_models_and_pools_are_counted_as_they_are_made():
    """Qwen3-8B has 8.19e9 weights and 144 KiB of keys and values a token; 0.6B 0.596e9."""
    assert gpu.model_bytes(sampler_bench.QWEN3_8B) == pytest.approx(2 * 8.19e9, rel=1e-3)
    assert gpu.pool_bytes(sampler_bench.QWEN3_8B, 1) == 144 * 1024
    assert gpu.model_bytes(gpu.QWEN3_0_6B) == pytest.approx(2 * 0.596e9, rel=1e-3)


def test_the_samplers_cases_fit_an_h200_and_all_but_the_largest_an_80_gb_card():
    """Model, the sampler's copy of it, and a pool of rows · (context + 320) tokens."""
    models = 2 * gpu.model_bytes(sampler_bench.QWEN3_8B)
    needed = {}
    for rows in (1, 64, 128):
        for context in (1024, 4096):
            pool = gpu.pool_bytes(sampler_bench.QWEN3_8B, rows * (context + 320))
            needed[rows, context] = models + pool
    assert max(needed.values()) < 0.9 * CARDS["H200"]
    too_large = [case for case, size in needed.items() if size > 0.95 * CARDS["80 GB card"]]
    assert too_large == [(128, 4096)]


# --- what the GPU machine lacks -------------------------------------------------------------------

WITHOUT_BM25S = """
import sys
sys.modules["bm25s"] = None
import pytest
sys.exit(pytest.main(["-m", "gpu", "--collect-only", "-q", *sys.argv[1:]]))
"""


def test_gpu_tests_are_collected_without_bm25s():
    """The card's machine has no bm25s: no test that needs a GPU may be lost by an import of it."""
    command = [sys.executable, "-c", WITHOUT_BM25S]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]
    assert "error" not in result.stdout.lower()
    for name in ("test_kernels_loss", "test_kernels_decode", "test_sampler"):
        assert name in result.stdout
