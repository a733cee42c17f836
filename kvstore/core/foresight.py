"""When a waiting agent's context will be needed, so that it can be brought up in time.

What the agent said comes first. Without a hint, the tool's own past decides: a histogram of its waiting times in
half-octave bins, with decay, conditioned on the time already waited. A quarter of the waits end before the time given,
so a prefetch is rarely late and seldom idle for long.

    TOOL_START --> due = start + predicted - lead --> Tick at or after `due` --> promote, if the same wait is still on
"""

from __future__ import annotations

import heapq
from math import log2

from kvstore.core.sessions import Session
from kvstore.core.types import Activity, SessionId

HALF_OCTAVES = 48
FIRST_NS = 10_000_000
"""Bin k begins at FIRST_NS * 2^(k/2); bin 0 also holds everything shorter."""
QUANTILE = 0.25
DECAY = 0.98
SAMPLES_MIN = 4.0
"""Decayed number of waits before a tool's past is believed."""
TOOLS_MAX = 1024


def _bin_of(wait_ns: int) -> int:
    return min(HALF_OCTAVES - 1, max(0, int(2 * log2(max(wait_ns, 1) / FIRST_NS))))


def _begin_of(index: int) -> int:
    return int(FIRST_NS * 2 ** (index / 2)) if index else 0


class Foresight:
    """Waiting times by tool, and the prefetches that follow from them."""

    def __init__(self) -> None:
        self._counts: dict[str, list[float]] = {}
        self._due: list[tuple[int, SessionId, int]] = []

    def predict(self, tool: str, age_ns: int = 0) -> int | None:
        """When, from the start of the wait, a quarter of the waits that got this old were over; None when unknown."""
        counts = self._counts.get(tool)
        first = _bin_of(age_ns) if age_ns else 0
        left = sum(counts[first:]) if counts else 0.0
        if counts is None or left < SAMPLES_MIN:
            return None
        passed = 0.0
        for index in range(first, HALF_OCTAVES):
            passed += counts[index]
            if passed >= QUANTILE * left:
                return max(_begin_of(index), age_ns)
        return None

    def wait_began(self, session: Session, lead_ns: int) -> int | None:
        """Plan the prefetch of a session that has just begun to wait. Returns the predicted length of the wait."""
        known = session.expected_ns if session.expected_ns >= 0 else self.predict(session.tool)
        if known is not None and known > lead_ns:
            heapq.heappush(self._due, (session.since_ns + known - lead_ns, session.id, session.since_ns))
        return known

    def wait_ended(self, tool: str, wait_ns: int) -> None:
        """A wait for `tool` took this long."""
        counts = self._counts.get(tool)
        if counts is None:
            if len(self._counts) >= TOOLS_MAX:
                self._counts.pop(next(iter(self._counts)))
            counts = self._counts[tool] = [0.0] * HALF_OCTAVES
        for index in range(HALF_OCTAVES):
            counts[index] *= DECAY
        counts[_bin_of(wait_ns)] += 1.0

    def due(self, sessions: dict[SessionId, Session], now_ns: int) -> list[Session]:
        """Sessions whose prefetch should start now: those still in the wait it was planned for."""
        found = []
        while self._due and self._due[0][0] <= now_ns:
            _, session_id, since_ns = heapq.heappop(self._due)
            session = sessions.get(session_id)
            if session is not None and session.activity == Activity.TOOL_WAIT and session.since_ns == since_ns:
                found.append(session)
        return found

    @property
    def waiting(self) -> bool:
        """Is anything planned?"""
        return bool(self._due)
