"""Leases: bounded, expiring claims on a path.

A lease sits on the deepest block of a path; since only leaves are evicted, that protects all ancestors, in O(1). It may
also own borrowed slots (an engine's blocks under computation). Expiry is by the machine's clock; a heap with lazy
deletion finds it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from kvstore.core.blocks import Block
from kvstore.core.sessions import Session
from kvstore.core.types import LeaseId, Slot, Tier
from kvstore.errors import LeaseExpired, LimitExceeded


@dataclass(slots=True)
class Lease:
    """One claim. `block` is None for an empty lease."""

    id: LeaseId
    owner: str
    space: int
    block: Block | None
    session: Session | None
    expires_ns: int
    ops: set[int] = field(default_factory=set)
    """Running restores under this lease; they end with it."""
    borrowed: dict[Slot, Tier] = field(default_factory=dict)


class LeaseTable:
    """All leases of a machine; at most `num_max` in all and `num_owner_max` for one owner."""

    def __init__(self, num_max: int, num_owner_max: int) -> None:
        self._num_max = num_max
        self._num_owner_max = num_owner_max
        self._leases: dict[LeaseId, Lease] = {}
        self._expiry: list[tuple[int, LeaseId]] = []
        self._num_of: dict[str, int] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._leases)

    def all(self) -> list[Lease]:
        """Every live lease."""
        return list(self._leases.values())

    def grant(self, owner: str, space: int, block: Block | None, session: Session | None, expires_ns: int) -> Lease:
        """A new lease. Raises LimitExceeded."""
        if len(self._leases) >= self._num_max:
            raise LimitExceeded(f"max_leases: {self._num_max} leases are out; release some or raise max_leases")
        if self._num_of.get(owner, 0) >= self._num_owner_max:
            raise LimitExceeded(f"max_leases_per_client: {self._num_owner_max} reached; release leases of {owner!r}")
        lease = Lease(LeaseId(self._next), owner, space, block, session, expires_ns)
        self._next += 1
        self._leases[lease.id] = lease
        self._num_of[owner] = self._num_of.get(owner, 0) + 1
        heapq.heappush(self._expiry, (expires_ns, lease.id))
        return lease

    def get(self, lease_id: LeaseId) -> Lease:
        """A live lease. Raises LeaseExpired."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseExpired(f"lease_id: {lease_id} has expired or was released; acquire again")
        return lease

    def find(self, lease_id: LeaseId) -> Lease | None:
        """A live lease, or None."""
        return self._leases.get(lease_id)

    def renew(self, lease: Lease, expires_ns: int) -> None:
        """Prolong; never shortens."""
        if expires_ns > lease.expires_ns:
            lease.expires_ns = expires_ns
            heapq.heappush(self._expiry, (expires_ns, lease.id))

    def remove(self, lease: Lease) -> None:
        """Forget a lease (the machine has taken back what it claimed)."""
        del self._leases[lease.id]
        left = self._num_of[lease.owner] - 1
        if left:
            self._num_of[lease.owner] = left
        else:
            del self._num_of[lease.owner]

    def expired(self, now_ns: int) -> list[Lease]:
        """Leases whose time is over, oldest first. The caller removes them."""
        found: dict[LeaseId, Lease] = {}
        while self._expiry and self._expiry[0][0] <= now_ns:
            _, lease_id = heapq.heappop(self._expiry)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires_ns <= now_ns:
                found[lease_id] = lease
        return list(found.values())
