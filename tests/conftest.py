"""Before any test: Triton's interpreter where there is no GPU. And what many tests share."""

import os
import signal

import torch

# A background job ignores Ctrl-C and hands that on; tests of Ctrl-C need the ordinary handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402

# Fixtures: a loopback server, and pauses that are noted instead of slept.
from loopback import server, waits  # noqa: E402, F401


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A base model that speaks the toy's language after 160 of its 700 training steps.

    Modules that need less have a `base` of their own.
    """
    from toy import base_model

    return base_model.build(tmp_path_factory.mktemp("base"), threads=1, steps=(120, 40))
