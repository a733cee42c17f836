"""A set of integers 0 .. n-1 with find-max in a few word operations: 64-ary summary levels over a bitmap.

All levels lie in one uint64 array; `starts[k]` is where level k begins, level 0 being the bitmap itself. Positions in
a trace are unique, so a set of next-use positions needs no heap.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore_bench.flat.compiled import jit_inline

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


def make(size: int) -> tuple[U64, I64]:
    """(words, starts) of an empty set of `size` possible members."""
    starts = [0]
    words = max(1, -(-size // 64))
    total = words
    while words > 1:
        starts.append(total)
        words = -(-words // 64)
        total += words
    return np.zeros(total, np.uint64), np.array(starts, np.int64)


@jit_inline
def insert(words: U64, starts: I64, member: int) -> None:
    index = member
    for level in range(len(starts)):
        word = starts[level] + (index >> 6)
        words[word] |= np.uint64(1) << np.uint64(index & 63)
        index >>= 6


@jit_inline
def remove(words: U64, starts: I64, member: int) -> None:
    index = member
    for level in range(len(starts)):
        word = starts[level] + (index >> 6)
        words[word] &= ~(np.uint64(1) << np.uint64(index & 63))
        if words[word] != 0:
            return
        index >>= 6


@jit_inline
def contains(words: U64, member: int) -> bool:
    return bool((words[member >> 6] >> np.uint64(member & 63)) & np.uint64(1) != 0)


@jit_inline
def high_bit(word: np.uint64) -> int:
    """Index of the highest set bit of a word that isn't 0."""
    bit = 0
    for shift in (32, 16, 8, 4, 2, 1):
        if word >> np.uint64(shift) != 0:
            word >>= np.uint64(shift)
            bit += shift
    return bit


@jit_inline
def find_max(words: U64, starts: I64) -> int:
    """The largest member, or -1."""
    index = 0
    for level in range(len(starts) - 1, -1, -1):
        word = words[starts[level] + index]
        if word == 0:
            return -1
        index = (index << 6) + high_bit(word)
    return index


@jit_inline
def popcount(word: np.uint64) -> int:
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return int((word * np.uint64(0x0101010101010101)) >> np.uint64(56))
