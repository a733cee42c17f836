"""The `session` policy compiled: the same model and the same decisions as `kvstore.core.eviction.session`, for sweeps.

State is arrays instead of objects: a wait is a row of W* arrays by session; contexts are rows of the count tables,
found through a typed dictionary by packed keys. Candidates are scanned instead of kept in a heap, which is faster at
the few thousand leaves a trace has at once. Constants come from the core; a test compares the counts with those of
the core's own policy.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import exp, log, log2
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types
from numba.typed import Dict

from kvstore.core.eviction import resume, shared, worth
from kvstore_bench.flat.compiled import jit, jit_inline
from kvstore_bench.traces.model import Stop, Trace

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

K = resume.NUM_BINS
M = worth.NUM_CONTEXTS
EDGES = np.array(resume.EDGES_NS, np.int64)
WIDTHS = np.diff(EDGES.astype(np.float64)) / 1e9
STEPS = resume.INDEX_STEPS
NO_INDEX = resume.NO_INDEX
COUNT_MAX = resume.COUNT_MAX
POOLED_WEIGHT = resume.POOLED_WEIGHT
CONTEXT_WEIGHT = resume.CONTEXT_WEIGHT
RATIO_WEIGHT = resume.RATIO_WEIGHT
RATIO_MAX = resume.RATIO_MAX
PRIOR_HAZARD = resume.PRIOR_HAZARD
MIX_START = resume.MIX_START
MIX_RATE = resume.MIX_RATE
NUM_CLASSES = shared.NUM_CLASSES
SHARED_POOLED_WEIGHT = shared.POOLED_WEIGHT
SHARED_CLASS_WEIGHT = shared.CLASS_WEIGHT
SHARED_PRIOR = shared.PRIOR_HAZARD
REFRESH_ARRIVALS = shared.REFRESH_ARRIVALS
SESSION_CONTEXT = worth.SESSION_CONTEXT
ACTIVITY_CODES = np.array([0, 2, 3, 3], np.int64)
"""Activity of each Stop: OPEN, TOOL_WAIT, IDLE, IDLE."""


@jit_inline
def octave(value: float, per: int) -> int:
    return int(per * log2(value + 1.0))


@jit_inline
def gap_octave(gap_ns: float) -> int:
    if gap_ns < 0:
        return 0
    return min(20, max(1, int(log2(max(gap_ns / 1e9, 0.25))) + 3))


@jit_inline
def bin_of(age: int) -> int:
    k = 0
    while k + 1 < K - 1 and EDGES[k + 1] <= age:
        k += 1
    return k


@jit_inline
def index_curve(hazard: F64, out: I64) -> None:
    """As `resume.index_curve`."""
    for k in range(K - 1):
        reach, gain, cost, best = 1.0, 0.0, 0.0, 0.0
        for j in range(k, K - 1):
            p = hazard[j]
            gain += reach * p
            cost += reach * (WIDTHS[j] * (1.0 - 0.5 * p))
            best = max(best, gain / cost)
            reach *= 1.0 - p
        out[k] = round(STEPS * log2(max(best, 1e-12)))
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
def pooled_at(pool: F64, k: int) -> float:
    guess = PRIOR_HAZARD
    if k > 1:
        guess = (pool[0, k - 2] + POOLED_WEIGHT * guess) / (pool[1, k - 2] + POOLED_WEIGHT)
    if k > 0:
        guess = (pool[0, k - 1] + POOLED_WEIGHT * guess) / (pool[1, k - 1] + POOLED_WEIGHT)
    return float((pool[0, k] + POOLED_WEIGHT * guess) / (pool[1, k] + POOLED_WEIGHT))


@jit_inline
def predict(events: F64, exposed: F64, rows: I64, pool: F64, weights: F64, k: int, signs: F64) -> float:
    """The hazard of bin k; fills signs [M]."""
    base = pooled_at(pool, k)
    clipped = min(max(base, 1e-5), 0.999)
    level = log(clipped / (1.0 - clipped))
    mixed = level
    for m in range(M):
        row = rows[m]
        seen, expected = RATIO_WEIGHT, RATIO_WEIGHT
        for j in range(max(0, k - 2), min(K, k + 3)):
            if j != k:
                seen += events[row, j]
                expected += exposed[row, j] * ((pool[0, j] + 0.1) / (pool[1, j] + 1.0))
        guess = min(base * min(seen / expected, RATIO_MAX), 0.9)
        own = (events[row, k] + CONTEXT_WEIGHT * guess) / (exposed[row, k] + CONTEXT_WEIGHT)
        own = min(max(own, 1e-5), 0.999)
        signs[m] = log(own / (1.0 - own)) - level
        mixed += weights[m, k] * signs[m]
    return min(max(1.0 / (1.0 + exp(-mixed)), 1e-6), 0.9999)


@jit_inline
def learn(events: F64, exposed: F64, rows: I64, pool: F64, weights: F64, k: int, outcome: float, signs: F64) -> None:
    error = outcome - predict(events, exposed, rows, pool, weights, k, signs)
    for m in range(M):
        weights[m, k] += MIX_RATE * error * signs[m]


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
        index_curve(hazard[c], curves[c])


@jit_inline
def add_logs(one: int, other: int) -> int:
    if one == NO_INDEX:
        return other
    if other == NO_INDEX:
        return one
    high, low = max(one, other), min(one, other)
    if high - low > 16 * STEPS:
        return high
    return int(high + round(STEPS * log2(1.0 + 2.0 ** ((low - high) / STEPS))))


@jit
def _simulate(  # noqa: PLR0915 - one compiled loop; splitting it would copy its state around
    ids: npt.NDArray[np.int32],
    offsets: I64,
    full: I64,
    times: I64,
    session: npt.NDArray[np.int32],
    activity: I64,
    output: I64,
    tool: I64,
    ends: npt.NDArray[np.bool_],
    num_blocks: int,
    num_sessions: int,
    capacity: int,
    signal_ends: bool,
    row_of: Any,
) -> I64:
    num_requests = len(times)
    hits = np.zeros(num_requests, np.int64)
    # ---- the tree
    parent = np.full(num_blocks, -2, np.int32)
    resident = np.zeros(num_blocks, np.bool_)
    kids = np.zeros(num_blocks, np.int32)
    used = np.full(num_blocks, -1, np.int32)  # request that last used the block, known at the tips
    place = np.full(num_blocks, -1, np.int32)
    leaves = np.empty(num_blocks, np.int32)
    num_leaves, size = 0, 0
    left = np.zeros(num_requests, np.bool_)  # the branch that ends here is held by nobody
    last = np.full(num_sessions, -1, np.int64)
    # ---- the model
    rows_max = 1 << 12
    events, exposed = np.zeros((rows_max, K)), np.zeros((rows_max, K))
    num_rows = 1
    pool = np.zeros((2, K))
    weights = np.full((M, K), MIX_START)
    # ---- waits, by session
    rows = np.zeros((num_sessions, M), np.int64)
    signs, hazard = np.zeros(M), np.zeros(K)
    index = np.full((num_sessions, K), NO_INDEX, np.int64)
    start = np.full(num_sessions, -1, np.int64)
    bins = np.zeros(num_sessions, np.int64)
    gap, mean_gap = np.full(num_sessions, -1.0), np.full(num_sessions, -1.0)
    num_waits, length = np.zeros(num_sessions, np.int64), np.zeros(num_sessions, np.int64)
    timers = [(np.int64(0), np.int64(0), np.int64(0), np.int64(0))]
    timers.pop()
    seq = np.int64(0)
    # ---- shared prefixes
    users, arrival = np.ones(num_blocks, np.int32), np.full(num_blocks, -1, np.int64)
    s_events, s_exposed = np.zeros((NUM_CLASSES, K)), np.zeros((NUM_CLASSES, K))
    curves = np.full((NUM_CLASSES, K), NO_INDEX, np.int64)
    num_arrivals, refresh_at = 0, REFRESH_ARRIVALS
    s_timers = [(np.int64(0), np.int64(0), np.int64(0), np.int64(0))]
    s_timers.pop()
    keys = np.zeros(M, np.int64)

    for r in range(num_requests):
        now, s, low = times[r], session[r], offsets[r]
        high = low + full[r]
        # ---- time passes
        while len(timers) > 0 and timers[0][0] <= now:
            _, _, owner, began = heappop(timers)
            if start[owner] != began:
                continue
            k = bins[owner]
            if k == 0:
                expose(events, exposed, rows[owner], pool, 0)
            learn(events, exposed, rows[owner], pool, weights, k, 0.0, signs)
            bins[owner] = k + 1
            expose(events, exposed, rows[owner], pool, k + 1)
            if k + 2 < K - 1:
                seq += 1
                heappush(timers, (began + EDGES[k + 2], seq, owner, began))
        while len(s_timers) > 0 and s_timers[0][0] <= now:
            _, k, block, began = heappop(s_timers)
            if arrival[block] != began:
                continue
            c = user_class(users[block])
            s_exposed[c, k + 1] += 1.0
            if k + 2 < K - 1:
                heappush(s_timers, (began + EDGES[k + 2], k + 1, block, began))
        # ---- the request ends its session's wait
        first = last[s] < 0
        known = length[s]
        if start[s] >= 0:
            k = bins[s]
            if k == 0:
                expose(events, exposed, rows[s], pool, 0)
            learn(events, exposed, rows[s], pool, weights, k, 1.0, signs)
            for m in range(M):
                events[rows[s, m], k] += 1.0
            pool[0, k] += 1.0
            waited = float(now - start[s])
            gap[s] = waited
            mean_gap[s] = waited if mean_gap[s] < 0.0 else mean_gap[s] + (waited - mean_gap[s]) / 4
            num_waits[s] += 1
            start[s] = -1
        # ---- match
        num_hits = 0
        while low + num_hits < high and resident[ids[low + num_hits]]:
            num_hits += 1
        hits[r] = num_hits
        before = last[s]
        if before >= 0:
            old_low, old_num = offsets[before], full[before]
            if old_num > full[r] or (old_num > 0 and ids[old_low + old_num - 1] != ids[low + old_num - 1]):
                left[before] = True
        last[s] = r
        if first:
            newcomer = num_hits > 0 or full[r] == 1
            known = num_hits if num_hits > 0 else full[r] if newcomer else 0
            if newcomer:
                below_num, below_ns = 0, np.int64(-2)
                for i in range(low + max(num_hits, 1) - 1, low - 1, -1):
                    b = ids[i]
                    if users[b] != below_num or arrival[b] != below_ns:
                        if users[b] >= 2:
                            s_events[user_class(users[b]), bin_of(now - arrival[b])] += 1.0
                        s_exposed[user_class(users[b] + 1), 0] += 1.0
                        heappush(s_timers, (now + EDGES[1], np.int64(0), np.int64(b), now))
                    below_num, below_ns = users[b], arrival[b]
                    users[b] += 1
                    arrival[b] = now
                num_arrivals += 1
                if num_arrivals >= refresh_at:
                    refresh_at = num_arrivals + max(REFRESH_ARRIVALS, num_arrivals // 8)
                    refresh_shared(s_events, s_exposed, curves)
        length[s] = full[r]
        # ---- put the rest in
        up = -1 if num_hits == 0 else ids[low + num_hits - 1]
        for i in range(low + num_hits, high):
            b = ids[i]
            parent[b] = up
            resident[b] = True
            kids[b] = 0
            size += 1
            if up >= 0:
                if place[up] >= 0:
                    num_leaves -= 1
                    moved = leaves[num_leaves]
                    leaves[place[up]] = moved
                    place[moved] = place[up]
                    place[up] = -1
                kids[up] += 1
            up = b
        if high > low:
            tip = ids[high - 1]
            used[tip] = r
            if kids[tip] == 0 and place[tip] < 0:
                place[tip] = num_leaves
                leaves[num_leaves] = tip
                num_leaves += 1
        # ---- a new wait begins
        stop = activity[r]
        ended = signal_ends and ends[r]
        if ended:
            left[r] = True
        elif stop != 0 or full[r] > 0:
            count = octave(num_waits[s], 1)
            known = min(known, length[s])
            keys[0] = stop
            keys[1] = stop * 64 + gap_octave(mean_gap[s])
            keys[2] = stop * 64 + gap_octave(gap[s])
            keys[3] = stop * 64 + count
            keys[4] = stop * 64 + octave(output[r], 1)
            keys[5] = stop * 128 + octave(length[s], 2)
            keys[6] = np.int64(s) * 8 + stop
            keys[7] = octave(length[s] - known, 1) * 128 + octave(known, 2)
            keys[8] = octave(output[r], 2) * 64 + count
            keys[9] = stop * 65536 + tool[r] + 1
            for m in range(M):
                key = keys[m] * 16 + m
                if key not in row_of:
                    row_of[key] = num_rows
                    num_rows += 1
                    if num_rows > rows_max:
                        events = np.concatenate((events, np.zeros((rows_max, K))))
                        exposed = np.concatenate((exposed, np.zeros((rows_max, K))))
                        rows_max *= 2
                rows[s, m] = row_of[key]
            for k in range(K):
                hazard[k] = predict(events, exposed, rows[s], pool, weights, k, signs)
            index_curve(hazard, index[s])
            start[s] = now
            bins[s] = 0
            seq += 1
            heappush(timers, (now + EDGES[1], seq, np.int64(s), now))
        # ---- evict the worst leaves until the tier fits
        while size > capacity:
            best, best_worth, best_used = -1, 1 << 60, np.int32(0)
            for j in range(num_leaves):
                b = leaves[j]
                q = used[b]
                value = NO_INDEX
                if not left[q]:
                    value = int(index[session[q], bins[session[q]]])
                if users[b] >= 2:
                    value = add_logs(value, curves[user_class(users[b]), bin_of(now - arrival[b])])
                if value < best_worth or (value == best_worth and q < best_used):
                    best, best_worth, best_used = b, value, q
            b = best
            num_leaves -= 1
            moved = leaves[num_leaves]
            leaves[place[b]] = moved
            place[moved] = place[b]
            place[b] = -1
            while True:
                resident[b] = False
                size -= 1
                alike = users[b]
                users[b] = 1
                arrival[b] = -1
                up = parent[b]
                if up < 0:
                    break
                kids[up] -= 1
                same = used[up] <= used[b]
                used[up] = max(used[up], used[b])
                if kids[up] > 0:
                    break
                if size <= capacity or not same or users[up] != alike or alike >= 2:
                    place[up] = num_leaves
                    leaves[num_leaves] = up
                    num_leaves += 1
                    break
                b = up
    return hits


def session_hits(trace: Trace, capacity: int, *, signal_ends: bool = False) -> I64:
    """[num_requests] leading full blocks found by each request, one tier of `capacity` blocks under `session`."""
    tool = np.where(trace.stop == Stop.TOOL, trace.tool, -1).astype(np.int64)
    return _simulate(
        trace.ids,
        trace.offsets,
        trace.full_blocks(),
        trace.times_ns,
        trace.session,
        ACTIVITY_CODES[trace.stop],
        trace.output_tokens,
        tool,
        trace.end,
        trace.num_blocks,
        trace.num_sessions,
        capacity,
        signal_ends,
        Dict.empty(types.int64, types.int64),
    )
