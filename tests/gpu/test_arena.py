"""The pool, its copies and their order; order against a backend that delays and reorders what events leave free."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_gpu.arena import Arena, PoolSpec
from kvstore_gpu.errors import DriverError, LayoutError, Unavailable
from kvstore_gpu.pinned import PinnedBuffer, StagingRing
from kvstore_gpu.streams import Copies, CudaBackend, HostBuffer, InlineBackend, move_on_host
from kvstore_gpu.testing import FakeBackend

SPEC = PoolSpec(num_slots=6, num_slices=3, slice_bytes=3000)
SEEDS = range(60)


def buffers(count: int, seed: int = 0, num_bytes: int = SPEC.slot_bytes) -> list[HostBuffer]:
    data = np.random.default_rng(seed).integers(0, 256, (count, num_bytes), dtype=np.uint8)
    return [data[i] for i in range(count)]


def test_pool_has_aligned_strides_and_a_host_view() -> None:
    arena = Arena.create(SPEC)
    assert (arena.num_slots, arena.slot_bytes, arena.stride_bytes) == (6, 9000, 12288)
    assert (arena.num_slices, arena.slice_bytes) == (3, 3000)
    assert arena.tensor.data_ptr() % 4096 == 0
    view = arena.host_view()
    assert view is not None
    assert view.shape == (6, 12288)
    view[2, 5] = 77
    assert int(arena.tensor[2, 5]) == 77
    with pytest.raises(Unavailable, match="host memory"):
        arena.export_ipc()
    arena.close()
    arena.close()


def test_blocks_go_in_and_out() -> None:
    arena = Arena.create(SPEC)
    arena.poison([arena.slot(i) for i in range(6)])
    sent = buffers(3)
    arena.copy_in(zip(sent, map(arena.slot, (4, 1, 2)), strict=True)).wait()
    assert np.array_equal(arena.checksums([arena.slot(1)]), arena.checksums([arena.slot(1)]))
    got = [np.zeros(SPEC.stride_bytes, dtype=np.uint8) for _ in range(3)]
    arena.copy_out(zip(map(arena.slot, (4, 1, 2)), got, strict=True)).wait()
    for source, target in zip(sent, got, strict=True):
        assert np.array_equal(target[: SPEC.slot_bytes], source)
        assert (target[SPEC.slot_bytes :] == 0xA5).all()
    assert (arena.tensor[0] == 0xA5).all()
    assert (arena.tensor[5] == 0xA5).all()


@pytest.mark.parametrize("slot", [-12288, 4096, 6 * 12288])
def test_wrong_slots_are_refused(slot: int) -> None:
    with pytest.raises(LayoutError, match="no slot begins"):
        Arena.create(SPEC).copy_in([(buffers(1)[0], slot)])  # type: ignore[list-item]


def test_wrong_buffers_are_refused() -> None:
    arena = Arena.create(SPEC)
    with pytest.raises(LayoutError, match="host buffer of 12 bytes"):
        arena.copy_in([(np.zeros(12, dtype=np.uint8), arena.slot(0))])
    with pytest.raises(LayoutError, match="same bytes"):
        arena.copy_in([(buffer, arena.slot(1)) for buffer in buffers(2)])
    with pytest.raises(LayoutError, match="contiguous"):
        arena.copy_in([(np.zeros((SPEC.slot_bytes, 2), dtype=np.uint8)[:, 0], arena.slot(0))])


@given(st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_coalescing_moves_the_same_bytes_in_no_more_copies(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 12))
    sources = data.draw(st.lists(st.integers(0, 15), min_size=count, max_size=count))
    targets = data.draw(st.permutations(range(16)))[:count]
    memory = np.random.default_rng(count).integers(0, 256, (16, 8), dtype=np.uint8)
    plain, joined = np.zeros_like(memory), np.zeros_like(memory)

    def batch(into: HostBuffer) -> Copies:
        ends = (np.array(targets, dtype=np.int64) * 8 + into.ctypes.data, np.array(sources, dtype=np.int64) * 8)
        return Copies(ends[0], ends[1] + memory.ctypes.data, np.full(count, 8, dtype=np.int64))

    move_on_host(batch(plain))
    runs = batch(joined).coalesced()
    move_on_host(runs)
    assert np.array_equal(plain, joined)
    assert runs.num_bytes == 8 * count
    pairs = set(zip(targets, sources, strict=True))
    assert len(runs.sizes) == sum((t - 1, s - 1) not in pairs for t, s in pairs)


def test_adjacent_slots_become_one_copy() -> None:
    arena = Arena.create(SPEC)
    whole = np.zeros((4, SPEC.stride_bytes), dtype=np.uint8)
    base = arena.tensor.data_ptr()
    targets = base + np.array([2, 0, 1, 5], dtype=np.int64) * SPEC.stride_bytes
    sources = whole.ctypes.data + np.array([2, 0, 1, 3], dtype=np.int64) * SPEC.stride_bytes
    runs = Copies(targets, sources, np.full(4, SPEC.stride_bytes, dtype=np.int64)).coalesced()
    assert runs.sizes.tolist() == [3 * SPEC.stride_bytes, SPEC.stride_bytes]


def write(arena: Arena, slot: int, value: HostBuffer) -> Callable[[], None]:
    def work() -> None:
        arena.tensor[slot, : SPEC.slot_bytes] = torch.from_numpy(value)

    return work


def offload_then_overwrite(seed: int, staged: bool, honour_waits: bool = True) -> bool:
    """Compute writes, blocks go out, compute overwrites. True when the host got what was written first."""
    backend = FakeBackend(seed, needs_pinned=staged, honour_waits=honour_waits)
    arena = Arena.create(SPEC, backend=backend)
    arena._ring = StagingRing(backend, num_chunks=2, chunk_bytes=4000)
    first, second = buffers(6, seed), buffers(6, seed + 1)
    got = [np.zeros(SPEC.slot_bytes, dtype=np.uint8) for _ in range(6)]
    compute = backend.compute_stream()
    for slot in range(6):
        compute.run(write(arena, slot, first[slot]))
    handle = arena.copy_out((arena.slot(i), got[i]) for i in range(6))
    handle.before_compute()
    for slot in range(6):
        compute.run(write(arena, slot, second[slot]))
    handle.wait()
    backend.drain()
    return all(np.array_equal(a, b) for a, b in zip(got, first, strict=True))


def reuse_then_read(seed: int, staged: bool, honour_waits: bool = True) -> bool:
    """A slot goes out, another block comes into the same slot, compute reads it. True when both got the right bytes."""
    backend = FakeBackend(seed, needs_pinned=staged, honour_waits=honour_waits)
    arena = Arena.create(SPEC, backend=backend)
    arena._ring = StagingRing(backend, num_chunks=2, chunk_bytes=4000)
    old, new = buffers(6, seed), buffers(6, seed + 1)
    compute, seen = backend.compute_stream(), list[HostBuffer]()
    for slot in range(6):
        compute.run(write(arena, slot, old[slot]))

    def look(slot: int) -> None:
        seen.append(arena.tensor[slot, : SPEC.slot_bytes].numpy().copy())

    kept = [np.zeros(SPEC.slot_bytes, dtype=np.uint8) for _ in range(6)]
    out = arena.copy_out((arena.slot(i), kept[i]) for i in range(6))
    into = arena.copy_in(((new[i], arena.slot(i)) for i in range(6)), after=[out])
    into.before_compute()
    for slot in range(6):
        compute.run(partial(look, slot))
    into.wait()
    out.wait()
    backend.drain()
    return all(np.array_equal(*p) for p in zip(kept + seen, old + new, strict=True))


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("scene", [offload_then_overwrite, reuse_then_read])
def test_events_order_copies_and_compute(scene: Callable[..., bool], staged: bool) -> None:
    assert all(scene(seed, staged) for seed in SEEDS)


@pytest.mark.parametrize("scene", [offload_then_overwrite, reuse_then_read])
def test_the_fake_backend_finds_missing_order(scene: Callable[..., bool]) -> None:
    assert not all(scene(seed, False, honour_waits=False) for seed in SEEDS)


def layered(
    seed: int, layers_per_event: int, honour_waits: bool = True, staged: bool = False
) -> tuple[bool, list[tuple[int, int]]]:
    """Restore three blocks, one of them damaged in layer 1; compute reads each layer as soon as its event allows."""
    backend = FakeBackend(seed, needs_pinned=staged, honour_waits=honour_waits)
    arena = Arena.create(SPEC, backend=backend)
    arena._ring = StagingRing(backend, num_chunks=2, chunk_bytes=4000)
    arena.tensor.fill_(0xA5)
    sources = buffers(3, seed)
    want = Arena.create(SPEC)
    want.copy_in((sources[i], want.slot(i)) for i in range(3)).wait()
    expected = want.checksums([want.slot(i) for i in range(3)])
    sources[1][SPEC.slice_bytes + 10] ^= 1
    slots = [arena.slot(i) for i in (5, 0, 1)]
    restore = arena.restore_layers(list(zip(sources, slots, strict=True)), expected, layers_per_event)
    seen = list[bool]()

    def read(layer: int) -> None:
        part = slice(layer * SPEC.slice_bytes, (layer + 1) * SPEC.slice_bytes)
        pairs = zip((5, 0, 1), sources, strict=True)
        seen.append(all(np.array_equal(arena.tensor[row, part].numpy(), source[part]) for row, source in pairs))

    for layer in range(3):
        restore.before_layer(layer)
        backend.compute_stream().run(partial(read, layer))
    bad = restore.finish()
    backend.drain()
    return all(seen) and len(seen) == 3, bad


@pytest.mark.parametrize("layers_per_event", [1, 2, 3])
@pytest.mark.parametrize("staged", [False, True])
def test_each_layer_waits_for_its_own_event_and_damage_is_named(layers_per_event: int, staged: bool) -> None:
    for seed in SEEDS:
        assert layered(seed, layers_per_event, staged=staged) == (True, [(1, 1)])


def thrown_away(seed: int, honour_waits: bool = True) -> bool:
    """Compute over layers on their way, into slot 2; nobody wants the result, and slot 2 is filled with another block
    while that compute is still enqueued. True when that block is what lies there."""
    backend = FakeBackend(seed, honour_waits=honour_waits)
    arena = Arena.create(SPEC, backend=backend)
    mine, other = buffers(2, seed)
    compute = backend.compute_stream()
    restore = arena.restore_layers([(mine, arena.slot(0))])
    for layer in range(3):
        restore.before_layer(layer)
        part = slice(layer * SPEC.slice_bytes, (layer + 1) * SPEC.slice_bytes)
        compute.run(lambda part=part: arena.tensor[2, part].copy_(arena.tensor[0, part] ^ 1))
    arena.copy_in([(other, arena.slot(2))]).wait()  # neither hangs on the other: copies that came first hold nobody up
    restore.finish()
    backend.drain()
    return np.array_equal(arena.tensor[2, : SPEC.slot_bytes].numpy(), other)


def test_whoever_fills_slots_of_a_result_thrown_away_comes_behind_it() -> None:
    assert all(thrown_away(seed) for seed in SEEDS)
    assert not all(thrown_away(seed, honour_waits=False) for seed in SEEDS)


def test_an_early_layer_is_there_before_a_late_one() -> None:
    early = 0
    for seed in SEEDS:
        backend = FakeBackend(seed)
        arena = Arena.create(SPEC, backend=backend)
        restore = arena.restore_layers([(buffers(1)[0], arena.slot(0))])
        while not restore.layer_done(0):
            pass
        early += not restore.layer_done(2)
        assert restore.finish() == []
    assert early > len(SEEDS) / 2


def test_layers_read_without_their_events_are_caught() -> None:
    assert not all(layered(seed, 1, honour_waits=False)[0] for seed in SEEDS)


def test_slots_of_one_mapping_go_both_ways() -> None:
    for seed in range(10):
        backend = FakeBackend(seed, needs_pinned=True)
        arena = Arena.create(SPEC, backend=backend)
        dram = buffers(1, seed, 9 * SPEC.stride_bytes)[0]
        if seed % 2:  # else staged
            arena.use_pinned(PinnedBuffer(dram))
        before, order = dram.copy().reshape(9, -1), np.random.default_rng(seed).permutation(6)
        here, there = order * SPEC.stride_bytes, np.arange(2, 8) * SPEC.stride_bytes
        into = arena.copy_in_slots(dram, there, here)
        into.wait()  # before the same mapping is written
        arena.copy_out_slots(dram, here, there[::-1].copy(), after=[into]).wait()
        assert np.array_equal(arena.tensor.numpy()[order], before[2:8])
        assert np.array_equal(dram.reshape(9, -1)[2:8], before[2:8][::-1])


@pytest.mark.parametrize(("source", "target"), [(-4096, 0), (8 * 12288 + 4096, 0), (5, 0), (0, 4096), (0, 6 * 12288)])
def test_slots_outside_are_refused(source: int, target: int) -> None:
    with pytest.raises(LayoutError, match="leaves its pool"):
        dram = np.zeros(9 * SPEC.stride_bytes, dtype=np.uint8)
        Arena.create(SPEC).copy_in_slots(dram, [source], [target])  # type: ignore[list-item]


def test_uneven_requests_are_refused() -> None:
    dram = np.zeros(9 * SPEC.stride_bytes, dtype=np.uint8)
    with pytest.raises(LayoutError, match="2 sources for 1 targets"):
        Arena.create(SPEC).copy_in_slots(dram, [0, 12288], [0])  # type: ignore[list-item]


@given(st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_cutting_keeps_the_bytes_and_crosses_no_border(data: st.DataObject) -> None:
    borders = np.array(sorted(data.draw(st.sets(st.integers(1, 63), max_size=6))), dtype=np.int64)
    starts = sorted(data.draw(st.sets(st.integers(0, 60), max_size=5)))
    sizes = [data.draw(st.integers(1, end - start)) for start, end in zip(starts, [*starts, 64][1:], strict=True)]
    sources = np.array(starts, dtype=np.int64)
    for at_sources in (True, False):
        ends = (sources + 1000, sources) if at_sources else (sources, sources + 1000)
        parts = Copies(*ends, np.array(sizes, dtype=np.int64)).cut(borders, at_sources=at_sources)
        here = parts.sources if at_sources else parts.targets
        assert all(not np.any((borders > at) & (borders < at + n)) for at, n in zip(here, parts.sizes, strict=True))
        assert (np.abs(parts.targets - parts.sources) == 1000).all()
        bytes_moved = sorted(
            b for at, n in zip(here.tolist(), parts.sizes.tolist(), strict=True) for b in range(at, at + n)
        )
        assert bytes_moved == sorted(b for at, n in zip(starts, sizes, strict=True) for b in range(at, at + n))


class RefuseAll:
    """A driver in a container without a memlock limit to speak of."""

    def enter(self) -> None:
        """Nothing to enter."""

    def register_host(self, address: int, num_bytes: int) -> None:
        raise DriverError("cuMemHostRegister_v2", 2, "out of memory")


def test_memory_that_cant_be_pinned_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    arena, memory = Arena.create(SPEC), np.zeros(8192, dtype=np.uint8)
    assert arena.pin(memory) is None
    assert not caplog.records
    arena.backend = object.__new__(CudaBackend)
    arena.backend.driver = RefuseAll()  # type: ignore[assignment]
    assert arena.pin(memory) is None
    assert "RLIMIT_MEMLOCK" in caplog.text
    assert "staging ring" in caplog.text


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads are told which device to use, and torch refuses to be told "cuda"."""
    made = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch, "zeros", lambda size, device: made.append(device))
    driver: Any = SimpleNamespace(bind=lambda: None)
    assert CudaBackend(torch.device("cuda"), driver).device == torch.device("cuda", 3)
    assert CudaBackend(torch.device("cuda:1"), driver).device == torch.device("cuda", 1)
    assert made == [torch.device("cuda", 3), torch.device("cuda", 1)]


def test_whichever_thread_closes_a_pool_enters_its_device_first() -> None:
    said = list[str]()

    class Device(InlineBackend):
        def enter(self) -> None:
            said.append("enter")

    tensor = Arena.create(PoolSpec(2, 2, 2048)).tensor
    arena = Arena(PoolSpec(2, 2, 2048), tensor, Device(), lambda: said.append("free"))
    arena.close()
    arena.close()
    assert said == ["enter", "free"]
