"""A real service process, a real client: round trips, restarts, kills, and what bad input gets."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.hashing import TokenChain
from kvstore.core.keyspace import Keyspace
from kvstore.core.types import Durability
from kvstore.errors import InvalidField, LayoutMismatch, LeaseExpired, Unavailable, UnknownKeyspace, UnknownSession
from kvstore.testing.oracle import poison
from kvstore.testing.service import ServiceProcess
from kvstore_client import Client, HostPool

MIB = 1 << 20


def make_keyspace(**changes: object) -> Keyspace:
    fields: dict[str, object] = {
        "model": "tiny",
        "weights_digest": "a" * 32,
        "tokenizer_digest": "b" * 32,
        "kv_dtype": "bfloat16",
        "num_layers": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "rope": "theta=10000",
        "block_tokens": 16,
    }
    return Keyspace(**(fields | changes))  # type: ignore[arg-type]


KEYSPACE = make_keyspace()


def make_pool(num_slots: int) -> HostPool:
    return HostPool(np.zeros(num_slots * KEYSPACE.slot_bytes, dtype=np.uint8), KEYSPACE.slot_bytes)


def payload(seed: int, num_blocks: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_blocks * KEYSPACE.slot_bytes, dtype=np.uint8)


def tokens(seed: int, num_blocks: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, num_blocks * KEYSPACE.block_tokens)


@pytest.fixture
def service(tmp_path: Path) -> ServiceProcess:
    process = ServiceProcess(tmp_path, dram_bytes=4 * MIB, nvme_bytes=64 * MIB, segment_bytes=MIB)
    process.start()
    yield process
    process.stop()


@pytest.fixture
def client(service: ServiceProcess) -> Client:
    with Client(service.address) as client:
        client.register(KEYSPACE)
        yield client


def offload(client: Client, seed: int, num_blocks: int, durability: Durability, session: str = "") -> TokenChain:
    chain = TokenChain(KEYSPACE)
    chain.extend(tokens(seed, num_blocks))
    pool = make_pool(num_blocks)
    pool.flat[:] = payload(seed, num_blocks)
    done = client.offload(chain, num_blocks, pool, range(num_blocks), session, durability)
    assert done.num_blocks == num_blocks, done
    return chain


def restored_equals(client: Client, chain: TokenChain, seed: int) -> tuple[int, int]:
    """Restore into scattered, poisoned slots and compare; returns blocks by tier."""
    num_blocks = chain.num_blocks
    pool = make_pool(num_blocks + 3)
    poison(pool.flat)
    slots = list(np.random.default_rng(1).permutation(num_blocks + 3)[:num_blocks])
    lease = client.acquire(chain)
    assert lease is not None and lease.num_blocks == num_blocks
    got = client.restore(lease, chain, 0, num_blocks, pool, slots)
    client.release(lease)
    assert got.num_ok == num_blocks, got
    want = payload(seed, num_blocks).reshape(num_blocks, -1)[:, : KEYSPACE.block_bytes]
    have = pool.flat.reshape(-1, KEYSPACE.slot_bytes)[slots, : KEYSPACE.block_bytes]
    assert np.array_equal(want, have)
    return got.num_dram, got.num_nvme


def test_what_was_offloaded_comes_back_from_dram_and_from_nvme(client: Client) -> None:
    chains = [offload(client, seed, 40, Durability.NVME) for seed in range(8)]  # 8 x 640 KiB into 4 MiB of DRAM
    tiers = [restored_equals(client, chain, seed) for seed, chain in enumerate(chains)]
    assert sum(dram for dram, _ in tiers) > 0
    assert sum(nvme for _, nvme in tiers) > 0


def test_restart_keeps_what_was_acknowledged_as_durable(service: ServiceProcess, client: Client) -> None:
    session = client.session("agent", KEYSPACE)
    chain = offload(client, 5, 30, Durability.NVME, session.id)
    client.export_context("agent", "saved")
    epoch = client.boot_epoch
    service.kill()
    with pytest.raises(Unavailable):
        client.match(chain)
    service.start()
    service.wait_attached(client, epoch)
    assert restored_equals(client, chain, 5) == (0, 30)
    assert client.resume_context("saved", "again") == 30
    assert {s.session_id for s in client.list_sessions()} >= {"agent", "again"}


def test_kills_during_offloads_lose_nothing_acknowledged(service: ServiceProcess) -> None:
    rng = np.random.default_rng(3)
    kept: dict[int, TokenChain] = {}
    for life in range(5):
        with Client(service.address) as client:
            client.register(KEYSPACE)
            for seed, chain in kept.items():
                restored_equals(client, chain, seed)
            killer = service.kill_after_ms(int(rng.integers(5, 120)))
            try:
                for i in range(30):
                    seed = life * 100 + i
                    kept[seed] = offload(client, seed, 4, Durability.NVME)
            except (Unavailable, AssertionError):
                pass
            killer.join()
        service.start()


def test_a_killed_client_leaves_no_lease_behind(service: ServiceProcess) -> None:
    with Client(service.address) as other:
        other.register(KEYSPACE)
        chain = offload(other, 1, 8, Durability.DRAM)
        other.acquire(chain)
        assert service.metric("kvstore_leases") == 1
        other._closed.set()  # dies without releasing
    service.wait_metric("kvstore_leases", 0)
    service.wait_metric("kvstore_clients", 0)


def test_wrong_bytes_in_the_arena_shorten_the_prefix(client: Client) -> None:
    chain = offload(client, 9, 12, Durability.DRAM)
    arena = client._attached().arena.array
    lease = client.acquire(chain)
    assert lease is not None
    pool = make_pool(12)
    whole = client.restore(lease, chain, 0, 12, pool, range(12))
    assert whole.num_dram == 12
    needle = pool.flat.reshape(12, -1)[7, 100:164].tobytes()
    at = arena.tobytes().index(needle)
    arena[at] ^= 1
    cut = client.restore(lease, chain, 0, 12, pool, range(12))
    assert cut.num_ok == 7 and "block 7" in cut.errors[0]
    client.release(lease)
    assert client.match(chain) == 7
    assert offload_again(client, chain) == 12
    restored_equals(client, chain, 9)


def offload_again(client: Client, chain: TokenChain) -> int:
    pool = make_pool(12)
    pool.flat[:] = payload(9, 12)
    return client.offload(chain, 12, pool, range(12)).num_blocks


def test_fork_shares_and_supersession_frees(client: Client) -> None:
    with client.session("parent", KEYSPACE) as parent:
        parent.update(tokens(4, 10))
        pool = make_pool(10)
        pool.flat[:] = payload(4, 10)
        parent.offload(pool, range(10))
        child = parent.fork("child")
        assert child.match(tokens(4, 10)) == 10 * KEYSPACE.block_tokens
        assert parent.tool_start("bash", expected_s=20) == "accepted"
        assert parent.tool_start("bash", expected_s=-1) == "refused"
        parent.supersede(tokens(4, 5))
        info = {s.session_id: s for s in client.list_sessions()}
        assert info["child"].num_blocks == 10
        assert info["parent"].num_blocks == 5
        assert child.end() == 5


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda c: c.match(TokenChain(make_keyspace(model="other"))), UnknownKeyspace, "keyspace_id"),
        (lambda c: c.signal("nobody", 0), UnknownSession, "open it first"),
        (lambda c: c.session("", KEYSPACE), InvalidField, "session_id"),
        (lambda c: c.resume_context("nothing", "x"), InvalidField, "name"),
        (lambda c: c.list_sessions("sleeping"), InvalidField, "activity"),
        (lambda c: TokenChain(KEYSPACE).extend([1, -2]), InvalidField, "token_ids"),
        (lambda c: TokenChain(KEYSPACE).extend([2**40]), InvalidField, "position 0"),
        (lambda c: make_keyspace(kv_dtype="auto"), InvalidField, "kv_dtype"),
        (lambda c: HostPool(np.zeros(100, dtype=np.uint8), 100), InvalidField, "stride_bytes"),
    ],
)
def test_bad_input_names_the_field_and_the_mend(client: Client, call, error, words) -> None:
    with pytest.raises(error) as caught:
        call(client)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_signals_say_what_the_agent_does(client: Client) -> None:
    from kvstore_api.v1 import kvstore_pb2 as pb

    with client.session("s", KEYSPACE) as session:
        for say, activity in (
            (session.turn_start, "running"),
            (session.stopped, "open"),
            (lambda: session.tool_start("bash"), "tool_wait"),
            (session.tool_end, "running"),
            (session.turn_end, "idle"),
        ):
            say()
            assert {s.session_id: s.activity for s in client.list_sessions()}["s"] == activity
        with pytest.raises(InvalidField, match="kind: 9 is unknown"):
            client._call(client._sessions.Signal, pb.SignalRequest(session_id="s", kind=9))  # type: ignore[arg-type]


def test_records_of_another_layout_are_refused(client: Client) -> None:
    other = make_keyspace(num_layers=2)
    chain = TokenChain(KEYSPACE)
    chain.extend(tokens(1, 1))
    import kvstore_client.client as module
    from kvstore_api.v1 import kvstore_pb2 as pb

    reply = client._call(
        client._cache.Reserve,
        pb.ReserveRequest(keyspace_id=KEYSPACE.id, hashes=chain.hashes, client_id=client.client_id),
    )
    records, _ = module.write_blocks(client._engine, chain, [(0, 0)], make_pool(1), [0], client._attached(), 1e6)
    bad = records[0].__class__(
        KEYSPACE.id,
        records[0].hash,
        records[0].parent,
        0,
        records[0].digest,
        other.slice_bytes,
        records[0].checksums[:16],
    )
    with pytest.raises(LayoutMismatch, match="registered layout"):
        client._call(
            client._cache.Seal,
            pb.SealRequest(op_id=reply.op_id, boot_epoch=reply.boot_epoch, records=[bad.encode()]),
        )


def test_expired_lease_is_an_error_and_not_a_mix(service: ServiceProcess, client: Client) -> None:
    chain = offload(client, 2, 4, Durability.DRAM)
    lease = client.acquire(chain)
    assert lease is not None
    client.release(lease)
    with pytest.raises(LeaseExpired):
        client.restore(lease, chain, 0, 4, make_pool(4), range(4))


@pytest.mark.parametrize("flag", ["data_dir", "socket"])
def test_a_second_service_on_the_same_place_is_refused_in_one_line(
    service: ServiceProcess, tmp_path: Path, flag: str
) -> None:
    other = tmp_path / "other"
    second = ServiceProcess(other, dram_bytes=4 * MIB, nvme_bytes=8 * MIB, segment_bytes=MIB)
    setattr(second, flag, getattr(service, flag))
    status, text = second.run_to_end()
    assert status == 2
    assert len(text.strip().splitlines()) == 1
    assert "Traceback" not in text
    assert "another" in text


def test_stop_is_clean_and_keeps_everything(service: ServiceProcess, client: Client) -> None:
    chain = offload(client, 8, 20, Durability.NVME)
    epoch = client.boot_epoch
    assert service.stop(signal.SIGTERM) == 0
    service.start()
    service.wait_attached(client, epoch)
    restored_equals(client, chain, 8)
