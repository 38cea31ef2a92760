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
the token that it computed in n + 1 is discarded. Batches are padded to a bucket's size, and a CUDA
graph of that bucket is replayed (`buckets`). Both can be switched on anywhere. Off CUDA `buckets`
pads the batches and replays no graph.

An exception, a Ctrl-C included, may cut a call short at any line. The next call then makes the
state whole again: conversations and open requests stay, and their pages are recomputed.

Tests: pytest tests/test_sampler.py tests/test_scheduler.py tests/test_pages.py
Speed: python -m bench.sampler
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sampler.attention import Batch
from sampler.draws import greedy, hashed, sample_token, uniform
from sampler.forward import make_forward
from sampler.graphs import Buckets
from sampler.plan import Copies, Decode, Plan, Prefill
from sampler.request import Completion, Conversation, Request, integer, make_request, token_ids
from sampler.scheduler import Scheduler


@dataclass
class Unread:
    """A decode step whose tokens the host has not read yet."""

    decode: Decode
    result: Tensor  # fp64 [2, B]: tokens (fp64 holds them exactly) and log-probs, in one copy
    step: int
    ready: "torch.cuda.Event | None"


class Sampler:
    """Samples from `model`, a transformers causal LM, whose weights are copied.

        talk = sampler.open()
        request = sampler.submit(talk, ids, max_new_tokens=64)
        while not request.done:
            sampler.step()
        request.completion.tokens   # submit again to go on
        sampler.close(talk)         # gives the pages back

    max_tokens: tokens that the KV pool holds, over all conversations. page_size: tokens per page
    (default 16; on CUDA 64; 256 lets flash-attn decode, if it is installed). max_sequences: rows
    that run together at most. prefill_chunk: tokens prefilled in one step at most, so that a long
    prompt does not starve the rows that decode (default 512; on CUDA 8,192). dtype: of weights and
    cache (default the model's; on CUDA bf16).

    The rest is for measurements and tests. share_prompts=False prefills every prompt by itself.
    own_forward=False asks for the stock modules; `path` says which forward runs, and `why_stock`
    why it is not our own. overlap and buckets: see the head of this file; on for CUDA.
    """

    failure = FloatingPointError  # what a request that has failed raises

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
        share_prompts: bool = True,
        own_forward: bool = True,
        overlap: bool | None = None,
        buckets: bool | None = None,
    ):
        parameter = next(model.parameters())
        self.device = torch.device(device or parameter.device)
        cuda = self.device.type == "cuda"
        if page_size is None:
            page_size = 64 if cuda else 16
        if prefill_chunk is None:
            prefill_chunk = 8192 if cuda else 512
        if dtype is None:
            dtype = torch.bfloat16 if cuda else parameter.dtype
        if overlap is None:
            overlap = cuda
        if min(page_size, max_sequences, prefill_chunk) < 1:
            raise ValueError("page_size, max_sequences and prefill_chunk must be at least 1")
        if max_tokens < page_size:
            raise ValueError(
                f"max_tokens ({max_tokens}) is smaller than one page of {page_size}; "
                "raise max_tokens"
            )
        with self._full_precision():
            self.forward = make_forward(model, dtype, self.device, own_forward)
        self.path = self.forward.path
        self.why_stock = self.forward.why_stock
        if buckets is None:
            buckets = cuda and self.why_stock is None
        self.scheduler = Scheduler(
            pages=max_tokens // page_size,
            page_size=page_size,
            max_sequences=max_sequences,
            prefill_chunk=prefill_chunk,
            share_prompts=share_prompts,
        )
        self.pages = self.scheduler.pages
        self.stats = self.scheduler.stats
        shape = (
            2,  # keys, values
            self.forward.layers,
            self.pages.count,
            page_size,
            self.forward.kv_heads,
            self.forward.head_size,
        )
        self.pool = torch.zeros(shape, dtype=self.forward.cache_dtype, device=self.device)
        self.decoder = self.forward
        if buckets:
            with self._full_precision():
                self.decoder = Buckets(self.forward, self.pool, max_sequences)
        self.newest = torch.zeros(max_sequences, dtype=torch.int64, device=self.device)  # per row
        self.overlap = overlap
        self.steps = 0
        self.unread: Unread | None = None
        self.interrupted = False

    # ---- what callers use

    @property
    def busy(self) -> bool:
        """True while a request is open that step() has not returned yet."""
        return bool(self.scheduler.requests or self.scheduler.finished)

    @property
    def pages_in_use(self) -> int:
        """Pages that conversations hold now."""
        return self.pages.in_use

    def open(self) -> Conversation:
        """A new, empty conversation."""
        return Conversation()

    def close(self, conversation: Conversation) -> None:
        """Gives a conversation's pages back; its open request, if any, ends with an error.

        Closing twice is allowed. ValueError, and nothing has changed, for one of another sampler.
        """
        self._repair()
        self._check_own(conversation)
        self._begin()
        self.scheduler.close(conversation)
        self.interrupted = False

    def submit(
        self,
        conversation: Conversation,
        tokens,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        stop_ids=(),
        seed: int = 0,
    ) -> Request:
        """Appends `tokens` to the conversation and asks for an answer, which step() will produce.

        tokens, stop_ids: lists, tensors or other iterables of integers. temperature 0 is greedy.
        The t-th new token's draw depends on (seed, t) only. TypeError or ValueError on bad input;
        nothing has changed then, and the call can be repeated.
        """
        self._repair()
        self._check_own(conversation)
        request = make_request(
            conversation,
            tokens,
            vocabulary=self.forward.vocabulary,
            positions=self.forward.positions,
            pool=self.pages.count * self.pages.size,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            stop_ids=stop_ids,
            seed=seed,
        )
        self._begin()
        self.scheduler.submit(request)
        self.interrupted = False
        return request

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Some prefill, then one new token for every ready row. Returns the finished requests.

        A Ctrl-C while the call returns can lose them; each request still tells that it is `done`.
        """
        self._begin()
        self._step()
        self.interrupted = False
        return self.scheduler.hand_out()

    @torch.inference_mode()
    def generate(
        self,
        prompts,
        *,
        max_new_tokens: int | list[int],
        temperature: float = 1.0,
        top_p: float = 1.0,
        stop_ids=(),
        seed: int = 0,
    ) -> list[Completion]:
        """Answers to `prompts`, in order. max_new_tokens: one number, or a list of one per prompt.

        Row i draws from (seed, i). Bad input is refused as by `submit`, before anything runs. A
        row whose logits are NaN raises RuntimeError after the others have finished.
        """
        self._repair()
        if self.busy:
            raise ValueError(
                "generate was called while other requests run; finish them with step() first"
            )
        prompts = list(prompts)
        wanted = max_new_tokens
        if not isinstance(wanted, (list, tuple)):
            wanted = [wanted] * len(prompts)
        if len(wanted) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(wanted)} values of max_new_tokens")
        stop_ids = token_ids(stop_ids, "stop_ids")
        seed = integer(seed, "seed")
        requests = []
        for i, (prompt, new) in enumerate(zip(prompts, wanted, strict=True)):
            request = make_request(
                Conversation(temporary=True),
                prompt,
                vocabulary=self.forward.vocabulary,
                positions=self.forward.positions,
                pool=self.pages.count * self.pages.size,
                max_new_tokens=new,
                temperature=temperature,
                top_p=top_p,
                stop_ids=stop_ids,
                seed=hashed(seed, i),
            )
            requests.append(request)
        try:
            self._begin()
            for request in requests:
                self.scheduler.submit(request)
            while self.busy:
                self._step()
                for request in self.scheduler.hand_out():
                    self.scheduler.close(request.conversation)
            self.interrupted = False
        finally:
            self._repair()
        errors = [request.error for request in requests if request.error]
        if errors:
            raise RuntimeError("; ".join(errors))
        return [request.completion for request in requests]

    def load_weights(self, model) -> None:
        """Copies the weights in. All pages are forgotten, and recomputed when they are next used.

        ValueError, and nothing has changed, unless `model` is the one that the sampler was built
        from but for its weights. Another exception may leave some weights old and some new: load
        them again then.
        """
        self.forward.check(model)
        self._begin()
        self._postprocess()
        self.scheduler.release_all()
        self.forward.load(model)
        self.interrupted = False

    def share_weights(self, model) -> None:
        """Frees the memory of the model's matrices: they become views of the sampler's copy.

        For a model of the same weights, which nobody may change from now on.
        """
        self.forward.share(model)

    def _check_own(self, conversation: Conversation) -> None:
        """TypeError or ValueError for what is no conversation of this sampler."""
        if not isinstance(conversation, Conversation):
            raise TypeError(f"not a conversation: {conversation!r}")
        if conversation.closed or not conversation.tokens:
            return
        if conversation not in self.scheduler.live:
            raise ValueError("the conversation belongs to another sampler")

    # ---- a call that is cut short

    def _begin(self) -> None:
        """Marks the state as half changed, until the caller sets `interrupted` to False."""
        self._repair()
        self.interrupted = True

    def _repair(self) -> None:
        """Makes the state whole if the call before was cut short."""
        if not self.interrupted:
            return
        self.unread = None
        self.scheduler.reset()
        self.pool.zero_()  # a row of NaN may not have been cleared
        self.interrupted = False

    # ---- one step

    def _full_precision(self) -> torch.autocast:
        """A caller's autocast would round the model's products."""
        return torch.autocast(self.device.type, enabled=False)

    def _step(self) -> None:
        self.steps += 1
        if self.unread is not None and self.scheduler.lacks_slots():
            self._postprocess()  # who gives way must have all its tokens on the host
        plan = self.scheduler.schedule(unread=self.unread is not None)
        with self._full_precision():
            unread = self._run(plan)
        self._postprocess()  # of the step before, while the device computes this one
        self.unread = unread
        if not self.overlap:
            self._postprocess()
        self.scheduler.count_load()

    def _run(self, plan: Plan) -> Unread | None:
        self._copy_pages(plan.copies)
        if plan.prefill is not None:
            self._prefill(plan.prefill)
        self._copy_pages(plan.late_copies)
        if plan.decode is None:
            return None
        return self._decode(plan.decode)

    def _copy_pages(self, copies: Copies) -> None:
        """One after the other, because a later source may be an earlier target."""
        for source, target in copies:
            self.pool[:, :, target] = self.pool[:, :, source]

    def _prefill(self, prefill: Prefill) -> None:
        """One packed forward that writes keys and values."""
        batch = Batch(
            self._to_device(prefill.ids),
            self._to_device(prefill.positions),
            self._to_device(prefill.slots),
            self._to_device(prefill.block_table),
            self._to_device(np.array(prefill.lengths, np.int32)),
            starts=prefill.starts,
            spans=prefill.lengths,
        )
        self.forward.fill(batch, self.pool)

    def _decode(self, decode: Decode) -> Unread:
        """Launches one token for each row, without waiting for the device."""
        if len(decode.started):
            self.newest[self._to_device(decode.started)] = self._to_device(decode.newest)
        rows = self._to_device(decode.rows)
        batch = Batch(
            self.newest[rows],
            self._to_device(decode.positions),
            self._to_device(decode.slots),
            self._to_device(decode.block_table),
            self._to_device(decode.lengths.astype(np.int32)),
            spans=decode.lengths.tolist(),
        )
        logits = self.decoder.decode(batch, self.pool)  # [B, V] fp32
        tokens, logprobs = self._choose(logits, decode)
        self.newest[rows] = tokens
        result = torch.stack((tokens.double(), logprobs.double())).to("cpu", non_blocking=True)
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        return Unread(decode, result, self.steps, ready)

    def _choose(self, logits: Tensor, decode: Decode) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs of the rows; computes only what some row asks for."""
        if not decode.temperature.any():
            return greedy(logits)
        uniforms = self._to_device(uniform(decode.seeds, decode.places))
        temperature = None
        if (decode.temperature != 1).any():
            temperature = self._to_device(decode.temperature)
        top_p = None
        if (decode.top_p != 1).any():
            top_p = self._to_device(decode.top_p)
        return sample_token(logits, uniforms, temperature, top_p)

    def _postprocess(self) -> None:
        """Reads the tokens of the unread step, if any, and ends the requests that are complete."""
        unread = self.unread
        self.unread = None
        if unread is None:
            return
        if unread.ready is not None:
            unread.ready.synchronize()
        tokens, logprobs = unread.result.tolist()
        tokens = [int(token) for token in tokens]
        spoiled = self.scheduler.collect(unread.decode, tokens, logprobs, unread.step)
        for page in spoiled:
            self.pool[:, :, page] = 0

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
