"""Pages of the KV cache: who holds which, in plain integers.

The cache is one pool of pages; a page has room for the keys and values of `size` tokens, of every
layer. A block table is the list of page numbers that hold a context, in order. Contexts that begin
alike share the pages of their beginning; a page is free again when nobody holds it any more.
The lowest free page is taken first, so that a context's pages often lie side by side.

Test: pytest tests/test_pages.py
"""

import heapq


class Pages:
    """Allocator of `count` pages of `size` tokens with reference counts."""

    def __init__(self, count: int, size: int):
        self.count = count
        self.size = size
        self.free = list(range(count))  # a heap
        self.references = [0] * count

    def missing(self, block_table: list[int], tokens: int) -> int:
        """Pages that `block_table` lacks to hold `tokens` tokens."""
        return max(0, -(-tokens // self.size) - len(block_table))

    def extend(self, block_table: list[int], tokens: int) -> bool:
        """Adds pages until the table holds `tokens` tokens. False: too few are free, no change."""
        missing = self.missing(block_table, tokens)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            page = heapq.heappop(self.free)
            self.references[page] = 1
            block_table.append(page)
        return True

    def fork(self, block_table: list[int], tokens: int) -> tuple[list[int], tuple | None]:
        """A second block table for the first `tokens` tokens of `block_table`.

        Full pages are shared, a partial last one is copied to a free page, which must be there.
        Returns the new table and the (source, target) pages whose contents the caller must copy
        before anything else is written, or None.
        """
        full, rest = divmod(tokens, self.size)
        new = block_table[:full]
        for page in new:
            self.references[page] += 1
        if not rest:
            return new, None
        self.extend(new, tokens)
        return new, (block_table[full], new[full])

    def release(self, block_table: list[int]) -> None:
        """Empties a block table; pages that nobody holds any more are free."""
        for page in block_table:
            self.references[page] -= 1
            if self.references[page] == 0:
                heapq.heappush(self.free, page)
        block_table.clear()
