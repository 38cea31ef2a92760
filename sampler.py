"""The sampler: a paged KV cache and continuous batching, hand-written.

The keys and values of all conversations live in one pool of pages (a page = `page_size` tokens of every layer). A
conversation owns a table of pages and keeps it between its turns; conversations that start with the same prompt share
its full pages. `step()` is one engine step in three plain parts: schedule (who gets pages), run (one packed prefill, one
decode token for every running row), postprocess (append tokens, find the finished).

Two invariants carry the code:
  cached    the first `conversation.cached` tokens have their keys and values in pages; the last token never needs to. A
            row decodes when cached == len(tokens) - 1: it feeds its last token and samples the next. Everything before
            that (prompt, tool notes, a preempted row's whole past) is prefill, which therefore never samples.
  draws     the t-th new token of a request depends on its logits and on (seed, t), nothing else. So a preempted row
            that is recomputed says the same again, and no answer depends on what else is in the batch.

Tests: pytest tests/test_sampler.py tests/test_pages.py. Speed: python bench/sampler.py
"""
import itertools
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forward import Batch, OwnForward, StockForward, unsupported


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

        Returns the table and the (source, target) pages that the caller must copy, or None. Needs one free page then.
        """
        full, rest = divmod(tokens, self.size)
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
        self.free.extend(freed)
        return freed


# ---------------------------------------------------------------- records

@dataclass
class Completion:
    """What was sampled. `tokens` includes the stop token; `logprobs` are full-vocabulary, at the sampling temperature."""
    tokens: list[int]
    logprobs: list[float]
    finish: str                                 # 'stop' | 'length'


@dataclass(eq=False)
class Conversation:
    """A context that grows: given and sampled ids in order, and the pages that hold its keys and values."""
    age: int                                    # smaller = older; the youngest is preempted first
    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    cached: int = 0
    prompt: tuple[int, ...] | None = None       # the first tokens submitted: conversations of equal prompt share pages
    request: "Request | None" = None            # the open request, if any
    closed: bool = False


@dataclass(eq=False)
class Request:
    """One answer to be sampled. `.completion` or `.error` is set when step() returns it."""
    number: int
    conversation: Conversation
    max_new_tokens: int
    temperature: float
    top_p: float
    stop_ids: frozenset[int]
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    row: int | None = None                      # place in the running batch
    completion: Completion | None = None
    error: str | None = None

    @property
    def done(self) -> bool:
        return self.completion is not None or self.error is not None


# ---------------------------------------------------------------- draws

MASK = (1 << 64) - 1
GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def mix(x: int) -> int:
    """splitmix64's finaliser: a 64-bit hash of a 64-bit integer."""
    x = (x & MASK) + GOLDEN & MASK
    x = (x ^ x >> 30) * MIX1 & MASK
    x = (x ^ x >> 27) * MIX2 & MASK
    return x ^ x >> 31


def fold(*parts: int) -> int:
    """One seed from several integers: fold(seed, row)."""
    state = 0
    for part in parts:
        state = mix(state ^ mix(part & MASK))
    return state


def uniform(seed: Tensor, index: Tensor) -> Tensor:
    """Uniform doubles in [0, 1) of (seed, index), both int64 [B]: `mix` in wrapping int64 arithmetic, top 48 bits."""
    def shift(x, bits):                         # logical right shift
        return (x >> bits) & ((1 << 64 - bits) - 1)
    x = seed + (index + 1) * signed(GOLDEN)
    x = (x ^ shift(x, 30)) * signed(MIX1)
    x = (x ^ shift(x, 27)) * signed(MIX2)
    return shift(x ^ shift(x, 31), 16).double() * 2.0 ** -48


def choose(logits: Tensor, draw: Tensor, temperature: Tensor, top_p: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token a row and its log-prob: logits [B, V] fp32, draw [B] in [0, 1), temperature [B] (0 = greedy).

    The draw goes through the inverse of the cumulative distribution. The log-prob is the full-vocabulary fp32
    log-softmax at the temperature (at 1 when greedy); top_p [B] (None = 1 everywhere) only restricts the draw.
    """
    greedy = temperature == 0
    logprobs = F.log_softmax(logits / torch.where(greedy, 1.0, temperature)[:, None], -1)
    probs = logprobs.exp()
    if top_p is not None:
        ordered, index = probs.sort(-1, descending=True, stable=True)
        outside = ordered.cumsum(-1, dtype=torch.float64) - ordered >= top_p[:, None]
        probs = probs.masked_fill(torch.zeros_like(outside).scatter(-1, index, outside), 0.0)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    drawn = torch.searchsorted(cumulative, draw[:, None] * cumulative[:, -1:], right=True)[:, 0]
    tokens = torch.where(greedy, logits.argmax(-1), drawn.clamp_(max=logits.shape[1] - 1))
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


# ---------------------------------------------------------------- the sampler

class Sampler:
    """Samples from `model` (a transformers causal LM; weights are copied in) over a pool of `max_tokens` tokens.

    max_rows: rows decoded together at most. prefill_chunk: tokens prefilled in one step at most, so that a long prompt
    does not starve the rows that decode. `path` says which forward runs: 'own forward' or 'stock modules'.
    """

    def __init__(self, model, *, max_tokens: int, page_size: int = 16, max_rows: int = 256, prefill_chunk: int = 2048,
                 dtype: torch.dtype | None = None, device: torch.device | str | None = None, own_forward: bool | None = None):
        if page_size < 1 or max_tokens < page_size:
            raise ValueError(f"the KV pool of {max_tokens} tokens is smaller than one page of {page_size}: raise max_tokens")
        parameter = next(model.parameters())
        device = torch.device(device or parameter.device)
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else parameter.dtype)
        self.why_stock = "asked for" if own_forward is False else unsupported(model)
        self.forward = (StockForward if self.why_stock else OwnForward)(model, dtype, device)
        self.path = self.forward.path
        self.pages = Pages(max_tokens // page_size, page_size)
        self.max_rows, self.prefill_chunk = max_rows, prefill_chunk
        f = self.forward
        self.pool = torch.zeros(2, f.layers, self.pages.count + 1, page_size, f.kv_heads, f.head_size, dtype=dtype, device=device)
        self.waiting: deque[Request] = deque()
        self.filling: list[Request] = []            # hold pages and a row, cached < len(tokens) - 1
        self.decoding: list[Request] = []
        self.live: set[Conversation] = set()
        self.holders: dict[tuple, list[Conversation]] = {}      # prompt -> conversations whose pages hold it
        self.free_rows = list(range(max_rows - 1, -1, -1))
        self.numbers, self.ages, self.steps = itertools.count(), itertools.count(), 0
        self.stats = dict.fromkeys(("prefilled_tokens", "decoded_tokens", "shared_tokens", "preemptions", "pages_in_use",
                                    "running", "waiting"), 0)

    # ---- what callers use

    @property
    def busy(self) -> bool:
        """True while anything waits or runs."""
        return bool(self.waiting or self.filling or self.decoding)

    def open(self) -> Conversation:
        conversation = Conversation(next(self.ages))
        self.live.add(conversation)
        return conversation

    def close(self, conversation: Conversation) -> None:
        """Gives a conversation's pages back; an open request of it ends with an error. Closing twice is allowed."""
        request = conversation.request
        if request is not None:
            self._finish(request, error=f"request {request.number}: its conversation was closed")
            for queue in (self.waiting, self.filling, self.decoding):
                if request in queue:
                    queue.remove(request)
        self._release(conversation)
        self.live.discard(conversation)
        conversation.closed = True

    def submit(self, conversation: Conversation, tokens, *, max_new_tokens: int, temperature: float = 1.0,
               top_p: float = 1.0, stop_ids=(), seed: int = 0) -> Request:
        """Appends `tokens` to the conversation and asks for an answer; step() produces it. ValueError on bad input."""
        tokens = list(tokens)
        self._check(conversation, tokens, max_new_tokens, temperature, top_p)
        if not conversation.tokens:
            conversation.prompt = tuple(tokens)
        conversation.tokens += tokens
        request = Request(next(self.numbers), conversation, max_new_tokens, temperature, top_p, frozenset(stop_ids), seed)
        conversation.request = request
        self.waiting.append(request)
        return request

    def step(self) -> list[Request]:
        """One engine step. Returns the requests that finished in it."""
        self.steps += 1
        self._admit()
        self._prefill()
        finished = self._decode()
        self.stats.update(pages_in_use=self.pages.count - len(self.pages.free), waiting=len(self.waiting),
                          running=len(self.filling) + len(self.decoding))
        return finished

    def generate(self, prompts, *, max_new_tokens, temperature: float = 1.0, top_p: float = 1.0, stop_ids=(),
                 seed: int = 0, progress: bool = False) -> list[Completion]:
        """Answers to `prompts`, in order; max_new_tokens is one number or one a prompt; row i draws from (seed, i)."""
        if self.busy:
            raise ValueError("generate was called while other requests run: finish them with step() first")
        wanted = max_new_tokens if isinstance(max_new_tokens, (list, tuple)) else [max_new_tokens] * len(prompts)
        conversations, requests = [self.open() for _ in prompts], []
        try:
            for i, (conversation, prompt, new) in enumerate(zip(conversations, prompts, wanted, strict=True)):
                requests.append(self.submit(conversation, prompt, max_new_tokens=new, temperature=temperature, top_p=top_p,
                                            stop_ids=stop_ids, seed=fold(seed, i)))
            while self.busy:
                for request in self.step():
                    self.close(request.conversation)
        finally:
            for conversation in conversations:
                self.close(conversation)
        errors = [request.error for request in requests if request.error]
        if errors:
            raise RuntimeError("; ".join(errors))
        return [request.completion for request in requests]

    def load_weights(self, model) -> None:
        """Copies the weights in. Every page and all sharing is forgotten; conversations are recomputed when next used."""
        running = self.filling + self.decoding
        for request in sorted(running, key=lambda request: -request.conversation.age):
            self._unschedule(request)
        for conversation in self.live:
            self._release(conversation)
        self.forward.load(model)

    # ---- schedule

    def _check(self, conversation, tokens, max_new_tokens, temperature, top_p) -> None:
        if conversation.closed or conversation.request is not None:
            raise ValueError("this conversation " + ("is closed" if conversation.closed else "has an open request already"))
        if not tokens:
            raise ValueError("tokens is empty: a request needs at least one token")
        if min(tokens) < 0 or max(tokens) >= self.forward.vocabulary:
            bad = next(t for t in tokens if not 0 <= t < self.forward.vocabulary)
            raise ValueError(f"token id {bad} is outside the model's vocabulary of {self.forward.vocabulary}")
        if max_new_tokens <= 0:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        if temperature < 0 or not 0 < top_p <= 1:
            raise ValueError(f"temperature must be >= 0 and top_p in (0, 1], got {temperature} and {top_p}")
        context = len(conversation.tokens) + len(tokens)
        if self.pages.missing([], context + max_new_tokens - 1) > self.pages.count:
            raise ValueError(f"a context of {context} tokens and {max_new_tokens} new ones never fits the KV pool of "
                             f"{self.pages.count * self.pages.size} tokens: raise max_tokens or ask for less")

    def _admit(self) -> None:
        """Gives rows and pages to waiting requests, oldest first; followers of a prompt in prefill wait for its pages."""
        later, copies = [], []
        while self.waiting and self.free_rows:
            request = self.waiting[0]
            conversation = request.conversation
            needed = self.pages.missing(conversation.table, len(conversation.tokens))
            holder = None if conversation.table else self._holder(conversation.prompt)
            if holder is not None:
                if holder.cached < len(conversation.prompt) - 1:
                    later.append(self.waiting.popleft())
                    continue
                needed -= (len(conversation.prompt) - 1) // self.pages.size
            running = len(self.filling) + len(self.decoding)
            if needed + running > len(self.pages.free) and (running or not self._evict_idle(needed, conversation)):
                break
            self.waiting.popleft()
            if holder is not None and holder.table:
                conversation.cached = len(conversation.prompt) - 1
                conversation.table, pair = self.pages.fork(holder.table, conversation.cached)
                copies += [pair] if pair else []
                self.stats["shared_tokens"] += conversation.cached
            self._enter(request)
        self.waiting.extendleft(reversed(later))
        if copies:
            source, target = zip(*copies)
            self.pool[:, :, list(target)] = self.pool[:, :, list(source)]

    def _holder(self, prompt) -> Conversation | None:
        """The conversation whose pages hold most of `prompt`, if any."""
        return max(self.holders.get(prompt, ()), key=lambda holder: holder.cached, default=None)

    def _enter(self, request: Request) -> None:
        conversation = request.conversation
        if not conversation.cached:
            pass
        self.pages.extend(conversation.table, len(conversation.tokens))
        holders = self.holders.setdefault(conversation.prompt, [])
        if conversation not in holders:
            holders.append(conversation)
        request.row = self.free_rows.pop()
        filled = conversation.cached == len(conversation.tokens) - 1
        (self.decoding if filled else self.filling).append(request)

    def _evict_idle(self, needed: int, keep: Conversation) -> bool:
        """With nothing running: takes pages from the youngest conversations until `needed` are free."""
        while len(self.pages.free) < needed:
            self._preempt(self._youngest(keep))
        return True

    def _youngest(self, keep: Conversation | None = None) -> Conversation:
        return max((c for c in self.live if c.table and c is not keep), key=lambda c: c.age)

    def _preempt(self, conversation: Conversation) -> None:
        request = conversation.request
        if request is not None and request.row is not None:
            self._unschedule(request)
        self._release(conversation)
        self.stats["preemptions"] += 1

    def _unschedule(self, request: Request) -> None:
        """Takes a running request out of the batch, to the front of the queue."""
        (self.decoding if request in self.decoding else self.filling).remove(request)
        self.free_rows.append(request.row)
        request.row = None
        self.waiting.appendleft(request)

    def _release(self, conversation: Conversation) -> list[int]:
        """A conversation without pages: its keys and values must be computed again."""
        holders = self.holders.get(conversation.prompt, [])
        if conversation in holders:
            holders.remove(conversation)
            if not holders:
                del self.holders[conversation.prompt]
        conversation.cached = 0
        return self.pages.drop(conversation.table)

    # ---- run

    @torch.no_grad()
    def _prefill(self) -> None:
        """One packed forward over the next tokens of the rows that are not ready to decode."""
        budget, chunks = self.prefill_chunk, []
        for request in self.filling:
            conversation = request.conversation
            count = min(budget, len(conversation.tokens) - 1 - conversation.cached)
            if count:
                chunks.append((conversation, count))
                budget -= count
        if not chunks:
            return
        self.forward.hidden(self._prefill_batch(chunks), self.pool, fill_only=True)
        for conversation, count in chunks:
            conversation.cached += count
            self.stats["prefilled_tokens"] += count
        self.decoding += [r for r in self.filling if r.conversation.cached == len(r.conversation.tokens) - 1]
        self.filling = [r for r in self.filling if r.conversation.cached < len(r.conversation.tokens) - 1]

    def _prefill_batch(self, chunks) -> Batch:
        size, ids, positions, slots, starts, spans = self.pages.size, [], [], [], [0], []
        width = max(len(conversation.table) for conversation, _ in chunks)
        table = np.zeros((len(chunks), width), dtype=np.int64)
        for row, (conversation, count) in enumerate(chunks):
            begin, end = conversation.cached, conversation.cached + count
            ids += conversation.tokens[begin:end]
            table[row, :len(conversation.table)] = conversation.table
            place = np.arange(begin, end)
            positions.append(place)
            slots.append(table[row, place // size] * size + place % size)
            starts.append(starts[-1] + count)
            spans.append(end)
        device = self.pool.device
        as_tensor = lambda parts: torch.from_numpy(np.concatenate(parts)).to(device)
        return Batch(torch.tensor(ids, device=device), as_tensor(positions), as_tensor(slots),
                     torch.from_numpy(table).to(device), torch.tensor(spans, device=device), starts, spans)

    def _reserve(self) -> None:
        """A page for the token that each decoding row feeds; the youngest conversations pay when none is free."""
        for request in sorted(self.decoding, key=lambda request: request.conversation.age):
            conversation = request.conversation
            while request.row is not None and not self.pages.extend(conversation.table, len(conversation.tokens)):
                self._preempt(self._youngest())

    @torch.no_grad()
    def _decode(self) -> list[Request]:
        """One token for every row that is ready."""
        self._reserve()
        if not self.decoding:
            return []
        requests, size, device = self.decoding, self.pages.size, self.pool.device
        lengths = np.array([len(r.conversation.tokens) for r in requests])
        table = np.zeros((len(requests), max(len(r.conversation.table) for r in requests)), dtype=np.int64)
        for row, request in enumerate(requests):
            table[row, :len(request.conversation.table)] = request.conversation.table
        places = lengths - 1
        slots = table[np.arange(len(requests)), places // size] * size + places % size
        to = lambda values: torch.as_tensor(values).to(device)
        batch = Batch(to([r.conversation.tokens[-1] for r in requests]), to(places), to(slots), to(table), to(lengths))
        logits = self.forward.logits(self.forward.hidden(batch, self.pool))
        seeds, index = to([signed(fold(r.seed)) for r in requests]), to([len(r.tokens) for r in requests])
        top_p = to([r.top_p for r in requests]) if any(r.top_p < 1 for r in requests) else None
        tokens, logprobs = choose(logits, uniform(seeds, index), to([float(r.temperature) for r in requests]).float(), top_p)
        self.stats["decoded_tokens"] += len(requests)
        return self._postprocess(requests, tokens.tolist(), logprobs.tolist())

    # ---- postprocess

    def _postprocess(self, requests, tokens, logprobs) -> list[Request]:
        finished = []
        for request, token, logprob in zip(requests, tokens, logprobs):
            conversation = request.conversation
            if logprob != logprob:
                self._finish(request, error=f"request {request.number}: the model's logits are not numbers (NaN) at sampler "
                                            f"step {self.steps}, new token {len(request.tokens)}")
                self.pool[:, :, self._release(conversation)] = 0     # NaN must not reach the pages' next owner
                finished.append(request)
                continue
            conversation.cached = len(conversation.tokens)
            conversation.tokens.append(token)
            request.tokens.append(token)
            request.logprobs.append(logprob)
            if token in request.stop_ids or len(request.tokens) == request.max_new_tokens:
                self._finish(request, "stop" if token in request.stop_ids else "length")
                finished.append(request)
        if finished:
            self.decoding = [request for request in self.decoding if not request.done]
        return finished

    def _finish(self, request: Request, reason: str = "", error: str | None = None) -> None:
        request.error = error
        if error is None:
            request.completion = Completion(request.tokens, request.logprobs, reason)
        request.conversation.request = None
        if request.row is not None:
            self.free_rows.append(request.row)
            request.row = None
