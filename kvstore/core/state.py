"""The state of a machine, as plain data; `tree.py` has the bookkeeping over it.

keyspaces -> blocks (a tree each) -> residencies -> slots of pools
sessions -> tips;   leases -> deepest blocks;   operations -> held slots
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from kvstore.core.blocks import Block, Residency, Share
from kvstore.core.commands import Command, ReserveStatus
from kvstore.core.eviction.protocol import EvictionPolicy
from kvstore.core.foresight import Foresight
from kvstore.core.leases import LeaseTable
from kvstore.core.sessions import Session
from kvstore.core.slots import SlotAllocator
from kvstore.core.types import (
    BlockHash,
    Durability,
    Hashes,
    KeyspaceId,
    LeaseId,
    OpId,
    ResidencyState,
    SessionId,
    Slot,
    Tier,
)
from kvstore.errors import InvalidField, UnknownKeyspace

FILLING, READY, DRAINING = ResidencyState.FILLING, ResidencyState.READY, ResidencyState.DRAINING


@dataclass(frozen=True)
class TierConfig:
    """One tier of a machine. `policy` makes the eviction policy of one size class."""

    tier: Tier
    capacity_bytes: int
    policy: Callable[[Tier], EvictionPolicy]
    segment_bytes: int = 256 << 20
    clean_above: float = 0.5
    """Start copying dirty blocks down when they fill more than this share of the tier."""
    free_target: float = 0.0
    """Evict ahead of demand below this share of free slots; for tiers where eviction takes I/O."""
    durable: bool = False
    """Eviction must delete a durable record first."""


@dataclass(frozen=True)
class Limits:
    """Configured maxima; nothing in a machine grows without one."""

    num_sessions: int = 100_000
    num_leases: int = 100_000
    num_owner_leases: int = 20_000
    num_waiters: int = 1024
    num_move_items: int = 32
    move_bytes: int = 32 << 20
    """A move has at most `num_move_items` blocks, or as many small ones as make this many bytes."""
    num_moves_in_flight: int = 4
    lease_ttl_ns_max: int = 600 * 10**9
    orphan_ttl_ns: int = 60 * 10**9
    quotas: Mapping[tuple[str, Tier], int] = field(default_factory=dict)
    """Bytes that a tenant may hold in a tier; a pair left out has no quota."""
    prefetch_lead_ns: int = 2 * 10**9
    """How long before a predicted resume its blocks should start to rise."""
    num_tombstones: int = 0
    """Evictions remembered for Explain."""
    session_idle_ns: int = 24 * 3600 * 10**9

    def items_of(self, size_class: int) -> int:
        """Most blocks of one move."""
        return max(self.num_move_items, self.move_bytes // size_class)


class Pool:
    """One tier: its slots, its policies (one a share), its dirty blocks."""

    def __init__(self, config: TierConfig, quotas: Mapping[str, int]) -> None:
        self.config = config
        self.tier = config.tier
        self.slots = SlotAllocator(config.capacity_bytes, config.segment_bytes)
        self.policies: dict[Share, EvictionPolicy] = {}
        self.quotas = quotas
        self.used_by = dict.fromkeys(quotas, 0)
        """Bytes in copies and borrowed slots of tenants with a quota."""
        self.dirty: OrderedDict[Block, None] = OrderedDict()
        self.dirty_bytes = 0
        self.num_filling = 0
        self.num_ready = 0
        self.num_draining = 0
        self.num_borrowed = 0
        self.num_cleaning = 0
        """Moves under way that copy dirty blocks of this tier down."""
        self.num_candidates: dict[Share, int] = {}
        self.alive = True
        self.lower: Pool | None = None
        self.upper: Pool | None = None

    def policy(self, share: Share) -> EvictionPolicy:
        """The policy of one share, made on first use."""
        found = self.policies.get(share)
        if found is None:
            found = self.policies[share] = self.config.policy(self.tier)
            self.num_candidates[share] = 0
            sized = getattr(found, "sized", None)
            if sized is not None:
                sized(self.slots.capacity(share.size_class))
        return found

    def over_quota(self, share: Share) -> bool:
        """Would one block more take the tenant past its quota?"""
        quota = self.quotas.get(share.tenant)
        return quota is not None and self.used_by[share.tenant] + share.size_class > quota

    def count_share(self, share: Share, num: int) -> None:
        """A copy came (1) or went (-1)."""
        if share.tenant:
            self.used_by[share.tenant] = self.used_by.get(share.tenant, 0) + num * share.size_class

    @property
    def sink(self) -> Pool | None:
        """The next living tier below."""
        pool = self.lower
        while pool is not None and not pool.alive:
            pool = pool.lower
        return pool


@dataclass(slots=True)
class Space:
    """One keyspace: its blocks by hash."""

    id: KeyspaceId
    index: int
    share: Share
    blocks: dict[BlockHash, Block] = field(default_factory=dict)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.share.size_class


class Tombstone(NamedTuple):
    """Why a block isn't here any more."""

    at_ns: int
    tier: Tier
    reason: str
    score: float
    policy: str
    session: SessionId | None

    def tell(self, now_ns: int) -> str:
        """One line for a person."""
        owner = f", last used by session {self.session!r}" if self.session else ""
        age = (now_ns - self.at_ns) / 1e9
        return f"{self.reason} from {self.tier.label} {age:.1f} s ago by {self.policy}, score {self.score:.3g}{owner}"


@dataclass(slots=True)
class FillOp:
    """Reserved slots being filled by a client."""

    owner: str
    space: Space
    pool: Pool
    session: Session | None
    expires_ns: int
    blocks: dict[BlockHash, Block] = field(default_factory=dict)


@dataclass(slots=True)
class ReadOp:
    """Slots held for a client that reads them; `blocks` from position `first` on."""

    lease: LeaseId
    first: int
    blocks: list[tuple[Block, Residency, Tier]]


@dataclass(slots=True)
class MoveOp:
    """Copies between tiers by the hands."""

    source: Pool
    target: Pool
    blocks: list[tuple[Block, Residency, Residency]]


@dataclass(slots=True)
class UnpublishOp:
    """Slots that wait for the deletion of their records."""

    pool: Pool
    names: list[tuple[KeyspaceId, BlockHash]]
    slots: list[Slot]


@dataclass(slots=True)
class SyncOp:
    """A sync that `PersistWait`s stand behind."""

    waits: list[PersistWait]


Op = FillOp | ReadOp | MoveOp | UnpublishOp | SyncOp


@dataclass(slots=True)
class Waiter:
    """A Reserve, maybe waiting for room. Positions count from `first`."""

    request: int
    op_id: OpId
    hashes: Hashes
    first: int
    statuses: list[ReserveStatus]
    slots: list[Slot]
    deadline_ns: int
    num_decided: int = 0


@dataclass(slots=True)
class PersistWait:
    """A Persist that waits until its path holds the promise."""

    request: int
    path: list[Block]
    durability: Durability
    deadline_ns: int
    num_kept: int = 0
    """Leading blocks that held the promise when last looked at."""
    syncing: bool = False


class State:
    """Everything a machine knows. Handlers change it; only `machine.Machine` calls them."""

    def __init__(self, tiers: list[TierConfig], limits: Limits, notices: bool) -> None:
        self.limits = limits
        self.notices = notices
        self.pools: dict[Tier, Pool] = {
            c.tier: Pool(c, {tenant: n for (tenant, tier), n in limits.quotas.items() if tier == c.tier})
            for c in sorted(tiers, key=lambda c: c.tier)
        }
        ordered = list(self.pools.values())
        self.by_tier = [self.pools.get(t, ordered[0]) for t in Tier]
        """Pools by tier number, for the hot path; an absent tier's entry is never used."""
        for upper, lower in pairwise(ordered):
            upper.lower, lower.upper = lower, upper
        self.spaces: dict[KeyspaceId, Space] = {}
        self.space_list: list[Space] = []
        self.sessions: dict[SessionId, Session] = {}
        self.leases = LeaseTable(limits.num_leases, limits.num_owner_leases)
        self.ops: dict[OpId, Op] = {}
        self.waiters: list[Waiter] = []
        self.persists: list[PersistWait] = []
        self.ghosts: OrderedDict[Block, int] = OrderedDict()
        """Roots of orphan subtrees, and since when."""
        self.tombstones: OrderedDict[tuple[int, BlockHash], Tombstone] = OrderedDict()
        self.out: list[Command] = []
        self.next_op = 1
        self.num_stale = 0
        self.foresight = Foresight()
        self.num_prefetched = 0
        self.num_prefetch_used = 0
        self.num_prefetch_wasted = 0
        self.moves_in_flight = 0

    def new_op(self, op: Op) -> OpId:
        op_id = OpId(self.next_op)
        self.next_op += 1
        self.ops[op_id] = op
        return op_id

    def space(self, keyspace: KeyspaceId) -> Space:
        """Raises UnknownKeyspace."""
        found = self.spaces.get(keyspace)
        if found is None:
            raise UnknownKeyspace(f"keyspace_id: {keyspace.hex()[:16]} is not registered; call RegisterKeyspace first")
        return found

    def register(self, keyspace: KeyspaceId, slot_bytes: int, tenant: str, doubles_at: int) -> Space:
        found = self.spaces.get(keyspace)
        if found is not None:
            return found
        smallest = min(p.slots.segment_bytes for p in self.pools.values())
        if not 0 < slot_bytes <= smallest:
            mend = "use fewer block_tokens or larger segments"
            raise InvalidField("slot_bytes", f"{slot_bytes} does not fit a segment of {smallest}", mend)
        limited = any(tenant in pool.quotas for pool in self.pools.values())
        share = Share(tenant if limited else "", slot_bytes, doubles_at)
        space = Space(keyspace, len(self.space_list), share)
        self.spaces[keyspace] = space
        self.space_list.append(space)
        return space
