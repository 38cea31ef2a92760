"""What one step does, as arrays: the scheduler's decisions in the form that the device wants.

A slot is the place of one token's key and value in the pool: page · page size + place in the page.
Shapes: B rows, T tokens, W pages of the longest row.
"""

from dataclasses import dataclass, field

import numpy as np

from sampler.draws import hashed
from sampler.request import Request

# (source, target) pages, to be copied in order: a later source may be an earlier target.
Copies = list[tuple[int, int]]
# (request, begin, end): the tokens begin:end of its conversation are to be prefilled.
Chunk = tuple[Request, int, int]


class Rows:
    """What a decode step must know of each running row, as arrays.

    A decode step of hundreds of rows is then planned in a few numpy expressions. While a step is
    unread, `length` and `drawn` are one ahead of the request's tokens.
    """

    def __init__(self, count: int, pages: int):
        self.count = count
        self.free = list(range(count - 1, -1, -1))
        self.block_table = np.zeros((count, pages), np.int32)
        self.length = np.zeros(count, np.int64)  # tokens, the one it feeds next included
        self.drawn = np.zeros(count, np.int64)  # new tokens so far
        self.wanted = np.zeros(count, np.int64)  # new tokens in all
        self.seed = np.zeros(count, np.uint64)
        self.temperature = np.zeros(count, np.float32)
        self.top_p = np.ones(count, np.float32)

    def enter(self, request: Request) -> None:
        """Gives the request a row. Its conversation's pages must be complete."""
        conversation = request.conversation
        row = self.free.pop()
        request.row = row
        self.block_table[row, : len(conversation.block_table)] = conversation.block_table
        self.length[row] = len(conversation.tokens)
        self.drawn[row] = len(request.tokens)
        self.wanted[row] = request.max_new_tokens
        self.seed[row] = hashed(request.seed)
        self.temperature[row] = request.temperature
        self.top_p[row] = request.top_p

    def leave(self, request: Request) -> None:
        self.free.append(request.row)
        request.row = None


@dataclass
class Prefill:
    """Tokens whose keys and values are written; those of row b are starts[b]:starts[b + 1]."""

    ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    slots: np.ndarray  # int64 [T]
    block_table: np.ndarray  # int32 [B, W]
    starts: list[int]  # B + 1 numbers
    lengths: list[int]  # of each row, these tokens included


@dataclass
class Decode:
    """One token for each row. Rows are sorted by length, the longest first.

    started, newest: rows that begin to decode, and the token that each of them feeds. Every other
    row feeds the token that the device sampled for it in the step before.
    """

    requests: list[Request]
    rows: np.ndarray  # int64 [B]
    positions: np.ndarray  # int64 [B]
    slots: np.ndarray  # int64 [B]
    block_table: np.ndarray  # int32 [B, W]
    lengths: np.ndarray  # int64 [B]
    seeds: np.ndarray  # uint64 [B]
    places: np.ndarray  # int64 [B]: how many new tokens each request has before this one
    temperature: np.ndarray  # fp32 [B]
    top_p: np.ndarray  # fp32 [B]
    started: np.ndarray  # int64
    newest: np.ndarray  # int64


@dataclass
class Plan:
    """One step, in the order in which the device does it."""

    copies: Copies = field(default_factory=list)
    prefill: Prefill | None = None
    late_copies: Copies = field(default_factory=list)
    decode: Decode | None = None


def plan_prefill(chunks: list[Chunk], state: Rows, page_size: int) -> Prefill:
    rows = [request.row for request, _, _ in chunks]
    counts = [end - begin for _, begin, end in chunks]
    lengths = [end for _, _, end in chunks]
    starts = np.cumsum([0] + counts).tolist()
    block_table = state.block_table[rows, : -(-max(lengths) // page_size)]
    tokens = [request.conversation.tokens[begin:end] for request, begin, end in chunks]
    positions = np.concatenate([np.arange(begin, end) for _, begin, end in chunks])
    row = np.repeat(np.arange(len(chunks)), counts)
    page = block_table[row, positions // page_size].astype(np.int64)
    slots = page * page_size + positions % page_size
    return Prefill(np.concatenate(tokens), positions, slots, block_table, starts, lengths)


def plan_decode(
    requests: list[Request], started: list[Request], state: Rows, page_size: int
) -> Decode:
    rows = np.array([request.row for request in requests])
    order = np.argsort(-state.length[rows], kind="stable")
    rows = rows[order]
    lengths = state.length[rows]
    positions = lengths - 1
    block_table = state.block_table[rows, : -(-int(lengths[0]) // page_size)]
    page = block_table[np.arange(len(rows)), positions // page_size].astype(np.int64)
    return Decode(
        requests=[requests[i] for i in order],
        rows=rows,
        positions=positions,
        slots=page * page_size + positions % page_size,
        block_table=block_table,
        lengths=lengths,
        seeds=state.seed[rows],
        places=state.drawn[rows],
        temperature=state.temperature[rows],
        top_p=state.top_p[rows],
        started=np.array([request.row for request in started], np.int64),
        newest=np.array([request.conversation.tokens[-1] for request in started], np.int64),
    )
