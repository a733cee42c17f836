"""The transfer engine: many copies, few threads, reads first.

Used by the service (demote, promote) and by the client inside an engine's process (restore, offload). It has two
lanes, because what limits them differs: copies in memory want about as many threads as keep the memory bus busy
(two), file I/O wants as many as the disk wants requests in flight (eight). In each lane READ goes before WRITE, and
writes never take the last thread: a read starts at once however many writes run.

    submit(copies) -> units of about `unit_bytes`, adjacent file places joined -> lane -> thread -> (file_)moves.py

Writes are checked ahead, by few threads, while the others keep the disk busy. If each thread hashed what it writes,
those whose requests end together would hash together, and the disk would wait for them (a fifth of its rate).

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
from kvstore.tiers.file_moves import check_sources, read_jobs, write_jobs
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
from kvstore.tiers.tables import Table, TableTransfer

__all__ = ["Copy", "CopyResult", "File", "Memory", "Priority", "Transfer", "TransferEngine", "checksums_of"]

log = logging.getLogger(__name__)
_UNIT_BYTES_MIN = 256 << 10
_PIECE = 512
"""Copies in memory that are resolved at once."""
CHECKERS = max(1, (os.cpu_count() or 1) // 4)
"""Threads that check what will be written to files."""

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
        self._left = num_copies
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

    def withdraw(self, num_copies: int) -> None:
        """Engine only: these won't come. Returns when those that did are through, so that no memory is in use."""
        with self._lock:
            self._left -= num_copies
            if not self._left:
                self._finished.set()
        self._finished.wait()

    def take(self, jobs: Sequence[Job]) -> None:
        """Engine only: take over results; the last ones finish the transfer."""
        for job in jobs:
            self._results[job.index] = job.result
        with self._lock:
            self._left -= len(jobs)
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

    __slots__ = ("good", "jobs", "move", "num_bytes", "priority", "transfer", "unchecked")

    def __init__(self, transfer: Transfer, jobs: list[Job], move: Move, priority: Priority) -> None:
        self.transfer = transfer
        self.jobs = self.good = jobs
        self.move = move
        self.priority = priority
        self.num_bytes = sum(job.copy.num_bytes for job in jobs)
        self.unchecked = move is write_jobs

    def check(self) -> None:
        """First step of writes; never raises."""
        self.unchecked = False
        if self.transfer.obstacle() is not None:
            return
        try:
            self.good = check_sources(self.jobs)
        except Exception as error:
            self._fail(error)
            self.good = []

    def run(self) -> None:
        """Carry out; never raises, every job has a result afterwards."""
        if self.unchecked:
            self.check()
        try:
            self.move(self.good, self.transfer.obstacle)
        except Exception as error:
            self._fail(error)
        self.transfer.take(self.jobs)

    def _fail(self, error: Exception) -> None:
        log.exception("transfer failed unexpectedly")
        fail_all(self.jobs, TransferError(f"unexpected: {error}"))


class _Rows:
    """A range of rows of a table."""

    __slots__ = ("first", "last", "num_bytes", "priority", "transfer", "unchecked")

    def __init__(self, transfer: TableTransfer, first: int, last: int, num_bytes: int, priority: Priority) -> None:
        self.transfer = transfer
        self.first = first
        self.last = last
        self.num_bytes = num_bytes
        self.priority = priority
        self.unchecked = False

    def check(self) -> None:
        """Nothing to do ahead."""

    def run(self) -> None:
        """Carry out; never raises."""
        self.transfer.run(self.first, self.last)


_Work = _Unit | _Rows


class _Lane:
    """Threads behind one two-level queue. They start with the first work.

    There are more threads than `num_threads`: `num_checkers` check what will be written, and writes never take the last
    one, so a read starts at once, and with reads it hashes while the others keep the disk busy.
    """

    def __init__(self, name: str, num_threads: int, max_queued_bytes: int, num_checkers: int = 0) -> None:
        self.name = name
        self.num_threads = num_threads
        self.num_checkers = num_checkers
        self.max_queued_bytes = max_queued_bytes
        self.queued_bytes = [0, 0]
        self._queues: tuple[deque[_Work], deque[_Work]] = (deque(), deque())
        self._condition = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._checked: deque[_Work] = deque()
        self._num_idle = 0
        self._num_writing = 0
        self._num_checking = 0
        self._closed = False

    def admit(self, num_bytes: int, priority: Priority) -> None:
        """Make room for a batch, all or nothing. Raises TierFull, Unavailable."""
        with self._condition:
            if self._closed:
                raise Unavailable("transfer engine is closed")
            waiting = self.queued_bytes[priority]
            if waiting and waiting + num_bytes > self.max_queued_bytes:
                raise TierFull(f"{self.name}: {waiting} bytes wait already, limit {self.max_queued_bytes}; retry later")
            self.queued_bytes[priority] += num_bytes

    def forget(self, num_bytes: int, priority: Priority) -> None:
        """Give back what was admitted and won't be put."""
        with self._condition:
            self.queued_bytes[priority] -= num_bytes

    def put(self, units: Sequence[_Work], priority: Priority) -> None:
        """Queue units of an admitted batch. When the lane was closed since, they end as cancelled."""
        with self._condition:
            if not self._closed:
                self._queues[priority].extend(units)
                self._start_threads(len(units))
                self._condition.notify(len(units))
                return
        _drop(units)

    def _start_threads(self, wanted: int) -> None:
        most = self.num_threads + self.num_checkers + 1
        for _ in range(min(wanted - self._num_idle, most - len(self._threads))):
            thread = threading.Thread(target=self._loop, name=f"kvstore-{self.name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _loop(self) -> None:
        while (unit := self._next()) is not None:
            if unit.unchecked:
                unit.check()
                self._hand_on(unit)
            else:
                unit.run()
                if unit.priority is Priority.WRITE:
                    with self._condition:
                        self._num_writing -= 1
            del unit

    def _hand_on(self, unit: _Work) -> None:
        """A checked unit waits for its turn to be written. When the lane was closed since, it ends as cancelled."""
        with self._condition:
            self._num_checking -= 1
            if not self._closed:
                self._checked.append(unit)
                self._condition.notify()
                return
        _drop([unit])

    def _next(self) -> _Work | None:
        with self._condition:
            while True:
                unit = self._pick()
                if unit is not None or self._closed:
                    return unit
                self._num_idle += 1
                self._condition.wait()
                self._num_idle -= 1

    def _pick(self) -> _Work | None:
        reads, writes = self._queues
        if reads:
            return self._take(reads)
        if self._num_writing < self.num_threads:
            queue = self._checked or (writes if writes and not writes[0].unchecked else None)
            if queue:
                self._num_writing += 1
                self._condition.notify()
                return self._take(queue)
        if writes and writes[0].unchecked and self._may_check():
            self._num_checking += 1
            return writes.popleft()
        return None

    def _take(self, queue: deque[_Work]) -> _Work:
        unit = queue.popleft()
        self.queued_bytes[unit.priority] -= unit.num_bytes
        return unit

    def _may_check(self) -> bool:
        return self._num_checking < self.num_checkers and len(self._checked) < self.num_threads

    def close(self, timeout: float) -> None:
        """Drop what waits, let what runs finish. Raises nothing; threads that hang in the kernel are left behind."""
        with self._condition:
            self._closed = True
            waiting = (*self._queues, self._checked)
            dropped = [unit for queue in waiting for unit in queue]
            for queue in waiting:
                queue.clear()
            self.queued_bytes = [0, 0]
            self._condition.notify_all()
        _drop(dropped)
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


def _drop(units: Sequence[_Work]) -> None:
    for unit in units:
        unit.transfer.cancel()
        unit.run()


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
        self._files = _Lane("file I/O", num_threads, max_queued_bytes, CHECKERS)
        self._memory = _Lane("memory copies", num_copy_threads or min(2, os.cpu_count() or 1), max_queued_bytes)

    def submit(self, copies: Sequence[Copy], priority: Priority, deadline_s: float | None = None) -> Transfer:
        """Queue `copies`, all of one kind (memory, read or write). `deadline_s` counts from now.

        Raises InvalidField for places that can't be, TierFull when too much waits, Unavailable when closed. After an
        error nothing was queued.
        """
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        total = sum([copy.num_bytes for copy in copies])
        transfer = Transfer(len(copies), total, deadline)
        if not copies:
            transfer.take([])
            return transfer
        lane, move = self._route(copies)
        lane.admit(total, priority)
        if lane is self._memory:
            self._put_piecewise(copies, transfer, priority)
            return transfer
        try:
            jobs = resolve(copies)
        except InvalidField:
            lane.forget(total, priority)
            raise
        jobs.sort(key=lambda job: (id(job.file), job.offset))
        lane.put([_Unit(transfer, run, move, priority) for run in self._cut(jobs, lane, total)], priority)
        return transfer

    def submit_table(self, table: Table, priority: Priority, deadline_s: float | None = None) -> TableTransfer:
        """Queue equal copies in memory; `tables.usable` says whether that can be done. Raises as `submit` does."""
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        transfer = TableTransfer(table, deadline)
        count, lane = len(table), self._memory
        if count:
            lane.admit(count * table.num_bytes, priority)
            rows = self._limit(lane, count * table.num_bytes) // table.num_bytes or 1
            cuts = [(at, min(at + rows, count)) for at in range(0, count, rows)]
            lane.put([_Rows(transfer, a, b, (b - a) * table.num_bytes, priority) for a, b in cuts], priority)
        return transfer

    def _put_piecewise(self, copies: Sequence[Copy], transfer: Transfer, priority: Priority) -> None:
        """Threads copy the first blocks while the addresses of the last are worked out: small blocks are quick."""
        lane, done = self._memory, 0
        for start in range(0, len(copies), _PIECE):
            piece = copies[start : start + _PIECE]
            try:
                jobs = resolve(piece, start)
            except InvalidField:
                transfer.cancel()
                lane.forget(transfer.total_bytes - done, priority)
                transfer.withdraw(len(copies) - start)
                raise
            done += sum([copy.num_bytes for copy in piece])
            units = self._cut(jobs, lane, transfer.total_bytes)
            lane.put([_Unit(transfer, run, copy_jobs, priority) for run in units], priority)

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
        raise InvalidField(
            "copies", "mix of kinds", "submit memory, read and write copies apart, none from file to file"
        )

    def _limit(self, lane: _Lane, total_bytes: int) -> int:
        return max(_UNIT_BYTES_MIN, min(self.unit_bytes, total_bytes // lane.num_threads))

    def _cut(self, jobs: list[Job], lane: _Lane, total_bytes: int) -> list[list[Job]]:
        """Units in order. Small batches are cut finer, so that every thread gets a share."""
        limit = self._limit(lane, total_bytes)
        units: list[list[Job]] = []
        size = limit
        for job in jobs:
            if size + job.copy.num_bytes > limit:
                units.append([])
                size = 0
            units[-1].append(job)
            size += job.copy.num_bytes
        return units
