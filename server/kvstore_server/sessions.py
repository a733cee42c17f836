"""The Sessions service: what agents do, forks, supersession, named contexts."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from kvstore.core import events
from kvstore.core.machine import Machine
from kvstore.core.sessions import Session
from kvstore.core.types import Activity, SessionId, Tier
from kvstore.errors import InvalidField, UnknownSession
from kvstore.runtime import Runtime
from kvstore_api.v1 import kvstore_pb2 as pb
from kvstore_api.v1 import kvstore_pb2_grpc as rpcs
from kvstore_server.cache import hash_list, keyspace_id
from kvstore_server.calls import Context, rpc

ID_MAX = 256
EXPECTED_S_MAX = 24 * 3600.0
Hint = pb.SignalReply


def session_id(value: str, field: str = "session_id") -> SessionId:
    """Raises InvalidField."""
    if not 0 < len(value) <= ID_MAX:
        raise InvalidField(field, f"{len(value)} characters", f"give 1 to {ID_MAX}")
    if not value.isprintable():
        raise InvalidField(field, "holds characters that can't be printed", "use letters, digits, signs")
    return SessionId(value)


class SessionsService(rpcs.SessionsServicer):
    """Handlers step the machine; nothing waits but named contexts, which are written to the index."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._limit = runtime.config.max_request_blocks

    @rpc
    async def Open(self, request: pb.OpenRequest, context: Context) -> Any:
        event = events.OpenSession(session_id(request.session_id), keyspace_id(request.keyspace_id))
        return self._info(self._runtime.session_event(event).session)

    @rpc
    async def Signal(self, request: pb.SignalRequest, context: Context) -> Any:
        hint, expected_ns = _judge_hint(request.expected_s)
        kind = _kind(request.kind)
        written = request.output_tokens or -1
        event = events.Signal(session_id(request.session_id), kind, request.tool[:ID_MAX], expected_ns, written)
        changed = self._runtime.session_event(event)
        return pb.SignalReply(hint=hint, predicted_s=(changed.predicted_ns or 0) / 1e9)

    @rpc
    async def Fork(self, request: pb.ForkRequest, context: Context) -> Any:
        event = events.Fork(session_id(request.parent_id, "parent_id"), session_id(request.session_id))
        return self._info(self._runtime.session_event(event).session)

    @rpc
    async def Supersede(self, request: pb.SupersedeRequest, context: Context) -> Any:
        event = events.Supersede(session_id(request.session_id), hash_list(request.hashes, self._limit))
        return self._info(self._runtime.session_event(event).session)

    @rpc
    async def End(self, request: pb.EndRequest, context: Context) -> Any:
        done = self._runtime.session_event(events.EndSession(session_id(request.session_id)))
        return pb.EndReply(num_blocks=done.num_abandoned)

    @rpc
    async def List(self, request: pb.ListRequest, context: Context) -> Any:
        wanted = _activity(request.activity)
        found = [s for s in self._runtime.read(Machine.sessions) if wanted is None or s.activity == wanted]
        return pb.ListReply(sessions=[self._info(s) for s in found])

    @rpc
    async def Export(self, request: pb.ExportRequest, context: Context) -> Any:
        name, session = session_id(request.name, "name"), session_id(request.session_id)
        space, hashes = await asyncio.to_thread(self._runtime.export_context, session, name)
        return pb.NamedContext(name=name, keyspace_id=space, hashes=hashes)

    @rpc
    async def Resume(self, request: pb.ResumeRequest, context: Context) -> Any:
        name, session = session_id(request.name, "name"), session_id(request.session_id)
        space, hashes = await asyncio.to_thread(self._runtime.resume_context, name, session)
        return pb.NamedContext(name=name, keyspace_id=space, hashes=hashes)

    def _info(self, session: Session) -> pb.SessionInfo:
        def read(machine: Machine) -> pb.SessionInfo:
            try:
                path = machine.session_path(session.id)
            except UnknownSession:
                path = []
            return pb.SessionInfo(
                session_id=session.id,
                activity=session.activity.name.lower(),
                tool=session.tool,
                num_blocks=len(path),
                num_blocks_dram=sum(b.residencies[Tier.DRAM] is not None for b in path),
                num_blocks_nvme=sum(b.residencies[Tier.NVME] is not None for b in path),
                seconds_in_state=max(0, time.monotonic_ns() - session.since_ns) / 1e9,
                parent_id=session.parent.id if session.parent is not None else "",
            )

        return self._runtime.read(read)


def _kind(number: int) -> events.SignalKind:
    try:
        return events.SignalKind(number)
    except ValueError:
        known = ", ".join(f"{kind.value} ({kind.name})" for kind in events.SignalKind)
        raise InvalidField("kind", f"{number} is unknown", f"use one of {known}") from None


def _activity(name: str) -> Activity | None:
    if not name:
        return None
    try:
        return Activity[name.upper()]
    except KeyError:
        known = ", ".join(a.name.lower() for a in Activity)
        raise InvalidField("activity", f"{name!r} is unknown", f"use one of {known}") from None


def _judge_hint(expected_s: float) -> tuple[Any, int]:
    if expected_s == 0:
        return Hint.NONE, -1
    if math.isnan(expected_s) or expected_s < 0:
        return Hint.REFUSED, -1
    if expected_s > EXPECTED_S_MAX:
        return Hint.CLIPPED, int(EXPECTED_S_MAX * 1e9)
    return Hint.ACCEPTED, int(expected_s * 1e9)
