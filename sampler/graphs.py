"""Decode steps over static buffers: each batch size is one CUDA graph, captured at the start.

A decode step of a small batch launches about 300 kernels. The host needs more time to launch them
than the GPU needs to run them. A CUDA graph replays them with one call, but only for fixed shapes
and addresses. So batches are padded to a few sizes, and a block table is wide enough for the whole
pool. The width costs no time: the kernels read a row's pages up to its length. Each size has a
second graph for batches whose rows share no pages. It launches nothing for shared ranges.

Padding rows have length 0 and slot -1: they read nothing and write nothing.
Without CUDA the same padded batches run without a graph, in pytest tests/test_sampler.py.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import kernels
from kernels.paged import LEVELS, RANGE_FIELDS
from sampler.model import Model
from sampler.plan import Batch


def can_capture(pool: Tensor) -> bool:
    """Whether a graph can hold a decode step. The kernels' plain forms read values on the host."""
    return pool.is_cuda and kernels.use_triton(pool)


class Graphs:
    """`decode` of a model, padded to the smallest of a few sizes."""

    def __init__(self, model: Model, pool: Tensor, max_rows: int):
        self.model = model
        self.pool = pool
        sizes = [1, 2, 4, 8, 16, *range(32, max_rows + 32, 32)]
        sizes = sorted({min(size, max_rows) for size in sizes})
        # The keys are (number of rows, whether rows share pages).
        self.buffers: dict[tuple[int, bool], Batch] = {}
        self.captured: dict[tuple[int, bool], tuple] = {}  # (graph, its hidden states [rows, D])
        for size in sizes:
            batch = self.make_buffers(size)
            self.buffers[size, False] = replace(batch, kv_ranges=batch.kv_ranges[-size:])
            if size > 1:
                self.buffers[size, True] = batch
        if not can_capture(pool):
            return
        # Every size is captured before the first request, since a capture waits for the whole
        # device. The largest size is first. The others use its memory: no two graphs run at once.
        memory = None
        for key in reversed(self.buffers):
            graph, hidden = self.capture(self.buffers[key], memory)
            self.captured[key] = graph, hidden
            memory = graph.pool()

    def make_buffers(self, size: int) -> Batch:
        """A batch of `size` padding rows."""
        long = partial(torch.zeros, dtype=torch.int64, device=self.pool.device)
        short = partial(torch.zeros, dtype=torch.int32, device=self.pool.device)
        return Batch(
            ids=long(size),
            positions=long(size),
            slots=long(size) - 1,
            block_table=short(size, self.pool.shape[2]),
            lengths=short(size),
            kv_ranges=short(LEVELS * (size // 2) + size, RANGE_FIELDS),
        )

    def decode(self, batch: Batch) -> Tensor:
        """The logits [B, V] of model.decode(batch), computed in the smallest size that fits."""
        rows, width = batch.block_table.shape
        shared = 0 if batch.kv_ranges is None else len(batch.kv_ranges) - rows
        key = next(key for key in self.buffers if key[0] >= rows and key[1] == bool(shared))
        size, static = key[0], self.buffers[key]
        for name, padding in (("ids", 0), ("positions", 0), ("slots", -1), ("lengths", 0)):
            buffer = getattr(static, name)
            buffer[:rows] = getattr(batch, name)
            buffer[rows:] = padding
        static.block_table[:rows, :width] = batch.block_table
        if batch.kv_ranges is not None:
            static.kv_ranges.zero_()
            static.kv_ranges[:shared] = batch.kv_ranges[:shared]
            own = static.kv_ranges[-size:]
            own[:rows] = batch.kv_ranges[shared:]
        if not self.captured:
            static.host_lengths = batch.host_lengths + [0] * (size - rows)
            static.plan = None
            return self.model.decode(static, self.pool)[:rows]
        graph, hidden = self.captured[key]
        graph.replay()
        # Logits are computed outside the graphs, because each graph would keep its own [size, V].
        return self.model.logits(hidden[:rows])

    def capture(self, static: Batch, memory) -> tuple:
        """(graph, its hidden states [rows, D]) over the buffers `static`."""
        # Two steps before the capture compile the kernels, which is impossible within it.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(2):
                self.model.hidden(static, self.pool)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph waits for the device first. During the capture a thread of NCCL may query
        # its events, which by default would break the capture.
        options = {"pool": memory, "capture_error_mode": "thread_local"}
        with torch.no_grad(), torch.cuda.graph(graph, **options):
            hidden = self.model.hidden(static, self.pool)
        return graph, hidden
