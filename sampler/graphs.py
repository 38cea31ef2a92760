"""Decode steps over static buffers: on CUDA each size of batch is one graph, captured at the start.

A decode step of a small batch launches some 300 kernels, and launching them takes the host
longer than running them takes the GPU. A CUDA graph replays them with one call, but only for
fixed shapes and addresses. So batches are padded to a few sizes, and a block table has room for
the whole pool: the kernels read a row's pages up to its length, however wide the table is.

Padding rows have length 0 and slot -1: they read nothing and write nothing.
Off CUDA, the same padded batches run without a graph, for tests.
"""

import torch
from torch import Tensor

import kernels
from sampler.attention import Batch
from sampler.model import OwnForward


class Buckets:
    """`decode` of a forward, padded to the smallest of a few sizes."""

    def __init__(self, forward, pool: Tensor, max_rows: int):
        self.forward = forward
        self.pool = pool
        sizes = [1, 2, 4, 8, 16, *range(32, max_rows + 32, 32)]
        self.sizes = sorted({min(size, max_rows) for size in sizes})
        self.captures = self.may_capture()
        self.buffers = {size: self.make_buffers(size) for size in self.sizes}
        self.graphs: dict[int, tuple] = {}  # rows -> (graph, its hidden states)
        if self.captures:
            self.capture_all()

    def may_capture(self) -> bool:
        """Whether decoding can be captured.

        The plain forms and the stock modules look at values on the host, which a graph cannot do.
        """
        own = isinstance(self.forward, OwnForward)
        return own and self.pool.is_cuda and kernels.use_triton(self.pool)

    def make_buffers(self, size: int) -> Batch:
        """A batch of `size` padding rows."""
        device = self.pool.device
        pages = self.pool.shape[2]
        return Batch(
            ids=torch.zeros(size, dtype=torch.int64, device=device),
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            slots=torch.full((size,), -1, dtype=torch.int64, device=device),
            table=torch.zeros(size, pages, dtype=torch.int32, device=device),
            lengths=torch.zeros(size, dtype=torch.int32, device=device),
        )

    def decode(self, batch: Batch, pool: Tensor) -> Tensor:
        """forward.decode(batch, pool) in the smallest bucket that holds the batch."""
        rows, width = batch.table.shape
        size = next(size for size in self.sizes if size >= rows)
        static = self.buffers[size]
        for name, padding in (("ids", 0), ("positions", 0), ("slots", -1), ("lengths", 0)):
            buffer = getattr(static, name)
            buffer[:rows] = getattr(batch, name)
            buffer[rows:] = padding
        static.table[:rows, :width] = batch.table
        if not self.captures:
            static.spans = batch.spans + [0] * (size - rows)
            static.plans = {}
            return self.forward.decode(static, pool)[:rows]
        graph, hidden = self.graphs[size]
        graph.replay()
        # Logits are made outside the graphs: each graph would keep [size, V] of its own.
        return self.forward.logits(hidden[:rows])

    def capture_all(self) -> None:
        """Captures every size before the first request, since a capture waits for the whole device.

        The largest goes first. The graphs run one at a time, so the others reuse its memory.
        """
        memory = None
        for size in reversed(self.sizes):
            graph, hidden = self.capture(self.buffers[size], memory)
            self.graphs[size] = graph, hidden
            memory = graph.pool()

    def capture(self, static: Batch, memory) -> tuple:
        """(graph, its hidden states) over the buffers `static`."""
        # Two runs compile the kernels, which a capture cannot do.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(2):
                self.forward.hidden(static, self.pool)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph, pool=memory):
            hidden = self.forward.hidden(static, self.pool)
        return graph, hidden
