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
REFRESH_BIN = resume.REFRESH_BIN
FINE_BIN = resume.FINE_BIN
FINE_STEPS = resume.FINE_STEPS
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
def index_curve(hazard: F64, out: I64, first: int) -> None:
    """As `resume.index_curve`; leaves what is before bin `first` as it is."""
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
def pooled_at(pool: F64, k: int) -> float:
    guess = PRIOR_HAZARD
    if k > 1:
        guess = (pool[0, k - 2] + POOLED_WEIGHT * guess) / (pool[1, k - 2] + POOLED_WEIGHT)
    if k > 0:
        guess = (pool[0, k - 1] + POOLED_WEIGHT * guess) / (pool[1, k - 1] + POOLED_WEIGHT)
    return float((pool[0, k] + POOLED_WEIGHT * guess) / (pool[1, k] + POOLED_WEIGHT))


@jit_inline
def clip(p: float) -> float:
    return min(max(p, 1e-5), 0.999)


@jit_inline
def weigh(events: F64, exposed: F64, rows: I64, pool: F64, signs: F64, k: int) -> None:
    """As `ResumeModel._weigh`: fills column k of the rows' signs [R, K]."""
    base = pooled_at(pool, k)
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
    base = clip(pooled_at(pool, k))
    mixed = log(base / (1.0 - base))
    for m in range(M):
        mixed += weights[m, k] * signs[rows[m], k]
    return min(max(1.0 / (1.0 + exp(-mixed)), 1e-6), 0.9999)


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


@jit_inline
def put_tip(s: int, tip: int, tip_of: Any, tips: Any, heads: Any, others: Any) -> None:
    """Session s's context ends at `tip` from now on (-1: nowhere). Sessions of one tip form a list."""
    old = tip_of[s]
    if old >= 0:
        tips[old] -= 1
        if heads[old] == s:
            heads[old] = others[s]
        else:
            at = heads[old]
            while others[at] != s:
                at = others[at]
            others[at] = others[s]
    tip_of[s] = tip
    if tip >= 0:
        tips[tip] += 1
        others[s] = heads[tip]
        heads[tip] = s


@jit_inline
def lift_tips(b: int, up: int, tip_of: Any, tips: Any, heads: Any, others: Any) -> None:
    """Block b goes: contexts that ended there end at its parent, or nowhere."""
    while heads[b] >= 0:
        put_tip(heads[b], up, tip_of, tips, heads, others)


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
    tips = np.zeros(num_blocks, np.int32)  # contexts that end at the block
    heads = np.full(num_blocks, -1, np.int32)
    tip_of, others = np.full(num_sessions, -1, np.int32), np.full(num_sessions, -1, np.int32)
    last = np.full(num_sessions, -1, np.int64)
    # ---- the model
    rows_max = 1 << 12
    events, exposed, signs = np.zeros((rows_max, K)), np.zeros((rows_max, K)), np.zeros((rows_max, K))
    num_rows = 1
    pool = np.zeros((2, K))
    weights = np.full((M, K), MIX_START)
    # ---- waits, by session
    rows = np.zeros((num_sessions, M), np.int64)
    hazard = np.zeros(K)
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
                enter(events, exposed, rows[owner], pool, signs, 0)
            learn(rows[owner], pool, weights, signs, k, 0.0)
            bins[owner] = k + 1
            enter(events, exposed, rows[owner], pool, signs, k + 1)
            if k + 1 >= REFRESH_BIN:
                for j in range(k + 1, K):
                    hazard[j] = predict(rows[owner], pool, weights, signs, j)
                index_curve(hazard, index[owner], k + 1)
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
                enter(events, exposed, rows[s], pool, signs, 0)
            learn(rows[s], pool, weights, signs, k, 1.0)
            for m in range(M):
                events[rows[s, m], k] += 1.0
            pool[0, k] += 1.0
            weigh(events, exposed, rows[s], pool, signs, k)
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
            put_tip(s, tip, tip_of, tips, heads, others)
            used[tip] = r
            if kids[tip] == 0 and place[tip] < 0:
                place[tip] = num_leaves
                leaves[num_leaves] = tip
                num_leaves += 1
        # ---- a new wait begins
        stop = activity[r]
        ended = signal_ends and ends[r]
        if ended:
            put_tip(s, -1, tip_of, tips, heads, others)
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
                        signs = np.concatenate((signs, np.zeros((rows_max, K))))
                        rows_max *= 2
                rows[s, m] = row_of[key]
            for k in range(K):
                hazard[k] = predict(rows[s], pool, weights, signs, k)
            index_curve(hazard, index[s], 0)
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
                if tips[b] > 0 and start[session[q]] >= 0:
                    value = worth_at(index[session[q]], bins[session[q]], now - start[session[q]])
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
                    lift_tips(b, -1, tip_of, tips, heads, others)
                    break
                kids[up] -= 1
                same = used[up] <= used[b] and (tips[up] > 0 or tips[b] == 0)
                same = same and (tips[b] > 0 or tips[up] == 0)
                lift_tips(b, up, tip_of, tips, heads, others)
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
