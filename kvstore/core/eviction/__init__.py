"""Eviction policies by name: one file per policy, all behind `protocol.EvictionPolicy`.

`session` is the one to use; the others are there to be compared with, each saying where it fails.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.core.eviction.arc import Arc
from kvstore.core.eviction.fifo import Fifo
from kvstore.core.eviction.gdsf import Gdsf
from kvstore.core.eviction.leaf_lru import LeafLRU
from kvstore.core.eviction.lfu import Lfu
from kvstore.core.eviction.lru import Lru
from kvstore.core.eviction.protocol import EvictionPolicy
from kvstore.core.eviction.s3_fifo import S3Fifo
from kvstore.core.eviction.session import SessionActivity
from kvstore.core.eviction.sieve import Sieve
from kvstore.core.eviction.tool_ttl import ToolTtl
from kvstore.core.eviction.w_tinylfu import WTinyLfu
from kvstore.core.types import Tier

PolicyFactory = Callable[[Tier, int], EvictionPolicy]

POLICIES: dict[str, PolicyFactory] = {
    SessionActivity.name: lambda tier, seed: SessionActivity(),
    LeafLRU.name: lambda tier, seed: LeafLRU(),
    ToolTtl.name: lambda tier, seed: ToolTtl(),
    Lru.name: lambda tier, seed: Lru(),
    Fifo.name: lambda tier, seed: Fifo(tier),
    Lfu.name: lambda tier, seed: Lfu(tier),
    Gdsf.name: lambda tier, seed: Gdsf(tier),
    Sieve.name: lambda tier, seed: Sieve(tier),
    S3Fifo.name: lambda tier, seed: S3Fifo(tier),
    Arc.name: lambda tier, seed: Arc(tier),
    WTinyLfu.name: lambda tier, seed: WTinyLfu(tier),
}


def make_policy(name: str, tier: Tier, seed: int = 0) -> EvictionPolicy:
    """A fresh policy for one tier.

    Raises: ValueError for an unknown name; the message lists the known ones.
    """
    factory = POLICIES.get(name)
    if factory is None:
        raise ValueError(f"unknown eviction policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    return factory(tier, seed)
