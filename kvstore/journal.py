"""Changes of a node's resident set and sessions, numbered, for `Watch`.

A bounded ring: whoever falls behind it sees a gap in the numbers and takes a new snapshot.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from kvstore.core.commands import Removed, Stored
from kvstore.core.record import NO_PARENT
from kvstore.core.types import BlockHash, KeyspaceId, SessionId, Tier

RING_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Change:
    """One change. `kind`: "stored", "removed" or "session".

    `hash` of a session's acquire is two hashes: of the last block that was asked for, and of the last that was found
    (if one was); parents in "stored" tell the rest of both paths.
    """

    sequence: int
    time_ns: int
    kind: str
    keyspace: KeyspaceId
    hash: BlockHash
    parent: BlockHash
    tier: Tier
    session: str
    detail: str


class Journal:
    """Thread-safe."""

    def __init__(self) -> None:
        self._ring: deque[Change] = deque(maxlen=RING_MAX)
        self._condition = threading.Condition()
        self._sequence = 0

    @property
    def sequence(self) -> int:
        """Number of the newest change."""
        return self._sequence

    def stored(self, c: Stored) -> None:
        """A copy became READY."""
        parent = c.block.parent.hash if c.block.parent is not None else NO_PARENT
        self._add("stored", c.keyspace, c.block.hash, parent, c.tier, "", "")

    def removed(self, c: Removed) -> None:
        """A copy went away."""
        self._add("removed", c.keyspace, c.block.hash, NO_PARENT, c.tier, "", c.reason)

    def session(self, session: SessionId, detail: str, keyspace: KeyspaceId, hashes: bytes = b"") -> None:
        """Something happened to a session."""
        self._add("session", keyspace, BlockHash(hashes), NO_PARENT, Tier.DRAM, session, detail)

    def _add(
        self,
        kind: str,
        keyspace: KeyspaceId,
        block: BlockHash,
        parent: BlockHash,
        tier: Tier,
        session: str,
        detail: str,
    ) -> None:
        with self._condition:
            self._sequence += 1
            self._ring.append(
                Change(self._sequence, time.time_ns(), kind, keyspace, block, parent, tier, session, detail)
            )
            self._condition.notify_all()

    def after(self, sequence: int, timeout_s: float) -> list[Change] | None:
        """Changes newer than `sequence`, waiting up to `timeout_s` for one; None when some are already forgotten."""
        with self._condition:
            self._condition.wait_for(lambda: self._sequence > sequence, timeout_s)
            if self._sequence <= sequence:
                return []
            if self._ring[0].sequence > sequence + 1:
                return None
            skip = sequence + 1 - self._ring[0].sequence
            return [self._ring[i] for i in range(skip, len(self._ring))]
