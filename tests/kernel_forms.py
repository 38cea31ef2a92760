"""The two forms of a kernel that a machine can test, for the tests of kernels/."""

import numpy
import pytest
import torch

import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def numbers(version):
    """(3, 6) of 3.6.0+git"""
    return tuple(int(part) for part in version.split(".")[:2])


def without_triton() -> str:
    """Why the Triton forms cannot run here; empty if they can."""
    if kernels.triton is None:
        return "Triton is not installed"
    old = numbers(kernels.triton.__version__) < (3, 7)
    if DEVICE == "cpu" and old and numbers(numpy.__version__) >= (2, 4):
        return "the interpreter of Triton 3.6 breaks with numpy 2.4 and newer"
    return ""


needs_triton = pytest.mark.skipif(bool(without_triton()), reason=without_triton() or "never")
FORMS = ["reference", pytest.param("triton", marks=needs_triton)]
