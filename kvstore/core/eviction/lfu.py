"""Least frequently used: the candidate with the fewest requests at or below it goes; equals in order of reaching that
number.

Source: the textbook rule, without ageing; O(log n) here, O(1) in Shah, Mitra and Matani, 2010. Flat form:
`kvstore_bench.flat.classic`, which counts blocks as they are referenced and forgets the count with the block. Here a
parent inherits the counts of its evicted children, and a request that matches one block and brings others counts at
both ends.

Not for: agents. What was used often keeps its rank when it is over; an ended session of a hundred turns stays for
ever, and new ones push out each other. Ruinous on every trace tried.
"""

from __future__ import annotations

from kvstore.core.blocks import Block
from kvstore.core.eviction.queues import Note, QueuePolicy


class Lfu(QueuePolicy):
    """Victim: the candidate with the fewest uses."""

    name = "lfu"

    def _key(self, block: Block, note: Note) -> int:
        return note.uses
