"""The sampler: a paged KV cache and continuous batching in plain PyTorch.

The keys and values of all conversations are in one pool of pages. A conversation has a block table
and keeps it between its turns. Conversations whose prompts have a common beginning share its
pages (prefix sharing). A step has three parts: schedule (scheduler.py gives rows and pages to
requests), run (this file: a packed prefill, then one token for every row that is ready) and
postprocess (append the tokens and end the requests that are complete).

The code relies on two invariants:
  cached   Pages hold the keys and values of a conversation's first `num_cached_tokens` tokens. A
           row is ready to decode when only its newest token is missing: it feeds that token and
           samples the next. All other tokens (prompt, tool notes, the tokens of a preempted row)
           are prefilled, and a prefill never samples.
  draws    The t-th new token of a request is a function of its logits and of (seed, t). So an
           answer does not depend on the rows beside it, nor on whether a row is computed again. It
           can differ only where the last bits of the logits decide a draw.

Departure from the textbook: on CUDA a sampled token stays on the GPU, and the host reads it one
step later (`overlap`). The host launches step n + 1 and then reads the tokens of step n. If a row
stopped at step n, its token of step n + 1 is discarded. Batches are padded to a few sizes, and the
CUDA graph of that size is replayed (`buckets`). Without CUDA, batches are padded only in tests.

A Sampler cannot be used after an exception in `step`, and Ctrl-C is one.

Tests: pytest tests/test_sampler.py tests/test_scheduler.py tests/test_pages.py
Speed: python -m bench.gpu --step decode
"""

import math

import torch
from torch import Tensor

import kernels
from kernels.paged import max_rows_of_range
from sampler.draws import greedy, hash64, sample_token
from sampler.graphs import Graphs
from sampler.model import Model
from sampler.plan import Copies, Decode, plan_kv_ranges, to_device
from sampler.request import Completion, Conversation, Request, check
from sampler.scheduler import Scheduler

# A decode step that the host has not read yet: its plan, a tensor [2, B] of tokens and log-probs
# (fp64 represents token ids exactly), and on CUDA the event after the copy to the host.
Unread = tuple[Decode, Tensor, "torch.cuda.Event | None"]


class Sampler:
    """Samples from `model`, a transformers causal LM, whose weights are copied.

        talk = sampler.open()
        request = sampler.submit(talk, ids, max_new_tokens=64)
        while not request.done:
            sampler.step()
        request.completion.tokens   # submit again to go on
        sampler.close(talk)         # gives the pages back

    max_tokens: the size of the KV pool in tokens, over all conversations. page_size: tokens per
    page (default 16; on CUDA 64). max_sequences: the most rows that run together. prefill_chunk:
    the most tokens that one step prefills, so that rows need not wait long for another's prompt
    (default 512; on CUDA 8,192). dtype: of weights and cache (default the model's; on CUDA bf16).
    overlap, buckets: see the head of this file (default: on CUDA only).
    """

    label = "own pages"  # the name of this sampler in a run's first line

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
        self.pool: Tensor | None = None  # step() makes the pool
        self.graphs: Graphs | None = None
        self.newest = torch.zeros(max_sequences, dtype=torch.int64, device=self.device)  # per row
        self.overlap = cuda if overlap is None else overlap
        self.buckets = cuda if buckets is None else buckets
        self.probs_buffer = torch.empty(0, device=self.device)  # see draws.sample_token
        self.unread: Unread | None = None

    # ---- what callers use

    @property
    def busy(self) -> bool:
        """Whether step() has still to return a request."""
        return bool(self.scheduler.requests or self.scheduler.finished)

    @property
    def pages_in_use(self) -> int:
        """Pages that conversations hold now."""
        return self.pages.count - self.pages.available

    def open(self) -> Conversation:
        """A new, empty conversation."""
        return Conversation()

    def submit(self, conversation: Conversation, tokens: list[int], **options) -> Request:
        """Appends `tokens` to the conversation and asks for an answer, which step() will produce.

        options: `Request`'s max_new_tokens, temperature (0 is greedy), top_p, stop_ids and seed.
        ValueError, without any change, for a request that cannot be served.
        """
        request = Request(conversation, list(tokens), **options)
        check(request, self.model.vocabulary, self.pages.count * self.pages.size)
        self.scheduler.submit(request)
        return request

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Prefills, then samples one token for every ready row. Returns the finished requests."""
        if self.pool is None:
            self._make_pool()
        if self.unread is not None and self.scheduler.lacks_slots():
            self._postprocess()  # The host must know all tokens of a row that is preempted.
        plan = self.scheduler.schedule(unread=self.unread is not None)
        copies_before, prefill, copies_after, decode = plan
        self._copy_pages(copies_before)
        if prefill is not None:
            self.model.fill(prefill.to(self.device), self.pool)
        self._copy_pages(copies_after)
        new_step = self._decode(decode) if decode is not None else None
        self._postprocess()  # reads the step before, while the device computes the new one
        self.unread = new_step
        if not self.overlap:
            self._postprocess()
        finished, self.scheduler.finished = self.scheduler.finished, []
        return finished

    def close(self, conversation: Conversation) -> None:
        """Gives a conversation's pages back; its open request, if any, ends with an error.

        Full pages keep their contents until they are needed, for later prompts that begin alike.
        """
        self.scheduler.close(conversation)

    def lend_pool(self) -> None:
        """Frees pool and graphs until the next step; conversations in use are prefilled again."""
        self._postprocess()
        self.scheduler.release_all()
        self.pool = self.graphs = None
        self.probs_buffer = self.probs_buffer.new_empty(0)

    def load_weights(self, model) -> None:
        """Copies the weights of `model`, whose config must be that of the sampler's first model.

        All pages are freed. A conversation that goes on is prefilled again.
        """
        self._postprocess()
        self.scheduler.release_all()
        self.model.load(model)

    # ---- one step

    def _make_pool(self) -> None:
        """The pool, and the graphs that keep its address."""
        heads = self.model.kv_heads, self.model.head_size
        shape = 2, self.model.layers, self.pages.count, self.pages.size, *heads  # keys and values
        self.pool = torch.zeros(shape, dtype=self.model.cache_dtype, device=self.device)
        if self.buckets:
            self.graphs = Graphs(self.model, self.pool, len(self.newest))

    def _copy_pages(self, copies: Copies) -> None:
        """Copies pages one after the other, because a later source may be an earlier target."""
        for source, target in copies:
            self.pool[:, :, target] = self.pool[:, :, source]

    def _decode(self, decode: Decode) -> Unread:
        """Launches one token for each row, without waiting for the device."""
        if len(decode.fresh):
            fresh = to_device(decode.fresh, self.device)
            self.newest[fresh] = to_device(decode.newest, self.device)
        rows = to_device(decode.rows, self.device)
        batch = decode.batch
        if kernels.use_triton(self.pool):
            max_rows = max_rows_of_range(self.model.heads // self.model.kv_heads)
            table, lengths = batch.block_table, batch.lengths
            batch.kv_ranges = plan_kv_ranges(table, lengths, self.pages.size, max_rows)
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
        """Tokens and log-probs [B] from fp32 logits [B, V], without options that no row uses."""
        if not decode.temperature.any():
            return greedy(logits)
        uniforms = to_device(decode.uniforms, self.device)
        options = [
            to_device(option, self.device) if (option != 1).any() else None
            for option in (decode.temperature, decode.top_p)
        ]
        any_greedy = not decode.temperature.all()
        return sample_token(logits, uniforms, *options, self.probs_buffer, any_greedy=any_greedy)

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
                "the model's logits contain NaN or infinity: its weights are damaged, or an update "
                "was too large; in training, begin a new run from an earlier state and lower --lr"
            )
        self.scheduler.collect(decode, [int(token) for token in tokens], logprobs)

    # ---- for benches and tests

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
            options |= {"max_new_tokens": new, "seed": hash64(seed, i)}
            requests.append(self.submit(self.open(), prompt, **options))
        while self.busy:
            for request in self.step():
                if request in requests:
                    self.close(request.conversation)
        return [request.completion for request in requests]
