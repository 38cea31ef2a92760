"""The day a GPU is there, as far as a CPU can tell: rehearsed, and by arithmetic."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import launch

from bench import attention, common, gpu
from bench import kernels as loss
from bench import sampler as bench

ROOT = Path(__file__).parent.parent
CARDS = {"80 GB": 78 * 2**30, "H200": 139 * 2**30}  # bytes that CUDA gives of them
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
STEPS = {name: command for steps in gpu.PARTS.values() for name, (_, command) in steps.items()}


# ---------------------------------------------------------------- parts


def test_each_part_fits_nine_minutes_and_eight_files():
    for steps in gpu.PARTS.values():
        assert sum(seconds for seconds, _ in steps.values()) <= gpu.PART_SECONDS < 540
        measured = [name for name, (_, command) in steps.items() if command[0] == "bench.gpu"]
        assert len(measured) + 2 <= 8  # part_N.json and part_N.log


def test_every_step_is_a_test_run_or_measured():
    for name, command in STEPS.items():
        if command[0] == "pytest":
            assert all((ROOT / x).exists() for x in command if x.endswith(".py"))
        else:
            assert command == ["bench.gpu", "--step", name]
    assert {name for name, command in STEPS.items() if command[0] == "bench.gpu"} == set(
        gpu.MEASURED
    )


@NO_GPU
@pytest.mark.parametrize("name", gpu.MEASURED)
def test_a_step_is_rehearsed_by_the_lines_of_the_day(name, tmp_path, monkeypatch):
    """No row fails but a peer's that is not installed; ours were predicted before."""
    if name == "toy":
        pytest.importorskip("bm25s")  # the toy's search
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seen = []
    save = common.save

    def keep(name, command, rows, *given, **more):
        seen.append(json.dumps(rows))
        return save(name, command, rows, *given, **more)

    def forked(line, *, cwd, check):
        _, script, *options = line
        assert launch.launch(cwd / script, *options, log=tmp_path / "log", world=1) == 0

    monkeypatch.setattr(common, "save", keep)
    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(run=forked))
    assert gpu.run_step(name, tmp_path, tiny=True) == []
    rows = json.loads((tmp_path / f"gpu_{name}.json").read_text())["rows"]
    assert rows
    predicted = [row for row in rows if any(key.startswith("predicted") for key in row)]
    for row in predicted:
        before = {k: v for k, v in row.items() if k.startswith("predicted")}
        assert any(json.dumps(before)[1:-1] in text for text in seen)
    if name == "card":
        assert {"copy TB/s", "product TFLOP/s", "decode, share of copy"} <= rows[-1].keys()
    elif not name.startswith("smollm2"):  # a rehearsal resolves its options only
        assert predicted


def test_a_run_is_one_row_with_its_first_step_apart():
    lines = []
    for step, seconds in enumerate((9.0, 1.0, 2.0, 3.0)):
        line = {"reward": 0.5, "seconds_rollout": seconds, "seconds_train": seconds / 2}
        lines.append(line | {"tokens_per_second": 100.0, "mismatch_kl": 1e-4 * step})
    lines[-1] |= {"eval_accuracy_before": 0.1, "eval_accuracy": 0.2}
    row = gpu.summary(lines)
    assert row["s rollout, first"] == 9 and row["s rollout"] == 2 and row["s train"] == 1
    assert row["largest mismatch_kl"] == pytest.approx(3e-4)
    assert row["eval_accuracy_before"] == 0.1 and row["eval_accuracy"] == 0.2


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
    outcomes = [
        row["outcome"] for row in json.loads((tmp_path / "part_7.json").read_text())["rows"]
    ]
    assert outcomes[0] == "failed, exit 1"
    assert re.fullmatch(r"cut after \d+ s", outcomes[1])
    assert outcomes[2] == "ok"
    assert half.read_text() == "row"
    assert "no_such_module" in (tmp_path / "part_7.log").read_text()


@NO_GPU
@pytest.mark.parametrize("given", [["--part", "1"], ["--card"], ["--step", "toy"]])
def test_without_a_gpu_it_says_so_and_ends_with_2(given, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu", *given])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2 and "no CUDA device" in capsys.readouterr().err


# ---------------------------------------------------------------- memory, by arithmetic


@pytest.mark.parametrize("card", CARDS)
def test_what_is_wanted_first_fits_the_card(card):
    free = 0.98 * CARDS[card]
    assert loss.case_bytes(*loss.SHAPES["full"]["gpu"]) < free
    shapes = attention.SIZES["full"]["shapes"]
    calls = attention.SIZES["full"]["calls"]
    assert all(2 * attention.case_bytes(shape, calls)[1] < free for shape in shapes)
    for shape, tokens in ((bench.QWEN3_8B, 64 * (4096 + 304)), (bench.QWEN3_0_6B, 256 * 1200)):
        assert bench.needed_bytes(shape, tokens) < free


def test_page_tables_take_the_bytes_that_are_counted():
    shape = ("tiny", 16, 3, 100, True)
    q, k_pages, v_pages, tables, lengths = attention.make_case(shape, calls=2)
    read, total = attention.case_bytes(shape, calls=2)
    assert read == int(lengths.sum()) * 2 * 2 * 16 * 2
    assert tables.shape[:2] == (2, 3) and sorted(tables.flatten()) == list(range(len(k_pages)))
    assert k_pages.nbytes + v_pages.nbytes <= total


# ---------------------------------------------------------------- what travels


def test_pieces_come_together_whole_and_damage_is_seen(tmp_path):
    contents = {"large-1.0-py3-none-any.whl": bytes(range(250)), "small-2-py3-none-any.whl": b"s"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    gpu.cut(tmp_path, size=20)
    pieces = sorted(tmp_path.glob("large*"))
    assert len(pieces) == 13 and max(piece.stat().st_size for piece in pieces) == 20
    assert {wheel.name: wheel.read_bytes() for wheel in gpu.join(tmp_path)} == contents
    (tmp_path / "large-1.0-py3-none-any.whl").unlink()
    pieces[5].write_bytes(b"x" * 20)
    with pytest.raises(ValueError, match="large-1.0"):
        gpu.join(tmp_path)
    pieces[5].unlink()
    with pytest.raises(ValueError, match="large-1.0"):
        gpu.join(tmp_path)


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
    arguments = [*STEPS["gpu_tests"][1:], "--collect-only", "-q"]
    code = launch.launch(script, *arguments, log=tmp_path / "log", world=1)
    said = (tmp_path / "log").read_text()
    assert code == 0, said[-3000:]
    for name in ("test_kernels_loss", "test_kernels_decode", "test_sampler", "test_policy"):
        assert name in said
