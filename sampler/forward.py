"""The model's forward over pages, for engine.py: `make_forward`, and the names of its parts.

attention.py       Batch, and attention over pages on each device
decoder.py         our own forward of Qwen2, Qwen3 and Llama
stock.py           the stock modules of any other architecture
architectures.py   what is refused
graphs.py          CUDA graphs
"""

import torch

from sampler.attention import (
    Batch,
    attention,
    cuda_decode,
    row_attention,
    sparse_decode,
)
from sampler.attention import group_by_length as similar
from sampler.attention import packed_attention as varlen_prefill
from sampler.decoder import OwnForward, rotate_and_store, unsupported
from sampler.graphs import Buckets
from sampler.stock import StockForward

gather_decode = row_attention
row_prefill = row_attention

__all__ = [
    "Batch",
    "Buckets",
    "OwnForward",
    "StockForward",
    "attention",
    "cuda_decode",
    "gather_decode",
    "make_forward",
    "rotate_and_store",
    "row_prefill",
    "similar",
    "sparse_decode",
    "unsupported",
    "varlen_prefill",
]


def make_forward(
    model, dtype: torch.dtype, device: torch.device, own: bool = True
) -> OwnForward | StockForward:
    """The forward of `model` over pages: our own where it is right, else the stock modules.

    own=False asks for the stock modules. ValueError in one sentence for a model that neither
    can run.
    """
    why_stock = unsupported(model) if own else "asked for"
    kind = StockForward if why_stock else OwnForward
    forward = kind(model, dtype, device)
    forward.why_stock = why_stock
    return forward
