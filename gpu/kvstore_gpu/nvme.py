"""NVMe <-> pool, and what every path between them promises.

A *piece* is a slot of a slab file and a slot of the pool, one stride long. A path starts pieces and hands back a
`Batch`; `Batch.wait` says which pieces failed and why: the caller shortens the prefix to the last good block. Two
paths exist, and a third that holds both:

    HostPath       file -> pinned buffer -> copy stream -> slot; file -> slot where the pool is host memory
    GdsPath        file -> slot by kvikio and cuFile (gds.py)
    FallbackPath   the first path, and the second for whatever the first failed at

A path never reads into a slot that the engine's enqueued work still uses: it waits for that work's event (not for
the device).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from kvstore.core.types import SLOT_ALIGN, Slot
from kvstore.tiers.files import OpenFile, probe_direct
from kvstore_gpu.arena import Arena, CopyHandle
from kvstore_gpu.errors import LayoutError
from kvstore_gpu.pinned import PinnedBuffer
from kvstore_gpu.streams import HostBuffer

Piece = tuple[int, Slot]
"""(byte offset in the file, slot of the pool)."""


@dataclass(frozen=True)
class Failure:
    """A piece that did not arrive, by its position in the request."""

    index: int
    why: str


class Batch(Protocol):
    """Pieces under way."""

    def wait(self) -> list[Failure]:
        """Block until all pieces are through; the failed ones. Buffers are held until then."""


class NvmePath(Protocol):
    """A way between slab file and pool. One owner thread."""

    name: str

    def read(self, pieces: Sequence[Piece]) -> Batch:
        """File -> slots."""

    def write(self, pieces: Sequence[Piece]) -> Batch:
        """Slots -> file; nothing is synced."""

    def close(self) -> None:
        """Close the file. Batches must be waited for first."""


def check_pieces(pieces: Sequence[Piece], arena: Arena) -> None:
    """Raises: LayoutError for a file offset that isn't a multiple of 4 KiB or a slot that isn't one of the pool."""
    for offset, slot in pieces:
        if offset < 0 or offset % SLOT_ALIGN:
            raise LayoutError(f"file offset {offset} is no multiple of {SLOT_ALIGN}")
        if slot % arena.stride_bytes or not 0 <= slot < arena.num_slots * arena.stride_bytes:
            raise LayoutError(f"no slot begins at {slot}")


def open_file(file: Path | int) -> OpenFile:
    """A slab by path, or by a descriptor that another process passed; direct where the file system can."""
    if isinstance(file, int):
        return OpenFile.adopt(os.dup(file), f"fd {file}")
    return OpenFile.open(file, os.O_RDWR, direct=probe_direct(file.parent))


class HostPath:
    """Threads read and write with the kernel's own calls; pinned buffers stand between file and device."""

    name = "host"

    def __init__(self, arena: Arena, file: Path | int, num_threads: int = 8) -> None:
        self.arena = arena
        self.batches = set[_HostBatch]()
        self._file = open_file(file)
        self._threads = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="nvme")
        self._pinned = [PinnedBuffer(_aligned(arena)) for _ in range(0 if has_rows(arena) else 2 * num_threads)]
        self._bounce = [pinned.memory for pinned in self._pinned]
        for pinned in self._pinned:
            arena.use_pinned(pinned)

    def read(self, pieces: Sequence[Piece]) -> Batch:
        """See `NvmePath`."""
        check_pieces(pieces, self.arena)
        self.arena.backend.compute_stream().record().wait()
        return _HostBatch(self, pieces, into_pool=True)

    def write(self, pieces: Sequence[Piece]) -> Batch:
        """See `NvmePath`."""
        check_pieces(pieces, self.arena)
        self.arena.backend.compute_stream().record().wait()
        return _HostBatch(self, pieces, into_pool=False)

    def close(self) -> None:
        """See `NvmePath`."""
        self._threads.shutdown()
        self._file.close()
        while self._pinned:
            self.arena.forget_pinned(self._pinned.pop())

    def submit(self, buffer: HostBuffer, offset: int, *, reading: bool) -> Future[str]:
        """Start one transfer; the result is empty, or what went wrong."""
        return self._threads.submit(_move_all, self._file, buffer, offset, reading)

    def borrow(self) -> HostBuffer | None:
        """A bounce buffer, or None when all are in use."""
        return self._bounce.pop() if self._bounce else None

    def step_another(self, batch: _HostBatch) -> bool:
        """Get a bounce buffer free that another batch holds; False when none does."""
        return any(other.step() for other in list(self.batches) if other is not batch)

    def give_back(self, buffer: HostBuffer) -> None:
        """Return a bounce buffer."""
        self._bounce.append(buffer)


class _HostBatch:
    """Carries pieces through in `wait`, as many at a time as there are buffers.

    Reading: file -> buffer (thread), buffer -> slot (copy stream), buffer free. Writing: the same backwards. Where
    the pool is host memory the slot itself is the buffer.
    """

    def __init__(self, path: HostPath, pieces: Sequence[Piece], *, into_pool: bool) -> None:
        self._path, self._into_pool = path, into_pool
        self._todo = deque(enumerate(pieces))
        self._moving: deque[tuple[int, Slot, HostBuffer, Future[str]]] = deque()
        self._copying: deque[tuple[HostBuffer, CopyHandle]] = deque()
        self._failures: list[Failure] = []
        self._rows = path.arena.host_view()
        path.batches.add(self)
        self._start_some()

    def wait(self) -> list[Failure]:
        """See `Batch`."""
        while self._todo or self._moving or self._copying:
            self._start_some()
            if not self.step() and not self._path.step_another(self):
                raise AssertionError("pieces are left, but no batch holds a buffer")
        self._path.batches.discard(self)
        return sorted(self._failures, key=lambda failure: failure.index)

    def step(self) -> bool:
        """Wait for the oldest transfer or copy; False when none is under way."""
        if self._moving:
            self._finish_one()
        elif self._copying:
            self._release_one()
        else:
            return False
        return True

    def _start_some(self) -> None:
        while self._todo:
            index, (offset, slot) = self._todo[0]
            buffer = self._buffer(slot)
            if buffer is None:
                return
            self._todo.popleft()
            if not self._into_pool and self._rows is None:
                self._path.arena.copy_out([(slot, buffer)]).wait()
            future = self._path.submit(buffer, offset, reading=self._into_pool)
            self._moving.append((index, slot, buffer, future))

    def _buffer(self, slot: Slot) -> HostBuffer | None:
        if self._rows is None:
            return self._path.borrow()
        row: HostBuffer = self._rows[slot // self._path.arena.stride_bytes]
        return row

    def _finish_one(self) -> None:
        index, slot, buffer, future = self._moving.popleft()
        why = future.result()
        if why:
            self._failures.append(Failure(index, why))
        if self._rows is not None:
            return
        if why or not self._into_pool:
            self._path.give_back(buffer)
        else:
            self._copying.append((buffer, self._path.arena.copy_in([(buffer, slot)])))

    def _release_one(self) -> None:
        buffer, handle = self._copying.popleft()
        handle.wait()
        self._path.give_back(buffer)


def _move_all(file: OpenFile, buffer: HostBuffer, offset: int, reading: bool) -> str:
    """All bytes, over as many calls as it takes. A file that ends early or refuses is told, not raised."""
    view, done = memoryview(buffer.data), 0
    try:
        while done < len(view):
            part = [view[done:]]
            moved = file.read(part, offset + done) if reading else file.write(part, offset + done)
            if moved <= 0:
                return f"{file.name}: only {done} of {len(view)} bytes at {offset}"
            done += moved
    except OSError as error:
        return f"{file.name}: {error.strerror} after {done} bytes at {offset}"
    return ""


def has_rows(arena: Arena) -> bool:
    """Whether the pool is host memory, so that its rows can be read into."""
    return arena.host_view() is not None


def _aligned(arena: Arena) -> HostBuffer:
    memory = arena.backend.pinned(arena.stride_bytes + SLOT_ALIGN)
    start = -int(memory.ctypes.data) % SLOT_ALIGN
    return memory[start : start + arena.stride_bytes]


@dataclass
class _FallbackBatch:
    first: Batch
    pieces: Sequence[Piece]
    again: Callable[[Sequence[Piece]], Batch]
    note: Callable[[list[Failure]], None]

    def wait(self) -> list[Failure]:
        """See `Batch`."""
        failed = self.first.wait()
        if not failed:
            return []
        self.note(failed)
        still = self.again([self.pieces[failure.index] for failure in failed]).wait()
        return [Failure(failed[failure.index].index, failure.why) for failure in still]


class FallbackPath:
    """The first path; its failures go by the second. `num_fallbacks` counts the pieces that had to."""

    def __init__(self, first: NvmePath, second: NvmePath) -> None:
        self.first, self.second = first, second
        self.name = f"{first.name}, else {second.name}"
        self.num_fallbacks = 0
        self.last_reason = ""

    def read(self, pieces: Sequence[Piece]) -> Batch:
        """See `NvmePath`."""
        return _FallbackBatch(self.first.read(pieces), pieces, self.second.read, self._note)

    def write(self, pieces: Sequence[Piece]) -> Batch:
        """See `NvmePath`."""
        return _FallbackBatch(self.first.write(pieces), pieces, self.second.write, self._note)

    def close(self) -> None:
        """See `NvmePath`."""
        self.first.close()
        self.second.close()

    def _note(self, failed: list[Failure]) -> None:
        self.num_fallbacks += len(failed)
        self.last_reason = failed[-1].why


def random_block(num_bytes: int, seed: int) -> HostBuffer:
    """Reproducible bytes that no disk compresses away."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
