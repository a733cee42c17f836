"""The index: groups, growth, damage."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from kvstore.core.types import KeyspaceId, Slot
from kvstore.errors import SetupError
from kvstore.testing import oracle
from kvstore.tiers.index_lmdb import BlockIndex, Entry


def entries(count: int, start: int = 0) -> list[Entry]:
    return [Entry(oracle.make_record(f"b{i}", 4, 64), Slot(i * 4096), 4096) for i in range(start, start + count)]


def test_commit_and_get(tmp_path: Path) -> None:
    index = BlockIndex.open(tmp_path)
    some = entries(10)
    index.commit(some, sync=True)
    index.commit(deletes=[some[3].key])
    found = index.get_many([e.key for e in some])
    assert found == [*some[:3], None, *some[4:]]
    index.close()
    again = BlockIndex.open(tmp_path)
    assert again.num_blocks() == 9
    assert {e.slot for e in again.scan() if isinstance(e, Entry)} == {e.slot for e in some} - {some[3].slot}
    again.close()


def test_deletes_come_before_puts(tmp_path: Path) -> None:
    """A slot that changes hands within one group: the block that is put again stays."""
    index = BlockIndex.open(tmp_path)
    [entry] = entries(1)
    index.commit([entry])
    moved = Entry(entry.record, Slot(8192), 4096)
    index.commit([moved], [entry.key])
    assert index.get_many([entry.key]) == [moved]
    index.close()


def test_map_grows_without_losing_a_write(tmp_path: Path) -> None:
    index = BlockIndex.open(tmp_path, map_bytes=64 << 10)
    for start in range(0, 4000, 500):
        index.commit(entries(500, start))
    assert index.num_blocks() == 4000
    assert index.map_bytes() > 64 << 10
    index.close()
    again = BlockIndex.open(tmp_path, map_bytes=64 << 10)
    assert again.num_blocks() == 4000
    again.close()


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """As the service sets it: a thread that comes back from LMDB may wait this long for the interpreter lock."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_map_grows_while_others_read(tmp_path: Path) -> None:
    index = BlockIndex.open(tmp_path, map_bytes=64 << 10)
    index.commit(entries(50))
    keys = [e.key for e in entries(20)]
    stop, failures = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            if None in index.get_many(keys):
                failures.append("lost")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for start in range(50, 550, 50):
        index.commit(entries(50, start))
    stop.set()
    for reader in readers:
        reader.join()
    assert not failures
    assert index.num_blocks() == 550
    index.close()


def test_scan_names_damaged_and_foreign_rows(tmp_path: Path) -> None:
    index = BlockIndex.open(tmp_path)
    some = entries(4)
    index.commit(some)
    index.close()
    with lmdb.open(str(tmp_path), max_dbs=8) as env:
        blocks = env.open_db(b"blocks")
        with env.begin(write=True, db=blocks) as txn:
            raw = some[0].record.encode()
            txn.put(some[0].key, bytes(16) + raw[:-20] + bytes(20))
            txn.put(some[1].key, b"short")
            txn.put(b"x" * 24, bytes(16) + some[2].record.encode())
    index = BlockIndex.open(tmp_path)
    found = list(index.scan())
    assert {f for f in found if isinstance(f, bytes)} == {some[0].key, some[1].key, b"x" * 24}
    assert index.get_many([some[0].key, some[2].key]) == [None, some[2]]
    index.close()


def test_scan_reports_progress(tmp_path: Path) -> None:
    index = BlockIndex.open(tmp_path)
    index.commit(entries(100))
    seen: list[tuple[int, int]] = []
    assert len(list(index.scan(lambda done, total: seen.append((done, total))))) == 100
    assert seen[-1] == (100, 100)
    index.close()


def test_small_tables(tmp_path: Path) -> None:
    index = BlockIndex.open(tmp_path)
    keyspace = KeyspaceId(bytes(32))
    index.put_keyspace(keyspace, b"encoding")
    index.put_sessions({"a": {"tip": "00", "n": 3}, "b": {"tip": "11"}})
    index.put_sessions({"b": None, "ü": {}})
    index.put_contexts({"morning": {"hashes": "ff"}})
    index.put_meta("x", b"1")
    index.close()
    again = BlockIndex.open(tmp_path)
    assert again.keyspaces() == {keyspace: b"encoding"}
    assert again.sessions() == {"a": {"tip": "00", "n": 3}, "ü": {}}
    assert again.contexts() == {"morning": {"hashes": "ff"}}
    assert (again.get_meta("x"), again.get_meta("y")) == (b"1", None)
    again.delete_keyspace(keyspace)
    assert again.keyspaces() == {}
    again.close()


def test_file_that_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"not a database" * 1000)
    with pytest.raises(SetupError, match="can't open"):
        BlockIndex.open(tmp_path)


def test_keyspaces_of_equal_hashes_do_not_meet(tmp_path: Path) -> None:
    """The same block hash in two keyspaces is two rows."""
    index = BlockIndex.open(tmp_path)
    one, two = oracle.make_record("x", 2, 64), oracle.make_record("x", 2, 64, keyspace="other")
    two = two._replace(hash=one.hash)
    index.commit([Entry(one, Slot(0), 4096), Entry(two, Slot(4096), 4096)])
    assert index.num_blocks() == 2
    index.close()
