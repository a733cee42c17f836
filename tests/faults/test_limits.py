"""Rows about size, counting and speed: long contexts, metrics, many requests for one prefix."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.core.types import Durability
from kvstore.metrics import Metrics
from kvstore.testing.faults import Fault, FaultPlan
from kvstore.testing.node import FaultyNode
from kvstore.testing.service import ServiceProcess, wait_for
from kvstore.testing.stub import StubEngine, damage_reads, tiny_keyspace
from kvstore_client import Client

MIB = 1 << 20
WAIT_S = 60.0


# ---- gRPC


@pytest.mark.parametrize(("num_tokens", "num_layers"), [(128 << 10, 64), (1 << 20, 2)])
def test_grpc_message_limits_are_paged(tmp_path: Path, num_tokens: int, num_layers: int) -> None:
    """A context of 128k tokens whose records fill more than a message, and one of a million tokens in an arena of a
    quarter of its size, go down, become durable, and come back."""
    space = tiny_keyspace(num_layers=num_layers, head_dim=32 if num_layers == 2 else 1)
    num_blocks = num_tokens // space.block_tokens
    whole = num_blocks * space.slot_bytes
    sizes = {"dram_bytes": whole // 4, "nvme_bytes": whole + 16 * MIB, "segment_bytes": 8 * MIB}
    with FaultyNode(tmp_path, **sizes) as node, Client(node.address, timeout_s=120) as client:
        engine = StubEngine(client, space, num_blocks)
        chain = engine.chain(1, num_blocks)
        done = engine.offload(chain, Durability.NVME)
        assert done.num_blocks == num_blocks, done.errors
        seen = engine.restore(chain)
        assert seen.num_ok == num_blocks and not seen.wrong, seen.result
        assert client.explain(chain).num_blocks == num_blocks


# ---- Metrics wrong or fatal


@pytest.mark.parametrize("value", [-1, 0, -(10**30), 10**30, math.nan, math.inf])
def test_metrics_never_raise(value: float) -> None:
    """Whatever is counted, counting it neither raises nor takes anything back."""
    metrics = Metrics()
    number = value if math.isnan(value) or math.isinf(value) else int(value)
    metrics.hits("dram", number)  # type: ignore[arg-type]
    metrics.acquired(number, number)  # type: ignore[arg-type]
    metrics.moved("nvme", "out", number)  # type: ignore[arg-type]
    metrics.failed("bug", number)  # type: ignore[arg-type]
    metrics.sealed(number)  # type: ignore[arg-type]
    metrics.dropped(number)  # type: ignore[arg-type]
    metrics.evicted("dram", "no such reason")
    metrics.rpc("Acquire", value)
    metrics.move("dram", "nvme", value)
    for family in metrics.registry.collect():
        for sample in family.samples:
            if family.type == "counter":
                assert sample.value >= 0


def test_metrics_count_once_and_with_bounded_labels(service: ServiceProcess) -> None:
    """What restores brought back adds up tier by tier, and no label names a session, a block or a client."""
    service.start()
    with Client(service.address) as client:
        engine = StubEngine(client, tiny_keyspace())
        restored = 0
        for seed in range(24):
            session = client.session(f"session-{seed}", engine.keyspace)
            engine.offload(engine.chain(seed, 32), Durability.NVME, session.id)
        for seed in range(24):
            restored += engine.restore(engine.chain(seed, 32)).num_ok
        samples = service.metrics()
        hits = sum(v for name, v in samples.items() if name.startswith("kvstore_hit_blocks_total"))
        moved = {
            t: samples.get(f'kvstore_moved_bytes_total{{direction="out",tier="{t}"}}', 0.0) for t in ("dram", "nvme")
        }
        assert hits == restored == samples["kvstore_matched_blocks_total"] == 24 * 32
        down = samples['kvstore_moved_bytes_total{direction="in",tier="nvme"}']
        assert moved["dram"] + moved["nvme"] == restored * engine.keyspace.block_bytes + down
        assert not any("session-" in name or client.client_id in name for name in samples)
        assert len(samples) < 2_000


# ---- Slower than recompute


def test_slower_than_recompute_50_requests_with_one_prefix(
    node: FaultyNode, client: Client, engine: StubEngine
) -> None:
    """50 restores of one context on NVMe at once: the disk is read once, everybody gets right bytes."""
    chain = engine.chain(1, 64)
    engine.offload(chain, Durability.NVME)
    for seed in range(100, 112):
        engine.offload(engine.chain(seed, 64), Durability.NVME)
    reads = FaultPlan(seed=1)
    damage_reads(client, reads, 32)
    reads.next_faults("read", [Fault.STALL])
    engines = [StubEngine(client, engine.keyspace, 96, n) for n in range(50)]
    before = node.sample("kvstore_moved_bytes_total", tier="nvme", direction="out")
    with ThreadPoolExecutor(50) as pool:
        restores = [pool.submit(e.restore, chain, "", WAIT_S) for e in engines]
        wait_for(lambda: client._shared.num_waiting == 49 * 64, "49 requests to wait for the first")
        reads.release()
        seen = [r.result(WAIT_S) for r in restores]
    assert all(s.num_ok == 64 and not s.wrong for s in seen)
    read = node.sample("kvstore_moved_bytes_total", tier="nvme", direction="out") - before
    assert read == 64 * engine.keyspace.block_bytes
    assert reads.num_calls["read"] <= 64


def test_shared_read_that_fails_is_read_by_the_others(node: FaultyNode, client: Client, engine: StubEngine) -> None:
    """The one whose read the others wait for fails: they read for themselves."""
    chain = engine.chain(1, 64)
    engine.offload(chain, Durability.NVME)
    for seed in range(100, 112):
        engine.offload(engine.chain(seed, 64), Durability.NVME)
    reads = FaultPlan(seed=1)
    damage_reads(client, reads, 32)
    first_ended = threading.Event()
    engines = [StubEngine(client, engine.keyspace, 96, n) for n in range(2)]
    with ThreadPoolExecutor(2) as pool:
        reads.next_faults("read", [Fault.STALL] * 8)
        short = pool.submit(engines[0].restore, chain, "", 0.2)  # gives up by its own deadline
        assert reads.stalled.acquire(timeout=WAIT_S)
        late = pool.submit(engines[1].restore, chain, "", WAIT_S)
        wait_for(lambda: client._shared.num_waiting == 64, "the second to wait")
        first_ended.set()
        reads.release()
        assert not short.result(WAIT_S).wrong
        seen = late.result(WAIT_S)
    assert seen.num_ok == 64 and not seen.wrong
