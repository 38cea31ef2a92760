"""Before any test: Triton's interpreter where there is no GPU. And what many tests share."""

import os
import signal
from pathlib import Path

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test waits for a hub
# A background job ignores Ctrl-C and hands that on; tests of Ctrl-C need the ordinary handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # else recipes take more
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# A property does not fail because the machine is busy.
settings.register_profile("mars", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mars")

from helpers import launch  # noqa: E402

# Fixtures: a loopback server, and pauses that are noted instead of slept.
from loopback import server, waits  # noqa: E402, F401

# With --dist loadfile a file is one process's, so the longest ones begin first.
LONGEST = [f"test_{name}.py" for name in ("compiled_layers", "mars", "python_tool", "vllm")]


def pytest_configure(config):
    launch.choose_route()
    config.option.loadscopereorder = False  # pytest-xdist would begin the files with most tests


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="module", params=["products by PyTorch", "products by oneDNN"])
def products_by(request):
    """Either route of kernels/products.py, whatever processor this is; in started ranks as well."""
    from kernels import products

    by_onednn = request.param == "products by oneDNN"
    if by_onednn and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("PyTorch has no oneDNN here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "onednn_is_faster", lambda: by_onednn)
        patch.setenv("TEST_BY_ONEDNN", str(by_onednn))
        yield request.param


@pytest.fixture(scope="session")
def base():
    """A base model that speaks the toy's language after 80 of its 720 training steps.

    It is kept in .cache/tests under a hash of all that it follows from. No test may change it.
    """
    from toy import base_model

    cache = Path(__file__).parent.parent / ".cache" / "tests"
    return base_model.build(cache, steps=(60, 20))


@pytest.fixture(scope="session", autouse=True)
def draw():
    """The function that draws curves. In tests runs leave them empty, since drawing is slow."""
    from plumbing import curves

    real = curves.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw", lambda *panels, **columns: b"")
        yield real
