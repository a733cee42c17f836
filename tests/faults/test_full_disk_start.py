"""A disk that is full already: the service starts, fsck runs, and an engine's keyspace is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.core.types import Durability
from kvstore.errors import TierFull
from kvstore.testing.service import ServiceProcess
from kvstore.testing.stub import StubEngine, tiny_keyspace
from kvstore.tiers.files import probe_direct
from kvstore.tiers.fsck import fsck
from kvstore.tiers.index_lmdb import BlockIndex
from kvstore_client import Client

MIB = 1 << 20


def test_a_probe_that_finds_no_space_says_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore.tiers.files import OpenFile

    def full(self: OpenFile, buffers: object, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(OpenFile, "write", full)
    assert probe_direct(tmp_path) is False
    fsck_dir = tmp_path / "data"
    process = ServiceProcess(tmp_path, dram_bytes=MIB, nvme_bytes=8 * MIB, segment_bytes=MIB)
    process.data_dir = fsck_dir
    process.start()
    process.stop()
    assert fsck(fsck_dir).ok


def test_a_keyspace_that_can_not_be_stored_yet_is_stored_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvstore

    refuse = [True]
    put = BlockIndex.put_keyspace

    def full(self: BlockIndex, keyspace: object, encoding: bytes) -> None:
        if refuse[0]:
            raise TierFull("index: no space left; free space on the disk")
        put(self, keyspace, encoding)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockIndex, "put_keyspace", full)
    sizes = {"dram_bytes": MIB, "nvme_bytes": 8 * MIB, "segment_bytes": MIB, "nvme_reserve_bytes": 0}
    data = tmp_path / "data"
    with kvstore.embedded(**sizes, data_dir=data, socket=tmp_path / "kv.sock") as client:
        engine = StubEngine(client, tiny_keyspace())
        refuse[0] = False
        chain = engine.chain(1, 4)
        engine.offload(chain, Durability.NVME)
    with kvstore.embedded(**sizes, data_dir=data, socket=tmp_path / "kv.sock") as client:
        assert isinstance(client, Client)
        again = StubEngine(client, tiny_keyspace())
        assert again.restore(again.chain(1, 4)).num_ok == 4
