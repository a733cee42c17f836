"""Victims by what their session is doing: ended and abandoned first, then idle, waiting for a tool, running; by last use within each.

A first, fixed order; the learned one replaces it behind the same protocol.
"""

from __future__ import annotations

from kvstore.core.blocks import Block
from kvstore.core.eviction.heap import BlockHeap
from kvstore.core.sessions import Session
from kvstore.core.types import Activity

_RANK = {Activity.ENDED: 0, Activity.IDLE: 1, Activity.OPEN: 2, Activity.TOOL_WAIT: 2, Activity.RUNNING: 3}


class SessionActivity:
    """Victim: least (rank of the session's activity, last use)."""

    name = "session"

    def __init__(self) -> None:
        self._heap: BlockHeap[tuple[int, int]] = BlockHeap()
        self._of: dict[Session, dict[Block, None]] = {}
        self._owner: dict[Block, Session] = {}

    def touch(self, tip: Block, session: Session | None, now_ns: int) -> None:
        if tip in self._heap:
            self.add(tip, now_ns)

    def signal(self, session: Session, now_ns: int) -> None:
        for block in self._of.get(session, ()):
            self._heap.put(block, self._key(block))

    def add(self, block: Block, now_ns: int) -> None:
        self._disown(block)
        session = block.last_session
        if session is not None:
            self._owner[block] = session
            self._of.setdefault(session, {})[block] = None
        self._heap.put(block, self._key(block))

    def discard(self, block: Block, now_ns: int) -> None:
        self._disown(block)
        self._heap.remove(block)

    def evicted(self, block: Block, now_ns: int) -> None:
        self.discard(block, now_ns)

    def victim(self, now_ns: int) -> Block | None:
        top = self._heap.peek()
        return None if top is None else top[1]

    def score(self, block: Block, now_ns: int) -> float:
        rank, last = self._key(block)
        return rank * 2.0**63 + last

    def _key(self, block: Block) -> tuple[int, int]:
        session = block.last_session
        if session is None or (block.num_tips == 0 and not block.kids):
            return 0, block.last_access_ns
        return _RANK[session.activity], block.last_access_ns

    def _disown(self, block: Block) -> None:
        owner = self._owner.pop(block, None)
        if owner is None:
            return
        blocks = self._of[owner]
        del blocks[block]
        if not blocks:
            del self._of[owner]
