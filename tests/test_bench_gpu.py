"""The measurements on a GPU, as far as a CPU can run them."""

import json
import subprocess
import sys

import pytest
import torch

from bench import common, fidelity, gpu, kernels, pages, sampler, swap

GPU_TESTS = "kernels_loss kernels_decode policy sampler".split()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", gpu.STEPS)
def test_each_step_runs_in_small_by_the_lines_that_a_gpu_runs(name):
    """No row fails but a peer's that is not installed. Each expected row is measured."""
    expected = gpu.expected(name)
    bench = common.Bench(tiny=True, predictions=expected)
    gpu.STEPS[name](bench)
    assert bench.rows and all(
        "No module named" in row.get("failed", "No module named") for row in bench.rows
    )
    measured = [(row["row"], row["prediction"]) for row in bench.rows if expected]
    assert measured == list(expected.items())


def test_a_part_has_a_row_for_each_expectation_also_where_a_step_hangs_or_dies(
    tmp_path, monkeypatch
):
    script = tmp_path / "step.py"
    script.write_text(
        "import json, os, sys, time\n"
        "_, _, name, _, part, _, out = sys.argv\n"
        "rows = {'training_step': ['packed'], 'requests': ['as it was', 'pieces']}.get(name, [])\n"
        "rows = [{'row': row, 's': 1} for row in rows]\n"
        "open(f'{out}/gpu_{name}.json', 'w').write(json.dumps({'rows': rows}))\n"
        "time.sleep(60 * (name == 'requests'))\n"
        "os._exit(3 * (name == 'lend'))\n"
    )
    monkeypatch.setitem(gpu.PARTS, "1", {"requests": 3, "training_step": 20, "lend": 0})
    gpu.run_part("1", tmp_path, (str(script),))
    rows = json.loads((tmp_path / "part_1.json").read_text())["rows"]
    failures = {(row["step"], row["row"]): row.get("failed") for row in rows}
    wanted = {(step, row) for step, row, _ in gpu.EXPECTED}
    assert len(rows) == len(failures) and failures.keys() == {
        (step, row) for step, row in wanted if step in gpu.PARTS["1"]
    }
    assert failures["requests", "pieces"] is failures["training_step", "packed"] is None
    assert "not measured: cut after 3 s" == failures["requests", "both"]
    assert "not measured: exit 0" == failures["training_step", "packed, not compiled"]
    assert "not measured: exit 3" == failures["lend", "pool of 45 GiB"]
    assert {step for step, _ in wanted} == {step for part in gpu.PARTS.values() for step in part}


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


def test_decode_attention_as_it_was_gives_the_same_numbers():
    """More ranges and other pieces change the time alone; here by Triton's interpreter."""
    _, [given] = kernels.attention_case("tiny", 3, 320, "own", calls=1)
    q, k_pages, v_pages, table, lengths, ranges = given
    plan = table.cpu().numpy(), lengths.cpu().numpy(), kernels.PAGE, 8
    ranges = torch.from_numpy(sampler.with_empty_ranges(*plan)).to(q.device)
    assert len(ranges) == 2 * (3 // 2) + 3 and not ranges[:2].any()
    ours = kernels.mars_attention(q, k_pages, v_pages, table, lengths, ranges)
    torch.testing.assert_close(ours, kernels.gather_all(*given))


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
    monkeypatch.setattr(fidelity, "open_run", lambda checkpoint, options: None)
    monkeypatch.setattr(fidelity, "measure", lambda run, questions, group, draws: [])
    for module in (pages, swap, fidelity):
        monkeypatch.setattr(module, "save", lambda *given: None)
    opened = set()
    for (_, module, *arguments), needed in gpu.almanac_jobs(tmp_path):
        if module == "bench.pages":
            monkeypatch.setattr(sys, "argv", [module, *arguments])
            with pytest.raises(SystemExit, match="there is no record"):
                pages.main()
        else:
            assert {"bench.swap": swap, "bench.fidelity": fidelity}[module].main(arguments) == 0
            assert needed and written.issuperset(needed)
    assert len(written) == 2 * 14
    assert written.issuperset(run / "config.json" for run in opened)


def test_jobs_start_when_their_files_exist_and_are_cut_when_the_time_is_up(tmp_path, capfd):
    def write(name: str) -> list[str]:
        return ["-c", f"open({str(tmp_path / name)!r}, 'w')"]

    jobs = [(["-c", "import time; time.sleep(60)"], []), (write("b"), [tmp_path / "a"])]
    jobs += [(write("a"), []), (["-c", ""], [tmp_path / "never"])]
    gpu.run_almanac(tmp_path, 6, jobs)
    outcomes = {line.partition(",")[0] for line in capfd.readouterr().out.splitlines()}
    assert outcomes == {"exit 0: job 1", "exit 0: job 2", "cut: job 0", "not begun: job 3"}
    assert (tmp_path / "b").exists()
