"""Records of resident blocks: in memory while a block is in DRAM, in the durable index once it is on NVMe."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstore.core.blocks import Block
from kvstore.core.record import Record
from kvstore.core.types import KeyspaceId
from kvstore.tiers.index_lmdb import BlockIndex, block_key


class RecordBook:
    """Thread-safe."""

    def __init__(self, index: BlockIndex | None) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._held: dict[Block, Record] = {}

    def keep(self, block: Block, record: Record) -> None:
        """The block has, or is about to have, a copy in DRAM."""
        with self._lock:
            self._held[block] = record

    def forget(self, block: Block) -> None:
        """Its copy in DRAM went."""
        with self._lock:
            self._held.pop(block, None)

    def find(self, named: Sequence[tuple[KeyspaceId, Block]]) -> list[Record | None]:
        """Records in the order asked for; None where there is none."""
        with self._lock:
            found = [self._held.get(block) for _, block in named]
        missing = [i for i, record in enumerate(found) if record is None]
        if missing and self._index is not None:
            keys = [block_key(named[i][0], named[i][1].hash) for i in missing]
            for i, entry in zip(missing, self._index.get_many(keys), strict=True):
                found[i] = entry.record if entry is not None else None
        return found
