"""The synchronous client: sessions, lookups, restores and offloads over one connection.

    Client --gRPC--> service                            hashes, leases, records
           --mapped arena, segment descriptors--> bytes, moved by this process

Restores and offloads of any length go in steps of bounded size, since messages have a limit and the arena may be
smaller than a context.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
import numpy as np

from kvstore.core.hashing import TokenChain
from kvstore.core.keyspace import Keyspace
from kvstore.core.record import Record
from kvstore.core.types import Durability, KeyspaceId, Tier
from kvstore.errors import InvalidField, LeaseExpired, TransferError, Unavailable
from kvstore_api.v1 import kvstore_pb2 as pb
from kvstore_client.connection import Connection
from kvstore_client.descriptors import Descriptors
from kvstore_client.layers import LayerGate
from kvstore_client.moving import Outcome, Plan, check_pool, read_blocks, write_blocks
from kvstore_client.pool import Pool
from kvstore_client.session import Session
from kvstore_client.statuses import error_of
from kvstore_client.values import Lease, Offloaded, Restored

RECORDS_BYTES = 2 << 20
"""Records sent or asked for in one message."""
PAGE_BLOCKS, PAGES_IN_FLIGHT = 1024, 3
"""A longer restore is located in pages, one of them while the bytes of another move."""
OFFLOAD_BYTES = 256 << 20
"""Slots reserved at once; at most a quarter of the arena besides."""
DURABILITIES = {
    Durability.DRAM: pb.DURABILITY_DRAM,
    Durability.NVME: pb.DURABILITY_NVME,
    Durability.SYNCED: pb.DURABILITY_SYNCED,
}
GRANTED, RESIDENT, IN_FLIGHT = pb.ReserveReply.GRANTED, pb.ReserveReply.RESIDENT, pb.ReserveReply.IN_FLIGHT


class Client(Connection):
    """What an engine calls; thread-safe. Arguments and errors of the constructor are those of `Connection`."""

    # ---- keyspaces and sessions

    def register(self, keyspace: Keyspace) -> None:
        """Make a keyspace known to the service, now and after its restarts."""
        self._register(keyspace)
        self._keyspaces[keyspace.id] = keyspace

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
        """Claim the leading blocks that the service holds; None when it holds none. Release it when done.

        It lives for `ttl_s`, and longer only while a restore under it runs.
        """
        hashes = chain.hashes if num_blocks is None else chain.hashes[: num_blocks * 16]
        request = pb.AcquireRequest(
            keyspace_id=chain.keyspace.id, hashes=hashes, session_id=session_id, client_id=self.client_id
        )
        reply = self._call(self._cache.Acquire, request)
        if not reply.lease_id:
            return None
        return Lease(reply.lease_id, chain.keyspace.id, reply.num_blocks, reply.boot_epoch, reply.ttl_ms / 1e3)

    def release(self, lease: Lease) -> None:
        """Give a claim back; again, or when the service is away, is a no-op."""
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
        gate: LayerGate | None = None,
    ) -> Restored:
        """Copy blocks [first, last) of a leased context into the pool's `slots`, in order, and verify them there.

        `gate` opens if they come by layers, which takes a mover that can, and blocks in DRAM.
        Bytes beyond `num_ok` blocks are undefined. Raises LeaseExpired, Unavailable, InvalidField; the slots are then
        undefined, and no transfer into them is running any more.
        """
        slots = [int(slot) for slot in slots]
        check_pool(pool, chain.keyspace, slots)
        if len(slots) != last - first:
            raise InvalidField("slots", f"{len(slots)} for {last - first} blocks", "give one slot a block")
        started = time.monotonic()
        deadline = started + (timeout_s or self.timeout_s)
        with self._using(lease):
            outcomes = self._restore_pages(lease, chain, first, pool, slots, deadline, gate)
        tiers = b"".join(got.tiers for got in outcomes)
        errors = outcomes[-1].errors if outcomes else []
        if len(tiers) < last - first and not errors:
            errors = ["the service holds fewer blocks than it leased"]
        seconds = time.monotonic() - started
        return Restored(len(tiers), tiers.count(Tier.DRAM), tiers.count(Tier.NVME), seconds, tuple(errors))

    def _restore_pages(
        self,
        lease: Lease,
        chain: TokenChain,
        first: int,
        pool: Pool,
        slots: Sequence[int],
        deadline: float,
        gate: LayerGate | None,
    ) -> list[Outcome]:
        """Outcomes of the pages up to the first that isn't whole.

        While one page's bytes move, the next one is located. Nothing runs any more when this returns or raises.
        """
        page = min(_records_max(chain.keyspace), PAGE_BLOCKS)
        cuts = [(at, slots[at : at + page]) for at in range(0, len(slots), page)]

        def one(at: int, mine: Sequence[int]) -> Outcome:
            return self._restore_page(lease, chain, first + at, first + at + len(mine), pool, mine, deadline, gate)

        if len(cuts) <= 1:
            return [one(*cut) for cut in cuts]
        outcomes: list[Outcome] = []
        with ThreadPoolExecutor(PAGES_IN_FLIGHT, "kvstore-restore") as threads:
            running = [threads.submit(one, *cut) for cut in cuts]
            try:
                for (_, mine), future in zip(cuts, running, strict=True):
                    outcomes.append(future.result())
                    if outcomes[-1].num_ok < len(mine):
                        break
            finally:
                for future in running:
                    future.cancel()
        return outcomes

    def _restore_page(
        self,
        lease: Lease,
        chain: TokenChain,
        first: int,
        last: int,
        pool: Pool,
        slots: Sequence[int],
        deadline: float,
        gate: LayerGate | None,
    ) -> Outcome:
        descriptors = self._attached()
        if lease.boot_epoch != descriptors.boot_epoch:
            raise LeaseExpired("lease_id: given by an earlier life of the service; acquire again")
        request = pb.RestoreRequest(lease_id=lease.id, boot_epoch=lease.boot_epoch, first=first, last=last)
        reply = self._call(self._cache.Restore, request, max(0.05, deadline - time.monotonic()))
        outcome = Outcome()
        try:
            plan = _plan(reply)
            where = pool, slots, descriptors, deadline, gate
            outcome = read_blocks(self._engine, self._shared, chain, first, plan, *where)
        finally:
            self._restore_done(lease, reply.op_id, outcome, chain.keyspace.block_bytes)
        return outcome

    def _restore_done(self, lease: Lease, op_id: int, outcome: Outcome, block_bytes: int) -> None:
        done = pb.RestoreDoneRequest(
            op_id=op_id,
            boot_epoch=lease.boot_epoch,
            corrupt=sorted(outcome.corrupt),
            bytes_dram=block_bytes * outcome.tiers.count(Tier.DRAM),
            bytes_nvme=block_bytes * (outcome.tiers.count(Tier.NVME) - outcome.num_shared),
        )
        with contextlib.suppress(Unavailable):
            self._call(self._cache.RestoreDone, done)

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
        offloading = _Offloading(self, chain, pool, slots, session_id, descriptors, deadline)
        num_copied, errors = offloading.run(first, last)
        seal = pb.SealRequest(
            boot_epoch=descriptors.boot_epoch,
            keyspace_id=chain.keyspace.id,
            hashes=hashes,
            durability=DURABILITIES[durability],
            wait_ms=_ms(deadline),
        )
        reply = self._call(self._cache.Seal, seal, max(0.05, deadline - time.monotonic()))
        return Offloaded(int(reply.num_blocks), num_copied, time.monotonic() - started, tuple(errors))

    def prefetch(self, session_id: str) -> int:
        """Ask for a session's blocks to be brought from NVMe to DRAM. Returns promotions started."""
        return int(self._call(self._cache.Prefetch, pb.PrefetchRequest(session_id=session_id)).num_blocks)


class _Offloading:
    """The steps of one offload: while the bytes of one are copied and sealed, slots are reserved for the next.

    Whatever was reserved is given back or published, whichever way this ends.
    """

    def __init__(
        self,
        client: Client,
        chain: TokenChain,
        pool: Pool,
        slots: Sequence[int],
        session_id: str,
        descriptors: Descriptors,
        deadline: float,
    ) -> None:
        self.client = client
        self.chain = chain
        self.pool = pool
        self.slots = slots
        self.session_id = session_id
        self.descriptors = descriptors
        self.deadline = deadline
        self.num_copied = 0
        self.errors: list[str] = []
        self.broken = False

    def run(self, first: int, last: int) -> tuple[int, list[str]]:
        """Blocks copied of [first, last), and what stands in the way of the others."""
        space = self.chain.keyspace
        step = max(1, min(OFFLOAD_BYTES, self.descriptors.arena.size // 4) // space.slot_bytes)
        step = min(step, _records_max(space), PAGE_BLOCKS)
        cuts = [(at, min(last, at + step)) for at in range(first, last, step)]
        if len(cuts) == 1:
            self.fill(*self.reserve(*cuts[0]))
        elif cuts:
            with ThreadPoolExecutor(1, "kvstore-offload") as hand:
                self._run_overlapped(hand, cuts)
        return self.num_copied, self.errors

    def _run_overlapped(self, hand: ThreadPoolExecutor, cuts: list[tuple[int, int]]) -> None:
        under_way: Future[None] | None = None
        try:
            for cut in cuts:
                reserved = self.reserve(*cut)
                following = hand.submit(self.fill, *reserved)
                before, under_way = under_way, following
                if before is not None:
                    before.result()
                if self.errors:
                    break
        except BaseException:
            self.broken = True  # what is reserved still goes back
            raise
        finally:
            if under_way is not None:
                under_way.result()

    def reserve(self, first: int, last: int) -> tuple[pb.ReserveReply, list[tuple[int, int]]]:
        """Slots for blocks [first, last): the answer, and (position, slot) of each that was granted."""
        client, left = self.client, max(0.05, self.deadline - time.monotonic())
        request = pb.ReserveRequest(
            keyspace_id=self.chain.keyspace.id,
            hashes=self.chain.hashes[: last * 16],
            first=first,
            session_id=self.session_id,
            client_id=client.client_id,
            wait_ms=_ms(self.deadline) // 2,
        )
        reply = client._call(client._cache.Reserve, request, left)
        if reply.boot_epoch != self.descriptors.boot_epoch:
            raise Unavailable("service: restarted meanwhile; retry later")
        places = np.frombuffer(reply.slots, dtype="<u8").tolist()
        granted = [(first + i, places[i]) for i, status in enumerate(reply.statuses) if status == GRANTED]
        missed = [s for s in reply.statuses if s not in (GRANTED, RESIDENT, IN_FLIGHT)]
        if missed:
            self.errors.append(f"{len(missed)} blocks: {pb.ReserveReply.Status.Name(missed[0]).lower()}")
        return reply, granted

    def fill(self, reply: pb.ReserveReply, granted: list[tuple[int, int]]) -> None:
        """Copy into the granted slots, and seal."""
        if not granted:
            return
        client, chain = self.client, self.chain
        records: list[Record] = []
        failed = [chain.hash_at(index) for index, _ in granted]
        try:
            if not self.broken:
                mine = [self.slots[index] for index, _ in granted]
                records, failed = write_blocks(
                    client._engine, chain, granted, self.pool, mine, self.descriptors, self.deadline
                )
        except BaseException:
            self.broken = True
            raise
        finally:  # whatever happened, the slots go back or are published
            seal = pb.SealRequest(
                op_id=reply.op_id,
                boot_epoch=reply.boot_epoch,
                records=[r.encode() for r in records],
                failed=b"".join(failed),
            )
            client._call(client._cache.Seal, seal, max(0.5, self.deadline - time.monotonic()))
        self.num_copied += len(records)
        if failed:
            self.broken = True  # what comes behind couldn't be reached
            self.errors.append(f"{len(failed)} blocks: not copied by the deadline")


def _ms(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1e3))


def _records_max(keyspace: Keyspace) -> int:
    """Blocks whose records fit one message."""
    return max(1, RECORDS_BYTES // (128 + 8 * keyspace.num_layers))


def _plan(reply: pb.RestoreReply) -> Plan:
    """Raises TransferError."""
    plan = Plan(reply.tiers, np.frombuffer(reply.slots, dtype="<u8").tolist(), reply.records)
    if not len(plan.tiers) == len(plan.slots) == len(plan.records):
        raise TransferError("service: its answer can't be read: slots, tiers and records differ in number")
    return plan
