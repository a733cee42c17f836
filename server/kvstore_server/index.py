"""The KVIndex service: what is here, what changes, and why something isn't here. Nothing in it has a side effect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from grpc import StatusCode

from kvstore.core.machine import Machine
from kvstore.core.record import NO_PARENT
from kvstore.core.types import HashList, KeyspaceId, SessionId, Tier
from kvstore.journal import Change
from kvstore.runtime import Runtime
from kvstore_api.v1 import kvstore_pb2 as pb
from kvstore_api.v1 import kvstore_pb2_grpc as rpcs
from kvstore_server.cache import hash_list, keyspace_id
from kvstore_server.calls import Context, rpc

SNAPSHOT_PAGE = 4096
WATCHERS_MAX = 16
POLL_S = 0.5
_TIERS = {Tier.HBM: pb.TIER_HBM, Tier.DRAM: pb.TIER_DRAM, Tier.NVME: pb.TIER_NVME}
_KINDS = {"stored": pb.IndexEvent.STORED, "removed": pb.IndexEvent.REMOVED, "session": pb.IndexEvent.SESSION}


class KVIndexService(rpcs.KVIndexServicer):
    """Read-only."""

    def __init__(self, runtime: Runtime, address: str) -> None:
        self._runtime = runtime
        self._address = address
        self._limit = runtime.config.max_request_blocks
        self._num_watchers = 0

    @rpc
    async def Match(self, request: pb.MatchRequest, context: Context) -> Any:
        hashes = hash_list(request.hashes, self._limit)
        return pb.MatchReply(num_blocks=self._runtime.match(keyspace_id(request.keyspace_id), hashes))

    @rpc
    async def Explain(self, request: pb.ExplainRequest, context: Context) -> Any:
        session = SessionId(request.session_id)
        hashes = hash_list(request.hashes, self._limit)
        space = keyspace_id(request.keyspace_id) if len(hashes) else None
        return self._runtime.read(lambda machine: _explain(machine, space, hashes, session))

    @rpc
    async def Route(self, request: pb.RouteRequest, context: Context) -> Any:
        hashes = hash_list(request.hashes, self._limit)
        count = self._runtime.match(keyspace_id(request.keyspace_id), hashes)
        load = self._runtime.read(_load)
        return pb.RouteReply(nodes=[pb.RouteReply.Node(address=self._address, num_blocks=count, load=load)])

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.IndexEvent]:
        """Snapshot unless `after_sequence` is still in the ring, then changes; ends when the reader falls too far
        behind."""
        only = bytes(request.keyspace_id)
        if self._num_watchers >= WATCHERS_MAX:
            await context.abort(StatusCode.RESOURCE_EXHAUSTED, f"watch: {WATCHERS_MAX} watchers already; close one")
        self._num_watchers += 1
        try:
            sequence = request.after_sequence
            if not sequence or self._runtime.journal.after(sequence, 0) is None:
                sequence, pages = self._runtime.read(
                    lambda m: (self._runtime.journal.sequence, list(_snapshot(m, only)))
                )
                for page in pages:
                    page.sequence = sequence
                    yield page
                yield pb.IndexEvent(kind=pb.IndexEvent.SNAPSHOT_END, sequence=sequence)
            while True:
                changes = await asyncio.to_thread(self._runtime.journal.after, sequence, POLL_S)
                if changes is None:
                    return
                for change in changes:
                    sequence = change.sequence
                    if not only or change.keyspace == only:
                        yield _event(change)
        finally:
            self._num_watchers -= 1


def _event(c: Change) -> pb.IndexEvent:
    return pb.IndexEvent(
        sequence=c.sequence,
        kind=_KINDS[c.kind],
        keyspace_id=c.keyspace,
        hashes=c.hash,
        parents=c.parent if c.kind == "stored" else b"",
        tier=_TIERS[c.tier],
        time_ns=c.time_ns,
        session_id=c.session,
        detail=c.detail,
    )


def _snapshot(machine: Machine, only: bytes) -> Iterator[pb.IndexEvent]:
    for space in machine.spaces():
        if only and space.id != only:
            continue
        for tier in Tier:
            found = [b for b in space.blocks.values() if b.visible and b.residencies[tier] is not None]
            for start in range(0, len(found), SNAPSHOT_PAGE):
                page = found[start : start + SNAPSHOT_PAGE]
                yield pb.IndexEvent(
                    kind=pb.IndexEvent.SNAPSHOT,
                    keyspace_id=space.id,
                    hashes=b"".join(b.hash for b in page),
                    parents=b"".join(b.parent.hash if b.parent else NO_PARENT for b in page),
                    tier=_TIERS[tier],
                )


def _load(machine: Machine) -> float:
    pool = machine.pool(Tier.DRAM)
    if pool is None:
        return 0.0
    busy = pool.num_filling + pool.num_draining
    return busy / max(1, busy + pool.num_ready)


def _explain(machine: Machine, space: KeyspaceId | None, hashes: HashList, session: SessionId) -> pb.ExplainReply:
    reply = pb.ExplainReply(num_requested=len(hashes))
    if space is not None:
        count = reply.num_blocks = machine.match(space, hashes)
        reply.reason = (
            "everything is resident"
            if count == len(hashes)
            else machine.why_missing(space, hashes[count], time.monotonic_ns())
        )
    if session:
        record = machine.session(session)
        path = machine.session_path(session)
        waiting = f" for {record.tool!r}" if record.tool else ""
        reply.session = f"{record.activity.name.lower()}{waiting}, {len(path)} blocks resident"
        if not len(hashes):
            reply.reason = machine.what_went(session, time.monotonic_ns())
        drift = next((i for i, b in enumerate(path) if i >= len(hashes) or hashes[i] != b.hash), None)
        if len(hashes) and drift is not None and drift < len(hashes):
            reply.reason = f"the request differs from the session's context in block {drift}: {reply.reason}"
    return reply
