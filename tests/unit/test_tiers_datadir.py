"""The data directory: one owner, versions, recovery, and what fsck finds and mends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.keyspace import Keyspace
from kvstore.core.record import NO_PARENT, Record
from kvstore.core.types import BlockHash, Slot
from kvstore.errors import SetupError
from kvstore.testing import oracle
from kvstore.tiers.datadir import DataDir
from kvstore.tiers.fsck import fsck
from kvstore.tiers.index_lmdb import BlockIndex, Entry
from kvstore.tiers.transfer import Copy, Memory, Priority, TransferEngine, checksums_of

MIB = 1 << 20
KEYSPACE = Keyspace(
    "m", "0" * 32, "1" * 32, "bfloat16", num_layers=4, num_kv_heads=2, head_dim=8, rope="none", block_tokens=16
)
SIZE = KEYSPACE.slot_bytes


def open_dir(path: Path, capacity: int = 16 * MIB) -> DataDir:
    return DataDir.open(path, capacity, segment_bytes=4 * MIB)


def chain(count: int) -> list[Record]:
    """A path of blocks, each the parent of the next."""
    found: list[Record] = []
    parent = NO_PARENT
    for depth in range(count):
        bare = oracle.make_record(f"c{depth}", KEYSPACE.num_layers, KEYSPACE.slice_bytes, depth=depth, parent=parent)
        bare = bare._replace(keyspace=KEYSPACE.id)
        payload = oracle.stream(bare, bare.payload_bytes)
        found.append(bare._replace(checksums=checksums_of(payload.data, bare.slice_bytes)))
        parent = found[-1].hash
    return found


def fill_dir(path: Path, count: int = 40) -> list[Entry]:
    data, engine = open_dir(path), TransferEngine()
    entries = [Entry(r, Slot(i * SIZE), SIZE) for i, r in enumerate(chain(count))]
    copies = [
        Copy(
            Memory(oracle.stream(e.record, e.record.payload_bytes)),
            data.slab.place(e.slot, SIZE),
            e.record.payload_bytes,
            KEYSPACE.slice_bytes,
        )
        for e in entries
    ]
    assert all(r.ok for r in engine.submit(copies, Priority.WRITE).wait(9))
    data.slab.sync()
    data.index.put_keyspace(KEYSPACE.id, KEYSPACE.encode())
    data.index.commit(entries, sync=True)
    engine.close()
    data.close()
    return entries


def test_everything_comes_back(tmp_path: Path) -> None:
    entries = fill_dir(tmp_path)
    data = open_dir(tmp_path)
    seen: list[tuple[int, int]] = []
    assert sorted(data.recover(lambda d, t: seen.append((d, t))), key=lambda e: e.slot) == entries
    assert seen[-1] == (40, 40)
    assert data.num_dropped == 0
    data.close()
    assert fsck(tmp_path).ok


def test_epochs_differ(tmp_path: Path) -> None:
    one = open_dir(tmp_path)
    first = one.boot_epoch
    one.close()
    two = open_dir(tmp_path)
    assert first != two.boot_epoch != 0
    two.close()


def test_second_owner_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    data = open_dir(tmp_path)
    for call in (lambda: open_dir(tmp_path), lambda: fsck(tmp_path)):
        with pytest.raises(SetupError, match=f"in use by process {os.getpid()}; stop it"):
            call()
    data.close()
    open_dir(tmp_path).close()


def test_lock_goes_with_the_process(tmp_path: Path) -> None:
    code = (
        "import os, signal, pathlib; from kvstore.tiers.datadir import DataDir; "
        f"d = DataDir.open(pathlib.Path({str(tmp_path)!r}), {16 * MIB}, segment_bytes={4 * MIB}); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    open_dir(tmp_path).close()


@pytest.mark.parametrize(("version", "word"), [(0, "older"), (2, "newer")])
def test_other_versions_are_refused(tmp_path: Path, version: int, word: str) -> None:
    fill_dir(tmp_path, 1)
    (tmp_path / "FORMAT").write_text(json.dumps({"format": version, "segment_bytes": 4 * MIB}))
    with pytest.raises(SetupError, match=word):
        open_dir(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": "x", "segment_bytes": 1}'])
def test_damaged_format_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "FORMAT").write_text(content)
    with pytest.raises(SetupError, match="damaged"):
        open_dir(tmp_path)


def test_payloads_without_format_are_not_taken_over(tmp_path: Path) -> None:
    fill_dir(tmp_path, 1)
    (tmp_path / "FORMAT").unlink()
    with pytest.raises(SetupError, match="no FORMAT"):
        open_dir(tmp_path)


def test_segment_size_of_the_directory_wins(tmp_path: Path) -> None:
    fill_dir(tmp_path, 1)
    data = DataDir.open(tmp_path, 64 * MIB, segment_bytes=8 * MIB)
    assert data.slab.segment_bytes == 4 * MIB
    data.close()


def test_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="can write"):
        open_dir(tmp_path / "file" / "data")


def test_recovery_drops_what_does_not_hold(tmp_path: Path) -> None:
    entries = fill_dir(tmp_path)
    data = open_dir(tmp_path)
    bad = [
        Entry(oracle.make_record("gone segment", 4, 1024), Slot(12 * MIB), SIZE),
        Entry(oracle.make_record("beyond", 4, 1024), Slot(64 * MIB), SIZE),
        Entry(oracle.make_record("too big", 64, 1024), Slot(MIB), SIZE),
        Entry(oracle.make_record("same slot", 4, 512), entries[7].slot, SIZE),
        Entry(oracle.make_record("no slot at all", 4, 512), Slot(2**64 - 4096), 2**64 - 1),
    ]
    data.index.commit(bad)
    data.close()
    data = open_dir(tmp_path)
    assert {e.slot for e in data.recover()} == {e.slot for e in entries} - {entries[7].slot}
    assert data.num_dropped == 6
    assert data.index.num_blocks() == 39
    data.close()


def test_smaller_capacity_gives_segments_back(tmp_path: Path) -> None:
    """Beyond the new limit nothing is kept, in the index or on disk."""
    data = open_dir(tmp_path)
    data.slab.place(Slot(12 * MIB), SIZE)
    data.slab.place(Slot(0), SIZE)
    [first, second] = chain(2)
    data.index.commit([Entry(first, Slot(0), SIZE), Entry(second, Slot(12 * MIB), SIZE)])
    data.close()
    data = open_dir(tmp_path, 8 * MIB)
    assert [e.slot for e in data.recover()] == [0]
    assert data.slab.segments() == [0]
    data.close()


# ---- fsck


def kinds(path: Path, repair: bool = False) -> list[str]:
    return sorted({p.kind for p in fsck(path, repair).problems})


def assert_mends(path: Path, *expected: str) -> None:
    assert kinds(path) == sorted(expected)
    assert kinds(path) == sorted(expected), "looking must not change anything"
    report = fsck(path, repair=True)
    assert "repaired" in report.lines()[-1]
    assert fsck(path).ok, fsck(path).lines()


def damage(path: Path, offset: int) -> None:
    with (path / "slab" / "000000.seg").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_fsck_finds_a_flipped_bit_and_the_blocks_behind_it(tmp_path: Path) -> None:
    fill_dir(tmp_path)
    damage(tmp_path, 20 * SIZE + 77)
    report = fsck(tmp_path)
    assert [p.kind for p in report.problems] == ["payload"] + ["orphan"] * 19
    assert_mends(tmp_path, "payload", "orphan")
    data = open_dir(tmp_path)
    assert len(list(data.recover())) == 20
    data.close()


def test_fsck_finds_cut_and_zeroed_segments(tmp_path: Path) -> None:
    fill_dir(tmp_path)
    os.truncate(tmp_path / "slab" / "000000.seg", 30 * SIZE)
    assert_mends(tmp_path, "segment", "payload")
    (tmp_path / "slab" / "000000.seg").write_bytes(bytes(4 * MIB))
    assert_mends(tmp_path, "payload")
    assert fsck(tmp_path).num_records == 0


def test_fsck_finds_a_missing_segment(tmp_path: Path) -> None:
    fill_dir(tmp_path)
    (tmp_path / "slab" / "000000.seg").unlink()
    assert_mends(tmp_path, "place")


def test_fsck_keeps_the_owner_of_a_slot_claimed_twice(tmp_path: Path) -> None:
    entries = fill_dir(tmp_path)
    index = BlockIndex.open(tmp_path / "index")
    liar = entries[3].record._replace(hash=BlockHash(b"l" * 16), checksums=bytes(32))
    index.commit([Entry(liar, entries[3].slot, SIZE)])
    index.close()
    assert_mends(tmp_path, "payload")
    assert fsck(tmp_path).num_records == 40


def test_fsck_finds_overlaps_that_verify(tmp_path: Path) -> None:
    entries = fill_dir(tmp_path)
    index = BlockIndex.open(tmp_path / "index")
    twin = entries[3].record._replace(hash=BlockHash(b"l" * 16))
    index.commit([Entry(twin, entries[3].slot, SIZE)])
    index.close()
    found = fsck(tmp_path, repair=True)
    assert "overlap" in {p.kind for p in found.problems}
    assert fsck(tmp_path).ok


def test_fsck_finds_unknown_keyspaces(tmp_path: Path) -> None:
    fill_dir(tmp_path)
    index = BlockIndex.open(tmp_path / "index")
    index.delete_keyspace(KEYSPACE.id)
    index.close()
    assert_mends(tmp_path, "keyspace")


def test_fsck_finds_stray_files(tmp_path: Path) -> None:
    fill_dir(tmp_path)
    (tmp_path / "slab" / "notes.txt").write_text("x")
    (tmp_path / "FORMAT.new").write_text("x")
    assert_mends(tmp_path, "stray")


def test_fsck_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no data directory"):
        fsck(tmp_path / "missing")
    (tmp_path / "index").mkdir()
    with pytest.raises(SetupError, match="FORMAT"):
        fsck(tmp_path)


def test_random_damage_never_survives_repair(tmp_path: Path) -> None:
    """Bits flipped all over segments: what recovery gives back afterwards is right, byte for byte."""
    fill_dir(tmp_path)
    draw = np.random.default_rng(3)
    for offset in draw.integers(0, 40 * SIZE, 6):
        damage(tmp_path, int(offset))
    fsck(tmp_path, repair=True)
    data, engine = open_dir(tmp_path), TransferEngine()
    for entry in data.recover():
        target = np.zeros(SIZE, dtype=np.uint8)
        n = entry.record.payload_bytes
        engine.submit(
            [Copy(data.slab.place(entry.slot, n), Memory(target), n, KEYSPACE.slice_bytes)], Priority.READ
        ).wait(9)
        assert oracle.verify(entry.record, target[:n]) is None
    engine.close()
    data.close()


# ---- a damaged index


def mdb(path: Path) -> Path:
    return path / "index" / "data.mdb"


@pytest.mark.parametrize("length", [4096, 8192, 40_000])
def test_a_cut_index_is_refused_and_made_anew(tmp_path: Path, length: int) -> None:
    fill_dir(tmp_path)
    os.truncate(mdb(tmp_path), length)
    with pytest.raises(SetupError, match="fsck --repair"):
        open_dir(tmp_path)
    assert "index" in kinds(tmp_path)
    fsck(tmp_path, repair=True)
    assert fsck(tmp_path).ok
    data = open_dir(tmp_path)
    assert list(data.recover()) == []
    assert data.slab.segments() == []
    data.close()


def test_what_can_still_be_read_is_kept(tmp_path: Path) -> None:
    """A rotten page in the middle of many: fsck keeps what the scan gave before it, and every named context."""
    entries = fill_dir(tmp_path, 200)
    data = open_dir(tmp_path)
    data.index.put_contexts({"morning": {"hashes": "ff"}})
    data.close()
    raw = bytearray(mdb(tmp_path).read_bytes())
    rotten = next(at for at in range(len(raw) - 4096, 0, -4096) if entries[150].record.digest in raw[at : at + 4096])
    raw[rotten + 10 : rotten + 16] = b"\xff" * 6  # the page's header: flags and bounds
    mdb(tmp_path).write_bytes(raw)
    data = open_dir(tmp_path)
    with pytest.raises(SetupError, match="fsck --repair"):
        list(data.recover())
    data.close()
    assert "index" in kinds(tmp_path, repair=True)
    assert fsck(tmp_path).ok
    data = open_dir(tmp_path)
    assert data.index.contexts() == {"morning": {"hashes": "ff"}}
    assert data.index.keyspaces() == {KEYSPACE.id: KEYSPACE.encode()}
    data.close()


def test_sockets_of_a_killed_service_are_no_strays(tmp_path: Path) -> None:
    fill_dir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "kvstore.sock"))
    assert fsck(tmp_path).ok
