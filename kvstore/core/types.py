"""Words of the core: tiers, states, identifiers.

Everything here is a plain value. `Slot` is the *byte offset* of a slot inside its pool, always a multiple of 4 KiB,
so that slots of several size classes share one address space and every hand can use the number as it is.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NewType, Protocol

BlockHash = NewType("BlockHash", bytes)
"""16 bytes: XXH3-128 of parent hash, token ids and extra keys, seeded by the keyspace."""

KeyspaceId = NewType("KeyspaceId", bytes)
"""32 bytes: BLAKE2b-256 of the keyspace's canonical encoding."""

SessionId = NewType("SessionId", str)
Slot = NewType("Slot", int)
"""Byte offset of a slot in its pool; a multiple of `SLOT_ALIGN`."""

LeaseId = NewType("LeaseId", int)
OpId = NewType("OpId", int)

SLOT_ALIGN = 4096


class Tier(IntEnum):
    """Where a residency lies, fastest first."""

    HBM = 0
    DRAM = 1
    NVME = 2

    @property
    def label(self) -> str:
        """Lower-case name for metrics and tables."""
        return self.name.lower()


NUM_TIERS = len(Tier)


class ResidencyState(IntEnum):
    """`FREE -> FILLING -> READY -> DRAINING -> FREE`; in flight is a state, never a sentinel."""

    FREE = 0
    FILLING = 1
    READY = 2
    DRAINING = 3


class Activity(IntEnum):
    """What an agent is doing."""

    OPEN = 0
    RUNNING = 1
    TOOL_WAIT = 2
    IDLE = 3
    ENDED = 4


class Durability(IntEnum):
    """What an offload's acknowledgement promises: in DRAM; written and committed on NVMe; synced as well."""

    DRAM = 0
    NVME = 1
    SYNCED = 2


class HashList:
    """A list of block hashes packed in one bytes object, 16 bytes each; slices nothing until asked."""

    __slots__ = ("raw",)

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def __len__(self) -> int:
        return len(self.raw) // 16

    def __getitem__(self, index: int) -> BlockHash:
        return BlockHash(self.raw[index * 16 : index * 16 + 16])


class Hashes(Protocol):
    """Block hashes of a path, first block first: a list, or a `HashList`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> BlockHash: ...
