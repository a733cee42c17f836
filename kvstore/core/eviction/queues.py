"""What the well-known policies share: notes on blocks, and queues of candidates.

Those policies were made for flat caches, where any block may go. Here only leaves may, so each of them ranks the
candidates, and a block that is no candidate waits with a note of its place. A request touches its deepest block only;
when a block goes, its note is handed on to its parent, which was used whenever its child was:

    path  A - B - C        C goes: B takes C's note, or adds C's uses to its own
    uses  1   -   2   -->        A:1  B:2   -->   A:3

So a candidate's count is the number of requests at or below it, and its birth the earliest one's: exactly what a flat
cache would have counted block by block, but for free while the path is whole.
"""

from __future__ import annotations

from collections import OrderedDict

from kvstore.core.blocks import Block
from kvstore.core.eviction.heap import BlockHeap
from kvstore.core.sessions import Session
from kvstore.core.types import BlockHash, Tier

CAPACITY_BLOCKS = 1 << 16
"""Assumed where nobody says how many blocks the tier holds."""
SWEEP_MIN = 1024


class Note:
    """What a policy remembers of one resident block."""

    __slots__ = ("born", "clock", "place", "uses")

    def __init__(self, born: int) -> None:
        self.born = born
        """Order in which it came in, or entered its queue."""
        self.uses = 0
        """Requests that used it, the one that brought it among them."""
        self.place = 0
        """Its queue."""
        self.clock = 0
        """The policy's own clock at the last use."""


class Ghosts:
    """Hashes of blocks that went, oldest first; `limit` of them at most."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._hashes: OrderedDict[BlockHash, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def remember(self, block: Block) -> None:
        self._hashes[block.hash] = None
        self.shrink()

    def shrink(self) -> None:
        while len(self._hashes) > max(0, self.limit):
            self._hashes.popitem(last=False)

    def take(self, block: Block) -> bool:
        """Was it there? It isn't any more."""
        if block.hash in self._hashes:
            del self._hashes[block.hash]
            return True
        return False


class QueuePolicy:
    """An eviction policy made of `num_queues` ordered queues of candidates. One instance serves one `tier`.

    Subclasses say where a block begins (`_arrive`), what a use changes (`_used`), how a queue is ordered (`_key`), and
    which candidate goes (`victim`; the first of queue 0 unless overridden).
    """

    name = "queues"
    num_queues = 1

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._notes: dict[Block, Note] = {}
        self._queues: list[BlockHeap[int]] = [BlockHeap() for _ in range(self.num_queues)]
        self._born = 0
        self._sweep_at = SWEEP_MIN
        self._capacity = CAPACITY_BLOCKS

    # ---- what a subclass decides

    def _arrive(self, block: Block, note: Note) -> None:
        """A block without history."""

    def _used(self, block: Block, note: Note) -> None:
        """A request used the block; `note.uses` already counts it."""

    def _key(self, block: Block, note: Note) -> int:
        return note.born

    def _left(self, block: Block, note: Note) -> None:
        """The block was evicted."""

    # ---- the protocol

    def sized(self, num_blocks: int) -> None:
        """How many blocks the tier holds."""
        self._capacity = max(1, num_blocks)

    def touch(self, tip: Block, session: Session | None, now_ns: int) -> None:
        note = self._note(tip)
        place = note.place
        note.uses += 1
        self._used(tip, note)
        if tip in self._queues[place]:
            if note.place != place:
                self._queues[place].remove(tip)
            self._put(tip, note)

    def signal(self, session: Session, now_ns: int) -> None:
        """Activity doesn't matter."""

    def add(self, block: Block, now_ns: int) -> None:
        self._put(block, self._note(block))

    def discard(self, block: Block, now_ns: int) -> None:
        note = self._notes.get(block)
        if note is not None:
            self._queues[note.place].remove(block)

    def evicted(self, block: Block, now_ns: int) -> None:
        self.discard(block, now_ns)
        note = self._notes.pop(block, None)
        if note is None:
            return
        self._left(block, note)
        parent = block.parent
        if parent is not None and parent.residencies[self._tier] is not None:
            self._hand_on(note, parent)

    def victim(self, now_ns: int) -> Block | None:
        return self._first(0)

    def score(self, block: Block, now_ns: int) -> float:
        note = self._notes.get(block)
        return 0.0 if note is None else float(self._key(block, note))

    # ---- tools

    def _next(self) -> int:
        self._born += 1
        return self._born

    def _note(self, block: Block) -> Note:
        note = self._notes.get(block)
        if note is None:
            note = self._notes[block] = Note(self._next())
            self._arrive(block, note)
            if len(self._notes) > self._sweep_at:
                self._sweep()
        return note

    def _hand_on(self, note: Note, parent: Block) -> None:
        own = self._notes.setdefault(parent, note)
        if own is not note:
            own.uses += max(0, note.uses)
            own.born = min(own.born, note.born)
            own.clock = max(own.clock, note.clock)

    def _put(self, block: Block, note: Note) -> None:
        self._queues[note.place].put(block, self._key(block, note))

    def _move(self, block: Block, note: Note, place: int) -> None:
        """A candidate changes queues."""
        self._queues[note.place].remove(block)
        note.place = place
        self._put(block, note)

    def _first(self, place: int) -> Block | None:
        top = self._queues[place].peek()
        return None if top is None else top[1]

    def _sweep(self) -> None:
        """Blocks lost while they were no candidates leave notes behind; forget them, O(1) amortised."""
        tier = self._tier
        self._notes = {b: n for b, n in self._notes.items() if b.residencies[tier] is not None or b in self}
        self._sweep_at = 2 * len(self._notes) + SWEEP_MIN

    def __contains__(self, block: Block) -> bool:
        return any(block in queue for queue in self._queues)
