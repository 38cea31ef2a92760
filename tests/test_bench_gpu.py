"""The day a GPU is there, as far as a CPU can tell."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import launch

from bench import common, gpu, kernels
from toy import base_model

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
MEASURED = [name for name, what in gpu.STEPS.items() if callable(what)]


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
        assert launch.launch(cwd / script, *options, log=tmp_path / "log", world=1) == 0

    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(run=forked))
    assert gpu.run_step(name, tmp_path, tiny=True) == []
    rows = json.loads((tmp_path / f"gpu_{name}.json").read_text())["rows"]
    if name == "toy":
        _, last = map(json.loads, open(tmp_path / "gpu_toy.jsonl"))
        assert rows[0]["mismatch_kl"] < 1e-10  # and the first step, which compiles, is left out
        assert rows[0]["seconds_rollout"] == last["seconds_rollout"]


@pytest.mark.parametrize("shape", [("tiny", 3, 100, "mixed"), ("tiny", 8, 320, "shared")])
def test_attention_forms_agree_and_their_bytes_are_counted(shape):
    size, [given] = kernels.attention_case(*shape, calls=1)
    ours, plain = (form(*given) for form in kernels.FORMS.values())
    torch.testing.assert_close(ours, plain)
    _, _, _, table, lengths, _ = given
    used = torch.arange(table.shape[1]) * kernels.PAGE < lengths[:, None]
    held = len(table[used].unique()) * kernels.PAGE * 2 * 2 * 16 * 2
    assert 0 <= held - size < len(table) * kernels.PAGE * 2 * 2 * 16 * 2


def test_gpu_tests_are_collected_without_bm25s(tmp_path, monkeypatch):
    """The card's machine may lack it: no test that needs a GPU may be lost by an import of it."""
    (tmp_path / "lacking.py").write_text('import sys\nsys.modules["bm25s"] = None\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    line = [sys.executable, "-m", *gpu.STEPS["gpu_tests"], "--collect-only", "-q", "-p", "lacking"]
    found = subprocess.run(line, cwd=common.ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    for name in ("test_kernels_decode", "test_sampler", "test_policy"):
        assert name in found.stdout
