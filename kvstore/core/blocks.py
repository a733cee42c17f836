"""Blocks, their residencies, and the tree they form.

A block knows its parent, its children, and its copies (at most one a tier). A residency moves through one table:

    FREE --reserve--> FILLING --seal--> READY --evict--> DRAINING --slot may be reused--> FREE
                         |                 |
                         +----abort--------+----lost (corrupt, tier failed)------------> FREE

A block stays in the table while it has a residency or a child. A block without a readable residency that still has
children is a
*ghost*: its descendants are orphans, invisible to matching until somebody seals the ghost again.

Recency is lazy. A request that uses a path touches only its *deepest* block (the tip); when a child's copy goes away
its parent inherits the newer of the two times. For leaf-first orders this is exact, since a parent is used whenever its
child is.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore.core.sessions import Session
from kvstore.core.types import NUM_TIERS, BlockHash, ResidencyState, Slot


class Share(NamedTuple):
    """Whose room a block takes: blocks of one share compete with each other first. `tenant` is empty for all without
    quota."""

    tenant: str
    size_class: int
    """Bytes of one slot."""
    doubles_at: int = 0
    """Depth, in blocks, at which a block takes twice as long to compute as a context's first; 0: all count alike."""


def doubling_depth(tokens: int, block_tokens: int) -> int:
    """`Share.doubles_at` for a depth in tokens; 0 stays 0."""
    return -(-tokens // block_tokens)


class Residency:
    """One copy of a block. `holds` counts running operations that read or write the slot."""

    __slots__ = ("candidate", "holds", "num_kids", "op", "prefetched", "slot", "state")

    def __init__(self, slot: Slot, state: ResidencyState, op: int) -> None:
        self.slot = slot
        self.state = state
        self.op = op
        """The operation that fills or drains the slot; a completion with another id is stale."""
        self.holds = 0
        self.num_kids = 0
        """Children that have a residency in the same tier."""
        self.prefetched = False
        """Brought up ahead of need, and not read yet."""
        self.candidate = False
        """Known to the tier's policy as evictable."""


class Block:
    """One block of one keyspace. Mutated by the machine only; identity is the object's."""

    __slots__ = (
        "depth",
        "hash",
        "kids",
        "last_access_ns",
        "last_session",
        "leases",
        "num_tips",
        "parent",
        "residencies",
        "share",
        "space",
        "visible",
    )

    def __init__(self, block_hash: BlockHash, parent: Block | None, space: int, share: Share) -> None:
        self.hash = block_hash
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Position in its chain: 0 for the first block."""
        self.space = space
        """Small integer of the keyspace, given by the machine."""
        self.share = share
        self.kids: list[Block] | set[Block] = []
        """Children; a set once there are many (shared heads)."""
        self.residencies: list[Residency | None] = [None] * NUM_TIERS
        self.leases = 0
        self.num_tips = 0
        """Live sessions whose context ends at this block. A leaf with none is the end of an abandoned branch."""
        self.visible = False
        """Readable, and so are all its ancestors: the property that the binary search stands on."""
        self.last_access_ns = 0
        self.last_session: Session | None = None

    def __repr__(self) -> str:
        states = "".join("-" if r is None else "?FRD"[r.state] for r in self.residencies)
        return f"Block({self.hash.hex()[:8]} depth={self.depth} {states})"
