"""Runs the tests of tests/helpers/fake_cuda.py in a process of its own; see there."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels

ROOT = Path(__file__).parent.parent
missing = torch.version.cuda is None or kernels.triton is None
reason = "fake CUDA tensors need a build of torch with CUDA, Triton, and no GPU"


@pytest.mark.skipif(missing or torch.cuda.is_available(), reason=reason)
def test_the_host_waits_for_nothing_unplanned():
    command = [sys.executable, "-m", "pytest", "tests/helpers/fake_cuda.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
