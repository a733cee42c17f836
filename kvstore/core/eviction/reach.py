"""How likely is it that somebody uses a branch nobody holds, and how deep will they come?

Whoever asks anew, goes back, or takes up what another session said rarely needs a whole branch: many come to its first
blocks, few to its end. So uses are counted by age and by the depth they reach, and branches by their length:

    hazard of age k, length class l, depth class d   =   pooled hazard of age k  *  ratio of (l, d)

The ratio is what (l, d) saw over what the pool would have let expect, shrunk toward the product of the ratios of l and
d. Depth and length are in octaves of blocks from where the branch parts from what others use. What is used at some
depth is used at all above it; a branch that has lost its end is exposed only as deep as it still is.
"""

from __future__ import annotations

from typing import Any

from kvstore.core.eviction import learned
from kvstore.core.eviction.curve import NO_INDEX, NUM_BINS, index_curve, pooled

NUM_DEPTHS = 12
NUM_LENGTHS = 8
COUNT_MAX = 8192.0
"""Counts of an age are halved beyond this exposure. Uses are rare, one branch in ten; so it is eight times a wait's."""
RATIO_WEIGHT = 8.0
"""Expected uses that the guess of a ratio counts for."""
PART_WEIGHT = 1.0
"""The same for the ratio of a length or a depth alone, toward 1."""
REFRESH = 32

Counts = list[list[float]]


def size_class(num_blocks: int) -> int:
    """0 for one block, 1 for 2-3, 2 for 4-7, ..."""
    level = 0
    while num_blocks > 1 and level < NUM_DEPTHS - 1:
        num_blocks >>= 1
        level += 1
    return level


def length_class(num_blocks: int) -> int:
    """As `size_class`; the last one has no end."""
    return min(size_class(num_blocks), NUM_LENGTHS - 1)


class Reach:
    """Counts of one kind of branch, and the index they give."""

    def __init__(self) -> None:
        self._events, self._exposed = zeros(), zeros()
        self._since_refresh = 0
        self._worth: dict[int, list[int]] = {}
        """By length class * NUM_DEPTHS + depth class; made when asked for."""
        self._pool: list[float] = []
        self._parts: tuple[list[float], list[float]] = [], []

    def expose(self, length: int, num_blocks: int, k: int) -> None:
        """A branch of that length class, of which `num_blocks` are left, has reached the age of bin k."""
        add(self._exposed, length, size_class(num_blocks), k)
        if sum(rows[0][k] for rows in self._exposed) > COUNT_MAX:
            for counts in (self._events, self._exposed):
                halve(counts, k)
        self._since_refresh += 1
        if self._since_refresh >= REFRESH:
            self._refresh()

    def use(self, length: int, num_blocks: int, k: int) -> None:
        """Somebody used its first `num_blocks` at that age."""
        add(self._events, length, size_class(num_blocks), k)

    def worth(self, length: int, num_blocks: int, k: int) -> int:
        """Index of the block at depth `num_blocks` of the branch, in steps."""
        if not self._pool:
            return NO_INDEX
        depth = size_class(num_blocks)
        found = self._worth.get(length * NUM_DEPTHS + depth)
        if found is None:
            found = self._worth[length * NUM_DEPTHS + depth] = self._curve(length, depth)
        return found[k]

    def _refresh(self) -> None:
        """Pooled over lengths, then the ratio of each depth and of each length to the pool."""
        self._since_refresh = 0
        self._worth = {}
        seen, risk = over_lengths(self._events), over_lengths(self._exposed)
        self._pool = [pooled(seen[0], risk[0], k) for k in range(NUM_BINS)]
        depths = [self._ratio(seen[d], risk[d], PART_WEIGHT, 1.0) for d in range(NUM_DEPTHS)]
        lengths = [self._ratio(self._events[m][0], self._exposed[m][0], PART_WEIGHT, 1.0) for m in range(NUM_LENGTHS)]
        self._parts = lengths, depths

    def _ratio(self, events: list[float], exposed: list[float], weight: float, guess: float) -> float:
        seen, expected = 0.0, 0.0
        for k in range(NUM_BINS):
            seen += events[k]
            expected += exposed[k] * self._pool[k]
        return (seen + weight * guess) / (expected + weight)

    def _curve(self, length: int, depth: int) -> list[int]:
        lengths, depths = self._parts
        events, exposed = self._events[length][depth], self._exposed[length][depth]
        ratio = self._ratio(events, exposed, RATIO_WEIGHT, depths[depth] * lengths[length])
        return index_curve([min(hazard * ratio, 0.999) for hazard in self._pool])

    def learned(self) -> dict[str, Any]:
        """Counts, for `learned.pack`."""
        return {
            "branches": [
                [learned.trimmed(row) for row in rows] for counts in (self._events, self._exposed) for rows in counts
            ]
        }

    def adopt(self, content: object) -> None:
        """Start from what `learned` gave. Raises ValueError and changes nothing when it has another shape."""
        if not isinstance(content, dict):
            raise ValueError("what was learned lacks a part")
        tables = learned.as_list(content.get("branches"))
        if len(tables) != 2 * NUM_LENGTHS or any(len(learned.as_list(rows)) != NUM_DEPTHS for rows in tables):
            raise ValueError("what was learned of branches has another shape than in this version")
        counts = [[learned.counts(row, NUM_BINS) for row in rows] for rows in tables]
        self._events, self._exposed = counts[:NUM_LENGTHS], counts[NUM_LENGTHS:]
        if any(any(rows[0]) for rows in self._exposed):
            self._refresh()


def zeros() -> list[Counts]:
    """[length][depth][age]"""
    return [[[0.0] * NUM_BINS for _ in range(NUM_DEPTHS)] for _ in range(NUM_LENGTHS)]


def add(counts: list[Counts], length: int, deepest: int, k: int) -> None:
    """One more at every depth down to the deepest."""
    for row in counts[length][: deepest + 1]:
        row[k] += 1.0


def halve(counts: list[Counts], k: int) -> None:
    for rows in counts:
        for row in rows:
            row[k] *= 0.5


def over_lengths(counts: list[Counts]) -> Counts:
    """[depth][age]"""
    return [[sum(rows[d][k] for rows in counts) for k in range(NUM_BINS)] for d in range(NUM_DEPTHS)]
