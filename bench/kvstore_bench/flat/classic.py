"""Well-known policies, block by block, without a tree: what general caches do to prefixes.

One compiled loop a policy over a stream of block ids; all lists live in two arrays (`after`, `before`) with sentinels
past the blocks. Each returns 1 per reference that hits. A miss is always admitted unless said otherwise. Sources:

- FIFO, LRU; LFU with ties in order of entering the frequency.
- SIEVE: Zhang et al., NSDI 2024. Not for scans of long contexts: they fill the queue before the hand comes round.
- ARC: Megiddo and Modha, FAST 2003; list sizes as in libCacheSim. Not for trees: it keeps tails whose head is gone.
- S3-FIFO: Yang et al., SOSP 2023: small queue 10 %, promoted at its end when used again since it came in; ghost as
long as main.
- W-TinyLFU: Einziger et al., TOS 2017: LRU window 1 %, main SLRU (20 % probation / 80 % protected). The frequency
filter here is exact
  counts halved every 10 capacities of references, instead of a count-min sketch; so hits differ slightly from
  libraries'.
- GDSF: Cherkasova, 1998. Blocks are of one size and cost, so priority = clock + frequency: LFU with ageing.
- Belady without bypass: as simulators define it; `bounds.belady` may also refuse, and is the true optimum.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from kvstore_bench.flat import bitset
from kvstore_bench.flat.compiled import jit, jit_inline

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]


@jit_inline
def unlink(after: I32, before: I32, node: int) -> None:
    after[before[node]] = after[node]
    before[after[node]] = before[node]


@jit_inline
def push_front(after: I32, before: I32, head: int, node: int) -> None:
    """`head` is a sentinel: after[head] is the newest, before[head] the oldest."""
    first = after[head]
    after[head], before[node] = node, head
    after[node], before[first] = first, node


@jit_inline
def make_lists(num_blocks: int, num_lists: int) -> tuple[I32, I32]:
    after = np.arange(num_blocks + num_lists).astype(np.int32)
    before = np.arange(num_blocks + num_lists).astype(np.int32)
    return after, before


@jit
def queue_hits(ids: I32, num_blocks: int, capacity: int, move: bool) -> U8:
    """FIFO, or LRU when `move`."""
    after, before = make_lists(num_blocks, 1)
    inside = np.zeros(num_blocks, np.bool_)
    hits = np.zeros(len(ids), np.uint8)
    size, head = 0, num_blocks
    for i in range(len(ids)):
        b = ids[i]
        if inside[b]:
            hits[i] = 1
            if move:
                unlink(after, before, b)
                push_front(after, before, head, b)
            continue
        if size >= capacity:
            victim = before[head]
            unlink(after, before, victim)
            inside[victim] = False
            size -= 1
        push_front(after, before, head, b)
        inside[b] = True
        size += 1
    return hits


@jit
def fifo_runs(ids: I32, offsets: I64, num_blocks: int, capacity: int) -> I64:
    """[num_requests] leading blocks found under FIFO when a request is matched as a whole before its misses come in."""
    inside = np.zeros(num_blocks, np.bool_)
    queue = np.empty(len(ids), np.int32)
    first, last = 0, 0
    runs = np.zeros(len(offsets) - 1, np.int64)
    for r in range(len(offsets) - 1):
        position = offsets[r]
        while position < offsets[r + 1] and inside[ids[position]]:
            position += 1
        runs[r] = position - offsets[r]
        for i in range(offsets[r], offsets[r + 1]):
            if inside[ids[i]]:
                continue
            if last - first >= capacity:
                inside[queue[first]] = False
                first += 1
            inside[ids[i]] = True
            queue[last] = ids[i]
            last += 1
    return runs


@jit
def frequency_hits(ids: I32, num_blocks: int, capacity: int, age: bool) -> U8:
    """LFU, or GDSF when `age`: the priority of the last victim is added to every new priority."""
    hits = np.zeros(len(ids), np.uint8)
    count = np.zeros(num_blocks, np.int64)
    valid = np.full(num_blocks, -1, np.int64)
    heap = [(np.int64(0), np.int64(0), np.int64(0))]
    heap.pop()
    size, clock = 0, np.int64(0)
    for i in range(len(ids)):
        b = ids[i]
        if valid[b] >= 0:
            hits[i] = 1
        else:
            if size >= capacity:
                while True:
                    priority, stamp, victim = heappop(heap)
                    if valid[victim] == stamp:
                        break
                valid[victim] = -1
                size -= 1
                if age:
                    clock = priority
            count[b] = 0
            size += 1
        count[b] += 1
        valid[b] = i
        heappush(heap, (clock + count[b], np.int64(i), np.int64(b)))
    return hits


@jit
def sieve_hits(ids: I32, num_blocks: int, capacity: int) -> U8:
    after, before = make_lists(num_blocks, 1)
    inside, visited = np.zeros(num_blocks, np.bool_), np.zeros(num_blocks, np.bool_)
    hits = np.zeros(len(ids), np.uint8)
    size, head = 0, num_blocks
    hand = head
    for i in range(len(ids)):
        b = ids[i]
        if inside[b]:
            hits[i] = 1
            visited[b] = True
            continue
        if size >= capacity:
            if hand == head:
                hand = before[head]
            while visited[hand]:
                visited[hand] = False
                hand = before[hand]
                if hand == head:
                    hand = before[head]
            victim = hand
            hand = before[victim]
            unlink(after, before, victim)
            inside[victim] = False
            size -= 1
        push_front(after, before, head, b)
        inside[b], visited[b] = True, False
        size += 1
    return hits


@jit
def arc_hits(ids: I32, num_blocks: int, capacity: int) -> U8:
    after, before = make_lists(num_blocks, 5)
    where = np.zeros(num_blocks, np.int8)  # 0 nowhere, 1 T1, 2 T2, 3 B1, 4 B2
    num = np.zeros(5, np.int64)
    hits = np.zeros(len(ids), np.uint8)
    target = 0.0
    for i in range(len(ids)):
        b = ids[i]
        source = where[b]
        if source == 1 or source == 2:
            hits[i] = 1
            unlink(after, before, b)
            num[source] -= 1
            push_front(after, before, num_blocks + 2, b)
            where[b] = 2
            num[2] += 1
            continue
        if source == 3:
            target = min(target + max(num[4] / num[3], 1.0), float(capacity))
        elif source == 4:
            target = max(target - max(num[3] / num[4], 1.0), 0.0)
        if source >= 3:
            unlink(after, before, b)
            num[source] -= 1
            where[b] = 0
        if num[1] + num[2] >= capacity:
            demote = True
            if source < 3:
                if num[1] + num[3] >= capacity:
                    if num[3] > 0:
                        _drop(after, before, where, num, num_blocks, 3)
                    else:
                        _drop(after, before, where, num, num_blocks, 1)
                        demote = False
                elif num[1] + num[2] + num[3] + num[4] >= 2 * capacity:
                    _drop(after, before, where, num, num_blocks, 4)
            if demote:
                first = num[1] > 0 and (num[1] > target or (num[1] == target and source == 4))
                leave = 1 if first or num[2] == 0 else 2
                victim = before[num_blocks + leave]
                unlink(after, before, victim)
                num[leave] -= 1
                push_front(after, before, num_blocks + leave + 2, victim)
                where[victim] = leave + 2
                num[leave + 2] += 1
        into = 2 if source >= 3 else 1
        push_front(after, before, num_blocks + into, b)
        where[b] = into
        num[into] += 1
    return hits


@jit_inline
def _drop(after: I32, before: I32, where: npt.NDArray[np.int8], num: I64, num_blocks: int, which: int) -> None:
    victim = before[num_blocks + which]
    unlink(after, before, victim)
    where[victim] = 0
    num[which] -= 1


@jit
def s3fifo_hits(ids: I32, num_blocks: int, capacity: int) -> U8:
    after, before = make_lists(num_blocks, 4)
    where = np.zeros(num_blocks, np.int8)  # 1 small, 2 main, 3 ghost
    num = np.zeros(5, np.int64)
    uses = np.zeros(num_blocks, np.int8)
    hits = np.zeros(len(ids), np.uint8)
    small = max(1, capacity // 10)
    for i in range(len(ids)):
        b = ids[i]
        source = where[b]
        if source == 1 or source == 2:
            hits[i] = 1
            uses[b] = min(3, uses[b] + 1)
            continue
        while num[1] + num[2] >= capacity:
            if num[1] >= small or num[2] == 0:
                victim = before[num_blocks + 1]
                unlink(after, before, victim)
                num[1] -= 1
                into = 2 if uses[victim] > 0 else 3
                push_front(after, before, num_blocks + into, victim)
                where[victim] = into
                num[into] += 1
                uses[victim] = 0
                if num[3] > capacity - small:
                    _drop(after, before, where, num, num_blocks, 3)
            else:
                victim = before[num_blocks + 2]
                unlink(after, before, victim)
                if uses[victim] > 0:
                    uses[victim] -= 1
                    push_front(after, before, num_blocks + 2, victim)
                else:
                    num[2] -= 1
                    where[victim] = 0
        if where[b] == 3:
            unlink(after, before, b)
            num[3] -= 1
        into = 2 if source == 3 else 1
        push_front(after, before, num_blocks + into, b)
        where[b] = into
        num[into] += 1
        uses[b] = 0
    return hits


@jit
def tinylfu_hits(ids: I32, num_blocks: int, capacity: int) -> U8:
    after, before = make_lists(num_blocks, 4)
    where = np.zeros(num_blocks, np.int8)  # 1 window, 2 probation, 3 protected
    num = np.zeros(5, np.int64)
    count = np.zeros(num_blocks, np.int64)
    hits = np.zeros(len(ids), np.uint8)
    window = max(1, capacity // 100)
    protected = (capacity - window) * 8 // 10
    since = 0
    for i in range(len(ids)):
        b = ids[i]
        count[b] += 1
        since += 1
        if since >= 10 * capacity:
            count >>= 1
            since = 0
        source = where[b]
        if source > 0:
            hits[i] = 1
            unlink(after, before, b)
            num[source] -= 1
            into = 1 if source == 1 else 3
            push_front(after, before, num_blocks + into, b)
            where[b] = into
            num[into] += 1
            if num[3] > protected:
                demoted = before[num_blocks + 3]
                unlink(after, before, demoted)
                num[3] -= 1
                push_front(after, before, num_blocks + 2, demoted)
                where[demoted] = 2
                num[2] += 1
            continue
        push_front(after, before, num_blocks + 1, b)
        where[b] = 1
        num[1] += 1
        if num[1] <= window:
            continue
        candidate = before[num_blocks + 1]
        unlink(after, before, candidate)
        num[1] -= 1
        where[candidate] = 0
        if num[2] + num[3] >= capacity - window:
            victim = before[num_blocks + 2] if num[2] > 0 else before[num_blocks + 3]
            if victim >= num_blocks or count[candidate] <= count[victim]:
                continue
            _drop(after, before, where, num, num_blocks, int(where[victim]))
        push_front(after, before, num_blocks + 2, candidate)
        where[candidate] = 2
        num[2] += 1
    return hits


@jit
def _belady_admit(following: I64, capacity: int, words: U64, starts: I64) -> U8:
    count = len(following)
    hits = np.zeros(count, np.uint8)
    size, idle = 0, 0
    for i in range(count):
        if bitset.contains(words, i):
            hits[i] = 1
            bitset.remove(words, starts, i)
            size -= 1
        elif size + idle >= capacity:
            if idle > 0:
                idle -= 1
            else:
                bitset.remove(words, starts, bitset.find_max(words, starts))
                size -= 1
        if following[i] >= count:
            idle += 1
        else:
            bitset.insert(words, starts, following[i])
            size += 1
    return hits


def belady_admit_hits(ids: I32, following: I64, capacity: int) -> U8:
    """Belady's rule when every miss must be admitted."""
    words, starts = bitset.make(len(ids))
    return _belady_admit(following, capacity, words, starts)
