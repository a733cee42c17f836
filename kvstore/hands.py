"""The hands of a node: moves between DRAM and NVMe, and everything that touches the durable index.

    Move ------> mover threads -> transfer engine -> record put -+
    Unpublish ---------------------------------------------------+-> committer thread (groups, in order) -> completions
    Sync ------> mover thread -> data synced -> index synced
    SegmentFree > mover thread -> file dropped, if the machine still has no use for it

Each piece of work ends with exactly one completion event, whatever happens. A record put is queued only after its
payload is written. A slot is free only once the deletion of its record is committed: a deletion that fails is tried
again, since two records of one slot would cost both blocks at the next start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvstore.committer import Committer
from kvstore.core import commands, events
from kvstore.core.commands import Location
from kvstore.core.machine import Machine
from kvstore.core.record import Record
from kvstore.core.types import ResidencyState, Slot, Tier
from kvstore.errors import ChecksumMismatch, KVStoreError, TransferError, Unavailable
from kvstore.metrics import Metrics
from kvstore.records import Records
from kvstore.tiers.arena import Arena
from kvstore.tiers.datadir import DataDir
from kvstore.tiers.index_lmdb import Entry, block_key
from kvstore.tiers.transfer import Copy, CopyResult, File, Memory, Priority, TransferEngine

log = logging.getLogger(__name__)
TRANSFER_TIMEOUT_S = 60.0
NUM_MOVERS = 2
Work = commands.Move | commands.Unpublish | commands.Sync | commands.SegmentFree


class _Outcome:
    """What became of one move's items, by index."""

    def __init__(self, command: commands.Move) -> None:
        self.command = command
        self.entries: dict[int, Entry] = {}
        self.failed: set[int] = set()
        self.corrupt: set[int] = set()
        self.dead = False

    def fail_all(self) -> None:
        self.failed = set(range(len(self.command.items)))

    def event(self) -> events.MoveDone:
        return events.MoveDone(self.command.op, tuple(sorted(self.failed)), tuple(sorted(self.corrupt)), self.dead)


class Hands:
    """`step` feeds completions back; `locked(query)` runs a query on the machine under its lock."""

    def __init__(
        self,
        arena: Arena,
        data: DataDir | None,
        engine: TransferEngine,
        records: Records,
        metrics: Metrics,
        step: Callable[[events.Event], Any],
        locked: Callable[[Callable[[Machine], None]], None],
    ) -> None:
        self._arena = arena
        self._data = data
        self._engine = engine
        self._records = records
        self._metrics = metrics
        self._step = step
        self._locked = locked
        self._closing = False
        self._undeleted: list[commands.Unpublish] = []
        self._undeleted_lock = threading.Lock()
        self.dead_since: float | None = None
        """When NVMe stopped taking writes (monotonic seconds); None while it does."""
        self._movers = ThreadPoolExecutor(NUM_MOVERS, "kvstore-mover")
        self.committer = Committer(data.index, self._committed) if data is not None else None

    def send(self, command: Work) -> None:
        """Queue one piece of work; never waits."""
        if self._closing:
            return  # whoever waits for it is told Unavailable, and the next start sees what was committed
        if isinstance(command, commands.Move):
            self._movers.submit(self._move, command)
        elif isinstance(command, commands.Unpublish):
            assert self.committer is not None
            self.committer.delete([block_key(*name) for name in command.blocks], command)
        elif isinstance(command, commands.Sync):
            self._movers.submit(self._sync, command)
        elif self._data is not None:
            self._movers.submit(self._drop_segment, self._data, command.index)

    # ---- moves

    def _move(self, command: commands.Move) -> None:
        """Mover thread: copy the items, then publish what was copied."""
        started = time.monotonic()
        out = _Outcome(command)
        try:
            copies = self._copies(out)
            priority = Priority.READ if command.target < command.source else Priority.WRITE
            if copies:
                results = self._engine.submit([c for _, c in copies], priority, TRANSFER_TIMEOUT_S).wait()
                self._judge(out, [i for i, _ in copies], results)
        except KVStoreError as error:
            log.warning("move to %s failed: %s", command.target.label, error)
            out.fail_all()
        except Exception:
            log.exception("move to %s failed unexpectedly", command.target.label)
            out.fail_all()
        self._metrics.move(command.source.label, command.target.label, time.monotonic() - started)
        self._publish(out)

    def _copies(self, out: _Outcome) -> list[tuple[int, Copy]]:
        command = out.command
        places = [Location(item.block, command.source, item.source) for item in command.items]
        copies = []
        for index, (item, record) in enumerate(zip(command.items, self._records.of(places), strict=True)):
            if record is None:  # a copy that can't be proven is no copy
                out.failed.add(index)
                out.corrupt.add(index)
                continue
            out.entries[index] = Entry(record, item.target, item.block.share.size_class)
            try:
                source = self._place(command.source, item.source, record, make=False)
                target = self._place(command.target, item.target, record, make=True)
            except KVStoreError as error:
                self._note(out, index, error)
                continue
            copies.append((index, Copy(source, target, record.payload_bytes, record.slice_bytes, record.checksums)))
        return copies

    def _place(self, tier: Tier, slot: Slot, record: Record, make: bool) -> Memory | File:
        if tier == Tier.DRAM:
            return Memory(self._arena.array, slot)
        assert self._data is not None
        return self._data.slab.place(slot, record.payload_bytes, make=make)

    def _judge(self, out: _Outcome, indices: list[int], results: list[CopyResult]) -> None:
        for index, result in zip(indices, results, strict=True):
            if result.error is not None:
                self._note(out, index, result.error)

    def _note(self, out: _Outcome, index: int, error: KVStoreError) -> None:
        """One item failed. What can't be read from NVMe is lost there; what can't be written says that the tier is
        full or broken."""
        upward = out.command.source == Tier.NVME
        out.failed.add(index)
        self._metrics.failed(type(error).__name__)
        if isinstance(error, ChecksumMismatch) or (upward and isinstance(error, TransferError)):
            out.corrupt.add(index)
        elif not upward and not isinstance(error, Unavailable):
            out.dead = True
        log.warning("%r: %s", out.command.items[index].block, error)

    def _publish(self, out: _Outcome) -> None:
        command = out.command
        good = {i: entry for i, entry in out.entries.items() if i not in out.failed}
        num_bytes = sum([entry.record.payload_bytes for entry in good.values()])
        self._metrics.moved(command.source.label, "out", num_bytes)
        self._metrics.moved(command.target.label, "in", num_bytes)
        if command.target == Tier.DRAM:
            for index, entry in good.items():
                self._records.keep(command.items[index].block, entry.record)
        if command.target == Tier.NVME and good and self.committer is not None:
            self.committer.put(list(good.values()), out)
        else:
            self._move_ended(out)

    def _move_ended(self, out: _Outcome) -> None:
        if out.dead and self.dead_since is None:
            self.dead_since = time.monotonic()
            self._metrics.failed("tier_dead")
        self._step(out.event())

    # ---- the index

    def _committed(self, tokens: list[object], error: KVStoreError | None) -> None:
        """Committer thread: a group is in the index, or isn't."""
        if error is not None:
            self._metrics.failed(type(error).__name__)
        for token in tokens:
            if isinstance(token, commands.Unpublish):
                self._unpublished(token, error)
            elif isinstance(token, _Outcome):
                if error is not None:
                    token.fail_all()
                    token.dead = True
                self._move_ended(token)

    def _unpublished(self, command: commands.Unpublish, error: KVStoreError | None) -> None:
        if error is None:
            self._step(events.UnpublishDone(command.op))
            return
        with self._undeleted_lock:
            self._undeleted.append(command)

    def retry_deletes(self, machine: Machine) -> None:
        """Try failed deletions again. The machine's lock is held.

        A block that was stored again meanwhile has a new record under its key, which must stay; while that one isn't
        committed yet, the old one is still there, and its slot waits on.
        """
        with self._undeleted_lock:
            waiting, self._undeleted = self._undeleted, []
        for command in waiting:
            states = {name: machine.residency(*name, Tier.NVME) for name in command.blocks}
            if ResidencyState.FILLING in states.values():
                with self._undeleted_lock:
                    self._undeleted.append(command)
            elif self.committer is not None:
                self.committer.delete([block_key(*name) for name, state in states.items() if state is None], command)

    def _sync(self, command: commands.Sync) -> None:
        ok = False
        try:
            if self._data is not None and self.committer is not None:
                self._data.slab.sync()
                self.committer.flush(sync=True)
                ok = True
        except KVStoreError as error:
            log.warning("sync failed: %s", error)
            self._metrics.failed(type(error).__name__)
        except Exception:
            log.exception("sync failed unexpectedly")
        self._step(events.SyncDone(command.op, ok))

    def _drop_segment(self, data: DataDir, index: int) -> None:
        def drop_if_free(machine: Machine) -> None:
            pool = machine.pool(Tier.NVME)
            if pool is None or not pool.slots.is_free_segment(index):
                return  # taken again meanwhile
            try:
                data.slab.drop_segment(index)
            except (OSError, KVStoreError) as error:
                log.warning("segment %d: %s", index, error)

        self._locked(drop_if_free)

    def close(self) -> None:
        """Finish what runs, commit what is queued."""
        self._closing = True
        self._movers.shutdown()
        self._engine.close()
        if self.committer is not None:
            self.committer.close()
