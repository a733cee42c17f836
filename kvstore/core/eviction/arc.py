"""ARC: one recency list of what was used once, one of what was used again, and memories of what left either; a return
from a memory says which list should have been longer.

Source: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003. Flat form:
`kvstore_bench.flat.classic`. Leaves only: the lists' lengths are compared as shares of the candidates with the target
as a share of the tier, and memories hold blocks, together as many as the tier.

Not for: scans of long contexts (each evicted block of one is a memory of its own, and floods them), nor agents: nearly
every context is used again, so the second list is nearly everything and the rule nearly LRU.
"""

from __future__ import annotations

from kvstore.core.blocks import Block
from kvstore.core.eviction.queues import CAPACITY_BLOCKS, Ghosts, Note, QueuePolicy
from kvstore.core.types import Tier

ONCE, AGAIN = 0, 1


class Arc(QueuePolicy):
    """Victim: the least recently used of the list that is longer than its target."""

    name = "arc"
    num_queues = 2

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self._gone = (Ghosts(CAPACITY_BLOCKS), Ghosts(CAPACITY_BLOCKS))
        self._target = 0.0
        """Blocks that the first list should have."""

    def _arrive(self, block: Block, note: Note) -> None:
        once, again = map(len, self._gone)
        if self._gone[ONCE].take(block):
            self._target = min(self._target + max(again / once, 1.0), float(self._capacity))
            note.place = AGAIN
        elif self._gone[AGAIN].take(block):
            self._target = max(self._target - max(once / again, 1.0), 0.0)
            note.place = AGAIN

    def _used(self, block: Block, note: Note) -> None:
        if note.uses > 1:
            note.place = AGAIN

    def _key(self, block: Block, note: Note) -> int:
        return block.last_access_ns

    def _left(self, block: Block, note: Note) -> None:
        mine, other = self._gone[note.place], self._gone[1 - note.place]
        mine.limit = self._capacity - len(other)
        if not mine.limit:
            other.limit = len(other) - 1
            other.shrink()
            mine.limit = 1
        mine.remember(block)

    def victim(self, now_ns: int) -> Block | None:
        once, again = self._queues
        num = len(once) + len(again)
        over = len(once) * self._capacity > self._target * num
        return self._first(ONCE if once and (over or not again) else AGAIN)
