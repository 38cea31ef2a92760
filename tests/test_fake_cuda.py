"""Runs the tests of tests/helpers/fake_cuda.py in a process of its own; see there."""

from pathlib import Path

import pytest
import torch
from helpers.launch import launch

import kernels

missing = torch.version.cuda is None or kernels.triton is None
reason = "fake CUDA tensors need a build of torch with CUDA, Triton, and no GPU"


@pytest.mark.skipif(missing or torch.cuda.is_available(), reason=reason)
def test_the_host_waits_for_nothing_unplanned(tmp_path):
    script = Path(__file__).parent / "helpers" / "fake_cuda.py"
    assert launch(script, log=tmp_path / "log", world=1) == 0
