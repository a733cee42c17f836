"""Rows about identity: what makes two blocks the same, in every process, and what is refused."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from kvstore.core.hashing import TokenChain
from kvstore.core.keyspace import Keyspace
from kvstore.errors import InvalidField, LayoutMismatch
from kvstore.testing.node import FaultyNode
from kvstore.testing.oracle import Bytes
from kvstore.testing.stub import StubEngine, tiny_keyspace
from kvstore_api.v1 import kvstore_pb2 as pb
from kvstore_client import Client, HostPool
from kvstore_client.moving import write_blocks

OPTIONAL: dict[str, list[object]] = {
    "weights_epoch": [0, 1],
    "latent_dim": [0, 64],
    "tp_size": [2, 4],
    "tp_rank": [0, 1],
    "pp_size": [2, 4],
    "pp_rank": [0, 1],
    "adapter_digest": ["", "d" * 32],
    "tenant": ["default", "1"],
    "model": ["tiny", "1"],
    "rope": ["theta=10000", "1"],
    "kv_dtype": ["bfloat16", "float16"],
}
BASE = {"tp_size": 2, "pp_size": 2}


def keyspace(**changes: object) -> Keyspace:
    given = {**BASE, **changes}
    if given.get("latent_dim"):
        given["layout"] = "block-first-mla"
    return tiny_keyspace(**given)


# ---- Identity left out of the key


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(OPTIONAL, 2)))
def test_identity_left_out_of_the_key(one: str, other: str) -> None:
    """For every pair of fields: a change in one, in the other, in both or in none gives four keys."""
    values = itertools.product(OPTIONAL[one], OPTIONAL[other])
    ids = {keyspace(**{one: a, other: b}).id for a, b in values}
    assert len(ids) == 4


def test_identity_of_images_and_of_where_they_are() -> None:
    """An image's digest and its place in the context enter the hash."""
    space = tiny_keyspace()
    tokens = np.arange(64)
    from kvstore.core.hashing import ExtraKey

    made = [
        TokenChain(space),
        TokenChain(space, [ExtraKey(3, b"x" * 16)]),
        TokenChain(space, [ExtraKey(4, b"x" * 16)]),
        TokenChain(space, [ExtraKey(3, b"y" * 16)]),
    ]
    for chain in made:
        chain.extend(tokens)
    assert len({chain.hash_at(0) for chain in made}) == len({chain.digest_at(0) for chain in made}) == 4


@pytest.mark.parametrize("value", ["auto", ""])
@pytest.mark.parametrize("field", ["kv_dtype", "model", "rope"])
def test_identity_takes_resolved_values_only(field: str, value: str) -> None:
    """What two machines could resolve differently is refused by name."""
    with pytest.raises(InvalidField, match=field):
        tiny_keyspace(**{field: value})


def test_identity_separates_tenants_of_equal_shape(client: Client) -> None:
    """The same tokens and the same byte size under two tenants: nobody sees the other's blocks."""
    mine, theirs = (StubEngine(client, tiny_keyspace(tenant=t)) for t in ("mine", "theirs"))
    mine.offload(mine.chain(1, 16))
    assert client.match(theirs.chain(1, 16)) == 0
    assert theirs.restore(theirs.chain(1, 16)).asked == 0


# ---- Hash differs between processes

PRINT_HASHES = """
import numpy as np
from kvstore.testing.stub import make_chain, tiny_keyspace
chain = make_chain(tiny_keyspace(), 7, 64)
print(chain.keyspace.id.hex(), chain.hashes.hex(), chain.digests.hex())
"""


def test_hash_differs_between_processes() -> None:
    """Hash seeds, locales, time zones and working folders of a process change nothing."""
    found = set()
    for seed, locale, zone in (("0", "C", "UTC"), ("1", "C.UTF-8", "Asia/Tokyo"), ("4242", "POSIX", "America/Lima")):
        env = os.environ | {"PYTHONHASHSEED": seed, "LC_ALL": locale, "TZ": zone}
        done = subprocess.run(
            [sys.executable, "-c", PRINT_HASHES], env=env, capture_output=True, text=True, check=True, cwd="/"
        )
        found.add(done.stdout)
    assert len(found) == 1


def test_hash_differs_sounds_the_alarm(node: FaultyNode, client: Client, engine: StubEngine) -> None:
    """Blocks are written and asked for, and nothing is ever found: that is said aloud, and taken back with the first
    hit."""
    for seed in range(40):
        engine.offload(engine.chain(seed, 32))
        client.acquire(engine.chain(10_000 + seed, 32))
    assert node.sample("kvstore_never_hit") == 1
    engine.restore(engine.chain(39, 32))
    assert node.sample("kvstore_never_hit") == 0


# ---- Layout or version mismatch accepted


@pytest.mark.parametrize("changes", [{"layout": "layer-first"}, {"layout_version": 2}, {"layout_version": 0}])
def test_layout_or_version_mismatch_is_refused(changes: dict[str, object]) -> None:
    """A layout, or a version of one, that this build doesn't know is refused by name, whatever its byte size."""
    with pytest.raises(InvalidField, match=next(iter(changes))):
        tiny_keyspace(**changes)


def test_layout_of_equal_size_is_another_keyspace(client: Client) -> None:
    """Two heads of 16 and one of 32 have blocks of equal size; neither is taken for the other."""
    one, two = tiny_keyspace(), tiny_keyspace(num_kv_heads=2, head_dim=16)
    assert one.block_bytes == two.block_bytes
    StubEngine(client, one).offload(StubEngine(client, one).chain(1, 8))
    assert client.match(StubEngine(client, two).chain(1, 8)) == 0


def test_layout_of_records_is_checked(client: Client, engine: StubEngine) -> None:
    """Checksums over other slices than the keyspace's are refused at Seal; nothing is published."""
    chain = engine.chain(1, 1)
    request = pb.ReserveRequest(keyspace_id=engine.keyspace.id, hashes=chain.hashes, client_id=client.client_id)
    reply = client._call(client._cache.Reserve, request)
    other = TokenChain(tiny_keyspace(num_layers=1, block_tokens=16))
    other.extend(chain.tokens)
    records, _ = write_blocks(client._engine, other, [(0, 0)], engine.pool, [0], client._attached(), 1e9)
    seal = pb.SealRequest(op_id=reply.op_id, boot_epoch=reply.boot_epoch, records=[r.encode() for r in records])
    with pytest.raises((LayoutMismatch, InvalidField)):
        client._call(client._cache.Seal, seal)
    assert client.match(chain) == 0


def stamped(space: Keyspace, num_blocks: int) -> Bytes:
    """`[block][layer][k|v][token][head][dim]` u16: every element names its own place."""
    shape = (num_blocks, space.num_layers, 2, space.block_tokens, space.num_kv_heads, space.head_dim)
    return np.arange(np.prod(shape), dtype=np.uint32).astype(np.uint16).view(np.uint8)


def test_layout_keeps_every_element_in_its_place(client: Client) -> None:
    """Values stamped with block, layer, k or v, token, head and dimension come back where they were."""
    space = tiny_keyspace(num_kv_heads=2, num_layers=3)
    client.register(space)
    chain = StubEngine(client, space).chain(1, 5)
    pool = HostPool(np.zeros(5 * space.slot_bytes, dtype=np.uint8), space.slot_bytes)
    blocks = stamped(space, 5).reshape(5, space.block_bytes)
    pool.flat.reshape(5, -1)[:, : space.block_bytes] = blocks
    client.offload(chain, 5, pool, range(5))
    target = HostPool(np.zeros(5 * space.slot_bytes, dtype=np.uint8), space.slot_bytes)
    lease = client.acquire(chain)
    assert lease is not None
    client.restore(lease, chain, 0, 5, target, [4, 2, 0, 1, 3])
    back = target.flat.reshape(5, -1)[[4, 2, 0, 1, 3], : space.block_bytes]
    assert np.array_equal(back, blocks)


# ---- Agent prompt drift


def test_agent_prompt_drift(client: Client, engine: StubEngine) -> None:
    """A re-rendered prompt differs in one token: matching goes by ids, up to the block before it, and both sides say
    where: the chain names the token, Explain the block."""
    with client.session("agent", engine.keyspace) as session:
        tokens = engine.chain(1, 20).tokens.copy()
        session.update(tokens)
        engine.offload(session.chain, session=session.id)
        drifted = tokens.copy()
        drifted[16 * 11 + 5] ^= 1
        assert session.update(drifted) == 16 * 11 + 5
        assert client.match(session.chain) == 11
        told = client.explain(session.chain, session.id)
        assert told.num_blocks == 11
        assert "block 11" in told.reason
