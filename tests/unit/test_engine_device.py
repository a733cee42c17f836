"""What moves blocks of a device pool: the hand when the pool is known, a probe when a slab is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.errors import SetupError, Unavailable
from kvstore.tiers.files import OpenFile
from kvstore.tiers.transfer import Copy, File, Memory, Priority
from kvstore_engine import device
from kvstore_engine.device import PoolMover, make_arena
from kvstore_engine.engine import Engine
from kvstore_engine.pool import KVPool
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.testing import tiny_config, tiny_model
from kvstore_gpu import probe
from kvstore_gpu.arena import Arena, PoolSpec
from kvstore_gpu.testing import Behind, Pinning

SPEC = PoolSpec(4, 2, 2048)
STRIDE = SPEC.stride_bytes


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[OpenFile]:
    rows = np.arange(4 * STRIDE, dtype=np.uint32).view(np.uint8)[: 4 * STRIDE]
    (tmp_path / "slab").write_bytes(rows.tobytes())
    file = OpenFile.open(tmp_path / "slab", os.O_RDWR, direct=False)
    yield file
    file.close()


def read(mover: PoolMover, arena: Arena, slab: OpenFile) -> None:
    copies = [
        Copy(File(slab, i * STRIDE), Memory(arena.flat, i * STRIDE), SPEC.slot_bytes, SPEC.slice_bytes)
        for i in range(4)
    ]
    assert all(result.ok for result in mover.submit(copies, Priority.READ).wait(10))
    want = np.fromfile(f"/proc/self/fd/{slab.fd}", dtype=np.uint8).reshape(4, STRIDE)
    assert np.array_equal(arena.tensor.numpy()[:, : SPEC.slot_bytes], want[:, : SPEC.slot_bytes])


@pytest.mark.parametrize("chosen", ["gds", "host"])
def test_the_first_read_of_a_slab_probes_its_folder_once(
    chosen: str, slab: OpenFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def found(folder: Path, spec: PoolSpec, device: str) -> Any:
        asked.append(folder)
        return SimpleNamespace(chosen=chosen)

    monkeypatch.setattr(probe, "probe", found)
    arena, mover = Behind.create(SPEC, backend=Pinning()), PoolMover()
    with pytest.raises(Unavailable):
        mover.submit([], Priority.READ)
    mover.use(arena)
    hand = mover._hand
    for _ in range(2):
        read(mover, arena, slab)
    mover.close()
    mover.close()
    assert asked == [tmp_path]
    assert hand is not None and hand.use_gds == (chosen == "gds")
    with pytest.raises(Unavailable):
        mover.use(arena)


def test_a_probe_that_fails_leaves_the_host_reading(slab: OpenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(probe, "probe", broken)
    arena, mover = Behind.create(SPEC, backend=Pinning()), PoolMover()
    mover.use(arena)
    read(mover, arena, slab)
    mover.close()
    assert mover._hand is not None and not mover._hand.use_gds


def test_one_store_serves_one_pool() -> None:
    mover = PoolMover()
    mover.use(first := Arena.create(SPEC))
    mover.use(first)
    with pytest.raises(SetupError):
        mover.use(Arena.create(SPEC))
    mover.close()


def test_a_pool_on_an_arena_is_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "ON_ARENA", {"cpu"})
    keyspace = tiny_model(tiny_config()).keyspace
    pool = KVPool(keyspace, 5 * keyspace.slot_bytes, torch.device("cpu"))
    assert pool.arena is not None
    assert (pool.arena.num_slots, pool.arena.stride_bytes) == (pool.num_slots, pool.stride)
    assert not pool.raw.any()
    pool.layer(1)[3, 0, 2] = 1.0
    assert pool.raw[3].any() and not pool.raw[2].any()
    pool.close()
    assert not len(pool.raw)


def test_too_large_a_pool_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    keyspace = tiny_model(tiny_config()).keyspace
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 30))
    with pytest.raises(SetupError, match="more than the device has free"):
        make_arena(keyspace, 1 << 20, torch.device("cuda"))
    with pytest.raises(SetupError, match="can't be allocated"):  # no CUDA here, or no such device
        make_arena(keyspace, 1, torch.device("cuda:63"))


def test_an_engine_gives_its_pool_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "ON_ARENA", {"cpu"})
    config = tiny_config()
    with Engine(config, tiny_model(config)) as engine:
        engine.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
        assert engine.pool.arena is not None
    assert not len(engine.pool.arena.tensor)
