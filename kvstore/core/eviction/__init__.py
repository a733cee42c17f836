"""Eviction policies by name: one file per policy, all behind `protocol.EvictionPolicy`."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.core.eviction.leaf_lru import LeafLRU
from kvstore.core.eviction.protocol import EvictionPolicy
from kvstore.core.eviction.session import SessionActivity
from kvstore.core.types import Tier

PolicyFactory = Callable[[Tier, int], EvictionPolicy]

POLICIES: dict[str, PolicyFactory] = {
    LeafLRU.name: lambda tier, seed: LeafLRU(),
    SessionActivity.name: lambda tier, seed: SessionActivity(),
}


def make_policy(name: str, tier: Tier, seed: int = 0) -> EvictionPolicy:
    """A fresh policy for one tier.

    Raises: ValueError for an unknown name; the message lists the known ones.
    """
    factory = POLICIES.get(name)
    if factory is None:
        raise ValueError(f"unknown eviction policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    return factory(tier, seed)
