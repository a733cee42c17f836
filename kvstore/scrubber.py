"""Reading NVMe in idle time, so that rot is found before an agent meets it.

One round after another through the index, at a bounded rate and at background priority. A payload that fails is looked
at again: only if its record still names the same slot was it really lost, and not evicted and filled anew meanwhile.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Iterator

import numpy as np

from kvstore.core import events
from kvstore.core.types import Tier
from kvstore.errors import KVStoreError, TransferError
from kvstore.metrics import Metrics
from kvstore.tiers.datadir import DataDir
from kvstore.tiers.fsck import scrub
from kvstore.tiers.index_lmdb import Entry
from kvstore.tiers.transfer import TransferEngine

log = logging.getLogger(__name__)
BATCH_BYTES = 8 << 20
PAUSE_S = 60.0
"""Between two rounds."""


class Scrubber:
    """A thread; `lost(event)` is called for each copy that is wrong."""

    def __init__(
        self,
        data: DataDir,
        engine: TransferEngine,
        bytes_per_s: int,
        lost: Callable[[events.Lost], object],
        metrics: Metrics,
    ) -> None:
        self._data = data
        self._engine = engine
        self._rate = bytes_per_s
        self._lost = lost
        self._metrics = metrics
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="kvstore-scrubber", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._closing.wait(PAUSE_S):
            try:
                self.round()
            except KVStoreError as error:
                log.warning("scrub ended early: %s", error)
            except Exception:
                log.exception("scrub failed unexpectedly")

    def round(self) -> int:
        """Read everything once. Returns the copies found wrong."""
        num_lost = 0
        for batch in self._batches():
            with mmap.mmap(-1, sum(e.size_class for e in batch)) as room:
                scratch = np.frombuffer(room, dtype=np.uint8)
                failed = scrub(self._data.slab, self._engine, batch, scratch)
                del scratch
            num_bytes = sum(e.record.payload_bytes for e in batch)
            self._metrics.moved(Tier.NVME.label, "scrubbed", num_bytes)
            num_lost += sum(self._confirm(entry, error) for entry, error in failed)
            if self._closing.wait(num_bytes / self._rate):
                break
        return num_lost

    def _batches(self) -> Iterator[list[Entry]]:
        batch: list[Entry] = []
        used = 0
        for item in self._data.index.scan():
            if isinstance(item, bytes):
                continue
            if batch and used + item.size_class > BATCH_BYTES:
                yield batch
                batch, used = [], 0
            batch.append(item)
            used += item.size_class
        if batch:
            yield batch

    def _confirm(self, entry: Entry, error: KVStoreError) -> bool:
        if not isinstance(error, TransferError):
            return False  # not read, so not judged
        [now] = self._data.index.get_many([entry.key])
        if now is None or now.slot != entry.slot or now.record != entry.record:
            return False
        log.warning("block %s on NVMe is wrong: %s", entry.record.hash.hex(), error)
        self._metrics.failed("scrub")
        self._lost(events.Lost(entry.record.keyspace, entry.record.hash, Tier.NVME))
        return True

    def close(self) -> None:
        """Stop after the batch at hand."""
        self._closing.set()
        self._thread.join()
