"""Pages of the KV cache, counted in plain integers.

The cache is one pool of pages. A page stores the keys and values of `size` tokens for every layer.
A block table is the list of a context's page numbers, in order. Contexts with a common beginning
share its pages (prefix sharing). A page is free again when no block table contains it. The lowest
free page is taken first, so that a context's pages are often consecutive.

Tests: pytest tests/test_pages.py
"""

import heapq


class Pages:
    """An allocator of `count` pages of `size` tokens each, with reference counts."""

    def __init__(self, count: int, size: int):
        self.count = count
        self.size = size
        self.free = list(range(count))  # a heap
        self.references = [0] * count

    def missing(self, block_table: list[int], tokens: int) -> int:
        """The number of pages that `block_table` needs in addition, for `tokens` tokens in all."""
        return max(0, -(-tokens // self.size) - len(block_table))

    def extend(self, block_table: list[int], tokens: int) -> bool:
        """Adds pages for `tokens` tokens in all. False, without change, if too few are free."""
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

        Full pages are shared. A last page that is not full is copied to a free page, which must
        exist. Returns the new table and that copy as (source, target) or None. The caller must
        make the copy before the device writes to either page.
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
        """Empties a block table. Its pages are free unless another block table contains them."""
        for page in block_table:
            self.references[page] -= 1
            if self.references[page] == 0:
                heapq.heappush(self.free, page)
        block_table.clear()
