"""The `session` policy compiled: the same model and the same decisions as `kvstore.core.eviction.session`, for sweeps.

State is arrays instead of objects: a wait is a row of W* arrays by session; contexts are rows of the count tables,
found through a typed dictionary by packed keys. Candidates are scanned instead of kept in a heap, which is faster at
the few thousand leaves a trace has at once. Constants come from the core; a test compares the counts with those of
the core's own policy.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types
from numba.typed import Dict

from kvstore.core.blocks import Share
from kvstore.core.eviction.worth import priced
from kvstore_bench.flat.branches import (
    ENDED,
    LEFT,
    grown,
    index_of,
    inherit,
    leave,
    length_class,
    new_branches,
    new_reach,
    use,
)
from kvstore_bench.flat.compiled import jit, jit_inline
from kvstore_bench.flat.waits import (
    EDGES,
    I64,
    MIX_START,
    NO_INDEX,
    NUM_CLASSES,
    REFRESH_ARRIVALS,
    REFRESH_BIN,
    K,
    M,
    add_logs,
    bin_of,
    enter,
    expose_one,
    gap_octave,
    index_curve,
    learn,
    octave,
    predict,
    refresh_shared,
    user_class,
    weigh,
    worth_at,
)
from kvstore_bench.traces.model import Stop, Trace

ACTIVITY_CODES = np.array([0, 2, 3, 3], np.int64)
"""Activity of each Stop: OPEN, TOOL_WAIT, IDLE, IDLE."""


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
    prices: I64,
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
    timers = [(np.int64(0), np.int64(0), np.int64(0))]
    timers.pop()
    # ---- shared prefixes
    users, arrival = np.ones(num_blocks, np.int32), np.full(num_blocks, -1, np.int64)
    s_events, s_exposed = np.zeros((NUM_CLASSES, K)), np.zeros((NUM_CLASSES, K))
    curves = np.full((NUM_CLASSES, K), NO_INDEX, np.int64)
    num_arrivals, refresh_at = 0, REFRESH_ARRIVALS
    s_timers = [(np.int64(0), np.int64(0), np.int64(0), np.int64(0))]
    s_timers.pop()
    # ---- others who come to a context that waits, and branches left behind
    alone, extra = np.zeros(num_sessions, np.bool_), np.full(num_sessions, NO_INDEX, np.int64)
    others_counts, others_worth = np.zeros((3, K)), np.full(K, NO_INDEX, np.int64)
    depth, only_kid = np.zeros(num_blocks, np.int32), np.zeros(num_blocks, np.int32)  # only_kid: xor of the kids
    tree = (parent, kids, tips, users, depth)
    branches, reach = new_branches(num_blocks), new_reach()
    branch, leaf_of, left_bin, _, _, _, left_since, left_index = branches
    has_ended = np.zeros(num_sessions, np.bool_)
    l_timers = [(np.int64(0), np.int64(0), np.int64(0))]
    l_timers.pop()
    keys = np.zeros(M, np.int64)

    for r in range(num_requests):
        now, s, low = times[r], session[r], offsets[r]
        high = low + full[r]
        # ---- time passes
        while len(timers) > 0 and timers[0][0] <= now:
            _, began, owner = heappop(timers)
            if start[owner] != began:
                continue
            k = bins[owner]
            if k == 0:
                enter(events, exposed, rows[owner], pool, signs, 0)
            learn(rows[owner], pool, weights, signs, k, 0.0)
            bins[owner] = k + 1
            enter(events, exposed, rows[owner], pool, signs, k + 1)
            if alone[owner]:
                if k == 0:
                    expose_one(others_counts, others_worth, 0)
                expose_one(others_counts, others_worth, int(k + 1))
            extra[owner] = others_worth[k + 1]
            if k + 1 >= REFRESH_BIN:
                for j in range(k + 1, K):
                    hazard[j] = predict(rows[owner], pool, weights, signs, j)
                index_curve(hazard, index[owner], k + 1)
            if k + 2 < K - 1:
                heappush(timers, (began + EDGES[k + 2], began, owner))
        while len(s_timers) > 0 and s_timers[0][0] <= now:
            _, k, block, began = heappop(s_timers)
            if arrival[block] != began:
                continue
            c = user_class(users[block])
            s_exposed[c, k + 1] += 1.0
            if k + 2 < K - 1:
                heappush(s_timers, (began + EDGES[k + 2], k + 1, block, began))
        while len(l_timers) > 0 and l_timers[0][0] <= now:
            _, began, x = heappop(l_timers)
            if leaf_of[x] >= 0 and left_since[x] == began:
                left_bin[x] += 1
                grown(int(x), tree, branches, reach, l_timers)
        # ---- the request ends its session's wait
        first = last[s] < 0
        known = length[s]
        if start[s] >= 0:
            k = bins[s]
            if k == 0:
                enter(events, exposed, rows[s], pool, signs, 0)
                if alone[s]:
                    expose_one(others_counts, others_worth, 0)
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
        found = -1 if num_hits == 0 else ids[low + num_hits - 1]
        if found >= 0:
            use(found, only_kid, tree, branches, reach)
        if first:
            known = num_hits
            if num_hits > 0:
                if users[found] == 1 and place[found] >= 0 and tips[found] > 0:
                    x = session[used[found]]
                    if start[x] >= 0 and alone[x]:
                        if bins[x] == 0:
                            expose_one(others_counts, others_worth, 0)
                        others_counts[0, bins[x]] += 1.0
                        alone[x] = False
                below_num, below_ns = 0, np.int64(-2)
                for i in range(low + num_hits - 1, low - 1, -1):
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
            kids[b], only_kid[b] = 0, 0
            depth[b] = i - low + 1
            size += 1
            if up >= 0:
                if place[up] >= 0:
                    num_leaves -= 1
                    moved = leaves[num_leaves]
                    leaves[place[up]] = moved
                    place[moved] = place[up]
                    place[up] = -1
                kids[up] += 1
                only_kid[up] ^= b
            up = b
        tip = ids[high - 1] if high > low else -1
        old = tip_of[s]
        put_tip(s, tip, tip_of, tips, heads, others)
        if old >= 0 and place[old] >= 0 and tips[old] == 0 and users[old] == 1 and branch[old] < 0:
            leave(old, times[used[old]], LEFT, now, tree, branches, reach, l_timers)
        if tip >= 0:
            used[tip] = r
            if kids[tip] == 0 and place[tip] < 0:
                place[tip] = num_leaves
                leaves[num_leaves] = tip
                num_leaves += 1
        # ---- a new wait begins
        stop = activity[r]
        if high > low:
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
            alone[s] = users[ids[high - 1]] == 1
            extra[s] = max(others_worth[0], index_of(reach, ENDED, length_class(length[s]), length[s], 0))
            bins[s] = 0
            heappush(timers, (now + EDGES[1], now, np.int64(s)))
        # ---- evict the worst leaves until the tier fits
        while size > capacity:
            best, best_worth, best_used = -1, 1 << 60, np.int32(0)
            for j in range(num_leaves):
                b = leaves[j]
                q = used[b]
                value = NO_INDEX
                if tips[b] > 0 and start[session[q]] >= 0:
                    value = worth_at(index[session[q]], bins[session[q]], now - start[session[q]])
                if users[b] == 1 and value != NO_INDEX:
                    value = add_logs(value, extra[session[q]])
                elif branch[b] >= 0:
                    value = left_index[branch[b]]
                if users[b] >= 2:
                    value = add_logs(value, curves[user_class(users[b]), bin_of(now - arrival[b])])
                if value != NO_INDEX:
                    value += prices[depth[b]]
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
                alike, x = users[b], branch[b]
                if x >= 0:
                    branch[b] = leaf_of[x] = -1
                users[b] = 1
                arrival[b] = -1
                up = parent[b]
                if up < 0:
                    lift_tips(b, -1, tip_of, tips, heads, others)
                    break
                kids[up] -= 1
                only_kid[up] ^= b
                same = used[up] <= used[b] and (tips[up] > 0 or tips[b] == 0)
                same = same and (tips[b] > 0 or tips[up] == 0)
                lift_tips(b, up, tip_of, tips, heads, others)
                used[up] = max(used[up], used[b])
                if kids[up] > 0:
                    break
                if tips[up] == 0 and users[up] == 1:
                    worth = left_index[x] if x >= 0 else NO_INDEX
                    same = x >= 0 and inherit(up, x, tree, branches, reach)
                    if not same:
                        kind = ENDED if has_ended[session[used[up]]] else LEFT
                        leave(up, times[used[up]], kind, now, tree, branches, reach, l_timers)
                    same = same and left_index[x] == worth
                if size <= capacity or not same or users[up] != alike or alike >= 2:
                    place[up] = num_leaves
                    leaves[num_leaves] = up
                    num_leaves += 1
                    break
                b = up
        # ---- the session ends
        if signal_ends and ends[r]:
            old, has_ended[s], start[s] = tip_of[s], True, -1
            put_tip(s, -1, tip_of, tips, heads, others)
            if old >= 0 and place[old] >= 0 and tips[old] == 0 and users[old] == 1 and branch[old] < 0:
                leave(old, times[used[old]], ENDED, now, tree, branches, reach, l_timers)
    return hits


def session_hits(trace: Trace, capacity: int, *, signal_ends: bool = False, doubles_at: int = 0) -> I64:
    """[num_requests] leading full blocks found by each request, one tier of `capacity` blocks under `session`.

    `doubles_at`: as in `Share`.
    """
    share = Share("", 0, doubles_at)
    prices = [priced(0, number, share) for number in range(int(trace.full_blocks().max(initial=0)) + 1)]
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
        np.array(prices, np.int64),
    )
