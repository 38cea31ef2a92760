"""The choice of a kernel's form: the Triton form on CUDA, the PyTorch form everywhere else.

The environment variable MARS_KERNELS=reference or MARS_KERNELS=triton forces one of them. On CPU
tensors the Triton form runs in Triton's interpreter, which is slow and only for tests.
Tests: `pytest tests/test_kernels_decode.py tests/test_kernels_loss.py`.
"""

import os
from types import SimpleNamespace

from config import UserError

try:
    import triton
    import triton.language as tl

    jit = triton.jit
    # The decorator reads this setting once, when a kernel is defined.
    INTERPRETED = triton.knobs.runtime.interpret
except ImportError:  # Triton does not exist for macOS, for example.
    triton = None
    tl = SimpleNamespace(constexpr=None)  # for the kernels' annotations
    INTERPRETED = False

    def jit(kernel):
        return kernel


def use_triton(tensor) -> bool:
    """Whether a kernel called on `tensor` runs its Triton form.

    UserError if MARS_KERNELS has an unknown value, or is "triton" where Triton cannot run.
    """
    choice = os.environ.get("MARS_KERNELS", "")
    if choice == "":
        return tensor.is_cuda and triton is not None
    if choice == "reference":
        return False
    if choice != "triton" or triton is None or not (tensor.is_cuda or INTERPRETED):
        raise UserError(
            f"MARS_KERNELS is {choice!r}; set it to 'reference' or 'triton', or unset it. 'triton' "
            "needs the package triton, and for CPU tensors its interpreter (TRITON_INTERPRET=1)."
        )
    return True


def check(fits: bool, kernel: str, **inputs) -> None:
    """ValueError unless `fits`. It describes all inputs of the kernel."""
    if not fits:
        descriptions = [
            f"{name} {x.dtype} {list(x.shape)} with strides {x.stride()} on {x.device}"
            for name, x in inputs.items()
            if x is not None
        ]
        raise ValueError(f"{kernel}: its docstring does not allow " + ", ".join(descriptions))
