"""The transfer engine: many copies, few threads, reads first.

Used by the service (demote, promote) and by the client inside an engine's process (restore, offload). It has two
lanes, because what limits them differs: copies in memory want about as many threads as keep the memory bus busy
(two), file I/O wants as many as the disk wants requests in flight (eight). In each lane READ goes before WRITE, and
writes never take the last thread: a read starts at once however many writes run.

    submit(copies) -> units of about `unit_bytes`, adjacent file places joined -> lane -> thread -> (file_)moves.py

Waiting is bounded: a full queue refuses at once, a deadline or `cancel` drops what hasn't started. A copy that
already runs can't be called back; its memory stays in use until the transfer is done (`add_done_callback`), whoever
gave up waiting.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum

from kvstore.errors import InvalidField, KVStoreError, TierFull, TransferError, Unavailable
from kvstore.tiers import native
from kvstore.tiers.file_moves import read_jobs, write_jobs
from kvstore.tiers.moves import (
    Copy,
    CopyResult,
    File,
    Job,
    Memory,
    Obstacle,
    checksums_of,
    copy_jobs,
    fail_all,
    resolve,
)

__all__ = ["Copy", "CopyResult", "File", "Memory", "Priority", "Transfer", "TransferEngine", "checksums_of"]

log = logging.getLogger(__name__)
_UNIT_BYTES_MIN = 256 << 10
Move = Callable[[Sequence[Job], Obstacle], None]


class Priority(IntEnum):
    """READ: somebody waits for these bytes. WRITE: background."""

    READ = 0
    WRITE = 1


class Transfer:
    """A submitted batch. Results are in the order of the copies."""

    def __init__(self, num_copies: int, total_bytes: int, deadline: float | None) -> None:
        self.total_bytes = total_bytes
        self.deadline = deadline
        self._results: list[CopyResult | None] = [None] * num_copies
        self._left = 0
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._cancelled = False
        self._callbacks: list[Callable[[Transfer], None]] = []

    def wait(self, timeout: float | None = None) -> list[CopyResult]:
        """Results when all are through. Raises Unavailable after `timeout` seconds; the memory is still in use then."""
        if not self._finished.wait(timeout):
            raise Unavailable(f"transfer of {self.total_bytes} bytes isn't through after {timeout} s")
        return [r for r in self._results if r is not None]

    def done(self) -> bool:
        """Whether every copy is through, one way or another; its memory may be used again."""
        return self._finished.is_set()

    def cancel(self) -> None:
        """Drop what hasn't started; those copies end with Unavailable."""
        self._cancelled = True

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call `callback(self)` once when done, from a thread of the engine; at once when it's done already."""
        with self._lock:
            if not self._finished.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def obstacle(self) -> KVStoreError | None:
        """Why the next copy must not start; None when it may."""
        if self._cancelled:
            return Unavailable("transfer was cancelled")
        if self.deadline is not None and time.monotonic() > self.deadline:
            return Unavailable("deadline passed before the copy started")
        return None

    def expect(self, num_units: int) -> None:
        """Engine only: how many `unit_done` will come."""
        self._left = num_units

    def unit_done(self, jobs: Sequence[Job]) -> None:
        """Engine only: take over results; the last unit finishes the transfer."""
        for job in jobs:
            self._results[job.index] = job.result
        with self._lock:
            self._left -= 1
            if self._left:
                return
            self._finished.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                log.exception("callback of a transfer failed")


class _Unit:
    """What one thread does without looking at the queue again."""

    __slots__ = ("jobs", "move", "num_bytes", "priority", "transfer")

    def __init__(self, transfer: Transfer, jobs: list[Job], move: Move, priority: Priority) -> None:
        self.transfer = transfer
        self.jobs = jobs
        self.move = move
        self.priority = priority
        self.num_bytes = sum(job.copy.num_bytes for job in jobs)

    def run(self) -> None:
        """Carry out; never raises, every job has a result afterwards."""
        try:
            self.move(self.jobs, self.transfer.obstacle)
        except Exception as error:
            log.exception("transfer failed unexpectedly")
            fail_all(self.jobs, TransferError(f"unexpected: {error}"))
        self.transfer.unit_done(self.jobs)


class _Lane:
    """Threads behind one two-level queue. They start with the first work.

    `num_threads` bounds what is in flight of each priority; there is one thread more, so that a read never waits for a
    thread when every other one is writing.
    """

    def __init__(self, name: str, num_threads: int, max_queued_bytes: int) -> None:
        self.name = name
        self.num_threads = num_threads
        self.max_queued_bytes = max_queued_bytes
        self.queued_bytes = [0, 0]
        self._queues: tuple[deque[_Unit], deque[_Unit]] = (deque(), deque())
        self._condition = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._num_running = [0, 0]
        self._closed = False

    def has_room(self, num_bytes: int, priority: Priority) -> bool:
        """One batch is always taken when nothing waits, however large it is."""
        waiting = self.queued_bytes[priority]
        return not waiting or waiting + num_bytes <= self.max_queued_bytes

    def put(self, units: Sequence[_Unit], priority: Priority) -> None:
        """Queue all or nothing. Raises TierFull, Unavailable."""
        num_bytes = sum(unit.num_bytes for unit in units)
        with self._condition:
            if self._closed:
                raise Unavailable("transfer engine is closed")
            if not self.has_room(num_bytes, priority):
                raise TierFull(
                    f"{self.name}: {self.queued_bytes[priority]} bytes wait already, "
                    f"limit {self.max_queued_bytes}; retry later"
                )
            self._queues[priority].extend(units)
            self.queued_bytes[priority] += num_bytes
            self._start_threads(len(units))
            self._condition.notify(len(units))

    def _start_threads(self, wanted: int) -> None:
        for _ in range(min(wanted - self._num_idle, self.num_threads + 1 - len(self._threads))):
            thread = threading.Thread(target=self._loop, name=f"kvstore-{self.name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _loop(self) -> None:
        while (unit := self._next()) is not None:
            unit.run()
            with self._condition:
                self._num_running[unit.priority] -= 1
            del unit

    def _next(self) -> _Unit | None:
        with self._condition:
            while True:
                unit = self._pick()
                if unit is not None or self._closed:
                    return unit
                self._num_idle += 1
                self._condition.wait()
                self._num_idle -= 1

    def _pick(self) -> _Unit | None:
        for priority in Priority:
            queue = self._queues[priority]
            if queue and self._num_running[priority] < self.num_threads:
                self._num_running[priority] += 1
                self.queued_bytes[priority] -= queue[0].num_bytes
                return queue.popleft()
        return None

    def close(self, timeout: float) -> None:
        """Drop what waits, let what runs finish. Raises nothing; threads that hang in the kernel are left behind."""
        with self._condition:
            self._closed = True
            dropped = [unit for queue in self._queues for unit in queue]
            for queue in self._queues:
                queue.clear()
            self.queued_bytes = [0, 0]
            self._condition.notify_all()
        for unit in dropped:
            unit.transfer.cancel()
            unit.run()
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


class TransferEngine:
    """Moves bytes. Thread-safe.

    Args: num_threads: file I/O in flight; num_copy_threads: copies in memory, 0 for two or the number of cores;
    max_queued_bytes: bound of each lane and priority; unit_bytes: how much one thread takes at once.
    """

    def __init__(
        self,
        num_threads: int = 8,
        max_queued_bytes: int = 4 << 30,
        *,
        num_copy_threads: int = 0,
        unit_bytes: int = 2 << 20,
    ) -> None:
        native.load()
        self.unit_bytes = unit_bytes
        self._files = _Lane("file I/O", num_threads, max_queued_bytes)
        self._memory = _Lane("memory copies", num_copy_threads or min(2, os.cpu_count() or 1), max_queued_bytes)

    def submit(self, copies: Sequence[Copy], priority: Priority, deadline_s: float | None = None) -> Transfer:
        """Queue `copies`, all of one kind (memory, read or write). `deadline_s` counts from now.

        Raises InvalidField for places that can't be, TierFull when too much waits, Unavailable when closed. After an
        error nothing was queued.
        """
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        jobs = resolve(copies)
        transfer = Transfer(len(jobs), sum(c.num_bytes for c in copies), deadline)
        if not jobs:
            transfer.expect(1)
            transfer.unit_done([])
            return transfer
        lane, move = self._route(copies)
        units = [_Unit(transfer, run, move, priority) for run in self._cut(jobs, lane)]
        transfer.expect(len(units))
        lane.put(units, priority)
        return transfer

    def queued_bytes(self, priority: Priority) -> int:
        """Bytes that wait for a thread."""
        return self._files.queued_bytes[priority] + self._memory.queued_bytes[priority]

    def close(self, timeout: float = 5.0) -> None:
        """Drop what waits and stop the threads."""
        self._files.close(timeout)
        self._memory.close(timeout)

    def _route(self, copies: Sequence[Copy]) -> tuple[_Lane, Move]:
        kinds = {(type(c.source), type(c.target)) for c in copies}
        if kinds == {(Memory, Memory)}:
            return self._memory, copy_jobs
        if kinds == {(File, Memory)}:
            return self._files, read_jobs
        if kinds == {(Memory, File)}:
            return self._files, write_jobs
        raise InvalidField("copies", "mix of kinds", "submit memory copies, reads and writes apart")

    def _cut(self, jobs: list[Job], lane: _Lane) -> list[list[Job]]:
        """Units, in order of place for files. Small batches are cut finer, so that every thread gets a share."""
        if lane is self._files:
            jobs = sorted(jobs, key=lambda job: (id(job.file), job.offset))
        share = sum(job.copy.num_bytes for job in jobs) // lane.num_threads
        limit = max(_UNIT_BYTES_MIN, min(self.unit_bytes, share))
        units: list[list[Job]] = []
        size = limit
        for job in jobs:
            if size + job.copy.num_bytes > limit:
                units.append([])
                size = 0
            units[-1].append(job)
            size += job.copy.num_bytes
        return units
