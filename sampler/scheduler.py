"""The scheduler decides which requests run, and in which pages. It has integers, no tensors.

A request goes through these lists:
  waiting      it has no row; the oldest request is first
  prefilling   it has a row and pages; keys and values of its context are still missing
  decoding     only the newest token's key and value are missing: each step feeds that token and
               samples the next
  (no list)    the device computes its last token, and the host has not read that token yet
  finished     it has a completion, and step() returns it next

If there are too few free pages, conversations that do not run are preempted, the youngest first,
and then the newest running request. So the oldest running request is never preempted, and every
request finishes.

The scheduler plans a whole step before the device begins it (plan.py): copy pages, prefill, copy
pages, decode. The order matters, because one step may write a page more than once. The host gets
the sampled tokens after the step, in `collect`.

Read `schedule` first, and then its methods from top to bottom. Prefix sharing is at the end of the
file and can be read last.

Tests: pytest tests/test_scheduler.py
"""

import bisect
import collections
import itertools
from operator import attrgetter

import numpy as np

from family import common_prefix
from sampler.pages import Pages
from sampler.plan import Batch, Copies, Decode, Rows, plan_decode, plan_prefill
from sampler.request import Completion, Conversation, Request

number_of = attrgetter("number")
birth_of = attrgetter("born")
prompt_of = attrgetter("prompt")


class Scheduler:
    """Gives rows and pages to requests; see the head of this file.

    stats counts prefilled_tokens, shared_tokens and preemptions.
    """

    def __init__(self, *, pages: int, page_size: int, max_sequences: int, prefill_chunk: int):
        self.pages = Pages(pages, page_size)
        self.prefill_chunk = prefill_chunk
        self.numbers = itertools.count()
        self.stats = collections.Counter()
        self.rows = Rows(max_sequences, pages)
        self.requests: set[Request] = set()  # all open requests
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.finished: list[Request] = []
        self.holders: list[Conversation] = []  # conversations that have pages, sorted by prompt

    # ---- conversations and requests

    def submit(self, request: Request) -> None:
        """Adds a request that request.check has accepted."""
        conversation = request.conversation
        request.number = next(self.numbers)
        conversation.request = request
        conversation.tokens += request.given
        conversation.prompt = conversation.prompt or tuple(request.given)
        self.requests.add(request)
        self.waiting.append(request)

    def close(self, conversation: Conversation) -> None:
        """See Sampler.close."""
        conversation.closed = True
        request = conversation.request
        if request is not None:
            request.error = f"request {request.number}: its conversation was closed"
            self._end(request)
        self._release(conversation)

    # ---- schedule

    def schedule(self, unread: bool) -> tuple[Copies, Batch | None, Copies, Decode | None]:
        """The plan of one step: page copies, prefill, more page copies, decode, in this order.

        unread: the host has not read the tokens of the step before.
        """
        copies_before = self._admit(unread)
        prefill = self._plan_prefill()
        # Requests that waited for this prefill can share its pages now.
        copies_after = self._admit(unread)
        self._reserve()
        return copies_before, prefill, copies_after, self._plan_decode()

    def _admit(self, unread: bool) -> Copies:
        """Gives rows and pages to waiting requests, the oldest first. Returns the page copies.

        A conversation shares the first pages of a source, a conversation with a similar prompt
        (Pages.fork). While its source still prefills these pages, a request is postponed, and one
        free row is kept for it.
        """
        copies = []
        postponements = []
        while self.waiting and len(postponements) < len(self.rows.free):
            conversation = self.waiting[0].conversation
            source, shared = self._find_source(conversation)
            if source is not None and source.num_cached_tokens < shared:
                postponements.append(self.waiting.pop(0))
                continue
            lacking = self._lacking_pages(conversation, source, shared)
            if lacking > 0:
                if unread and not self.prefilling and not self.decoding:
                    break  # The unread tokens may end their requests, which frees pages.
                idle = self._idle(excluded=conversation)
                if lacking > sum(len(holder.block_table) for holder in idle):
                    break  # Rows must end first. Until then idle conversations keep their pages.
                victim = max(idle, key=birth_of)
                self._preempt(victim)
                self.stats["preemptions"] += 1
                continue  # The victim may be the source.
            copies += self._enter(self.waiting.pop(0), source, shared)
        self.waiting[:0] = postponements
        return copies

    def _lacking_pages(self, conversation: Conversation, source, shared: int) -> int:
        """How many pages it lacks if it shares `shared` tokens of `source`; below 1 if none.

        One page is reserved for every row that runs already.
        """
        needed = self.pages.missing(conversation.block_table, len(conversation.tokens))
        needed -= shared // self.pages.size
        if source is not None:  # Kept pages count as available. It takes these over.
            needed += len(self.pages.kept.keys() & source.block_table)
        running = len(self.prefilling) + len(self.decoding)
        return needed + running - self.pages.available

    def _idle(self, excluded: Conversation | None = None) -> list[Conversation]:
        """The conversations with pages and without a row, except `excluded`."""
        return [holder for holder in self.holders if holder.idle and holder is not excluded]

    def _enter(self, request: Request, source: Conversation | None, shared: int) -> Copies:
        """Gives a request its row and pages. The first `shared` tokens are those of `source`."""
        conversation = request.conversation
        copies = []
        if not conversation.block_table:
            bisect.insort(self.holders, conversation, key=prompt_of)
        if source is not None:
            conversation.block_table, copies = self.pages.fork(source.block_table, shared)
            conversation.num_cached_tokens = shared
            self.stats["shared_tokens"] += shared
        self.pages.extend(conversation.block_table, len(conversation.tokens))
        self.rows.enter(request)
        queue = self.prefilling if lacks_tokens(conversation) else self.decoding
        queue.append(request)
        return copies

    def lacks_slots(self) -> bool:
        """Whether too few pages are left for the rows' next tokens, so that preemption is needed.

        A row can be preempted only when the host knows all its tokens.
        """
        return len(self._at_page_end()) > self.pages.available

    def _at_page_end(self) -> list[Request]:
        """The decoding requests whose next token needs a new page."""
        rows = np.array([request.row for request in self.decoding], np.int64)
        ends = (self.rows.length[rows] - 1) % self.pages.size == 0
        return [self.decoding[i] for i in np.flatnonzero(ends)]

    def _reserve(self) -> None:
        """Gives each decoding row a slot for the token that it feeds, the oldest request first.

        If no page is left, the youngest idle conversation is preempted, or else the newest request.
        """
        for request in sorted(self._at_page_end(), key=number_of):
            block_table = request.conversation.block_table
            while request.row is not None:  # The request may be preempted itself.
                if self.pages.extend(block_table, int(self.rows.length[request.row])):
                    self.rows.block_table[request.row, len(block_table) - 1] = block_table[-1]
                    break
                newest = max(self.prefilling + self.decoding, key=number_of)
                self._preempt(max(self._idle(), key=birth_of, default=newest.conversation))
                self.stats["preemptions"] += 1

    def _preempt(self, conversation: Conversation) -> None:
        """Takes a conversation's pages. If its request runs, the request waits again."""
        if not conversation.idle:
            request = conversation.request
            self._leave(request)
            bisect.insort(self.waiting, request, key=number_of)
        self._release(conversation)

    def _leave(self, request: Request) -> None:
        """Removes the request from its list and frees its row."""
        if request.row is None:
            self.waiting.remove(request)
            return
        for queue in (self.prefilling, self.decoding):
            if request in queue:
                queue.remove(request)
        self.rows.leave(request)

    def _release(self, conversation: Conversation) -> None:
        """Takes the conversation's pages, if any. Full ones are kept until they are needed."""
        if conversation.block_table:
            self.holders.remove(conversation)
        cached = conversation.tokens[: conversation.num_cached_tokens]
        self.pages.release(conversation.block_table, cached)
        conversation.num_cached_tokens = 0

    def release_all(self) -> None:
        """Preempts all conversations and forgets kept pages, so that all pages are free."""
        for conversation in list(self.holders):
            self._preempt(conversation)
        self.pages.forget()

    # ---- plan

    def _plan_prefill(self) -> Batch | None:
        """The next tokens of the prefilling rows, at most `prefill_chunk`, the first row first."""
        budget = self.prefill_chunk
        spans = []
        for request in self.prefilling:
            conversation = request.conversation
            begin = conversation.num_cached_tokens
            end = min(begin + budget, len(conversation.tokens) - 1)
            if begin < end:
                spans.append((request, begin, end))
                conversation.num_cached_tokens = end
                budget -= end - begin
        if not spans:
            return None
        self.stats["prefilled_tokens"] += self.prefill_chunk - budget
        self.decoding += [r for r in self.prefilling if not lacks_tokens(r.conversation)]
        self.prefilling = [r for r in self.prefilling if lacks_tokens(r.conversation)]
        return plan_prefill(spans, self.rows, self.pages.size)

    def _plan_decode(self) -> Decode | None:
        """One token for every ready row. It is counted now, before the host reads it."""
        if not self.decoding:
            return None
        decode = plan_decode(self.decoding, self.rows, self.pages.size)
        self.rows.length[decode.rows] += 1
        self.rows.drawn[decode.rows] += 1
        self.decoding = [r for r in self.decoding if self.rows.drawn[r.row] < r.max_new_tokens]
        return decode

    # ---- postprocess

    def collect(self, decode: Decode, tokens: list[int], logprobs: list[float]) -> None:
        """Appends a step's tokens and ends the requests that are complete."""
        for request, token, logprob in zip(decode.requests, tokens, logprobs, strict=True):
            if request.done:  # It stopped one step ago or was closed: the token is discarded.
                continue
            conversation = request.conversation
            # The step stored the key and value of the token that it fed, the newest one until now.
            conversation.num_cached_tokens = len(conversation.tokens)
            conversation.tokens.append(token)
            request.tokens.append(token)
            request.logprobs.append(logprob)
            if request.finish:
                request.completion = Completion(request.tokens, request.logprobs, request.finish)
                self._end(request)
                self.finished.append(request)

    def _end(self, request: Request) -> None:
        """Removes a request that is done."""
        self._leave(request)
        self.requests.remove(request)
        request.conversation.request = None

    # ---- prefix sharing: read this last
    #
    # A holder is a conversation that has pages. The source of a new conversation is the holder
    # whose prompt has the longest prefix in common with the new prompt. The new request waits until
    # its source has prefilled that prefix. Such a source runs, so no request waits for a request
    # that waits. The request may begin in the step of that prefill, since page copies follow it.
    # If kept pages of closed or preempted conversations have a longer prefix, they are shared.

    def _find_source(self, conversation: Conversation) -> tuple[Conversation | None, int]:
        """The holder of pages to share, and the number of tokens that are shared.

        (None, 0) if the conversation has pages already, or there is no page to share. Prompts are
        sorted, so the neighbours of a prompt have the longest prefixes in common with it. An equal
        prompt is shared except for its last token, which is fed again for its logits. Of other
        prompts only full pages are shared. For kept pages a new Conversation is the holder.
        """
        prompt = conversation.prompt
        source, shared = None, 0
        if conversation.block_table:
            return source, shared
        i = bisect.bisect_left(self.holders, prompt, key=prompt_of)
        for holder in self.holders[max(0, i - 1) : i + 1]:
            if holder.prompt == prompt:
                source, shared = holder, len(prompt) - 1
                break
            # The last token of a prompt is never prefilled.
            common = common_prefix(prompt, holder.prompt)
            common = min(common, len(prompt) - 1, len(holder.prompt) - 1)
            full = common - common % self.pages.size
            if full > shared:
                source, shared = holder, full
        pages = self.pages.find(conversation.tokens[:-1])
        if len(pages) * self.pages.size > shared:
            shared = len(pages) * self.pages.size
            source = Conversation(block_table=pages, num_cached_tokens=shared)
        return source, shared


def lacks_tokens(conversation: Conversation) -> bool:
    """Whether more keys and values are missing than those of the newest token."""
    return conversation.num_cached_tokens < len(conversation.tokens) - 1
