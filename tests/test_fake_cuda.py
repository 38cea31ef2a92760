"""Runs the tests of tests/helpers/fake_cuda.py in a process of its own; see there."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels

ROOT = Path(__file__).parent.parent


def why_not() -> str:
    """Why fake CUDA tensors cannot be had here; empty if they can."""
    if torch.version.cuda is None:
        return "this build of torch knows no CUDA"
    if kernels.triton is None:
        return "Triton is not installed"
    if torch.cuda.is_available():
        return "the GPU here runs the real thing"
    return ""


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")
def test_the_host_waits_for_nothing_unplanned():
    command = [sys.executable, "-m", "pytest", "tests/helpers/fake_cuda.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
