"""`ContextStore` over `kvstore_client`: the node service on this host.

The service may be away at any time, at start too: calls then fail fast (Unavailable, which the scheduler takes as a
miss), and a new attempt to connect is made at most once in `RETRY_S`. Once connected the client reconnects by itself.

A pool in host memory is read and written in place. A pool on a device goes through a window of host memory, a few
blocks at a time, and what arrived is read back and compared.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvstore.core.events import SignalKind
from kvstore.core.hashing import TokenChain
from kvstore.core.keyspace import Keyspace
from kvstore.core.types import Durability
from kvstore.errors import Unavailable, UnknownSession
from kvstore_client import Client, HostPool, Lease, PoolReport
from kvstore_engine.pool import KVPool, allocate_host
from kvstore_engine.store import PoolStats, RestoreResult, StoreLease

RETRY_S = 1.0
WINDOW_BLOCKS = 32


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

    Raises what registering the keyspace raises (a service that refuses our layout must not look like one that is away).
    """

    def __init__(self, address: str, keyspace: Keyspace, *, restore_timeout_s: float, offload_timeout_s: float) -> None:
        self._address = address
        self._keyspace = keyspace
        self._restore_timeout_s = restore_timeout_s
        self._offload_timeout_s = offload_timeout_s
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._retry_at = 0.0
        self._open: set[str] = set()
        self._windows: list[Window] = []
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
                client = Client(self._address, timeout_s=self._restore_timeout_s)
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

    # ---- reading

    def acquire(self, session: str, chain: TokenChain, num_blocks: int) -> StoreLease | None:
        client = self._connected()
        try:
            lease = client.acquire(chain, self._session(client, session), num_blocks)
        except UnknownSession:  # retired by the service: a new one
            self._open.discard(session)
            lease = client.acquire(chain, self._session(client, session), num_blocks)
        return None if lease is None else StoreLease(lease.num_blocks, Claim(lease, chain))

    def restore(self, lease: StoreLease, first: int, last: int, pool: KVPool, slots: Sequence[int]) -> RestoreResult:
        client = self._connected()
        claim = claim_of(lease)
        if pool.device.type != "cpu":
            return self._restore_to_device(client, claim, first, pool, slots)
        target = HostPool(pool.host_view(), pool.stride)
        got = client.restore(claim.lease, claim.chain, first, last, target, slots, self._restore_timeout_s)
        return RestoreResult(got.num_ok, got.num_dram, got.num_nvme, got.seconds)

    def release(self, lease: StoreLease) -> None:
        if self._client is not None:
            self._client.release(claim_of(lease).lease)

    def _restore_to_device(
        self, client: Client, claim: Claim, first: int, pool: KVPool, slots: Sequence[int]
    ) -> RestoreResult:
        window = self._take_window(pool)
        num_ok = num_dram = num_nvme = 0
        started = time.monotonic()
        for at, part in pieces(slots):
            got = client.restore(
                claim.lease,
                claim.chain,
                first + at,
                first + at + len(part),
                window.pool,
                range(len(part)),
                self._restore_timeout_s,
            )
            arrived = window.to_device(pool, part[: got.num_ok])
            num_ok, num_dram, num_nvme = num_ok + arrived, num_dram + got.num_dram, num_nvme + got.num_nvme
            if arrived < len(part):
                break
        self._windows.append(window)
        return RestoreResult(num_ok, num_dram, num_nvme, time.monotonic() - started)

    # ---- writing

    def offload(
        self, session: str, chain: TokenChain, last: int, pool: KVPool, slots: Sequence[int], durability: Durability
    ) -> int:
        client = self._connected()
        session = self._session(client, session)
        if pool.device.type != "cpu":
            return self._offload_from_device(client, session, chain, last, pool, slots, durability)
        source = HostPool(pool.host_view(), pool.stride)
        timeout = self._offload_timeout_s
        return client.offload(chain, last, source, slots[:last], session, durability, timeout).num_blocks

    def _offload_from_device(
        self,
        client: Client,
        session: str,
        chain: TokenChain,
        last: int,
        pool: KVPool,
        slots: Sequence[int],
        durability: Durability,
    ) -> int:
        # The client wants every block of a path in one pool. What is held already is never read.
        held = client.match(chain)
        window = Window(pool, max(1, last))
        for at, part in pieces(slots[:last]):
            if at + len(part) > held:
                window.from_device(pool, part, at)
        timeout = self._offload_timeout_s
        return client.offload(chain, last, window.pool, range(last), session, durability, timeout).num_blocks

    def _take_window(self, pool: KVPool) -> Window:
        try:
            return self._windows.pop()
        except IndexError:
            return Window(pool, WINDOW_BLOCKS)

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


class Window:
    """Host memory between a device pool and the service; `pool` is its client's view."""

    def __init__(self, pool: KVPool, num_blocks: int) -> None:
        self.rows = allocate_host(num_blocks * pool.stride).view(num_blocks, pool.stride)
        self.pool = HostPool(self.rows.numpy(), pool.stride)

    def to_device(self, pool: KVPool, slots: Sequence[int]) -> int:
        """Copy the first rows to `slots`, read them back; how many leading ones arrived unchanged."""
        index = torch.tensor(slots, dtype=torch.int64, device=pool.device)
        pool.raw[index] = self.rows[: len(slots)].to(pool.device)
        back = pool.raw[index].to("cpu")
        for at in range(len(slots)):
            if not torch.equal(back[at], self.rows[at]):
                return at
        return len(slots)

    def from_device(self, pool: KVPool, slots: Sequence[int], at: int) -> None:
        """Copy `slots` into the rows from `at` on."""
        index = torch.tensor(slots, dtype=torch.int64, device=pool.device)
        self.rows[at : at + len(slots)] = pool.raw[index].to("cpu")


def pieces(slots: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Runs of at most `WINDOW_BLOCKS` slots, and where each begins."""
    for at in range(0, len(slots), WINDOW_BLOCKS):
        yield at, slots[at : at + WINDOW_BLOCKS]
