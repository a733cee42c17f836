"""A node in this process: the index service, the asyncio client, health and reflection."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import kvstore
from kvstore.core.hashing import TokenChain
from kvstore.core.keyspace import Keyspace
from kvstore.core.types import Durability
from kvstore.errors import SetupError
from kvstore_api.v1 import kvstore_pb2 as pb
from kvstore_api.v1 import kvstore_pb2_grpc as rpcs
from kvstore_client import AsyncClient, Client, HostPool

MIB = 1 << 20
KEYSPACE = Keyspace(
    model="tiny",
    weights_digest="c" * 32,
    tokenizer_digest="d" * 32,
    kv_dtype="float16",
    num_layers=2,
    num_kv_heads=2,
    head_dim=32,
    rope="theta=10000",
    block_tokens=16,
)
SIZES = {
    "dram_bytes": 2 * MIB,
    "nvme_bytes": 8 * MIB,
    "segment_bytes": MIB,
    "nvme_reserve_bytes": 0,
    "dram_policy": "leaf-lru",
}


@pytest.fixture
def client() -> Client:
    with kvstore.embedded(**SIZES) as client:
        client.register(KEYSPACE)
        yield client


def filled_pool(num_blocks: int) -> HostPool:
    pool = HostPool(np.zeros(num_blocks * KEYSPACE.slot_bytes, dtype=np.uint8), KEYSPACE.slot_bytes)
    pool.flat[:] = np.random.default_rng(0).integers(0, 256, len(pool.flat), dtype=np.uint8)
    return pool


def make_chain(num_blocks: int, seed: int = 0) -> TokenChain:
    chain = TokenChain(KEYSPACE)
    chain.extend(np.random.default_rng(seed).integers(0, 1000, num_blocks * KEYSPACE.block_tokens))
    return chain


def test_watch_gives_a_snapshot_and_then_changes(client: Client) -> None:
    first = make_chain(6)
    client.offload(first, 6, filled_pool(6), range(6))
    events = client.watch()
    hashes, parents = b"", b""
    for event in events:
        if event.kind == pb.IndexEvent.SNAPSHOT_END:
            break
        hashes += event.hashes
        parents += event.parents
    assert {hashes[i : i + 16] for i in range(0, len(hashes), 16)} == {bytes(first.hash_at(i)) for i in range(6)}
    assert len(parents) == len(hashes)
    second = make_chain(2, seed=1)
    client.offload(second, 2, filled_pool(2), range(2))
    stored = []
    sequences = []
    for event in events:
        sequences.append(event.sequence)
        if event.kind == pb.IndexEvent.STORED:
            stored.append(event.hashes)
        if len(stored) == 2:
            break
    assert stored == [second.hash_at(0), second.hash_at(1)]
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))


def test_explain_says_where_and_why(client: Client) -> None:
    chain = make_chain(6)
    client.session("agent", KEYSPACE)
    client.offload(chain, 4, filled_pool(4), range(4), "agent")
    reply = client.explain(chain, "agent")
    assert (reply.num_blocks, reply.num_requested) == (4, 6)
    assert "never stored" in reply.reason
    assert "4 blocks resident" in reply.session
    drifted = make_chain(4)
    drifted.truncate(40)
    drifted.extend([7] * 24)
    reply = client.explain(drifted, "agent")
    assert reply.num_blocks == 2
    assert "differs from the session's context in block 2" in reply.reason


def test_explain_remembers_evictions(client: Client) -> None:
    chains = [make_chain(100, seed) for seed in range(30)]  # far more than 8 MiB
    for chain in chains:
        client.offload(chain, 100, filled_pool(100), range(100))
    reasons = [client.explain(chain).reason for chain in chains]
    assert any("evicted from" in reason for reason in reasons), reasons


def test_route_ranks_this_node(client: Client) -> None:
    chain = make_chain(3)
    client.offload(chain, 3, filled_pool(3), range(3))
    with grpc.insecure_channel(client.address) as channel:
        request = pb.RouteRequest(keyspace_id=KEYSPACE.id, hashes=chain.hashes)
        [node] = rpcs.KVIndexStub(channel).Route(request, timeout=5).nodes
    assert node.num_blocks == 3
    assert node.address == client.address


def test_health_and_reflection_are_the_standard_ones(client: Client) -> None:
    with grpc.insecure_channel(client.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "kvstore_api.v1.KVCache"):
            reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert "kvstore_api.v1.Sessions" in ProtoReflectionDescriptorDatabase(channel).get_services()


def test_asyncio_client_does_the_same(client: Client) -> None:
    async def work() -> int:
        async with await AsyncClient.connect(client.address) as other:
            await other.register(KEYSPACE)
            async with await other.session("async", KEYSPACE) as session:
                tokens = make_chain(5).tokens
                session.chain.update(tokens)
                await session.turn_start()
                await session.offload(filled_pool(5), range(5))
                assert await session.tool_start("bash", 3.0) == "accepted"
                assert await session.match(tokens) == 5 * KEYSPACE.block_tokens
                pool = HostPool(np.zeros(5 * KEYSPACE.slot_bytes, dtype=np.uint8), KEYSPACE.slot_bytes)
                got = await session.restore(pool, range(5))
                assert np.array_equal(pool.flat, filled_pool(5).flat)
                return got.num_ok

    assert asyncio.run(work()) == 5
    assert client.list_sessions() == []


def test_prefetch_brings_a_session_up(client: Client) -> None:
    with client.session("agent", KEYSPACE) as session:
        session.chain.update(make_chain(40).tokens)
        session.offload(filled_pool(40), range(40), Durability.NVME)
        for seed in range(1, 6):
            client.offload(make_chain(100, seed), 100, filled_pool(100), range(100), durability=Durability.NVME)
        before = {s.session_id: s for s in client.list_sessions()}["agent"]
        assert before.num_blocks_dram < 40 and before.num_blocks_nvme == 40
        assert client.prefetch("agent") > 0


def test_setup_errors_reach_the_caller(tmp_path: object) -> None:
    with pytest.raises(SetupError, match="socket"), kvstore.embedded(**SIZES, socket="/proc/nowhere/kv.sock"):
        pass
