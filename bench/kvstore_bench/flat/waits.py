"""The arithmetic of the core's waits, curves and shared prefixes, compiled; its constants come from the core, and so do
the functions that need no arrays."""

from __future__ import annotations

from math import log, log2

import numpy as np
import numpy.typing as npt

from kvstore.core.eviction import curve, resume, shared, worth
from kvstore_bench.flat.compiled import jit_inline

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

K = curve.NUM_BINS
M = worth.NUM_CONTEXTS
EDGES = np.array(curve.EDGES_NS, np.int64)
WIDTHS = np.diff(EDGES.astype(np.float64)) / 1e9
STEPS = curve.INDEX_STEPS
NO_INDEX = curve.NO_INDEX
COUNT_MAX = curve.COUNT_MAX
CONTEXT_WEIGHT = resume.CONTEXT_WEIGHT
CURVE_REFRESH = curve.REFRESH
RATIO_WEIGHT = resume.RATIO_WEIGHT
RATIO_MAX = resume.RATIO_MAX
MIX_START = resume.MIX_START
MIX_RATE = resume.MIX_RATE
REFRESH_BIN = resume.REFRESH_BIN
FINE_BIN = resume.FINE_BIN
FINE_STEPS = resume.FINE_STEPS
NUM_CLASSES = shared.NUM_CLASSES
SHARED_POOLED_WEIGHT = shared.POOLED_WEIGHT
SHARED_CLASS_WEIGHT = shared.CLASS_WEIGHT
SHARED_PRIOR = shared.PRIOR_HAZARD
REFRESH_ARRIVALS = shared.REFRESH_ARRIVALS


# What needs no array of its own is the core's own function, compiled.
octave = jit_inline(worth.octave)
gap_octave = jit_inline(worth.gap_octave)
add_logs = jit_inline(curve.add_logs)
bin_of = jit_inline(curve.bin_of)
pooled = jit_inline(curve.pooled)
clip = jit_inline(resume.clip)
hazard_of = jit_inline(resume.hazard_of)


@jit_inline
def index_curve(hazard: F64, out: I64, first: int) -> None:
    """As `curve.index_curve`; leaves what is before bin `first` as it is."""
    gains, costs, alive = np.empty(K), np.empty(K), np.empty(K)
    runs = 0
    for k in range(K - 2, first - 1, -1):
        p = hazard[k]
        gain, cost, reach = p, WIDTHS[k] * (1.0 - 0.5 * p), 1.0 - p
        while runs > 0 and gains[runs - 1] * cost > gain * costs[runs - 1]:
            runs -= 1
            gain += reach * gains[runs]
            cost += reach * costs[runs]
            reach *= alive[runs]
        gains[runs], costs[runs], alive[runs] = gain, cost, reach
        runs += 1
        out[k] = round(STEPS * log2(max(gain / cost, 1e-12)))
    out[K - 1] = out[K - 2]


@jit_inline
def expose(events: F64, exposed: F64, rows: I64, pool: F64, k: int) -> None:
    for m in range(M):
        row = rows[m]
        exposed[row, k] += 1.0
        if exposed[row, k] > COUNT_MAX:
            exposed[row, k] *= 0.5
            events[row, k] *= 0.5
    pool[1, k] += 1.0
    if pool[1, k] > COUNT_MAX:
        pool[1, k] *= 0.5
        pool[0, k] *= 0.5


@jit_inline
def expose_one(counts: F64, worth: I64, k: int) -> None:
    """As `Curve.expose`. counts: [3, K] events, exposures, and at [2, 0] how many since `worth` was made anew."""
    counts[1, k] += 1.0
    if counts[1, k] > COUNT_MAX:
        counts[1, k] *= 0.5
        counts[0, k] *= 0.5
    counts[2, 0] += 1.0
    if counts[2, 0] >= CURVE_REFRESH:
        counts[2, 0] = 0.0
        hazard = np.empty(K)
        for j in range(K):
            hazard[j] = min(pooled(counts[0], counts[1], j), 0.999)
        index_curve(hazard, worth, 0)


@jit_inline
def weigh(events: F64, exposed: F64, rows: I64, pool: F64, signs: F64, k: int) -> None:
    """As `ResumeModel._weigh`: fills column k of the rows' signs [R, K]."""
    base = pooled(pool[0], pool[1], k)
    level = log(clip(base) / (1.0 - clip(base)))
    for m in range(M):
        row = rows[m]
        seen, expected = RATIO_WEIGHT, RATIO_WEIGHT
        for j in range(max(0, k - 2), min(K, k + 3)):
            if j != k:
                seen += events[row, j]
                expected += exposed[row, j] * ((pool[0, j] + 0.1) / (pool[1, j] + 1.0))
        guess = min(base * min(seen / expected, RATIO_MAX), 0.9)
        own = clip((events[row, k] + CONTEXT_WEIGHT * guess) / (exposed[row, k] + CONTEXT_WEIGHT))
        signs[row, k] = log(own / (1.0 - own)) - level


@jit_inline
def predict(rows: I64, pool: F64, weights: F64, signs: F64, k: int) -> float:
    """The hazard of bin k."""
    base = clip(pooled(pool[0], pool[1], k))
    mixed = log(base / (1.0 - base))
    for m in range(M):
        mixed += weights[m, k] * signs[rows[m], k]
    return float(hazard_of(mixed))


@jit_inline
def learn(rows: I64, pool: F64, weights: F64, signs: F64, k: int, outcome: float) -> None:
    step = MIX_RATE * (outcome - predict(rows, pool, weights, signs, k))
    for m in range(M):
        weights[m, k] += step * signs[rows[m], k]


@jit_inline
def enter(events: F64, exposed: F64, rows: I64, pool: F64, signs: F64, k: int) -> None:
    expose(events, exposed, rows, pool, k)
    weigh(events, exposed, rows, pool, signs, k)


@jit_inline
def worth_at(index: I64, k: int, age: int) -> int:
    """The index within bin k, in steps from one bin to the next."""
    if k < FINE_BIN or k >= K - 2:
        return int(index[k])
    step = (age - EDGES[k]) // ((EDGES[k + 1] - EDGES[k]) // FINE_STEPS)
    return int(index[k] + (index[k + 1] - index[k]) * step // FINE_STEPS)


@jit_inline
def user_class(num: int) -> int:
    level = -1
    while num > 1:
        num >>= 1
        level += 1
    return min(level, NUM_CLASSES - 1)


@jit_inline
def refresh_shared(events: F64, exposed: F64, curves: I64) -> None:
    guess = SHARED_PRIOR
    hazard = np.empty((NUM_CLASSES, K))
    for k in range(K):
        seen, risk = 0.0, 0.0
        for c in range(NUM_CLASSES):
            seen += events[c, k]
            risk += exposed[c, k]
        level = (seen + SHARED_POOLED_WEIGHT * guess) / (risk + SHARED_POOLED_WEIGHT)
        guess = (seen + SHARED_POOLED_WEIGHT * SHARED_PRIOR) / (risk + SHARED_POOLED_WEIGHT)
        for c in range(NUM_CLASSES):
            own = (events[c, k] + SHARED_CLASS_WEIGHT * level) / (exposed[c, k] + SHARED_CLASS_WEIGHT)
            hazard[c, k] = min(own, 0.999)
    for c in range(NUM_CLASSES):
        index_curve(hazard[c], curves[c], 0)
