"""Ages in octaves, hazards by age, and what they make a block worth.

In each bin of its age a thing is either used (1) or gets older (0). `index_curve` turns the hazards of all bins into
Gittins' index (1979, for a job of unknown length): the best rate of saved tokens per block and second that any deadline
gives, from an age on. It is kept as an integer, 64 steps an octave, so that equal prospects fall back on recency.

A `Curve` learns the hazards of one kind of thing without contexts, for uses too rare to tell apart. Its worth is made
anew after every 16 exposures; nothing is worth anything before.
"""

from __future__ import annotations

from math import log2
from typing import Any

from kvstore.core.eviction import learned

NUM_BINS = 19
EDGES_NS: tuple[int, ...] = (0, *(int(1e9 * 2.0**power) for power in range(NUM_BINS - 1)))
"""[NUM_BINS] where bins begin: 0, 1 s, 2 s, 4 s, ... 2^17 s (36 h). The last one has no end and is never left."""

PRIOR_HAZARD = 0.01
"""Of ages nobody has reached yet: nobody comes back. A higher guess keeps old contexts for want of evidence."""
POOLED_WEIGHT = 10.0
"""How many waits a bin's neighbour is worth as a guess of the pooled hazard."""
COUNT_MAX = 1024.0
"""Counts of a bin are halved beyond this exposure, so that old behaviour fades."""
INDEX_STEPS = 64
"""Of the index in an octave: equal prospects are equal numbers."""
NO_INDEX = -(1 << 30)
"""Worth nothing."""
REFRESH = 16

LAST_BIN = NUM_BINS - 2
"""The deepest bin a wait gets to."""
_WIDTH_S = [(EDGES_NS[k + 1] - EDGES_NS[k]) / 1e9 for k in range(NUM_BINS - 1)]


def index_curve(hazard: list[float], first: int = 0) -> list[int]:
    """[K] Gittins' index from the start of each bin on, in log steps; 0 before bin `first`. `hazard`: [K], its last
    bin unused.

    From the last bin back, a bin takes in the runs behind it while they have a better rate than itself: what is left
    are runs of falling rates, and the best deadline is the end of the first one. O(K).
    """
    index = [0] * NUM_BINS
    gains: list[float] = []
    costs: list[float] = []
    alive: list[float] = []
    for k in range(LAST_BIN, first - 1, -1):
        p = hazard[k]
        gain, cost, reach = p, _WIDTH_S[k] * (1.0 - 0.5 * p), 1.0 - p
        while gains and gains[-1] * cost > gain * costs[-1]:
            gain += reach * gains.pop()
            cost += reach * costs.pop()
            reach *= alive.pop()
        gains.append(gain)
        costs.append(cost)
        alive.append(reach)
        rate = gain / cost
        index[k] = round(INDEX_STEPS * log2(rate if rate > 1e-12 else 1e-12))
    index[-1] = index[LAST_BIN]
    return index


def add_logs(one: int, other: int) -> int:
    """Index steps of the sum of two rates."""
    if one == NO_INDEX:
        return other
    if other == NO_INDEX:
        return one
    high, low = max(one, other), min(one, other)
    if high - low > 16 * INDEX_STEPS:
        return high
    return high + round(INDEX_STEPS * log2(1.0 + 2.0 ** ((low - high) / INDEX_STEPS)))


def bin_of(age_ns: int) -> int:
    """The octave of an age."""
    k = 0
    while k + 1 < NUM_BINS - 1 and EDGES_NS[k + 1] <= age_ns:
        k += 1
    return k


def pooled(events: list[float], exposed: list[float], k: int) -> float:
    """The hazard of bin k, which leans on the bin before, that one on the one before it."""
    guess = PRIOR_HAZARD
    for j in range(max(0, k - 2), k + 1):
        guess = (events[j] + POOLED_WEIGHT * guess) / (exposed[j] + POOLED_WEIGHT)
    return guess


class Curve:
    """Counts of one kind, and the index they give."""

    def __init__(self) -> None:
        self._events = [0.0] * NUM_BINS
        self._exposed = [0.0] * NUM_BINS
        self._since_refresh = 0
        self.worth = [NO_INDEX] * NUM_BINS
        """[K] index at the age of each bin."""

    def expose(self, k: int) -> None:
        """Something of this kind has reached the age of bin k."""
        self._exposed[k] += 1.0
        if self._exposed[k] > COUNT_MAX:
            self._exposed[k] *= 0.5
            self._events[k] *= 0.5
        self._since_refresh += 1
        if self._since_refresh >= REFRESH:
            self._refresh()

    def use(self, k: int) -> None:
        """It was used at that age."""
        self._events[k] += 1.0

    def _refresh(self) -> None:
        self._since_refresh = 0
        self.worth = index_curve([min(pooled(self._events, self._exposed, k), 0.999) for k in range(NUM_BINS)])

    def learned(self) -> dict[str, Any]:
        """Counts, for `learned.pack`."""
        return {"counts": [learned.trimmed(self._events), learned.trimmed(self._exposed)]}

    def adopt(self, content: object) -> None:
        """Start from what `learned` gave. Raises ValueError and changes nothing when it has another shape."""
        if not isinstance(content, dict):
            raise ValueError("what was learned lacks a part")
        self._events, self._exposed = learned.pair(content.get("counts"), NUM_BINS)
        if any(self._exposed):
            self._refresh()
