"""First-fit decreasing (FFD) bin packing, the paper's Bin-Packing(·) in formula (2).

Used twice: documents -> System 1's chunks, and samples -> training micro-batches. Items go in
descending order of size, each into the first bin that has room, else into a new one; never more
than 11/9·OPT + 6/9 bins (Dósa, 2007).

Departure from the textbook: the scan for the first bin with room is a walk down a tournament
tree, so n items take O(n log n) steps instead of O(n²). Every possible bin is a leaf from the
start: one that was not opened yet is simply a bin with all its room, and the leftmost leaf that
fits *is* first fit.

    >>> first_fit_decreasing([30, 70, 20, 50], capacity=100)
    [[1, 0], [3, 2]]

Tests: pytest tests/test_binpack.py
"""

from collections.abc import Sequence


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs items into bins; returns the items' indices, bin by bin.

    `sizes` and `capacity` have the same unit, here tokens. Items of one size keep their order.
    Raises ValueError for a size below 0 or above the capacity.
    """
    for index, size in enumerate(sizes):
        if not 0 <= size <= capacity:
            raise ValueError(f"item {index} has size {size}, not one from 0 to {capacity}")
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    # room[node] is the most room that any bin below this node of the tree has.
    room = [capacity] * (2 * leaves)
    bins = [[] for _ in sizes]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[index]
        node = 1
        while node < leaves:  # left if anything there has room, else right
            node *= 2
            if room[node] < size:
                node += 1
        bins[node - leaves].append(index)
        room[node] -= size
        while node > 1:
            node //= 2
            left = room[2 * node]
            right = room[2 * node + 1]
            most = left if left > right else right  # max() would cost 7 % of the whole
            if room[node] == most:
                break
            room[node] = most
    return [b for b in bins if b]


def pack_documents(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Tool outputs of `lengths` tokens -> chunks of at most `capacity` tokens, as indices.

    An output over the limit counts as `capacity` (the caller cuts it there), so it fills a
    chunk of its own, as in the paper.
    """
    return first_fit_decreasing([min(length, capacity) for length in lengths], capacity)
