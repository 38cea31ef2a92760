"""How a run ends that cannot go on: one sentence, exit code 2."""

import pytest
import torch
from test_mars import SMALL

import mars
import train


def too_large() -> None:
    """What PyTorch raises on a CPU, from PyTorch itself."""
    torch.empty(2**60, dtype=torch.uint8)


def out_of_memory_on_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


@pytest.mark.parametrize("fault", [too_large, out_of_memory_on_a_gpu])
def test_out_of_memory_within_a_step_names_what_to_lower(
    base, tmp_path, monkeypatch, capsys, fault
):
    monkeypatch.setattr(train, "train_step", lambda run, step: fault())
    line = ["--model", str(base), "--runs", str(tmp_path), "--name", "x", *map(str, SMALL)]
    assert mars.main(line) == 2
    said = capsys.readouterr().err
    assert said.startswith("mars: out of memory") and said.count("\n") == 1
    assert said.index("--micro_tokens") < said.index("--kv_tokens") < said.index("--resume")


def test_any_other_fault_of_the_program_is_no_sentence(base, tmp_path, monkeypatch):
    def broken(run, step):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(train, "train_step", broken)
    line = ["--model", str(base), "--runs", str(tmp_path), "--name", "x", *map(str, SMALL)]
    with pytest.raises(RuntimeError, match="shapes differ"):
        mars.main(line)
