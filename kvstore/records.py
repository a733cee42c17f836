"""Records of the blocks a node holds: in memory for those in DRAM, in the index for the others.

A record is a block's identity and checksums, the same for all its copies. Kept from seal (or promotion) until the DRAM
copy goes; dictionary operations are atomic, so no lock is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.blocks import Block
from kvstore.core.commands import Location
from kvstore.core.machine import Machine
from kvstore.core.record import Record
from kvstore.tiers.index_lmdb import BlockIndex, block_key


class Records:
    """Thread-safe."""

    def __init__(self, machine: Machine, index: BlockIndex | None) -> None:
        self._machine = machine
        self._index = index
        self._kept: dict[Block, Record] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, block: Block, record: Record) -> None:
        """The block has, or is about to have, a copy in DRAM."""
        self._kept[block] = record

    def forget(self, block: Block) -> None:
        """Its DRAM copy is gone."""
        self._kept.pop(block, None)

    def of(self, places: Sequence[Location]) -> list[Record | None]:
        """Records in the order of `places`; None where there is none, or it is damaged. Raises TransferError."""
        found = [self._kept.get(p.block) for p in places]
        missing = [i for i, r in enumerate(found) if r is None]
        if missing and self._index is not None:
            blocks = [places[i].block for i in missing]
            keys = [block_key(self._machine.space_of(b).id, b.hash) for b in blocks]
            for i, entry in zip(missing, self._index.get_many(keys), strict=True):
                found[i] = entry.record if entry is not None else None
        return found
