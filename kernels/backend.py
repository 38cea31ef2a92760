"""Which form of a kernel runs: the Triton form on CUDA, the PyTorch form everywhere else.

The environment variable MARS_KERNELS=reference or MARS_KERNELS=triton forces one of them. Triton on
CPU tensors means Triton's interpreter, which is slow and meant for tests.
"""

import os

from config import UserError

try:
    import triton
    import triton.language as tl

    jit = triton.jit
    # The decorator looks at this setting once, when a kernel is defined.
    INTERPRETED = triton.knobs.runtime.interpret
except ImportError:  # There is no Triton for this machine, such as macOS.
    triton = None
    tl = None
    INTERPRETED = False

    def jit(kernel):
        return kernel


def use_triton(tensor) -> bool:
    """Whether a kernel called on `tensor` runs its Triton form.

    UserError if MARS_KERNELS has an unknown value or asks for what this machine cannot do.
    """
    choice = os.environ.get("MARS_KERNELS", "")
    if choice == "":
        return tensor.is_cuda and triton is not None
    if choice == "reference":
        return False
    if choice != "triton":
        raise UserError(
            f"MARS_KERNELS is {choice!r}; set it to 'reference' or 'triton', or unset it."
        )
    if triton is None:
        raise UserError(
            "MARS_KERNELS=triton needs the package triton, which is not installed; "
            "unset MARS_KERNELS."
        )
    if not (tensor.is_cuda or INTERPRETED):
        raise UserError(
            "MARS_KERNELS=triton on CPU tensors needs Triton's interpreter: "
            "set TRITON_INTERPRET=1 too."
        )
    return True


def misfit(kernel: str, **inputs) -> ValueError:
    """The error of a kernel whose inputs do not fit together: it names each one as it came."""
    described = []
    for name, x in inputs.items():
        if x is None:
            described.append(f"{name} None")
            continue
        dtype = str(x.dtype).removeprefix("torch.")
        layout = "" if x.is_contiguous() else f" with strides {x.stride()}"
        described.append(f"{name} {dtype} {list(x.shape)}{layout} on {x.device}")
    return ValueError(f"{kernel}: its docstring does not allow " + ", ".join(described))
