"""Branches that no session holds: the ends of contexts that went elsewhere, and what an ended session leaves.

Most are never used again. But a session may go back or rewrite its context again and again, and others may ask what
it asked; they come to the head of a branch more often than to its end (see `reach`). Only branches that one session
used are here: others count arrivals (see `shared`).

    session moves its tip, or ends --> leave(leaf) --age--> bins --> worth       use(block): somebody came that far
                                         evicted(leaf) --> inherit(parent), while it belongs to the branch

A branch is the run of blocks up from its leaf that has no other kid and no other user; a use in its middle cuts off the
part above.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import log2
from typing import Any

from kvstore.core.blocks import Block
from kvstore.core.eviction.curve import EDGES_NS, INDEX_STEPS, LAST_BIN, NO_INDEX, bin_of
from kvstore.core.eviction.reach import Reach, length_class

LEFT, ENDED = 0, 1
ENDED_DISCOUNT = round(-INDEX_STEPS * log2(0.3))
"""In index steps. A waiting session may be as far from its return, but others are less sure to come than it is: what an
ended one leaves counts 0.3 of its index."""


class Branch:
    """What is left of a branch. `worth` is as of when it got to its bin, or to its present leaf."""

    __slots__ = ("base", "bin", "kind", "leaf", "length", "since_ns", "worth")

    def __init__(self, leaf: Block, kind: int, base: int, now_ns: int) -> None:
        self.leaf: Block | None = leaf
        """None once it is no branch any more."""
        self.kind = kind
        self.base = base
        """Depth (0 for a chain's first block) of its first block."""
        self.length = length_class(leaf.depth + 1 - base)
        """Class of its length when it was left."""
        self.since_ns = leaf.last_access_ns
        self.bin = bin_of(now_ns - self.since_ns)
        self.worth = NO_INDEX


class LeftBranches:
    """Branches nobody holds, by their leaf."""

    def __init__(self) -> None:
        self._branches: dict[Block, Branch] = {}
        self._reach = Reach(), Reach()
        self._timers: list[tuple[int, int, int, Branch]] = []
        self._seq = 0

    def __contains__(self, block: Block) -> bool:
        return block in self._branches

    def leave(self, leaf: Block, kind: int, base: int, now_ns: int) -> None:
        """The leaf's session went elsewhere (LEFT) or ended; the branch begins at depth `base`."""
        branch = self._branches[leaf] = Branch(leaf, kind, base, now_ns)
        self._grown(branch, leaf)

    def evicted(self, leaf: Block) -> Branch | None:
        """The leaf is gone. Its branch, which may go on above it, or None if it wasn't left behind."""
        branch = self._branches.pop(leaf, None)
        if branch is not None:
            branch.leaf = None
        return branch

    def inherit(self, leaf: Block, branch: Branch) -> None:
        """The block is a leaf now; is it the branch's?"""
        if leaf.depth >= branch.base:
            branch.leaf = leaf
            branch.worth = self._worth(branch, leaf)
            self._branches[leaf] = branch

    def use(self, block: Block) -> None:
        """A request goes on from here: from the end of a branch, from its middle, or from neither."""
        at = block
        while at not in self._branches:
            if len(at.kids) != 1:
                return
            at = next(iter(at.kids))
            if at.num_tips:
                return
        branch = self._branches[at]
        if block.depth >= branch.base:
            self._reach[branch.kind].use(branch.length, block.depth + 1 - branch.base, branch.bin)
            branch.base = block.depth + 1
        if at is block:
            self.evicted(at)

    def worth(self, block: Block) -> int | None:
        """In index steps; None for a block that wasn't left behind."""
        branch = self._branches.get(block)
        return None if branch is None else branch.worth

    def promise(self, num_blocks: int) -> int:
        """Worth of the end of a branch of that length that a session leaves by ending now."""
        return self._index(ENDED, length_class(num_blocks), num_blocks, 0)

    def advance(self, now_ns: int) -> list[Block]:
        """Let branches grow older; returns the leaves whose worth may have changed."""
        crossed: list[Block] = []
        timers = self._timers
        while timers and timers[0][0] <= now_ns:
            branch = heappop(timers)[-1]
            if branch.leaf is not None:
                branch.bin += 1
                self._grown(branch, branch.leaf)
                crossed.append(branch.leaf)
        return crossed

    def _grown(self, branch: Branch, leaf: Block) -> None:
        """It has come to the age of its bin."""
        self._reach[branch.kind].expose(branch.length, leaf.depth + 1 - branch.base, branch.bin)
        branch.worth = self._worth(branch, leaf)
        if branch.bin < LAST_BIN:
            self._seq += 1
            due_ns = branch.since_ns + EDGES_NS[branch.bin + 1]
            heappush(self._timers, (due_ns, branch.since_ns, self._seq, branch))

    def _worth(self, branch: Branch, leaf: Block) -> int:
        return self._index(branch.kind, branch.length, leaf.depth + 1 - branch.base, branch.bin)

    def _index(self, kind: int, length: int, num_blocks: int, k: int) -> int:
        worth = self._reach[kind].worth(length, num_blocks, k)
        return worth - ENDED_DISCOUNT if kind == ENDED and worth != NO_INDEX else worth

    def learned(self) -> list[dict[str, Any]]:
        """Counts, for `learned.pack`."""
        return [reach.learned() for reach in self._reach]

    def adopt(self, content: object) -> None:
        """Start from what `learned` gave. Raises ValueError when it has another shape."""
        if not isinstance(content, list) or len(content) != len(self._reach):
            raise ValueError("what was learned lacks a part")
        for reach, one in zip(self._reach, content, strict=True):
            reach.adopt(one)
