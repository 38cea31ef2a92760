"""The scheduler: which requests run, and in which pages. Plain integers, no tensor.

A request's way, and the list it is in:
  waiting      it has no row; listed in the order of the requests' numbers, the oldest first
  prefilling   it has a row and pages; keys and values of its context are still missing
  decoding     only the newest token's key and value are missing: each step feeds that token and
               samples the next
  (none)       its last token is being computed, and the host has not read it yet
  finished     it has a completion and is handed to the caller next

When pages run out, conversations that do not run give way first, the youngest first, and then the
newest request. So the oldest request that runs always goes on, and no request waits for ever.

A step is planned ahead (plan.py): the device copies pages, prefills, copies pages and decodes. The
order matters, because a page may change hands within one step. What the host learns only
afterwards, the tokens, comes back through `collect`.

Read `schedule` and what it calls from top to bottom. How prompts that begin alike share pages
stands at the end of the file and can be read later.

Test: pytest tests/test_scheduler.py
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
age_of = attrgetter("age")
prompt_of = attrgetter("prompt")


class Scheduler:
    """Hands out rows and pages; see the head of this file.

    stats: prefilled_tokens and shared_tokens, and preemptions: how often pages ran out.
    """

    def __init__(self, *, pages: int, page_size: int, max_sequences: int, prefill_chunk: int):
        self.pages = Pages(pages, page_size)
        self.prefill_chunk = prefill_chunk
        self.numbers = itertools.count()
        self.stats = collections.Counter()
        self.rows = Rows(max_sequences, pages)
        self.requests: set[Request] = set()  # the open ones
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.finished: list[Request] = []
        self.holders: list[Conversation] = []  # those that have pages, sorted by their prompts

    # ---- conversations and requests

    def submit(self, request: Request) -> None:
        """Takes a checked request."""
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
        """One step, in the order in which the device does it.

        unread: the step before is under way and its tokens are not known yet.
        """
        copies = self._admit(unread)
        prefill = self._plan_prefill()
        # Who waited for what is prefilled now can copy it after that.
        late_copies = self._admit(unread)
        self._reserve()
        return copies, prefill, late_copies, self._plan_decode()

    def _admit(self, unread: bool) -> Copies:
        """Gives rows and pages to waiting requests, the oldest first.

        A conversation whose prompt begins like that of one with pages, its leader, takes these
        pages over (Pages.fork). While the leader still prefills them, its followers are passed over
        and a row is kept for each of them. Returns the page copies that the forks need.
        """
        copies = []
        followers = []
        while self.waiting and len(followers) < len(self.rows.free):
            conversation = self.waiting[0].conversation
            leader, shared = self._leader(conversation)
            if leader is not None and leader.num_cached_tokens < shared:
                followers.append(self.waiting.pop(0))
                continue
            if self._lacks_pages(conversation, shared):
                if unread and not self.prefilling and not self.decoding:
                    break  # the tokens that are under way may end their requests and free pages
                victim = self._youngest_idle(but=conversation)
                if victim is None:
                    break
                self._preempt(victim)
                self.stats["preemptions"] += 1
                continue  # the leader itself may have given way
            copies += self._enter(self.waiting.pop(0), leader, shared)
        self.waiting[:0] = followers
        return copies

    def _lacks_pages(self, conversation: Conversation, shared: int) -> bool:
        """Whether too few pages are free for a conversation that shares its first `shared` tokens.

        One page is kept for every row that runs already.
        """
        needed = self.pages.missing(conversation.block_table, len(conversation.tokens))
        needed -= shared // self.pages.size
        running = len(self.prefilling) + len(self.decoding)
        return needed + running > len(self.pages.free)

    def _youngest_idle(self, but: Conversation | None = None) -> Conversation | None:
        """The youngest conversation, other than `but`, that holds pages and no row."""
        idle = [holder for holder in self.holders if holder.idle and holder is not but]
        return max(idle, key=age_of, default=None)

    def _enter(self, request: Request, leader: Conversation | None, shared: int) -> Copies:
        """Gives a request a row, and its conversation pages: the first ones from its leader."""
        conversation = request.conversation
        copies = []
        if not conversation.block_table:
            bisect.insort(self.holders, conversation, key=prompt_of)
        if leader is not None:
            conversation.block_table, copy = self.pages.fork(leader.block_table, shared)
            conversation.num_cached_tokens = shared
            self.stats["shared_tokens"] += shared
            copies += [copy] if copy else []
        self.pages.extend(conversation.block_table, len(conversation.tokens))
        self.rows.enter(request)
        queue = self.prefilling if lacks_tokens(conversation) else self.decoding
        queue.append(request)
        return copies

    def lacks_slots(self) -> bool:
        """Whether too few pages are free for the rows' next tokens, so that a row may give way.

        A row can only do so when the host knows all its tokens.
        """
        return len(self._at_page_end()) > len(self.pages.free)

    def _at_page_end(self) -> list[Request]:
        """The decoding rows whose next token is the first of a page."""
        rows = np.array([request.row for request in self.decoding], np.int64)
        ends = (self.rows.length[rows] - 1) % self.pages.size == 0
        return [self.decoding[i] for i in np.flatnonzero(ends)]

    def _reserve(self) -> None:
        """A slot for the token that each decoding row feeds, for the oldest request first.

        The youngest idle conversation gives way for it, or else the newest request.
        """
        for request in sorted(self._at_page_end(), key=number_of):
            block_table = request.conversation.block_table
            while request.row is not None:  # else it gave way itself
                if self.pages.extend(block_table, int(self.rows.length[request.row])):
                    self.rows.block_table[request.row, len(block_table) - 1] = block_table[-1]
                    break
                newest = max(self.prefilling + self.decoding, key=number_of)
                self._preempt(self._youngest_idle() or newest.conversation)
                self.stats["preemptions"] += 1

    def _preempt(self, conversation: Conversation) -> None:
        """Takes a conversation's pages; its request, if it runs, waits again."""
        if not conversation.idle:
            request = conversation.request
            self._leave(request)
            bisect.insort(self.waiting, request, key=number_of)
        self._release(conversation)

    def _leave(self, request: Request) -> None:
        """The request is in no list any more, and its row is free."""
        if request.row is None:
            self.waiting.remove(request)
            return
        for queue in (self.prefilling, self.decoding):
            if request in queue:
                queue.remove(request)
        self.rows.leave(request)

    def _release(self, conversation: Conversation) -> None:
        """Gives its pages back, if it has any."""
        if conversation.block_table:
            self.holders.remove(conversation)
        conversation.num_cached_tokens = 0
        self.pages.release(conversation.block_table)

    def release_all(self) -> None:
        """Everybody gives way: no page holds keys and values any more."""
        for conversation in list(self.holders):
            self._preempt(conversation)

    # ---- plan

    def _plan_prefill(self) -> Batch | None:
        """The next tokens of the rows that can't decode yet, in the order of their admission."""
        budget = self.prefill_chunk
        chunks = []
        for request in self.prefilling:
            conversation = request.conversation
            begin = conversation.num_cached_tokens
            end = min(begin + budget, len(conversation.tokens) - 1)
            if begin < end:
                chunks.append((request, begin, end))
                conversation.num_cached_tokens = end
                budget -= end - begin
        if not chunks:
            return None
        self.stats["prefilled_tokens"] += self.prefill_chunk - budget
        self.decoding += [r for r in self.prefilling if not lacks_tokens(r.conversation)]
        self.prefilling = [r for r in self.prefilling if lacks_tokens(r.conversation)]
        return plan_prefill(chunks, self.rows, self.pages.size)

    def _plan_decode(self) -> Decode | None:
        """One token for every row that is ready. Counts them as drawn, though nobody read them."""
        if not self.decoding:
            return None
        state = self.rows
        decode = plan_decode(self.decoding, state, self.pages.size)
        state.length[decode.rows] += 1
        state.drawn[decode.rows] += 1
        self.decoding = [r for r in self.decoding if state.drawn[r.row] < r.max_new_tokens]
        return decode

    # ---- postprocess

    def collect(self, decode: Decode, tokens: list[int], logprobs: list[float]) -> None:
        """Appends a step's tokens and ends the requests that are complete."""
        for request, token, logprob in zip(decode.requests, tokens, logprobs, strict=True):
            if request.done:  # it stopped one token ago, or was closed: the token is discarded
                continue
            conversation = request.conversation
            # The token that was fed is in its page now.
            conversation.num_cached_tokens = len(conversation.tokens)
            conversation.tokens.append(token)
            request.tokens.append(token)
            request.logprobs.append(logprob)
            if request.finish:
                request.completion = Completion(request.tokens, request.logprobs, request.finish)
                self._end(request)
                self.finished.append(request)

    def _end(self, request: Request) -> None:
        """The request is done and open no more."""
        self._leave(request)
        self.requests.remove(request)
        request.conversation.request = None

    # ---- prompts that begin alike: read this later
    #
    # A holder is a conversation that has pages. The leader of a new one is the holder whose prompt
    # begins most like its own; a follower waits until its leader has prefilled what they share.
    # A leader that is not ready runs, so nobody waits for one who waits. What is prefilled in the
    # step that is being planned can be shared in the same step, by copies that come after it.

    def _leader(self, conversation: Conversation) -> tuple[Conversation | None, int]:
        """The holder that shares most of a conversation's prompt, and how many tokens it shares.

        (None, 0) if the conversation has pages already, or nothing can be shared. Among sorted
        prompts those beside a prompt begin most like it. An equal prompt is shared up to its last
        token, which is fed again for its logits; of others only full pages are. Holders of one
        prompt have forked its first holder, so all hold the same pages of it.
        """
        prompt = conversation.prompt
        leader, shared = None, 0
        if conversation.block_table:
            return leader, shared
        i = bisect.bisect_left(self.holders, prompt, key=prompt_of)
        for holder in self.holders[max(0, i - 1) : i + 1]:
            if holder.prompt == prompt:
                return holder, len(prompt) - 1
            # The last token of a prompt is not prefilled.
            common = common_prefix(prompt, holder.prompt)
            common = min(common, len(prompt) - 1, len(holder.prompt) - 1)
            full = common - common % self.pages.size
            if full > shared:
                leader, shared = holder, full
        return leader, shared


def lacks_tokens(conversation: Conversation) -> bool:
    """Whether keys and values of more than its newest token are missing."""
    return conversation.num_cached_tokens < len(conversation.tokens) - 1
