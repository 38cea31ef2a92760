"""The day a GPU is there, as far as a CPU can tell."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import launch

from bench import common, gpu, kernels
from toy import base_model

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
MEASURED = [name for name, what in gpu.STEPS.items() if callable(what)]


def test_each_part_fits_nine_minutes_and_eight_files():
    for steps in gpu.PARTS.values():
        assert sum(seconds for seconds, _ in steps.values()) <= 530
        measured = [name for name in steps if name in MEASURED]
        more = {"toy": 1, "almanac": 6}  # metrics; records of start and two arms, decoded two ways
        kept = sum(more.get(name, 0) for name in measured)
        assert len(measured) + kept + 1 <= 8  # and part_N.log


@NO_GPU
@pytest.mark.parametrize("name", MEASURED)
def test_a_step_is_rehearsed_by_the_lines_of_the_day(name, base, tmp_path, monkeypatch):
    """No row fails but a peer's that is not installed."""
    if name == "toy":
        pytest.importorskip("bm25s")  # the toy's search
        monkeypatch.setattr(base_model, "build", lambda *given, **more: base)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def forked(line, *, cwd, check):
        _, script, *options = line
        if script == "-m":
            script = f"{options.pop(0).replace('.', '/')}.py"
        assert launch.launch(cwd / script, *options, log=tmp_path / "log", world=1) == 0

    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(run=forked))
    assert gpu.run_step(name, tmp_path, tiny=True) == []
    rows = json.loads((tmp_path / f"gpu_{name}.json").read_text())["rows"]
    if name == "toy":
        _, last = map(json.loads, open(tmp_path / "gpu_toy.jsonl"))
        assert rows[0]["mismatch_kl"] < 1e-10  # and the first step, which compiles, is left out
        assert rows[0]["seconds_rollout"] == last["seconds_rollout"]


def test_a_step_that_is_cut_leaves_what_it_had_and_the_next_one_runs(tmp_path, monkeypatch):
    half = tmp_path / "half"
    slow = f"import time; open({str(half)!r}, 'w').write('row'); time.sleep(600)"
    steps = {
        "fails": (30, ["no_such_module"]),
        "cut": (-15, ["timeit", "-n1", "-r1", slow]),
        "well": (30, ["platform"]),
    }
    monkeypatch.setattr(gpu, "PARTS", {7: steps})
    assert not gpu.run_part(7, tmp_path)
    log = (tmp_path / "part_7.log").read_text()
    outcomes = "=== fails: failed, exit 1,.*=== cut: cut after .*=== well: ok, "
    assert re.search(outcomes, log, re.DOTALL) and "no_such_module" in log
    assert half.read_text() == "row"


@NO_GPU
def test_without_a_gpu_it_says_so_and_ends_with_2(monkeypatch, capsys):
    for given in (["--part", "1"], ["--step", "toy"]):
        monkeypatch.setattr(sys, "argv", ["gpu", *given])
        with pytest.raises(SystemExit) as ended:
            gpu.main()
        assert ended.value.code == 2 and "no CUDA device" in capsys.readouterr().err


def test_on_a_gpu_a_step_finds_its_folder_and_a_cpus_bench_says_where_to_go(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "run_step", lambda name, out: (out / "rows").write_text(name) and [])
    monkeypatch.setattr(sys, "argv", ["gpu", "--step", "toy", "--out", str(tmp_path / "not/there")])
    assert gpu.main() == 0
    assert (tmp_path / "not/there/rows").read_text() == "toy"
    monkeypatch.setattr(sys, "argv", ["kernels"])
    with pytest.raises(SystemExit, match="2"):
        common.main("kernels", "", {"accuracy": None})


@pytest.mark.parametrize("shape", [("tiny", 3, 100, "mixed"), ("tiny", 8, 320, "shared")])
def test_attention_forms_agree_and_their_bytes_are_counted(shape):
    size, [given] = kernels.attention_case(*shape, calls=1)
    ours, plain = (form(*given) for form in kernels.FORMS.values())
    torch.testing.assert_close(ours, plain)
    _, _, _, table, lengths, _ = given
    used = torch.arange(table.shape[1]) * kernels.PAGE < lengths[:, None]
    held = len(table[used].unique()) * kernels.PAGE * 2 * 2 * 16 * 2
    assert 0 <= held - size < len(table) * kernels.PAGE * 2 * 2 * 16 * 2


COLLECT = """
import sys
import pytest
assert "bm25s" not in sys.modules
sys.modules["bm25s"] = None
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_gpu_tests_are_collected_without_bm25s(tmp_path):
    """The card's machine may lack it: no test that needs a GPU may be lost by an import of it."""
    script = tmp_path / "collect.py"
    script.write_text(COLLECT)
    arguments = [*gpu.STEPS["gpu_tests"][1:], "--collect-only", "-q"]
    code = launch.launch(script, *arguments, log=tmp_path / "log", world=1)
    said = (tmp_path / "log").read_text()
    assert code == 0, said[-3000:]
    for name in ("test_kernels_decode", "test_sampler", "test_policy"):
        assert name in said
