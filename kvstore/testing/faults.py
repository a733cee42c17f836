"""Plans of damage for the file layer: what a disk, a kernel or a cosmic ray does, at the call where it would do it.

A plan draws each call's fate from a seeded generator, or takes it from a script (`next_faults`), and counts what it
did. Delays wait for an event that the test sets, never for a clock.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from enum import StrEnum

from kvstore.tiers.files import Buffers, OpenFile


class Fault(StrEnum):
    """One kind of damage."""

    NONE = "none"
    EIO = "eio"
    ENOSPC = "enospc"
    SHORT = "short"
    """Half of the bytes, rounded down to the file's unit; honest about it."""
    FLIP = "flip"
    """One bit of what was read, or of what reaches the disk, is wrong; reported as success."""
    TORN = "torn"
    """Only the first half reaches the disk; reported as success."""
    STALL = "stall"
    """The call waits for `release()`."""


READ_FAULTS = (Fault.EIO, Fault.SHORT, Fault.FLIP)
WRITE_FAULTS = (Fault.EIO, Fault.ENOSPC, Fault.SHORT, Fault.FLIP, Fault.TORN)


class FaultPlan:
    """Implements `Faults` of the file layer. Thread-safe.

    Args: seed: of the generator; reads, writes, syncs, allocations: probability of each fault a call.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        reads: Mapping[Fault, float] | None = None,
        writes: Mapping[Fault, float] | None = None,
        syncs: Mapping[Fault, float] | None = None,
        allocations: Mapping[Fault, float] | None = None,
    ) -> None:
        self._random = random.Random(seed)
        self._rates = {"read": reads or {}, "write": writes or {}, "sync": syncs or {}, "allocate": allocations or {}}
        self._script: dict[str, deque[Fault]] = {kind: deque() for kind in self._rates}
        self._lock = threading.Lock()
        self._gate = threading.Event()
        self.stalled = threading.Semaphore(0)
        """Released once by every call that begins to stall; `acquire(timeout=...)` to meet it."""
        self.counts: Counter[str] = Counter()
        """What was done, by "<call>/<fault>"."""
        self.num_calls: Counter[str] = Counter()
        """Calls of each kind, damaged or not."""
        self.enabled = True

    def next_faults(self, call: str, faults: Iterable[Fault]) -> None:
        """Script the fate of the next calls of kind "read", "write", "sync" or "allocate"."""
        with self._lock:
            self._script[call].extend(faults)

    def release(self) -> None:
        """Let every stalled call go on, now and from now on."""
        self._gate.set()

    @property
    def num_injected(self) -> int:
        """Faults done so far."""
        return sum(self.counts.values())

    def read(self, file: OpenFile, buffers: Buffers, offset: int) -> int:
        """Like preadv, damaged."""
        fault = self._meet("read")
        if fault is Fault.SHORT:
            return os.preadv(file.fd, _half(buffers, file.align), offset) if _half(buffers, file.align) else 0
        count = os.preadv(file.fd, buffers, offset)
        if fault is Fault.FLIP:
            self._flip(buffers)
        return count

    def write(self, file: OpenFile, buffers: Buffers, offset: int) -> int:
        """Like pwritev, damaged."""
        fault = self._meet("write")
        total = sum(len(b) for b in buffers)
        if fault in (Fault.SHORT, Fault.TORN):
            half = _half(buffers, file.align)
            count = os.pwritev(file.fd, half, offset) if half else 0
            return total if fault is Fault.TORN else count
        if fault is Fault.FLIP:
            self._write_flipped(file, buffers, offset)
            return total
        return os.pwritev(file.fd, buffers, offset)

    def sync(self, file: OpenFile) -> None:
        """Like fdatasync, damaged."""
        self._meet("sync")
        os.fdatasync(file.fd)

    def allocate(self, file: OpenFile, offset: int, length: int) -> None:
        """Like posix_fallocate, damaged."""
        self._meet("allocate")
        os.posix_fallocate(file.fd, offset, length)

    def _meet(self, call: str) -> Fault:
        fault = self._draw(call)
        if fault is Fault.STALL:
            self.stalled.release()
            self._gate.wait()
        elif fault in (Fault.EIO, Fault.ENOSPC):
            code = errno.EIO if fault is Fault.EIO else errno.ENOSPC
            raise OSError(code, os.strerror(code))
        return fault

    def _draw(self, call: str) -> Fault:
        with self._lock:
            self.num_calls[call] += 1
            if not self.enabled:
                return Fault.NONE
            fault = self._script[call].popleft() if self._script[call] else self._roll(call)
            if fault is not Fault.NONE:
                self.counts[f"{call}/{fault}"] += 1
            return fault

    def _roll(self, call: str) -> Fault:
        point = self._random.random()
        for fault, probability in self._rates[call].items():
            point -= probability
            if point < 0:
                return fault
        return Fault.NONE

    def _flip(self, buffers: Buffers) -> None:
        with self._lock:
            buffer = self._random.choice([b for b in buffers if len(b)])
            at, bit = self._random.randrange(len(buffer)), self._random.randrange(8)
        buffer[at] ^= 1 << bit

    def _write_flipped(self, file: OpenFile, buffers: Buffers, offset: int) -> None:
        """Write, then change one bit on the disk; the caller's memory stays as it is."""
        os.pwritev(file.fd, buffers, offset)
        total = sum(len(b) for b in buffers)
        with self._lock:
            at, bit = self._random.randrange(total), self._random.randrange(8)
        fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR)
        try:
            byte = os.pread(fd, 1, offset + at)[0]
            os.pwrite(fd, bytes([byte ^ 1 << bit]), offset + at)
            os.fsync(fd)
        finally:
            os.close(fd)


def _half(buffers: Buffers, align: int) -> list[memoryview]:
    left = sum(len(b) for b in buffers) // 2
    left -= left % align
    half = []
    for buffer in buffers:
        if left <= 0:
            break
        half.append(buffer[:left])
        left -= len(buffer)
    return half
