"""The engine's KV pool: block-first slots in one allocation, on a device or in host memory.

    slot 0                                        slot 1
    [layer 0: k, v][layer 1: k, v] ... [padding]  [layer 0 ...
    |<-- slice_bytes -->|
    |<-------------- slot_bytes -->|
    |<------------------- stride_bytes (4 KiB) -->|

The allocation is its own, not a part of torch's caching allocator: its address never changes, another process can
open it (CUDA IPC), cuFile can register it once, and torch never gives its neighbourhood to someone else.

Order of work. Copies run on two streams of the arena, one each way, never on the engine's. Each copy starts after
what the engine had enqueued when it was asked for, and the engine's later work waits for it only where told to
(`CopyHandle.before_compute`, `LayerRestore.before_layer`). Order between the two directions is the caller's: pass
the handle of a copy out in `after` when the same slot is filled again. Nothing here synchronises the device.

One owner thread calls these methods.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstore.core.types import SLOT_ALIGN, Slot
from kvstore_gpu.driver import Driver, I64Array
from kvstore_gpu.errors import LayoutError, PinRefused, Unavailable
from kvstore_gpu.kernels import Kernels, best_kernels
from kvstore_gpu.pinned import Pinned, PinnedRegion, StagingRing, register
from kvstore_gpu.restore import LayerRestore, Told, not_told
from kvstore_gpu.streams import Backend, Copies, CudaBackend, Event, HostBuffer, InlineBackend, Stream

PairIn = tuple[HostBuffer, Slot]
"""(source in host memory, target slot)."""
PairOut = tuple[Slot, HostBuffer]
"""(source slot, target in host memory)."""


DEVICE_PAGE = 2 << 20
log = logging.getLogger(__name__)
Slots = Sequence[Slot] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class PoolSpec:
    """Sizes of a pool; a slot is `num_slices` slices (one per layer) of `slice_bytes`, padded to 4 KiB."""

    num_slots: int
    num_slices: int
    slice_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a block."""
        return self.num_slices * self.slice_bytes

    @property
    def stride_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return -(-self.slot_bytes // SLOT_ALIGN) * SLOT_ALIGN


class After(Protocol):
    """Something that copies can be told to wait for."""

    @property
    def event(self) -> Event:
        """They start when it has happened."""


@dataclass(frozen=True)
class Point:
    """A point in some stream, for `after`."""

    event: Event


@dataclass
class CopyHandle:
    """Copies under way. Holds the host buffers until `wait` returns."""

    event: Event
    _compute: Callable[[], Stream]
    _held: list[HostBuffer]
    _finishers: list[Callable[[], None]] = field(default_factory=list)

    def done(self) -> bool:
        """Whether the device is through; copies out of the device still need `wait` to be complete."""
        return self.event.done()

    def wait(self) -> None:
        """Block until every byte is where it belongs."""
        self.event.wait()
        for finish in self._finishers:
            finish()
        self._finishers.clear()
        self._held.clear()

    def before_compute(self, stream: Stream | None = None) -> None:
        """The engine's work from now on starts after these copies; the calling thread goes on."""
        (stream or self._compute()).wait_for(self.event)


class _Move(NamedTuple):
    """One copy that has been checked. Thousands are made per restore, on the way to the first byte."""

    memory: HostBuffer
    address: int
    in_pool: int
    num_bytes: int


class Arena:
    """A pool of slots and the copies in and out of it. Make one with `create` or `open_ipc`; `close` it."""

    def __init__(self, spec: PoolSpec, tensor: torch.Tensor, backend: Backend, release: Callable[[], None]) -> None:
        if tensor.shape != (spec.num_slots, spec.stride_bytes) or tensor.data_ptr() % SLOT_ALIGN:
            raise LayoutError(f"pool tensor {tuple(tensor.shape)} at {tensor.data_ptr():#x} doesn't fit {spec}")
        self.spec, self.tensor, self.backend = spec, tensor, backend
        self.kernels: Kernels = best_kernels(tensor.device)
        self._base: int = tensor.data_ptr()
        self._stride, self._lengths = spec.stride_bytes, (spec.stride_bytes, spec.slot_bytes)
        self._release: Callable[[], None] | None = release
        self._into, self._out = backend.new_stream(), backend.new_stream()
        self._pinned: list[Pinned] = []
        self._ring: StagingRing | None = None
        self._flat: HostBuffer | None = None

    @classmethod
    def create(cls, spec: PoolSpec, device: str | torch.device = "cpu", backend: Backend | None = None) -> Arena:
        """Allocate. Raises: Unavailable without that device; DriverError when memory is short."""
        device = torch.device(device)
        if device.type == "cpu":
            return cls(spec, _host_tensor(spec), backend or InlineBackend(), lambda: None)
        cuda = _cuda_backend(device, backend)
        # Whole 2 MiB pages, so that the driver begins the allocation on one.
        address = cuda.driver.allocate(-(-spec.num_slots * spec.stride_bytes // DEVICE_PAGE) * DEVICE_PAGE)
        return cls(spec, _wrap(address, spec, cuda.device), cuda, lambda: cuda.driver.free(address))

    @classmethod
    def open_ipc(cls, spec: PoolSpec, handle: bytes, device: str | torch.device) -> Arena:
        """Another process's pool, by the bytes of its `export_ipc`."""
        device = torch.device(device)
        cuda = _cuda_backend(device, None)
        address = cuda.driver.open_ipc(handle)
        return cls(spec, _wrap(address, spec, cuda.device), cuda, lambda: cuda.driver.close_ipc(address))

    def export_ipc(self) -> bytes:
        """64 bytes for `open_ipc` in another process. Raises: Unavailable for host memory."""
        if not isinstance(self.backend, CudaBackend):
            raise Unavailable("CUDA IPC", "the pool lies in host memory", "share it as a memfd")
        return self.backend.driver.export_ipc(self.tensor.data_ptr())

    @property
    def num_slots(self) -> int:
        """Slots in the pool."""
        return self.spec.num_slots

    @property
    def slot_bytes(self) -> int:
        """Bytes of a block."""
        return self.spec.slot_bytes

    @property
    def stride_bytes(self) -> int:
        """Bytes from one slot to the next, a multiple of 4 KiB."""
        return self.spec.stride_bytes

    @property
    def num_slices(self) -> int:
        """Slices (layers) of a block."""
        return self.spec.num_slices

    @property
    def slice_bytes(self) -> int:
        """Bytes of a slice."""
        return self.spec.slice_bytes

    def slot(self, index: int) -> Slot:
        """The slot in row `index` of `tensor`, as a byte offset."""
        return Slot(index * self.stride_bytes)

    def host_view(self) -> HostBuffer | None:
        """`[num_slots, stride_bytes]` uint8 where the pool is host memory, else None."""
        return self.tensor.numpy() if self.tensor.device.type == "cpu" else None

    @property
    def flat(self) -> HostBuffer:
        """The pool as `kvstore_client` names places in it: uint8 `[num_slots * stride_bytes]`.

        Host pools: the bytes. Device pools: a stand-in that can't be written and isn't contiguous, so that whoever
        takes it for memory is refused; `hand.DeviceHand` knows it by identity.
        """
        if self._flat is None:
            rows = self.host_view()
            num_bytes = self.num_slots * self.stride_bytes
            self._flat = rows.reshape(-1) if rows is not None else np.broadcast_to(np.zeros(1, np.uint8), (num_bytes,))
        return self._flat

    def pin(self, memory: HostBuffer) -> PinnedRegion | None:
        """Register a host mapping for asynchronous copies; the caller closes the region before the mapping goes.

        None where there is nothing to pin for (host pools), and where the system refuses: that is logged with its
        reason, and copies are staged.
        """
        if not isinstance(self.backend, CudaBackend):
            return None
        try:
            region = register(self.backend.driver, memory)
        except PinRefused as error:
            log.warning("%s; copies go through a staging ring", error)
            return None
        self.use_pinned(region)
        return region

    def use_pinned(self, memory: Pinned) -> None:
        """Host buffers inside `memory` are copied without staging from now on."""
        self._pinned = [*self._pinned, memory]  # another thread may be going through the old list

    def forget_pinned(self, memory: Pinned) -> None:
        """Undo `use_pinned`, before the memory goes."""
        self._pinned = [other for other in self._pinned if other is not memory]

    def reaches(self, memory: HostBuffer) -> bool:
        """Whether the device copies from and to all of this by itself, without staging."""
        return not self._split([_Move(memory, memory.__array_interface__["data"][0], 0, memory.nbytes)])[1]

    def copy_in(self, pairs: Iterable[PairIn], after: Sequence[After] = ()) -> CopyHandle:
        """Host -> slots. Each buffer is `slot_bytes` or `stride_bytes` long and must not change before `wait`.

        Raises: LayoutError for a slot or a length that doesn't fit, or a slot named twice.
        """
        moves = [self._move(source, slot) for source, slot in pairs]
        stream = self._begin(self._into, after)
        direct, staged = self._split(moves)
        if direct:
            self.enqueue(stream, _copies(direct, into_pool=True), into_pool=True)
        for move in staged:
            self._staging().send(stream, move.memory, move.in_pool)
        return CopyHandle(stream.record(), self.backend.compute_stream, [move.memory for move in moves])

    def copy_out(self, pairs: Iterable[PairOut], after: Sequence[After] = ()) -> CopyHandle:
        """Slots -> host. Buffers are complete when `wait` has returned. Raises: as `copy_in`."""
        moves = [self._move(target, slot) for slot, target in pairs]
        stream = self._begin(self._out, after)
        direct, staged = self._split(moves)
        if direct:
            self.enqueue(stream, _copies(direct, into_pool=False), into_pool=False)
        finishers = list[Callable[[], None]]()
        for move in staged:
            finishers += self._staging().fetch(stream, move.in_pool, move.memory)
        return CopyHandle(stream.record(), self.backend.compute_stream, [move.memory for move in moves], finishers)

    def copy_in_slots(
        self, dram: HostBuffer, sources: Slots, targets: Slots, after: Sequence[After] = ()
    ) -> CopyHandle:
        """Slots of one mapping -> slots of this pool, each `stride_bytes` long: the fast way for many.

        `dram` is the whole mapping, `sources` are byte offsets into it. Where it couldn't be pinned, slots are staged
        one by one. Raises: as `copy_in`.
        """
        at_host, at_pool, sizes = self._slot_ends(dram, sources, targets)
        if not self.reaches(dram):
            return self.copy_in(zip(self._rows(dram, sources), _slots(targets), strict=True), after)
        stream = self._begin(self._into, after)
        self.enqueue(stream, Copies(at_pool, at_host, sizes), into_pool=True)
        return CopyHandle(stream.record(), self.backend.compute_stream, [dram])

    def copy_out_slots(
        self, dram: HostBuffer, sources: Slots, targets: Slots, after: Sequence[After] = ()
    ) -> CopyHandle:
        """Slots of this pool -> slots of one mapping; see `copy_in_slots`."""
        at_host, at_pool, sizes = self._slot_ends(dram, targets, sources)
        if not self.reaches(dram):
            return self.copy_out(zip(_slots(sources), self._rows(dram, targets), strict=True), after)
        stream = self._begin(self._out, after)
        self.enqueue(stream, Copies(at_host, at_pool, sizes), into_pool=False)
        return CopyHandle(stream.record(), self.backend.compute_stream, [dram])

    def restore_layers(
        self,
        pairs: Sequence[PairIn],
        expected: npt.NDArray[np.uint64] | None = None,
        layers_per_event: int = 1,
        after: Sequence[After] = (),
        told: Told = not_told,
    ) -> LayerRestore:
        """`copy_in` by groups of layers, an event for each: attention of layer l waits for layer l only.

        `expected` is `[pair, slice]` XXH3-64: the slices are then summed on the device, after their copy and before
        their event; `LayerRestore.finish` names the wrong ones. Sources that aren't pinned are staged, which holds the
        caller up until the last of them is in the ring. `told` hears of each event as soon as it's recorded.
        Raises: LayoutError; as `copy_in`.
        """
        moves = [self._move(source, slot) for source, slot in pairs]
        stream = self._begin(self._into, after)
        direct, staged = self._split(moves)
        copies = _copies(direct, into_pool=True)
        restore = LayerRestore(self.backend, stream, copies, [(move.memory, move.in_pool) for move in staged])
        restore.hold([move.memory for move in direct])
        offsets = np.array([slot for _, slot in pairs], dtype=np.uint64)
        restore.start(self, offsets, expected, layers_per_event, told)
        return restore

    def send_staged(self, stream: Stream, source: HostBuffer, target: int) -> None:
        """Through the staging ring, to an address in the pool."""
        self._staging().send(stream, source, target)

    def enqueue(self, stream: Stream, copies: Copies, *, into_pool: bool) -> None:
        """Join neighbours, cut where a registration of host memory ends, enqueue.

        Raises: LayoutError, before anything moves, when two copies write the same bytes.
        """
        joined = copies.coalesced()
        for pinned in self._pinned:
            joined = joined.cut(pinned.borders, at_sources=into_pool)
        self.backend.copy(stream, joined)

    def checksums(self, slots: Sequence[Slot]) -> npt.NDArray[np.uint64]:
        """`[slot, slice]` XXH3-64 of what the slots hold now; waits for the result."""
        offsets = np.array(slots, dtype=np.uint64)
        sums = self.kernels.checksum(self.tensor, offsets, self.num_slices, self.slice_bytes)
        table: npt.NDArray[np.uint64] = sums.cpu().numpy().view(np.uint64)
        return table

    def poison(self, slots: Sequence[Slot]) -> None:
        """Fill whole slots with 0xA5, in order with the engine's compute."""
        self.kernels.fill(self.tensor, np.array(slots, dtype=np.uint64), self.stride_bytes)

    def close(self) -> None:
        """Wait for the arena's own copies and free. Call it from a thread that may block; no destructor does this."""
        release, self._release = self._release, None
        if release is not None:
            for stream in (self._into, self._out):
                stream.record().wait()
            self.tensor = self.tensor[:0]
            self.backend.enter()  # whichever thread this is
            release()

    def _begin(self, stream: Stream, after: Sequence[After]) -> Stream:
        stream.wait_for(self.backend.compute_stream().record())
        for handle in after:
            stream.wait_for(handle.event)
        return stream

    def _slot_ends(self, dram: HostBuffer, on_host: Slots, in_pool: Slots) -> tuple[I64Array, I64Array, I64Array]:
        """Addresses at both ends, and sizes."""
        first = self._move(dram[: self._stride], Slot(0))
        at_host = _inside(on_host, dram.nbytes, self._stride, SLOT_ALIGN) + first.address
        at_pool = _inside(in_pool, self._stride * self.num_slots, self._stride, self._stride) + self._base
        return at_host, at_pool, np.full(len(at_pool), self._stride, dtype=np.int64)

    def _rows(self, dram: HostBuffer, slots: Slots) -> list[HostBuffer]:
        return [dram[at : at + self._stride] for at in _slots(slots)]

    def _move(self, memory: HostBuffer, slot: Slot) -> _Move:
        index, rest = divmod(slot, self._stride)
        if rest or not 0 <= index < self.spec.num_slots:
            raise LayoutError(f"no slot begins at {slot} in a pool of {self.num_slots} x {self.stride_bytes} bytes")
        num_bytes = memory.nbytes
        if num_bytes not in self._lengths:
            raise LayoutError(f"a host buffer of {num_bytes} bytes for slots of {self.slot_bytes}")
        if memory.dtype != np.uint8 or not memory.flags.c_contiguous:
            raise LayoutError("host buffers are contiguous uint8 arrays")
        return _Move(memory, memory.__array_interface__["data"][0], self._base + slot, num_bytes)

    def _split(self, moves: list[_Move]) -> tuple[list[_Move], list[_Move]]:
        """(those that the device reaches by itself, those that need staging)."""
        if not self.backend.needs_pinned:
            return moves, []
        direct, staged = list[_Move](), list[_Move]()
        for move in moves:
            reached = any(pinned.covers(move.address, move.num_bytes) for pinned in self._pinned)
            (direct if reached else staged).append(move)
        return direct, staged

    def _staging(self) -> StagingRing:
        if self._ring is None:
            self._ring = StagingRing(self.backend)
        return self._ring


def _slots(slots: Slots) -> list[Slot]:
    return [Slot(int(slot)) for slot in slots]


def _inside(slots: Slots, pool_bytes: int, slot_bytes: int, align: int) -> I64Array:
    """Raises: LayoutError when a slot isn't one of its pool."""
    at = np.asarray(slots, dtype=np.int64)
    if len(at) and (int(at.min()) < 0 or int(at.max()) + slot_bytes > pool_bytes or bool((at % align).any())):
        raise LayoutError(f"a slot leaves its pool of {pool_bytes} bytes, or begins at no multiple of {align}")
    return at


def _copies(moves: list[_Move], *, into_pool: bool) -> Copies:
    table = np.array([move[1:] for move in moves], dtype=np.int64).reshape(-1, 3)
    on_host, in_pool, sizes = table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()
    return Copies(in_pool, on_host, sizes) if into_pool else Copies(on_host, in_pool, sizes)


def _host_tensor(spec: PoolSpec) -> torch.Tensor:
    # A private mapping is page-aligned and may have huge pages, into which direct reads run twice as fast.
    num_bytes = spec.num_slots * spec.stride_bytes
    mapping = mmap.mmap(-1, max(num_bytes, SLOT_ALIGN), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    return whole[:num_bytes].view(spec.num_slots, spec.stride_bytes)


@dataclass(frozen=True)
class _Exposed:
    """Device memory that torch takes over as it is (CUDA array interface, version 3)."""

    __cuda_array_interface__: dict[str, Any]


def _wrap(address: int, spec: PoolSpec, device: torch.device) -> torch.Tensor:
    shape = (spec.num_slots, spec.stride_bytes)
    exposed = _Exposed({"shape": shape, "typestr": "|u1", "data": (address, False), "version": 3, "strides": None})
    tensor = torch.as_tensor(exposed, device=device)
    assert tensor.data_ptr() == address, "torch copied the pool instead of taking it over"
    return tensor


def _cuda_backend(device: torch.device, backend: Backend | None) -> CudaBackend:
    if isinstance(backend, CudaBackend):
        return backend
    if not torch.cuda.is_available():
        raise Unavailable("device arena", "torch sees no CUDA device")
    return CudaBackend(device, Driver.load())
