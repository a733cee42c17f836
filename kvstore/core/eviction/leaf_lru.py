"""Least recently used leaf: the order most prefix caches use, and the baseline of every comparison here.

Evicting leaves only keeps the resident set prefix-closed. A parent is used whenever its child is, so ordering the
leaves by last use equals block LRU in which each request touches its blocks from the tail to the head.

Not for: scans of long contexts that never come back (each one pushes everything else out), and agents, whose idle
time says little about when they return; see `session`.
"""

from __future__ import annotations

from kvstore.core.blocks import Block
from kvstore.core.eviction.heap import BlockHeap
from kvstore.core.sessions import Session


class LeafLRU:
    """Victim: the candidate with the oldest last use; among equals the one that became a candidate first."""

    name = "leaf-lru"

    def __init__(self) -> None:
        self._heap: BlockHeap[int] = BlockHeap()

    def touch(self, tip: Block, session: Session | None, now_ns: int) -> None:
        if tip in self._heap:
            self._heap.put(tip, tip.last_access_ns)

    def signal(self, session: Session, now_ns: int) -> None:
        """Activity doesn't matter to recency."""

    def add(self, block: Block, now_ns: int) -> None:
        self._heap.put(block, block.last_access_ns)

    def discard(self, block: Block, now_ns: int) -> None:
        self._heap.remove(block)

    def evicted(self, block: Block, now_ns: int) -> None:
        self._heap.remove(block)

    def victim(self, now_ns: int) -> Block | None:
        return self._heap.first()

    def score(self, block: Block, now_ns: int) -> float:
        return float(block.last_access_ns)
