"""An index as far as it can be read, and a new one made from that.

LMDB has no checksums of its own: a rotten page shows as an error in the middle of a scan, or as a record whose
checksum is wrong. What was read before the error is good (each record proves itself), what lies behind it is lost:
those blocks become misses, their slots are free.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.core.types import KeyspaceId
from kvstore.errors import KVStoreError
from kvstore.tiers.index_lmdb import BlockIndex, Entry

_GROUP = 10_000


@dataclass
class Tables:
    """What an index holds. `error`: why it couldn't be read, or not to its end; empty when it could."""

    blocks: list[Entry] = field(default_factory=list)
    bad_keys: list[bytes] = field(default_factory=list)
    keyspaces: dict[KeyspaceId, bytes] = field(default_factory=dict)
    sessions: dict[str, dict[str, Any]] = field(default_factory=dict)
    contexts: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str = ""


def read_tables(folder: Path, progress: Callable[[int, int], None] | None = None) -> Tables:
    """Read all that can be read. Raises nothing for a damaged index: that's in `error`."""
    tables = Tables()
    try:
        index = BlockIndex.open(folder)
    except KVStoreError as error:
        tables.error = str(error)
        return tables
    try:
        for read in (_read_keyspaces, _read_sessions, _read_contexts, _read_blocks):
            try:
                read(index, tables, progress)
            except KVStoreError as error:
                tables.error = str(error)
    finally:
        index.close()
    return tables


Progress = Callable[[int, int], None] | None


def _read_keyspaces(index: BlockIndex, tables: Tables, _progress: Progress) -> None:
    tables.keyspaces = index.keyspaces()


def _read_sessions(index: BlockIndex, tables: Tables, _progress: Progress) -> None:
    tables.sessions = index.sessions()


def _read_contexts(index: BlockIndex, tables: Tables, _progress: Progress) -> None:
    tables.contexts = index.contexts()


def _read_blocks(index: BlockIndex, tables: Tables, progress: Progress) -> None:
    for item in index.scan(progress):
        if isinstance(item, bytes):
            tables.bad_keys.append(item)
        else:
            tables.blocks.append(item)


def delete_blocks(folder: Path, keys: Sequence[bytes]) -> None:
    """Delete and sync. Raises KVStoreError."""
    index = BlockIndex.open(folder)
    try:
        for start in range(0, len(keys), _GROUP):
            index.commit(deletes=keys[start : start + _GROUP], sync=True)
    finally:
        index.close()


def rebuild(folder: Path, tables: Tables, blocks: Sequence[Entry]) -> None:
    """Replace the index by one that holds `blocks` and the small tables. Complete before the old one goes."""
    fresh = folder.with_name("index.new")
    shutil.rmtree(fresh, ignore_errors=True)
    index = BlockIndex.open(fresh)
    try:
        for keyspace, encoding in tables.keyspaces.items():
            index.put_keyspace(keyspace, encoding)
        index.put_sessions(dict(tables.sessions))
        index.put_contexts(dict(tables.contexts))
        for start in range(0, len(blocks), _GROUP):
            index.commit(blocks[start : start + _GROUP])
        index.sync()
    finally:
        index.close()
    shutil.rmtree(folder)
    fresh.rename(folder)
