"""What a session left behind: the ends of branches that its context no longer holds.

Most are never used again, but a session that goes back, or one that rewrites its context again and again, needs what
lies above. So a leaf that was left has the worth of its age since the last use, on one curve for all. Only leaves that
one session used are here (others count arrivals, see `shared`), and none of a session that said it ended.

    session moves its tip --> leave(leaf) --age--> bins --> worth         use(leaf): an event;   drop: evicted or held
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

from kvstore.core.blocks import Block
from kvstore.core.eviction.curve import EDGES_NS, LAST_BIN, Curve, bin_of


class Leaf:
    """A leaf nobody holds: when it was last used, the bin of its age, and its worth since it got there."""

    __slots__ = ("bin", "since_ns", "worth")

    def __init__(self, since_ns: int, k: int, worth: int) -> None:
        self.since_ns = since_ns
        self.bin = k
        self.worth = worth


class LeftBranches:
    """Leaves that were left behind, by age."""

    def __init__(self) -> None:
        self._leaves: dict[Block, Leaf] = {}
        self._curve = Curve()
        self._timers: list[tuple[int, int, int, Block, Leaf]] = []
        self._seq = 0

    def __contains__(self, block: Block) -> bool:
        return block in self._leaves

    def leave(self, block: Block, now_ns: int) -> None:
        """The block's session went elsewhere."""
        self._curve.expose(bin_of(now_ns - block.last_access_ns))
        self.inherit(block, now_ns)

    def inherit(self, block: Block, now_ns: int) -> None:
        """The leaf below it, left too, is gone; both are one branch, which is counted once."""
        k = bin_of(now_ns - block.last_access_ns)
        leaf = self._leaves[block] = Leaf(block.last_access_ns, k, self._curve.worth[k])
        self._arm(block, leaf)

    def use(self, block: Block) -> None:
        """A request goes on from here."""
        leaf = self._leaves.pop(block, None)
        if leaf is not None:
            self._curve.use(leaf.bin)

    def drop(self, block: Block) -> bool:
        """The block is no candidate any more. Was it left behind?"""
        return self._leaves.pop(block, None) is not None

    def worth(self, block: Block) -> int | None:
        """In index steps; None for a block that wasn't left behind."""
        leaf = self._leaves.get(block)
        return None if leaf is None else leaf.worth

    def advance(self, now_ns: int) -> list[Block]:
        """Let leaves grow older; returns those whose worth may have changed."""
        crossed: list[Block] = []
        timers = self._timers
        while timers and timers[0][0] <= now_ns:
            *_, block, leaf = heappop(timers)
            if self._leaves.get(block) is leaf:
                leaf.bin += 1
                self._curve.expose(leaf.bin)
                leaf.worth = self._curve.worth[leaf.bin]
                self._arm(block, leaf)
                crossed.append(block)
        return crossed

    def _arm(self, block: Block, leaf: Leaf) -> None:
        if leaf.bin < LAST_BIN:
            self._seq += 1
            due_ns = leaf.since_ns + EDGES_NS[leaf.bin + 1]
            heappush(self._timers, (due_ns, leaf.since_ns, self._seq, block, leaf))

    def learned(self) -> dict[str, Any]:
        """Counts, for `learned.pack`."""
        return self._curve.learned()

    def adopt(self, content: object) -> None:
        """Start from what `learned` gave. Raises ValueError when it has another shape."""
        self._curve.adopt(content)
