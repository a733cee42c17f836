"""New weights: what the old ones computed can't be asked for any more, so its room is given back at once.

A keyspace is older than another when they differ in nothing but the weights (epoch and digest) and its epoch is lower.
Its blocks are dropped leaf by leaf in the background; its name leaves the index first, so a restart in between
finishes the job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from kvstore.core import events
from kvstore.core.keyspace import Keyspace
from kvstore.core.machine import Machine
from kvstore.core.types import BlockHash, Tier

log = logging.getLogger(__name__)
BATCH = 64
"""Copies dropped between two looks at whether the node is closing."""


def older_than(newest: Keyspace, known: Iterable[Keyspace]) -> list[Keyspace]:
    """Those of `known` that `newest` supersedes."""

    def same_but_weights(k: Keyspace) -> bool:
        return replace(k, weights_epoch=newest.weights_epoch, weights_digest=newest.weights_digest) == newest

    return [k for k in known if k.weights_epoch < newest.weights_epoch and same_but_weights(k)]


def retire(
    old: Keyspace,
    step: Callable[[events.Event], Any],
    read: Callable[[Callable[[Machine], Any]], Any],
    closing: Callable[[], bool],
) -> int:
    """Drop every copy of a keyspace, deepest blocks first. Returns how many were asked to go."""

    def copies(machine: Machine) -> list[tuple[int, BlockHash, Tier]]:
        blocks = machine.space(old.id).blocks.values()
        return [(b.depth, b.hash, tier) for b in blocks for tier in Tier if b.residencies[tier] is not None]

    found = sorted(read(copies), reverse=True)
    for done, (_, block_hash, tier) in enumerate(found):
        if done % BATCH == 0 and closing():
            return done
        step(events.Lost(old.id, block_hash, tier, "retired"))
    log.info("weights epoch %d of %s retired: %d copies dropped", old.weights_epoch, old.model, len(found))
    return len(found)
