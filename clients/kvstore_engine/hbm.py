"""Which slot of the pool holds which block: a `Machine` with one tier.

A running sequence has one `Hold`: a lease on the deepest block it uses, and the slots it borrowed for blocks that
aren't sealed yet. Sealing a block turns its borrowed slot into a residency that later sequences can hit; the lease
moves on to it. Blocks that nobody holds stay as the local prefix cache and go by the policy's order.

    acquire -> Hold(slots of the cached prefix) -> borrow -> compute -> adopt -> ... -> release

Called by the scheduler's thread only. Slots here are indices of the pool, not byte offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.core import commands, events
from kvstore.core.eviction import make_policy
from kvstore.core.hashing import TokenChain
from kvstore.core.machine import Machine
from kvstore.core.state import Limits, TierConfig
from kvstore.core.types import LeaseId, SessionId, Slot, Tier
from kvstore_engine.pool import KVPool

LEASE_TTL_NS = 600 * 10**9
RENEW_AFTER_NS = 60 * 10**9
OWNER = "engine"
HBM = Tier.HBM

Clock = Callable[[], int]


@dataclass
class Hold:
    """One sequence's claim.

    `slots[i]` is the pool index of its i-th block; `num_sealed` of them are sealed and leased.
    """

    lease: LeaseId
    slots: list[int]
    num_cached: int
    """Blocks that were there when the hold began."""
    num_sealed: int
    borrowed: set[int] = field(default_factory=set)


class HbmTable:
    """Bookkeeping of one pool. `clock` gives monotonic ns; `doubles_at`: see `Share`."""

    def __init__(
        self, pool: KVPool, policy: str, clock: Clock, max_sessions: int = 100_000, doubles_at: int = 0
    ) -> None:
        self._clock = clock
        self._keyspace = pool.keyspace
        self._stride = pool.stride
        self.num_slots = pool.num_slots
        size = pool.num_slots * pool.stride
        tier = TierConfig(HBM, size, lambda t: make_policy(policy, t), segment_bytes=size)
        self.machine = Machine([tier], Limits(num_sessions=max_sessions))
        self._step(events.RegisterKeyspace(self._keyspace.id, pool.stride, doubles_at=doubles_at))
        self._holds: dict[LeaseId, Hold] = {}
        self._renewed_ns = clock()

    # ---- holds

    def acquire(self, chain: TokenChain, num_blocks: int, session: str = "") -> Hold:
        """Claim the cached part of the chain's first `num_blocks` blocks (maybe none)."""
        hashes = [chain.hash_at(i) for i in range(num_blocks)]
        who = SessionId(session) if session else None
        answer = self._step(events.Acquire(self._keyspace.id, hashes, OWNER, LEASE_TTL_NS, who, empty=True))
        acquired = next(c for c in answer if isinstance(c, commands.Acquired))
        slots = [place.slot // self._stride for place in self.machine.locate(acquired.lease)]
        assert len(slots) == acquired.num_blocks
        hold = Hold(acquired.lease, slots, len(slots), len(slots))
        self._holds[hold.lease] = hold
        return hold

    def borrow(self, hold: Hold, count: int) -> bool:
        """Append `count` empty slots to the hold; all of them or, when there's no room, none."""
        if count <= 0:
            return True
        answer = self._step(events.Borrow(hold.lease, HBM, count))
        got = next(c for c in answer if isinstance(c, commands.Borrowed)).slots
        if len(got) < count:
            self._step(events.GiveBack(hold.lease, got))
            return False
        new = [slot // self._stride for slot in got]
        hold.slots.extend(new)
        hold.borrowed.update(new)
        return True

    def adopt(self, hold: Hold, chain: TokenChain) -> None:
        """Seal the hold's next block: its slot holds all of it, and nobody writes it again.

        When another sequence sealed the same block first, this one keeps computing with its own copy, which stays
        borrowed.
        """
        index = hold.num_sealed
        slot = hold.slots[index]
        answer = self._step(events.Adopt(hold.lease, HBM, chain.hash_at(index), Slot(slot * self._stride)))
        if not next(c for c in answer if isinstance(c, commands.Adopted)).duplicate:
            hold.borrowed.discard(slot)
        hold.num_sealed += 1

    def drop_tail(self, hold: Hold, num_blocks: int) -> None:
        """Give back the slots behind the first `num_blocks` (which must be unsealed)."""
        assert num_blocks >= hold.num_sealed
        tail = [s for s in hold.slots[num_blocks:] if s in hold.borrowed]
        del hold.slots[num_blocks:]
        hold.borrowed.difference_update(tail)
        if tail:
            self._step(events.GiveBack(hold.lease, tuple(Slot(s * self._stride) for s in tail)))

    def release(self, hold: Hold) -> None:
        """End the claim; again is a no-op. Sealed blocks stay cached, borrowed slots are free at once."""
        if self._holds.pop(hold.lease, None) is not None:
            self._step(events.Release((hold.lease,)))
            hold.slots, hold.borrowed = [], set()

    # ---- sessions

    def open(self, session: str) -> None:
        """Open a session, or do nothing when it is open."""
        self._step(events.OpenSession(SessionId(session), self._keyspace.id))

    def signal(
        self,
        session: str,
        kind: events.SignalKind,
        tool: str = "",
        expected_s: float = 0.0,
        output_tokens: int = 0,
    ) -> None:
        """What the agent does now. Raises UnknownSession."""
        expected = round(expected_s * 1e9) if expected_s > 0 else -1
        self._step(events.Signal(SessionId(session), kind, tool, expected, output_tokens or -1))

    def fork(self, parent: str, session: str) -> None:
        """A session that starts at its parent's context.

        Raises UnknownSession, InvalidField when it is open already.
        """
        self._step(events.Fork(SessionId(parent), SessionId(session)))

    def end(self, session: str) -> None:
        """The session won't come back. Raises UnknownSession."""
        self._step(events.EndSession(SessionId(session)))

    # ---- the rest

    def match(self, chain: TokenChain, num_blocks: int) -> int:
        """How many leading blocks are cached; claims nothing."""
        return self.machine.match(self._keyspace.id, [chain.hash_at(i) for i in range(num_blocks)])

    @property
    def num_available(self) -> int:
        """Slots that are free or could be freed now; a lower bound, since each holder counts a shared prefix."""
        claimed = sum(hold.num_sealed + len(hold.borrowed) for hold in self._holds.values())
        return self.num_slots - claimed

    @property
    def num_used(self) -> int:
        """Slots that hold a block or are borrowed."""
        pool = self.machine.pool(HBM)
        assert pool is not None
        return pool.num_ready + pool.num_borrowed

    @property
    def num_holds(self) -> int:
        """Live claims."""
        return len(self._holds)

    def tick(self) -> None:
        """Keep the leases of live holds from expiring."""
        now = self._clock()
        if now - self._renewed_ns >= RENEW_AFTER_NS:
            self._renewed_ns = now
            self._step(events.Renew(tuple(self._holds), LEASE_TTL_NS))
            self._step(events.Tick())

    def _step(self, event: events.Event) -> list[commands.Command]:
        return self.machine.step(event, self._clock())
