"""What no policy can beat, and the exact curve of the baseline.

Optimum. Block ids name whole chains, so a parent is needed again no later than its child: Belady's rule per block,
with the freedom not to insert a block, keeps the resident set prefix-closed by itself and is the optimum for prefix
hits too. A position in the trace is the next use of exactly one block; so the cache *is* a set of positions, a
reference hits iff its own position is in the set, and the victim is the largest member.

Leaf-first LRU. Touching each request's blocks from the tail to the head makes block LRU evict tails first. One pass
over stack distances (Mattson et al., 1970, "Evaluation techniques for storage hierarchies") then gives the hits of
every capacity at once. Not for: policies without the inclusion property (FIFO, S3-FIFO, ARC ...).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore_bench.flat import bitset
from kvstore_bench.flat.compiled import jit, jit_inline

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]


@jit
def next_uses(ids: I32, num_blocks: int) -> I64:
    """[N] position of the next reference to the same block, or N."""
    count = len(ids)
    following = np.full(num_blocks, count, np.int64)
    out = np.empty(count, np.int64)
    for position in range(count - 1, -1, -1):
        block = ids[position]
        out[position] = following[block]
        following[block] = position
    return out


@jit
def _belady(following: I64, capacity: int, words: npt.NDArray[np.uint64], starts: I64) -> npt.NDArray[np.uint8]:
    count = len(following)
    hits = np.zeros(count, np.uint8)
    size = 0
    for position in range(count):
        if bitset.contains(words, position):
            hits[position] = 1
            size -= 1
            bitset.remove(words, starts, position)
        upcoming = following[position]
        if upcoming >= count:
            continue
        if size >= capacity:
            worst = bitset.find_max(words, starts)
            if worst <= upcoming:
                continue
            bitset.remove(words, starts, worst)
            size -= 1
        bitset.insert(words, starts, upcoming)
        size += 1
    return hits


def belady(ids: I32, num_blocks: int, capacity: int, following: I64 | None = None) -> npt.NDArray[np.uint8]:
    """[N] 1 where the reference hits under Belady's rule with bypass; `ids` in request order, head to tail."""
    if following is None:
        following = next_uses(ids, num_blocks)
    words, starts = bitset.make(len(ids))
    return _belady(following, capacity, words, starts)


@jit_inline
def _tree_add(tree: I64, word: int, delta: int) -> None:
    node = word + 1
    while node < len(tree):
        tree[node] += delta
        node += node & -node


@jit_inline
def _older(bits: npt.NDArray[np.uint64], tree: I64, stamp: int) -> int:
    """How many blocks were last touched before `stamp`."""
    node = stamp >> 6
    older = bitset.popcount(bits[node] & ((np.uint64(1) << np.uint64(stamp & 63)) - np.uint64(1)))
    while node > 0:
        older += tree[node]
        node -= node & -node
    return older


@jit
def leaf_lru_distances(ids: I32, offsets: I64, num_blocks: int) -> I32:
    """[N] stack distance of each reference under leaf-first LRU, in request order (head to tail); 0 for a first use.

    A reference hits in a cache of C blocks iff 0 < distance <= C. A request is matched as a whole before it touches
    anything, as a service does: its own new blocks never push out what it is about to use.
    """
    count = len(ids)
    bits = np.zeros((count >> 6) + 1, np.uint64)
    tree = np.zeros(len(bits) + 1, np.int64)
    last = np.full(num_blocks, -1, np.int64)
    out = np.zeros(count, np.int32)
    live = 0
    stamp = 0
    for request in range(len(offsets) - 1):
        low, high = offsets[request], offsets[request + 1]
        for position in range(low, high):
            before = last[ids[position]]
            if before >= 0:
                out[position] = live - _older(bits, tree, before)
        for position in range(high - 1, low - 1, -1):
            block = ids[position]
            before = last[block]
            if before >= 0:
                bits[before >> 6] &= ~(np.uint64(1) << np.uint64(before & 63))
                _tree_add(tree, before >> 6, -1)
                live -= 1
            bits[stamp >> 6] |= np.uint64(1) << np.uint64(stamp & 63)
            _tree_add(tree, stamp >> 6, 1)
            live += 1
            last[block] = stamp
            stamp += 1
    return out
