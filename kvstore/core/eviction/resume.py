"""When will this context be needed again? A model of waiting times that learns online, from nothing.

A *wait* begins when a session stops (tool call, end of turn, or simply the last request) and ends with its next
request. Time since then, its age, is cut into octaves: bin k covers [EDGES_NS[k], EDGES_NS[k + 1]). In each bin a
wait either ends (1) or survives (0), so predicting a wait is predicting a few coin flips, one hazard p[k] a bin.

    contexts of the wait         counts per context and bin          mixed hazard          worth of keeping
    (stop, pace, output ...) --> events E[row, k], exposure X[row, k] --> p[k] --> index[k] = max over t of P(end <=
    t) / E[min(end, t)]

Each context keeps its own counts, shrunk first by how it compares with the pooled curve in the bins around, then
toward the pooled curve at that bin. The contexts' log-odds, relative to the pooled ones, are added with weights per
bin that follow the gradient of the log loss (context mixing, as in PAQ: Mahoney, "Adaptive weighing of context models
for lossless data compression", 2005). So no set of classes has to be right everywhere. The index is the one of
Gittins (1979) for a job of unknown length: the best rate of saved tokens per block and second that any deadline t
gives, from this age on. It is kept as an integer, 64 steps an octave, so that equal prospects fall back on recency.

Not for: blocks whose use has nothing to do with sessions. They have no wait and rank below everything that has one.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import log2
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

F64: TypeAlias = npt.NDArray[np.float64]
Key: TypeAlias = tuple[object, ...]

NUM_BINS = 19
EDGES_NS: tuple[int, ...] = (0, *(int(1e9 * 2.0**power) for power in range(NUM_BINS - 1)))
"""[NUM_BINS] where bins begin: 0, 1 s, 2 s, 4 s, ... 2^17 s (36 h). The last one has no end and is never left."""

PRIOR_HAZARD = 0.01
"""Of ages nobody has reached yet: nobody comes back. A higher guess keeps old contexts for want of evidence."""
POOLED_WEIGHT = 10.0
"""How many waits a bin's neighbour is worth as a guess of the pooled hazard."""
CONTEXT_WEIGHT = 8.0
"""How many waits the pooled hazard is worth against a context's own counts."""
RATIO_WEIGHT = 4.0
"""How many expected events it takes to believe that a context is faster or slower than the pool."""
RATIO_MAX = 4.0
MIX_START = 0.3
MIX_RATE = 0.02
COUNT_MAX = 1024.0
"""Counts of a bin are halved beyond this exposure, so that old behaviour fades."""
INDEX_STEPS = 64
NO_INDEX = -(1 << 30)
ROWS_MAX = 1 << 17

_LOG_MIN, _LOG_MAX = 1e-5, 0.999
_WIDTH_S = np.diff(np.array(EDGES_NS, np.float64)) / 1e9


class Wait:
    """One running wait. `index[bin]` is the worth of the context's blocks now."""

    __slots__ = ("bin", "index", "live", "owner", "rows", "start_ns")

    def __init__(self, owner: object, start_ns: int, rows: npt.NDArray[np.int64], index: list[int]) -> None:
        self.owner = owner
        self.start_ns = start_ns
        self.rows = rows
        """[M] row of each context."""
        self.index = index
        """[K] by what was known when the wait began."""
        self.bin = 0
        self.live = True


_UPPER = np.triu(np.ones((NUM_BINS - 1, NUM_BINS - 1)))
_STARTED = _UPPER[:, :-1] > 0


def index_curve(hazard: F64) -> list[int]:
    """[K] Gittins' index from the start of each bin on, in log steps. `hazard`: [K], its last bin unused."""
    inner = hazard[:-1]
    # reach[k, j]: probability to get to the start of bin j alive, from the start of bin k <= j
    step = np.ones_like(_UPPER)
    step[:, 1:] = np.where(_STARTED, 1.0 - inner[:-1], 1.0)
    reach = np.cumprod(step, axis=1) * _UPPER
    gain = np.cumsum(reach * inner, axis=1)
    cost = np.cumsum(reach * (_WIDTH_S * (1.0 - 0.5 * inner)), axis=1)
    best = np.max(gain / np.where(cost > 0.0, cost, 1.0), axis=1)
    steps = [round(INDEX_STEPS * log2(max(rate, 1e-12))) for rate in best.tolist()]
    return [*steps, steps[-1]]


class ResumeModel:
    """Learns hazards from waits and tells the index of running ones. One instance may serve several tiers.

    Guarantees: deterministic; `begin`, `end` and `advance` must see non-decreasing times. Memory is bounded by
    `ROWS_MAX` rows; contexts beyond that share row 0, which learns nothing of its own.
    """

    def __init__(self, num_contexts: int) -> None:
        self._num = num_contexts
        self._rows: dict[tuple[int, Key], int] = {}
        self._free: list[int] = []
        self._events = np.zeros((64, NUM_BINS))
        self._exposed = np.zeros((64, NUM_BINS))
        self._used = 1
        self._pool_events = np.zeros(NUM_BINS)
        self._pool_exposed = np.zeros(NUM_BINS)
        self._weights = np.full((num_contexts, NUM_BINS), MIX_START)
        self._timers: list[tuple[int, int, Wait]] = []
        self._seq = 0

    def begin(self, owner: object, keys: list[Key], now_ns: int) -> Wait:
        """A wait with these contexts (one key per context, in a fixed order) starts now."""
        rows = np.array([self._row(number, key) for number, key in enumerate(keys)], np.int64)
        _, hazard = self._predict(rows, slice(0, NUM_BINS))
        wait = Wait(owner, now_ns, rows, index_curve(hazard))
        self._arm(wait)
        return wait

    def end(self, wait: Wait, now_ns: int) -> None:
        """The session came back. `advance(now_ns)` must have been called."""
        k = wait.bin
        wait.live = False
        if k == 0:
            self._expose(wait, 0)
        self._learn(wait, k, 1.0)
        self._events[wait.rows, k] += 1.0
        self._pool_events[k] += 1.0

    def forget(self, wait: Wait) -> None:
        """The wait is over without an outcome (ended, or described anew)."""
        wait.live = False

    def drop_context(self, number: int, key: Key) -> None:
        """A context will never be asked for again (a session that ended): its row is free."""
        row = self._rows.pop((number, key), 0)
        if row:
            self._events[row] = 0.0
            self._exposed[row] = 0.0
            self._free.append(row)

    def advance(self, now_ns: int) -> list[Wait]:
        """Let waits cross into later bins up to `now_ns`; returns those whose index may have changed."""
        crossed: list[Wait] = []
        timers = self._timers
        while timers and timers[0][0] <= now_ns:
            wait = heappop(timers)[2]
            if wait.live:
                self._cross(wait)
                crossed.append(wait)
        return crossed

    def _cross(self, wait: Wait) -> None:
        if wait.bin == 0:
            self._expose(wait, 0)
        self._learn(wait, wait.bin, 0.0)
        wait.bin += 1
        self._expose(wait, wait.bin)
        self._arm(wait)

    def _arm(self, wait: Wait) -> None:
        if wait.bin + 1 < NUM_BINS - 1:
            self._seq += 1
            heappush(self._timers, (wait.start_ns + EDGES_NS[wait.bin + 1], self._seq, wait))

    def _row(self, number: int, key: Key) -> int:
        row = self._rows.get((number, key), 0)
        if row:
            return row
        if self._free:
            row = self._free.pop()
        elif self._used < ROWS_MAX:
            row = self._used
            self._used += 1
            if row >= len(self._events):
                self._events = np.concatenate([self._events, np.zeros_like(self._events)])
                self._exposed = np.concatenate([self._exposed, np.zeros_like(self._exposed)])
        else:
            return 0
        self._rows[(number, key)] = row
        return row

    def _expose(self, wait: Wait, k: int) -> None:
        rows, exposed = wait.rows, self._exposed
        exposed[rows, k] += 1.0
        full = rows[exposed[rows, k] > COUNT_MAX]
        if full.size:
            exposed[full, k] *= 0.5
            self._events[full, k] *= 0.5
        self._pool_exposed[k] += 1.0
        if self._pool_exposed[k] > COUNT_MAX:
            self._pool_exposed[k] *= 0.5
            self._pool_events[k] *= 0.5

    def _learn(self, wait: Wait, k: int, outcome: float) -> None:
        signs, hazard = self._predict(wait.rows, slice(k, k + 1))
        self._weights[:, k] += MIX_RATE * (outcome - float(hazard[0])) * signs[:, 0]

    def _pooled(self) -> F64:
        """[K] pooled hazards; each bin leans on the one before, that one on the one before it."""
        events, exposed, weight = self._pool_events, self._pool_exposed, POOLED_WEIGHT
        guess = np.full(NUM_BINS, PRIOR_HAZARD)
        for _ in range(2):
            guess[1:] = ((events + weight * guess) / (exposed + weight))[:-1]
        hazard: F64 = (events + weight * guess) / (exposed + weight)
        return hazard

    def _predict(self, rows: npt.NDArray[np.int64], bins: slice) -> tuple[F64, F64]:
        """(log-odds of each context relative to the pool [M, B], mixed hazards [B]) for a run of B bins."""
        pooled = self._pooled()[bins]
        near = slice(max(0, bins.start - 2), min(NUM_BINS, bins.stop + 2))
        events, exposed = self._events[rows, near], self._exposed[rows, near]
        rate = (self._pool_events[near] + 0.1) / (self._pool_exposed[near] + 1.0)
        lead = bins.start - near.start
        inner = slice(lead, lead + bins.stop - bins.start)
        seen, expected = _around(events, inner), _around(exposed * rate, inner)
        guess = np.minimum(pooled * np.minimum((RATIO_WEIGHT + seen) / (RATIO_WEIGHT + expected), RATIO_MAX), 0.9)
        own = (events[:, inner] + CONTEXT_WEIGHT * guess) / (exposed[:, inner] + CONTEXT_WEIGHT)
        own = np.minimum(np.maximum(own, _LOG_MIN), _LOG_MAX)
        base = np.minimum(np.maximum(pooled, _LOG_MIN), _LOG_MAX)
        base = np.log(base / (1.0 - base))
        signs = np.log(own / (1.0 - own)) - base
        mixed = base + (self._weights[:, bins] * signs).sum(axis=0)
        hazard: F64 = np.minimum(np.maximum(1.0 / (1.0 + np.exp(-mixed)), 1e-6), 0.9999)
        return signs, hazard


def _around(counts: F64, inner: slice) -> F64:
    """[M, B] sum over the two bins before and the two after each bin of `inner`; `counts`: [M, B plus what is near]."""
    padded = np.zeros((counts.shape[0], counts.shape[1] + 4))
    padded[:, 2:-2] = counts
    first, last = inner.start, inner.stop
    total: F64 = padded[:, first:last] + padded[:, first + 1 : last + 1]
    return total + padded[:, first + 3 : last + 3] + padded[:, first + 4 : last + 4]
