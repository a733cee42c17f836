"""What the machine asks of an eviction policy.

One policy instance serves one tier of one machine. The machine tells it which blocks *may* be evicted from that tier
now (the candidates: READY, no child in the tier, no lease, no running operation) and asks for the worst of them.
Everything else a policy knows comes from `touch` and `signal`.

Calls come in this order for a block: `add` -> (`touch` | `signal`)* -> `discard` (it got a child, a lease, a hold) or
`evicted`. `touch` is called once a request, for the deepest resident block of the request's path (in this tier),
whether it is a candidate or not; ancestors are used implicitly. No call may cost more than O(log n) amortised in the
number of resident blocks and sessions.
"""

from __future__ import annotations

from typing import Protocol

from kvstore.core.blocks import Block
from kvstore.core.sessions import Session


class EvictionPolicy(Protocol):
    """Victim order of one tier. Pure: no clock, no randomness but a seeded generator of its own.

    A policy may also have `admits(session, now_ns) -> bool`: is a new block of this session worth more than the victim
    it would push out of a full tier that has none below? The machine asks before it evicts for a `Reserve`. And
    `sized(num_blocks)`, called once before everything else: how many of its blocks the tier could hold.
    """

    name: str

    def touch(self, tip: Block, session: Session | None, now_ns: int) -> None:
        """A request used `tip` and all its ancestors; `tip.last_access_ns` and `tip.last_session` are already
        updated."""

    def signal(self, session: Session, now_ns: int) -> None:
        """`session.activity` (or tool, expected wait, tip) has just changed; the record holds the new values."""

    def add(self, block: Block, now_ns: int) -> None:
        """`block` became a candidate."""

    def discard(self, block: Block, now_ns: int) -> None:
        """`block` stopped being a candidate but stays resident. Discarding a block that is no candidate is a no-op."""

    def evicted(self, block: Block, now_ns: int) -> None:
        """`block` (a candidate until now) left the tier; its parent may be added next."""

    def victim(self, now_ns: int) -> Block | None:
        """The candidate to evict first, or None when there is none. Doesn't remove it."""

    def score(self, block: Block, now_ns: int) -> float:
        """How much keeping the block is worth, for Explain; only comparable within one policy."""
