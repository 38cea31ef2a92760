"""The forms of a kernel that a machine can test, and a stand-in for what only CUDA has."""

import numpy
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import kernels
from kernels import varlen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def numbers(version):
    """(3, 6) of 3.6.0+git"""
    return tuple(int(part) for part in version.split(".")[:2])


def without_triton() -> str:
    """Why the Triton forms cannot run here; empty if they can."""
    if kernels.triton is None:
        return "Triton is not installed"
    old = numbers(kernels.triton.__version__) < (3, 7)
    if DEVICE == "cpu" and old and numbers(numpy.__version__) >= (2, 4):
        return "the interpreter of Triton 3.6 breaks with numpy 2.4 and newer"
    return ""


needs_triton = pytest.mark.skipif(bool(without_triton()), reason=without_triton() or "never")
FORMS = ["reference", pytest.param("triton", marks=needs_triton)]


def plain_varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """torch's varlen_attn, sequence by sequence: causal, and the last query sees all keys."""
    assert window_size == (-1, 0)
    assert enable_gqa == varlen.GROUPS_HEADS
    assert enable_gqa or k.shape[1] == v.shape[1] == q.shape[1]
    queries, keys = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert (max_q, max_k) == (max(queries), max(keys))
    out = []
    for query, key, value in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        ahead = len(key) - len(query)
        mask = torch.ones(len(query), len(key), dtype=torch.bool).tril(ahead)
        row = (x.transpose(0, 1)[None] for x in (query, key, value))
        mixed = scaled_dot_product_attention(*row, mask, scale=scale, enable_gqa=enable_gqa)
        out.append(mixed[0].transpose(0, 1))
    return torch.cat(out)


def plain_flash_attention(name):
    """flash_attn_varlen_func with the arguments' names that 4.0.0b36 and 2.8.3 have.

    Version 4 returns the log-sum-exps as well.
    """

    def attend(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal
    ):
        assert causal
        bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        options = {"scale": softmax_scale, "window_size": (-1, 0), "enable_gqa": True}
        out = plain_varlen_attn(q, k, v, *bounds, **options)
        return (out, None) if name == "flash_attn_4" else out

    return attend


def use_library(library, monkeypatch):
    """Lets kernels.varlen_attention find this library, on Hopper, in a plain form."""
    wanted = library.replace("-", "_").replace(" ", "_")
    for name in ("flash_attn_4", "flash_attn_2"):
        form = plain_flash_attention(name) if name == wanted else None
        monkeypatch.setattr(varlen, name, form)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(varlen, "varlen_attn", plain_varlen_attn)
    monkeypatch.setattr(varlen, "GROUPS_HEADS", library != "torch 2.11")
