"""One connection to a service: its channel, its descriptors, and a life line kept.

    life thread:  connect -> keyspaces and sessions made known -> heartbeats, renewals ... -> away -> connect ...

When the service goes away every call raises Unavailable at once or by its deadline; when it comes back (with a new boot
epoch) keyspaces and sessions are made known again. Leases of the old life are gone.

A lease is renewed only while a restore under it runs: one that was taken and forgotten ends by the service's clock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

import grpc

from kvstore.core.keyspace import Keyspace
from kvstore.core.types import KeyspaceId
from kvstore.errors import InvalidField, KVStoreError, Unavailable
from kvstore.tiers.transfer import TransferEngine
from kvstore_api.v1 import kvstore_pb2 as pb
from kvstore_api.v1 import kvstore_pb2_grpc as rpcs
from kvstore_client.descriptors import Descriptors
from kvstore_client.movers import Mover
from kvstore_client.sharing import SharedReads
from kvstore_client.statuses import error_of
from kvstore_client.values import Lease, PoolReport

log = logging.getLogger(__name__)
T = TypeVar("T")
HEARTBEAT_S = 1.0
ANSWER_S = 10.0
"""A service that leaves a heartbeat unanswered for so long is away: stopped, or stuck, though its socket is open."""
MESSAGE_BYTES_MAX = 16 << 20
OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
]


class Connection:
    """A connection to one service on this host. Thread-safe.

    Args:
        address: `unix:/path/to/socket`.
        timeout_s: bound of every call that names none.
        io_threads: file reads in flight.
        engine: what moves the bytes, for pools that the host can't reach (`kvstore_gpu.hand.DeviceHand`); the client
            closes it. Default: a `TransferEngine` over host memory.

    Raises Unavailable when the service doesn't answer.
    """

    def __init__(
        self,
        address: str,
        *,
        client_id: str = "",
        timeout_s: float = 10.0,
        io_threads: int = 8,
        engine: Mover | None = None,
    ) -> None:
        if not address.startswith("unix:"):
            raise InvalidField("address", f"{address!r} is no unix socket", "give unix:/path, as the service prints it")
        self.address = address
        self.client_id = client_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._cache = rpcs.KVCacheStub(self._channel)
        self._index = rpcs.KVIndexStub(self._channel)
        self._sessions = rpcs.SessionsStub(self._channel)
        self._engine: Mover = engine or TransferEngine(io_threads)
        self._lock = threading.Lock()
        self._keyspaces: dict[KeyspaceId, Keyspace] = {}
        self._open_sessions: dict[str, KeyspaceId] = {}
        self._in_use: Counter[int] = Counter()
        self._shared = SharedReads()
        self._descriptors: Descriptors | None = None
        self._report = PoolReport()
        self._closed = threading.Event()
        self.health = ""
        """What the service last said of itself: "serving", "degraded", or "" while it's away."""
        try:
            self._connect()
        except BaseException:
            self._channel.close()
            raise
        self._life = threading.Thread(target=self._live, name="kvstore-life", daemon=True)
        self._life.start()

    # ---- connection

    @property
    def boot_epoch(self) -> int:
        """Which life of the service this is; 0 while it's away."""
        descriptors = self._descriptors
        return descriptors.boot_epoch if descriptors is not None else 0

    def _connect(self) -> None:
        """Map the arena and make keyspaces and sessions known; only then calls go through. Raises Unavailable."""
        descriptors = Descriptors(self.address.removeprefix("unix:") + ".fd")
        try:
            for keyspace in list(self._keyspaces.values()):
                self._register(keyspace)
            for session, space in list(self._open_sessions.items()):
                self._call(self._sessions.Open, pb.OpenRequest(session_id=session, keyspace_id=space))
        except BaseException:
            descriptors.close()
            raise
        self._descriptors = descriptors

    def _live(self) -> None:
        """Thread: heartbeats, renewals, reconnecting."""
        while not self._closed.is_set():
            try:
                if self._descriptors is None:
                    self._connect()
                self._attach()
            except (grpc.RpcError, KVStoreError, queue.Empty) as error:
                log.debug("service away: %s", error)
            except Exception:
                log.exception("life line failed")
            self._away()
            self._closed.wait(HEARTBEAT_S / 4)

    def _attach(self) -> None:
        beats: queue.SimpleQueue[pb.Heartbeat | None] = queue.SimpleQueue()
        answers: queue.SimpleQueue[pb.ServiceState | None] = queue.SimpleQueue()
        call: Any = self._cache.Attach(iter(beats.get, None))
        try:
            threading.Thread(target=_pump, args=(call, answers), name="kvstore-beats", daemon=True).start()
            while not self._closed.is_set():
                beats.put(self._heartbeat())
                state = answers.get(timeout=ANSWER_S)
                if state is None or state.boot_epoch != self.boot_epoch:
                    return
                self.health = state.health
                self._renew()
                self._closed.wait(HEARTBEAT_S)
        finally:
            beats.put(None)
            call.cancel()

    def _heartbeat(self) -> pb.Heartbeat:
        r = self._report
        pool = pb.PoolReport(
            tier=pb.TIER_HBM,
            capacity_bytes=r.capacity_bytes,
            used_bytes=r.used_bytes,
            hit_tokens=r.hit_tokens,
            computed_tokens=r.computed_tokens,
            restored_tokens_dram=r.restored_tokens_dram,
            restored_tokens_nvme=r.restored_tokens_nvme,
        )
        return pb.Heartbeat(client_id=self.client_id, pool=pool)

    def _renew(self) -> None:
        with self._lock:
            ids = [lease_id for lease_id, count in self._in_use.items() if count > 0]
        if ids:
            self._call(self._cache.Renew, pb.RenewRequest(lease_ids=ids, boot_epoch=self.boot_epoch))

    @contextlib.contextmanager
    def _using(self, lease: Lease) -> Iterator[None]:
        """Renewed meanwhile."""
        with self._lock:
            self._in_use[lease.id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_use[lease.id] -= 1
                self._in_use += Counter()  # drops what is at zero

    def _away(self) -> None:
        """The life line broke: what belonged to that life of the service is gone."""
        self.health = ""
        with self._lock:
            descriptors, self._descriptors = self._descriptors, None
        if descriptors is not None:
            descriptors.close()

    def _attached(self) -> Descriptors:
        descriptors = self._descriptors
        if descriptors is None:
            raise Unavailable(f"service: {self.address} is away; retry later")
        return descriptors

    def _call(self, method: Callable[..., T], request: Any, timeout_s: float | None = None) -> T:
        try:
            return method(request, timeout=timeout_s or self.timeout_s)
        except grpc.RpcError as error:
            raise error_of(error) from None
        except ValueError as error:  # channel closed
            raise Unavailable(f"service: {error}") from None

    def report(self, report: PoolReport) -> None:
        """The engine's own tier; goes out with the next heartbeat."""
        self._report = report

    def close(self) -> None:
        """Release everything and disconnect."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._life.join(self.timeout_s)
        self._channel.close()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- known to the service

    def _register(self, keyspace: Keyspace) -> None:
        self._call(self._cache.RegisterKeyspace, pb.RegisterKeyspaceRequest(encoding=keyspace.encode()))


def _pump(call: Any, answers: queue.SimpleQueue[pb.ServiceState | None]) -> None:
    """Thread: what the service says, then None when it says no more."""
    try:
        for state in call:
            answers.put(state)
    except grpc.RpcError as error:
        log.debug("heartbeats ended: %s", error)
    finally:
        answers.put(None)
