"""Changes of a node's resident set and sessions, numbered, for `Watch`.

A bounded ring: whoever falls behind it sees a gap in the numbers and takes a new snapshot.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.core.commands import Removed, Stored
from kvstore.core.record import NO_PARENT
from kvstore.core.types import BlockHash, KeyspaceId, SessionId, Tier

RING_MAX = 1 << 16


class Change(NamedTuple):
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

    def moved(self, notices: Sequence[Stored | Removed]) -> None:
        """Copies became READY or went away, in this order."""
        with self._condition:
            at, now_ns, add = self._sequence, time.time_ns(), self._ring.append
            for c in notices:
                at += 1
                block = c.block
                if isinstance(c, Stored):
                    parent = block.parent.hash if block.parent is not None else NO_PARENT
                    add(Change(at, now_ns, "stored", c.keyspace, block.hash, parent, c.tier, "", ""))
                else:
                    add(Change(at, now_ns, "removed", c.keyspace, block.hash, NO_PARENT, c.tier, "", c.reason))
            self._sequence = at
            self._condition.notify_all()

    def session(self, session: SessionId, detail: str, keyspace: KeyspaceId, hashes: bytes = b"") -> None:
        """Something happened to a session."""
        with self._condition:
            self._sequence += 1
            at, now_ns, block = self._sequence, time.time_ns(), BlockHash(hashes)
            self._ring.append(Change(at, now_ns, "session", keyspace, block, NO_PARENT, Tier.DRAM, session, detail))
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
