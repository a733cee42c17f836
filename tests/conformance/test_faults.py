"""Every way a disk can fail: the block is named, its neighbours live, nothing wrong is reported as good."""

from __future__ import annotations

import os
import threading

import pytest

from kvstore.core.record import Record
from kvstore.errors import ChecksumMismatch, KVStoreError, TierFull, TransferError, Unavailable
from kvstore.testing import oracle
from kvstore.testing.faults import READ_FAULTS, WRITE_FAULTS, Fault, FaultPlan
from kvstore.tiers.transfer import Copy, Memory, Priority, TransferEngine

from .conftest import WAIT_S, Bench

SLOT = 32768


def records(count: int, name: str = "b") -> list[Record]:
    return [oracle.make_record(f"{name}{i}", 8, 4096) for i in range(count)]


def plan_of(disk: Bench) -> FaultPlan:
    assert disk.plan is not None
    return disk.plan


def stored(disk: Bench, count: int) -> tuple[list[Record], list[int]]:
    wanted, slots = records(count), [i * SLOT for i in range(count)]
    assert all(r.ok for r in disk.store(wanted, slots).wait(WAIT_S))
    return wanted, slots


def test_short_reads_are_continued(disk: Bench) -> None:
    wanted, slots = stored(disk, 8)
    plan_of(disk).next_faults("read", [Fault.SHORT] * 3)
    results = disk.load(wanted, slots).wait(WAIT_S)
    assert all(r.ok for r in results)
    disk.judge(wanted, results)


def test_short_writes_are_continued(disk: Bench) -> None:
    plan_of(disk).next_faults("write", [Fault.SHORT] * 3)
    wanted, slots = stored(disk, 8)
    results = disk.load(wanted, slots).wait(WAIT_S)
    assert all(r.ok for r in results)


def test_one_bad_place_costs_one_block(disk: Bench) -> None:
    """The joined read fails, then the first block alone; its neighbours are read one by one."""
    wanted, slots = stored(disk, 4)
    plan_of(disk).next_faults("read", [Fault.EIO, Fault.EIO])
    results = disk.load(wanted, slots).wait(WAIT_S)
    assert [r.ok for r in results] == [False, True, True, True]
    assert isinstance(results[0].error, TransferError)
    disk.judge(wanted, results)


def test_full_disk_is_told_apart(disk: Bench) -> None:
    plan_of(disk).next_faults("write", [Fault.ENOSPC, Fault.ENOSPC])
    results = disk.store(records(3), [0, SLOT, 2 * SLOT]).wait(WAIT_S)
    assert [type(r.error) for r in results] == [TierFull, type(None), type(None)]


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.TORN])
def test_silent_damage_while_writing_shows_at_the_read(disk: Bench, fault: Fault) -> None:
    wanted = records(4)
    plan_of(disk).next_faults("write", [fault])
    assert all(r.ok for r in disk.store(wanted, [i * SLOT for i in range(4)]).wait(WAIT_S))
    results = disk.load(wanted, [i * SLOT for i in range(4)]).wait(WAIT_S)
    assert any(isinstance(r.error, ChecksumMismatch) for r in results)
    disk.judge(wanted, results)


def test_flip_while_reading(disk: Bench) -> None:
    wanted, slots = stored(disk, 4)
    plan_of(disk).next_faults("read", [Fault.FLIP])
    results = disk.load(wanted, slots).wait(WAIT_S)
    assert [r.ok for r in results].count(False) == 1
    assert all(r.ok for r in disk.load(wanted, slots).wait(WAIT_S))


def test_cut_file(disk: Bench) -> None:
    wanted, slots = stored(disk, 4)
    place = disk.away(0, SLOT)
    assert not isinstance(place, Memory)
    os.truncate(f"/proc/self/fd/{place.file.fd}", 2 * SLOT + 100)
    results = disk.load(wanted, slots).wait(WAIT_S)
    assert [r.ok for r in results] == [True, True, False, False]
    assert "short read" in str(results[3].error)
    disk.judge(wanted, results)


def test_random_damage(disk: Bench) -> None:
    """Hundreds of faults of all kinds; what is reported good is right."""
    plan = plan_of(disk)
    plan._rates["read"] = dict.fromkeys(READ_FAULTS, 0.05)
    plan._rates["write"] = dict.fromkeys(WRITE_FAULTS, 0.05)
    good = 0
    for turn in range(60):
        wanted, slots = records(16, f"{turn}/"), [i * SLOT for i in range(16)]
        disk.store(wanted, slots).wait(WAIT_S)
        results = disk.load(wanted, slots).wait(WAIT_S)
        disk.judge(wanted, results)
        good += sum(r.ok for r in results)
    assert plan.num_injected > 50
    assert good > 0


def test_waiting_is_bounded(disk: Bench) -> None:
    """A disk that doesn't answer: the waiter gives up, the memory stays in use until the disk wakes up."""
    plan = plan_of(disk)
    wanted, slots = stored(disk, 1)
    plan.next_faults("read", [Fault.STALL])
    transfer = disk.load(wanted, slots)
    assert plan.stalled.acquire(timeout=WAIT_S)
    with pytest.raises(Unavailable, match="isn't through"):
        transfer.wait(0.01)
    assert not transfer.done()
    plan.release()
    results = transfer.wait(WAIT_S)
    disk.judge(wanted, results)


def test_cancel_drops_what_has_not_started(disk: Bench) -> None:
    plan = plan_of(disk)
    engine = TransferEngine(1)
    slots = stored(disk, 8)[1][::2]  # gaps between them, so they aren't joined
    oracle.poison(disk.home)
    plan.next_faults("read", [Fault.STALL])
    copies = [Copy(disk.away(s, SLOT), Memory(disk.home, s), SLOT, 4096) for s in slots]
    transfer = engine.submit(copies, Priority.READ)
    assert plan.stalled.acquire(timeout=WAIT_S)
    transfer.cancel()
    plan.release()
    results = transfer.wait(WAIT_S)
    assert [r.ok for r in results] == [True] + [False] * 3
    assert all(isinstance(r.error, Unavailable) for r in results[1:])
    assert (disk.home[slots[1] :] == oracle.POISON).all()
    engine.close()


def test_reads_do_not_wait_for_writes(disk: Bench) -> None:
    """While all writes that may run are stalled and more wait, a read comes through."""
    plan = plan_of(disk)
    engine = TransferEngine(2)
    _, slots = stored(disk, 6)
    plan.next_faults("write", [Fault.STALL] * 2)
    writes = [
        engine.submit([Copy(Memory(disk.home, s), disk.away(s, SLOT), SLOT, 4096)], Priority.WRITE) for s in slots[:5]
    ]
    assert plan.stalled.acquire(timeout=WAIT_S)
    assert plan.stalled.acquire(timeout=WAIT_S)
    read = engine.submit([Copy(disk.away(slots[5], SLOT), Memory(disk.home, slots[5]), SLOT, 4096)], Priority.READ)
    assert read.wait(WAIT_S)[0].ok
    assert not any(w.done() for w in writes)
    assert engine.queued_bytes(Priority.WRITE) == 3 * SLOT
    plan.release()
    assert all(w.wait(WAIT_S)[0].ok for w in writes)
    engine.close()


def test_full_queue_refuses(disk: Bench) -> None:
    plan = plan_of(disk)
    engine = TransferEngine(1, max_queued_bytes=4 * SLOT)
    wanted, slots = stored(disk, 8)
    plan.next_faults("read", [Fault.STALL])
    copies = [
        Copy(disk.away(s, SLOT), Memory(disk.home, s), SLOT, 4096, r.checksums)
        for r, s in zip(wanted, slots, strict=True)
    ]
    running = engine.submit(copies[:1], Priority.WRITE)
    assert plan.stalled.acquire(timeout=WAIT_S)
    queued = engine.submit(copies[1:4], Priority.WRITE)
    with pytest.raises(TierFull, match="wait already"):
        engine.submit(copies[4:], Priority.WRITE)
    plan.release()
    assert all(r.ok for r in running.wait(WAIT_S) + queued.wait(WAIT_S))
    assert engine.queued_bytes(Priority.WRITE) == 0
    engine.close()


def test_errors_are_of_the_tree(disk: Bench) -> None:
    for fault in (Fault.EIO, Fault.ENOSPC):
        plan_of(disk).next_faults("write", [fault])
        [result] = disk.store(records(1), [0]).wait(WAIT_S)
        assert isinstance(result.error, KVStoreError)


def test_close_with_a_stalled_thread(disk: Bench) -> None:
    """Closing drops what waits, and doesn't wait for ever for what runs."""
    plan = plan_of(disk)
    engine = TransferEngine(1)
    _, slots = stored(disk, 2)
    plan.next_faults("read", [Fault.STALL])
    copies = [Copy(disk.away(s, SLOT), Memory(disk.home, s), SLOT, 4096) for s in slots]
    running = engine.submit(copies[:1], Priority.WRITE)
    assert plan.stalled.acquire(timeout=WAIT_S)
    queued = engine.submit(copies[1:], Priority.WRITE)
    closer = threading.Thread(target=engine.close, args=(0.01,))
    closer.start()
    assert isinstance(queued.wait(WAIT_S)[0].error, Unavailable)
    closer.join(WAIT_S)
    assert not closer.is_alive()
    plan.release()
    assert running.wait(WAIT_S)[0].ok
