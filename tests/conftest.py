"""Without a GPU, Triton kernels run in Triton's interpreter, which must be chosen before any kernel is defined."""
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
