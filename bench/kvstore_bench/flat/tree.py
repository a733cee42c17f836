"""Replay of a trace over one tier with any `EvictionPolicy`, in plain Python.

The tree obeys the machine's rules (leaves only, tips and recency passed to the parent when a block goes) without
slots, leases and hands. A request is matched, then its missing blocks are put in, then the worst leaves go until the
tier fits again; so a context that is worth less than what is there is not admitted, as in a service that may refuse
an offload.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.core.blocks import Block, Residency, Share
from kvstore.core.eviction.protocol import EvictionPolicy
from kvstore.core.sessions import Session
from kvstore.core.types import Activity, BlockHash, ResidencyState, SessionId, Slot
from kvstore_bench.traces.model import Stop, Trace

SHARE = Share("", 4096)
ACTIVITY = {
    Stop.UNKNOWN: Activity.OPEN,
    Stop.TOOL: Activity.TOOL_WAIT,
    Stop.TURN: Activity.IDLE,
    Stop.LENGTH: Activity.IDLE,
}


class TracedSession(Session):
    """A session that also knows how much the model wrote."""

    __slots__ = ("output_tokens",)

    def __init__(self, session_id: SessionId, now_ns: int) -> None:
        super().__init__(session_id, 0, None, now_ns)
        self.output_tokens = -1


@dataclass(slots=True)
class Hits:
    """Blocks of one request: how many it has, and how many of its leading ones were there."""

    request: int
    num_blocks: int
    num_hits: int


class FlatTier:
    """One tier of `capacity` blocks under `policy`."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy, self.capacity = policy, capacity
        self.blocks: dict[int, Block] = {}
        self.sessions: dict[int, TracedSession] = {}

    def match(self, path: list[int]) -> int:
        """Length of the leading run that is resident."""
        blocks, low, high = self.blocks, 0, len(path)
        while low < high:
            middle = (low + high) // 2
            if path[middle] in blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def use(self, path: list[int], session: TracedSession, now_ns: int, num_hits: int) -> None:
        """Touch the matched part, put the rest in, move the session's tip to the end."""
        if num_hits:
            self._move_tip(session, self.blocks[path[num_hits - 1]], now_ns)
            self._touch(self.blocks[path[num_hits - 1]], session, now_ns)
        if num_hits == len(path):
            return
        parent = self.blocks[path[num_hits - 1]] if num_hits else None
        if parent is not None and not parent.kids:
            self.policy.discard(parent, now_ns)
        for block_id in path[num_hits:]:
            parent = self._insert(block_id, parent, session, now_ns)
        assert parent is not None
        self._move_tip(session, parent, now_ns)
        self._touch(parent, session, now_ns)
        self.policy.add(parent, now_ns)

    def shrink(self, now_ns: int) -> None:
        """Evict the worst leaves until the tier fits."""
        while len(self.blocks) > self.capacity:
            victim = self.policy.victim(now_ns)
            assert victim is not None
            self._evict(victim, now_ns)

    def end(self, session: TracedSession, now_ns: int) -> None:
        """The session won't come back."""
        session.activity = Activity.ENDED
        self._move_tip(session, None, now_ns)
        self.policy.signal(session, now_ns)

    def _insert(self, block_id: int, parent: Block | None, session: Session, now_ns: int) -> Block:
        block = Block(BlockHash(block_id.to_bytes(16, "little")), parent, 0, SHARE)
        block.residencies[1] = Residency(Slot(0), ResidencyState.READY, 0)
        block.last_session, block.last_access_ns = session, now_ns
        self.blocks[block_id] = block
        if parent is not None:
            parent.kids.append(block)  # type: ignore[union-attr]
        return block

    def _touch(self, tip: Block, session: Session, now_ns: int) -> None:
        tip.last_access_ns, tip.last_session = now_ns, session
        self.policy.touch(tip, session, now_ns)

    def _move_tip(self, session: Session, tip: Block | None, now_ns: int) -> None:
        old = session.tip
        while old is not None and old.residencies[1] is None:
            old = old.parent
        if tip is not None:
            tip.num_tips += 1
        if old is not None:
            old.num_tips -= 1
        session.tip = tip

    def _evict(self, block: Block, now_ns: int) -> None:
        self.policy.evicted(block, now_ns)
        block.residencies[1] = None
        del self.blocks[int.from_bytes(block.hash, "little")]
        parent = block.parent
        if parent is None:
            return
        parent.kids.remove(block)
        parent.num_tips += block.num_tips
        if block.last_access_ns > parent.last_access_ns:
            parent.last_access_ns, parent.last_session = block.last_access_ns, block.last_session
        if not parent.kids:
            self.policy.add(parent, now_ns)


def replay(trace: Trace, policy: EvictionPolicy, capacity: int, signal_ends: bool = False) -> Iterator[Hits]:
    """Hits of every request, one tier. Partial last blocks are never kept: an engine seals full blocks only."""
    tier = FlatTier(policy, capacity)
    full = trace.full_blocks().tolist()
    offsets, times, sessions = trace.offsets.tolist(), trace.times_ns.tolist(), trace.session.tolist()
    stops, outputs, ends = trace.stop.tolist(), trace.output_tokens.tolist(), trace.end.tolist()
    for r in range(trace.num_requests):
        now_ns, number = times[r], sessions[r]
        path = trace.ids[offsets[r] : offsets[r] + full[r]].tolist()
        session = tier.sessions.get(number)
        if session is None:
            session = tier.sessions[number] = TracedSession(SessionId(str(number)), now_ns)
        activity = ACTIVITY[Stop(stops[r])]
        session.output_tokens = outputs[r]
        session.activity = Activity.OPEN if activity == Activity.OPEN else Activity.RUNNING
        if session.activity == Activity.RUNNING:
            policy.signal(session, now_ns)
        num_hits = tier.match(path)
        tier.use(path, session, now_ns, num_hits)
        if activity != Activity.OPEN:
            session.activity = activity
            policy.signal(session, now_ns)
        if signal_ends and ends[r]:
            tier.end(session, now_ns)
        tier.shrink(now_ns)
        yield Hits(r, len(path), num_hits)
