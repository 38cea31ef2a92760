"""The model's forward over pages: our own where it is right, else the stock modules.

attention.py       Batch, and attention over pages on each device
decoder.py         our own forward of Qwen2, Qwen3 and Llama
stock.py           the stock modules of any other architecture
architectures.py   what is refused
graphs.py          CUDA graphs

Tests: pytest tests/test_decoder.py
"""

import torch

from sampler.model import OwnForward, unsupported
from sampler.stock import StockForward


def make_forward(
    model, dtype: torch.dtype, device: torch.device, own: bool = True
) -> OwnForward | StockForward:
    """The forward of `model` over pages; its `why_stock` says why it is not our own.

    own=False asks for the stock modules. ValueError in one sentence for a model that neither
    can run.
    """
    why_stock = "asked for"
    if own:
        why_stock = unsupported(model)
    kind = OwnForward
    if why_stock:
        kind = StockForward
    forward = kind(model, dtype, device)
    forward.why_stock = why_stock
    return forward
