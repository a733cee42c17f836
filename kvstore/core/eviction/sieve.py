"""SIEVE: a queue in order of arrival and a hand that goes from old to new; what was used since it last passed stays
where it is, the first that wasn't goes.

Source: Zhang et al., "SIEVE is simpler than LRU", NSDI 2024. Flat form: `kvstore_bench.flat.classic`. The queue is kept
as (round of the hand, order of arrival), so that a leaf that becomes a candidate again, and a parent that becomes one
for the first time, take the place they would have held all along.

Not for: agents. A context grows at its end, so its new leaf is never "used again" when the hand comes, while one early
second use protects a context for a whole round. Ruinous on every trace tried.
"""

from __future__ import annotations

from kvstore.core.blocks import Block
from kvstore.core.eviction.queues import Note, QueuePolicy
from kvstore.core.types import Tier

ROUND = 1 << 48
"""Arrivals that a key has room for below the number of its round."""


class Sieve(QueuePolicy):
    """Victim: the first candidate from the hand on that wasn't used since the hand last passed it."""

    name = "sieve"

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self._round = 0
        self._hand = 0

    def _arrive(self, block: Block, note: Note) -> None:
        note.uses = -1  # the request that brings a block isn't a use

    def _key(self, block: Block, note: Note) -> int:
        passed = note.born <= self._hand
        return (self._round + passed) * ROUND + note.born

    def victim(self, now_ns: int) -> Block | None:
        while (top := self._queues[0].peek()) is not None:
            key, block = top
            self._round, self._hand = divmod(key, ROUND)
            note = self._notes[block]
            if note.uses <= 0:
                # it may stay after all (its caller had no room below): then the hand comes back to it first
                self._hand -= 1
                return block
            note.uses = 0
            self._put(block, note)
        return None
