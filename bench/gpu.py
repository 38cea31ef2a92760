"""The measurements that need a GPU.

    python -m bench.gpu --out FOLDER                all steps, about nine minutes
    python -m bench.gpu --step decode requests      some of them

Each step writes its rows to FOLDER/gpu_STEP.json. The tests that need a GPU are another command:
`python -m pytest -m gpu tests/test_kernels_*.py tests/test_policy.py tests/test_sampler.py`.

The machine needs torch ≥ 2.11, triton and transformers ≥ 5.17; a peer that it lacks becomes a row
that says so. docs/LOG.md (2026-11-26) says what ran and what failed. Several GPUs and long runs
have never been tried. Tests: pytest tests/test_bench_gpu.py
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are defined

from bench import common, kernels, sampler, train_step  # noqa: E402

STEPS = {
    "loss": kernels.speed,
    "accuracy": kernels.accuracy,
    "attention": kernels.attention,
    "decode": sampler.decode,
    "requests": sampler.requests,
    "training_step": train_step.steps,
}

if __name__ == "__main__":
    common.main("gpu", __doc__, STEPS, gpu=True)
