"""The hand of a device pool, by the interface of the host's transfer engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import ChecksumMismatch, InvalidField, TierFull, Unavailable
from kvstore.tiers.files import OpenFile
from kvstore.tiers.transfer import Copy, File, Memory, Priority, TransferEngine, checksums_of
from kvstore_gpu import hand as hand_module
from kvstore_gpu.arena import Arena, PoolSpec
from kvstore_gpu.hand import DeviceHand
from kvstore_gpu.nvme import random_block
from kvstore_gpu.pinned import PinnedBuffer
from kvstore_gpu.streams import Copies, HostBuffer, Stream
from kvstore_gpu.testing import Behind, LateCopies, Pinning

SPEC = PoolSpec(num_slots=16, num_slices=4, slice_bytes=3000)
STRIDE, NUM_BYTES = SPEC.stride_bytes, SPEC.slot_bytes


@pytest.fixture
def arena() -> Arena:
    made = Behind.create(SPEC, backend=Pinning())
    made.tensor.fill_(0xA5)
    return made


@pytest.fixture
def hand(arena: Arena) -> Iterator[DeviceHand]:
    hand = DeviceHand(arena, num_buffers=4)
    yield hand
    hand.close()


@pytest.fixture
def dram() -> HostBuffer:
    return np.concatenate([random_block(STRIDE, i) for i in range(16)])


@pytest.fixture
def slab(tmp_path: Path, dram: HostBuffer) -> Iterator[OpenFile]:
    (tmp_path / "slab").write_bytes(dram.tobytes())
    file = OpenFile.open(tmp_path / "slab", os.O_RDWR, direct=False)
    yield file
    file.close()


def sums(dram: HostBuffer, index: int) -> bytes:
    return checksums_of(dram[index * STRIDE : index * STRIDE + NUM_BYTES].data, SPEC.slice_bytes)


def restore(arena: Arena, source: Memory | File, row: int, checksums: bytes | None = None) -> Copy:
    return Copy(source, Memory(arena.flat, row * STRIDE), NUM_BYTES, SPEC.slice_bytes, checksums)


def row_of(arena: Arena, row: int) -> np.ndarray:
    found: np.ndarray = arena.tensor[row].numpy()
    return found


def test_blocks_come_from_dram_and_are_verified(arena: Arena, hand: DeviceHand, dram: HostBuffer) -> None:
    copies = [restore(arena, Memory(dram, i * STRIDE), 15 - i, sums(dram, i)) for i in range(10)]
    copies[3].checksums = sums(dram, 4)
    results = hand.submit(copies, Priority.READ, 5.0).wait(10)
    assert [i for i, result in enumerate(results) if not result.ok] == [3]
    assert isinstance(results[3].error, ChecksumMismatch)
    for i in range(10):
        assert np.array_equal(row_of(arena, 15 - i)[:NUM_BYTES], dram[i * STRIDE :][:NUM_BYTES])
        assert (row_of(arena, 15 - i)[NUM_BYTES:] == 0xA5).all()


def test_blocks_go_to_dram_with_their_checksums(arena: Arena, hand: DeviceHand, dram: HostBuffer) -> None:
    hand.submit([restore(arena, Memory(dram, i * STRIDE), i) for i in range(6)], Priority.READ).wait(10)
    target = np.zeros(6 * STRIDE, dtype=np.uint8)
    copies = [
        Copy(
            Memory(arena.flat, i * STRIDE), Memory(target, i * STRIDE), NUM_BYTES, SPEC.slice_bytes, want_checksums=True
        )
        for i in range(6)
    ]
    results = hand.submit(copies, Priority.WRITE).wait(10)
    assert [result.checksums for result in results] == [sums(dram, i) for i in range(6)]
    for i in range(6):
        assert np.array_equal(target[i * STRIDE :][:NUM_BYTES], dram[i * STRIDE :][:NUM_BYTES])


def test_blocks_come_from_a_slab_and_from_dram_in_one_batch(
    arena: Arena, hand: DeviceHand, dram: HostBuffer, slab: OpenFile
) -> None:
    order = np.random.default_rng(0).permutation(16).tolist()
    copies = [
        restore(arena, File(slab, i * STRIDE) if i % 5 else Memory(dram, i * STRIDE), row, sums(dram, i))
        for row, i in enumerate(order)
    ]
    assert all(result.ok for result in hand.submit(copies, Priority.READ).wait(10))
    for row, i in enumerate(order):
        assert np.array_equal(row_of(arena, row)[:NUM_BYTES], dram[i * STRIDE :][:NUM_BYTES])


def test_what_another_restore_has_read_is_copied_within_the_pool(
    arena: Arena, hand: DeviceHand, dram: HostBuffer
) -> None:
    hand.submit([restore(arena, Memory(dram, i * STRIDE), i) for i in range(4)], Priority.READ).wait(10)
    copies = [restore(arena, Memory(arena.flat, i * STRIDE), 8 + i, sums(dram, i)) for i in range(4)]
    copies[2].checksums = sums(dram, 9)
    results = hand.submit(copies, Priority.READ).wait(10)
    assert [i for i, result in enumerate(results) if not result.ok] == [2]
    for i in range(4):
        assert np.array_equal(row_of(arena, 8 + i)[:NUM_BYTES], dram[i * STRIDE :][:NUM_BYTES])


class Listener:
    """Looks at the pool as soon as it's told that layers are there."""

    def __init__(self, arena: Arena, rows: list[int]) -> None:
        self.arena, self.rows = arena, rows
        self.told: list[int] = []
        self.seen: list[np.ndarray] = []
        self.waits: list[Callable[[], None]] = []
        self.complete = threading.Event()

    def __call__(self, num_layers: int, ready: Callable[[], None]) -> None:
        self.told.append(num_layers)
        self.waits.append(ready)
        if num_layers == SPEC.num_slices:
            self.complete.set()

    def look(self, group: int) -> np.ndarray:
        """What the rows hold of a group's layers, when those are said to be there."""
        self.waits[group]()
        first, last = ([0, *self.told][group + at] * SPEC.slice_bytes for at in (0, 1))
        return np.stack([row_of(self.arena, row)[first:last].copy() for row in self.rows])


@pytest.mark.parametrize(("layers", "told"), [(1, [1, 2, 3, 4]), (3, [3, 4]), (9, [4])])
def test_blocks_come_by_layers_and_are_verified(
    layers: int, told: list[int], dram: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_module, "GROUP_BYTES", layers * SPEC.slice_bytes)
    for seed in range(20):
        backend = LateCopies(seed)
        backend.rest.clear()
        arena = Behind.create(SPEC, backend=backend)
        arena.tensor.fill_(0xA5)
        hand = DeviceHand(arena, num_buffers=2)
        rows = np.random.default_rng(seed).permutation(16)[:5].tolist()
        copies = [restore(arena, Memory(dram, i * STRIDE), row, sums(dram, i)) for i, row in enumerate(rows)]
        copies[3].checksums = sums(dram, 3)[:-8] + bytes(8)  # the last layer
        listener, want = Listener(arena, rows), dram.reshape(16, STRIDE)[:5, :NUM_BYTES]
        moving = hand.submit_by_layers(copies, listener, 20.0)
        assert listener.complete.wait(10)
        assert all((row_of(arena, row) == 0xA5).all() for row in rows)  # it heard of the copies, and none has begun
        seen = [listener.look(group) for group in range(len(told))]
        assert not moving.done()
        backend.rest.set()
        results = moving.wait(10)
        hand.close()
        assert listener.told == told
        assert np.array_equal(np.concatenate(seen, axis=1), want)
        assert [i for i, result in enumerate(results) if not result.ok] == [3]
        assert "slices [3] differ" in str(results[3].error)


def test_blocks_in_memory_that_must_be_staged_come_whole(arena: Arena, hand: DeviceHand, dram: HostBuffer) -> None:
    listener = Listener(arena, [0])
    assert hand.submit_by_layers([restore(arena, Memory(dram), 0, sums(dram, 0))], listener).wait(10)[0].ok
    assert listener.told == []
    arena.use_pinned(PinnedBuffer(dram))
    assert hand.submit_by_layers([restore(arena, Memory(dram), 0, sums(dram, 0))], listener).wait(10)[0].ok
    assert listener.told == [4]


def test_blocks_by_layers_lie_in_memory_and_have_checksums(
    arena: Arena, hand: DeviceHand, dram: HostBuffer, slab: OpenFile
) -> None:
    good = restore(arena, Memory(dram), 0, sums(dram, 0))
    for bad in (restore(arena, Memory(dram), 1), restore(arena, File(slab, 0), 1, sums(dram, 0))):
        with pytest.raises(InvalidField):
            hand.submit_by_layers([good, bad], Listener(arena, []))
    results = hand.submit_by_layers([good], Listener(arena, []), -1.0).wait(10)
    assert isinstance(results[0].error, Unavailable)


def test_a_device_that_fails_between_layers_ends_the_transfer(
    dram: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_module, "GROUP_BYTES", SPEC.slice_bytes)
    backend = LateCopies(0)
    arena = Behind.create(SPEC, backend=backend)
    hand = DeviceHand(arena, num_buffers=2)
    copied, calls = backend.copy, list[int]()

    def copy(stream: Stream, copies: Copies) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("lost")
        copied(stream, copies)

    monkeypatch.setattr(backend, "copy", copy)
    listener = Listener(arena, [0])
    results = hand.submit_by_layers([restore(arena, Memory(dram), 0, sums(dram, 0))], listener).wait(10)
    assert "lost" in str(results[0].error)
    assert listener.told == [1, 2]
    assert not any(stream.queue for stream in backend._streams)  # nothing runs into the slot any more
    hand.close()


def test_a_short_slab_and_rotten_bytes_fail_alone(
    arena: Arena, hand: DeviceHand, dram: HostBuffer, slab: OpenFile
) -> None:
    os.ftruncate(slab.fd, 8 * STRIDE)
    os.pwrite(slab.fd, b"rot", 2 * STRIDE + 4000)
    copies = [restore(arena, File(slab, i * STRIDE), i, sums(dram, i)) for i in range(10)]
    results = hand.submit(copies, Priority.READ).wait(10)
    assert [i for i, result in enumerate(results) if not result.ok] == [2, 8, 9]
    assert "slices [1] differ" in str(results[2].error)


def test_a_passed_deadline_drops_the_batch(arena: Arena, hand: DeviceHand, dram: HostBuffer) -> None:
    results = hand.submit([restore(arena, Memory(dram), 0)], Priority.READ, -1.0).wait(10)
    assert isinstance(results[0].error, Unavailable)
    assert (row_of(arena, 0) == 0xA5).all()


class Gate(TransferEngine):
    """File reads that wait to be let through."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def submit(self, copies, priority, deadline_s=None):  # type: ignore[no-untyped-def]
        self.entered.set()
        assert self.go.wait(10)
        return super().submit(copies, priority, deadline_s)


def test_reads_pass_writes_and_the_queue_is_bounded(arena: Arena, dram: HostBuffer, slab: OpenFile) -> None:
    gate = Gate()
    hand = DeviceHand(arena, num_buffers=2, max_queued_bytes=3 * NUM_BYTES, files=gate)
    order = list[str]()
    busy = hand.submit([restore(arena, File(slab, 0), 0)], Priority.READ)
    assert gate.entered.wait(10)
    out = Copy(Memory(arena.flat, 0), Memory(dram, 0), NUM_BYTES, SPEC.slice_bytes)
    write = hand.submit([out], Priority.WRITE)
    write.add_done_callback(lambda _: order.append("write"))
    read = hand.submit([restore(arena, Memory(dram, STRIDE), 1)], Priority.READ)
    read.add_done_callback(lambda _: order.append("read"))
    with pytest.raises(TierFull):
        hand.submit([out], Priority.WRITE)
    gate.go.set()
    assert all(result.ok for transfer in (busy, read, write) for result in transfer.wait(10))
    hand.close()
    assert order == ["read", "write"]
    with pytest.raises(Unavailable):
        hand.submit([out], Priority.WRITE)
    gate.close()


class Barred(Pinning):
    """A device that only its maker's thread can use."""

    def enter(self) -> None:
        raise RuntimeError("no context")


def test_a_thread_without_a_device_says_so(dram: HostBuffer) -> None:
    barred = Behind.create(SPEC, backend=Barred())
    hand = DeviceHand(barred, num_buffers=2)
    result = hand.submit([restore(barred, Memory(dram), 0)], Priority.READ).wait(10)[0]
    assert "no context" in str(result.error)
    hand.close()


def test_places_that_cant_be_are_refused(arena: Arena, hand: DeviceHand, dram: HostBuffer, slab: OpenFile) -> None:
    pool = Memory(arena.flat, 0)
    for copy in (
        Copy(Memory(dram), Memory(dram), NUM_BYTES, SPEC.slice_bytes),
        Copy(Memory(arena.flat, 100), pool, NUM_BYTES, SPEC.slice_bytes),
        Copy(pool, Memory(arena.flat, 16 * STRIDE), NUM_BYTES, SPEC.slice_bytes),
        Copy(Memory(dram), pool, STRIDE, SPEC.slice_bytes),
        Copy(Memory(dram), Memory(arena.flat, 100), NUM_BYTES, SPEC.slice_bytes),
        Copy(Memory(dram), Memory(arena.flat, 16 * STRIDE), NUM_BYTES, SPEC.slice_bytes),
    ):
        with pytest.raises(InvalidField):
            hand.submit([copy], Priority.READ)
    results = hand.submit([Copy(pool, File(slab, 0), NUM_BYTES, SPEC.slice_bytes)], Priority.WRITE).wait(10)
    assert isinstance(results[0].error, InvalidField)


def test_the_stand_in_for_device_memory_is_no_memory(arena: Arena, dram: HostBuffer) -> None:
    with pytest.raises(ValueError, match="read-only"):
        arena.flat[0] = 1
    engine = TransferEngine()
    with pytest.raises(InvalidField):
        engine.submit([Copy(Memory(dram), Memory(arena.flat), NUM_BYTES, SPEC.slice_bytes)], Priority.READ)
    engine.close()
    host = Arena.create(SPEC)
    host.flat[5] = 9
    assert int(host.tensor[0, 5]) == 9
