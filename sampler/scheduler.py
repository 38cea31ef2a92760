"""The scheduler: which requests run, and in which pages. Plain integers, no tensor.

A request's way, and the list it is in:
  waiting      it has no row; listed in the order of the requests' numbers, the oldest first
  prefilling   it has a row and pages; keys and values of its context are still missing
  decoding     only the newest token's key and value are missing: each step feeds that token and
               samples the next
  ending       its last token is being computed, and the host has not read it yet
  finished     it has a completion and is handed to the caller next

When pages run out, conversations that do not run give way first, the youngest first, and then the
newest request. So the oldest request that runs always goes on, and no request waits for ever.

A step is planned ahead as a `Plan` (plan.py): the device copies pages, prefills, copies pages and
decodes. The order matters, because a page may change hands within one step. What the host learns
only afterwards, the tokens, comes back through `collect`.

Read `schedule` and what it calls from top to bottom. How prompts that begin alike share pages
stands at the end of the file and can be read later.

Test: pytest tests/test_scheduler.py
"""

import bisect
import itertools
from operator import attrgetter

import numpy as np

from sampler.pages import Pages
from sampler.plan import Batch, Copies, Decode, Plan, Rows, plan_decode, plan_prefill
from sampler.request import Completion, Conversation, Request

# Sums since the start, and behind them what is so now.
STATS = "prefilled_tokens decoded_tokens shared_tokens preemptions".split()
STATS += "running waiting pages_in_use".split()
number_of = attrgetter("number")
age_of = attrgetter("age")


class Scheduler:
    """Hands out rows and pages; see the head of this file."""

    def __init__(self, *, pages: int, page_size: int, max_sequences: int, prefill_chunk: int):
        self.pages = Pages(pages, page_size)
        self.prefill_chunk = prefill_chunk
        self.numbers = itertools.count()
        self.stats = dict.fromkeys(STATS, 0)
        self.rows = Rows(max_sequences, pages)
        self.live: set[Conversation] = set()
        self.requests: dict[int, Request] = {}  # the open ones, by number
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.ending: list[Request] = []
        self.finished: list[Request] = []
        self.started: list[Request] = []  # began to decode in the step that is being planned
        self.holders: dict[tuple, list[Conversation]] = {}  # prompt -> whose pages hold it
        self.prompts: list[tuple] = []  # the keys of `holders`, sorted

    # ---- conversations and requests

    def submit(self, request: Request) -> None:
        """Takes a checked request. Its conversation is live from then on, until it is closed."""
        conversation = request.conversation
        request.number = next(self.numbers)
        self.live.add(conversation)
        conversation.request = request
        conversation.tokens += request.given
        conversation.prompt = conversation.prompt or tuple(request.given)
        self.requests[request.number] = request
        self.waiting.append(request)

    def close(self, conversation: Conversation) -> None:
        """See Sampler.close."""
        conversation.closed = True
        if conversation not in self.live:
            return
        request = conversation.request
        if request is not None:
            for queue in (self.waiting, self.prefilling, self.decoding, self.ending):
                if request in queue:
                    queue.remove(request)
            request.error = f"request {request.number}: its conversation was closed"
            self._end(request)
        self._release(conversation)
        self.live.discard(conversation)

    def hand_out(self) -> list[Request]:
        """The requests that finished since the last call, in the order in which they did."""
        finished = self.finished
        self.finished = []
        return finished

    def count_load(self) -> None:
        """What the progress line shows."""
        self.stats["running"] = len(self.prefilling) + len(self.decoding)
        self.stats["waiting"] = len(self.waiting)
        self.stats["pages_in_use"] = self.pages.in_use

    # ---- schedule

    def schedule(self, unread: bool) -> Plan:
        """Plans one step. unread: the step before is under way and its tokens are not known yet."""
        plan = Plan()
        self.started = []
        plan.copies, followers = self._admit(unread)
        plan.prefill = self._plan_prefill()
        if followers:  # the plan may prefill what they wait for; they copy pages after it
            plan.late_copies, _ = self._admit(unread)
        self._reserve()
        plan.decode = self._plan_decode()
        return plan

    def _admit(self, unread: bool) -> tuple[Copies, list[Request]]:
        """Gives rows and pages to waiting requests, the oldest first.

        A conversation whose prompt begins as a leader's in the pool forks its pages. While the
        leader still prefills them, its followers are passed over and a row is kept for each of
        them. Returns the page copies that the forks need, and the followers.
        """
        copies = []
        followers = []
        while self.waiting and len(followers) < len(self.rows.free):
            request = self.waiting[0]
            conversation = request.conversation
            leader, shared = self._leader(conversation)
            if leader is not None and leader.num_cached_tokens < shared:
                followers.append(self.waiting.pop(0))
                continue
            if self._lacks_pages(conversation, shared):
                if not self._make_room(conversation, unread):
                    break
                continue  # the leader itself may have given way
            self.waiting.pop(0)
            if leader is not None:
                copies += self._fork(leader, conversation, shared)
            self._enter(request)
        self.waiting[:0] = followers
        return copies, followers

    def _lacks_pages(self, conversation: Conversation, shared: int) -> bool:
        """Whether too few pages are free for a conversation that shares its first `shared` tokens.

        One page is kept for every row that runs already.
        """
        needed = self.pages.missing(conversation.block_table, len(conversation.tokens))
        needed -= shared // self.pages.size
        running = len(self.prefilling) + len(self.decoding)
        return needed + running > len(self.pages.free)

    def _make_room(self, conversation: Conversation, unread: bool) -> bool:
        """Preempts the youngest idle conversation other than this one.

        False, and this one must wait, if there is none or tokens under way may free pages first.
        """
        if unread and not self.prefilling and not self.decoding:
            return False  # the tokens that are under way may end their requests
        victim = self._youngest_idle(but=conversation)
        if victim is None:
            return False
        self._preempt(victim)
        return True

    def _youngest_idle(self, but: Conversation | None = None) -> Conversation | None:
        """The youngest conversation, other than `but`, that holds pages and no row."""
        idle = [c for c in self.live if c.block_table and c.idle and c is not but]
        return max(idle, key=age_of, default=None)

    def _enter(self, request: Request) -> None:
        conversation = request.conversation
        self.pages.extend(conversation.block_table, len(conversation.tokens))
        self._hold(conversation)
        self.rows.enter(request)
        if lacks_tokens(conversation):
            self.prefilling.append(request)
        else:
            self._start_decoding([request])

    def _start_decoding(self, requests: list[Request]) -> None:
        self.decoding += requests
        self.started += requests

    def lacks_slots(self) -> bool:
        """Whether a row would have to give way for another row's next token.

        A row can only do so when the host knows all its tokens.
        """
        return len(self._at_page_end()) > len(self.pages.free)

    def _at_page_end(self) -> list[Request]:
        """The decoding rows whose next token is the first of a page."""
        rows = np.array([request.row for request in self.decoding], np.int64)
        ends = (self.rows.length[rows] - 1) % self.pages.size == 0
        return [self.decoding[i] for i in np.flatnonzero(ends)]

    def _reserve(self) -> None:
        """A slot for the token that each decoding row feeds, for the oldest request first."""
        for request in sorted(self._at_page_end(), key=number_of):
            if request.row is None:
                continue  # it gave way to an older one
            block_table = request.conversation.block_table
            length = int(self.rows.length[request.row])
            while request.row is not None and not self.pages.extend(block_table, length):
                self._preempt(self._victim())
            if request.row is not None:
                self.rows.block_table[request.row, len(block_table) - 1] = block_table[-1]

    def _victim(self) -> Conversation:
        """Who gives way for a running row: the youngest idle one, or else the newest request's."""
        victim = self._youngest_idle()
        if victim is not None:
            return victim
        return max(self.prefilling + self.decoding, key=number_of).conversation

    def _preempt(self, conversation: Conversation) -> None:
        """Takes a conversation's pages; its request, if it runs, waits again."""
        if not conversation.idle:
            self._unschedule(conversation.request)
        self._release(conversation)
        self.stats["preemptions"] += 1

    def _unschedule(self, request: Request) -> None:
        queue = self.decoding if request in self.decoding else self.prefilling
        queue.remove(request)
        self.rows.leave(request)
        bisect.insort(self.waiting, request, key=number_of)

    def _release(self, conversation: Conversation) -> None:
        """Gives its pages back."""
        self._let_go(conversation)
        conversation.num_cached_tokens = 0
        self.pages.release(conversation.block_table)

    def release_all(self) -> None:
        """Everybody gives way: no page holds keys and values any more."""
        for request in self.prefilling + self.decoding:
            self._unschedule(request)
        for conversation in self.live:
            self._release(conversation)

    # ---- plan

    def _plan_prefill(self) -> Batch | None:
        """The next tokens of the rows that can't decode yet, in the order of their admission."""
        budget = self.prefill_chunk
        chunks = []
        for request in self.prefilling:
            conversation = request.conversation
            begin = conversation.num_cached_tokens
            count = min(budget, len(conversation.tokens) - 1 - begin)
            budget -= count
            if count:
                chunks.append((request, begin, begin + count))
        if not chunks:
            return None
        prefill = plan_prefill(chunks, self.rows, self.pages.size)
        for request, _, end in chunks:
            request.conversation.num_cached_tokens = end
        self.stats["prefilled_tokens"] += len(prefill.ids)
        ready = [request for request in self.prefilling if not lacks_tokens(request.conversation)]
        self.prefilling = [r for r in self.prefilling if lacks_tokens(r.conversation)]
        self._start_decoding(ready)
        return prefill

    def _plan_decode(self) -> Decode | None:
        """One token for every row that is ready. Counts them as drawn, though nobody read them."""
        if not self.decoding:
            return None
        started = [request for request in self.started if request.row is not None]
        decode = plan_decode(self.decoding, started, self.rows, self.pages.size)
        state = self.rows
        rows = decode.rows
        state.length[rows] += 1
        state.drawn[rows] += 1
        last = np.flatnonzero(state.drawn[rows] == state.wanted[rows])
        if len(last):
            self.ending += [decode.requests[i] for i in last]
            self.decoding = [r for r in self.decoding if state.drawn[r.row] < r.max_new_tokens]
        self.stats["decoded_tokens"] += len(rows)
        return decode

    # ---- postprocess

    def collect(self, decode: Decode, tokens: list[int], logprobs: list[float]) -> None:
        """Appends a step's tokens and ends the requests that are complete."""
        ended = len(self.finished)
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
        if len(self.finished) > ended:
            self.decoding = [request for request in self.decoding if not request.done]
            self.ending = [request for request in self.ending if not request.done]

    def _end(self, request: Request) -> None:
        """The request is done: it is open no more, and its row is free."""
        del self.requests[request.number]
        request.conversation.request = None
        if request.row is not None:
            self.rows.leave(request)

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
        token, which is fed again for its logits; of others only full pages are. Only the first
        holder of a prompt can still be prefilling: every later one forked it.
        """
        prompt = conversation.prompt
        if conversation.block_table:
            return None, 0
        if prompt in self.holders:
            return self.holders[prompt][0], len(prompt) - 1
        i = bisect.bisect_left(self.prompts, prompt)
        leader, shared = None, 0
        for other in self.prompts[max(0, i - 1) : i + 1]:
            # The last token of a prompt is not prefilled.
            common = min(common_prefix(prompt, other), len(prompt) - 1, len(other) - 1)
            full = common - common % self.pages.size
            if full > shared:
                leader, shared = self.holders[other][0], full
        return leader, shared

    def _fork(self, leader: Conversation, conversation: Conversation, shared: int) -> Copies:
        """The conversation gets the pages of the leader's first `shared` tokens."""
        conversation.block_table, copy = self.pages.fork(leader.block_table, shared)
        conversation.num_cached_tokens = shared
        self.stats["shared_tokens"] += shared
        if copy is None:
            return []
        return [copy]

    def _hold(self, conversation: Conversation) -> None:
        """It has pages from now on."""
        if conversation.prompt not in self.holders:
            bisect.insort(self.prompts, conversation.prompt)
        holders = self.holders.setdefault(conversation.prompt, [])
        if conversation not in holders:
            holders.append(conversation)

    def _let_go(self, conversation: Conversation) -> None:
        """It has pages no more."""
        holders = self.holders.get(conversation.prompt, [])
        if conversation not in holders:
            return
        holders.remove(conversation)
        if not holders:
            del self.holders[conversation.prompt]
            del self.prompts[bisect.bisect_left(self.prompts, conversation.prompt)]


def lacks_tokens(conversation: Conversation) -> bool:
    """Whether keys and values of more than its newest token are missing."""
    return conversation.num_cached_tokens < len(conversation.tokens) - 1


def common_prefix(one: tuple, other: tuple) -> int:
    """How many of their first tokens two prompts have in common."""
    pairs = zip(one, other)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
