"""The plan of one step: the scheduler's decisions as arrays, in the form that the device needs.

A slot is the place of one token's key and value in the pool: page · page size + offset in the page.
Shapes: B rows, T tokens, W pages of the longest row.
Tests: pytest tests/test_sampler.py tests/test_attention.py
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from kernels.paged import LEVELS, RANGE_FIELDS
from sampler.draws import hash64, uniform
from sampler.request import Request

# On CUDA shared pages are read together only if that saves at least this many tokens. By
# arithmetic, one more split for each of eight rows costs as much: 8 · TOKENS_PER_START of
# kernels/paged.py.
LEAST_TOKENS = 256
# (source, target) pages, to be copied in order: a later source may be an earlier target.
Copies = list[tuple[int, int]]
Array = TypeVar("Array", np.ndarray, Tensor)  # on the host, on the device
# (request, begin, end): the tokens begin:end of its conversation are to be prefilled.
PrefillSpan = tuple[Request, int, int]


class Rows:
    """The state of each running row as arrays, so that numpy plans hundreds of rows at once.

    While a step is unread, `length` and `drawn` are one ahead of the request's tokens.
    """

    def __init__(self, count: int, pages: int):
        self.free = list(range(count - 1, -1, -1))
        self.block_table = np.zeros((count, pages), np.int32)
        self.length = np.zeros(count, np.int64)  # tokens, with the one that it feeds next
        self.drawn = np.zeros(count, np.int64)  # new tokens so far
        self.seed = np.zeros(count, np.uint64)
        self.temperature = np.zeros(count, np.float32)
        self.top_p = np.ones(count, np.float32)
        self.fresh = np.zeros(count, bool)  # The row has not decoded yet: the host feeds `newest`.
        self.newest = np.zeros(count, np.int64)

    def enter(self, request: Request) -> None:
        """Gives the request a row. Its conversation must have pages for all its tokens."""
        conversation = request.conversation
        row = self.free.pop()
        request.row = row
        self.block_table[row, : len(conversation.block_table)] = conversation.block_table
        self.length[row] = len(conversation.tokens)
        self.drawn[row] = len(request.tokens)
        self.seed[row] = hash64(request.seed)
        self.temperature[row] = request.temperature
        self.top_p[row] = request.top_p
        self.fresh[row] = True
        self.newest[row] = conversation.tokens[-1]

    def leave(self, request: Request) -> None:
        self.free.append(request.row)
        request.row = None


@dataclass
class Batch(Generic[Array]):
    """Tokens that go through the model together, and the slots of their keys and values.

    The scheduler plans it in numpy arrays, and `to` makes them tensors on the device.
    Decode: a row has one token; rows that share pages are neighbours, and padding rows come last.
    Prefill: the tokens starts[b]:starts[b + 1] of the batch are the last of the lengths[b] tokens
    of row b.
    """

    ids: Array | None  # int64 [T]; None while only the device knows them
    positions: Array  # int64 [T]
    slots: Array  # int64 [T]; -1 stores nothing
    block_table: Array  # int32 [B, W]
    lengths: Array  # int32 [B]: tokens of each row, with those of this batch; 0 for padding
    starts: list[int] = field(default_factory=list)  # B + 1 numbers; empty when decoding
    host_lengths: list[int] = field(default_factory=list)  # as `lengths`; empty in a CUDA graph
    kv_ranges: Array | None = None  # int32 [R + B, 5], for kernels.paged_attention on CUDA
    plan: Any = None  # attention's, made once for all layers

    def to(self, device: torch.device) -> "Batch[Tensor]":
        names = ("ids", "positions", "slots", "block_table", "lengths", "kv_ranges")
        arrays = {name: getattr(self, name) for name in names}
        tensors = {name: to_device(x, device) for name, x in arrays.items() if x is not None}
        return replace(self, **tensors)


@dataclass
class Decode:
    """One new token for each row of `batch`, and the numbers that decide its draw.

    fresh, newest: the rows that begin to decode, and the token that each of them feeds. Every other
    row feeds the token that the device sampled for it in the step before.
    """

    batch: Batch[np.ndarray]
    requests: list[Request]
    rows: np.ndarray  # int64 [B]
    uniforms: np.ndarray  # fp64 [B]: the numbers that decide the draws
    temperature: np.ndarray  # fp32 [B]
    top_p: np.ndarray  # fp32 [B]
    fresh: np.ndarray  # int64
    newest: np.ndarray  # int64


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor on the device; the host does not wait for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def plan_prefill(spans: list[PrefillSpan], state: Rows, page_size: int) -> Batch[np.ndarray]:
    """The batch that prefills these tokens, row by row."""
    rows = [request.row for request, _, _ in spans]
    counts = [end - begin for _, begin, end in spans]
    lengths = [end for _, _, end in spans]
    block_table = state.block_table[rows, : -(-max(lengths) // page_size)]
    tokens = [request.conversation.tokens[begin:end] for request, begin, end in spans]
    positions = np.concatenate([np.arange(begin, end) for _, begin, end in spans])
    row = np.repeat(np.arange(len(spans)), counts)
    page = block_table[row, positions // page_size].astype(np.int64)
    return Batch(
        ids=np.concatenate(tokens),
        positions=positions,
        slots=page * page_size + positions % page_size,
        block_table=block_table,
        lengths=np.array(lengths, np.int32),
        starts=np.cumsum([0] + counts).tolist(),
        host_lengths=lengths,
    )


def plan_decode(requests: list[Request], state: Rows, page_size: int) -> Decode:
    """The next token of each of these requests. Their rows count as fresh no longer."""
    rows = np.array([request.row for request in requests])
    width = -(-int(state.length[rows].max()) // page_size)
    # Rows are sorted by their pages, so that rows with the same first pages are neighbours. Two
    # rows differ at the latest in the last page of the shorter one, so stale numbers after it do
    # not matter.
    tables = [table.tobytes() for table in state.block_table[rows, :width]]
    order = sorted(range(len(rows)), key=tables.__getitem__)
    rows = rows[order]
    lengths = state.length[rows]
    positions = lengths - 1
    block_table = state.block_table[rows, :width]
    page = block_table[np.arange(len(rows)), positions // page_size].astype(np.int64)
    batch = Batch(
        ids=None,
        positions=positions,
        slots=page * page_size + positions % page_size,
        block_table=block_table,
        lengths=lengths.astype(np.int32),
        host_lengths=lengths.tolist(),
    )
    fresh = rows[state.fresh[rows]]
    state.fresh[fresh] = False
    return Decode(
        batch=batch,
        requests=[requests[i] for i in order],
        rows=rows,
        uniforms=uniform(state.seed[rows], state.drawn[rows]),
        temperature=state.temperature[rows],
        top_p=state.top_p[rows],
        fresh=fresh,
        newest=state.newest[fresh],
    )


# ---------------------------------------------------------------- pages that rows share


@dataclass
class SharedPages:
    """Rows begin:end of a batch have the same pages first:last in their block tables.

    level: the number of other SharedPages before these in the same rows' tables.
    """

    begin: int
    end: int
    first: int
    last: int
    level: int


def find_shared_pages(
    block_table: np.ndarray, least_pages: float, levels: float = math.inf
) -> list[SharedPages]:
    """The pages that neighbouring rows have in common: a tree of at most `levels` levels.

    block_table [B, W]: a row's last page is its own. Pages are listed only if reading them once
    saves the reading of at least `least_pages` pages.
    """
    equal = block_table[1:] == block_table[:-1]
    common = np.logical_and.accumulate(equal, 1).sum(1)  # pages shared with the next row
    shared = []

    def visit(begin: int, end: int, first: int, level: int) -> None:
        between = common[begin : end - 1]
        if level == levels or len(between) * (between.max(initial=0) - first) < least_pages:
            return
        last = int(between.min())
        if last > first and len(between) * (last - first) >= least_pages:
            shared.append(SharedPages(begin, end, first, last, level))
            first = last
            level += 1
        # The rows are cut where neighbours share the fewest pages.
        cuts = (begin + 1 + np.flatnonzero(between == last)).tolist()
        for cut in [*cuts, end]:
            visit(begin, cut, first, level)
            begin = cut

    visit(0, len(block_table), 0, 0)
    return shared


def plan_kv_ranges(
    block_table: np.ndarray, lengths: np.ndarray, page_size: int, max_rows: int
) -> np.ndarray:
    """The ranges of a batch as kernels.paged_attention takes them, int32 [R + B, 5].

    Shared pages of more than `max_rows` rows become several ranges. Each has at least two rows, so
    R is at most LEVELS * (B // 2).
    """
    rows = len(block_table)
    own = np.zeros((rows, RANGE_FIELDS), np.int32)
    own[:, 0] = np.arange(rows)
    own[:, 1] = own[:, 0] + 1
    own[:, 3] = lengths
    own[:, 4] = LEVELS
    shared = []
    for pages in find_shared_pages(block_table, LEAST_TOKENS / page_size, LEVELS):
        first, last = pages.first * page_size, pages.last * page_size
        own[pages.begin : pages.end, 2] = last
        count = -(-(pages.end - pages.begin) // max_rows)
        for part in np.array_split(np.arange(pages.begin, pages.end), count):
            shared.append((part[0], part[-1] + 1, first, last, pages.level))
    return np.concatenate((np.array(shared, np.int32).reshape(-1, RANGE_FIELDS), own))
