"""Greedy dual size frequency: like LFU, but the value of the last victim is added to every later use, so that old
counts lose their weight.

Source: Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency caching policy", HP Labs 1998.
Priority = clock + uses x cost / size. Blocks that compete have one size, and cost is taken as one, so size and cost
drop out. Flat form: `kvstore_bench.flat.classic`. Leaves only: uses are inherited as in `lfu`, and so is the clock of
the last use.

Not for: short traces (the clock needs many evictions to outrun a count), nor where a few shared heads have counts
orders of magnitude above the rest: the clock then follows the rest.
"""

from __future__ import annotations

from kvstore.core.blocks import Block
from kvstore.core.eviction.queues import Note, QueuePolicy


class Gdsf(QueuePolicy):
    """Victim: the candidate with the least clock at its last use + uses."""

    name = "gdsf"
    _clock = 0

    def _used(self, block: Block, note: Note) -> None:
        note.clock = self._clock

    def _key(self, block: Block, note: Note) -> int:
        return note.clock + note.uses

    def _left(self, block: Block, note: Note) -> None:
        self._clock = max(self._clock, self._key(block, note))
