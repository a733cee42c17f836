"""S3-FIFO: a small queue on trial, a main queue, and a memory of what failed the trial.

Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. New blocks enter the small queue (a
tenth of the candidates); what was used again when its turn comes moves to the main queue, the rest goes and is
remembered. What is remembered, or reinserted in main for each of up to three uses, stays. Flat form:
`kvstore_bench.flat.classic`. Leaves only: the queues' lengths are counted in candidates, and a parent takes the place
of its last child.

Not for: contexts that grow. Each request's new leaf is on trial again, however often its session came back before.
"""

from __future__ import annotations

from kvstore.core.blocks import Block
from kvstore.core.eviction.queues import CAPACITY_BLOCKS, Ghosts, Note, QueuePolicy
from kvstore.core.types import Tier

SMALL, MAIN = 0, 1
SMALL_PART = 10
USES_MAX = 3


class S3Fifo(QueuePolicy):
    """Victim: the oldest of the small queue that wasn't used again, unless that queue is short."""

    name = "s3-fifo"
    num_queues = 2

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self._ghosts = Ghosts(CAPACITY_BLOCKS)

    def sized(self, num_blocks: int) -> None:
        super().sized(num_blocks)
        self._ghosts.limit = num_blocks - num_blocks // SMALL_PART

    def _arrive(self, block: Block, note: Note) -> None:
        note.uses = -1  # the request that brings a block isn't a use
        note.place = MAIN if self._ghosts.take(block) else SMALL

    def _left(self, block: Block, note: Note) -> None:
        if note.place == SMALL:
            self._ghosts.remember(block)

    def victim(self, now_ns: int) -> Block | None:
        small, main = self._queues
        while small or main:
            place = SMALL if small and (not main or SMALL_PART * len(small) >= len(small) + len(main)) else MAIN
            block = self._first(place)
            assert block is not None
            note = self._notes[block]
            if note.uses <= 0:
                return block
            note.uses = 0 if place == SMALL else min(note.uses, USES_MAX) - 1
            note.born = self._next()
            self._move(block, note, MAIN)
        return None
