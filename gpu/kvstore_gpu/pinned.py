"""Host memory that a device can reach by itself.

The node's DRAM arena is one large shared mapping. Registering it in one call takes seconds and holds the driver's
lock, so it goes in chunks, several at a time. Where the system forbids pinning (RLIMIT_MEMLOCK, a container's
memory limit), the reason is told in plain words and copies go through a small ring of pinned chunks instead: one
more memcpy, the same results.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from kvstore_gpu.driver import I64Array
from kvstore_gpu.errors import DriverError, PinRefused
from kvstore_gpu.streams import Backend, Copies, Event, HostBuffer, Stream

CHUNK_BYTES = 256 << 20
NUM_THREADS = 4
_NOT_PERMITTED, _OUT_OF_MEMORY, _ALREADY_REGISTERED = 800, 2, 712


class Registrar(Protocol):
    """What registration needs of the driver."""

    def enter(self) -> None:
        """Make the device's context current in this thread."""

    def register_host(self, address: int, num_bytes: int) -> None:
        """Pin. Raises: DriverError."""

    def unregister_host(self, address: int) -> None:
        """Unpin."""


class Pinned(Protocol):
    """Host memory that a copy may use asynchronously."""

    borders: I64Array
    """Sorted addresses at which one registration ends and the next begins; copies are cut there."""

    def covers(self, address: int, num_bytes: int) -> bool:
        """Whether a range lies inside."""


class PinnedBuffer:
    """Memory that came pinned from the backend."""

    def __init__(self, memory: HostBuffer) -> None:
        self.memory = memory
        self.borders: I64Array = np.empty(0, dtype=np.int64)
        self._start = _address(memory)

    def covers(self, address: int, num_bytes: int) -> bool:
        """See `Pinned`."""
        return self._start <= address and address + num_bytes <= self._start + self.memory.nbytes


@dataclass
class PinnedRegion:
    """A registered host range. `close` before the mapping goes; never left to a destructor."""

    registrar: Registrar
    address: int
    num_bytes: int
    chunks: list[int]
    borders: I64Array = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def covers(self, address: int, num_bytes: int) -> bool:
        """Whether a range lies inside."""
        return bool(self.chunks) and self.address <= address and address + num_bytes <= self.address + self.num_bytes

    def close(self) -> None:
        """Unregister every chunk."""
        while self.chunks:
            self.registrar.unregister_host(self.chunks.pop())


def register(
    registrar: Registrar, memory: HostBuffer, chunk_bytes: int = CHUNK_BYTES, num_threads: int = NUM_THREADS
) -> PinnedRegion:
    """Pin a host mapping, chunks in parallel.

    Raises: PinRefused, with the limit that stands in the way; nothing stays registered then.
    """
    address = int(memory.ctypes.data)
    starts = list(range(address, address + memory.nbytes, chunk_bytes))
    region = PinnedRegion(registrar, address, memory.nbytes, [], np.array(starts[1:], dtype=np.int64))
    lock, failures = threading.Lock(), list[DriverError]()

    def pin(start: int) -> None:
        if failures:
            return
        try:
            registrar.enter()
            registrar.register_host(start, min(chunk_bytes, address + memory.nbytes - start))
        except DriverError as error:
            failures.append(error)
            return
        with lock:
            region.chunks.append(start)

    with ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="pin") as pool:
        list(pool.map(pin, starts))
    if failures:
        region.close()
        raise _refusal(failures[0], memory.nbytes)
    return region


def _refusal(error: DriverError, num_bytes: int) -> PinRefused:
    why = f"registering {num_bytes >> 20} MiB failed: {error}"
    if error.code == _ALREADY_REGISTERED:
        return PinRefused("pinned memory", why, "the mapping is registered already; register it once per process")
    limits = memory_limits()
    return PinRefused("pinned memory", f"{why}; {limits.text()}", limits.mend(num_bytes))


@dataclass(frozen=True)
class MemoryLimits:
    """What may stand in the way of pinning; None means no limit."""

    memlock_bytes: int | None
    cgroup_max_bytes: int | None
    cgroup_used_bytes: int | None

    def text(self) -> str:
        """The limits in words."""
        lock = "unlimited" if self.memlock_bytes is None else f"{self.memlock_bytes >> 10} KiB"
        if self.cgroup_max_bytes is None:
            return f"RLIMIT_MEMLOCK is {lock}, the cgroup sets no memory limit"
        used = (self.cgroup_used_bytes or 0) >> 20
        return f"RLIMIT_MEMLOCK is {lock}, the cgroup allows {self.cgroup_max_bytes >> 20} MiB, {used} MiB are in use"

    def mend(self, num_bytes: int) -> str:
        """What would let `num_bytes` be pinned, or an empty string."""
        advice = []
        if self.memlock_bytes is not None and self.memlock_bytes < num_bytes:
            advice.append("raise the memlock limit (ulimit -l unlimited, LimitMEMLOCK=infinity, --ulimit memlock=-1)")
        if self.cgroup_max_bytes is not None:
            left = self.cgroup_max_bytes - (self.cgroup_used_bytes or 0)
            if left < num_bytes:
                advice.append("raise the container's memory limit: pinned memory counts in full")
        return " and ".join(advice) or "use a smaller arena"


def memory_limits(cgroup: Path = Path("/sys/fs/cgroup")) -> MemoryLimits:
    """Read this process's limits."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = None if soft == resource.RLIM_INFINITY else soft
    return MemoryLimits(limit, _number(cgroup / "memory.max"), _number(cgroup / "memory.current"))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


@dataclass
class _Chunk:
    memory: HostBuffer
    event: Event | None = None
    finish: Callable[[], None] | None = None

    def settle(self) -> None:
        """Wait for the copy that uses this chunk, then do what had to follow it."""
        event, finish, self.event, self.finish = self.event, self.finish, None, None
        if event is not None:
            event.wait()
        if finish is not None:
            finish()


class StagingRing:
    """Pinned chunks between pageable memory and the device. One owner thread.

    A chunk is free again when its copy's event has happened and, on the way out, its bytes have been taken.
    """

    def __init__(self, backend: Backend, num_chunks: int = 8, chunk_bytes: int = 4 << 20) -> None:
        self._backend = backend
        self._chunks = [_Chunk(backend.pinned(chunk_bytes)) for _ in range(num_chunks)]
        self._chunk_bytes, self._next = chunk_bytes, 0

    def send(self, stream: Stream, source: HostBuffer, target: int) -> None:
        """Host -> device; `source` may be reused when this returns."""
        for start in range(0, source.nbytes, self._chunk_bytes):
            part = source[start : start + self._chunk_bytes]
            chunk = self._acquire()
            chunk.memory[: part.nbytes] = part
            self._backend.copy(stream, one_copy(target + start, _address(chunk.memory), part.nbytes))
            chunk.event = stream.record()

    def fetch(self, stream: Stream, source: int, target: HostBuffer) -> list[Callable[[], None]]:
        """Device -> host; `target` is complete once every returned function has been called."""
        finishers = list[Callable[[], None]]()
        for start in range(0, target.nbytes, self._chunk_bytes):
            part = target[start : start + self._chunk_bytes]
            chunk = self._acquire()
            self._backend.copy(stream, one_copy(_address(chunk.memory), source + start, part.nbytes))
            chunk.event = stream.record()
            finishers.append(_once(chunk, part))
        return finishers

    def _acquire(self) -> _Chunk:
        chunk = self._chunks[self._next]
        self._next = (self._next + 1) % len(self._chunks)
        chunk.settle()
        return chunk


def _once(chunk: _Chunk, part: HostBuffer) -> Callable[[], None]:
    """Settle the chunk unless it has been settled (and taken by somebody else) since."""
    taken = False

    def take() -> None:
        nonlocal taken
        part[:] = chunk.memory[: part.nbytes]
        taken = True

    def finish() -> None:
        if not taken:
            chunk.settle()

    chunk.finish = take
    return finish


def one_copy(target: int, source: int, num_bytes: int) -> Copies:
    """A batch of one."""
    return Copies(*(np.array([value], dtype=np.int64) for value in (target, source, num_bytes)))


def _address(memory: HostBuffer) -> int:
    return int(memory.ctypes.data)
