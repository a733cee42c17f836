"""The dozen calls of libcuda that PyTorch doesn't offer, by ctypes.

Why the driver and not the runtime: `libcuda.so.1` comes with the driver and is there wherever a device is, whatever
wheels are installed, and its calls share PyTorch's primary context. ctypes releases the GIL for each call, so a
slow registration or free never stops the interpreter. Calls need a current context; `bind` remembers the caller's,
`enter` makes it current in another thread.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_gpu.errors import DriverError, Unavailable

I64Array = npt.NDArray[np.int64]
IPC_HANDLE_BYTES = 64
_HOST_REGISTER_PORTABLE = 1
_IPC_LAZY_PEER = 1
_SOURCE_ORDER_STREAM = 1
_PREFER_OVERLAP = 1
BATCH_MAX = 4096
"""Copies handed to the driver in one batched call."""


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * IPC_HANDLE_BYTES)]


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: source order, two location hints (type, id) that plain memory doesn't need, flags."""

    _fields_ = [
        ("source_order", ctypes.c_uint),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


class Driver:
    """Typed calls; each raises DriverError when the driver doesn't answer 0. Addresses are ints."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._context = ctypes.c_void_p()
        wanted = os.environ.get("KVSTORE_GPU_BATCHED_COPIES", "1") != "0"
        self._batch = getattr(library, "cuMemcpyBatchAsync_v2", None) if wanted else None

    @classmethod
    def load(cls, name: str = "libcuda.so.1") -> Driver:
        """Raises: Unavailable where there is no driver."""
        try:
            return cls(ctypes.CDLL(name))
        except OSError as error:
            raise Unavailable("CUDA driver", f"{name} can't be loaded: {error}", "install the NVIDIA driver") from error

    @property
    def version(self) -> int:
        """Newest CUDA that the driver serves, such as 13000."""
        value = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(value))
        return value.value

    @property
    def can_batch(self) -> bool:
        """Whether many copies go in one call (CUDA 13 drivers and newer)."""
        return self._batch is not None

    def bind(self) -> None:
        """Remember the calling thread's context for `enter`."""
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))

    def enter(self) -> None:
        """Make the bound context current in this thread."""
        self._call("cuCtxSetCurrent", self._context)

    def allocate(self, num_bytes: int) -> int:
        """Device memory of its own, aligned to 256 bytes at least; in practice to 2 MiB for large pools."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value

    def free(self, address: int) -> None:
        """Give back what `allocate` gave. Waits for the device, as the driver does: not for hot paths."""
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def register_host(self, address: int, num_bytes: int) -> None:
        """Pin a host range for every context."""
        flags = ctypes.c_uint(_HOST_REGISTER_PORTABLE)
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), flags)

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`."""
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def export_ipc(self, address: int) -> bytes:
        """64 bytes by which another process on this machine opens the allocation."""
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open_ipc(self, handle: bytes) -> int:
        """Address of another process's allocation in this one."""
        address = ctypes.c_uint64()
        value = _IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), value, ctypes.c_uint(_IPC_LAZY_PEER))
        return address.value

    def close_ipc(self, address: int) -> None:
        """Undo `open_ipc`."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def copy(self, targets: I64Array, sources: I64Array, sizes: I64Array, stream: int) -> None:
        """Enqueue copies between any two address spaces; no order among them. One call where the driver has it."""
        for start in range(0, len(sizes), BATCH_MAX):
            part = slice(start, start + BATCH_MAX)
            if self._batch is not None and len(sizes) > 1 and stream:
                self._copy_batch(targets[part], sources[part], sizes[part], stream)
            else:
                self._copy_each(targets[part].tolist(), sources[part].tolist(), sizes[part].tolist(), stream)

    def _copy_each(self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        u64 = ctypes.c_uint64
        for target, source, size in zip(targets, sources, sizes, strict=True):
            call = (u64(target), u64(source), ctypes.c_size_t(size), ctypes.c_void_p(stream))
            self._call("cuMemcpyAsync", *call)

    def _copy_batch(self, targets: I64Array, sources: I64Array, sizes: I64Array, stream: int) -> None:
        arrays = [np.ascontiguousarray(a, dtype=np.int64) for a in (targets, sources, sizes)]
        attributes = _CopyAttributes(_SOURCE_ORDER_STREAM, (0, 0), (0, 0), _PREFER_OVERLAP)
        first = ctypes.c_size_t(0)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
        count, one = ctypes.c_size_t(len(sizes)), ctypes.c_size_t(1)
        tail = (ctypes.byref(attributes), ctypes.byref(first), one, ctypes.c_void_p(stream))
        self._call("cuMemcpyBatchAsync_v2", *pointers, count, *tail)

    def _call(self, name: str, *args: Any) -> None:
        code = int(getattr(self._library, name)(*args))
        if code:
            raise DriverError(name, code, self._text(code))

    def _text(self, code: int) -> str:
        text = ctypes.c_char_p()
        found = self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text)) == 0
        return text.value.decode() if found and text.value else "unknown error"
