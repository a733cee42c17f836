"""The slab: offsets to files, limits that hold, ENOSPC as an ordinary path."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.types import Slot
from kvstore.errors import InvalidField, SetupError, TierFull, TransferError
from kvstore.testing.faults import Fault, FaultPlan
from kvstore.tiers.files import OpenFile, probe_direct
from kvstore.tiers.moves import Copy, File, Memory
from kvstore.tiers.slab import Slab, segment_index
from kvstore.tiers.transfer import Priority, TransferEngine

MIB = 1 << 20


def test_slots_map_to_segments(tmp_path: Path) -> None:
    slab = Slab.open(tmp_path, 16 * MIB, 4 * MIB)
    assert slab.segments() == []
    place = slab.place(Slot(9 * MIB), MIB)
    assert (place.file.name, place.offset) == ("000002.seg", MIB)
    assert slab.segments() == [2]
    assert slab.used_bytes_on_disk() >= 4 * MIB
    slab.close()


def test_reopened_segments_are_found_and_counted(tmp_path: Path) -> None:
    slab = Slab.open(tmp_path, 16 * MIB, 4 * MIB)
    slab.place(Slot(0), 4096)
    slab.place(Slot(8 * MIB), 4096)
    used = slab.used_bytes_on_disk()
    slab.close()
    again = Slab.open(tmp_path, 16 * MIB, 4 * MIB)
    assert again.segments() == [0, 2]
    assert again.used_bytes_on_disk() == used
    again.drop_segment(2)
    again.drop_segment(3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000000.seg"]
    again.close()


def test_capacity_is_never_crossed(tmp_path: Path) -> None:
    slab = Slab.open(tmp_path, 9 * MIB, 4 * MIB)
    slab.place(Slot(0), 4096)
    slab.place(Slot(4 * MIB), 4096)
    with pytest.raises(TierFull, match="nvme_bytes"):
        slab.place(Slot(8 * MIB), 4096)
    slab.close()


def test_reserve_is_never_crossed(tmp_path: Path) -> None:
    slab = Slab.open(tmp_path, 16 * MIB, 4 * MIB, reserve_bytes=1 << 60)
    with pytest.raises(TierFull, match="nvme_reserve_bytes"):
        slab.place(Slot(0), 4096)
    assert list(tmp_path.iterdir()) == []
    slab.close()


def test_full_disk_when_a_segment_is_made(tmp_path: Path) -> None:
    plan = FaultPlan()
    slab = Slab.open(tmp_path, 16 * MIB, 4 * MIB, faults=plan)
    plan.next_faults("allocate", [Fault.ENOSPC, Fault.EIO])
    with pytest.raises(TierFull, match="free space"):
        slab.place(Slot(0), 4096)
    with pytest.raises(TransferError):
        slab.place(Slot(0), 4096)
    assert list(tmp_path.iterdir()) == []
    slab.place(Slot(0), 4096)
    slab.close()


def test_sync_reports_failure(tmp_path: Path) -> None:
    plan = FaultPlan()
    slab = Slab.open(tmp_path, 16 * MIB, 4 * MIB, faults=plan)
    slab.place(Slot(0), 4096)
    slab.place(Slot(4 * MIB), 4096)
    plan.next_faults("sync", [Fault.EIO])
    with pytest.raises(TransferError, match="sync failed"):
        slab.sync([Slot(4096)])
    before = plan.num_calls["sync"]
    slab.sync([Slot(0), Slot(4096)])
    assert plan.num_calls["sync"] == before + 1
    slab.sync()
    assert plan.num_calls["sync"] == before + 3
    slab.close()


@pytest.mark.parametrize(("slot", "num_bytes"), [(-4096, 4096), (100, 4096), (4 * MIB - 4096, 8192), (0, 0)])
def test_slots_that_cannot_be(tmp_path: Path, slot: int, num_bytes: int) -> None:
    slab = Slab.open(tmp_path, 16 * MIB, 4 * MIB)
    with pytest.raises(InvalidField, match="slot"):
        slab.place(Slot(slot), num_bytes)
    slab.close()


def test_missing_segment_is_an_error_for_readers(tmp_path: Path) -> None:
    slab = Slab.open(tmp_path, 16 * MIB, 4 * MIB)
    with pytest.raises(TransferError, match="isn't on disk"):
        slab.place(Slot(0), 4096, make=False)
    slab.close()


@pytest.mark.parametrize("size", [0, 100, 4 * MIB - 1, 5 * MIB])
def test_segments_of_wrong_length_get_it_back(tmp_path: Path, size: int) -> None:
    (tmp_path / "000001.seg").write_bytes(bytes(size))
    slab = Slab.open(tmp_path, 16 * MIB, 4 * MIB)
    assert slab.segments() == [1]
    assert (tmp_path / "000001.seg").stat().st_size == 4 * MIB
    slab.close()


@pytest.mark.parametrize(("capacity", "segment"), [(1, 4 * MIB), (16 * MIB, 5000), (16 * MIB, 0)])
def test_sizes_that_cannot_be(tmp_path: Path, capacity: int, segment: int) -> None:
    with pytest.raises(SetupError, match="segment"):
        Slab.open(tmp_path, capacity, segment)


def test_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="give a directory"):
        Slab.open(tmp_path / "file" / "slab", 16 * MIB, 4 * MIB)


def test_exported_descriptors_read_and_do_not_write(tmp_path: Path) -> None:
    slab, engine = Slab.open(tmp_path, 16 * MIB, 4 * MIB), TransferEngine()
    source = np.arange(8192, dtype=np.uint64).view(np.uint8)
    engine.submit(
        [Copy(Memory(source), slab.place(Slot(4 * MIB), len(source)), len(source), 4096)], Priority.WRITE
    ).wait(9)
    assert slab.export_fd(0) is None
    fd = slab.export_fd(1)
    assert fd is not None
    file = OpenFile.adopt(fd, "passed")
    target = np.zeros(len(source), dtype=np.uint8)
    [result] = engine.submit([Copy(File(file, 0), Memory(target), len(source), 4096)], Priority.READ).wait(9)
    assert result.ok
    assert np.array_equal(source, target)
    with pytest.raises(OSError, match="Bad file"):
        os.write(file.fd, b"x")
    file.close()
    engine.close()
    slab.close()


def test_probe_leaves_no_file_and_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    probe_direct(tmp_path)
    assert list(tmp_path.iterdir()) == []
    caplog.clear()
    assert not probe_direct(Path("/proc"))
    assert [r.message for r in caplog.records if "buffered" in r.message]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("name", "index"), [("000012.seg", 12), ("1234567.seg", 1234567), ("12.seg", None), ("x.seg", None)]
)
def test_segment_names(name: str, index: int | None) -> None:
    assert segment_index(name) == index
