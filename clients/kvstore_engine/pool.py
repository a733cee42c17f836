"""The engine's KV pool: the bytes of the hbm tier.

    one slot = [layer][k|v][token][kv_head][head_dim], then padding to a multiple of 4 KiB
    pool     = num_slots such slots, base aligned to 4 KiB

On CPU the memory is an anonymous private mapping with huge pages asked for: O_DIRECT reads into it are twice as fast as
into 4 KiB pages, and a shared mapping gets none (Python's own `mmap.mmap(-1)` would be shared). It is touched once at
start, since first touch runs at a tenth of the speed of a copy. On CUDA it is an arena of `kvstore_gpu`.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt
import torch

from kvstore.core.keyspace import Keyspace
from kvstore.core.types import SLOT_ALIGN
from kvstore.errors import InvalidField, SetupError
from kvstore_engine import device as devices
from kvstore_engine.model import DTYPES

HUGE_PAGE = 2 << 20


class KVPool:
    """All slots of one engine. `raw` is uint8 `[num_slots, stride]`, contiguous, on `device`."""

    def __init__(self, keyspace: Keyspace, pool_bytes: int, device: torch.device) -> None:
        self.keyspace = keyspace
        self.stride = keyspace.slot_bytes
        self.num_slots = pool_bytes // self.stride
        if self.num_slots < 2:
            raise InvalidField(
                "pool_bytes", f"{pool_bytes} holds fewer than two blocks", f"use at least {2 * self.stride}"
            )
        self.device = device
        self.arena = devices.make_arena(keyspace, self.num_slots, device) if device.type in devices.ON_ARENA else None
        self.raw = self.arena.tensor if self.arena is not None else allocate(self.num_slots, self.stride)
        assert self.raw.data_ptr() % SLOT_ALIGN == 0
        self._typed = self.raw[:, : keyspace.block_bytes].view(DTYPES[keyspace.kv_dtype])

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots, padding included."""
        return self.num_slots * self.stride

    def layer(self, index: int) -> torch.Tensor:
        """View `[num_slots, 2, block_tokens, num_kv_heads, head_dim]` of one layer, not contiguous."""
        k = self.keyspace
        width = k.num_kv_heads * k.head_dim
        strides = (self._typed.stride(0), k.block_tokens * width, width, k.head_dim, 1)
        shape = (self.num_slots, 2, k.block_tokens, k.num_kv_heads, k.head_dim)
        offset = self._typed.storage_offset() + index * 2 * k.block_tokens * width
        return self._typed.as_strided(shape, strides, offset)

    def host_view(self) -> npt.NDArray[np.uint8]:
        """uint8 `[num_slots, stride]` over the same memory, writable. Raises SetupError for a pool on a device."""
        if self.device.type != "cpu":
            raise SetupError(
                "pool: host_view is for pools in host memory; a device pool is reached through kvstore_gpu"
            )
        view: npt.NDArray[np.uint8] = self.raw.numpy()
        return view

    def close(self) -> None:
        """Give device memory back; nothing may use the pool any more. Host memory goes with its last user."""
        if self.arena is not None:
            self.raw = self._typed = self.raw[:0]
            self.arena.close()

    def fill(self, index: int, value: int) -> None:
        """Set every byte of a slot (tests poison what must not be read)."""
        self.raw[index].fill_(value)


def allocate(num_slots: int, stride: int) -> torch.Tensor:
    """Zeroed uint8 `[num_slots, stride]`, 4 KiB aligned. Raises SetupError when there isn't that much memory."""
    try:
        return allocate_host(num_slots * stride).view(num_slots, stride)
    except (OSError, MemoryError):
        raise SetupError(f"pool_bytes: {num_slots * stride} can't be allocated; use less") from None


def allocate_host(num_bytes: int) -> torch.Tensor:
    """Anonymous private mapping, huge pages where the system gives them, touched. Lives as long as the tensor."""
    span = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE  # room to start on a huge page
    mapping = mmap.mmap(-1, span, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    memory = memory[start : start + num_bytes]
    memory.fill(0)
    return torch.from_numpy(memory)
