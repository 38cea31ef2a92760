"""The page allocator against a model: a block table reads back what was written through it."""

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from sampler import Pages

COUNT = 12
SIZE = 4


class Memory(RuleBasedStateMachine):
    """Contexts over a small pool: plain lists of tokens, and what the pages hold (`memory`)."""

    contexts = Bundle("contexts")

    def __init__(self):
        super().__init__()
        self.pages = Pages(COUNT, SIZE)
        self.memory = [[None] * SIZE for _ in range(COUNT)]
        self.tables = {}
        self.expected = {}
        self.written = 0

    @rule(name=contexts, count=st.integers(1, 3 * SIZE))
    def extend(self, name, count):
        table = self.tables[name]
        tokens = self.expected[name]
        end = len(tokens) + count
        held = len(table)
        lacking = max(0, math.ceil(end / SIZE) - len(table))
        fits = lacking <= len(self.pages.free)
        assert self.pages.missing(table, end) == lacking
        assert self.pages.extend(table, end) == fits
        assert len(table) == held + (lacking if fits else 0)
        if not fits:
            return
        for _ in range(count):
            self.written += 1  # every token written is unlike any other
            self.memory[table[len(tokens) // SIZE]][len(tokens) % SIZE] = self.written
            tokens.append(self.written)

    @rule(target=contexts)
    def new_context(self):
        name = object()
        self.tables[name] = []
        self.expected[name] = []
        return name

    @rule(target=contexts, name=contexts, share=st.floats(0, 1))
    def fork(self, name, share):
        tokens = round(share * len(self.expected[name]))
        new = self.new_context()
        if not self.pages.free:  # a copy would have no place
            tokens -= tokens % SIZE
        self.tables[new], copy = self.pages.fork(self.tables[name], tokens)
        assert len(self.tables[new]) == math.ceil(tokens / SIZE)
        if copy:
            source, target = copy
            self.memory[target] = list(self.memory[source])
        self.expected[new] = self.expected[name][:tokens]
        return new

    @rule(name=contexts)
    def release(self, name):
        """A context that has ended, or that is preempted and will be written anew."""
        self.pages.release(self.tables[name])
        assert self.tables[name] == []
        self.expected[name] = []

    @invariant()
    def every_context_reads_back(self):
        for name, tokens in self.expected.items():
            table = self.tables[name]
            assert [self.memory[table[i // SIZE]][i % SIZE] for i in range(len(tokens))] == tokens

    @invariant()
    def counts_are_right(self):
        used = [page for table in self.tables.values() for page in table]
        assert self.pages.references == [used.count(page) for page in range(COUNT)]
        every = sorted([*self.pages.free, *set(used)])
        assert every == list(range(COUNT)), "none twice, none leaked"


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=60, stateful_step_count=40)
