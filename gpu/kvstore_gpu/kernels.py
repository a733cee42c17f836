"""Gather, scatter, checksum and fill behind one protocol, in three makes.

    TorchKernels   plain tensor operations and the xxhash package: any device, always there, the reference
    CudaKernels    the `.cu` sources on a device, through CuPy
    HostKernels    the same `.cu` sources, compiled for the host, a thread block at a time (checks and tests)

What only the sources can do (attention, see `decode.py`) goes through their `launch`.

All of them only enqueue work on the caller's current stream; none synchronises. Tables (slot offsets, chunk
offsets) come as host arrays and are copied to the device on that stream.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvstore_gpu import build
from kvstore_gpu.errors import LayoutError, Unavailable
from kvstore_gpu.layout import EnginePool, U64Array

POISON = 0xA5
CHECKSUM_THREADS = 128
MOVE_THREADS = 256
GRID_MAX = 65535
Offsets = npt.NDArray[np.uint64]


class Kernels(Protocol):
    """`slots` is a flat or 2-D uint8 tensor; `slot_offsets` are byte offsets into it (see `Slot`)."""

    name: str

    def gather(self, pool: EnginePool, chunks: U64Array, slots: torch.Tensor, slot_offsets: Offsets) -> None:
        """Engine pool -> slots; `chunks` is `[slot, chunk]` from `EnginePool.chunk_offsets`."""

    def scatter(self, pool: EnginePool, chunks: U64Array, slots: torch.Tensor, slot_offsets: Offsets) -> None:
        """Slots -> engine pool."""

    def checksum(self, slots: torch.Tensor, slot_offsets: Offsets, num_slices: int, slice_bytes: int) -> torch.Tensor:
        """int64 `[slot, slice]` on the slots' device: XXH3-64, seed 0, of each slice (bits as unsigned)."""

    def fill(self, slots: torch.Tensor, slot_offsets: Offsets, num_bytes: int, value: int = POISON) -> None:
        """Set the first `num_bytes` of each slot."""


class TorchKernels:
    """Reference, on any device; slow on one with a driver queue, since it goes chunk by chunk."""

    name = "torch"

    def gather(self, pool: EnginePool, chunks: U64Array, slots: torch.Tensor, slot_offsets: Offsets) -> None:
        """See `Kernels.gather`."""
        self._move(pool, chunks, slots, slot_offsets, into_slot=True)

    def scatter(self, pool: EnginePool, chunks: U64Array, slots: torch.Tensor, slot_offsets: Offsets) -> None:
        """See `Kernels.scatter`."""
        self._move(pool, chunks, slots, slot_offsets, into_slot=False)

    def checksum(self, slots: torch.Tensor, slot_offsets: Offsets, num_slices: int, slice_bytes: int) -> torch.Tensor:
        """See `Kernels.checksum`; reads the bytes on the host."""
        flat = slots.view(-1)
        sums = np.empty((len(slot_offsets), num_slices), dtype=np.uint64)
        for row, offset in enumerate(slot_offsets.tolist()):
            host = flat[offset : offset + num_slices * slice_bytes].cpu().numpy()
            for i in range(num_slices):
                sums[row, i] = xxhash.xxh3_64_intdigest(host[i * slice_bytes : (i + 1) * slice_bytes])
        return torch.from_numpy(sums.view(np.int64)).to(slots.device)

    def fill(self, slots: torch.Tensor, slot_offsets: Offsets, num_bytes: int, value: int = POISON) -> None:
        """See `Kernels.fill`."""
        flat = slots.view(-1)
        for offset in slot_offsets.tolist():
            flat[offset : offset + num_bytes].fill_(value)

    @staticmethod
    def _move(
        pool: EnginePool, chunks: U64Array, slots: torch.Tensor, slot_offsets: Offsets, *, into_slot: bool
    ) -> None:
        check_move(pool, chunks, slots, slot_offsets)
        shape = pool.shape
        axes = (shape.num_layers, shape.num_kv, pool.num_chunks, pool.chunk_tokens, shape.num_heads, shape.row_bytes)
        for row, offset in enumerate(slot_offsets.tolist()):
            slot = slots.view(-1)[offset : offset + shape.slot_bytes].view(axes)
            for chunk, at in enumerate(chunks[row].tolist()):
                for layer in range(shape.num_layers):
                    ours, theirs = slot[layer, :, chunk], pool.window(layer, at)
                    ours.copy_(theirs) if into_slot else theirs.copy_(ours)


@dataclass
class Launch:
    """One kernel launch: name, grid, block and arguments; `held` are tensors that must outlive it."""

    name: str
    grid: int
    block: int
    args: tuple[Any, ...]
    held: tuple[torch.Tensor, ...]


class SourceKernels(ABC):
    """What CUDA and host kernels share: argument lists in the order of the `.cu` files."""

    name = ""

    def gather(self, pool: EnginePool, chunks: U64Array, slots: torch.Tensor, slot_offsets: Offsets) -> None:
        """See `Kernels.gather`."""
        self.launch(self._move("kv_gather", pool, chunks, slots, slot_offsets))

    def scatter(self, pool: EnginePool, chunks: U64Array, slots: torch.Tensor, slot_offsets: Offsets) -> None:
        """See `Kernels.scatter`."""
        self.launch(self._move("kv_scatter", pool, chunks, slots, slot_offsets))

    def checksum(self, slots: torch.Tensor, slot_offsets: Offsets, num_slices: int, slice_bytes: int) -> torch.Tensor:
        """See `Kernels.checksum`."""
        out = torch.empty((len(slot_offsets), num_slices), dtype=torch.int64, device=slots.device)
        check_slots(slots, slot_offsets, num_slices * slice_bytes)
        offsets = self._table(slot_offsets, slots.device)
        args = (address(slots), address(offsets), u32(len(slot_offsets)), u32(num_slices))
        tail = (np.uint64(slice_bytes), address(out))
        self.launch(Launch("kv_checksum", out.numel(), CHECKSUM_THREADS, (*args, *tail), (offsets,)))
        return out

    def fill(self, slots: torch.Tensor, slot_offsets: Offsets, num_bytes: int, value: int = POISON) -> None:
        """See `Kernels.fill`."""
        check_slots(slots, slot_offsets, num_bytes)
        offsets = self._table(slot_offsets, slots.device)
        args = (address(slots), address(offsets), u32(len(slot_offsets)), np.uint64(num_bytes), u32(value))
        grid = len(slot_offsets) * -(-num_bytes // 16384)
        self.launch(Launch("kv_fill", grid, MOVE_THREADS, args, (offsets,)))

    def _move(
        self, name: str, pool: EnginePool, chunks: U64Array, slots: torch.Tensor, slot_offsets: Offsets
    ) -> Launch:
        check_move(pool, chunks, slots, slot_offsets)
        tables = [self._table(t, slots.device) for t in (pool.layer_bases(), slot_offsets, chunks)]
        counts = (len(slot_offsets), pool.shape.num_layers, pool.shape.num_kv, pool.num_chunks, *pool.merged())
        strides = (pool.kv_stride, pool.token_stride, pool.head_stride)
        pointers = (address(tables[0]), address(slots), address(tables[1]), address(tables[2]))
        args = (*pointers, *map(u32, counts), *map(np.uint64, strides))
        planes = counts[0] * counts[1] * counts[2] * counts[3]
        return Launch(name, planes, MOVE_THREADS, args, tuple(tables))

    def _table(self, values: npt.NDArray[np.uint64], device: torch.device) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(values).view(np.int64))
        if device.type == "cpu":
            return host
        # From pageable memory the copy would wait for the stream. Torch keeps the pinned block until it is through.
        return host.pin_memory().to(device, non_blocking=True)

    @abstractmethod
    def launch(self, launch: Launch) -> None:
        """Run it, or enqueue it on the current stream."""


class CudaKernels(SourceKernels):
    """The sources on a CUDA device. Raises: Unavailable without CuPy or a device."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise Unavailable("CUDA kernels", "torch sees no CUDA device")
        try:
            self._cupy = importlib.import_module("cupy")
        except ImportError as error:
            raise Unavailable("CUDA kernels", f"cupy is missing: {error}", "pip install cupy-cuda13x") from error
        major, minor = torch.cuda.get_device_capability(device)
        self._device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        with self._cupy.cuda.Device(self._index):
            self._module = self._cupy.RawModule(path=str(build.cubin(f"sm_{major}{minor}")))
        self._functions: dict[str, Any] = {}

    def launch(self, launch: Launch) -> None:
        if not launch.grid:
            return
        function = self._functions.get(launch.name)
        if function is None:
            function = self._functions[launch.name] = self._module.get_function(launch.name)
        stream = torch.cuda.current_stream(self._device)
        for tensor in launch.held:
            tensor.record_stream(stream)
        external = self._cupy.cuda.ExternalStream(stream.cuda_stream, self._index)
        with self._cupy.cuda.Device(self._index):
            function((min(launch.grid, GRID_MAX),), (launch.block,), launch.args, stream=external)


class HostKernels(SourceKernels):
    """The sources on the host: the device's arithmetic and addressing, none of its speed. Thread-safe."""

    name = "host"
    _busy = threading.Lock()
    """The library has one block index for the whole process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(build.host_library()))
        self._library.kv_host_offences.restype = ctypes.c_uint64

    def backwards(self, on: bool) -> None:
        """Run the threads of each phase in the opposite order: the results must not depend on it."""
        self._library.kv_host_backwards(int(on))

    def offences(self) -> int:
        """16-byte accesses since the last call that a device would have refused."""
        return int(self._library.kv_host_offences())

    def launch(self, launch: Launch) -> None:
        grid = min(launch.grid, 64)
        args = [as_ctypes(a) for a in launch.args]
        with self._busy:
            for index in range(grid):
                self._library.kv_host_block(grid, launch.block, index)
                self._library[launch.name](*args)


def as_ctypes(value: np.generic) -> Any:
    """An argument as a host function takes it."""
    if isinstance(value, np.float32):
        return ctypes.c_float(float(value))
    return (ctypes.c_uint32 if isinstance(value, np.uint32) else ctypes.c_uint64)(int(value))


def best_kernels(device: torch.device) -> Kernels:
    """CUDA kernels where they can be had, else the torch reference."""
    if device.type != "cuda":
        return TorchKernels()
    try:
        return CudaKernels(device)
    except Unavailable:
        return TorchKernels()


def check_slots(slots: torch.Tensor, slot_offsets: Offsets, num_bytes: int) -> None:
    """Raises: LayoutError when a slot would leave the tensor. A kernel can't say so."""
    if slots.dtype != torch.uint8 or not slots.is_contiguous():
        raise LayoutError("slots must be a contiguous uint8 tensor")
    if len(slot_offsets) and int(slot_offsets.max()) + num_bytes > slots.numel():
        raise LayoutError(f"slot at {int(slot_offsets.max())} leaves the pool of {slots.numel()} bytes")


def check_move(pool: EnginePool, chunks: U64Array, slots: torch.Tensor, slot_offsets: Offsets) -> None:
    """Raises: LayoutError when tables and pools don't fit together."""
    if chunks.shape != (len(slot_offsets), pool.num_chunks):
        raise LayoutError(f"chunk table {chunks.shape} for {len(slot_offsets)} slots of {pool.num_chunks} chunks")
    check_slots(slots, slot_offsets, pool.shape.slot_bytes)


def address(tensor: torch.Tensor) -> np.uint64:
    """A pointer argument."""
    return np.uint64(tensor.data_ptr())


def u32(value: int) -> np.uint32:
    """A count argument."""
    return np.uint32(value)
