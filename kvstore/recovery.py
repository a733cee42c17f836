"""Coming back: from the durable index to a machine that knows its blocks and sessions, and how sessions get there.

Blocks come in order of depth, so that parents are there before their children; what has no parent, no keyspace or no
slot is deleted from the index. Payloads aren't read: the first restore (or the scrubber) judges them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvstore.core import events
from kvstore.core.keyspace import Keyspace
from kvstore.core.machine import Machine
from kvstore.core.types import BlockHash, KeyspaceId, SessionId, Slot
from kvstore.errors import InvalidField, KVStoreError
from kvstore.tiers.datadir import DataDir
from kvstore.tiers.index_lmdb import Entry, block_key

log = logging.getLogger(__name__)
BATCH = 10_000
Step = Callable[[events.Event], object]


def recover(data: DataDir, machine: Machine, step: Step, progress: Callable[[int, int], None] | None) -> list[Keyspace]:
    """Feed everything durable to a new machine. Returns the keyspaces found."""
    keyspaces = {k.id: k for k in _keyspaces(data)}
    for keyspace in keyspaces.values():
        step(events.RegisterKeyspace(keyspace.id, keyspace.slot_bytes, keyspace.tenant))
    entries = sorted(data.recover(progress), key=lambda e: e.record.depth)
    fitting = [e for e in entries if _fits(e, keyspaces)]
    for start in range(0, len(fitting), BATCH):
        for keyspace_id, blocks in _by_keyspace(fitting[start : start + BATCH]).items():
            step(events.Recovered(keyspace_id, tuple(blocks)))
    lost = [e.key for e in entries if not _is_back(e, keyspaces, machine)]
    for start in range(0, len(lost), BATCH):
        data.index.commit(deletes=lost[start : start + BATCH])
    _recover_sessions(data, step)
    log.info("recovered %d blocks, dropped %d", len(entries) - len(lost), len(lost) + data.num_dropped)
    return list(keyspaces.values())


def _keyspaces(data: DataDir) -> Iterable[Keyspace]:
    for keyspace_id, encoding in data.index.keyspaces().items():
        try:
            yield Keyspace.decode(encoding)
        except InvalidField as error:
            log.warning("keyspace %s dropped: %s", keyspace_id.hex()[:16], error)


def _fits(entry: Entry, keyspaces: dict[KeyspaceId, Keyspace]) -> bool:
    known = keyspaces.get(entry.record.keyspace)
    return known is not None and known.slot_bytes == entry.size_class


def _by_keyspace(entries: Sequence[Entry]) -> dict[KeyspaceId, list[tuple[BlockHash, BlockHash | None, Slot]]]:
    batches: dict[KeyspaceId, list[tuple[BlockHash, BlockHash | None, Slot]]] = {}
    for entry in entries:
        r = entry.record
        batches.setdefault(r.keyspace, []).append((r.hash, r.parent if r.depth else None, entry.slot))
    return batches


def _is_back(entry: Entry, keyspaces: dict[KeyspaceId, Keyspace], machine: Machine) -> bool:
    r = entry.record
    return r.keyspace in keyspaces and r.hash in machine.space(r.keyspace).blocks


def _recover_sessions(data: DataDir, step: Step) -> None:
    for session_id, row in data.index.sessions().items():
        try:
            keyspace = KeyspaceId(bytes.fromhex(str(row["keyspace"])))
            tip = BlockHash(bytes.fromhex(row["tip"])) if row["tip"] else None
            step(events.RecoveredSession(SessionId(session_id), keyspace, tip, int(row["activity"])))
        except (KVStoreError, KeyError, ValueError, TypeError) as error:
            log.warning("session %r dropped: %s", session_id, error)


def session_rows(machine: Machine, changed: Iterable[SessionId]) -> dict[str, dict[str, Any] | None]:
    """What to store of sessions that changed; None for those that ended."""
    rows: dict[str, dict[str, Any] | None] = {}
    for session_id in changed:
        session = machine.find_session(session_id)
        if session is None:
            rows[session_id] = None
            continue
        tip = machine.session_path(session_id)[-1:]
        rows[session_id] = {
            "keyspace": machine.space_at(session.space).id.hex(),
            "tip": tip[0].hash.hex() if tip else None,
            "activity": int(session.activity),
        }
    return rows


__all__ = ["block_key", "recover", "session_rows"]
