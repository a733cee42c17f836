"""The limits that the data path is held against: nothing but the system's own calls, in a few threads.

Each function moves the same blocks between the same buffers (and the same places on the disk) as the measured path
does, without checksums, queues or per-block bookkeeping: thread t of T takes blocks t, t + T, ... Large writes and
reads release the interpreter lock, so at 2 MiB a block these loops reach what a C program reaches (compared with
fio).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvstore.tiers.files import OpenFile


@dataclass(frozen=True)
class RawCopy:
    """Addresses of one block in memory."""

    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True)
class RawIO:
    """One block in memory and on the disk."""

    file: OpenFile
    offset: int
    memory: memoryview


class Threads:
    """A pool whose threads are there already."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "raw")
        self.each(lambda _t: None)

    def each(self, work: Callable[[int], None]) -> None:
        """`work(t)` in every thread; raises what it raised."""
        for done in [self._pool.submit(work, t) for t in range(self.num_threads)]:
            done.result()

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()


def copy(threads: Threads, blocks: Sequence[RawCopy]) -> None:
    """memcpy of all blocks."""
    move, step = ctypes.memmove, threads.num_threads

    def work(first: int) -> None:
        for block in blocks[first::step]:
            move(block.target, block.source, block.num_bytes)

    threads.each(work)


def read(threads: Threads, blocks: Sequence[RawIO]) -> None:
    """pread of all blocks, as the file was opened. Raises OSError on a short one."""
    _each_io(threads, blocks, os.preadv)


def write(threads: Threads, blocks: Sequence[RawIO]) -> None:
    """pwrite of all blocks, then fdatasync of every file. Raises OSError on a short one."""
    _each_io(threads, blocks, os.pwritev)
    for fd in {block.file.fd for block in blocks}:
        os.fdatasync(fd)


def _each_io(threads: Threads, blocks: Sequence[RawIO], call: Callable[[int, list[memoryview], int], int]) -> None:
    step = threads.num_threads

    def work(first: int) -> None:
        for block in blocks[first::step]:
            if call(block.file.fd, [block.memory], block.offset) != len(block.memory):
                raise OSError(f"short I/O at {block.offset}")

    threads.each(work)
