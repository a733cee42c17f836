"""Least recently used, block by block.

Source: Mattson et al., "Evaluation techniques for storage hierarchies", 1970. Flat form:
`kvstore_bench.flat.classic`, where a request uses its blocks from head to tail, so that of one context the head is the
oldest and goes first: the rest is then useless, though it still takes room. The machine evicts leaves only, and a
parent is used whenever its child is; that leaves no order but the one of `leaf_lru`, which it therefore shares.

Not for: anything but comparison; use `session`, or `leaf-lru` where sessions say nothing.
"""

from __future__ import annotations

from kvstore.core.eviction.leaf_lru import LeafLRU


class Lru(LeafLRU):
    """Victim: the candidate with the oldest last use."""

    name = "lru"
