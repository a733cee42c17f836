"""W-TinyLFU: new blocks pass a small recency window; at its end they meet the main part's next victim, and the less
frequent of the two goes.

Source: Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy", ACM TOS 2017. Main is a
segmented LRU (a fifth on probation). Frequency of resident blocks is counted; that of blocks that went is kept in a
count-min sketch of four rows, capped at 15 and halved every ten capacities of requests. Flat form:
`kvstore_bench.flat.classic` (exact counts instead of a sketch). Leaves only: lengths are counted in candidates, a new
block is always placed (a machine can't refuse it), and the contest is held when room is needed.

Not for: contexts that grow: each new leaf has been seen once, whatever its session did before, and loses the contest.
"""

from __future__ import annotations

from kvstore.core.blocks import Block
from kvstore.core.eviction.queues import Note, QueuePolicy
from kvstore.core.types import BlockHash, Tier

WINDOW, PROBATION, PROTECTED = 0, 1, 2
WINDOW_PART = 100
COUNT_MAX = 15
ROWS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)
BITS_MAX = 22


class Sketch:
    """Counts by hash, never too low (up to the cap)."""

    def __init__(self, num_blocks: int) -> None:
        bits = min(BITS_MAX, max(6, num_blocks.bit_length()))
        self._shift = 64 - bits
        self._rows = [bytearray(1 << bits) for _ in ROWS]

    def _places(self, block_hash: BlockHash) -> list[int]:
        low = int.from_bytes(block_hash[:8], "little") ^ int.from_bytes(block_hash[8:], "little")
        return [((low * odd) & (1 << 64) - 1) >> self._shift for odd in ROWS]

    def count(self, block_hash: BlockHash) -> int:
        return min(row[at] for row, at in zip(self._rows, self._places(block_hash), strict=True))

    def raise_to(self, block_hash: BlockHash, count: int) -> None:
        count = min(count, COUNT_MAX)
        for row, at in zip(self._rows, self._places(block_hash), strict=True):
            row[at] = max(row[at], count)

    def halve(self) -> None:
        table = bytes(value >> 1 for value in range(256))
        self._rows = [row.translate(table) for row in self._rows]


class WTinyLfu(QueuePolicy):
    """Victim: the loser of window's oldest against main's oldest, by frequency."""

    name = "w-tinylfu"
    num_queues = 3

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self._sketch = Sketch(self._capacity)
        self._age = 0
        self._num_uses = 0

    def sized(self, num_blocks: int) -> None:
        super().sized(num_blocks)
        self._sketch = Sketch(num_blocks)

    def _arrive(self, block: Block, note: Note) -> None:
        note.clock = self._age
        note.uses = self._sketch.count(block.hash)

    def _used(self, block: Block, note: Note) -> None:
        self._num_uses += 1
        if self._num_uses >= 10 * self._capacity:
            self._num_uses = 0
            self._age += 1
            self._sketch.halve()
        note.uses, note.clock = self._frequency(note), self._age
        if note.place != WINDOW:
            note.place = PROTECTED
            self._demote()

    def _frequency(self, note: Note) -> int:
        return note.uses >> max(0, self._age - note.clock)

    def _demote(self) -> None:
        probation, protected = self._queues[PROBATION], self._queues[PROTECTED]
        oldest = self._first(PROTECTED)
        if oldest is not None and 5 * len(protected) > 4 * (len(probation) + len(protected)):
            self._move(oldest, self._notes[oldest], PROBATION)

    def _key(self, block: Block, note: Note) -> int:
        return block.last_access_ns

    def _left(self, block: Block, note: Note) -> None:
        self._sketch.raise_to(block.hash, self._frequency(note))

    def victim(self, now_ns: int) -> Block | None:
        newcomer = self._first(WINDOW)
        settled = self._first(PROBATION) or self._first(PROTECTED)
        if settled is None and newcomer is not None and len(self._queues[WINDOW]) > 1:
            self._move(newcomer, self._notes[newcomer], PROBATION)  # main is empty: anybody may enter
            newcomer, settled = self._first(WINDOW), newcomer
        if newcomer is None or settled is None:
            return newcomer or settled
        window, num = len(self._queues[WINDOW]), sum(map(len, self._queues))
        if window <= max(1, num // WINDOW_PART):
            return settled
        mine, theirs = self._notes[newcomer], self._notes[settled]
        if self._frequency(mine) <= self._frequency(theirs):
            return newcomer
        self._move(newcomer, mine, PROBATION)
        return settled
