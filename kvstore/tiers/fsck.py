"""Check, repair and scrub a data directory.

Everything that can be wrong is a `Problem` of one kind. Repair never guesses: a record that can't be believed is
deleted (its block becomes a miss and is computed again), a file that belongs to nobody is removed, a segment of wrong
length gets its length back.

    kind            meaning                                              repair
    record          damaged, or stored under a foreign key               delete the record
    keyspace        of a keyspace that isn't registered, or other shape  delete the record
    place           slot outside of the segments, misaligned, too small  delete the record
    overlap         two records claim the same bytes                     keep the one whose payload verifies, else none
    payload         bytes differ from their checksums, or can't be read  delete the record
    orphan          parent isn't stored: can't be reached by a prefix    delete the record
    segment         file of wrong length, or not readable                give it its length
    index           LMDB can't be read, or not to its end                make it new from what can be read
    stray           file that belongs to no part of the format           remove

`scrub` is the payload part alone, for a running service: it reads at background priority and touches nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.core.keyspace import Keyspace
from kvstore.core.record import NO_PARENT
from kvstore.core.types import SLOT_ALIGN
from kvstore.errors import InvalidField, KVStoreError, SetupError
from kvstore.tiers.arena import Arena
from kvstore.tiers.datadir import acquire_lock, read_format
from kvstore.tiers.index_lmdb import Entry, block_key
from kvstore.tiers.salvage import Tables, delete_blocks, read_tables, rebuild
from kvstore.tiers.slab import Slab, segment_index
from kvstore.tiers.transfer import Copy, Memory, Priority, TransferEngine

Progress = Callable[[str, int, int], None]
MAX_SHOWN = 20
_SCRATCH_BYTES = 64 << 20
_ROOT_NAMES = frozenset({"FORMAT", "LOCK", "index", "slab"})


@dataclass(frozen=True)
class Problem:
    """One finding."""

    kind: str
    subject: str
    text: str


@dataclass
class FsckReport:
    """What was checked and found. `problems` holds all findings, `lines` shows the first of each kind."""

    path: Path
    num_records: int = 0
    num_payloads: int = 0
    payload_bytes: int = 0
    num_segments: int = 0
    repaired: bool = False
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing wrong was found."""
        return not self.problems

    def add(self, kind: str, subject: str, text: str) -> None:
        """Note a finding."""
        self.problems.append(Problem(kind, subject, text))

    def lines(self) -> list[str]:
        """For people."""
        counts = Counter(p.kind for p in self.problems)
        out = [
            f"{self.path}: {self.num_records} records, {self.num_segments} segments, "
            f"{self.num_payloads} payloads ({self.payload_bytes / 1e9:.2f} GB) verified"
        ]
        for kind, count in counts.items():
            shown = [p for p in self.problems if p.kind == kind][:MAX_SHOWN]
            out += [f"  {p.kind}: {p.subject}: {p.text}" for p in shown]
            if count > MAX_SHOWN:
                out.append(f"  {kind}: and {count - MAX_SHOWN} more")
        if self.ok:
            out.append("nothing wrong found")
        else:
            state = "repaired" if self.repaired else "run again with --repair to mend"
            out.append(f"{len(self.problems)} problems ({', '.join(f'{n} {k}' for k, n in counts.items())}); {state}")
        return out


def fsck(path: Path, repair: bool = False, progress: Progress | None = None, num_threads: int = 8) -> FsckReport:
    """Check everything in `path`; mend it when `repair`. Raises SetupError: no data directory, or in use."""
    if not path.is_dir() or not (path / "index").is_dir():
        raise SetupError(f"data_dir: {path} is no data directory; give the one of the service's configuration")
    lock_fd = acquire_lock(path)
    try:
        found = read_format(path)
        if found is None:
            raise SetupError(f"data_dir: {path} has no FORMAT file; give the service's data directory")
        return _Check(path, int(found["segment_bytes"]), repair, progress or _silent, num_threads).run()
    finally:
        os.close(lock_fd)


def _silent(_stage: str, _done: int, _total: int) -> None:
    return


class _Check:
    """One pass over one directory."""

    def __init__(self, path: Path, segment_bytes: int, repair: bool, progress: Progress, num_threads: int) -> None:
        self.path = path
        self.repair = repair
        self.progress = progress
        self.num_threads = num_threads
        self.report = FsckReport(path, repaired=repair)
        self.segment_bytes = segment_bytes
        self.bad_keys: list[bytes] = []

    def run(self) -> FsckReport:
        self._check_files()
        tables = read_tables(self.path / "index", lambda done, total: self.progress("records", done, total))
        if tables.error:
            self.report.add("index", "data.mdb", tables.error)
        # Capacity is the service's business: here every segment that is there counts.
        slab = Slab.open(self.path / "slab", 1 << 62, self.segment_bytes, mend=False)
        try:
            entries = self._check_records(tables, set(slab.segments()))
            entries = self._check_payloads(slab, entries)
        finally:
            slab.close()
        entries = self._check_overlaps(entries)
        entries = self._check_parents(entries)
        if self.repair and tables.error:
            rebuild(self.path / "index", tables, entries)
        elif self.repair and self.bad_keys:
            delete_blocks(self.path / "index", self.bad_keys)
        return self.report

    def _reject(self, entry: Entry, kind: str, text: str) -> None:
        self.report.add(kind, entry.key.hex(), text)
        self.bad_keys.append(entry.key)

    # ---- files ----

    def _check_files(self) -> None:
        for item in sorted(self.path.iterdir()):
            if item.name not in _ROOT_NAMES and not item.is_socket():  # a killed service leaves its sockets
                self._stray(item)
        folder = self.path / "slab"
        for item in sorted(folder.iterdir()) if folder.is_dir() else ():
            if segment_index(item.name) is None or not item.is_file():
                self._stray(item)
            else:
                self._check_segment(item)

    def _stray(self, item: Path) -> None:
        self.report.add("stray", str(item.relative_to(self.path)), "belongs to no part of the format")
        if self.repair and item.is_file():
            item.unlink()

    def _check_segment(self, item: Path) -> None:
        self.report.num_segments += 1
        size = item.stat().st_size
        if size == self.segment_bytes:
            return
        self.report.add("segment", item.name, f"{size} bytes instead of {self.segment_bytes}")
        if self.repair:
            with item.open("r+b") as file:
                os.ftruncate(file.fileno(), self.segment_bytes)

    # ---- records ----

    def _check_records(self, tables: Tables, segments: set[int]) -> list[Entry]:
        shapes = self._shapes(tables)
        good: list[Entry] = []
        self.report.num_records = len(tables.blocks) + len(tables.bad_keys)
        for key in tables.bad_keys:
            self.report.add("record", key.hex(), "damaged, or stored under a foreign key")
            self.bad_keys.append(key)
        for entry in tables.blocks:
            if (text := self._wrong_place(entry, segments)) is not None:
                self._reject(entry, "place", text)
            elif shapes.get(entry.record.keyspace, (0, 0)) != (entry.record.num_slices, entry.record.slice_bytes):
                self._reject(entry, "keyspace", "keyspace isn't registered, or has another shape")
            else:
                good.append(entry)
        return good

    def _shapes(self, tables: Tables) -> dict[bytes, tuple[int, int]]:
        shapes: dict[bytes, tuple[int, int]] = {}
        for keyspace_id, encoding in tables.keyspaces.items():
            try:
                keyspace = Keyspace.decode(encoding)
            except InvalidField as error:
                self.report.add("keyspace", keyspace_id.hex(), str(error))
                continue
            shapes[keyspace_id] = (keyspace.num_layers, keyspace.slice_bytes)
        return shapes

    def _wrong_place(self, entry: Entry, segments: set[int]) -> str | None:
        index, offset = divmod(entry.slot, self.segment_bytes)
        if index not in segments:
            return f"segment {index} isn't there"
        if entry.slot % SLOT_ALIGN or offset + entry.size_class > self.segment_bytes:
            return f"slot {entry.slot} is misaligned or crosses its segment"
        if entry.record.payload_bytes > entry.size_class:
            return f"payload of {entry.record.payload_bytes} bytes in a slot of {entry.size_class}"
        return None

    # ---- payloads ----

    def _check_payloads(self, slab: Slab, entries: list[Entry]) -> list[Entry]:
        engine = TransferEngine(self.num_threads)
        arena = Arena.create(max([_SCRATCH_BYTES, *(e.size_class for e in entries)]), pretouch_threads=1)
        bad: set[bytes] = set()
        try:
            done = 0
            for batch in batches(sorted(entries, key=lambda e: e.slot), arena.size):
                for entry, error in scrub(slab, engine, batch, arena.array):
                    self._reject(entry, "payload", str(error))
                    bad.add(entry.key)
                done += len(batch)
                self.report.payload_bytes += sum(e.record.payload_bytes for e in batch)
                self.progress("payloads", done, len(entries))
        finally:
            engine.close()
            arena.close()
        self.report.num_payloads = len(entries)
        return [e for e in entries if e.key not in bad]

    def _check_overlaps(self, entries: list[Entry]) -> list[Entry]:
        """Of entries whose payloads verify, two can overlap only when bytes happen to agree; then the first stays."""
        good: list[Entry] = []
        for entry in sorted(entries, key=lambda e: e.slot):
            if good and entry.slot < good[-1].slot + good[-1].size_class:
                self._reject(entry, "overlap", f"slot {entry.slot} lies in the slot at {good[-1].slot}")
            else:
                good.append(entry)
        return good

    def _check_parents(self, entries: list[Entry]) -> list[Entry]:
        """Parents first, so that a lost block takes all that follow it along."""
        depths: dict[bytes, int] = {}
        good: list[Entry] = []
        for entry in sorted(entries, key=lambda e: e.record.depth):
            record = entry.record
            is_first = record.parent == NO_PARENT and record.depth == 0
            if not is_first and depths.get(block_key(record.keyspace, record.parent)) != record.depth - 1:
                self._reject(entry, "orphan", "its parent isn't stored")
            else:
                depths[entry.key] = record.depth
                good.append(entry)
        return good


def batches(entries: Sequence[Entry], max_bytes: int) -> Iterator[list[Entry]]:
    """Runs of entries whose slots fit into `max_bytes` together."""
    batch: list[Entry] = []
    used = 0
    for entry in entries:
        if batch and used + entry.size_class > max_bytes:
            yield batch
            batch, used = [], 0
        batch.append(entry)
        used += entry.size_class
    if batch:
        yield batch


def scrub(
    slab: Slab, engine: TransferEngine, entries: Sequence[Entry], scratch: npt.NDArray[np.uint8]
) -> list[tuple[Entry, KVStoreError]]:
    """Read and verify payloads at background priority; returns those that failed, and why.

    `scratch`: memory of the caller, 4 KiB aligned, at least the sum of the size classes. A running service must look
    again whether a failed entry still holds its slot: it may have been evicted and the slot filled anew meanwhile.
    """
    failed: list[tuple[Entry, KVStoreError]] = []
    copies: list[Copy] = []
    reading: list[Entry] = []
    offset = 0
    for entry in entries:
        record = entry.record
        try:
            place = slab.place(entry.slot, record.payload_bytes, make=False)
        except KVStoreError as error:
            failed.append((entry, error))
            continue
        target = Memory(scratch, offset)
        copies.append(Copy(place, target, record.payload_bytes, record.slice_bytes, record.checksums))
        reading.append(entry)
        offset += entry.size_class
    results = engine.submit(copies, Priority.WRITE).wait()
    failed += [(e, r.error) for e, r in zip(reading, results, strict=True) if r.error is not None]
    return failed
