"""The measurements on a GPU, as far as a CPU can run them."""

import subprocess
import sys

import pytest
import torch

from bench import common, gpu, kernels

GPU_TESTS = "kernels_loss kernels_decode policy sampler".split()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", gpu.STEPS)
def test_each_step_runs_in_small_by_the_lines_that_a_gpu_runs(name):
    """No row fails but a peer's that is not installed."""
    bench = common.Bench(tiny=True)
    gpu.STEPS[name](bench)
    assert bench.rows and all(
        "No module named" in row.get("failed", "No module named") for row in bench.rows
    )


@pytest.mark.parametrize("shape", [("tiny", 3, 100, "own"), ("tiny", 8, 320, "shared")])
def test_attention_forms_agree_and_their_bytes_are_counted(shape):
    size, [given] = kernels.attention_case(*shape, calls=1)
    ours, plain = (form(*given) for form in kernels.FORMS.values())
    torch.testing.assert_close(ours, plain)
    _, _, _, table, lengths, _ = given
    used = torch.arange(table.shape[1]) * kernels.PAGE < lengths[:, None]
    held = len(table[used].unique()) * kernels.PAGE * 2 * 2 * 16 * 2
    assert 0 <= held - size < len(table) * kernels.PAGE * 2 * 2 * 16 * 2


def test_gpu_tests_are_collected_without_bm25s(tmp_path, monkeypatch):
    """A machine with a GPU may lack bm25s; its import must not hide a test that needs the GPU."""
    (tmp_path / "lacking.py").write_text('import sys\nsys.modules["bm25s"] = None\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    files = [f"tests/test_{name}.py" for name in GPU_TESTS]
    line = [sys.executable, "-m", "pytest", "-m", "gpu", *files]
    line += ["--collect-only", "-q", "-p", "lacking"]
    listing = subprocess.run(line, cwd=common.ROOT, capture_output=True, text=True)
    assert listing.returncode == 0, listing.stdout + listing.stderr
    for name in GPU_TESTS[1:]:
        assert f"test_{name}" in listing.stdout
