"""GPUDirect Storage, through kvikio: slab file <-> slot without the CPU's memory in between.

What kvikio leaves to its user, and what we do about it:

- It starts with one thread and 4 MiB tasks: `Settings` are applied before the first file is opened.
- In AUTO mode it may fall back to POSIX reads per file without saying so: `probe` looks at whether the bytes went
  through this process's read calls (probe.py).
- A future keeps neither buffer nor file: a `_GdsBatch` holds both until every `get` has returned, and compares byte
  counts.
- cuFile 1.17 and newer can hang while opening its driver on a machine without one: without libcuda, compatibility mode
  is set before anything opens it.
- It knows nothing of streams: the producer's event is waited for first.
- A pool is registered once, when its first slab is opened, and deregistered when the last is closed.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvstore_gpu.arena import Arena
from kvstore_gpu.driver import Driver
from kvstore_gpu.errors import LayoutError, Unavailable
from kvstore_gpu.nvme import Batch, Failure, Piece, check_pieces

MEND = "pip install --no-deps kvikio-cu13 libkvikio-cu13 rapids-logger nvidia-cufile==1.15.1.6"


@dataclass(frozen=True)
class Settings:
    """kvikio's settings. Tasks of 1 MiB spread one slot over several threads."""

    num_threads: int = 16
    task_bytes: int = 1 << 20
    threshold_bytes: int = 16 << 10
    bounce_bytes: int = 16 << 20

    def apply(self, kvikio: Any) -> None:
        """Set them for this process; kvikio has one pool of threads."""
        kvikio.defaults.set(
            {
                "num_threads": self.num_threads,
                "task_size": self.task_bytes,
                "gds_threshold": self.threshold_bytes,
                "bounce_buffer_size": self.bounce_bytes,
                "auto_direct_io_read": True,
                "auto_direct_io_write": True,
            }
        )


def load_kvikio(settings: Settings | None = None) -> Any:
    """Import kvikio and set it up. Raises: Unavailable, with what is missing."""
    driver = _has_driver()
    try:
        kvikio = importlib.import_module("kvikio")
        importlib.import_module("kvikio.defaults")
        importlib.import_module("kvikio.cufile_driver")
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise Unavailable("GPUDirect Storage", f"kvikio doesn't load: {reason}", MEND) from error
    if not driver:
        kvikio.defaults.set("compat_mode", kvikio.CompatMode.ON)
    (settings or Settings()).apply(kvikio)
    return kvikio


def _has_driver() -> bool:
    try:
        Driver.load()
    except Unavailable:
        return False
    return True


class GdsPath:
    """One slab, opened once. Works on host pools too, by kvikio's POSIX path. Raises: Unavailable at opening."""

    name = "gds"

    def __init__(self, arena: Arena, file: Path | int, settings: Settings | None = None) -> None:
        self.arena = arena
        self._kvikio = load_kvikio(settings)
        # A passed descriptor is opened again through procfs: kvikio wants a path, once buffered and once direct.
        path = f"/proc/self/fd/{file}" if isinstance(file, int) else str(file)
        try:
            self._file = self._kvikio.CuFile(path, "r+")
        except RuntimeError as error:
            raise Unavailable("GPUDirect Storage", f"{path} can't be opened: {error}") from error
        self._on_device = arena.tensor.device.type == "cuda"
        if self._on_device:
            _hold(self._kvikio, arena)

    def read(self, pieces: Sequence[Piece]) -> Batch:
        """See `NvmePath`."""
        return self._start(self._file.pread, pieces)

    def write(self, pieces: Sequence[Piece]) -> Batch:
        """See `NvmePath`."""
        return self._start(self._file.pwrite, pieces)

    def close(self) -> None:
        """See `NvmePath`."""
        if not self._file.closed:
            self._file.close()
            if self._on_device:
                _let_go(self._kvikio, self.arena)

    @property
    def unlinked(self) -> bool:
        """Whether the file has no name any more, so that only this path keeps its space."""
        return os.fstat(self._file.fileno()).st_nlink == 0

    def _start(self, call: Any, pieces: Sequence[Piece]) -> Batch:
        check_pieces(pieces, self.arena)
        if self.arena.tensor.data_ptr() % 4096:
            raise LayoutError("the pool doesn't begin on 4 KiB")
        self.arena.backend.compute_stream().record().wait()
        rows = [self.arena.tensor[slot // self.arena.stride_bytes] for _, slot in pieces]
        buffers = rows if self._on_device else [row.numpy() for row in rows]
        started = list[Any]()
        for (offset, _), buffer in zip(pieces, buffers, strict=True):
            started.append(_attempt(call, buffer, self.arena.stride_bytes, offset))
        return _GdsBatch(self, rows, started, self.arena.stride_bytes)


_users: dict[int, int] = {}
_users_lock = threading.Lock()


def _hold(kvikio: Any, arena: Arena) -> None:
    """A pool is registered with cuFile once, however many slabs are open; cuFile refuses a second time."""
    with _users_lock:
        address = arena.tensor.data_ptr()
        if address not in _users:
            kvikio.memory_register(arena.tensor)
        _users[address] = _users.get(address, 0) + 1


def _let_go(kvikio: Any, arena: Arena) -> None:
    with _users_lock:
        address = arena.tensor.data_ptr()
        _users[address] -= 1
        if not _users[address]:
            del _users[address]
            kvikio.memory_deregister(arena.tensor)


def _attempt(call: Any, buffer: Any, num_bytes: int, offset: int) -> Any:
    """A future, or the error that came instead: the pieces before this one are under way and must be waited for."""
    try:
        return call(buffer, num_bytes, offset)
    except (RuntimeError, OSError, ValueError) as error:
        return error


@dataclass
class _GdsBatch:
    path: GdsPath
    rows: list[torch.Tensor]
    started: list[Any]
    num_bytes: int

    def wait(self) -> list[Failure]:
        """See `Batch`."""
        failures = [Failure(i, why) for i, item in enumerate(self.started) if (why := self._settle(item))]
        self.rows.clear()
        self.started.clear()
        return failures

    def _settle(self, item: Any) -> str:
        if isinstance(item, Exception):
            return str(item)
        try:
            moved = int(item.get())
        except (RuntimeError, OSError) as error:
            return str(error)
        return "" if moved == self.num_bytes else f"{moved} of {self.num_bytes} bytes moved"
