"""The NVMe index: which block lies in which slot, and what must come back after a restart. One LMDB environment, five
tables.

    table       key                                              value
    keyspaces   keyspace id (32)                                 Keyspace.encode()
    blocks      first 8 bytes of keyspace id | block hash (16)   slot u64 LE | size class u64 LE | encoded Record
    sessions    session id, UTF-8                                JSON
    contexts    name, UTF-8                                      JSON
    meta        name                                             bytes

Commits are groups: one transaction for all puts and deletes of a batch. LMDB never lets a reader see half of one, and
a killed process leaves the last committed state. Data is synced at each commit but the root only when `sync` is asked
for (MDB_NOMETASYNC): a power cut may take back the last commits, never damage older ones.

The map grows by doubling when a commit doesn't fit; the commit is then done again, so no write is lost. LMDB wants no
transaction open during that, hence the gate. The environment must be opened after fork, once a process.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from kvstore.core.record import BadRecord, Record, decode_record
from kvstore.core.types import BlockHash, KeyspaceId, Slot
from kvstore.errors import SetupError, TierFull, TransferError, Unavailable

DEFAULT_MAP_BYTES = 1 << 30
_PLACE = struct.Struct("<QQ")
_SCAN_BATCH = 20_000
_MAX_READERS = 512
_CHECK_EVERY = 256
"""Commits between looks for readers that were killed: each of those keeps every older version of the tables alive."""
log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """One stored block: its record and where the payload lies. `size_class` is the slot's length in bytes."""

    record: Record
    slot: Slot
    size_class: int

    @property
    def key(self) -> bytes:
        """Key in `blocks`."""
        return block_key(self.record.keyspace, self.record.hash)


def block_key(keyspace: KeyspaceId, block_hash: BlockHash) -> bytes:
    """24 bytes; blocks of a keyspace are neighbours."""
    return keyspace[:8] + block_hash


class _Gate:
    """Many transactions, or one resize of the map."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_inside = 0
        self._closed = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        with self._condition:
            while self._closed:
                self._condition.wait()
            self._num_inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_inside -= 1
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._condition:
            while self._closed:
                self._condition.wait()
            self._closed = True
            while self._num_inside:
                self._condition.wait()
        try:
            yield
        finally:
            with self._condition:
                self._closed = False
                self._condition.notify_all()


class BlockIndex:
    """The tables. Thread-safe; one writer at a time (LMDB sees to it)."""

    def __init__(self, env: lmdb.Environment) -> None:
        self._env = env
        self._pid = os.getpid()
        self._num_writes = 0
        self._gate = _Gate()
        self._blocks = env.open_db(b"blocks")
        self._keyspaces = env.open_db(b"keyspaces")
        self._sessions = env.open_db(b"sessions")
        self._contexts = env.open_db(b"contexts")
        self._meta = env.open_db(b"meta")

    @classmethod
    def open(cls, folder: Path, map_bytes: int = DEFAULT_MAP_BYTES) -> BlockIndex:
        """Open or make the environment in `folder`. Raises SetupError."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            env = lmdb.open(
                str(folder),
                map_size=map_bytes,
                max_dbs=8,
                metasync=False,
                max_spare_txns=4,
                max_readers=_MAX_READERS,
                mode=0o600,
            )
            _check_length(env, folder)
            env.reader_check()  # slots of killed readers would keep old data alive
            return cls(env)
        except (lmdb.Error, OSError) as error:
            raise SetupError(f"index: can't open {folder}: {error}; run `kvstore fsck --repair`") from None

    # ---- blocks ----

    def commit(self, puts: Sequence[Entry] = (), deletes: Iterable[bytes] = (), sync: bool = False) -> None:
        """One transaction: `deletes` (keys) first, then `puts`. With `sync` it survives a power cut once this returns.

        Raises TierFull when the disk is full, TransferError on other failures; nothing of the batch is stored then.
        """
        pack = _PLACE.pack
        rows = [(e.key, pack(e.slot, e.size_class) + e.record.encode()) for e in puts]
        rows.sort()  # neighbours share a leaf of the tree
        gone = list(deletes)

        def work(txn: lmdb.Transaction) -> None:
            for key in gone:
                txn.delete(key, db=self._blocks)
            if rows:
                with txn.cursor(db=self._blocks) as cursor:
                    cursor.putmulti(rows)

        self._write(work, sync)

    def get_many(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Entries in the order of `keys`; None where there is none, or it's damaged."""
        with self._reading(self._blocks) as txn:
            found = [txn.get(key) for key in keys]
        return [None if raw is None else _entry_or_none(raw) for raw in found]

    def scan(self, progress: Callable[[int, int], None] | None = None) -> Iterator[Entry | bytes]:
        """Every block, in order of key; the bare key where the record is damaged or foreign. `progress(done, total)`
        now and then.

        Streams in short transactions, so that the writer's old data can be reused meanwhile.
        """
        total, done, last = self.num_blocks(), 0, b""
        while True:
            rows = self._rows_after(last)
            if not rows:
                return
            for key, raw in rows:
                entry = _entry_or_none(raw)
                yield entry if entry is not None and entry.key == key else key
            last = rows[-1][0]
            done += len(rows)
            if progress is not None:
                progress(done, total)

    def places(self) -> Iterator[tuple[int, int]]:
        """Slot and size class of every row, in order of key; rows too short to tell are left out."""
        last = b""
        while rows := self._rows_after(last):
            last = rows[-1][0]
            yield from (_PLACE.unpack_from(raw) for _, raw in rows if len(raw) >= _PLACE.size)

    def _rows_after(self, last: bytes) -> list[tuple[bytes, bytes]]:
        with self._reading(self._blocks) as txn, txn.cursor() as cursor:
            if not cursor.set_range(last):
                return []
            rows: list[tuple[bytes, bytes]] = []
            for key, value in cursor:
                if key != last:
                    rows.append((key, value))
                if len(rows) >= _SCAN_BATCH:
                    break
            return rows

    def num_blocks(self) -> int:
        """Rows in `blocks`."""
        with self._reading(self._blocks) as txn:
            return int(txn.stat(self._blocks)["entries"])

    # ---- small tables ----

    def put_keyspace(self, keyspace: KeyspaceId, encoding: bytes) -> None:
        """Remember a registered keyspace; synced."""
        self._write(lambda txn: txn.put(keyspace, encoding, db=self._keyspaces), True)

    def keyspaces(self) -> dict[KeyspaceId, bytes]:
        """Keyspace id -> encoding."""
        return {KeyspaceId(key): value for key, value in self._all(self._keyspaces)}

    def delete_keyspace(self, keyspace: KeyspaceId) -> None:
        """Forget a keyspace."""
        self._write(lambda txn: txn.delete(keyspace, db=self._keyspaces), True)

    def put_sessions(self, rows: dict[str, dict[str, Any] | None], sync: bool = False) -> None:
        """Store sessions by id; None deletes one. Values must be JSON."""
        self._put_json(self._sessions, rows, sync)

    def sessions(self) -> dict[str, dict[str, Any]]:
        """Session id -> what was stored."""
        return self._all_json(self._sessions)

    def put_contexts(self, rows: dict[str, dict[str, Any] | None], sync: bool = True) -> None:
        """Store named contexts; None deletes one. Values must be JSON."""
        self._put_json(self._contexts, rows, sync)

    def contexts(self) -> dict[str, dict[str, Any]]:
        """Name -> what was stored."""
        return self._all_json(self._contexts)

    def put_meta(self, name: str, value: bytes) -> None:
        """Store one named value; synced."""
        self._write(lambda txn: txn.put(name.encode(), value, db=self._meta), True)

    def get_meta(self, name: str) -> bytes | None:
        """One named value."""
        with self._reading(self._meta) as txn:
            found: bytes | None = txn.get(name.encode())
            return found

    def _put_json(self, table: Any, rows: dict[str, dict[str, Any] | None], sync: bool) -> None:
        packed = [(k.encode(), None if v is None else json.dumps(v).encode()) for k, v in rows.items()]

        def work(txn: lmdb.Transaction) -> None:
            for key, value in packed:
                if value is None:
                    txn.delete(key, db=table)
                else:
                    txn.put(key, value, db=table)

        self._write(work, sync)

    def _all_json(self, table: Any) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for key, raw in self._all(table):
            try:
                found[key.decode()] = json.loads(raw)
            except ValueError:
                log.warning("index: dropped a damaged row %r", key[:40])
        return found

    def _all(self, table: Any) -> list[tuple[bytes, bytes]]:
        with self._reading(table) as txn, txn.cursor() as cursor:
            return list(cursor)

    @contextmanager
    def _reading(self, table: Any) -> Iterator[Any]:
        """A read transaction. Raises TransferError when the file can't be read."""
        self._check_process()
        with self._gate.passing():
            try:
                with self._begin_reading(table) as txn:
                    yield txn
            except lmdb.Error as error:
                raise TransferError(f"index: read failed: {error}") from None

    def _begin_reading(self, table: Any) -> lmdb.Transaction:
        try:
            return self._env.begin(db=table)
        except lmdb.ReadersFullError:
            self._env.reader_check()
            return self._env.begin(db=table)

    # ---- writing ----

    def _check_process(self) -> None:
        """LMDB's locks belong to the process that opened it. Raises Unavailable in a fork of that one."""
        if os.getpid() != self._pid:
            raise Unavailable("index: opened before a fork; open it in the process that uses it")

    def _write(self, work: Callable[[lmdb.Transaction], Any], sync: bool) -> None:
        self._check_process()
        while True:
            try:
                with self._gate.passing():
                    self._num_writes += 1
                    if self._num_writes % _CHECK_EVERY == 1:
                        self._env.reader_check()
                    with self._env.begin(write=True) as txn:
                        work(txn)
                    if sync:
                        self._env.sync(True)
                return
            except lmdb.MapFullError:
                if not self._env.reader_check():  # else room may have come back
                    self._grow()
            except lmdb.DiskError as error:
                raise TierFull(f"index: {error}; free space on the disk") from None
            except lmdb.Error as error:
                raise TransferError(f"index: commit failed: {error}") from None

    def _grow(self) -> None:
        with self._gate.alone():
            size = int(self._env.info()["map_size"])
            if size >= 1 << 46:
                raise Unavailable("index: the map can't grow any further")
            self._env.set_mapsize(2 * size)
            log.info("index: map grown to %d bytes", 2 * size)

    def sync(self) -> None:
        """Everything committed so far survives a power cut. Raises TransferError."""
        try:
            with self._gate.passing():
                self._env.sync(True)
        except lmdb.Error as error:
            raise TransferError(f"index: sync failed: {error}") from None

    def map_bytes(self) -> int:
        """Size of the map: an upper bound of the file, not its use."""
        return int(self._env.info()["map_size"])

    def close(self) -> None:
        """Sync and close."""
        with self._gate.alone():
            self._env.sync(True)
            self._env.close()


def _check_length(env: lmdb.Environment, folder: Path) -> None:
    """Give a file that is shorter than its last page number the full length, since reading behind its end would end the
    process (SIGBUS).

    A transaction may number pages that it never writes, because it frees them again; a killed process leaves such a
    file, and nothing is missing in it. Whether something is, reading all of it tells. Raises SetupError when it was
    cut; the file then has its old length.
    """
    needed = (int(env.info()["last_pgno"]) + 1) * int(env.stat()["psize"])
    data = folder / "data.mdb"
    found = data.stat().st_size
    if found >= needed:
        return
    os.truncate(data, needed)
    command = [sys.executable, "-m", "kvstore.tiers.probe_index", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        os.truncate(data, found)
        env.close()
        raise SetupError(f"index: {data} was cut: {found} bytes of {needed}; run `kvstore fsck --repair`")
    log.info("index: %d bytes at the end were never written; given back", needed - found)


def _entry_or_none(raw: bytes) -> Entry | None:
    if len(raw) < _PLACE.size:
        return None
    slot, size_class = _PLACE.unpack_from(raw)
    try:
        return Entry(decode_record(raw[_PLACE.size :]), Slot(slot), size_class)
    except BadRecord:
        return None
