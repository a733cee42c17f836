"""The KVCache service: keyspaces, leases, restores, reservations, seals."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvstore.core import events
from kvstore.core.commands import ReserveStatus
from kvstore.core.record import BadRecord, Record, decode_record
from kvstore.core.types import BlockHash, Durability, HashList, KeyspaceId, LeaseId, OpId, SessionId, Tier
from kvstore.errors import InvalidField, LeaseExpired, LimitExceeded
from kvstore.runtime import Runtime
from kvstore_api.v1 import kvstore_pb2 as pb
from kvstore_api.v1 import kvstore_pb2_grpc as rpcs
from kvstore_server.calls import Context, check_bytes, rpc, seconds_left
from kvstore_server.clients import Clients

MS = 1_000_000
WAIT_S_MAX = 30.0
RESTORE_BYTES_MAX = 3 << 20
"""Records of one RestoreReply; longer ranges are asked for in pages."""
HEARTBEAT_TIMEOUT_S = 15.0


def hash_list(value: bytes, limit: int) -> HashList:
    """Packed hashes of a request. Raises InvalidField, LimitExceeded."""
    if len(value) % 16:
        raise InvalidField("hashes", f"{len(value)} bytes", "give 16 bytes a block")
    if len(value) // 16 > limit:
        raise LimitExceeded(f"hashes: {len(value) // 16} blocks, the limit is {limit}; raise max_request_blocks")
    return HashList(value)


def keyspace_id(value: bytes) -> KeyspaceId:
    """Raises InvalidField."""
    return KeyspaceId(check_bytes("keyspace_id", value, 32))


class KVCacheService(rpcs.KVCacheServicer):
    """Handlers step the machine directly; only waits for room or durability suspend."""

    def __init__(self, runtime: Runtime, clients: Clients) -> None:
        self._runtime = runtime
        self._clients = clients
        self._limit = runtime.config.max_request_blocks
        self._ttl_ns = int(runtime.config.lease_ttl_s * 1e9)

    @rpc
    async def RegisterKeyspace(self, request: pb.RegisterKeyspaceRequest, context: Context) -> Any:
        keyspace = await asyncio.to_thread(self._runtime.register, request.encoding)
        return pb.RegisterKeyspaceReply(
            keyspace_id=keyspace.id, slot_bytes=keyspace.slot_bytes, boot_epoch=self._runtime.boot_epoch
        )

    async def Attach(self, request_iterator: AsyncIterator[pb.Heartbeat], context: Context) -> Any:
        """Answers each heartbeat; whatever ends the stream detaches the client."""
        client = ""
        try:
            while True:
                beat = await asyncio.wait_for(context.read(), HEARTBEAT_TIMEOUT_S)
                if not isinstance(beat, pb.Heartbeat):  # end of stream
                    return
                client = client or self._clients.attach(beat.client_id)
                self._clients.report(client, beat)
                yield pb.ServiceState(
                    boot_epoch=self._runtime.boot_epoch,
                    lease_ttl_ms=self._ttl_ns // MS,
                    health=self._runtime.health,
                )
        except (TimeoutError, grpc.RpcError):
            return
        finally:
            if client:
                self._clients.detach(client)

    @rpc
    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> Any:
        ttl_ns = request.ttl_ms * MS or self._ttl_ns
        got = self._runtime.acquire(
            events.Acquire(
                keyspace_id(request.keyspace_id),
                hash_list(request.hashes, self._limit),
                request.client_id,
                ttl_ns,
                SessionId(request.session_id) if request.session_id else None,
            )
        )
        return pb.AcquireReply(
            lease_id=got.lease,
            num_blocks=got.num_blocks,
            ttl_ms=ttl_ns // MS,
            boot_epoch=self._runtime.boot_epoch,
        )

    @rpc
    async def Renew(self, request: pb.RenewRequest, context: Context) -> Any:
        if request.boot_epoch != self._runtime.boot_epoch:
            return pb.RenewReply(expired=request.lease_ids)
        leases = tuple(LeaseId(i) for i in request.lease_ids)
        return pb.RenewReply(expired=self._runtime.renew(leases, self._ttl_ns))

    @rpc
    async def Release(self, request: pb.ReleaseRequest, context: Context) -> Any:
        if request.boot_epoch == self._runtime.boot_epoch:
            self._runtime.release(tuple(LeaseId(i) for i in request.lease_ids))
        return pb.ReleaseReply()

    @rpc
    async def Restore(self, request: pb.RestoreRequest, context: Context) -> Any:
        self._check_epoch(request.boot_epoch, "lease_id")
        op, places, records = self._runtime.restore(LeaseId(request.lease_id), request.first, request.last)
        encoded = [r.encode() for r in records]
        if sum(map(len, encoded)) > RESTORE_BYTES_MAX:
            self._runtime.restore_done(op, (), {})
            raise LimitExceeded(
                f"first, last: records of {len(encoded)} blocks need more than one message; ask for fewer at once"
            )
        return pb.RestoreReply(
            op_id=op,
            first=request.first,
            tiers=bytes(int(p.tier) for p in places),
            slots=struct.pack(f"<{len(places)}Q", *(p.slot for p in places)),
            records=encoded,
        )

    @rpc
    async def RestoreDone(self, request: pb.RestoreDoneRequest, context: Context) -> Any:
        if request.boot_epoch == self._runtime.boot_epoch:
            moved = {Tier.DRAM: request.bytes_dram, Tier.NVME: request.bytes_nvme}
            self._runtime.restore_done(OpId(request.op_id), tuple(request.corrupt), moved)
        return pb.RestoreDoneReply()

    @rpc
    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> Any:
        wait_s = seconds_left(context, request.wait_ms / 1e3, WAIT_S_MAX)
        future = self._runtime.reserve(
            events.Reserve(
                0,
                keyspace_id(request.keyspace_id),
                hash_list(request.hashes, self._limit),
                request.first,
                request.client_id,
                Tier.DRAM,
                request.ttl_ms * MS or self._ttl_ns,
                int(wait_s * 1e9),
                SessionId(request.session_id) if request.session_id else None,
            )
        )
        got = await asyncio.wrap_future(future)
        granted = got.statuses.count(ReserveStatus.GRANTED)
        return pb.ReserveReply(
            op_id=got.op if granted else 0,
            statuses=bytes(got.statuses),
            slots=struct.pack(f"<{len(got.slots)}Q", *(max(s, 0) for s in got.slots)),
            boot_epoch=self._runtime.boot_epoch,
        )

    @rpc
    async def Seal(self, request: pb.SealRequest, context: Context) -> Any:
        hashes = hash_list(request.hashes, self._limit)
        if request.op_id:
            self._check_epoch(request.boot_epoch, "op_id")
            self._runtime.seal(OpId(request.op_id), _records(request.records), list(_each(request.failed)))
        durability = Durability(request.durability)
        wait_ns = int(seconds_left(context, request.wait_ms / 1e3, WAIT_S_MAX) * 1e9)
        if not len(hashes):
            return pb.SealReply(num_blocks=0)
        future = self._runtime.persist(keyspace_id(request.keyspace_id), hashes, durability, wait_ns)
        return pb.SealReply(num_blocks=(await asyncio.wrap_future(future)).num_blocks)

    @rpc
    async def Prefetch(self, request: pb.PrefetchRequest, context: Context) -> Any:
        return pb.PrefetchReply(num_blocks=self._runtime.prefetch(SessionId(request.session_id)))

    def _check_epoch(self, epoch: int, field: str) -> None:
        if epoch != self._runtime.boot_epoch:
            raise LeaseExpired(f"{field}: given by an earlier life of this service; acquire again")


def _records(raw: Any) -> list[Record]:
    try:
        return [decode_record(r) for r in raw]
    except BadRecord as error:
        raise InvalidField("records", str(error), "send Record.encode() unchanged") from None


def _each(packed: bytes) -> list[BlockHash]:
    hashes = hash_list(packed, 1 << 30)
    return [hashes[i] for i in range(len(hashes))]
