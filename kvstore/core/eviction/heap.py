"""A min-heap of blocks with lazy removal, shared by the heap-ordered policies.

`put` and `remove` only change which entry of a block is the valid one; outdated entries are dropped when they reach
the top, and the heap is rebuilt once they outnumber the valid ones. All calls are O(log n) amortised.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from kvstore.core.blocks import Block

K = TypeVar("K")

_SLACK = 64


class BlockHeap(Generic[K]):
    """Blocks by key, least first; equal keys leave in the order they were put."""

    __slots__ = ("_heap", "_seq", "_valid")

    def __init__(self) -> None:
        self._heap: list[tuple[K, int, Block]] = []
        self._valid: dict[Block, int] = {}
        self._seq = 0

    def __len__(self) -> int:
        return len(self._valid)

    def __contains__(self, block: Block) -> bool:
        return block in self._valid

    def put(self, block: Block, key: K) -> None:
        """Insert the block, or change its key."""
        self._seq += 1
        self._valid[block] = self._seq
        heappush(self._heap, (key, self._seq, block))
        if len(self._heap) > 2 * len(self._valid) + _SLACK:
            self._rebuild()

    def remove(self, block: Block) -> bool:
        """Take the block out; False when it wasn't there."""
        return self._valid.pop(block, None) is not None

    def peek(self) -> tuple[K, Block] | None:
        """The least key and its block, left in place."""
        heap, valid = self._heap, self._valid
        while heap:
            key, seq, block = heap[0]
            if valid.get(block) == seq:
                return key, block
            heappop(heap)
        return None

    def first(self) -> Block | None:
        """The block with the least key, left in place."""
        heap, valid = self._heap, self._valid
        while heap:
            entry = heap[0]
            if valid.get(entry[2]) == entry[1]:
                return entry[2]
            heappop(heap)
        return None

    def _rebuild(self) -> None:
        valid = self._valid
        self._heap = [entry for entry in self._heap if valid.get(entry[2]) == entry[1]]
        heapify(self._heap)
