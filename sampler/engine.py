"""The sampler: a paged KV cache and continuous batching, hand-written.

The keys and values of all conversations live in one pool of pages (a page: `page_size` tokens of every layer). A
conversation owns a table of pages and keeps it between its turns; conversations that start with the same prompt share
its full pages. One engine step is three plain parts: schedule (who gets rows and pages), run (a packed prefill, then
one token for every row that is ready), postprocess (append tokens, find the finished).

Two invariants carry the code:
  cached   Pages hold the keys and values of a conversation's first `cached` tokens. A row is ready to decode when only
           its newest token is missing (cached == len(tokens) - 1): it feeds that token and samples the next. All other
           tokens (prompt, tool notes, a preempted row's past) are prefilled, and a prefill never samples.
  draws    The t-th new token of a request is a function of its logits and of (seed, t). So neither recomputing a row
           nor other rows beside it change an answer, unless the last bits of the logits decide a draw.

On CUDA the choice of token stays on the GPU and the host reads it one step later (`overlap`): it launches step n + 1,
then looks at the tokens of step n. Between the two `rows.length` is one ahead of `conversation.tokens`, and a row that
stopped at n has computed one token that nobody reads. Batches are padded to a bucket's size, and a CUDA graph of that
bucket is replayed (`buckets`). Both can be switched on anywhere (off CUDA without the graph).

Tests: pytest tests/test_sampler.py tests/test_pages.py. Speed: python -m bench.sampler
"""
import itertools
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sampler.forward import Batch, Buckets, OwnForward, StockForward, unsupported


# ---------------------------------------------------------------- pages: who owns what, in plain integers

class Pages:
    """Allocator of `count` pages of `size` tokens with reference counts. A table is a list of page numbers."""

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self.free = list(range(count - 1, -1, -1))
        self.references = [0] * count

    def missing(self, table: list[int], tokens: int) -> int:
        """Pages that `table` lacks to hold `tokens` tokens."""
        return max(0, -(-tokens // self.size) - len(table))

    def extend(self, table: list[int], tokens: int) -> bool:
        """Adds pages so that `table` holds `tokens` tokens. False, and nothing changed, if too few are free."""
        missing = self.missing(table, tokens)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            page = self.free.pop()
            self.references[page] = 1
            table.append(page)
        return True

    def fork(self, table: list[int], tokens: int) -> tuple[list[int], tuple[int, int] | None]:
        """A second table for the first `tokens` tokens of `table`: full pages are shared, a partial last one is copied.

        Returns the new table and the (source, target) pages whose contents the caller must copy, or None. ValueError if
        the copy finds no free page.
        """
        full, rest = divmod(tokens, self.size)
        if rest and not self.free:
            raise ValueError("fork needs a free page for the copy of a partial page")
        new = table[:full]
        for page in new:
            self.references[page] += 1
        if not rest:
            return new, None
        self.extend(new, tokens)
        return new, (table[full], new[full])

    def drop(self, table: list[int]) -> list[int]:
        """Gives a table's pages back and empties it. Returns the pages that nobody uses any more."""
        freed = []
        for page in table:
            self.references[page] -= 1
            if self.references[page] == 0:
                freed.append(page)
        table.clear()
        self.free += freed
        return freed


# ---------------------------------------------------------------- records

@dataclass
class Completion:
    """What was sampled: tokens, a stop token included, and their log-probs (full vocabulary, at the temperature)."""
    tokens: list[int]
    logprobs: list[float]
    finish: str                                 # 'stop' | 'length'


@dataclass(eq=False)
class Conversation:
    """A context that grows: given and sampled ids in order, and the pages of their keys and values."""
    age: int                                    # smaller = older; the youngest is preempted first
    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    cached: int = 0
    prompt: tuple[int, ...] = ()                # the tokens submitted first: conversations of equal prompt share pages
    request: "Request | None" = None            # the open one, if any
    closed: bool = False

    @property
    def idle(self) -> bool:
        """It has no row: nothing was asked of it, or its request waits."""
        return self.request is None or self.request.row is None


@dataclass(eq=False)
class Request:
    """One answer to be sampled. When step() returns it, `completion` or `error` is set."""
    number: int
    conversation: Conversation
    max_new_tokens: int
    temperature: float
    top_p: float
    stop_ids: frozenset[int]
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    row: int | None = None                      # its row while it runs
    completion: Completion | None = None
    error: str | None = None

    @property
    def done(self) -> bool:
        return self.completion is not None or self.error is not None


class Rows:
    """What a decode step must know of each running row, as arrays on the host: its batch is a few numpy expressions."""

    def __init__(self, count: int, pages: int):
        self.free = list(range(count - 1, -1, -1))
        self.table = np.zeros((count, pages), np.int32)
        self.length = np.zeros(count, np.int64)                     # tokens, the one it feeds next included
        self.drawn, self.wanted = np.zeros(count, np.int64), np.zeros(count, np.int64)      # new tokens: so far, in all
        self.seed = np.zeros(count, np.uint64)
        self.temperature, self.top_p = np.zeros(count, np.float32), np.ones(count, np.float32)

    def enter(self, request: Request) -> None:
        """Gives the request a row. Its conversation's pages must be complete."""
        row, conversation = self.free.pop(), request.conversation
        request.row = row
        self.table[row, :len(conversation.table)] = conversation.table
        self.length[row], self.drawn[row] = len(conversation.tokens), len(request.tokens)
        self.wanted[row], self.seed[row] = request.max_new_tokens, hashed(request.seed)
        self.temperature[row], self.top_p[row] = request.temperature, request.top_p

    def leave(self, request: Request) -> None:
        if request.row is not None:
            self.free.append(request.row)
            request.row = None


# ---------------------------------------------------------------- draws

MASK = (1 << 64) - 1


def hashed(*numbers: int) -> int:
    """A 64-bit hash of integers (each taken modulo 2^64), by splitmix64's finaliser."""
    state = 0
    for number in numbers:
        state = (state ^ number & MASK) + 0x9E3779B97F4A7C15 & MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state


def uniform(seed: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Doubles in [0, 1) from (seed, index) alone: splitmix64's index-th output. seed uint64 [B], index int64 [B]."""
    x = seed + (index.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    x = (x ^ x >> np.uint64(31)) >> np.uint64(16)           # 48 bits: u · total stays below total in fp64
    return x.astype(np.float64) * 2.0 ** -48


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row and its log-prob at temperature 1: logits [B, V] fp32."""
    best, tokens = logits.max(-1)
    return tokens, best - logits.logsumexp(-1)


def draw(logits: Tensor, uniforms: Tensor, temperature: Tensor | None, top_p: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token a row by the inverse of the cumulative distribution, and its log-prob: logits [B, V], uniforms [B].

    temperature [B] (None: 1 everywhere; 0: greedy); top_p [B] (None: 1 everywhere) restricts the draw to the likeliest
    tokens that together reach it. The log-prob is always the full vocabulary's, at the temperature (at 1 if greedy).
    """
    cold = None if temperature is None else temperature == 0
    if temperature is not None:
        logits = logits / torch.where(cold, 1.0, temperature)[:, None]
    logprobs = F.log_softmax(logits, -1)
    probs = logprobs.exp()
    if top_p is not None:
        ordered, index = torch.sort(probs, dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(-1, dtype=torch.float64) - ordered >= top_p[:, None]
        outside &= (top_p < 1)[:, None]     # the sum may pass 1 by rounding: a row without top-p keeps all its tokens
        probs = probs.masked_fill(torch.zeros_like(outside).scatter(-1, index, outside), 0.0)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    tokens = tokens.clamp_(max=logits.shape[1] - 1)         # a row of NaN gives V
    if cold is not None:
        tokens = torch.where(cold, logits.max(-1).indices, tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


# ---------------------------------------------------------------- the sampler

@dataclass
class Launched:
    """A decode step whose tokens the host has not looked at yet."""
    requests: list[Request]
    result: Tensor                              # [2, B] fp64: tokens (exact in it), log-probs: one copy carries both
    step: int
    ready: "torch.cuda.Event | None" = None


class Sampler:
    """Samples from `model`, a transformers causal LM (its weights are copied), with a KV pool of `max_tokens` tokens.

        talk = sampler.open();  request = sampler.submit(talk, ids, max_new_tokens=64)
        while not request.done: sampler.step()
        request.completion.tokens                       # submit again to go on; sampler.close(talk) gives the pages back

    page_size: tokens per page (default 16; on CUDA 64; 256 lets flash-attn decode, if it is installed). max_rows: rows
    that run together at most. prefill_chunk: tokens prefilled in one step at most, so that a long prompt does not
    starve the rows that decode (default 512; on CUDA 8,192). dtype: of weights and cache (default the model's; on CUDA
    bf16). share_prompts: off only to measure what it brings. own_forward=False asks for the stock modules; `path` says
    which forward runs and `why_stock` why not our own. overlap, buckets: see above; on for CUDA.
    """

    def __init__(self, model, *, max_tokens: int, page_size: int | None = None, max_rows: int = 256,
                 prefill_chunk: int | None = None, dtype: torch.dtype | None = None,
                 device: torch.device | str | None = None, share_prompts: bool = True, own_forward: bool = True,
                 overlap: bool | None = None, buckets: bool | None = None):
        parameter = next(model.parameters())
        self.device = torch.device(device or parameter.device)
        cuda = self.device.type == "cuda"
        page_size, prefill_chunk = page_size or (64 if cuda else 16), prefill_chunk or (8192 if cuda else 512)
        if min(page_size, max_rows, prefill_chunk) < 1:
            raise ValueError("page_size, max_rows and prefill_chunk must be at least 1")
        if max_tokens < page_size:
            raise ValueError(f"max_tokens ({max_tokens}) is smaller than one page of {page_size}; raise max_tokens")
        dtype = dtype or (torch.bfloat16 if cuda else parameter.dtype)
        self.why_stock = unsupported(model) if own_forward else "asked for"
        self.forward = (StockForward if self.why_stock else OwnForward)(model, dtype, self.device)
        self.path = self.forward.path
        self.pages = Pages(max_tokens // page_size, page_size)
        self.pool = torch.zeros(2, self.forward.layers, self.pages.count, page_size, self.forward.kv_heads,
                                self.forward.head_size, dtype=dtype, device=self.device)
        self.rows = Rows(max_rows, self.pages.count)
        self.newest = torch.zeros(max_rows, dtype=torch.int64, device=self.device)     # what each row feeds next
        self.prefill_chunk, self.share_prompts = prefill_chunk, share_prompts
        self.overlap = cuda if overlap is None else overlap
        graphs = (cuda and not self.why_stock) if buckets is None else buckets
        self.decoder = Buckets(self.forward, self.pool, max_rows) if graphs else self.forward

        # A request's way: waiting -> filling -> decoding -> (a row, but in no list: its last token is on its way) ->
        # finished. Preemption leads back to waiting.
        self.waiting: deque[Request] = deque()
        self.filling: list[Request] = []            # have a row and pages; cached < len(tokens) - 1
        self.decoding: list[Request] = []
        self.launched: Launched | None = None
        self.finished: list[Request] = []           # to be returned by step()
        self.live: set[Conversation] = set()
        self.holders: dict[tuple, list[Conversation]] = {}      # prompt -> conversations whose pages hold it
        self.numbers, self.ages, self.steps = itertools.count(), itertools.count(), 0
        self.stats = dict.fromkeys(("prefilled_tokens", "decoded_tokens", "shared_tokens", "preemptions", "running",
                                    "waiting", "pages_in_use"), 0)

    # ---- what callers use

    @property
    def busy(self) -> bool:
        """True while anything waits or runs."""
        return bool(self.waiting or self.filling or self.decoding or self.launched or self.finished)

    def open(self) -> Conversation:
        """A new, empty conversation."""
        conversation = Conversation(next(self.ages))
        self.live.add(conversation)
        return conversation

    def close(self, conversation: Conversation) -> None:
        """Gives a conversation's pages back; its open request, if any, ends with an error. Closing twice is allowed."""
        request = conversation.request
        if request is not None:
            for queue in (self.waiting, self.filling, self.decoding):
                if request in queue:
                    queue.remove(request)
            self._finish(request, error=f"request {request.number}: its conversation was closed")
        self._release(conversation)
        self.live.discard(conversation)
        conversation.closed = True

    def submit(self, conversation: Conversation, tokens, *, max_new_tokens: int, temperature: float = 1.0,
               top_p: float = 1.0, stop_ids=(), seed: int = 0) -> Request:
        """Appends `tokens` to the conversation and asks for an answer to it, which step() will produce.

        temperature 0 is greedy. The t-th new token's draw depends on (seed, t) only. ValueError on bad input.
        """
        tokens = list(tokens)
        self._check(conversation, tokens, max_new_tokens, temperature, top_p)
        conversation.prompt = conversation.prompt or tuple(tokens)
        conversation.tokens += tokens
        request = conversation.request = Request(next(self.numbers), conversation, max_new_tokens, temperature, top_p,
                                                 frozenset(stop_ids), seed)
        self.waiting.append(request)
        return request

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One engine step: some prefill, then one new token for every ready row. Returns the requests that finished."""
        self.steps += 1
        followers = self._admit()                           # schedule
        self._prefill()                                     # run
        if followers:                                       # the prompt they wait for may be complete now
            self._admit()
        self._reserve()                                     # when pages run out this reads the previous step's tokens
        launched = self._launch()                           # run
        self._drain()                                       # postprocess the previous step
        self.launched = launched
        if not self.overlap:
            self._drain()
        self.stats.update(pages_in_use=self.pages.count - len(self.pages.free), waiting=len(self.waiting),
                          running=len(self.filling) + len(self.decoding))
        finished, self.finished = self.finished, []
        return finished

    def generate(self, prompts, *, max_new_tokens: int | list[int], temperature: float = 1.0, top_p: float = 1.0,
                 stop_ids=(), seed: int = 0) -> list[Completion]:
        """Answers to `prompts`, in order. max_new_tokens: one number, or one per prompt. Row i draws from (seed, i).

        A row whose logits are NaN raises RuntimeError after the others have finished.
        """
        if self.busy:
            raise ValueError("generate was called while other requests run; finish them with step() first")
        wanted = max_new_tokens if isinstance(max_new_tokens, (list, tuple)) else [max_new_tokens] * len(prompts)
        conversations, requests = [self.open() for _ in prompts], []
        try:
            for i, (conversation, prompt, new) in enumerate(zip(conversations, prompts, wanted, strict=True)):
                requests.append(self.submit(conversation, prompt, max_new_tokens=new, temperature=temperature,
                                            top_p=top_p, stop_ids=stop_ids, seed=hashed(seed, i)))
            while self.busy:
                for request in self.step():
                    self.close(request.conversation)
        finally:
            for conversation in conversations:
                self.close(conversation)
            self.launched, self.finished = None, []         # what an exception left under way
        errors = [request.error for request in requests if request.error]
        if errors:
            raise RuntimeError("; ".join(errors))
        return [request.completion for request in requests]

    def load_weights(self, model) -> None:
        """Copies the weights in. All pages and sharing are forgotten: conversations are recomputed when next used."""
        self._drain()
        for request in sorted(self.filling + self.decoding, key=lambda request: -request.conversation.age):
            self._unschedule(request)
        for conversation in self.live:
            self._release(conversation)
        self.forward.load(model)

    # ---- schedule

    def _check(self, conversation, tokens, max_new_tokens, temperature, top_p) -> None:
        vocabulary, pool = self.forward.vocabulary, self.pages.count * self.pages.size
        context = len(conversation.tokens) + len(tokens)
        if conversation.closed:
            raise ValueError("the conversation is closed")
        if conversation.request is not None:
            raise ValueError("the conversation has an open request")
        if not tokens:
            raise ValueError("tokens is empty; a request needs at least one token")
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            bad = next(token for token in tokens if not 0 <= token < vocabulary)
            raise ValueError(f"token id {bad} is outside the model's vocabulary of {vocabulary}")
        if max_new_tokens <= 0:
            raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        if not temperature >= 0 or not 0 < top_p <= 1:
            raise ValueError(f"temperature must be at least 0 and top_p in (0, 1], not {temperature} and {top_p}")
        if self.pages.missing([], context + max_new_tokens - 1) > self.pages.count:     # the newest token needs no slot
            raise ValueError(f"{context} tokens and {max_new_tokens} new ones can never fit the KV pool of {pool} "
                             "tokens; raise max_tokens or ask for less")

    def _admit(self) -> bool:
        """Gives rows and pages to waiting requests, first come first served. True if some were passed over.

        A fresh conversation whose prompt is in another's pages forks them; while that leader still prefills, its
        followers are passed over and a row is kept for each. A free page is kept for every running row. When pages
        lack, conversations that do not run give way, the youngest first.
        """
        followers, copies = [], []
        while self.waiting and len(followers) < len(self.rows.free):
            request = self.waiting[0]
            conversation = request.conversation
            leader = self._leader(conversation)
            if leader is not None and leader.cached < len(conversation.prompt) - 1:
                followers.append(self.waiting.popleft())
                continue
            needed = self.pages.missing(conversation.table, len(conversation.tokens))
            if leader is not None:
                needed -= (len(conversation.prompt) - 1) // self.pages.size     # the prompt's full pages are shared
            running = len(self.filling) + len(self.decoding)
            if needed + running > len(self.pages.free):
                idle = [c for c in self.live if c.table and c is not conversation and c.idle]
                if self.launched and not running:
                    self._drain()
                elif idle:
                    self._preempt(max(idle, key=lambda c: c.age))
                else:
                    break
                continue                                    # who holds the prompt may have changed
            self.waiting.popleft()
            if leader is not None:
                conversation.cached = len(conversation.prompt) - 1      # the last token is fed again, for its logits
                conversation.table, copy = self.pages.fork(leader.table, conversation.cached)
                copies += [copy] if copy else []
                self.stats["shared_tokens"] += conversation.cached
            self._enter(request)
        self.waiting.extendleft(reversed(followers))
        for source, target in copies:       # in order: a later source may be an earlier target
            self.pool[:, :, target] = self.pool[:, :, source]
        return bool(followers)

    def _leader(self, conversation: Conversation) -> Conversation | None:
        """Another conversation whose pages hold (or soon will) the prompt of one that has no pages, if there is any.

        The first holder may still be prefilling; every later one forked a complete prompt.
        """
        holders = self.holders.get(conversation.prompt) if self.share_prompts and not conversation.table else None
        return holders[0] if holders else None

    def _enter(self, request: Request) -> None:
        conversation = request.conversation
        self.pages.extend(conversation.table, len(conversation.tokens))
        holders = self.holders.setdefault(conversation.prompt, [])
        if conversation not in holders:
            holders.append(conversation)
        self.rows.enter(request)
        if conversation.cached < len(conversation.tokens) - 1:
            self.filling.append(request)
        else:
            self._start_decoding([request])

    def _start_decoding(self, requests: list[Request]) -> None:
        if not requests:
            return
        rows = self._to_device(np.array([request.row for request in requests]))
        self.newest[rows] = self._to_device(np.array([request.conversation.tokens[-1] for request in requests]))
        self.decoding += requests

    def _preempt(self, conversation: Conversation) -> None:
        """Takes a conversation's pages; its request, if it runs, goes to the front of the queue."""
        if conversation.request is not None and conversation.request.row is not None:
            self._unschedule(conversation.request)
        self._release(conversation)
        self.stats["preemptions"] += 1

    def _unschedule(self, request: Request) -> None:
        (self.decoding if request in self.decoding else self.filling).remove(request)
        self.rows.leave(request)
        self.waiting.appendleft(request)

    def _release(self, conversation: Conversation) -> list[int]:
        """Gives a conversation's pages back. Returns those that nobody uses any more."""
        holders = self.holders.get(conversation.prompt, [])
        if conversation in holders:
            holders.remove(conversation)
            if not holders:
                del self.holders[conversation.prompt]
        conversation.cached = 0
        return self.pages.drop(conversation.table)

    def _reserve(self) -> None:
        """A slot for the token that each decoding row feeds. When no page is free, others give way: idle ones first, and
        the youngest first."""
        def short():                                        # the token it feeds is the first of a new page
            rows = np.array([request.row for request in self.decoding], np.int64)
            return [self.decoding[i] for i in np.flatnonzero((self.rows.length[rows] - 1) % self.pages.size == 0)]
        if len(needy := short()) > len(self.pages.free) and self.launched:
            self._drain()                               # may free pages; and who gives way must have all its tokens here
            needy = short()
        for request in sorted(needy, key=lambda request: request.conversation.age):
            table = request.conversation.table
            while request.row is not None and not self.pages.extend(table, int(self.rows.length[request.row])):
                self._preempt(max((c for c in self.live if c.table), key=lambda c: (c.idle, c.age)))
            if request.row is not None:
                self.rows.table[request.row, len(table) - 1] = table[-1]

    # ---- run

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _prefill(self) -> None:
        """One packed forward over the next tokens of the rows that are not ready to decode, in order of admission."""
        budget, chunks = self.prefill_chunk, []
        for request in self.filling:
            conversation = request.conversation
            count = min(budget, len(conversation.tokens) - 1 - conversation.cached)
            budget -= count
            if count:
                chunks.append((request, conversation.cached, conversation.cached + count))
        if not chunks:
            return
        size, spans = self.pages.size, [end for _, _, end in chunks]        # T tokens in all, of B rows
        starts = np.cumsum([0] + [end - begin for _, begin, end in chunks]).tolist()
        table = self.rows.table[[request.row for request, _, _ in chunks], :-(-max(spans) // size)]     # [B, M]
        row = np.repeat(np.arange(len(chunks)), np.diff(starts))
        ids = np.concatenate([request.conversation.tokens[begin:end] for request, begin, end in chunks])
        positions = np.concatenate([np.arange(begin, end) for _, begin, end in chunks])
        slots = table[row, positions // size].astype(np.int64) * size + positions % size                # [T]
        arrays = ids, positions, slots, table, np.array(spans, np.int32)
        self.forward.fill(Batch(*map(self._to_device, arrays), starts, spans), self.pool)
        for request, _, end in chunks:
            request.conversation.cached = end
        self.stats["prefilled_tokens"] += starts[-1]
        self._start_decoding([r for r in self.filling if r.conversation.cached == len(r.conversation.tokens) - 1])
        self.filling = [r for r in self.filling if r.conversation.cached < len(r.conversation.tokens) - 1]

    def _launch(self) -> Launched | None:
        """Starts one decode step over every ready row; waits for the device only to capture a new bucket."""
        if not self.decoding:
            return None
        rows = np.array([request.row for request in self.decoding])
        order = np.argsort(-self.rows.length[rows], kind="stable")
        rows, requests = rows[order], [self.decoding[i] for i in order]
        state, size = self.rows, self.pages.size
        lengths, positions = state.length[rows], state.length[rows] - 1
        table = state.table[rows, :-(-int(lengths[0]) // size)]                                         # [B, M]
        slots = table[np.arange(len(rows)), positions // size].astype(np.int64) * size + positions % size
        index = self._to_device(rows)
        arrays = positions, slots, table, lengths.astype(np.int32)
        batch = Batch(self.newest[index], *map(self._to_device, arrays), spans=lengths.tolist())
        logits = self.decoder.decode(batch, self.pool)                                                  # [B, V] fp32
        tokens, logprobs = self._choose(logits, rows)
        self.newest[index] = tokens
        result = torch.stack((tokens.double(), logprobs.double())).to("cpu", non_blocking=True)
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        state.length[rows] += 1
        state.drawn[rows] += 1
        if (state.drawn[rows] == state.wanted[rows]).any():         # their last token is on its way
            self.decoding = [r for r in self.decoding if state.drawn[r.row] < r.max_new_tokens]
        self.stats["decoded_tokens"] += len(rows)
        return Launched(requests, result, self.steps, ready)

    def _choose(self, logits: Tensor, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs of the rows; asks `draw` only for what some row wants."""
        temperature, top_p = self.rows.temperature[rows], self.rows.top_p[rows]
        if not temperature.any():
            return greedy(logits)
        uniforms = uniform(self.rows.seed[rows], self.rows.drawn[rows])
        return draw(logits, self._to_device(uniforms),
                    None if (temperature == 1).all() else self._to_device(temperature),
                    None if (top_p == 1).all() else self._to_device(top_p))

    # ---- postprocess

    def _drain(self) -> None:
        launched, self.launched = self.launched, None
        self._collect(launched)

    def _collect(self, launched: Launched | None) -> None:
        """Reads a launched step's tokens, appends them, and ends the requests that are complete."""
        if launched is None:
            return
        if launched.ready is not None:
            launched.ready.synchronize()
        tokens, logprobs = launched.result.tolist()
        ended = len(self.finished)
        for request, token, logprob in zip(launched.requests, tokens, logprobs):
            if request.done:                            # stopped one token ago, or closed: nobody wants this token
                continue
            conversation, token = request.conversation, int(token)
            if logprob != logprob:
                self._finish(request, error=f"request {request.number}: the model's logits were NaN at sampler step "
                                            f"{launched.step}, for its new token {len(request.tokens) + 1}")
                self.pool[:, :, self._release(conversation)] = 0        # NaN must not reach the pages' next owner
                self.finished.append(request)
                continue
            conversation.cached = len(conversation.tokens)          # the token it fed is in its page now
            conversation.tokens.append(token)
            request.tokens.append(token)
            request.logprobs.append(logprob)
            if token in request.stop_ids or len(request.tokens) == request.max_new_tokens:
                self._finish(request, "stop" if token in request.stop_ids else "length")
                self.finished.append(request)
        if len(self.finished) > ended:
            self.decoding = [request for request in self.decoding if not request.done]

    def _finish(self, request: Request, reason: str = "", error: str | None = None) -> None:
        request.error = error
        if error is None:
            request.completion = Completion(request.tokens, request.logprobs, reason)
        request.conversation.request = None
        self.rows.leave(request)
