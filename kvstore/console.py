"""What an operator asks a running service: its sessions, and why one of them misses.

Talks gRPC like any client and prints tables; nothing here touches a data directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from rich.console import Console
from rich.table import Table

from kvstore.config import load
from kvstore.core.types import Activity
from kvstore_api.v1 import kvstore_pb2 as pb
from kvstore_api.v1.kvstore_pb2_grpc import KVIndexStub, SessionsStub

TIMEOUT_S = 10.0
"""Of every call: an operator waits no longer for a service that hangs."""


def list_sessions(address: str | None, activity: str) -> None:
    """Print the sessions in one state of activity, or all. Raises KVStoreError."""
    with _channel(address) as channel:
        reply = SessionsStub(channel).List(pb.ListRequest(activity=activity), timeout=TIMEOUT_S)
    table = Table("session", "state", "for", "tool", "parent", box=None)
    for name in ("blocks", "dram", "nvme"):
        table.add_column(name, justify="right")
    for s in reply.sessions:
        blocks = (s.num_blocks, s.num_blocks_dram, s.num_blocks_nvme)
        table.add_row(s.session_id, s.activity, _duration(s.seconds_in_state), s.tool, s.parent_id, *map(str, blocks))
    Console().print(table if reply.sessions else "no sessions")


def end_session(address: str | None, session: str) -> None:
    """End a session and print what it gave back. Raises KVStoreError."""
    with _channel(address) as channel:
        reply = SessionsStub(channel).End(pb.EndRequest(session_id=session), timeout=TIMEOUT_S)
    print(f"ended {session}: {reply.num_blocks} blocks that no other session holds")


def export_session(address: str | None, session: str, name: str) -> None:
    """Give a session's context a name that outlives the session. Raises KVStoreError."""
    with _channel(address) as channel:
        reply = SessionsStub(channel).Export(pb.ExportRequest(session_id=session, name=name), timeout=TIMEOUT_S)
    print(f"{reply.name}: {len(reply.hashes) // 16} blocks of keyspace {reply.keyspace_id.hex()[:16]}")


def resume_session(address: str | None, name: str, session: str) -> None:
    """Open a session at a named context. Raises KVStoreError."""
    with _channel(address) as channel:
        reply = SessionsStub(channel).Resume(pb.ResumeRequest(session_id=session, name=name), timeout=TIMEOUT_S)
    print(f"{session} stands at {reply.name}: {len(reply.hashes) // 16} blocks")


def explain(address: str | None, session: str) -> None:
    """Print where a session's context stops being resident, and why. Raises KVStoreError."""
    with _channel(address) as channel:
        reply = KVIndexStub(channel).Explain(pb.ExplainRequest(session_id=session), timeout=TIMEOUT_S)
    found = f"{reply.num_blocks} of {reply.num_requested} blocks resident" if reply.num_requested else ""
    for line in (found, reply.session, reply.reason):
        if line:
            print(line)


def activities() -> list[str]:
    """Names that `list_sessions` may filter by."""
    return [activity.name.lower() for activity in Activity]


@contextmanager
def _channel(address: str | None) -> Iterator[grpc.Channel]:
    from kvstore_client.statuses import error_of

    with grpc.insecure_channel(address or f"unix:{load().socket}") as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise error_of(error) from None


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
