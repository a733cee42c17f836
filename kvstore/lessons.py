"""What eviction has learned, kept over restarts: a restarted node shouldn't be a beginner.

One packing a tier, in the index, written now and then and at the end. Every policy that the tier makes later starts
from it, for any block size and tenant: how long agents wait doesn't depend on those. What can't be read is left out:
the policy then learns anew.
"""

from __future__ import annotations

import logging
from typing import Protocol, runtime_checkable

from kvstore.core.eviction import make_policy
from kvstore.core.eviction.protocol import EvictionPolicy
from kvstore.core.machine import Machine
from kvstore.core.types import Tier
from kvstore.errors import CapacityError, TierError
from kvstore.tiers.index_lmdb import BlockIndex

log = logging.getLogger(__name__)
KEEP_EVERY_S = 600.0


@runtime_checkable
class Learner(Protocol):
    """A policy that learns."""

    def dump(self) -> bytes:
        """What it has learned."""

    def load(self, data: bytes) -> None:
        """Start from that. Raises ValueError and changes nothing when it can't be read."""


def learned_policy(name: str, tier: Tier, index: BlockIndex | None) -> EvictionPolicy:
    """A new policy of that name, with what the tier has learned before."""
    policy = make_policy(name, tier)
    data = index.get_meta(_key(name, tier)) if index is not None and isinstance(policy, Learner) else None
    if data is not None and isinstance(policy, Learner):
        try:
            policy.load(data)
        except ValueError as error:
            log.warning("%s: %s; it learns anew", _key(name, tier), error)
    return policy


def lessons(machine: Machine) -> dict[str, bytes]:
    """By key, what the policies have learned; of several in a tier, the one with most blocks to choose from."""
    found: dict[str, bytes] = {}
    for pool in machine.pools():
        share = max(pool.policies, key=lambda s: pool.num_candidates[s], default=None)
        policy = pool.policies[share] if share is not None else None
        if policy is not None and isinstance(policy, Learner):
            found[_key(policy.name, pool.tier)] = policy.dump()
    return found


def keep(index: BlockIndex, found: dict[str, bytes]) -> None:
    """Store lessons. A disk that takes nothing costs them, and nothing else."""
    try:
        for key, data in found.items():
            index.put_meta(key, data)
    except (TierError, CapacityError) as error:
        log.debug("lessons aren't stored: %s", error)


def _key(name: str, tier: Tier) -> str:
    return f"learned/{tier.label}/{name}"
