"""First-fit decreasing (FFD) bin packing, the paper's Bin-Packing(·) in formula (2).

It packs documents into System 1's chunks, and samples into training micro-batches. Items are taken
in descending order of size. Each goes into the first bin with enough free space, or else into a new
bin. The result has at most 11/9·OPT + 6/9 bins (Dósa, 2007).

Departure from the textbook: the search for the first bin is a walk down a tournament tree, so n
items take O(n log n) steps instead of O(n²). Every possible bin is a leaf from the start. A bin
that is not open yet is an empty bin, so the leftmost leaf with enough space is the first fit.

    >>> first_fit_decreasing([30, 70, 20, 50], capacity=100)
    [[1, 0], [3, 2]]

Tests: pytest tests/test_binpack.py
"""

from collections.abc import Sequence


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs items into bins and returns the items' indices, one list a bin.

    `sizes` and `capacity` have the same unit, here tokens. Items of equal size keep their order.
    ValueError if a size is below 0 or above the capacity.
    """
    for index, size in enumerate(sizes):
        if not 0 <= size <= capacity:
            raise ValueError(f"item {index} has size {size}, not one from 0 to {capacity}")
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    # space[node] is the largest free space of any bin below this node of the tree.
    space = [capacity] * (2 * leaves)
    bins = [[] for _ in sizes]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[index]
        node = 1
        while node < leaves:  # to the left child if a bin below it has enough space
            node *= 2
            if space[node] < size:
                node += 1
        bins[node - leaves].append(index)
        space[node] -= size
        while node > 1:
            node //= 2
            left = space[2 * node]
            right = space[2 * node + 1]
            largest = left if left > right else right
            if space[node] == largest:
                break
            space[node] = largest
    return [b for b in bins if b]


def pack_documents(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs tool outputs of `lengths` tokens into chunks of at most `capacity` tokens.

    Returns the outputs' indices, one list a chunk. An output above the limit counts as `capacity`,
    since the caller cuts it there. So it fills a chunk of its own, as in the paper.
    """
    return first_fit_decreasing([min(length, capacity) for length in lengths], capacity)
