"""Rows about lives and holdings: restarts, dead and stopped processes, what is held for nobody, what waits for ever."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvstore_client.connection
from kvstore.core import commands, events
from kvstore.core.eviction import make_policy
from kvstore.core.machine import Machine
from kvstore.core.state import TierConfig
from kvstore.core.types import BlockHash, Durability, KeyspaceId, Tier
from kvstore.errors import LeaseExpired, Unavailable
from kvstore.testing.faults import Fault, FaultPlan
from kvstore.testing.node import FaultyNode
from kvstore.testing.processes import ClientProcess, num_descriptors, num_shared_maps
from kvstore.testing.service import ServiceProcess, wait_for
from kvstore.testing.stub import StubEngine, tiny_keyspace
from kvstore_client import Client

MIB = 1 << 20
WAIT_S = 60.0
SLOT = 4096


# ---- Restart


def test_restart_keeps_what_it_held_within_its_limit(service: ServiceProcess) -> None:
    """Fill NVMe to 70 %, SIGKILL, start again, go on writing: at least 99 % is hit, right, and the disk use stays
    within the limit."""
    service.start()
    num_contexts = int(0.7 * 2048 / 32)
    with Client(service.address) as client:
        engine = StubEngine(client, tiny_keyspace())
        for seed in range(num_contexts):
            assert engine.offload(engine.chain(seed, 32), Durability.NVME).num_blocks == 32
        old = client.acquire(engine.chain(0, 32))
        epoch = client.boot_epoch
        service.kill()
        service.start()
        service.wait_attached(client, epoch)
        seen = [engine.restore(engine.chain(seed, 32)) for seed in range(num_contexts)]
        assert not any(s.wrong for s in seen)
        assert sum(s.num_ok for s in seen) >= 0.99 * 32 * num_contexts
        assert old is not None
        with pytest.raises(LeaseExpired, match="earlier life"):
            client.restore(old, engine.chain(0, 32), 0, 32, engine.pool, range(32))
        for seed in range(1000, 1100):  # half as much again as NVMe holds
            assert engine.offload(engine.chain(seed, 32), Durability.NVME).num_blocks == 32
            assert disk_bytes(service.data_dir / "slab") <= 8 * MIB


def disk_bytes(folder: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in folder.iterdir())


# ---- Leaked shared memory


def test_leaked_shared_memory(service: ServiceProcess) -> None:
    """The service is killed ten times: it starts every time, no name is left behind, and a client that lives on holds
    one map and as many descriptors as before."""
    named = sorted(os.listdir("/dev/shm"))
    service.start()
    with Client(service.address) as client:
        engine = StubEngine(client, tiny_keyspace())
        before = num_shared_maps()
        held = []
        for _ in range(10):
            engine.offload(engine.chain(1, 8))
            held.append(num_descriptors())
            epoch = client.boot_epoch
            service.kill()
            service.start()
            service.wait_attached(client, epoch)
        wait_for(lambda: num_shared_maps() <= before, "maps of dead services to go")
        assert max(held[2:]) <= max(held[:2]) + 2  # sockets of a channel that reconnects come and go
    assert sorted(os.listdir("/dev/shm")) == named


# ---- Pins and references leak


def test_pins_leak_lookups_without_retrieve(tmp_path: Path) -> None:
    """1,000 lookups that are never followed up, by a client that lives on: their leases end by the clock."""
    with FaultyNode(tmp_path, lease_ttl_s=0.5) as node, Client(node.address) as client:
        engine = StubEngine(client, tiny_keyspace())
        chain = engine.chain(1, 16)
        engine.offload(chain)
        for _ in range(1_000):
            assert client.acquire(chain) is not None
        wait_for(lambda: node.runtime.machine.num_leases == 0, "leases to end")
        node.check()


ABANDON = """
import sys
from kvstore.testing.stub import StubEngine, tiny_keyspace
from kvstore_api.v1 import kvstore_pb2 as pb
from kvstore_client import Client

def abandon(client, engine, number):
    "Begin one operation and leave it at one of four points."
    chain = engine.chain(number % 40, 8, branch=number)
    if number % 4 < 2:
        lease = client.acquire(engine.chain(0, 8))
        if number % 4 == 1:
            request = pb.RestoreRequest(lease_id=lease.id, boot_epoch=lease.boot_epoch, first=0, last=8)
            client._call(client._cache.Restore, request)
    else:
        request = pb.ReserveRequest(keyspace_id=engine.keyspace.id, hashes=chain.hashes, client_id=client.client_id)
        reply = client._call(client._cache.Reserve, request)
        if number % 4 == 3 and reply.op_id:
            seal = pb.SealRequest(op_id=reply.op_id, boot_epoch=reply.boot_epoch, failed=chain.hashes[:16])
            client._call(client._cache.Seal, seal)

if __name__ == "__main__":
    client = Client(sys.argv[1])
    engine = StubEngine(client, tiny_keyspace())
    for number in range(int(sys.argv[2]), int(sys.argv[3])):
        abandon(client, engine, number)
    print("done", flush=True)
    sys.stdin.read()
    import time; time.sleep(600)
"""


def test_pins_leak_aborts_at_random_points(tmp_path: Path) -> None:
    """1,000 operations left half way, half of them by clients that are killed: everything they held comes back."""
    scope: dict[str, Callable[..., None]] = {"__name__": "aborts"}  # type: ignore[dict-item]
    exec(ABANDON, scope)
    with FaultyNode(tmp_path, lease_ttl_s=1.0, dram_bytes=4 * MIB) as node, Client(node.address) as client:
        engine = StubEngine(client, tiny_keyspace())
        engine.offload(engine.chain(0, 8))
        dead = [ClientProcess(ABANDON, node.address, str(n), str(n + 125)) for n in range(0, 500, 125)]
        for number in range(500, 1_000):
            scope["abandon"](client, engine, number)
        for each in dead:
            each.expect("done")
            each.kill()
        wait_for(node.quiet, "everything to come back")
        node.check()
        pools = node.runtime.machine.pools()
        assert all(p.slots.used_bytes == p.num_ready * SLOT for p in pools)
        assert engine.offload(engine.chain(77, 64)).num_blocks == 64


# ---- Hang


def test_hang_on_a_killed_client(service: ServiceProcess) -> None:
    """A client dies holding a lease and a reservation: health and a new registration answer within 5 s, and what it
    held comes back."""
    service.start()
    with Client(service.address) as client:
        engine = StubEngine(client, tiny_keyspace())
        engine.offload(engine.chain(0, 8))
        victim = ClientProcess(ABANDON, service.address, "0", "4")
        victim.expect("done")
        victim.kill()
        with Client(service.address, timeout_s=5) as other:
            other.register(tiny_keyspace(model="other"))
            health = health_pb2_grpc.HealthStub(other._channel)
            status = health.Check(health_pb2.HealthCheckRequest(), timeout=5).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        service.wait_metric("kvstore_leases", 0)
        service.wait_metric('kvstore_residencies{state="filling",tier="dram"}', 0)


def test_hang_on_a_stopped_service(service: ServiceProcess) -> None:
    """A service that answers nothing (SIGSTOP): calls end by their own deadline, and work again when it goes on."""
    service.start()
    with Client(service.address, timeout_s=1.0) as client:
        engine = StubEngine(client, tiny_keyspace())
        chain = engine.chain(0, 8)
        engine.offload(chain)
        assert service.process is not None
        service.process.send_signal(signal.SIGSTOP)
        try:
            for call in (lambda: client.match(chain), lambda: engine.restore(chain), lambda: engine.offload(chain)):
                with pytest.raises(Unavailable):
                    call()
        finally:
            service.process.send_signal(signal.SIGCONT)
        client.timeout_s = 10.0
        wait_for(lambda: client.boot_epoch, "the client to be attached")
        assert engine.restore(chain).num_ok == 8


def test_hang_on_a_stopped_service_shows_in_health(service: ServiceProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client doesn't go on calling a service healthy that has stopped answering, though its socket is still open."""
    monkeypatch.setattr(kvstore_client.connection, "ANSWER_S", 2.0)
    service.start()
    with Client(service.address, timeout_s=1.0) as client:
        wait_for(lambda: client.health == "serving", "a heartbeat's answer")
        assert service.process is not None
        service.process.send_signal(signal.SIGSTOP)
        try:
            wait_for(lambda: client.health == "", "the client to notice")
        finally:
            service.process.send_signal(signal.SIGCONT)
        wait_for(lambda: client.health == "serving", "the client to be back")


def test_hang_on_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    """Slower than any throttle: writes to NVMe don't come back at all, and 200 clients go on storing. What finds no
    room is dropped and counted, the node calls itself degraded, reads are served, and it recovers."""
    plan = FaultPlan(seed=1, writes={Fault.STALL: 1.0})
    sizes = {"dram_bytes": MIB, "nvme_bytes": 8 * MIB, "segment_bytes": MIB // 4}
    with FaultyNode(tmp_path, plan, **sizes) as node, Client(node.address) as reader:
        plan.enabled = False
        engine = StubEngine(reader, tiny_keyspace())
        kept = engine.chain(5_000, 32)
        engine.offload(kept, Durability.NVME)
        plan.enabled = True

        def store(number: int) -> int:
            with Client(node.address, timeout_s=4.0, io_threads=1) as client:
                mine = StubEngine(client, tiny_keyspace(), 16, number)
                try:
                    return mine.offload(mine.chain(number, 8)).num_blocks
                except Unavailable:
                    return 0  # its own deadline passed first

        with ThreadPoolExecutor(50) as pool:
            stored = list(pool.map(store, range(200)))
        assert plan.stalled.acquire(timeout=WAIT_S)
        assert sum(stored) < 200 * 8
        assert node.sample("kvstore_dropped_blocks_total") > 0
        assert node.runtime.health == "degraded"
        seen = engine.restore(kept)
        assert seen.num_ok == 32 and not seen.wrong
        plan.release()
        wait_for(node.quiet, "the disk's work to end")
        assert engine.offload(engine.chain(6_000, 32), Durability.NVME).num_blocks == 32


# ---- Idle sessions that pin


@pytest.mark.parametrize("nvme_bytes", [8 * MIB, 0])
def test_idle_sessions_that_pin(tmp_path: Path, nvme_bytes: int) -> None:
    """Ten times more idle sessions than memory: each new one is admitted whole, at the cost of those that wait."""
    sizes = {"dram_bytes": MIB, "nvme_bytes": nvme_bytes, "segment_bytes": MIB // 4, "dram_policy": "leaf-lru"}
    with FaultyNode(tmp_path, **sizes) as node, Client(node.address) as client:
        engine = StubEngine(client, tiny_keyspace())
        for number in range(160):
            session = client.session(f"s{number}", engine.keyspace)
            chain = engine.chain(number, 16)
            session.turn_start()
            assert engine.offload(chain, session=session.id).num_blocks == 16
            session.turn_end()
        assert len(client.list_sessions("idle")) == 160
        assert engine.restore(engine.chain(159, 16)).num_ok == 16
        node.check()


# ---- Probes renew leases


def run_probed(probe: bool) -> list[BlockHash]:
    """The same writes into a small machine, with or without a probe of every key after each step; what is left."""
    space = KeyspaceId(b"p" * 32)
    machine = Machine([TierConfig(Tier.DRAM, 64 * SLOT, lambda t: make_policy("leaf-lru", t), 8 * SLOT)])
    machine.step(events.RegisterKeyspace(space, SLOT), 0)
    paths = [[BlockHash(bytes([n]) * 15 + bytes([d])) for d in range(8)] for n in range(1, 33)]
    for now, path in enumerate(paths):
        [got] = [
            c
            for c in machine.step(events.Reserve(now, space, path, 0, "w", Tier.DRAM, 10**9), now * 1000)
            if isinstance(c, commands.Reserved)
        ]
        machine.step(events.Seal(got.op, tuple(path)), now * 1000 + 1)
        if probe:
            for other in paths:
                machine.match(space, other)
    return sorted(machine.space(space).blocks)


def test_probes_renew_nothing() -> None:
    """Looking for every key all the time changes nothing about what is evicted."""
    assert run_probed(True) == run_probed(False)
    assert len(run_probed(True)) == 64


def test_probes_renew_nothing_while_writing(node: FaultyNode, engine: StubEngine) -> None:
    """A prober that never rests: writing four times DRAM still finds room for every block."""
    chains = [engine.chain(seed, 32) for seed in range(32)]
    ended = threading.Event()

    def probe() -> int:
        count = 0
        with Client(node.address) as prober:
            while not ended.is_set():
                prober.match(chains[count % 32])
                count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        probes = pool.submit(probe)
        try:
            assert [engine.offload(chain).num_blocks for chain in chains] == [32] * 32
        finally:
            ended.set()
        assert probes.result(WAIT_S) > 32
    assert node.sample("kvstore_evictions_total", tier="dram", reason="evicted") > 0
    assert node.runtime.machine.num_leases == 0


# ---- Weights updated, old KV served


def test_weights_updated_old_kv_served(service: ServiceProcess) -> None:
    """A bumped epoch hits nothing of the old one, in DRAM or on NVMe, before or after a restart, and the old slots come
    back."""
    old, new = tiny_keyspace(), tiny_keyspace(weights_epoch=1, weights_digest="c" * 32)
    other = tiny_keyspace(model="other")
    service.start()
    with Client(service.address) as client:
        for keyspace in (old, other):
            engine = StubEngine(client, keyspace)
            for seed in range(8):
                engine.offload(engine.chain(seed, 32), Durability.NVME)
        fresh = StubEngine(client, new)
        assert [client.match(fresh.chain(seed, 32)) for seed in range(8)] == [0] * 8
        service.wait_metric('kvstore_used_bytes{tier="nvme"}', 8 * 32 * SLOT)  # the other model's
        fresh.offload(fresh.chain(0, 32), Durability.NVME)
    service.kill()
    service.start()
    with Client(service.address) as client:
        engine = StubEngine(client, other)
        assert engine.restore(engine.chain(3, 32)).num_ok == 32
        fresh = StubEngine(client, new)
        assert [client.match(fresh.chain(seed, 32)) for seed in range(8)] == [32] + [0] * 7
        assert service.metric('kvstore_used_bytes{tier="nvme"}') == 9 * 32 * SLOT
