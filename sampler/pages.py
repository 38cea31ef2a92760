"""Pages of the KV cache, counted in plain integers.

The cache is one pool of pages. A page stores the keys and values of `size` tokens for every layer.
A block table is the list of a context's page numbers, in order. Contexts with a common beginning
share its pages (prefix sharing). A page that no block table contains any more is free or, if it is
full, kept: its contents stay until its memory is needed. A context that begins with the same tokens
takes kept pages over (`find`). The lowest free page is taken first, so that a context's pages are
often consecutive.

Tests: pytest tests/test_pages.py
"""

import heapq
import itertools


class Pages:
    """An allocator of `count` pages of `size` tokens each, with reference counts."""

    def __init__(self, count: int, size: int):
        self.count = count
        self.size = size
        self.free = list(range(count))  # a heap
        self.references = [0] * count
        # Full pages: (id of the page before it, tokens) -> (page, id). No id is used twice.
        self.known: dict[tuple, tuple[int, int]] = {}
        self.keys: dict[int, tuple] = {}  # page -> its key in `known`
        self.kept: dict[int, None] = {}  # pages in no block table, the least recently used first
        self.ids = itertools.count(1)

    @property
    def available(self) -> int:
        """The number of pages that block tables can still get, whether free or kept."""
        return len(self.free) + len(self.kept)

    def missing(self, block_table: list[int], tokens: int) -> int:
        """The number of pages that `block_table` needs in addition, for `tokens` tokens in all."""
        return max(0, -(-tokens // self.size) - len(block_table))

    def extend(self, block_table: list[int], tokens: int) -> bool:
        """Adds pages for `tokens` tokens in all. False, without change, if too few are left."""
        shortage = self.missing(block_table, tokens)
        if shortage > self.available:
            return False
        while len(self.free) < shortage:
            page = next(iter(self.kept))
            del self.kept[page], self.known[self.keys.pop(page)]
            heapq.heappush(self.free, page)
        for _ in range(shortage):
            page = heapq.heappop(self.free)
            self.references[page] = 1
            block_table.append(page)
        return True

    def fork(self, block_table: list[int], tokens: int) -> tuple[list[int], list[tuple[int, int]]]:
        """A second block table for the first `tokens` tokens of `block_table`.

        Full pages are shared. A last page that is not full is copied to another, which must be
        available. Returns the new table and the list of copies, each (source, target). The caller
        must make them before the device writes to either page.
        """
        full, rest = divmod(tokens, self.size)
        table = block_table[:full]
        for page in table:
            self.references[page] += 1
            self.kept.pop(page, None)
        if not rest:
            return table, []
        self.extend(table, tokens)
        return table, [(block_table[full], table[full])]

    def find(self, tokens: list[int]) -> list[int]:
        """The pages that hold the first full pages of `tokens`, as many as are known."""
        pages = []
        parent = 0
        for key in self.split(tokens):
            if (parent, key) not in self.known:
                break
            page, parent = self.known[parent, key]
            pages.append(page)
        return pages

    def split(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """The tokens of each full page."""
        ends = range(self.size, len(tokens) + 1, self.size)
        return [tuple(tokens[end - self.size : end]) for end in ends]

    def release(self, block_table: list[int], tokens: list[int]) -> None:
        """Empties the table of the cached `tokens`. Pages in no other table become free or kept."""
        parent = 0
        for page, content in zip(block_table, self.split(tokens)):
            key = parent, content
            if key not in self.known:
                self.known.pop(
                    self.keys.get(page), None
                )  # Its parent was evicted: its old key leads nowhere.
                self.known[key] = page, next(self.ids)
                self.keys[page] = key
            parent = self.known[key][1]
        for page in reversed(block_table):  # No page may be kept longer than the page before it.
            self.references[page] -= 1
            if self.references[page] == 0 and page in self.keys:
                self.kept[page] = None
            elif self.references[page] == 0:
                heapq.heappush(self.free, page)
        block_table.clear()

    def forget(self) -> None:
        """Frees all kept pages, whose contents do not count any more."""
        self.free = sorted([*self.free, *self.kept])
        for index in (self.known, self.keys, self.kept):
            index.clear()
