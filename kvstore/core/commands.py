"""What a machine asks for and answers, with the ordering rules that hands must keep.

Work for hands (each ends with exactly one completion event, success or not):
- `Move`: copy items in order; publish a record only after its bytes are complete. -> MoveDone
- `Unpublish`: delete records, commit. Commands touching one durable index are carried out in the order given, so that
  the deletion
  of an old record can't overtake the record of a new copy. -> UnpublishDone
- `Sync`: after everything commanded before it. -> SyncDone

Answers: the rest. Notices (`Removed`, `Stored`) keep the resident set's order of changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvstore.core.blocks import Block
from kvstore.core.sessions import Session
from kvstore.core.types import BlockHash, KeyspaceId, LeaseId, OpId, Slot, Tier


class ReserveStatus(IntEnum):
    """Fate of one block of a `Reserve`."""

    GRANTED = 0
    RESIDENT = 1
    IN_FLIGHT = 2
    FULL = 3
    NO_PARENT = 4


class MoveItem(NamedTuple):
    """One block from its slot in the source tier to its slot in the target tier."""

    block: Block
    source: Slot
    target: Slot


@dataclass(frozen=True, slots=True)
class Move:
    """Copy blocks between tiers, parents before children; background work unless a client waits for it."""

    op: OpId
    source: Tier
    target: Tier
    items: tuple[MoveItem, ...]
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class Unpublish:
    """Delete the durable records of blocks that are leaving the tier."""

    op: OpId
    tier: Tier
    blocks: tuple[tuple[KeyspaceId, BlockHash], ...]


@dataclass(frozen=True, slots=True)
class Sync:
    """Put what was written so far on stable storage."""

    op: OpId


@dataclass(frozen=True, slots=True)
class SegmentFree:
    """A segment of a tier became empty; its file may be dropped."""

    tier: Tier
    index: int


@dataclass(frozen=True, slots=True)
class Acquired:
    """`lease` is 0 when nothing matched (and no empty lease was asked for)."""

    lease: LeaseId
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """Leases that had already expired."""

    expired: tuple[LeaseId, ...]


class Location(NamedTuple):
    """Where a block's copy lies."""

    block: Block
    tier: Tier
    slot: Slot


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Locations of the blocks asked for, in path order; their slots are held until RestoreDone or the lease's end."""

    op: OpId
    first: int
    places: tuple[Location, ...]


@dataclass(frozen=True, slots=True)
class Prefetching:
    """How many promotions were started."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """One status per block of [first, end), and the slot where it is GRANTED (else -1)."""

    request: int
    op: OpId
    statuses: tuple[ReserveStatus, ...]
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Sealed:
    """How many of the blocks named are now READY."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Persisted:
    """Leading blocks of the path that hold the promise."""

    request: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Slots now under the lease."""

    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Adopted:
    """`slot` is where the block lies. When another copy was there first, `duplicate` is true, `slot` is that copy's,
    and the borrowed slot stays with the lease."""

    slot: Slot
    duplicate: bool


@dataclass(frozen=True, slots=True)
class SessionChanged:
    """The session's record after the event, and how many blocks nobody holds any more because of it."""

    session: Session
    num_abandoned: int = 0
    predicted_ns: int | None = None
    """How long the wait that has just begun is expected to take."""


class Stored(NamedTuple):
    """A copy became READY."""

    keyspace: KeyspaceId
    block: Block
    tier: Tier


class Removed(NamedTuple):
    """A copy went away: evicted, lost, superseded, ..."""

    keyspace: KeyspaceId
    block: Block
    tier: Tier
    reason: str
    score: float


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A lease expired by the clock."""

    lease: LeaseId
    owner: str


Command = (
    Move
    | Unpublish
    | Sync
    | SegmentFree
    | Acquired
    | Renewed
    | RestorePlan
    | Prefetching
    | Reserved
    | Sealed
    | Persisted
    | Borrowed
    | Adopted
    | SessionChanged
    | Stored
    | Removed
    | LeaseEnded
)
