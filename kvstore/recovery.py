"""What a start finds: keyspaces, blocks and sessions of the data directory, made known to the machine.

Blocks come back shallow ones first, in batches. One whose keyspace, shape, slot or parent isn't there is deleted from
the index: it could never be reached, and its slot is counted as free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvstore.core import events
from kvstore.core.blocks import doubling_depth
from kvstore.core.keyspace import Keyspace
from kvstore.core.machine import Machine
from kvstore.core.types import BlockHash, KeyspaceId, SessionId, Slot
from kvstore.errors import InvalidField, KVStoreError
from kvstore.tiers.datadir import DataDir
from kvstore.tiers.index_lmdb import Entry
from kvstore.tiers.shrink import shrink

log = logging.getLogger(__name__)
BATCH = 10_000
Step = Callable[[events.Event], Any]


def recover(
    data: DataDir,
    machine: Machine,
    step: Step,
    recompute_doubles_at: int,
    progress: Callable[[int, int], None] | None,
) -> dict[KeyspaceId, Keyspace]:
    """Feed what is stored to the machine. Returns the keyspaces known now."""
    shrink(data.slab, data.index)
    keyspaces = _recover_keyspaces(data, step, recompute_doubles_at)
    entries = sorted(data.recover(progress), key=lambda e: e.record.depth)
    for start in range(0, len(entries), BATCH):
        _recover_blocks(entries[start : start + BATCH], keyspaces, step)
    lost = [e.key for e in entries if not _is_back(e, keyspaces, machine)]
    for start in range(0, len(lost), BATCH):
        data.index.commit(deletes=lost[start : start + BATCH])
    _recover_sessions(data, step)
    log.info("recovered %d blocks, dropped %d", len(entries) - len(lost), len(lost) + data.num_dropped)
    return keyspaces


def registration(keyspace: Keyspace, recompute_doubles_at: int) -> events.RegisterKeyspace:
    """`recompute_doubles_at`: in tokens, 0 when they all count alike."""
    doubles_at = doubling_depth(recompute_doubles_at, keyspace.block_tokens)
    return events.RegisterKeyspace(keyspace.id, keyspace.slot_bytes, keyspace.tenant, doubles_at)


def _recover_keyspaces(data: DataDir, step: Step, recompute_doubles_at: int) -> dict[KeyspaceId, Keyspace]:
    found: dict[KeyspaceId, Keyspace] = {}
    for keyspace_id, encoding in data.index.keyspaces().items():
        try:
            keyspace = Keyspace.decode(encoding)
            step(registration(keyspace, recompute_doubles_at))
        except InvalidField as error:
            log.warning("keyspace %s dropped: %s", keyspace_id.hex()[:16], error)
            continue
        found[keyspace_id] = keyspace
    return found


def _recover_blocks(entries: Sequence[Entry], keyspaces: dict[KeyspaceId, Keyspace], step: Step) -> None:
    batches: dict[KeyspaceId, list[tuple[BlockHash, BlockHash | None, Slot]]] = {}
    for entry in entries:
        r = entry.record
        known = keyspaces.get(r.keyspace)
        if known is not None and known.slot_bytes == entry.size_class:
            batches.setdefault(r.keyspace, []).append((r.hash, r.parent if r.depth else None, entry.slot))
    for keyspace, blocks in batches.items():
        step(events.Recovered(keyspace, tuple(blocks)))


def _is_back(entry: Entry, keyspaces: dict[KeyspaceId, Keyspace], machine: Machine) -> bool:
    known = keyspaces.get(entry.record.keyspace)
    return known is not None and entry.record.hash in machine.space(known.id).blocks


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
