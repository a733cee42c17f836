"""What every tier must do, whatever it's made of."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvstore.core.record import Record
from kvstore.errors import ChecksumMismatch, InvalidField, Unavailable
from kvstore.testing import oracle
from kvstore.tiers.transfer import Copy, File, Memory, Priority, TransferEngine

from .conftest import MAX_SLOT_BYTES, NUM_SLOTS, WAIT_S, Bench, Shape

SHAPES = {
    "whole-pages": Shape(32, 4096),
    "odd-end": Shape(30, 1000),
    "one-small-slice": Shape(1, 500),
    "large-slices": Shape(1, 256 << 10),
    "many-small-slices": Shape(61, 576),
}


def records(shape: Shape, count: int) -> list[Record]:
    return [oracle.make_record(f"{shape}/{i}", shape.num_slices, shape.slice_bytes) for i in range(count)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("order", ["adjacent", "backward", "scattered"])
def test_round_trip(bench: Bench, shape: Shape, order: str) -> None:
    wanted = records(shape, 20)
    slots = _slots(order, shape.slot_bytes, 20)
    assert all(r.ok for r in bench.store(wanted, slots).wait(WAIT_S))
    results = bench.load(wanted, slots).wait(WAIT_S)
    assert all(r.ok for r in results)
    bench.judge(wanted, results)


def _slots(order: str, slot_bytes: int, count: int) -> list[int]:
    adjacent = [i * slot_bytes for i in range(count)]
    # Slots never cross a segment of 4 MiB: skip to the next one where they would.
    adjacent = [
        s
        for s in range(0, NUM_SLOTS * MAX_SLOT_BYTES, slot_bytes)
        if s // (4 << 20) == (s + slot_bytes - 1) // (4 << 20)
    ]
    if order == "adjacent":
        return adjacent[:count]
    if order == "backward":
        return adjacent[:count][::-1]
    return [adjacent[i] for i in np.random.default_rng(7).permutation(len(adjacent))[:count]]


@pytest.mark.parametrize("shift", [1, 64, 512, 4095])
def test_misaligned_memory(bench: Bench, shift: int) -> None:
    shape = SHAPES["odd-end"]
    wanted, slots = records(shape, 8), _slots("adjacent", shape.slot_bytes, 8)
    assert all(r.ok for r in bench.store(wanted, slots, shift=shift).wait(WAIT_S))
    results = bench.load(wanted, slots, shift=shift).wait(WAIT_S)
    assert all(r.ok for r in results)
    bench.judge(wanted, results, shift=shift)


def test_foreign_bytes_are_refused(bench: Bench) -> None:
    """Two blocks swapped in the tier: each is whole, neither is what was asked for."""
    wanted, slots = records(Shape(8, 4096), 3), [0, 32768, 65536]
    assert all(r.ok for r in bench.store(wanted, slots).wait(WAIT_S))
    results = bench.load(wanted, [slots[1], slots[0], slots[2]]).wait(WAIT_S)
    assert [type(r.error) for r in results] == [ChecksumMismatch, ChecksumMismatch, type(None)]
    bench.judge(wanted, results)


def test_wrong_source_is_named(bench: Bench) -> None:
    """Bytes that differ from their record don't become a good copy."""
    [wanted] = records(Shape(4, 4096), 1)
    oracle.fill(wanted, bench.home[: wanted.payload_bytes])
    bench.home[2 * 4096 + 17] ^= 4
    copy = Copy(Memory(bench.home), bench.away(0, 16384), 16384, 4096, wanted.checksums)
    [result] = bench.engine.submit([copy], Priority.WRITE).wait(WAIT_S)
    assert isinstance(result.error, ChecksumMismatch)
    assert "slice 2" in str(result.error)


def test_checksums_are_computed(bench: Bench) -> None:
    wanted, slots = records(Shape(30, 1000), 4), _slots("adjacent", 32768, 4)
    for position, record in enumerate(wanted):
        oracle.fill(record, bench.home[position * MAX_SLOT_BYTES :][: record.payload_bytes])
    copies = [
        Copy(Memory(bench.home, i * MAX_SLOT_BYTES), bench.away(slot, 30000), 30000, 1000, None, True)
        for i, slot in enumerate(slots)
    ]
    results = bench.engine.submit(copies, Priority.WRITE).wait(WAIT_S)
    assert [r.checksums for r in results] == [r.checksums for r in wanted]


def test_many_threads(bench: Bench) -> None:
    """Four threads with their own slots and memory, at the same time."""
    shape = Shape(8, 4096)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            memory = np.zeros(shape.slot_bytes, dtype=np.uint8)
            for turn in range(20):
                record = oracle.make_record(f"{number}/{turn}", 8, 4096)
                place = bench.away(number * shape.slot_bytes, shape.payload_bytes)
                oracle.fill(record, memory)
                store = Copy(Memory(memory), place, shape.payload_bytes, 4096, record.checksums)
                assert bench.engine.submit([store], Priority.WRITE).wait(WAIT_S)[0].ok
                oracle.poison(memory)
                load = Copy(place, Memory(memory), shape.payload_bytes, 4096, record.checksums)
                assert bench.engine.submit([load], Priority.READ).wait(WAIT_S)[0].ok
                assert oracle.verify(record, memory) is None
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_deadline_in_the_past(bench: Bench) -> None:
    wanted = records(Shape(8, 4096), 4)
    results = bench.load(wanted, [0, 32768, 65536, 98304], deadline_s=-1).wait(WAIT_S)
    assert all(isinstance(r.error, Unavailable) for r in results)
    assert (bench.home == oracle.POISON).all()


def test_empty_batch_is_done(bench: Bench) -> None:
    transfer = bench.engine.submit([], Priority.READ)
    assert transfer.done()
    assert transfer.wait(0) == []


def test_callback_runs_once(bench: Bench) -> None:
    wanted = records(Shape(8, 4096), 4)
    seen: list[bool] = []
    called = threading.Event()
    transfer = bench.store(wanted, [0, 32768, 65536, 98304])
    transfer.add_done_callback(lambda t: seen.append(t.done()))
    transfer.add_done_callback(lambda _t: called.set())
    assert called.wait(WAIT_S)
    transfer.add_done_callback(lambda t: seen.append(t.done()))
    assert seen == [True, True]


@pytest.mark.parametrize(
    ("num_bytes", "slice_bytes", "checksums", "offset"),
    [
        (0, 4096, None, 0),
        (4096, 0, None, 0),
        (4096, 4000, None, 0),
        (4096, 4096, b"1234567", 0),
        (4096, 4096, None, -1),
    ],
)
def test_bad_copies_are_refused(
    bench: Bench, num_bytes: int, slice_bytes: int, checksums: bytes | None, offset: int
) -> None:
    copy = Copy(bench.away(0, 4096), Memory(bench.home, offset), num_bytes, slice_bytes, checksums)
    with pytest.raises(InvalidField, match="copies"):
        bench.engine.submit([copy], Priority.READ)


def test_memory_of_other_kinds_is_refused(bench: Bench) -> None:
    for array in (np.zeros(4096, np.float32), np.zeros((64, 64), np.uint8), np.zeros(8192, np.uint8)[::2]):
        with pytest.raises(InvalidField, match="array"):
            bench.engine.submit([Copy(bench.away(0, 4096), Memory(array), 4096, 4096)], Priority.READ)  # type: ignore[arg-type]


def test_closed_engine_refuses() -> None:
    engine = TransferEngine()
    engine.close()
    memory = np.zeros(8192, dtype=np.uint8)
    with pytest.raises(Unavailable):
        engine.submit([Copy(Memory(memory), Memory(memory, 4096), 4096, 4096)], Priority.READ)


def test_file_to_file_is_refused(disk: Bench) -> None:
    place = disk.away(0, 4096)
    assert isinstance(place, File)
    with pytest.raises(InvalidField, match="file to file"):
        disk.engine.submit([Copy(place, place, 4096, 4096)], Priority.READ)
