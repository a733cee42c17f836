"""A stub engine: blocks of tokens without a model, whose KV is the oracle's, so every restored byte can be judged.

engine = StubEngine(client, tiny_keyspace())
chain = engine.chain(seed=7, num_blocks=40)
engine.offload(chain, Durability.NVME)
seen = engine.restore(chain)          # poisons its pool, restores into scattered slots, compares with the oracle
assert not seen.wrong
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import numpy as np

from kvstore.core.hashing import TokenChain
from kvstore.core.keyspace import Keyspace
from kvstore.core.record import NO_PARENT, Record
from kvstore.core.types import Durability
from kvstore.errors import TransferError
from kvstore.testing import oracle
from kvstore.testing.faults import FaultPlan
from kvstore_client import Client, HostPool
from kvstore_client.values import Offloaded, Restored

VOCABULARY = 50_000


def tiny_keyspace(**changes: object) -> Keyspace:
    """A keyspace whose blocks take one slot of 4 KiB: 2 layers of 2 KiB, 16 tokens."""
    fields: dict[str, object] = {
        "model": "tiny",
        "weights_digest": "a" * 32,
        "tokenizer_digest": "b" * 32,
        "kv_dtype": "bfloat16",
        "num_layers": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
        "rope": "theta=10000",
        "block_tokens": 16,
    }
    return Keyspace(**(fields | changes))  # type: ignore[arg-type]


def make_chain(keyspace: Keyspace, seed: int, num_blocks: int, branch: int = 0, shared: int = 0) -> TokenChain:
    """A context of `num_blocks` blocks, the same for equal arguments. The first `shared` blocks depend on `seed` alone;
    what follows depends on `branch` too."""
    chain = TokenChain(keyspace)
    head = np.random.default_rng([seed, 0]).integers(0, VOCABULARY, shared * keyspace.block_tokens)
    tail = np.random.default_rng([seed, 1 + branch]).integers(
        0, VOCABULARY, (num_blocks - shared) * keyspace.block_tokens
    )
    chain.extend(np.concatenate([head, tail]))
    return chain


def identity_of(chain: TokenChain, index: int) -> Record:
    """The record of block `index`, without checksums: what the oracle derives its payload from."""
    keyspace = chain.keyspace
    parent = chain.hash_at(index - 1) if index else NO_PARENT
    sums = bytes(8 * keyspace.num_layers)
    return Record(keyspace.id, chain.hash_at(index), parent, index, chain.digest_at(index), keyspace.slice_bytes, sums)


@dataclass(frozen=True)
class Seen:
    """One restore, judged. `wrong` are positions whose bytes were reported good and aren't the oracle's."""

    asked: int
    num_ok: int
    wrong: list[int] = field(default_factory=list)
    result: Restored | None = None


class StubEngine:
    """One caller at a time. `num_slots` bounds the length of contexts in blocks."""

    def __init__(self, client: Client, keyspace: Keyspace, num_slots: int = 256, seed: int = 0) -> None:
        self.client = client
        self.keyspace = keyspace
        self.pool = HostPool(np.zeros(num_slots * keyspace.slot_bytes, dtype=np.uint8), keyspace.slot_bytes)
        self._rng = np.random.default_rng(seed)
        client.register(keyspace)

    def chain(self, seed: int, num_blocks: int, branch: int = 0, shared: int = 0) -> TokenChain:
        """See `make_chain`."""
        return make_chain(self.keyspace, seed, num_blocks, branch, shared)

    def fill(self, chain: TokenChain, slots: list[int]) -> None:
        """Write the oracle's payload of block `i` into `slots[i]`."""
        size, stride = self.keyspace.block_bytes, self.pool.stride_bytes
        for index, slot in enumerate(slots):
            oracle.fill(identity_of(chain, index), self.pool.flat[slot * stride : slot * stride + size])

    def offload(
        self,
        chain: TokenChain,
        durability: Durability = Durability.DRAM,
        session: str = "",
        timeout_s: float | None = None,
    ) -> Offloaded:
        """Compute (as the oracle does) and offload a whole context."""
        slots = self.slots(chain.num_blocks)
        self.fill(chain, slots)
        return self.client.offload(chain, chain.num_blocks, self.pool, slots, session, durability, timeout_s)

    def restore(self, chain: TokenChain, session: str = "", timeout_s: float | None = None) -> Seen:
        """Restore what the service holds of a context into poisoned, scattered slots, and judge every block."""
        lease = self.client.acquire(chain, session)
        if lease is None:
            return Seen(0, 0)
        try:
            count = lease.num_blocks
            slots = self.slots(count)
            oracle.poison(self.pool.flat)
            got = self.client.restore(lease, chain, 0, count, self.pool, slots, timeout_s)
        finally:
            self.client.release(lease)
        return Seen(count, got.num_ok, self.judge(chain, slots, got.num_ok), got)

    def judge(self, chain: TokenChain, slots: list[int], num_ok: int) -> list[int]:
        """Positions among the first `num_ok` whose slots don't hold the oracle's payload."""
        size, stride = self.keyspace.block_bytes, self.pool.stride_bytes
        return [
            i
            for i in range(num_ok)
            if oracle.verify(identity_of(chain, i), self.pool.flat[slots[i] * stride : slots[i] * stride + size])
            is not None
        ]

    def slots(self, count: int) -> list[int]:
        """`count` slots of the pool, scattered."""
        return [int(s) for s in self._rng.permutation(self.pool.num_slots)[:count]]


def damage_reads(client: Client, plan: FaultPlan, num_segments: int) -> None:
    """Let `plan` judge this client's reads of the first `num_segments` segments, those that exist."""
    descriptors = client._attached()
    for index in range(num_segments):
        with contextlib.suppress(TransferError):
            file, _ = descriptors.segment(index * descriptors.segment_bytes)
            file.faults = plan
