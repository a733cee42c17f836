"""What happens to a machine: requests of clients, completions of hands, the passing of time.

Requests that may be answered later carry a `request` number chosen by the caller; the answer brings it back. An event
that names something unknown or expired raises a RequestError from `step` and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvstore.core.types import BlockHash, Durability, Hashes, KeyspaceId, LeaseId, OpId, SessionId, Slot, Tier


class SignalKind(IntEnum):
    """What an agent says it does."""

    TURN_START = 0
    TOOL_START = 1
    TOOL_END = 2
    TURN_END = 3
    STOPPED = 4
    """The model stopped, and nobody knows what the agent does next."""


@dataclass(frozen=True, slots=True)
class RegisterKeyspace:
    """Make a keyspace known. Registering again is a no-op. `slot_bytes` is a multiple of 4 KiB."""

    keyspace: KeyspaceId
    slot_bytes: int
    tenant: str = ""
    doubles_at: int = 0
    """See `Share`."""


# ---- sessions


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Open, or open again, a session. -> SessionChanged"""

    session: SessionId
    keyspace: KeyspaceId


@dataclass(frozen=True, slots=True)
class Signal:
    """An activity change. -> SessionChanged"""

    session: SessionId
    kind: SignalKind
    tool: str = ""
    expected_ns: int = -1
    output_tokens: int = -1
    """With TOOL_START, TURN_END and STOPPED: tokens that the model just wrote."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A new session that starts at its parent's context. -> SessionChanged"""

    parent: SessionId
    session: SessionId


@dataclass(frozen=True, slots=True)
class Supersede:
    """The session's context is this path now. -> SessionChanged"""

    session: SessionId
    hashes: Hashes


@dataclass(frozen=True, slots=True)
class EndSession:
    """The session won't come back. -> SessionChanged"""

    session: SessionId


# ---- reading


@dataclass(frozen=True, slots=True)
class Acquire:
    """Match and lease in one step. -> Acquired"""

    keyspace: KeyspaceId
    hashes: Hashes
    owner: str
    ttl_ns: int
    session: SessionId | None = None
    empty: bool = False
    """Give a lease even when nothing matched (an engine needs one to borrow slots)."""


@dataclass(frozen=True, slots=True)
class Renew:
    """Prolong leases, and the operations under them. -> Renewed"""

    leases: tuple[LeaseId, ...]
    ttl_ns: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give leases back; unknown ones are ignored."""

    leases: tuple[LeaseId, ...]


@dataclass(frozen=True, slots=True)
class Restore:
    """Hold the slots of blocks [first, last) of a leased path for reading. -> RestorePlan"""

    lease: LeaseId
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class RestoreDone:
    """The reading ended; `corrupt` are positions whose bytes were wrong. A stale one is dropped."""

    op: OpId
    corrupt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring a session's blocks one tier up, as far as room is clean. -> Prefetching"""

    session: SessionId


# ---- writing


@dataclass(frozen=True, slots=True)
class Reserve:
    """Slots in `tier` for blocks [first, end) of a path. -> Reserved, at once or within `wait_ns`"""

    request: int
    keyspace: KeyspaceId
    hashes: Hashes
    first: int
    owner: str
    tier: Tier
    ttl_ns: int
    wait_ns: int = 0
    session: SessionId | None = None


@dataclass(frozen=True, slots=True)
class Seal:
    """Reserved blocks are filled (or failed). -> Sealed"""

    op: OpId
    sealed: tuple[BlockHash, ...]
    failed: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class Persist:
    """Make a path durable. -> Persisted, at once or within `wait_ns`"""

    request: int
    keyspace: KeyspaceId
    hashes: Hashes
    durability: Durability
    wait_ns: int


@dataclass(frozen=True, slots=True)
class Borrow:
    """Slots without identity, for blocks being computed, under a lease. -> Borrowed (maybe fewer than asked)"""

    lease: LeaseId
    tier: Tier
    count: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """A borrowed slot now holds the sealed next block of the leased path: the lease moves on to it. -> Adopted"""

    lease: LeaseId
    tier: Tier
    hash: BlockHash
    slot: Slot


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Return borrowed slots that were not adopted."""

    lease: LeaseId
    slots: tuple[Slot, ...]


# ---- hands


@dataclass(frozen=True, slots=True)
class MoveDone:
    """A `Move` ended. `failed` are indices into its items; `tier_dead` says that the target can't be written any
    more."""

    op: OpId
    failed: tuple[int, ...] = ()
    corrupt: tuple[int, ...] = ()
    """Indices whose *source* bytes were wrong."""
    tier_dead: bool = False


@dataclass(frozen=True, slots=True)
class UnpublishDone:
    """The records are gone from the durable index: the slots may be used again."""

    op: OpId


@dataclass(frozen=True, slots=True)
class SyncDone:
    """Everything written before the `Sync` is on stable storage (or not)."""

    op: OpId
    ok: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """A copy was found missing or wrong (scrub, failed read), or can't be asked for any more."""

    keyspace: KeyspaceId
    hash: BlockHash
    tier: Tier
    reason: str = "corrupt"


@dataclass(frozen=True, slots=True)
class TierAlive:
    """A tier came back or went away."""

    tier: Tier
    alive: bool


@dataclass(frozen=True, slots=True)
class Recovered:
    """Blocks found in the durable index at start, as (hash, parent or None, slot); parents come before children.

    One whose parent isn't there, or whose slot is taken, is passed over: the caller sees that it isn't resident.
    """

    keyspace: KeyspaceId
    blocks: tuple[tuple[BlockHash, BlockHash | None, Slot], ...]
    tier: Tier = Tier.NVME


@dataclass(frozen=True, slots=True)
class RecoveredSession:
    """A session found at start. `tip` may be unknown."""

    session: SessionId
    keyspace: KeyspaceId
    tip: BlockHash | None
    activity: int


@dataclass(frozen=True, slots=True)
class Detach:
    """A client is gone: its leases, borrowed slots and unsealed reservations are taken back."""

    owner: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes: leases expire, waits end, orphans go."""


Event = (
    RegisterKeyspace
    | OpenSession
    | Signal
    | Fork
    | Supersede
    | EndSession
    | Acquire
    | Renew
    | Release
    | Restore
    | RestoreDone
    | Prefetch
    | Reserve
    | Seal
    | Persist
    | Borrow
    | Adopt
    | GiveBack
    | MoveDone
    | UnpublishDone
    | SyncDone
    | Lost
    | TierAlive
    | Recovered
    | RecoveredSession
    | Detach
    | Tick
)
