"""Where an engine's blocks lie: a run of equal slots in host memory.

slot i = bytes [i * stride_bytes, i * stride_bytes + block_bytes)        block-first, see Keyspace
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.core.types import SLOT_ALIGN
from kvstore.errors import InvalidField

Bytes = npt.NDArray[np.uint8]


class Pool(Protocol):
    """What the client needs of a pool. `flat` is `[num_slots * stride_bytes]` u8, contiguous, writable."""

    @property
    def flat(self) -> Bytes: ...

    @property
    def stride_bytes(self) -> int: ...

    @property
    def num_slots(self) -> int: ...


class HostPool:
    """A pool over any writable, contiguous array. A base aligned to 4 KiB lets NVMe reads land in place."""

    def __init__(self, array: npt.NDArray[np.generic], stride_bytes: int) -> None:
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise InvalidField("pool", "is not a writable contiguous array", "give one")
        if stride_bytes <= 0 or stride_bytes % SLOT_ALIGN:
            raise InvalidField("stride_bytes", f"{stride_bytes} is no multiple of {SLOT_ALIGN}", "pad the slots")
        self.flat: Bytes = array.reshape(-1).view(np.uint8)
        self.stride_bytes = stride_bytes
        self.num_slots = len(self.flat) // stride_bytes
