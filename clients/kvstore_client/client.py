"""The synchronous client: one connection to a service, its arena mapped, a life line kept.

    Client --gRPC--> service            hashes, leases, records
           --mapped arena, segment descriptors--> bytes, moved by this process

A thread sends heartbeats and renews leases. When the service goes away every call raises Unavailable at once or by its
deadline; when it comes back (with a new boot epoch) keyspaces and sessions are made known again. Leases of the old life
are gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc

from kvstore.core.hashing import TokenChain
from kvstore.core.keyspace import Keyspace
from kvstore.core.record import decode_record
from kvstore.core.types import Durability, KeyspaceId, Tier
from kvstore.errors import InvalidField, KVStoreError, LeaseExpired, Unavailable
from kvstore.tiers.transfer import TransferEngine
from kvstore_api.v1 import kvstore_pb2 as pb
from kvstore_api.v1 import kvstore_pb2_grpc as rpcs
from kvstore_client.descriptors import Descriptors
from kvstore_client.moving import check_pool, read_blocks, write_blocks
from kvstore_client.pool import Pool
from kvstore_client.session import Session
from kvstore_client.statuses import error_of
from kvstore_client.values import Lease, Offloaded, PoolReport, Restored

log = logging.getLogger(__name__)
T = TypeVar("T")
HEARTBEAT_S = 1.0
MESSAGE_BYTES_MAX = 16 << 20
RESTORE_PAGE_BYTES = 2 << 20
"""Records asked for in one Restore."""
OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
]
DURABILITIES = {
    Durability.DRAM: pb.DURABILITY_DRAM,
    Durability.NVME: pb.DURABILITY_NVME,
    Durability.SYNCED: pb.DURABILITY_SYNCED,
}
GRANTED, RESIDENT = pb.ReserveReply.GRANTED, pb.ReserveReply.RESIDENT


class Client:
    """A connection to one service on this host. Thread-safe.

    Args:
        address: `unix:/path/to/socket`.
        timeout_s: bound of every call that names none.
        io_threads: file reads in flight.

    Raises Unavailable when the service doesn't answer.
    """

    def __init__(self, address: str, *, client_id: str = "", timeout_s: float = 10.0, io_threads: int = 8) -> None:
        if not address.startswith("unix:"):
            raise InvalidField("address", f"{address!r} is no unix socket", "give unix:/path, as the service prints it")
        self.address = address
        self.client_id = client_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._cache = rpcs.KVCacheStub(self._channel)
        self._index = rpcs.KVIndexStub(self._channel)
        self._sessions = rpcs.SessionsStub(self._channel)
        self._engine = TransferEngine(io_threads)
        self._lock = threading.Lock()
        self._keyspaces: dict[KeyspaceId, Keyspace] = {}
        self._open_sessions: dict[str, KeyspaceId] = {}
        self._leases: dict[int, Lease] = {}
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
        """Map the arena and make keyspaces and sessions known. Raises Unavailable."""
        descriptors = Descriptors(self.address.removeprefix("unix:") + ".fd")
        with self._lock:
            old, self._descriptors = self._descriptors, descriptors
            self._leases.clear()
        if old is not None:
            old.close()
        for keyspace in list(self._keyspaces.values()):
            self._register(keyspace)
        for session, space in list(self._open_sessions.items()):
            self._call(self._sessions.Open, pb.OpenRequest(session_id=session, keyspace_id=space))

    def _live(self) -> None:
        """Thread: heartbeats, renewals, reconnecting."""
        while not self._closed.is_set():
            try:
                if self._descriptors is None:
                    self._connect()
                self._attach()
            except (grpc.RpcError, KVStoreError) as error:
                log.debug("service away: %s", error)
            except Exception:
                log.exception("life line failed")
            self._away()
            self._closed.wait(HEARTBEAT_S / 4)

    def _attach(self) -> None:
        beats: queue.SimpleQueue[pb.Heartbeat | None] = queue.SimpleQueue()
        call: Any = self._cache.Attach(iter(beats.get, None))
        try:
            while not self._closed.is_set():
                beats.put(self._heartbeat())
                state = next(call)
                if state.boot_epoch != self.boot_epoch:
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
            ids = list(self._leases)
        if not ids:
            return
        reply = self._call(self._cache.Renew, pb.RenewRequest(lease_ids=ids, boot_epoch=self.boot_epoch))
        with self._lock:
            for lease_id in reply.expired:
                self._leases.pop(lease_id, None)

    def _away(self) -> None:
        """The life line broke: what belonged to that life of the service is gone."""
        self.health = ""
        with self._lock:
            descriptors, self._descriptors = self._descriptors, None
            self._leases.clear()
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

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- keyspaces and sessions

    def register(self, keyspace: Keyspace) -> None:
        """Make a keyspace known to the service, now and after its restarts."""
        self._register(keyspace)
        self._keyspaces[keyspace.id] = keyspace

    def _register(self, keyspace: Keyspace) -> None:
        self._call(self._cache.RegisterKeyspace, pb.RegisterKeyspaceRequest(encoding=keyspace.encode()))

    def session(self, session_id: str, keyspace: Keyspace) -> Session:
        """Open (or open again) a session. As a context manager it ends the session on exit."""
        self.open(session_id, keyspace.id)
        return Session(self, session_id, keyspace)

    def open(self, session_id: str, keyspace: KeyspaceId) -> None:
        """Open a session by id."""
        self._call(self._sessions.Open, pb.OpenRequest(session_id=session_id, keyspace_id=keyspace))
        self._open_sessions[session_id] = keyspace

    def signal(
        self, session_id: str, kind: int, tool: str = "", expected_s: float = 0.0, output_tokens: int = 0
    ) -> str:
        """An activity change (`SignalKind`). Returns what became of the hint: none, accepted, clipped, refused."""
        request = pb.SignalRequest(
            session_id=session_id,
            kind=pb.SignalRequest.Kind.Name(kind),
            tool=tool,
            expected_s=expected_s,
            output_tokens=output_tokens,
        )
        reply = self._call(self._sessions.Signal, request)
        return pb.SignalReply.Hint.Name(reply.hint).lower()

    def fork(self, parent_id: str, session_id: str) -> None:
        """A new session that shares its parent's context."""
        self._call(self._sessions.Fork, pb.ForkRequest(parent_id=parent_id, session_id=session_id))
        space = self._open_sessions.get(parent_id)
        if space is not None:
            self._open_sessions[session_id] = space

    def supersede(self, session_id: str, chain: TokenChain) -> None:
        """The session's context is this chain now: what only its old branch held may go."""
        request = pb.SupersedeRequest(session_id=session_id, keyspace_id=chain.keyspace.id, hashes=chain.hashes)
        self._call(self._sessions.Supersede, request)

    def end(self, session_id: str) -> int:
        """The session won't come back. Returns how many blocks nobody holds any more."""
        self._open_sessions.pop(session_id, None)
        return int(self._call(self._sessions.End, pb.EndRequest(session_id=session_id)).num_blocks)

    def list_sessions(self, activity: str = "") -> list[pb.SessionInfo]:
        """Open sessions, all or those in one activity."""
        return list(self._call(self._sessions.List, pb.ListRequest(activity=activity)).sessions)

    def export_context(self, session_id: str, name: str) -> int:
        """Name a session's context; the name survives restarts. Returns its length in blocks."""
        reply = self._call(self._sessions.Export, pb.ExportRequest(session_id=session_id, name=name))
        return len(reply.hashes) // 16

    def resume_context(self, name: str, session_id: str) -> int:
        """Open a session at a named context. Returns its length in blocks."""
        reply = self._call(self._sessions.Resume, pb.ResumeRequest(name=name, session_id=session_id))
        self._open_sessions[session_id] = KeyspaceId(reply.keyspace_id)
        return len(reply.hashes) // 16

    # ---- index

    def match(self, chain: TokenChain) -> int:
        """Leading blocks of the chain that the service holds. No lease, no side effect."""
        request = pb.MatchRequest(keyspace_id=chain.keyspace.id, hashes=chain.hashes)
        return int(self._call(self._index.Match, request).num_blocks)

    def explain(self, chain: TokenChain | None = None, session_id: str = "") -> pb.ExplainReply:
        """Where the first miss is, and why."""
        request = pb.ExplainRequest(session_id=session_id)
        if chain is not None:
            request.keyspace_id, request.hashes = chain.keyspace.id, chain.hashes
        return self._call(self._index.Explain, request)

    def watch(self, after_sequence: int = 0) -> Iterator[pb.IndexEvent]:
        """Changes of the resident set and of sessions, from a snapshot on. Ends when the service does."""
        try:
            yield from self._index.Watch(pb.WatchRequest(after_sequence=after_sequence))
        except grpc.RpcError as error:
            raise error_of(error) from None

    # ---- reading

    def acquire(self, chain: TokenChain, session_id: str = "", num_blocks: int | None = None) -> Lease | None:
        """Claim the leading blocks that the service holds; None when it holds none. Release it when done."""
        hashes = chain.hashes if num_blocks is None else chain.hashes[: num_blocks * 16]
        request = pb.AcquireRequest(
            keyspace_id=chain.keyspace.id, hashes=hashes, session_id=session_id, client_id=self.client_id
        )
        reply = self._call(self._cache.Acquire, request)
        if not reply.lease_id:
            return None
        lease = Lease(reply.lease_id, chain.keyspace.id, reply.num_blocks, reply.boot_epoch, reply.ttl_ms / 1e3)
        with self._lock:
            self._leases[lease.id] = lease
        return lease

    def release(self, lease: Lease) -> None:
        """Give a claim back; again, or when the service is away, is a no-op."""
        with self._lock:
            if self._leases.pop(lease.id, None) is None:
                return
        with contextlib.suppress(Unavailable):
            request = pb.ReleaseRequest(lease_ids=[lease.id], boot_epoch=lease.boot_epoch)
            self._call(self._cache.Release, request)

    def restore(
        self,
        lease: Lease,
        chain: TokenChain,
        first: int,
        last: int,
        pool: Pool,
        slots: Sequence[int],
        timeout_s: float | None = None,
    ) -> Restored:
        """Copy blocks [first, last) of a leased context into the pool's `slots`, in order, and verify them there.

        Bytes beyond `num_ok` blocks are undefined. Raises LeaseExpired, Unavailable, InvalidField; the slots are then
        undefined, and no transfer into them is running any more.
        """
        slots = [int(slot) for slot in slots]
        check_pool(pool, chain.keyspace, slots)
        if len(slots) != last - first:
            raise InvalidField("slots", f"{len(slots)} for {last - first} blocks", "give one slot a block")
        started = time.monotonic()
        deadline = started + (timeout_s or self.timeout_s)
        page = max(1, RESTORE_PAGE_BYTES // (128 + 8 * chain.keyspace.num_layers))
        num_ok, tiers = 0, [0, 0, 0]
        errors: list[str] = []
        while first + num_ok < last and not errors:
            start = first + num_ok
            end = min(last, start + page)
            got = self._restore_page(lease, chain, start, end, pool, slots[num_ok : num_ok + end - start], deadline)
            num_ok += got.num_ok
            errors = got.errors
            for tier in got.tiers:
                tiers[tier] += 1
            if got.num_ok < end - start and not errors:
                errors = ["the service holds fewer blocks than it leased"]
        return Restored(num_ok, tiers[Tier.DRAM], tiers[Tier.NVME], time.monotonic() - started, tuple(errors))

    def _restore_page(
        self,
        lease: Lease,
        chain: TokenChain,
        first: int,
        last: int,
        pool: Pool,
        slots: Sequence[int],
        deadline: float,
    ) -> Any:
        descriptors = self._attached()
        if lease.boot_epoch != descriptors.boot_epoch:
            raise LeaseExpired("lease_id: given by an earlier life of the service; acquire again")
        request = pb.RestoreRequest(lease_id=lease.id, boot_epoch=lease.boot_epoch, first=first, last=last)
        reply = self._call(self._cache.Restore, request, max(0.05, deadline - time.monotonic()))
        places = [
            (Tier(tier), int.from_bytes(reply.slots[8 * i : 8 * i + 8], "little"), decode_record(reply.records[i]))
            for i, tier in enumerate(reply.tiers)
        ]
        outcome = read_blocks(self._engine, chain, first, places, pool, slots, descriptors, deadline)
        block_bytes = chain.keyspace.block_bytes
        done = pb.RestoreDoneRequest(
            op_id=reply.op_id,
            boot_epoch=lease.boot_epoch,
            corrupt=sorted(outcome.corrupt),
            bytes_dram=block_bytes * outcome.tiers.count(Tier.DRAM),
            bytes_nvme=block_bytes * outcome.tiers.count(Tier.NVME),
        )
        with contextlib.suppress(Unavailable):
            self._call(self._cache.RestoreDone, done)
        return outcome

    # ---- writing

    def offload(
        self,
        chain: TokenChain,
        last: int,
        pool: Pool,
        slots: Sequence[int],
        session_id: str = "",
        durability: Durability = Durability.DRAM,
        timeout_s: float | None = None,
    ) -> Offloaded:
        """Copy down what the service lacks of blocks [0, last) of a context; `slots[i]` holds block `i`.

        Returns how many leading blocks now hold the promise of `durability`. Blocks already there aren't copied.
        """
        slots = [int(slot) for slot in slots]
        check_pool(pool, chain.keyspace, slots)
        if len(slots) != last or not 0 <= last <= chain.num_blocks:
            raise InvalidField(
                "slots", f"{len(slots)} for {last} blocks", "give one slot for each block of the context"
            )
        started = time.monotonic()
        deadline = started + (timeout_s or self.timeout_s)
        descriptors = self._attached()
        hashes = chain.hashes[: last * 16]
        first = self.match(chain) if last else 0
        num_copied = 0
        errors: list[str] = []
        if first < last:
            num_copied, errors = self._offload_rest(
                chain, hashes, first, pool, slots, session_id, descriptors, deadline
            )
        seal = pb.SealRequest(
            boot_epoch=descriptors.boot_epoch,
            keyspace_id=chain.keyspace.id,
            hashes=hashes,
            durability=DURABILITIES[durability],
            wait_ms=_ms(deadline),
        )
        reply = self._call(self._cache.Seal, seal, max(0.05, deadline - time.monotonic()))
        return Offloaded(int(reply.num_blocks), num_copied, time.monotonic() - started, tuple(errors))

    def _offload_rest(
        self,
        chain: TokenChain,
        hashes: bytes,
        first: int,
        pool: Pool,
        slots: Sequence[int],
        session_id: str,
        descriptors: Descriptors,
        deadline: float,
    ) -> tuple[int, list[str]]:
        """Reserve, copy and seal blocks from `first` on."""
        request = pb.ReserveRequest(
            keyspace_id=chain.keyspace.id,
            hashes=hashes,
            first=first,
            session_id=session_id,
            client_id=self.client_id,
            wait_ms=_ms(deadline) // 2,
        )
        reply = self._call(self._cache.Reserve, request, max(0.05, deadline - time.monotonic()))
        if reply.boot_epoch != descriptors.boot_epoch:
            raise Unavailable("service: restarted meanwhile; retry later")
        granted = [
            (first + i, int.from_bytes(reply.slots[8 * i : 8 * i + 8], "little"))
            for i, status in enumerate(reply.statuses)
            if status == GRANTED
        ]
        missed = [s for s in reply.statuses if s not in (GRANTED, RESIDENT)]
        errors = [f"{len(missed)} blocks: {pb.ReserveReply.Status.Name(missed[0]).lower()}"] if missed else []
        if not granted:
            return 0, errors
        mine = [slots[index] for index, _ in granted]
        records, failed = write_blocks(self._engine, chain, granted, pool, mine, descriptors, deadline)
        seal = pb.SealRequest(
            op_id=reply.op_id,
            boot_epoch=reply.boot_epoch,
            records=[r.encode() for r in records],
            failed=b"".join(failed),
        )
        self._call(self._cache.Seal, seal, max(0.5, deadline - time.monotonic()))
        return len(records), errors

    def prefetch(self, session_id: str) -> int:
        """Ask for a session's blocks to be brought from NVMe to DRAM. Returns promotions started."""
        return int(self._call(self._cache.Prefetch, pb.PrefetchRequest(session_id=session_id)).num_blocks)


def _ms(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1e3))
