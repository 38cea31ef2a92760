"""Decode steps over static buffers: each size of batch is one CUDA graph, captured at the start.

A decode step of a small batch launches some 300 kernels, and launching them takes the host
longer than running them takes the GPU. A CUDA graph replays them with one call, but only for
fixed shapes and addresses. So batches are padded to a few sizes, and a block table has room for
the whole pool: the kernels read a row's pages up to its length, however wide the table is.

Padding rows have length 0 and slot -1: they read nothing and write nothing.
Where nothing can be captured, the same padded batches run without a graph, for tests.
"""

from functools import partial

import torch
from torch import Tensor

import kernels
from kernels.paged import LEVELS, RUN_FIELDS
from sampler.model import Model
from sampler.plan import Batch


def can_capture(pool: Tensor) -> bool:
    """Whether a graph can hold a decode step: the kernels' plain forms read values on the host."""
    return pool.is_cuda and kernels.use_triton(pool)


class Graphs:
    """`decode` of a model, padded to the smallest of a few sizes."""

    def __init__(self, model: Model, pool: Tensor, max_rows: int):
        self.model = model
        self.pool = pool
        sizes = [1, 2, 4, 8, 16, *range(32, max_rows + 32, 32)]
        sizes = sorted({min(size, max_rows) for size in sizes})
        self.buffers = {size: self.make_buffers(size) for size in sizes}
        self.captured: dict[int, tuple] = {}  # rows -> (graph, its hidden states)
        if not can_capture(pool):
            return
        # Every size is captured before the first request, since a capture waits for the whole
        # device. The largest goes first: the graphs run one at a time, so the others reuse its
        # memory.
        memory = None
        for size in reversed(sizes):
            graph, hidden = self.capture(self.buffers[size], memory)
            self.captured[size] = graph, hidden
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
            runs=short(LEVELS * (size // 2) + size, RUN_FIELDS),
        )

    def decode(self, batch: Batch) -> Tensor:
        """model.decode(batch) in the smallest size that holds the batch."""
        rows, width = batch.block_table.shape
        size = next(size for size in self.buffers if size >= rows)
        static = self.buffers[size]
        for name, padding in (("ids", 0), ("positions", 0), ("slots", -1), ("lengths", 0)):
            buffer = getattr(static, name)
            buffer[:rows] = getattr(batch, name)
            buffer[rows:] = padding
        static.block_table[:rows, :width] = batch.block_table
        if batch.runs is not None:
            static.runs.zero_()
            shared = len(batch.runs) - rows
            static.runs[:shared] = batch.runs[:shared]
            own = static.runs[-size:]
            own[:rows] = batch.runs[shared:]
        if not self.captured:
            static.spans = batch.spans + [0] * (size - rows)
            static.cache = {}
            return self.model.decode(static, self.pool)[:rows]
        graph, hidden = self.captured[size]
        graph.replay()
        # Logits are made outside the graphs: each graph would keep [size, V] of its own.
        return self.model.logits(hidden[:rows])

    def capture(self, static: Batch, memory) -> tuple:
        """(graph, its hidden states) over the buffers `static`."""
        # Two runs compile the kernels, which a capture cannot do.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(2):
                self.model.hidden(static, self.pool)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph, pool=memory):
            hidden = self.model.hidden(static, self.pool)
        return graph, hidden
