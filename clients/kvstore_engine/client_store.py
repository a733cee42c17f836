"""`ContextStore` over `kvstore_client`: the node service on this host.

The service may be away at any time, at start too: calls then fail fast (Unavailable, which the scheduler takes as a
miss), and a new attempt to connect is made at most once in `RETRY_S`. Once connected the client reconnects by itself.

A pool in host memory is read and written in place by the client's own threads; one on a device by `device.PoolMover`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstore.core.events import SignalKind
from kvstore.core.hashing import TokenChain
from kvstore.core.keyspace import Keyspace
from kvstore.core.types import Durability
from kvstore.errors import SetupError, Unavailable, UnknownSession
from kvstore_client import Client, HostPool, Lease, PoolReport
from kvstore_client.layers import LayerGate
from kvstore_client.pool import Pool
from kvstore_engine import device as devices
from kvstore_engine.device import PoolMover
from kvstore_engine.pool import KVPool
from kvstore_engine.store import PoolStats, RestoreResult, StoreLease

RETRY_S = 1.0
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Claim:
    """What a `StoreLease` of ours carries."""

    lease: Lease
    chain: TokenChain


def claim_of(lease: StoreLease) -> Claim:
    """Ours again."""
    assert isinstance(lease.token, Claim)
    return lease.token


class ServiceStore:
    """The service at `address`, for blocks of one keyspace.

    `device`: where the engine's pool lies. Raises what registering the keyspace raises (a service that refuses our
    layout must not look like one that is away).
    """

    def __init__(
        self,
        address: str,
        keyspace: Keyspace,
        *,
        restore_timeout_s: float,
        offload_timeout_s: float,
        device: torch.device = CPU,
    ) -> None:
        self._mover = PoolMover() if device.type in devices.ON_ARENA else None
        self._address = address
        self._keyspace = keyspace
        self._restore_timeout_s = restore_timeout_s
        self._offload_timeout_s = offload_timeout_s
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._retry_at = 0.0
        self._open: set[str] = set()
        with contextlib.suppress(Unavailable):  # started before the service: later calls connect
            self._connected()

    @property
    def connected(self) -> bool:
        """Did the service ever answer?"""
        return self._client is not None

    @property
    def available(self) -> bool:
        """Did the service answer lately?"""
        return self._client is not None and bool(self._client.health)

    @property
    def boot_epoch(self) -> int:
        """Which life of the service the client is attached to; 0 while it's away."""
        return self._client.boot_epoch if self._client is not None else 0

    def _connected(self) -> Client:
        with self._lock:
            if self._client is None:
                if time.monotonic() < self._retry_at:
                    raise Unavailable(f"store: {self._address} is away; retrying")
                self._retry_at = time.monotonic() + RETRY_S
                client = Client(self._address, timeout_s=self._restore_timeout_s, engine=self._mover)
                try:
                    client.register(self._keyspace)
                except BaseException:
                    client.close()
                    raise
                self._client = client
            return self._client

    def _session(self, client: Client, session: str) -> str:
        if session and session not in self._open:
            client.open(session, self._keyspace.id)
            self._open.add(session)
        return session

    def _view(self, pool: KVPool) -> Pool:
        """The pool as the client knows it."""
        if pool.arena is None:
            return HostPool(pool.host_view(), pool.stride)
        if self._mover is None:
            raise SetupError(f"store: was made for a pool in host memory, and this one is on {pool.device}")
        self._mover.use(pool.arena)
        return pool.arena

    # ---- reading

    def acquire(self, session: str, chain: TokenChain, num_blocks: int) -> StoreLease | None:
        client = self._connected()
        try:
            lease = client.acquire(chain, self._session(client, session), num_blocks)
        except UnknownSession:  # retired by the service: a new one
            self._open.discard(session)
            lease = client.acquire(chain, self._session(client, session), num_blocks)
        return None if lease is None else StoreLease(lease.num_blocks, Claim(lease, chain))

    def restore(
        self,
        lease: StoreLease,
        first: int,
        last: int,
        pool: KVPool,
        slots: Sequence[int],
        gate: LayerGate | None = None,
    ) -> RestoreResult:
        client = self._connected()
        claim = claim_of(lease)
        target = self._view(pool)
        got = client.restore(claim.lease, claim.chain, first, last, target, slots, self._restore_timeout_s, gate)
        return RestoreResult(got.num_ok, got.num_dram, got.num_nvme, got.seconds)

    def release(self, lease: StoreLease) -> None:
        if self._client is not None:
            self._client.release(claim_of(lease).lease)

    # ---- writing

    def offload(
        self, session: str, chain: TokenChain, last: int, pool: KVPool, slots: Sequence[int], durability: Durability
    ) -> int:
        client = self._connected()
        session = self._session(client, session)
        source = self._view(pool)
        timeout = self._offload_timeout_s
        return client.offload(chain, last, source, slots[:last], session, durability, timeout).num_blocks

    # ---- sessions

    def signal(
        self, session: str, kind: SignalKind, tool: str = "", expected_s: float = 0.0, output_tokens: int = 0
    ) -> None:
        client = self._connected()
        try:
            client.signal(self._session(client, session), int(kind), tool, expected_s, output_tokens)
        except UnknownSession:
            self._open.discard(session)
            client.signal(self._session(client, session), int(kind), tool, expected_s, output_tokens)

    def fork(self, parent: str, session: str) -> None:
        client = self._connected()
        client.fork(self._session(client, parent), session)
        self._open.add(session)

    def end(self, session: str) -> None:
        client = self._connected()
        client.end(self._session(client, session))
        self._open.discard(session)

    def report(self, stats: PoolStats) -> None:
        client = self._client
        if client is not None:
            client.report(
                PoolReport(
                    stats.capacity_bytes,
                    stats.used_bytes,
                    stats.hit_tokens,
                    stats.computed_tokens,
                    stats.restored_tokens_dram,
                    stats.restored_tokens_nvme,
                )
            )

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._mover is not None:  # it may never have come to a client
            self._mover.close()
