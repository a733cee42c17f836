"""Rows about bytes: what fails is named, what is reported good is right, what isn't whole isn't seen."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvstore_client.client as client_module
from kvstore.core import events
from kvstore.core.types import Durability, Tier
from kvstore.errors import KVStoreError, LeaseExpired, Unavailable
from kvstore.testing import oracle
from kvstore.testing.faults import Fault, FaultPlan
from kvstore.testing.node import FaultyNode
from kvstore.testing.service import ServiceProcess, wait_for
from kvstore.testing.stub import StubEngine, damage_reads, make_chain, tiny_keyspace
from kvstore_api.v1 import kvstore_pb2 as pb
from kvstore_client import Client

MIB = 1 << 20
WAIT_S = 60.0
SEGMENTS = 32


def push_out_of_dram(engine: StubEngine) -> None:
    """Offload enough other contexts, durably, that nothing older is left in DRAM."""
    for seed in range(9_000, 9_012):
        engine.offload(engine.chain(seed, 64), Durability.NVME)


# ---- Failure reported as success


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("write", Fault.EIO),
        ("write", Fault.ENOSPC),
        ("write", Fault.SHORT),
        ("write", Fault.FLIP),
        ("write", Fault.TORN),
        ("sync", Fault.EIO),
        ("allocate", Fault.ENOSPC),
        ("allocate", Fault.EIO),
    ],
)
def test_failure_reported_as_success_while_storing(
    node: FaultyNode, engine: StubEngine, plan: FaultPlan, call: str, fault: Fault
) -> None:
    """Whatever fails below an offload, the offload either says so, or its bytes are there; nobody gets foreign ones."""
    plan._rates[call] = {fault: 0.3}
    promised = {}
    for seed in range(40):
        durability = Durability.SYNCED if call == "sync" else Durability.NVME
        promised[seed] = engine.offload(engine.chain(seed, 24), durability).num_blocks
    assert plan.num_injected > 0
    plan.enabled = False
    silent = fault in (Fault.FLIP, Fault.TORN)  # the disk itself lies: only the checksum can tell, at the read
    for seed, count in promised.items():
        seen = engine.restore(engine.chain(seed, 24))
        assert not seen.wrong
        assert silent or seen.num_ok >= count
    wait_for(node.quiet, "all work to end")
    node.check()


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.SHORT, Fault.FLIP])
def test_failure_reported_as_success_while_reading(client: Client, engine: StubEngine, fault: Fault) -> None:
    """A read that keeps failing names its block and cuts the prefix there; one that failed once is done again."""
    chains = [engine.chain(seed, 40) for seed in range(8)]
    for chain in chains:
        engine.offload(chain, Durability.NVME)
    push_out_of_dram(engine)
    reads = FaultPlan(seed=2, reads={fault: 0.6})
    damage_reads(client, reads, SEGMENTS)
    num_cut = 0
    for chain in chains:
        seen = engine.restore(chain)
        assert not seen.wrong and seen.result is not None
        assert seen.num_ok == 40 or f"block {seen.num_ok}" in seen.result.errors[0]
        num_cut += seen.num_ok < 40
    assert reads.num_injected > 0 and num_cut > 0
    reads.enabled = False
    for chain in chains:
        assert engine.restore(chain).num_ok == client.match(chain)


def test_failure_reported_as_success_while_promoting(node: FaultyNode, client: Client, engine: StubEngine) -> None:
    """A prefetch that can't read its source loses those blocks there instead of publishing what it didn't read."""
    with client.session("agent", engine.keyspace) as session:
        chain = engine.chain(1, 40)
        session.chain.update(chain.tokens)
        engine.offload(chain, Durability.NVME, session.id)
        push_out_of_dram(engine)
        node.plan._rates["read"] = {Fault.FLIP: 0.5, Fault.EIO: 0.2}
        client.prefetch("agent")
        wait_for(node.quiet, "the prefetch to end")
        node.plan.enabled = False
        seen = engine.restore(chain)
        assert not seen.wrong
        assert seen.num_ok == client.match(chain)


def test_failure_reported_as_success_without_a_service(service: ServiceProcess) -> None:
    """With nobody there every call says so at once, and what was asked for counts as not held."""
    service.start()
    with Client(service.address, timeout_s=5) as client:
        engine = StubEngine(client, tiny_keyspace())
        chain = engine.chain(1, 8)
        engine.offload(chain)
        service.kill()
        with pytest.raises(Unavailable):
            engine.restore(chain)
        with pytest.raises(Unavailable):
            engine.offload(chain)


# ---- Race with a transfer in flight


def test_race_with_a_transfer_in_flight(node: FaultyNode) -> None:
    """1,000 interleaved offloads, restores, prefetches, forks and ends of few contexts in too little DRAM: no foreign
    byte."""

    def work(number: int) -> list[int]:
        rng = random.Random(number)
        wrong: list[int] = []
        with Client(node.address) as client:
            engine = StubEngine(client, tiny_keyspace(), seed=number)
            for step in range(250):
                chain = engine.chain(rng.randrange(24), rng.choice([8, 16, 40]), rng.randrange(2), shared=6)
                kind = rng.randrange(6)
                try:
                    if kind < 2:
                        engine.offload(chain, rng.choice([Durability.DRAM, Durability.NVME]))
                    elif kind == 2:
                        session = client.session(f"{number}-{step % 5}", engine.keyspace)
                        engine.restore(chain, session.id)
                        client.prefetch(session.id)
                    elif kind == 3:
                        client.session(f"{number}-{step % 5}", engine.keyspace).end()
                    else:
                        wrong += engine.restore(chain).wrong
                except KVStoreError:
                    pass  # a full tier or an ended session is an answer; wrong bytes are not
        return wrong

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))
    assert found == [[], [], [], []]
    wait_for(node.quiet, "all work to end")
    node.check()


def test_race_of_a_slow_read_with_its_lease(node: FaultyNode, client: Client, engine: StubEngine) -> None:
    """A read that outlives its lease, while its slots are given away and filled anew, is an error or right bytes."""
    chain = engine.chain(1, 40)
    engine.offload(chain, Durability.NVME)
    push_out_of_dram(engine)
    reads = FaultPlan(seed=3)
    damage_reads(client, reads, SEGMENTS)
    reads.next_faults("read", [Fault.STALL] * 40)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(engine.restore, chain, "", 30.0)
        assert reads.stalled.acquire(timeout=WAIT_S)
        node.runtime.detach(client.client_id)
        with Client(node.address) as other:
            writer = StubEngine(other, engine.keyspace, seed=5)
            for seed in range(100, 140):  # more than NVMe holds
                writer.offload(writer.chain(seed, 64), Durability.NVME)
        reads.release()
        seen = slow.result(WAIT_S)
    assert not seen.wrong


def test_race_of_a_slow_writer_with_its_reservation(
    node: FaultyNode, client: Client, engine: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer sleeps until its slots belong to others, then writes into them: it is refused at Seal, and what it
    overwrote is never taken for what was there."""
    reserved, go_on = threading.Event(), threading.Event()
    real = client_module.write_blocks

    def late(*args: object) -> object:
        reserved.set()
        assert go_on.wait(WAIT_S)
        return real(*args)  # type: ignore[arg-type]

    with Client(node.address) as other, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(client_module, "write_blocks", late)
        slow = pool.submit(engine.offload, engine.chain(1, 64), Durability.DRAM, "", 30.0)
        assert reserved.wait(WAIT_S)
        monkeypatch.setattr(client_module, "write_blocks", real)
        node.runtime.detach(client.client_id)
        writer = StubEngine(other, engine.keyspace, seed=5)
        for seed in range(100, 104):
            assert writer.offload(writer.chain(seed, 64)).num_blocks == 64
        go_on.set()
        with pytest.raises(LeaseExpired):
            slow.result(WAIT_S)
        seen = [writer.restore(writer.chain(seed, 64)) for seed in range(100, 104)]
        assert not any(s.wrong for s in seen)
        assert other.match(engine.chain(1, 64)) == 0
        for seed in range(100, 104):
            again = writer.restore(writer.chain(seed, 64))
            assert again.num_ok == other.match(writer.chain(seed, 64)) and not again.wrong
    node.check()


# ---- Entry visible before complete


def test_entry_visible_before_complete(
    client: Client, engine: StubEngine, monkeypatch: pytest.MonkeyPatch, node: FaultyNode
) -> None:
    """While a context is being written nobody is told that it is there; a second writer waits and then counts it."""
    writing, go_on = threading.Event(), threading.Event()
    real = client_module.write_blocks

    def slow(*args: object) -> object:
        writing.set()
        assert go_on.wait(WAIT_S)
        return real(*args)  # type: ignore[arg-type]

    chain = engine.chain(1, 16)
    with Client(node.address) as other, ThreadPoolExecutor(2) as pool:
        second = StubEngine(other, engine.keyspace)
        monkeypatch.setattr(client_module, "write_blocks", slow)
        first = pool.submit(engine.offload, chain)
        assert writing.wait(WAIT_S)
        monkeypatch.setattr(client_module, "write_blocks", real)
        assert other.match(chain) == 0
        assert second.restore(chain).asked == 0
        late = pool.submit(second.offload, chain)
        wait_for(lambda: len(node.runtime.machine._s.persists) == 1, "the second writer to wait")
        assert not late.done()
        go_on.set()
        assert first.result(WAIT_S).num_copied == 16
        assert (late.result(WAIT_S).num_blocks, late.result().num_copied) == (16, 0)
        assert second.restore(chain).num_ok == 16


# ---- Same key, many writers


def test_same_key_many_writers(node: FaultyNode) -> None:
    """16 writers of one context: each block is copied by one of them, and all are told that it is there."""
    barrier = threading.Barrier(16)

    def write(number: int) -> tuple[int, int]:
        with Client(node.address) as client:
            engine = StubEngine(client, tiny_keyspace(), seed=number)
            chain = engine.chain(1, 32)
            barrier.wait(WAIT_S)
            done = engine.offload(chain, Durability.NVME)
            assert not engine.restore(chain).wrong
            return done.num_blocks, done.num_copied

    with ThreadPoolExecutor(16) as pool:
        done = list(pool.map(write, range(16)))
    assert {count for count, _ in done} == {32}
    assert sum(copied for _, copied in done) == 32


def test_same_key_late_completion_finishes_nothing_newer(node: FaultyNode, client: Client, engine: StubEngine) -> None:
    """A writer that lost its reservation is told so, and what took its place stays as it is."""
    chain = engine.chain(1, 4)
    request = pb.ReserveRequest(keyspace_id=engine.keyspace.id, hashes=chain.hashes, client_id="slow writer")
    old = client._call(client._cache.Reserve, request)
    node.runtime.detach("slow writer")
    new = client._call(client._cache.Reserve, pb.ReserveRequest(keyspace_id=engine.keyspace.id, hashes=chain.hashes))
    assert new.op_id not in (0, old.op_id)
    late = pb.SealRequest(op_id=old.op_id, boot_epoch=old.boot_epoch, failed=chain.hashes)
    with pytest.raises(LeaseExpired):
        client._call(client._cache.Seal, late)
    assert client.match(chain) == 0
    client._call(client._cache.Seal, pb.SealRequest(op_id=new.op_id, boot_epoch=new.boot_epoch, failed=chain.hashes))
    assert engine.offload(chain).num_copied == 4
    assert not engine.restore(chain).wrong


# ---- Lookup lies


def cut_payloads(node: FaultyNode) -> None:
    for path in sorted(Path(node.config.data_dir, "slab").glob("*.seg"))[::2]:
        with path.open("r+b") as file:
            file.truncate(0)


def test_lookup_lies(node: FaultyNode, client: Client, engine: StubEngine) -> None:
    """Payloads vanish behind the index: the get that notices takes the entries away, and from then on, for every prefix
    length, what a lookup promises is what a get returns."""
    chains = [engine.chain(seed, 48) for seed in range(8)]
    for chain in chains:
        engine.offload(chain, Durability.NVME)
    push_out_of_dram(engine)
    cut_payloads(node)
    cut = 0
    for chain in chains:
        seen = engine.restore(chain)
        assert not seen.wrong
        cut += seen.num_ok < seen.asked
    assert cut > 0
    for chain in chains:
        for length in range(1, 49):
            prefix = chain.copy()
            prefix.truncate(length * engine.keyspace.block_tokens)
            seen = engine.restore(prefix)
            assert seen.num_ok == seen.asked == client.match(prefix)


def test_lookup_lies_about_files_that_lost_their_name(node: FaultyNode, client: Client, engine: StubEngine) -> None:
    """A segment removed by name while the node runs is still there for everybody who is promised it; after the next
    start nobody is."""
    chain = engine.chain(1, 48)
    engine.offload(chain, Durability.NVME)
    push_out_of_dram(engine)
    for path in Path(node.config.data_dir, "slab").glob("*.seg"):
        path.unlink()
    seen = engine.restore(chain)
    assert seen.num_ok == seen.asked == 48 and not seen.wrong


# ---- Torn or rotten files


@pytest.mark.parametrize("damage", ["truncate", "zero", "flip"])
def test_torn_or_rotten_files(service: ServiceProcess, damage: str) -> None:
    """Every payload file is cut, zeroed or flipped while the service is down: it starts, and what was hit is a counted
    miss."""
    service.start()
    with Client(service.address) as client:
        engine = StubEngine(client, tiny_keyspace())
        chains = [engine.chain(seed, 48) for seed in range(8)]
        for chain in chains:
            assert engine.offload(chain, Durability.NVME).num_blocks == 48
    service.stop()
    rng = random.Random(4)
    for path in service.data_dir.glob("slab/*.seg"):
        damage_file(path, damage, rng)
    service.start()
    with Client(service.address) as client:
        engine = StubEngine(client, tiny_keyspace())
        seen = [engine.restore(chain) for chain in chains]
        assert not any(s.wrong for s in seen)
        assert sum(s.num_ok for s in seen) < 8 * 48
        assert service.metric('kvstore_failures_total{kind="ChecksumMismatch"}') > 0
        for chain in chains:
            assert engine.restore(chain).num_ok == client.match(chain)
            assert engine.offload(chain, Durability.NVME).num_blocks == 48
            assert engine.restore(chain).num_ok == 48


def damage_file(path: Path, damage: str, rng: random.Random) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        if damage == "truncate":
            file.truncate(size // 3)
        elif damage == "zero":
            file.seek(size // 4)
            file.write(bytes(size // 2))
        else:
            for _ in range(size // 65536 + 1):
                at = rng.randrange(size)
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def test_torn_index_is_refused_in_one_line(service: ServiceProcess) -> None:
    """An index that was cut off is not read (a memory map would end the process): one line says so, status 2."""
    service.start()
    with Client(service.address) as client:
        engine = StubEngine(client, tiny_keyspace())
        for seed in range(30):
            engine.offload(engine.chain(seed, 48), Durability.NVME)
    service.stop()
    data = service.data_dir / "index" / "data.mdb"
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size // 2 // 4096 * 4096)
    status, text = service.run_to_end()
    assert status == 2 and "index" in text and len(text.strip().splitlines()) == 1


# ---- Poison


def test_what_was_never_written_shows(node: FaultyNode, client: Client, engine: StubEngine) -> None:
    """Slots behind the good prefix hold poison or rejected bytes, never a block that was promised."""
    chain = engine.chain(1, 16)
    engine.offload(chain)
    node.runtime._step(events.Lost(engine.keyspace.id, chain.hash_at(9), Tier.DRAM))
    seen = engine.restore(chain)
    assert (seen.asked, seen.num_ok) == (9, 9)
    stride = engine.pool.stride_bytes
    full = sum(bool((engine.pool.flat[i * stride : (i + 1) * stride] == oracle.POISON).all()) for i in range(256))
    assert full == 256 - 9
    assert make_chain(engine.keyspace, 1, 16).hashes == chain.hashes
