"""Custom kernels, one file each: a plain PyTorch `reference`, a Triton form, and the derivation of the gradient.

Every entry point chooses Triton on CUDA and the PyTorch form elsewhere. The environment variable MARS_KERNELS=reference
or MARS_KERNELS=triton forces one of them; Triton on CPU tensors means Triton's interpreter (slow; for tests).
"""
import os

from config import UserError

try:
    import triton
    import triton.language as tl
    jit, INTERPRETED = triton.jit, triton.knobs.runtime.interpret       # jit looks at it once, when a kernel is defined
except ImportError:                                  # no Triton for this machine, such as macOS
    triton, tl, INTERPRETED = None, None, False

    def jit(kernel):
        return kernel


def use_triton(tensor) -> bool:
    """Whether a kernel called on `tensor` runs its Triton form. UserError if MARS_KERNELS asks for the impossible."""
    choice = os.environ.get("MARS_KERNELS", "")
    if choice not in ("", "reference", "triton"):
        raise UserError(f"MARS_KERNELS is {choice!r}; set it to 'reference' or 'triton', or unset it.")
    if choice != "triton":
        return tensor.is_cuda and triton is not None and not choice
    if triton is None:
        raise UserError("MARS_KERNELS=triton needs the package triton, which is not installed; unset MARS_KERNELS.")
    if not (tensor.is_cuda or INTERPRETED):
        raise UserError("MARS_KERNELS=triton on CPU tensors needs Triton's interpreter: set TRITON_INTERPRET=1 too.")
    return True


from kernels.decode import add_rms_norm, qk_norm_rope_store, silu_mul      # noqa: E402  (the kernels import the above)
from kernels.grpo_loss import grpo_loss                                    # noqa: E402
from kernels.linear_loss import linear_grpo_loss, linear_logprob           # noqa: E402
from kernels.paged_attention import paged_attention                        # noqa: E402

__all__ = ["add_rms_norm", "grpo_loss", "linear_grpo_loss", "linear_logprob", "paged_attention", "qk_norm_rope_store",
           "silu_mul", "use_triton"]
