"""The measurements on a GPU, as far as a CPU can run them."""

import sys
from importlib.util import find_spec
from unittest.mock import Mock

import pytest
import torch

from bench import common, fidelity, gpu, kernels, pages, swap, train_step


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", [*gpu.STEPS, *gpu.PARTS])
def test_each_step_runs_in_small_by_the_lines_that_a_gpu_runs(name, monkeypatch):
    """No row fails but a peer's that is not installed. A part's row has its prediction."""
    checkpoint = Mock(wraps=train_step.checkpoint)
    monkeypatch.setattr(train_step, "checkpoint", checkpoint)
    with torch.compiler.set_stance("force_eager"):  # tracing takes seconds
        rows = [*common.measure((gpu.STEPS | gpu.PARTS)[name], tiny=True)]
    assert rows and all("No module named" in row.get("failed", "No module named") for row in rows)
    assert all(("prediction" in row) == (name in gpu.PARTS) for row in rows)
    if name == "speed":
        lacking = [] if find_spec("flash_attn") else [*train_step.OPEN][2:4]
        assert [row["form"] for row in rows if "idle, s" not in row] == lacking
    assert checkpoint.called == (name == "speed")


def test_attention_forms_agree_and_their_bytes_are_counted():
    size, [given] = kernels.attention_case((4, 2, 16), 3, 100, calls=1)
    ours, plain = (form(*given) for form in kernels.FORMS.values())
    torch.testing.assert_close(ours, plain)
    _, _, _, table, lengths, _ = given
    used = torch.arange(table.shape[1]) * kernels.PAGE < lengths[:, None]
    held = len(table[used].unique()) * kernels.PAGE * 2 * 2 * 16 * 2
    assert 0 <= held - size < len(table) * kernels.PAGE * 2 * 2 * 16 * 2


def test_the_jobs_of_the_almanac_wait_for_files_that_other_jobs_write(tmp_path, monkeypatch):
    written = set()

    def run_missing(options):
        [arm], [seed] = options.arms, options.seeds
        assert (options.decodings, options.more[-1]) == (("sampled",), gpu.STEPS_OF_A_RUN)
        written.add(options.records / f"{arm}-{seed}-sampled.json")
        written.add(options.runs / f"{arm}-{seed}" / "config.json")

    monkeypatch.setattr(pages.arms, "run_missing", run_missing)
    monkeypatch.setattr(swap, "measure", lambda options: opened.update(options.run) or [])
    monkeypatch.setattr(fidelity, "weights_of", lambda run, start: opened.add(run) or ("", {}))
    monkeypatch.setattr(fidelity.folders, "read_json", lambda path: {"system1": "train"})
    monkeypatch.setattr(fidelity, "open_run", lambda checkpoint, options: None)
    for module in (swap, fidelity):
        monkeypatch.setattr(module, "publish", lambda name, rows, folder: folders.add(folder))
    monkeypatch.setattr(fidelity, "measure", lambda run, questions, group, draws: [])
    opened, folders = set(), set()
    for (_, module, *arguments), needed in gpu.almanac_jobs(tmp_path):
        if module == "bench.pages":
            monkeypatch.setattr(sys, "argv", [module, *arguments])
            with pytest.raises(SystemExit, match="no run is complete"):
                pages.main()
        else:
            assert {"bench.swap": swap, "bench.fidelity": fidelity}[module].main(arguments) == 0
            assert needed and written.issuperset(needed)
    assert len(written) == 2 * 14 and folders == {tmp_path}
    assert written.issuperset(run / "config.json" for run in opened)


def outcomes_of(capfd, folder, seconds: float, jobs: list) -> set[str]:
    gpu.run_jobs(folder, seconds, jobs)
    return {line.partition(",")[0] for line in capfd.readouterr().out.splitlines()}


def test_a_job_starts_when_its_files_exist(tmp_path, capfd):
    a, b = tmp_path / "a", tmp_path / "b"
    copy = ["-c", f"import shutil; shutil.copy({str(a)!r}, {str(b)!r})"]
    write = ["-c", f"open({str(a)!r}, 'w')"]
    jobs = [(copy, [a]), (write, []), (["-c", ""], [tmp_path / "never"])]
    outcomes = {"exit 0: job 0", "exit 0: job 1", "not begun: job 2"}
    assert outcomes_of(capfd, tmp_path, 120, jobs) == outcomes
    assert b.exists()


def test_a_job_is_cut_when_the_time_is_up(tmp_path, capfd):
    jobs = [(["-c", "import time; time.sleep(60)"], [])]
    assert outcomes_of(capfd, tmp_path, 0.5, jobs) == {"cut: job 0"}
