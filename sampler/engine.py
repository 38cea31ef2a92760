"""The sampler: a paged KV cache and continuous batching, hand-written.

The keys and values of all conversations live in one pool of pages. A conversation owns a table of
pages and keeps it between its turns; conversations whose prompts begin alike share the full pages
of what they have in common. One step has three parts: schedule (scheduler.py: who gets rows and
pages, in plain integers), run (here: a packed prefill, then one token for every row that is ready)
and postprocess (append the tokens, find the finished requests).

Two invariants carry the code:
  cached   Pages hold the keys and values of a conversation's first `num_cached_tokens` tokens. A
           row is ready to decode when only its newest token is missing: it feeds that token and
           samples the next. All other tokens (prompt, tool notes, a preempted row's past) are
           prefilled, and a prefill never samples.
  draws    The t-th new token of a request is a function of its logits and of (seed, t). So neither
           recomputing a row nor other rows beside it change an answer, unless the last bits of the
           logits decide a draw.

On CUDA the choice of a token stays on the GPU, and the host reads it one step later (`overlap`): it
launches step n + 1 and then reads the tokens of step n. If a row turns out to have stopped at n,
the token that it computed in n + 1 is discarded. Batches are padded to a few sizes, and a CUDA
graph of that size is replayed (`buckets`; off CUDA they are only padded).

After an exception, a Ctrl-C included, a Sampler is thrown away.

Tests: pytest tests/test_sampler.py tests/test_scheduler.py tests/test_pages.py
Speed: python -m bench.sampler
"""

import math

import torch
from torch import Tensor

import kernels
from kernels.paged import rows_of_a_run
from sampler.draws import greedy, hashed, sample_token
from sampler.graphs import Graphs
from sampler.model import Model
from sampler.plan import Copies, Decode, kernel_runs, to_device
from sampler.request import Completion, Conversation, Request, check
from sampler.scheduler import Scheduler

# A decode step whose tokens the host has not read yet: its plan; fp64 [2, B], tokens (held exactly)
# and log-probs in one copy; on CUDA the event after that copy.
Unread = tuple[Decode, Tensor, "torch.cuda.Event | None"]


class Sampler:
    """Samples from `model`, a transformers causal LM, whose weights are copied.

        talk = sampler.open()
        request = sampler.submit(talk, ids, max_new_tokens=64)
        while not request.done:
            sampler.step()
        request.completion.tokens   # submit again to go on
        sampler.close(talk)         # gives the pages back

    max_tokens: tokens that the KV pool holds, over all conversations. page_size: tokens per page
    (default 16; on CUDA 64). max_sequences: rows that run together at most. prefill_chunk: tokens
    prefilled in one step at most, so that a long prompt does not starve the rows that decode
    (default 512; on CUDA 8,192). dtype: of weights and cache (default the model's; on CUDA bf16).

    overlap and buckets: see the head of this file; by default on CUDA only, in tests anywhere.
    """

    failure = RuntimeError  # what a request that ends with an error raises
    path = "own pages"  # what a run's first line says of it

    def __init__(
        self,
        model,
        *,
        max_tokens: int,
        page_size: int | None = None,
        max_sequences: int = 256,
        prefill_chunk: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        overlap: bool | None = None,
        buckets: bool | None = None,
    ):
        parameter = next(model.parameters())
        self.device = torch.device(device or parameter.device)
        cuda = self.device.type == "cuda"
        page_size = page_size or (64 if cuda else 16)
        dtype = dtype or (torch.bfloat16 if cuda else parameter.dtype)
        self.model = Model(model, dtype, self.device)
        self.scheduler = Scheduler(
            pages=max_tokens // page_size,
            page_size=page_size,
            max_sequences=max_sequences,
            prefill_chunk=prefill_chunk or (8192 if cuda else 512),
        )
        self.pages = self.scheduler.pages
        self.stats = self.scheduler.stats
        heads = self.model.kv_heads, self.model.head_size
        shape = 2, self.model.layers, self.pages.count, page_size, *heads  # 2: keys, values
        self.pool = torch.zeros(shape, dtype=self.model.cache_dtype, device=self.device)
        self.newest = torch.zeros(max_sequences, dtype=torch.int64, device=self.device)  # per row
        self.overlap = cuda if overlap is None else overlap
        self.graphs = None
        if buckets or (buckets is None and cuda):
            self.graphs = Graphs(self.model, self.pool, max_sequences)
        self.memory = torch.empty(0, device=self.device)  # of the last draw
        self.unread: Unread | None = None

    # ---- what callers use

    @property
    def busy(self) -> bool:
        """True while a request is open that step() has not returned yet."""
        return bool(self.scheduler.requests or self.scheduler.finished)

    @property
    def pages_in_use(self) -> int:
        """Pages that conversations hold now."""
        return self.pages.count - len(self.pages.free)

    def open(self) -> Conversation:
        """A new, empty conversation."""
        return Conversation()

    def submit(self, conversation: Conversation, tokens: list[int], **options) -> Request:
        """Appends `tokens` to the conversation and asks for an answer, which step() will produce.

        options: `Request`'s max_new_tokens, temperature (0 is greedy), top_p, stop_ids and seed.
        The t-th new token's draw depends on (seed, t) only. ValueError for what cannot be done;
        nothing has changed then.
        """
        request = Request(conversation, list(tokens), **options)
        check(request, self.model.vocabulary, self.pages.count * self.pages.size)
        self.scheduler.submit(request)
        return request

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Some prefill, then one new token for every ready row. Returns the finished requests."""
        if self.unread is not None and self.scheduler.lacks_slots():
            self._postprocess()  # a row that gives way is prefilled again, from tokens on the host
        copies, prefill, late_copies, decode = self.scheduler.schedule(self.unread is not None)
        self._copy_pages(copies)
        if prefill is not None:
            self.model.fill(prefill.to(self.device), self.pool)
        self._copy_pages(late_copies)
        unread = self._decode(decode) if decode is not None else None
        self._postprocess()  # of the step before, while the device computes this one
        self.unread = unread
        if not self.overlap:
            self._postprocess()
        finished, self.scheduler.finished = self.scheduler.finished, []
        return finished

    def close(self, conversation: Conversation) -> None:
        """Gives a conversation's pages back; its open request, if any, ends with an error."""
        self.scheduler.close(conversation)

    def load_weights(self, model) -> None:
        """Copies the weights in. All pages are forgotten, and recomputed when they are next used.

        model: of the same shape as the one that the sampler was built from.
        """
        self._postprocess()
        self.scheduler.release_all()
        self.model.load(model)

    # ---- one step

    def _copy_pages(self, copies: Copies) -> None:
        """One after the other, because a later source may be an earlier target."""
        for source, target in copies:
            self.pool[:, :, target] = self.pool[:, :, source]

    def _decode(self, decode: Decode) -> Unread:
        """Launches one token for each row, without waiting for the device."""
        if len(decode.started):
            started = to_device(decode.started, self.device)
            self.newest[started] = to_device(decode.newest, self.device)
        rows = to_device(decode.rows, self.device)
        batch = decode.batch
        if kernels.use_triton(self.pool):
            most = rows_of_a_run(self.model.heads // self.model.kv_heads)
            batch.runs = kernel_runs(batch.block_table, batch.lengths, self.pages.size, most)
        batch = batch.to(self.device)
        batch.ids = self.newest[rows]
        if self.graphs:
            logits = self.graphs.decode(batch)
        else:
            logits = self.model.decode(batch, self.pool)
        tokens, logprobs = self._choose(logits, decode)
        self.newest[rows] = tokens
        result = torch.stack((tokens.double(), logprobs.double())).to("cpu", non_blocking=True)
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        return decode, result, ready

    def _choose(self, logits: Tensor, decode: Decode) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs from fp32 logits [B, V]; computes only what some row asks for."""
        if not decode.temperature.any():
            return greedy(logits)
        uniforms = to_device(decode.uniforms, self.device)
        options = [
            to_device(option, self.device) if (option != 1).any() else None
            for option in (decode.temperature, decode.top_p)
        ]
        return sample_token(logits, uniforms, *options, self.memory)

    def _postprocess(self) -> None:
        """Reads the tokens of the unread step, if any, and ends the requests that are complete."""
        if self.unread is None:
            return
        decode, result, ready = self.unread
        self.unread = None
        if ready is not None:
            ready.synchronize()
        tokens, logprobs = result.tolist()
        if math.isnan(sum(logprobs)):
            raise FloatingPointError(
                "the sampler met NaN among the model's logits: its weights are damaged, or an "
                "update threw them far; begin a new run from an earlier state, with a lower --lr"
            )
        self.scheduler.collect(decode, [int(token) for token in tokens], logprobs)

    # ---- all at once, for benches and tests

    def generate(
        self,
        prompts: list[list[int]],
        *,
        max_new_tokens: int | list[int],
        seed: int = 0,
        **options,
    ) -> list[Completion]:
        """Answers to `prompts`, in order. max_new_tokens: one number, or a list of one per prompt.

        options: temperature, top_p and stop_ids, as in `submit`. Row i draws from (seed, i).
        """
        if isinstance(max_new_tokens, int):
            max_new_tokens = [max_new_tokens] * len(prompts)
        requests = []
        for i, (prompt, new) in enumerate(zip(prompts, max_new_tokens, strict=True)):
            options |= {"max_new_tokens": new, "seed": hashed(seed, i)}
            requests.append(self.submit(self.open(), prompt, **options))
        while self.busy:
            for request in self.step():
                self.close(request.conversation)
        return [request.completion for request in requests]
