"""Chooses Triton's interpreter where there is no GPU, before any kernel is defined."""

import os
import signal

import torch

# A background job ignores Ctrl-C and hands that on; tests of Ctrl-C need the ordinary handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Fixtures: a loopback server, and pauses that are taken down instead of slept.
from loopback import server, waits  # noqa: E402, F401
