"""The host's hands: they carry out moves between DRAM and NVMe, syncs and segment drops, on threads of their own.

    Move: records -> copies (verified at the source before a write, at the target after a read)
          -> for NVMe: records to the committer, so that a record never precedes its bytes
          -> completion with what failed, what was corrupt, and whether the target is dead
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvstore.committer import Committer
from kvstore.core import commands, events
from kvstore.core.blocks import Block
from kvstore.core.record import Record
from kvstore.core.types import KeyspaceId, Slot, Tier
from kvstore.errors import ChecksumMismatch, KVStoreError, TierFull, Unavailable
from kvstore.metrics import Metrics
from kvstore.records import RecordBook
from kvstore.tiers.arena import Arena
from kvstore.tiers.datadir import DataDir
from kvstore.tiers.index_lmdb import Entry
from kvstore.tiers.transfer import Copy, CopyResult, File, Memory, Priority, TransferEngine

log = logging.getLogger(__name__)
TRANSFER_TIMEOUT_S = 60.0
MOVERS = 2


class Hands:
    """`done(event)` is called once for each move and sync, from any thread. `name_of(block)` gives its keyspace."""

    def __init__(
        self,
        engine: TransferEngine,
        arena: Arena,
        data: DataDir | None,
        committer: Committer | None,
        book: RecordBook,
        metrics: Metrics,
        name_of: Callable[[Block], KeyspaceId],
        done: Callable[[events.MoveDone | events.SyncDone], None],
    ) -> None:
        self._engine = engine
        self._arena = arena
        self._data = data
        self._committer = committer
        self._book = book
        self._metrics = metrics
        self._name_of = name_of
        self._done = done
        self._threads = ThreadPoolExecutor(MOVERS, "kvstore-mover")

    def move(self, command: commands.Move) -> None:
        """Start a move."""
        self._threads.submit(self._move, command)

    def sync(self, command: commands.Sync) -> None:
        """Start a sync."""
        self._threads.submit(self._sync, command)

    def run(self, work: Callable[[], None]) -> None:
        """Run something short behind the moves already given."""
        self._threads.submit(work)

    def close(self) -> None:
        """Finish what was given."""
        self._threads.shutdown()

    def _move(self, command: commands.Move) -> None:
        started = time.monotonic()
        failed: set[int] = set()
        corrupt: set[int] = set()
        entries: dict[int, Entry] = {}
        dead = False
        try:
            copies = self._copies(command, failed, entries)
            priority = Priority.READ if command.target < command.source else Priority.WRITE
            batch = [copy for _, copy in copies]
            results = self._engine.submit(batch, priority, TRANSFER_TIMEOUT_S).wait() if batch else []
            dead = self._judge(command, [i for i, _ in copies], results, failed, corrupt)
        except KVStoreError as error:
            log.warning("move to %s failed: %s", command.target.label, error)
            self._metrics.failed(type(error).__name__)
            failed = set(range(len(command.items)))
            dead = isinstance(error, TierFull) and command.target == Tier.NVME
        except Exception:
            log.exception("move to %s failed unexpectedly", command.target.label)
            failed = set(range(len(command.items)))
        self._metrics.move(command.source.label, command.target.label, time.monotonic() - started)
        done = events.MoveDone(command.op, tuple(sorted(failed)), tuple(sorted(corrupt)), dead)
        self._publish(command, {i: e for i, e in entries.items() if i not in failed}, done)

    def _copies(self, command: commands.Move, failed: set[int], entries: dict[int, Entry]) -> list[tuple[int, Copy]]:
        named = [(self._name_of(item.block), item.block) for item in command.items]
        copies = []
        for index, (item, record) in enumerate(zip(command.items, self._book.find(named), strict=True)):
            if record is None:
                failed.add(index)
                continue
            entries[index] = Entry(record, item.target, item.block.share.size_class)
            source = self._place(command.source, item.source, record, make=False)
            target = self._place(command.target, item.target, record, make=True)
            copies.append((index, Copy(source, target, record.payload_bytes, record.slice_bytes, record.checksums)))
        return copies

    def _place(self, tier: Tier, slot: Slot, record: Record, make: bool) -> Memory | File:
        if tier == Tier.DRAM:
            return Memory(self._arena.array, slot)
        assert self._data is not None
        return self._data.slab.place(slot, record.payload_bytes, make=make)

    def _judge(
        self,
        command: commands.Move,
        indices: list[int],
        results: list[CopyResult],
        failed: set[int],
        corrupt: set[int],
    ) -> bool:
        """Sort outcomes; True when the target can't be written any more."""
        dead = False
        for index, result in zip(indices, results, strict=True):
            if result.error is None:
                continue
            failed.add(index)
            self._metrics.failed(type(result.error).__name__)
            if isinstance(result.error, ChecksumMismatch):
                corrupt.add(index)
            elif not isinstance(result.error, Unavailable):
                dead = dead or command.target == Tier.NVME
            log.warning("%r: %s", command.items[index].block, result.error)
        return dead

    def _publish(self, command: commands.Move, good: dict[int, Entry], done: events.MoveDone) -> None:
        for index, entry in good.items():
            num_bytes = entry.record.payload_bytes
            self._metrics.moved(command.source.label, "out", num_bytes)
            self._metrics.moved(command.target.label, "in", num_bytes)
            if command.target == Tier.DRAM:
                self._book.keep(command.items[index].block, entry.record)
        if command.target == Tier.NVME and good and self._committer is not None:
            self._committer.put(list(good.values()), (command, done))
        else:
            self._done(done)

    def committed(self, command: commands.Move, done: events.MoveDone, error: KVStoreError | None) -> None:
        """Committer thread: the records of a move to NVMe are in the index, or aren't."""
        if error is not None:
            self._metrics.failed(type(error).__name__)
            done = events.MoveDone(done.op, tuple(range(len(command.items))), done.corrupt, True)
        self._done(done)

    def _sync(self, command: commands.Sync) -> None:
        ok = False
        try:
            if self._data is not None and self._committer is not None:
                self._data.slab.sync()
                self._committer.flush(sync=True)
                ok = True
        except KVStoreError as error:
            log.warning("sync failed: %s", error)
            self._metrics.failed(type(error).__name__)
        self._done(events.SyncDone(command.op, ok))
