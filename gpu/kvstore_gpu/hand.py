"""The hand of an engine whose pool lies on a device: moves blocks between it and what the client can reach.

Stands where `kvstore.tiers.transfer.TransferEngine` stands for host pools, with the same `submit`: one end of each
copy is `Memory(arena.flat, slot)`, the other a place in the DRAM arena, in a slab file, or in the pool too. The DRAM
arena is pinned beside the work when it is first seen (`pins`).

    DRAM -> pool   copies on the arena's own stream, summed on the device afterwards; or both by groups of layers
    NVMe -> pool   GPUDirect Storage where the probe chose it; else file -> pinned buffers -> pool, two halves in turn
    pool -> DRAM   summed on the device, then copied
    pool -> pool   what another restore has just read; summed on the device afterwards

One thread owns the arena and takes reads before writes. The caller's compute stream is marked when `submit` is
called, and nothing touches a slot before that mark. A result is final: the bytes are there and, where checksums
were given, are right *where they now lie*.

By layers (`submit_by_layers`) the caller hears of each group as soon as its copies are enqueued, and may compute on it
before the results are there. What comes of that is worth nothing until they are, and good.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvstore.core.types import SLOT_ALIGN, Slot
from kvstore.errors import ChecksumMismatch, InvalidField, KVStoreError, TierError, TierFull, Unavailable
from kvstore.tiers.transfer import Copy, CopyResult, File, Memory, Priority, TransferEngine
from kvstore_gpu.arena import Arena, CopyHandle, PairIn, Point
from kvstore_gpu.gds import GdsPath
from kvstore_gpu.pinned import PinnedBuffer
from kvstore_gpu.pins import Pins
from kvstore_gpu.streams import Event, HostBuffer

log = logging.getLogger(__name__)
Obstacle = Callable[[], KVStoreError | None]
Sums = npt.NDArray[np.uint64]
Told = Callable[[int, Callable[[], None]], None]
"""Called from the hand's thread with a number of layers, from the first on, and a function. What its caller enqueues
afterwards starts when those layers of all blocks are there; for a pool in host memory it returns when they are."""
_STOP = 99
"""Behind every priority: what was queued before is still done."""
GROUP_BYTES = 256 << 10
"""Of each block, go together by layers: smaller copies are slow ones."""


@dataclass(order=True)
class _Batch:
    priority: int
    number: int
    copies: Sequence[Copy] = field(compare=False)
    transfer: DeviceTransfer = field(compare=False)
    ready: Point = field(compare=False)
    told: Told | None = field(compare=False, default=None)


class DeviceTransfer:
    """A submitted batch, as `kvstore.tiers.transfer.Transfer` is one: the same four methods."""

    def __init__(self, total_bytes: int, deadline: float | None) -> None:
        self.total_bytes, self.deadline = total_bytes, deadline
        self._future: Future[list[CopyResult]] = Future()
        self._cancelled = False

    def wait(self, timeout: float | None = None) -> list[CopyResult]:
        """Results when all are through. Raises Unavailable after `timeout` seconds; the memory is still in use then."""
        try:
            return self._future.result(timeout)
        except TimeoutError:
            raise Unavailable(f"transfer of {self.total_bytes} bytes isn't through after {timeout} s") from None

    def done(self) -> bool:
        """Whether every copy is through, one way or another; its memory may be used again."""
        return self._future.done()

    def cancel(self) -> None:
        """Drop what hasn't started; those copies end with Unavailable."""
        self._cancelled = True

    def add_done_callback(self, callback: Callable[[DeviceTransfer], None]) -> None:
        """Call `callback(self)` once when done, from the hand's thread; at once when it's done already."""
        self._future.add_done_callback(lambda _: callback(self))

    def obstacle(self) -> KVStoreError | None:
        """Hand only: why the next copy must not start; None when it may."""
        if self._cancelled:
            return Unavailable("transfer was cancelled")
        if self.deadline is not None and time.monotonic() > self.deadline:
            return Unavailable("deadline passed before the copy started")
        return None

    def finish(self, results: list[CopyResult]) -> None:
        """Hand only: hand over the results."""
        self._future.set_result(results)


class DeviceHand:
    """See the module. `use_gds`: what the probe chose. Thread-safe; `close` it before the arena."""

    def __init__(
        self,
        arena: Arena,
        use_gds: bool = False,
        num_buffers: int = 32,
        max_queued_bytes: int = 16 << 30,
        files: TransferEngine | None = None,
    ) -> None:
        if num_buffers < 2:
            raise InvalidField(
                "num_buffers", f"{num_buffers} can't be read into and copied from at once", "use 2 or more"
            )
        self.arena, self.use_gds, self.max_queued_bytes = arena, use_gds, max_queued_bytes
        self.num_gds_fallbacks = 0
        self._files = files or TransferEngine()
        self._own_files = files is None
        self._gds: dict[tuple[int, int], GdsPath] = {}
        self._pinned = PinnedBuffer(_aligned(arena, num_buffers * arena.stride_bytes))
        arena.use_pinned(self._pinned)
        self._pins = Pins(arena)
        self._queue: queue.PriorityQueue[_Batch] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._broken: KVStoreError | None = None
        self._queued_bytes, self._lock, self._closed = 0, threading.Lock(), False
        self._thread = threading.Thread(target=self._serve, name="kvstore-device", daemon=True)
        self._thread.start()

    def submit(self, copies: Sequence[Copy], priority: Priority, deadline_s: float | None = None) -> DeviceTransfer:
        """Queue `copies`, all of one direction. `deadline_s` counts from now.

        Raises: InvalidField for places that can't be, TierFull when too much waits, Unavailable when closed. After an
        error nothing was queued.
        """
        return self._enqueue(copies, priority, deadline_s, None)

    def submit_by_layers(self, copies: Sequence[Copy], told: Told, deadline_s: float | None = None) -> DeviceTransfer:
        """`submit` for reading blocks from host memory, all with checksums, in groups of layers.

        From memory that isn't pinned (yet) they come whole, since staging holds up the hand, and `told` hears nothing.
        Raises as `submit`.
        """
        num_bytes = 8 * self.arena.num_slices
        for copy in copies:
            if _kind(copy, self.arena) != "memory" or len(copy.checksums or b"") != num_bytes:
                raise InvalidField("copies", "aren't all of blocks in host memory with checksums", "use submit")
        return self._enqueue(copies, Priority.READ, deadline_s, told)

    def _enqueue(
        self, copies: Sequence[Copy], priority: Priority, deadline_s: float | None, told: Told | None
    ) -> DeviceTransfer:
        for copy in copies:
            self._check(copy)
        num_bytes = sum(copy.num_bytes for copy in copies)
        transfer = DeviceTransfer(num_bytes, None if deadline_s is None else time.monotonic() + deadline_s)
        ready = Point(self.arena.backend.compute_stream().record())
        with self._lock:
            if self._closed:
                raise Unavailable("device hand is closed")
            if self._queued_bytes and self._queued_bytes + num_bytes > self.max_queued_bytes:
                raise TierFull(f"device: {self._queued_bytes} bytes wait already; retry later")
            self._queued_bytes += num_bytes
            self._queue.put(_Batch(int(priority), next(self._numbers), copies, transfer, ready, told))
        return transfer

    def close(self, timeout: float = 5.0) -> None:
        """Finish what is queued, stop the thread, close the files."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            nothing = DeviceTransfer(0, None)
            ready = Point(self.arena.backend.compute_stream().record())
            self._queue.put(_Batch(_STOP, next(self._numbers), (), nothing, ready))
        self._thread.join(timeout)
        for path in self._gds.values():
            path.close()
        if self._own_files:
            self._files.close()
        self._pins.close()
        self.arena.forget_pinned(self._pinned)

    def _check(self, copy: Copy) -> None:
        ends = [isinstance(place, Memory) and place.array is self.arena.flat for place in (copy.source, copy.target)]
        if not any(ends):
            raise InvalidField("copies", "one end of each lies in the device pool", "use Memory(arena.flat, slot)")
        if (copy.num_bytes, copy.slice_bytes) != (self.arena.slot_bytes, self.arena.slice_bytes):
            sizes = f"{copy.num_bytes} bytes in slices of {copy.slice_bytes}"
            raise InvalidField("copies", f"{sizes} don't fit the pool", f"its blocks are {self.arena.spec}")
        for place in itertools.compress((copy.source, copy.target), ends):
            slot = cast(Memory, place).offset
            if slot % self.arena.stride_bytes or not 0 <= slot < len(self.arena.flat):
                raise InvalidField("copies", f"no slot begins at {slot}", "use a multiple of stride_bytes")

    def _serve(self) -> None:
        # A stream of its own is this thread's current one, so that nothing here queues up behind the engine's compute.
        try:
            self.arena.backend.enter()
            self.arena.backend.new_stream().run(self._loop)
        except Exception as error:  # no device for this thread: whoever asks must be told, not left waiting
            log.exception("the device can't be used from this thread")
            self._broken = TierError(f"device: {error}")
            self._loop()

    def _loop(self) -> None:
        while (batch := self._queue.get()).priority != _STOP:
            results = self._run(batch)
            with self._lock:
                self._queued_bytes -= batch.transfer.total_bytes
            batch.transfer.finish(results)
            del batch

    def _run(self, batch: _Batch) -> list[CopyResult]:
        obstacle = self._broken or batch.transfer.obstacle()
        if obstacle is not None:
            return [CopyResult(obstacle)] * len(batch.copies)
        try:
            return list(self._move(batch))
        except KVStoreError as error:
            return [CopyResult(error)] * len(batch.copies)
        except Exception as error:  # a driver's error must reach whoever waits, as theirs
            return [CopyResult(TierError(f"device: {error}"))] * len(batch.copies)

    def _move(self, batch: _Batch) -> Iterator[CopyResult]:
        """Results in the order of the copies; each run of neighbours of one kind goes together."""
        for kind, group in itertools.groupby(batch.copies, key=lambda copy: _kind(copy, self.arena)):
            part = list(group)
            if kind == "within":
                batch.ready.event.wait()
                yield from self._within(part)
            elif kind == "out":
                yield from self._offload(part, batch.ready)
            elif kind == "memory":
                yield from self._from_memory(part, batch.ready, batch.told)
            else:
                batch.ready.event.wait()
                yield from self._from_files(part, batch.transfer.obstacle)

    def _from_memory(self, copies: list[Copy], ready: Point, told: Told | None) -> list[CopyResult]:
        arrays = {id(array): array for array in (cast(Memory, copy.source).array for copy in copies)}
        for array in arrays.values():
            self._pins.see(array)
        pairs = [(_bytes_of(copy.source, copy.num_bytes), self._slot(copy)) for copy in copies]
        if told is not None and all(map(self.arena.reaches, arrays.values())):
            return self._by_layers(copies, pairs, ready, told)
        self.arena.copy_in(pairs, after=[ready]).wait()
        return self._judge(copies)

    def _by_layers(self, copies: list[Copy], pairs: list[PairIn], ready: Point, told: Told) -> list[CopyResult]:
        compute = self.arena.backend.compute_stream
        group = min(-(-GROUP_BYTES // self.arena.slice_bytes), self.arena.num_slices)
        wanted = np.frombuffer(b"".join(copy.checksums or b"" for copy in copies), dtype="<u8")
        wanted = wanted.astype(np.uint64).reshape(len(copies), self.arena.num_slices)

        def tell(num_layers: int, event: Event) -> None:
            told(num_layers, lambda: compute().wait_for(event))

        wrong: dict[int, list[int]] = {}
        for index, layer in self.arena.restore_layers(pairs, wanted, group, [ready], tell).finish():
            wrong.setdefault(index, []).append(layer)
        return [CopyResult(_mismatch(wrong[i])) if i in wrong else CopyResult(None) for i in range(len(copies))]

    def _within(self, copies: list[Copy]) -> list[CopyResult]:
        rows, stride = self.arena.tensor, self.arena.stride_bytes
        for copy in copies:
            source, target = (cast(Memory, place).offset // stride for place in (copy.source, copy.target))
            rows[target].copy_(rows[source])
        return self._judge(copies)

    def _from_files(self, copies: list[Copy], obstacle: Obstacle) -> list[CopyResult]:
        """By GPUDirect Storage, if so chosen; whatever that fails at, by the host."""
        errors: dict[int, KVStoreError] = {}
        left = self._by_gds(copies) if self.use_gds else list(range(len(copies)))
        for index, error in self._by_host([copies[i] for i in left], obstacle).items():
            errors[left[index]] = error
        judged = self._judge(copies)
        return [CopyResult(errors[i]) if i in errors else result for i, result in enumerate(judged)]

    def _by_gds(self, copies: list[Copy]) -> list[int]:
        """Read all; positions of those that failed."""
        started = list[tuple[list[int], Any]]()
        failed = list[int]()
        for _, group in itertools.groupby(range(len(copies)), key=lambda i: _file_key(copies[i])):
            indices = list(group)
            pieces = [(cast(File, copies[i].source).offset, self._slot(copies[i])) for i in indices]
            try:
                started.append((indices, self._gds_path(copies[indices[0]]).read(pieces)))
            except KVStoreError:
                failed += indices
        for indices, reading in started:
            failed += [indices[failure.index] for failure in reading.wait()]
        self.num_gds_fallbacks += len(failed)
        return sorted(failed)

    def _gds_path(self, copy: Copy) -> GdsPath:
        key = _file_key(copy)
        if key not in self._gds:
            for gone in [other for other, path in self._gds.items() if path.unlinked]:
                self._gds.pop(gone).close()
            self._gds[key] = GdsPath(self.arena, cast(File, copy.source).file.fd)
        return self._gds[key]

    def _by_host(self, copies: list[Copy], obstacle: Obstacle) -> dict[int, KVStoreError]:
        """File -> pinned buffer -> slot; while one half of the buffers is copied in, the other is read into."""
        rows = self._pinned.memory.reshape(-1, self.arena.stride_bytes)[:, : self.arena.slot_bytes]
        half = len(rows) // 2
        copying: list[CopyHandle | None] = [None, None]
        errors: dict[int, KVStoreError] = {}
        for number, start in enumerate(range(0, len(copies), half)):
            if (stop := obstacle()) is not None:
                errors |= dict.fromkeys(range(start, len(copies)), stop)
                break
            side, part = number % 2, copies[start : start + half]
            if (handle := copying[side]) is not None:
                handle.wait()
            buffers = list(rows[side * half :][: len(part)])
            failed = self._read(part, buffers)
            errors |= {start + i: error for i, error in failed.items()}
            pairs = [(b, self._slot(c)) for i, (b, c) in enumerate(zip(buffers, part, strict=True)) if i not in failed]
            copying[side] = self.arena.copy_in(pairs)
        for handle in copying:
            if handle is not None:
                handle.wait()
        return errors

    def _read(self, copies: list[Copy], buffers: list[HostBuffer]) -> dict[int, KVStoreError]:
        wanted = [
            Copy(copy.source, Memory(buffer), copy.num_bytes, copy.slice_bytes)
            for copy, buffer in zip(copies, buffers, strict=True)
        ]
        results = self._files.submit(wanted, Priority.READ).wait()
        return {i: result.error for i, result in enumerate(results) if result.error is not None}

    def _offload(self, copies: list[Copy], ready: Point) -> list[CopyResult]:
        ready.event.wait()
        for copy in copies:
            if isinstance(copy.target, Memory):
                self._pins.see(copy.target.array)
        sums = self.arena.checksums([self._slot(copy) for copy in copies])
        pairs = [(self._slot(copy), _bytes_of(copy.target, copy.num_bytes)) for copy in copies]
        self.arena.copy_out(pairs, after=[ready]).wait()
        return [_result(copy, row) for copy, row in zip(copies, sums, strict=True)]

    def _judge(self, copies: list[Copy]) -> list[CopyResult]:
        sums = self.arena.checksums([self._slot(copy) for copy in copies])
        return [_result(copy, row) for copy, row in zip(copies, sums, strict=True)]

    def _slot(self, copy: Copy) -> Slot:
        return Slot(_pool_end(copy, self.arena).offset)


def _result(copy: Copy, row: Sums) -> CopyResult:
    got = row.astype("<u8").tobytes()
    if copy.checksums is not None and copy.checksums != got:
        want = np.frombuffer(copy.checksums, dtype="<u8")
        bad = np.flatnonzero(want != row).tolist() if len(want) == len(row) else "all"
        return CopyResult(_mismatch(bad))
    return CopyResult(None, got if copy.want_checksums else None)


def _mismatch(slices: list[int] | str) -> ChecksumMismatch:
    return ChecksumMismatch(f"slices {slices} differ from their checksums in the device pool")


def _in_pool(place: Memory | File, arena: Arena) -> bool:
    return isinstance(place, Memory) and place.array is arena.flat


def _pool_end(copy: Copy, arena: Arena) -> Memory:
    """The end in the pool; of two, the one that is written."""
    return cast(Memory, copy.target if _in_pool(copy.target, arena) else copy.source)


def _kind(copy: Copy, arena: Arena) -> str:
    if _in_pool(copy.source, arena):
        return "within" if _in_pool(copy.target, arena) else "out"
    return "memory" if isinstance(copy.source, Memory) else "file"


def _file_key(copy: Copy) -> tuple[int, int]:
    stat = os.fstat(cast(File, copy.source).file.fd)
    return stat.st_dev, stat.st_ino


def _bytes_of(place: Memory | File, num_bytes: int) -> HostBuffer:
    if not isinstance(place, Memory):
        raise InvalidField("copies", "a device pool isn't written to a file directly", "offload to the arena first")
    part = place.array[place.offset : place.offset + num_bytes]
    if len(part) != num_bytes:
        raise InvalidField("copies", f"{num_bytes} bytes at {place.offset} leave the array", "give a place inside")
    return part


def _aligned(arena: Arena, num_bytes: int) -> HostBuffer:
    memory = arena.backend.pinned(num_bytes + SLOT_ALIGN)
    start = -int(memory.ctypes.data) % SLOT_ALIGN
    return memory[start : start + num_bytes]
