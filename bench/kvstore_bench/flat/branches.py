"""Branches that no session holds, compiled: as `kvstore.core.eviction.left` and `reach`.

A branch is known by the block that was its leaf when it was left: no block is the first leaf of two at a time, since
who puts it in again has used the branch. Tables are tuples of arrays:

    Tree       parent, kids, tips, users, depth (from 1)              by block
    Branches   branch (by leaf, -1: none), then by branch: leaf (-1: gone), bin, kind, length, base, since, index
    Reach      counts [kind, events or exposures, length, depth, K], parts [kind, 4, ..], made [kind, length, depth],
               curves [kind, length, depth, K]
"""

from __future__ import annotations

from heapq import heappush
from typing import Any

import numpy as np

from kvstore.core.eviction import left, reach
from kvstore_bench.flat.compiled import jit, jit_inline
from kvstore_bench.flat.waits import EDGES, F64, NO_INDEX, K, bin_of, index_curve, pooled

LEFT, ENDED = left.LEFT, left.ENDED
ENDED_DISCOUNT = left.ENDED_DISCOUNT
NUM_DEPTHS, NUM_LENGTHS = reach.NUM_DEPTHS, reach.NUM_LENGTHS
COUNT_MAX = reach.COUNT_MAX
RATIO_WEIGHT, PART_WEIGHT = reach.RATIO_WEIGHT, reach.PART_WEIGHT
REFRESH = reach.REFRESH
POOL, LENGTHS, DEPTHS, SINCE = 0, 1, 2, 3
"""Rows of `parts`: pooled hazards, ratios of lengths and of depths, and [exposures since then, 1 once there is a pool].
"""

size_class = jit_inline(reach.size_class)


@jit_inline
def length_class(num: int) -> int:
    return min(size_class(num), NUM_LENGTHS - 1)


@jit
def new_branches(num_blocks: int) -> Any:
    none = np.full(num_blocks, -1, np.int32)
    small = np.zeros(num_blocks, np.int8)
    longs = np.zeros(num_blocks, np.int64)
    return none, none.copy(), small, small.copy(), small.copy(), np.zeros(num_blocks, np.int32), longs, longs.copy()


@jit
def new_reach() -> Any:
    classes = (2, NUM_LENGTHS, NUM_DEPTHS)
    counts = np.zeros((2, 2, NUM_LENGTHS, NUM_DEPTHS, K))
    return counts, np.zeros((2, 4, max(K, NUM_DEPTHS))), np.zeros(classes, np.bool_), np.zeros((*classes, K), np.int64)


@jit_inline
def _ratio(events: F64, exposed: F64, pool: F64, weight: float, guess: float) -> float:
    seen, expected = 0.0, 0.0
    for k in range(K):
        seen += events[k]
        expected += exposed[k] * pool[k]
    return (seen + weight * guess) / (expected + weight)


@jit
def _refresh(tables: Any, kind: int) -> None:
    counts, parts, made, _ = tables
    events, exposed, mine = counts[kind, 0], counts[kind, 1], parts[kind]
    mine[SINCE, 0], mine[SINCE, 1] = 0.0, 1.0
    made[kind] = False
    seen, risk = np.zeros((NUM_DEPTHS, K)), np.zeros((NUM_DEPTHS, K))
    for m in range(NUM_LENGTHS):
        seen += events[m]
        risk += exposed[m]
    for k in range(K):
        mine[POOL, k] = pooled(seen[0], risk[0], k)
    for m in range(NUM_LENGTHS):
        mine[LENGTHS, m] = _ratio(events[m, 0], exposed[m, 0], mine[POOL], PART_WEIGHT, 1.0)
    for d in range(NUM_DEPTHS):
        mine[DEPTHS, d] = _ratio(seen[d], risk[d], mine[POOL], PART_WEIGHT, 1.0)


@jit
def _expose(tables: Any, kind: int, length: int, num: int, k: int) -> None:
    counts, parts, _, _ = tables
    exposed = counts[kind, 1]
    for d in range(size_class(num) + 1):
        exposed[length, d, k] += 1.0
    total = 0.0
    for m in range(NUM_LENGTHS):
        total += exposed[m, 0, k]
    if total > COUNT_MAX:
        counts[kind, :, :, :, k] *= 0.5
    parts[kind, SINCE, 0] += 1.0
    if parts[kind, SINCE, 0] >= REFRESH:
        _refresh(tables, kind)


@jit
def index_of(tables: Any, kind: int, length: int, num: int, k: int) -> int:
    counts, parts, made, curves = tables
    mine = parts[kind]
    if mine[SINCE, 1] == 0.0:
        return NO_INDEX
    d = size_class(num)
    if not made[kind, length, d]:
        made[kind, length, d] = True
        guess = mine[DEPTHS, d] * mine[LENGTHS, length]
        ratio = _ratio(counts[kind, 0, length, d], counts[kind, 1, length, d], mine[POOL], RATIO_WEIGHT, guess)
        hazard = np.empty(K)
        for j in range(K):
            hazard[j] = min(mine[POOL, j] * ratio, 0.999)
        index_curve(hazard, curves[kind, length, d], 0)
    worth = curves[kind, length, d, k]
    return int(worth - ENDED_DISCOUNT if kind == ENDED else worth)


@jit
def leave(leaf: int, since: int, kind: int, now: int, tree: Any, branches: Any, tables: Any, timers: Any) -> None:
    """Nobody holds the leaf: it ends a branch, used last at `since`."""
    parent, kids, tips, users, depth = tree
    branch, leaf_of, bins, kinds, lengths, bases, sinces, _ = branches
    first = leaf
    while parent[first] >= 0 and kids[parent[first]] == 1 and tips[parent[first]] == 0 and users[parent[first]] == 1:
        first = parent[first]
    branch[leaf] = leaf_of[leaf] = leaf
    bins[leaf], kinds[leaf] = bin_of(now - since), kind
    bases[leaf], sinces[leaf] = depth[first] - 1, since
    lengths[leaf] = length_class(depth[leaf] - bases[leaf])
    grown(leaf, tree, branches, tables, timers)


@jit
def grown(x: int, tree: Any, branches: Any, tables: Any, timers: Any) -> None:
    """Branch x has come to the age of its bin."""
    depth = tree[-1]
    _, leaf_of, bins, kinds, lengths, bases, sinces, indices = branches
    num, k = depth[leaf_of[x]] - bases[x], bins[x]
    _expose(tables, kinds[x], lengths[x], num, k)
    indices[x] = index_of(tables, kinds[x], lengths[x], num, k)
    if k < K - 2:
        heappush(timers, (sinces[x] + EDGES[k + 1], sinces[x], np.int64(x)))


@jit
def use(found: int, only_kid: Any, tree: Any, branches: Any, tables: Any) -> None:
    """A request goes on from `found`: from the end of a branch, from its middle, or from neither."""
    _, kids, tips, _, depth = tree
    branch, leaf_of, bins, kinds, lengths, bases, _, _ = branches
    at = found
    while branch[at] < 0:
        if kids[at] != 1:
            return
        at = only_kid[at]
        if tips[at] > 0:
            return
    x = branch[at]
    if depth[found] > bases[x]:
        for d in range(size_class(depth[found] - bases[x]) + 1):
            tables[0][kinds[x], 0, lengths[x], d, bins[x]] += 1.0
        bases[x] = depth[found]
    if at == found:
        branch[at] = leaf_of[x] = -1


@jit
def inherit(leaf: int, x: int, tree: Any, branches: Any, tables: Any) -> bool:
    """The leaf of branch x has gone; does the block above, a leaf now, belong to it?"""
    depth = tree[-1]
    branch, leaf_of, bins, kinds, lengths, bases, _, indices = branches
    if depth[leaf] <= bases[x]:
        return False
    branch[leaf], leaf_of[x] = x, leaf
    indices[x] = index_of(tables, kinds[x], lengths[x], depth[leaf] - bases[x], bins[x])
    return True
