"""How soon will yet another session use this shared prefix?

A block that several sessions have started from is needed when the next one arrives, whatever its present users do.
Arrivals are waits like any other, on blocks instead of sessions: age since the last new user, in classes by the
number of users so far (2-3, 4-7, ... 64 and more). A newcomer's path is cut into runs of blocks with the same
history; each run is one wait, held by its deepest block.

Only blocks with two users or more are remembered, so the table stays small. A block that leaves the tier is forgotten.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

import numpy as np

from kvstore.core.blocks import Block
from kvstore.core.eviction import learned
from kvstore.core.eviction.curve import EDGES_NS, LAST_BIN, NUM_BINS, bin_of, index_curve
from kvstore.core.sessions import Session

NUM_CLASSES = 6
POOLED_WEIGHT = 10.0
CLASS_WEIGHT = 8.0
PRIOR_HAZARD = 0.1
REFRESH_ARRIVALS = 16
WALK_MAX = 1 << 17


class Users:
    """A shared block's history."""

    __slots__ = ("arrival_ns", "bin", "counted", "num", "timed")

    def __init__(self, num: int, arrival_ns: int) -> None:
        self.num = num
        self.arrival_ns = arrival_ns
        self.bin = 0
        self.counted = False
        """The deepest block of its run: its age counts as the run's exposure."""
        self.timed = False
        """Told when its age enters another bin."""


def user_class(num: int) -> int:
    """0 for 2-3 users, 1 for 4-7, ..."""
    return min(num.bit_length() - 2, NUM_CLASSES - 1)


class SharedPrefixes:
    """Users of shared blocks, and the index that arrivals give them."""

    def __init__(self) -> None:
        self._users: dict[Block, Users] = {}
        self._events = np.zeros((NUM_CLASSES, NUM_BINS))
        self._exposed = np.zeros((NUM_CLASSES, NUM_BINS))
        self._curves: list[list[int]] = []
        self._num_arrivals = 0
        self._refresh_at = REFRESH_ARRIVALS
        self._timers: list[tuple[int, int, Block]] = []
        self._seq = 0

    def arrive(self, tip: Block, session: Session, now_ns: int) -> bool:
        """`session` uses the path to `tip` for the first time. Costs one step a block, once a session.

        True when all indices have changed: after 16 arrivals, then after every eighth part more, so that re-keying
        every shared candidate costs O(1) an arrival.
        """
        below: Users | None = None
        below_num, below_ns = 0, 0
        block: Block | None = tip
        for _ in range(WALK_MAX):
            if block is None:
                break
            users = self._users.get(block)
            num, arrival_ns = (1, -1) if users is None else (users.num, users.arrival_ns)
            deepest = below is None or (num, arrival_ns) != (below_num, below_ns)
            below_num, below_ns = num, arrival_ns
            below = self._users[block] = Users(num + 1, now_ns)
            if deepest:
                self._observe(num, arrival_ns, now_ns)
                below.counted = True
                self._arm(block, below)
            block = block.parent
        self._num_arrivals += 1
        if self._num_arrivals < self._refresh_at:
            return False
        self._refresh_at = self._num_arrivals + max(REFRESH_ARRIVALS, self._num_arrivals // 8)
        self._refresh()
        return True

    def _observe(self, num: int, arrival_ns: int, now_ns: int) -> None:
        if num < 2:
            return
        self._events[user_class(num), bin_of(now_ns - arrival_ns)] += 1.0

    def _arm(self, block: Block, users: Users) -> None:
        users.timed = True
        if users.counted:
            self._exposed[user_class(users.num), users.bin] += 1.0
        if users.bin < LAST_BIN:
            self._seq += 1
            heappush(self._timers, (users.arrival_ns + EDGES_NS[users.bin + 1], self._seq, block))

    def watch(self, block: Block, now_ns: int) -> None:
        """The block is a candidate from now on, maybe because the deepest of its run has gone."""
        users = self._users.get(block)
        if users is not None and not users.timed:
            users.bin = bin_of(now_ns - users.arrival_ns)
            self._arm(block, users)

    def advance(self, now_ns: int) -> list[Block]:
        """Let waits cross into later bins; returns the blocks that did."""
        crossed: list[Block] = []
        timers = self._timers
        while timers and timers[0][0] <= now_ns:
            due_ns, _, block = heappop(timers)
            users = self._users.get(block)
            if users is not None and users.timed and users.arrival_ns + EDGES_NS[users.bin + 1] == due_ns:
                users.bin += 1
                self._arm(block, users)
                crossed.append(block)
        return crossed

    def forget(self, block: Block) -> None:
        """The block left the tier."""
        self._users.pop(block, None)

    def __contains__(self, block: Block) -> bool:
        """Have two sessions or more used it?"""
        return block in self._users

    def blocks(self) -> list[Block]:
        """All shared blocks of the tier."""
        return list(self._users)

    def index(self, block: Block, now_ns: int) -> int | None:
        """The index by arrivals, or None for a block that isn't shared (or while nothing is known yet)."""
        users = self._users.get(block)
        if users is None or not self._curves:
            return None
        return self._curves[user_class(users.num)][bin_of(now_ns - users.arrival_ns)]

    def learned(self) -> dict[str, Any]:
        """Counts of arrivals, for `learned.pack`."""
        return {"arrivals": self._num_arrivals, "events": self._events.tolist(), "exposed": self._exposed.tolist()}

    def adopt(self, content: dict[str, Any]) -> None:
        """Start from what `learned` gave. Raises ValueError and changes nothing when it has another shape."""
        events, exposed = (
            np.array([learned.counts(row, NUM_BINS) for row in learned.as_list(content.get(name))])
            for name in ("events", "exposed")
        )
        num = content.get("arrivals")
        if events.shape != self._events.shape or exposed.shape != events.shape or not isinstance(num, int) or num < 0:
            raise ValueError("what was learned of shared prefixes has another shape than in this version")
        self._events, self._exposed, self._num_arrivals = events, exposed, num
        if num >= REFRESH_ARRIVALS:
            self._refresh_at = num + max(REFRESH_ARRIVALS, num // 8)
            self._refresh()

    def _refresh(self) -> None:
        pool_events, pool_exposed = self._events.sum(axis=0), self._exposed.sum(axis=0)
        before = (pool_events + POOLED_WEIGHT * PRIOR_HAZARD) / (pool_exposed + POOLED_WEIGHT)
        guess = np.concatenate([[PRIOR_HAZARD], before[:-1]])
        pooled = (pool_events + POOLED_WEIGHT * guess) / (pool_exposed + POOLED_WEIGHT)
        hazards = (self._events + CLASS_WEIGHT * pooled) / (self._exposed + CLASS_WEIGHT)
        self._curves = [index_curve(hazard) for hazard in np.minimum(hazards, 0.999).tolist()]
