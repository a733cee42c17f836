"""Rows about the disk and what lies on it: limits, O_DIRECT, shrinking, the index."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.config import ServiceConfig
from kvstore.core.types import Durability, Tier
from kvstore.errors import SetupError, Unavailable
from kvstore.runtime import Runtime
from kvstore.testing.node import FaultyNode
from kvstore.testing.processes import ClientProcess
from kvstore.testing.service import ServiceProcess, wait_for
from kvstore.testing.stub import StubEngine, tiny_keyspace
from kvstore.testing.volumes import fill
from kvstore.tiers.index_lmdb import BlockIndex, Entry
from kvstore_client import Client, HostPool

MIB = 1 << 20
WAIT_S = 60.0
SLOT = 4096


# ---- Disk limits


def test_disk_limits_have_a_default() -> None:
    """Nobody has to set a cap: a quarter of what is free, and a reserve that is never used."""
    config = ServiceConfig()
    stat = os.statvfs(config.data_dir.parent if config.data_dir.parent.exists() else "/")
    assert 0 < config.nvme_bytes <= stat.f_blocks * stat.f_frsize // 4 + config.segment_bytes
    assert config.nvme_reserve_bytes > 0 and config.dram_bytes > 0


def test_disk_limits_on_a_volume_that_is_too_small(volume: Path) -> None:
    """NVMe is allowed 16 MiB, and somebody else takes half of them: what doesn't fit is refused, the node is degraded,
    nobody dies, what was acknowledged is there, also after a kill."""
    fill(volume, leave_bytes=8 * MIB)
    service = ServiceProcess(volume, dram_bytes=MIB, nvme_bytes=16 * MIB, segment_bytes=MIB)
    service.start()
    try:
        with Client(service.address) as client:
            engine = StubEngine(client, tiny_keyspace())
            kept = {s: engine.offload(engine.chain(s, 64), Durability.NVME).num_blocks for s in range(80)}
            assert sum(kept.values()) < 80 * 64
            wait_for(lambda: client.health == "degraded", "the node to say so")
            for _ in range(2):
                for seed, count in kept.items():
                    seen = engine.restore(engine.chain(seed, 64))
                    assert seen.num_ok >= count and not seen.wrong
                epoch = client.boot_epoch
                service.kill()
                service.start()
                service.wait_attached(client, epoch)
    finally:
        service.stop()


def test_disk_limits_met_by_the_index(volume: Path) -> None:
    """Somebody else fills the disk under a running node, the index included: stores fail honestly, reads go on, and
    with the space back everything works again."""
    sizes = {"dram_bytes": MIB, "nvme_bytes": 8 * MIB, "segment_bytes": MIB}
    with FaultyNode(volume, **sizes) as node, Client(node.address) as client:
        engine = StubEngine(client, tiny_keyspace())
        first = engine.chain(1, 32)
        assert engine.offload(first, Durability.SYNCED).num_blocks == 32
        ballast = fill(volume)
        kept = {s: engine.offload(engine.chain(s, 64), Durability.NVME).num_blocks for s in range(100, 108)}
        assert engine.restore(first).num_ok == 32
        ballast.unlink()
        nvme = node.runtime.machine.pool(Tier.NVME)
        wait_for(lambda: nvme is not None and nvme.alive and node.quiet(), "the tier to take writes again")
        assert engine.offload(engine.chain(200, 64), Durability.SYNCED).num_blocks == 64
        for seed, count in kept.items():
            seen = engine.restore(engine.chain(seed, 64))
            assert seen.num_ok >= count and not seen.wrong
        node.check()


# ---- O_DIRECT assumptions


def test_o_direct_assumptions(volume: Path) -> None:
    """Whatever the file system does with O_DIRECT, and however the engine's pool is aligned, the bytes are right."""
    sizes = {"dram_bytes": MIB, "nvme_bytes": 8 * MIB, "segment_bytes": MIB}
    with FaultyNode(volume, **sizes) as node, Client(node.address) as client:
        engine = StubEngine(client, tiny_keyspace(num_layers=3))  # 6 KiB of payload in slots of 8 KiB
        crooked = HostPool(engine.pool.flat[512:-512][: 200 * 8192], 8192)
        engine.pool = crooked
        for seed in range(12):
            assert engine.offload(engine.chain(seed, 32), Durability.NVME).num_blocks == 32
        for seed in range(12):
            seen = engine.restore(engine.chain(seed, 32))
            assert seen.num_ok == 32 and not seen.wrong


# ---- Useless suffixes


def scatter(node: FaultyNode) -> None:
    """From now on NVMe's segments are handed out last ones first, so that heads lie where the cut will be."""
    pool = node.runtime.machine.pool(Tier.NVME)
    assert pool is not None
    pool.slots._free_segments.reverse()


@pytest.mark.parametrize("order", ["one after another", "in turn", "tails first"])
def test_useless_suffixes_after_shrinking(tmp_path: Path, order: str) -> None:
    """NVMe comes back with half its size: about half of what was held is usable prefixes, and nothing else is kept."""
    num_contexts, length = 8, 240
    small = {"dram_bytes": MIB, "segment_bytes": MIB // 4}
    with FaultyNode(tmp_path, nvme_bytes=8 * MIB, **small) as node, Client(node.address) as client:
        engine = StubEngine(client, tiny_keyspace())
        if order == "tails first":
            scatter(node)
        steps = range(length, length + 1) if order == "one after another" else range(24, length + 1, 24)
        for upto in steps:
            for seed in range(num_contexts):
                chain = engine.chain(seed, length)
                chain.truncate(upto * 16)
                assert engine.offload(chain, Durability.NVME).num_blocks == upto
    with FaultyNode(tmp_path, nvme_bytes=4 * MIB, **small) as node, Client(node.address) as client:
        engine = StubEngine(client, tiny_keyspace())
        seen = [engine.restore(engine.chain(seed, length)) for seed in range(num_contexts)]
        assert not any(s.wrong for s in seen)
        usable = sum(s.num_ok for s in seen)
        assert usable >= 0.45 * num_contexts * length
        assert node.sample("kvstore_used_bytes", tier="nvme") == usable * SLOT, "bytes that no prefix reaches"
        assert node.runtime.data is not None
        assert node.runtime.data.index.num_blocks() == usable


# ---- LMDB


def entries(count: int, first: int = 0) -> list[Entry]:
    from kvstore.core.types import Slot
    from kvstore.testing.oracle import make_record

    return [Entry(make_record(str(n), 2, 64), Slot(n * SLOT), SLOT) for n in range(first, first + count)]


def test_lmdb_map_grows_without_losing_the_write(tmp_path: Path) -> None:
    """A map of 64 KiB meets 2,000 records: it grows, and each of them is there."""
    index = BlockIndex.open(tmp_path, 64 << 10)
    made = entries(2_000)
    for start in range(0, 2_000, 500):
        index.commit(made[start : start + 500])
    assert index.map_bytes() > 64 << 10
    assert index.get_many([e.key for e in made]) == made
    index.close()


READERS = """
import os, signal, sys, lmdb
for number in range(int(sys.argv[2])):
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        env = lmdb.open(sys.argv[1], max_dbs=8, max_readers=512, create=False)
        txn = env.begin()
        txn.stat(env.open_db(b"blocks", txn=txn, create=False))
        os.write(told, b"x")
        signal.pause()
    os.read(ready, 1)
    os.close(ready), os.close(told)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
print("done", flush=True)
signal.pause()
"""


def test_lmdb_200_killed_readers_leave_no_growth(tmp_path: Path) -> None:
    """200 readers die in the middle of reading: their places come back, and writing goes on in the same space."""
    index = BlockIndex.open(tmp_path)
    made = entries(200)
    index.commit(made)
    readers = ClientProcess(READERS, str(tmp_path), "200")
    readers.expect("done")
    readers.kill()
    sizes = []
    for round_number in range(12):
        for _ in range(50):
            index.commit(made)
        sizes.append((tmp_path / "data.mdb").stat().st_blocks)
        assert index.num_blocks() == 200, round_number
    assert sizes[-1] <= sizes[5] + 64
    index.close()


def test_lmdb_is_not_used_after_a_fork(tmp_path: Path) -> None:
    """An environment belongs to the process that opened it; a child that inherits it is told."""
    index = BlockIndex.open(tmp_path)
    index.commit(entries(1))
    child = os.fork()
    if child == 0:
        try:
            index.num_blocks()
        except Unavailable:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert index.num_blocks() == 1
    index.close()


def test_one_writer_per_data_directory(node: FaultyNode) -> None:
    """Another node on the same data is refused while the first one lives."""
    with pytest.raises(SetupError, match="in use"):
        Runtime(node.config)
