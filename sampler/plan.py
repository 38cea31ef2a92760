"""What one step does: the scheduler's decisions as arrays, in the form that the device wants.

A slot is where one token's key and value lie in the pool: page · page size + offset in the page.
Shapes: B rows, T tokens, W pages of the longest row.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels.paged import LEVELS, RUN_FIELDS
from sampler.draws import hashed, uniform
from sampler.request import Request

# A run on CUDA is worth its pieces and their merge if it saves the reading of so many tokens (by
# arithmetic: eight rows that start and merge one piece each, see TOKENS_PER_START in
# kernels/paged.py).
LEAST_TOKENS = 256
# (source, target) pages, to be copied in order: a later source may be an earlier target.
Copies = list[tuple[int, int]]
# (request, begin, end): the tokens begin:end of its conversation are to be prefilled.
PrefillSpan = tuple[Request, int, int]


class Rows:
    """What a decode step must know of each running row, as arrays.

    A decode step of hundreds of rows is then planned in a few numpy expressions. While a step is
    unread, `length` and `drawn` are one ahead of the request's tokens.
    """

    def __init__(self, count: int, pages: int):
        self.free = list(range(count - 1, -1, -1))
        self.block_table = np.zeros((count, pages), np.int32)
        self.length = np.zeros(count, np.int64)  # tokens, the one it feeds next included
        self.drawn = np.zeros(count, np.int64)  # new tokens so far
        self.seed = np.zeros(count, np.uint64)
        self.temperature = np.zeros(count, np.float32)
        self.top_p = np.ones(count, np.float32)
        self.fresh = np.zeros(count, bool)  # it has not decoded yet: the host feeds it `newest`
        self.newest = np.zeros(count, np.int64)

    def enter(self, request: Request) -> None:
        """Gives the request a row. Its conversation's pages must hold all its tokens."""
        conversation = request.conversation
        row = self.free.pop()
        request.row = row
        self.block_table[row, : len(conversation.block_table)] = conversation.block_table
        self.length[row] = len(conversation.tokens)
        self.drawn[row] = len(request.tokens)
        self.seed[row] = hashed(request.seed)
        self.temperature[row] = request.temperature
        self.top_p[row] = request.top_p
        self.fresh[row] = True
        self.newest[row] = conversation.tokens[-1]

    def leave(self, request: Request) -> None:
        self.free.append(request.row)
        request.row = None


@dataclass
class Batch:
    """Tokens that go through the model together, and where their keys and values live.

    Arrays when the scheduler plans it, tensors once `to` has brought it to the device.
    Decode: one token a row; rows that share pages are neighbours, and padding rows come last.
    Prefill: the tokens of row b are starts[b]:starts[b + 1], the last ones of its
    lengths[b] tokens.
    """

    ids: Tensor | None  # int64 [T]; None while only the device knows them
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]; -1 stores nothing
    block_table: Tensor  # int32 [B, W]
    lengths: Tensor  # int32 [B]: tokens of each row, these included; 0 for padding
    starts: list[int] | None = None  # B + 1 numbers; None when decoding
    spans: list[int] | None = None  # `lengths` on the host; None in a CUDA graph
    runs: Tensor | None = None  # int32 [R + B, 5]: kernels.paged_attention's, on CUDA
    cache: dict = field(default_factory=dict)  # what attention works out once for all layers

    def to(self, device: torch.device) -> "Batch":
        arrays = [self.ids, self.positions, self.slots, self.block_table, self.lengths, self.runs]
        *tensors, runs = [None if array is None else to_device(array, device) for array in arrays]
        return Batch(*tensors, self.starts, self.spans, runs)


@dataclass
class Decode:
    """One new token for each row of `batch`, and how it is to be drawn.

    started, newest: rows that begin to decode, and the token that each of them feeds. Every other
    row feeds the token that the device sampled for it in the step before.
    """

    batch: Batch
    requests: list[Request]
    rows: np.ndarray  # int64 [B]
    uniforms: np.ndarray  # fp64 [B]: the numbers that decide the draws
    temperature: np.ndarray  # fp32 [B]
    top_p: np.ndarray  # fp32 [B]
    started: np.ndarray  # int64
    newest: np.ndarray  # int64


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor on the device; the host does not wait for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def plan_prefill(chunks: list[PrefillSpan], state: Rows, page_size: int) -> Batch:
    rows = [request.row for request, _, _ in chunks]
    counts = [end - begin for _, begin, end in chunks]
    spans = [end for _, _, end in chunks]
    block_table = state.block_table[rows, : -(-max(spans) // page_size)]
    tokens = [request.conversation.tokens[begin:end] for request, begin, end in chunks]
    positions = np.concatenate([np.arange(begin, end) for _, begin, end in chunks])
    row = np.repeat(np.arange(len(chunks)), counts)
    page = block_table[row, positions // page_size].astype(np.int64)
    return Batch(
        ids=np.concatenate(tokens),
        positions=positions,
        slots=page * page_size + positions % page_size,
        block_table=block_table,
        lengths=np.array(spans, np.int32),
        starts=np.cumsum([0] + counts).tolist(),
        spans=spans,
    )


def plan_decode(requests: list[Request], state: Rows, page_size: int) -> Decode:
    """The next token of these requests, whose rows are fresh no more."""
    rows = np.array([request.row for request in requests])
    width = -(-int(state.length[rows].max()) // page_size)
    # Sorted by their pages, so that rows with the same first ones are neighbours. What stands
    # behind a row's last page decides nothing, because nobody else has that page.
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
        spans=lengths.tolist(),
    )
    started = rows[state.fresh[rows]]
    state.fresh[started] = False
    return Decode(
        batch=batch,
        requests=[requests[i] for i in order],
        rows=rows,
        uniforms=uniform(state.seed[rows], state.drawn[rows]),
        temperature=state.temperature[rows],
        top_p=state.top_p[rows],
        started=started,
        newest=state.newest[started],
    )


# ---------------------------------------------------------------- pages that rows share


@dataclass
class SharedPages:
    """Rows begin:end of a batch read the same pages first:last of their block tables.

    level: how many other runs are before it in these rows' tables.
    """

    begin: int
    end: int
    first: int
    last: int
    level: int


def shared_runs(
    block_table: np.ndarray, least_pages: float, levels: float = math.inf
) -> list[SharedPages]:
    """The pages that neighbours have in common, as a tree: a row's runs follow one another.

    block_table [B, W]: a row's last page is its own. A run that saves the reading of fewer pages
    than `least_pages` is left to its rows, or to longer runs of fewer rows. A row has at most
    `levels` runs.
    """
    equal = block_table[1:] == block_table[:-1]
    common = np.logical_and.accumulate(equal, 1).sum(1)  # pages shared with the next row
    runs = []

    def visit(begin: int, end: int, first: int, level: int) -> None:
        between = common[begin : end - 1]
        if level == levels or len(between) * (between.max(initial=0) - first) < least_pages:
            return
        last = int(between.min())
        if last > first and len(between) * (last - first) >= least_pages:
            runs.append(SharedPages(begin, end, first, last, level))
            first = last
            level += 1
        for cut in [*(begin + 1 + np.flatnonzero(between == last)), end]:
            visit(begin, int(cut), first, level)
            begin = int(cut)

    visit(0, len(block_table), 0, 0)
    return runs


def kernel_runs(
    block_table: np.ndarray, lengths: np.ndarray, page_size: int, most: int
) -> np.ndarray:
    """The runs of a batch as kernels.paged_attention takes them, int32 [R + B, 5].

    A run of more than `most` rows is cut. R follows from B alone: of each level, runs before and
    after the cut have two rows or more.
    """
    rows = len(block_table)
    shared = np.zeros((LEVELS * (rows // 2), RUN_FIELDS), np.int32)
    own = np.zeros((rows, RUN_FIELDS), np.int32)
    own[:, 0] = np.arange(rows)
    own[:, 1] = own[:, 0] + 1
    own[:, 3] = lengths
    own[:, 4] = LEVELS
    pieces = []
    for run in shared_runs(block_table, LEAST_TOKENS / page_size, LEVELS):
        first, last = run.first * page_size, run.last * page_size
        own[run.begin : run.end, 2] = last
        count = -(-(run.end - run.begin) // most)
        for piece in np.array_split(np.arange(run.begin, run.end), count):
            pieces.append((piece[0], piece[-1] + 1, first, last, run.level))
    if pieces:
        shared[: len(pieces)] = pieces
    return np.concatenate((shared, own))
