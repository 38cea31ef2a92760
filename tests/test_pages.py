"""The page allocator against a model: a block table reads back what was written through it."""

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from sampler import Pages

COUNT = 12
SIZE = 4


class Memory(RuleBasedStateMachine):
    """Contexts over a small pool: plain lists of tokens, and what the pages hold (`memory`).

    A token's place holds all tokens up to it and the number of the weights, as keys and values do.
    """

    contexts = Bundle("contexts")

    def __init__(self):
        super().__init__()
        self.pages = Pages(COUNT, SIZE)
        self.memory = [[None] * SIZE for _ in range(COUNT)]
        self.tables = {}
        self.tokens = {}
        self.past = [[]]  # the tokens of contexts that were released
        self.weights = 0

    @rule(name=contexts, new=st.lists(st.booleans(), min_size=1, max_size=3 * SIZE))
    def extend(self, name, new):
        table = self.tables[name]
        tokens = self.tokens[name]
        end = len(tokens) + len(new)
        held = len(table)
        lacking = max(0, math.ceil(end / SIZE) - len(table))
        fits = lacking <= self.pages.available
        assert self.pages.missing(table, end) == lacking
        assert self.pages.extend(table, end) == fits
        assert len(table) == held + (lacking if fits else 0)
        if not fits:
            return
        for token in new:
            tokens.append(token)
            place = len(tokens) - 1
            self.memory[table[place // SIZE]][place % SIZE] = self.weights, tuple(tokens)

    @rule(target=contexts)
    def new_context(self):
        name = object()
        self.tables[name] = []
        self.tokens[name] = []
        return name

    @rule(target=contexts, name=contexts, share=st.floats(0, 1))
    def fork(self, name, share):
        tokens = round(share * len(self.tokens[name]))
        new = self.new_context()
        if not self.pages.available:  # a copy would have no place
            tokens -= tokens % SIZE
        self.tables[new], copies = self.pages.fork(self.tables[name], tokens)
        assert len(self.tables[new]) == math.ceil(tokens / SIZE)
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        self.tokens[new] = self.tokens[name][:tokens]
        return new

    @rule(target=contexts, data=st.data())
    def take_over(self, data):
        """A new context that begins as one that was released does."""
        new = self.new_context()
        tokens = data.draw(st.sampled_from(self.past))
        found = self.pages.find(tokens)
        self.tables[new], copies = self.pages.fork(found, len(found) * SIZE)
        assert not copies and len(found) <= len(tokens) // SIZE
        self.tokens[new] = tokens[: len(found) * SIZE]
        return new

    @rule(name=contexts)
    def release(self, name):
        """A context that has ended, or that is preempted and will be written anew."""
        tokens = self.tokens[name]
        self.pages.release(self.tables[name], tokens)
        assert self.tables[name] == []
        assert len(self.pages.find(tokens)) == len(tokens) // SIZE, "nothing was needed since"
        self.past.append(tokens)
        self.tokens[name] = []

    @rule()
    def new_weights(self):
        for name in list(self.tables):
            self.release(name)
        self.pages.forget()
        self.weights += 1
        assert len(self.pages.free) == COUNT and not any(map(self.pages.find, self.past))

    @invariant()
    def every_context_reads_back(self):
        for name, tokens in self.tokens.items():
            table = self.tables[name]
            for i in range(len(tokens)):
                held = self.memory[table[i // SIZE]][i % SIZE]
                assert held == (self.weights, tuple(tokens[: i + 1]))

    @invariant()
    def counts_are_right(self):
        used = [page for table in self.tables.values() for page in table]
        assert self.pages.references == [used.count(page) for page in range(COUNT)]
        every = sorted([*self.pages.free, *self.pages.kept, *set(used)])
        assert every == list(range(COUNT)), "none twice, none leaked"
        assert {page: key for key, (page, _) in self.pages.known.items()} == self.pages.keys
        assert self.pages.kept.keys() <= self.pages.keys.keys()


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=60, stateful_step_count=40)


def test_the_least_recently_used_page_is_given_up_first_and_a_context_s_last_one():
    pages = Pages(6, 1)
    for tokens in ([1, 2], [3, 4]):
        table = []
        pages.extend(table, 2)
        pages.release(table, tokens)
    again, _ = pages.fork(pages.find([1, 2]), 2)
    pages.release(again, [1, 2])
    for taken, left in ((3, [2, 1]), (4, [2, 0]), (5, [1, 0]), (6, [0, 0])):
        table = []
        assert pages.extend(table, taken)
        assert [len(pages.find(tokens)) for tokens in ([1, 2], [3, 4])] == left
        pages.release(table, [])


def test_a_page_that_was_given_up_is_not_found_by_those_after_it():
    """Two contexts hold the same token in pages of their own, of which only one is known."""
    pages = Pages(4, 1)
    first, second, other = [], [], []
    pages.extend(first, 2)
    pages.extend(second, 2)
    third, _ = pages.fork(second, 2)
    pages.release(first, [1, 2])
    pages.release(second, [1, 3])  # page 3 is known as a follower of page 0
    pages.extend(other, 2)
    pages.release(other, [7, 8])
    assert pages.find([7, 3]) == [0]
    pages.release(third, [1, 3])
    assert pages.find([1, 3]) == [2, 3] and len(pages.known) == 4
