"""The state of a machine, and the bookkeeping that every handler stands on.

    keyspaces -> blocks (a tree each) -> residencies -> slots of pools
    sessions -> tips;   leases -> deepest blocks;   operations -> held slots

Three derived facts are kept up to date at every change, by `refresh` and `update_visibility`:
- *visible*: readable, and so are all ancestors. Binary search for the longest prefix stands on it.
- *candidate*: may leave its tier now (see `evictable`); the tier's policy holds exactly the candidates.
- *dirty*: READY in a tier that has a living lower tier, with no copy below. Kept in order of sealing, parents before
  children.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from kvstore.core.blocks import Block, Residency
from kvstore.core.commands import Command, Removed, ReserveStatus, SegmentFree, Stored
from kvstore.core.eviction.protocol import EvictionPolicy
from kvstore.core.leases import LeaseTable
from kvstore.core.sessions import Session
from kvstore.core.slots import SlotAllocator
from kvstore.core.types import BlockHash, Hashes, KeyspaceId, LeaseId, OpId, ResidencyState, SessionId, Slot, Tier
from kvstore.errors import InvalidField, UnknownKeyspace

FILLING, READY, DRAINING = ResidencyState.FILLING, ResidencyState.READY, ResidencyState.DRAINING
MANY_KIDS = 8


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
    num_moves_in_flight: int = 4
    lease_ttl_ns_max: int = 600 * 10**9
    orphan_ttl_ns: int = 60 * 10**9
    num_tombstones: int = 0
    """Evictions remembered for Explain."""
    session_idle_ns: int = 24 * 3600 * 10**9


class Pool:
    """One tier: its slots, its policies (one a size class), its dirty blocks."""

    def __init__(self, config: TierConfig) -> None:
        self.config = config
        self.tier = config.tier
        self.slots = SlotAllocator(config.capacity_bytes, config.segment_bytes)
        self.policies: dict[int, EvictionPolicy] = {}
        self.dirty: OrderedDict[Block, None] = OrderedDict()
        self.dirty_bytes = 0
        self.num_filling = 0
        self.num_ready = 0
        self.num_draining = 0
        self.num_borrowed = 0
        self.num_candidates: dict[int, int] = {}
        self.alive = True
        self.lower: Pool | None = None
        self.upper: Pool | None = None

    def policy(self, size_class: int) -> EvictionPolicy:
        """The policy of one size class, made on first use."""
        found = self.policies.get(size_class)
        if found is None:
            found = self.policies[size_class] = self.config.policy(self.tier)
            self.num_candidates[size_class] = 0
        return found

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
    slot_bytes: int
    blocks: dict[BlockHash, Block] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Why a block isn't here any more."""

    at_ns: int
    tier: Tier
    reason: str
    score: float
    policy: str
    session: SessionId | None


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
    """A Reserve that waits for room: `pending` are the positions without a slot yet."""

    request: int
    op_id: OpId
    hashes: Hashes
    first: int
    statuses: list[ReserveStatus]
    slots: list[Slot]
    pending: list[int]
    deadline_ns: int


@dataclass(slots=True)
class PersistWait:
    """A Persist that waits until its path is durable."""

    request: int
    path: list[Block]
    num_requested: int
    synced: bool
    deadline_ns: int
    syncing: bool = False


class State:
    """Everything a machine knows. Handlers change it; only `machine.Machine` calls them."""

    def __init__(self, tiers: list[TierConfig], limits: Limits, notices: bool) -> None:
        self.limits = limits
        self.notices = notices
        self.pools: dict[Tier, Pool] = {c.tier: Pool(c) for c in sorted(tiers, key=lambda c: c.tier)}
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

    def register(self, keyspace: KeyspaceId, slot_bytes: int) -> Space:
        found = self.spaces.get(keyspace)
        if found is not None:
            return found
        smallest = min(p.slots.segment_bytes for p in self.pools.values())
        if not 0 < slot_bytes <= smallest:
            mend = "use fewer block_tokens or larger segments"
            raise InvalidField("slot_bytes", f"{slot_bytes} does not fit a segment of {smallest}", mend)
        space = Space(keyspace, len(self.space_list), slot_bytes)
        self.spaces[keyspace] = space
        self.space_list.append(space)
        return space


# ---- matching


def match(space: Space, hashes: Hashes) -> int:
    """Length of the longest visible prefix: a binary search, since visible blocks are prefix-closed."""
    blocks = space.blocks
    low, high = 0, len(hashes)
    probe = high  # a returning context is usually there in full
    while low < high:
        block = blocks.get(hashes[probe - 1])
        if block is not None and block.visible and block.depth == probe - 1:
            low = probe
        else:
            high = probe - 1
        probe = (low + high + 1) // 2
    return low


def path_of(block: Block | None) -> list[Block]:
    """The block and its ancestors, first block of the chain first."""
    path = []
    while block is not None:
        path.append(block)
        block = block.parent
    path.reverse()
    return path


# ---- derived facts


def readable(block: Block) -> bool:
    """Does any tier hold a READY copy?"""
    for residency in block.residencies:  # a plain loop: this is the hottest line of a replay
        if residency is not None and residency.state is READY:
            return True
    return False


def note_ghost(s: State, block: Block, now_ns: int) -> None:
    """Remember a block whose descendants have become orphans."""
    if block.kids and not readable(block):
        s.ghosts.setdefault(block, now_ns)


def update_visibility(s: State, block: Block) -> None:
    """Recompute `visible` for a block, and for its descendants when it changed."""
    stack = [block]
    while stack:
        b = stack.pop()
        now = readable(b) and (b.parent is None or b.parent.visible)
        if now != b.visible:
            b.visible = now
            stack.extend(b.kids)


def evictable(pool: Pool, block: Block, residency: Residency) -> bool:
    """May this copy go? Yes when another READY copy keeps the block readable; a last copy only if nothing needs it."""
    if residency.state is not READY or residency.holds or residency.num_kids:
        return False
    for other in block.residencies:
        if other is not None and other is not residency and other.state is READY:
            return True
    if block.kids or block.leases:
        return False
    return pool.sink is None or abandoned(block)


def abandoned(block: Block) -> bool:
    """The end of a branch that sessions made and none holds any more."""
    return not block.kids and not block.num_tips and not block.leases and block.last_session is not None


def refresh(s: State, block: Block, now_ns: int) -> None:
    """Bring candidate and dirty status of all copies of a block up to date."""
    for index, residency in enumerate(block.residencies):
        if residency is None:
            continue
        pool = s.by_tier[index]
        wanted = evictable(pool, block, residency)
        if wanted != residency.candidate:
            residency.candidate = wanted
            policy = pool.policy(block.size_class)
            pool.num_candidates[block.size_class] += 1 if wanted else -1
            if wanted:
                policy.add(block, now_ns)
            else:
                policy.discard(block, now_ns)
        if pool.lower is not None:
            _refresh_dirty(pool, block, residency)


def _refresh_dirty(pool: Pool, block: Block, residency: Residency) -> None:
    dirty = residency.state is READY and all(r is None for r in block.residencies[pool.tier + 1 :])
    if dirty and block not in pool.dirty:
        pool.dirty[block] = None
        pool.dirty_bytes += block.size_class
    elif not dirty and block in pool.dirty:
        _undirty(pool, block)


def _undirty(pool: Pool, block: Block) -> None:
    del pool.dirty[block]
    pool.dirty_bytes -= block.size_class


# ---- residencies


def place(s: State, block: Block, pool: Pool, slot: Slot, op: int, now_ns: int) -> Residency:
    """A FILLING residency in an allocated slot."""
    residency = Residency(slot, FILLING, op)
    block.residencies[pool.tier] = residency
    pool.num_filling += 1
    if block.kids:
        residency.num_kids = sum(k.residencies[pool.tier] is not None for k in block.kids)
    parent = block.parent
    if parent is not None:
        above = parent.residencies[pool.tier]
        if above is not None:
            above.num_kids += 1
        refresh(s, parent, now_ns)
    return residency


def make_ready(s: State, block: Block, pool: Pool, now_ns: int) -> None:
    """FILLING -> READY, and publish."""
    residency = block.residencies[pool.tier]
    assert residency is not None and residency.state is FILLING
    residency.state = READY
    residency.op = 0
    pool.num_filling -= 1
    pool.num_ready += 1
    s.ghosts.pop(block, None)
    if block.parent is not None:
        note_ghost(s, block.parent, now_ns)
    update_visibility(s, block)
    refresh(s, block, now_ns)
    if s.notices:
        s.out.append(Stored(s.space_list[block.space].id, block, pool.tier))


def drop(s: State, block: Block, pool: Pool, now_ns: int, reason: str, keep_slot: bool = False) -> Slot:
    """Take a copy away. Unless `keep_slot` (the slot is still draining), its slot is free afterwards.

    The block itself goes when this was its last copy and nothing hangs on it; otherwise it becomes a ghost.
    """
    residency = block.residencies[pool.tier]
    assert residency is not None
    was_ready = residency.state == READY
    _uncount(s, pool, block, residency, now_ns)
    block.residencies[pool.tier] = None
    if was_ready and (s.notices or s.limits.num_tombstones):
        _note_removal(s, block, pool, now_ns, reason)
    if not keep_slot:
        free_slot(s, pool, residency.slot)
    parent = block.parent
    if parent is not None:
        above = parent.residencies[pool.tier]
        if above is not None:
            above.num_kids -= 1
        inherit(parent, block)
    if any(r is not None for r in block.residencies):
        note_ghost(s, block, now_ns)
        update_visibility(s, block)
        refresh(s, block, now_ns)
    else:
        _forget(s, block, now_ns)
    if parent is not None:
        refresh(s, parent, now_ns)
    return residency.slot


def _uncount(s: State, pool: Pool, block: Block, residency: Residency, now_ns: int) -> None:
    if residency.candidate:
        residency.candidate = False
        pool.num_candidates[block.size_class] -= 1
        pool.policy(block.size_class).evicted(block, now_ns)
    if block in pool.dirty:
        _undirty(pool, block)
    if residency.state == READY:
        pool.num_ready -= 1
    elif residency.state == FILLING:
        pool.num_filling -= 1


def free_slot(s: State, pool: Pool, slot: Slot) -> None:
    """Back to the allocator; says so when a segment became empty."""
    segment = pool.slots.free(slot)
    if segment is not None and pool.config.durable:
        s.out.append(SegmentFree(pool.tier, segment))


def inherit(parent: Block, child: Block) -> None:
    """A parent was used whenever its child was."""
    if child.last_access_ns > parent.last_access_ns:
        parent.last_access_ns = child.last_access_ns
        parent.last_session = child.last_session


def _note_removal(s: State, block: Block, pool: Pool, now_ns: int, reason: str) -> None:
    policy = pool.policy(block.size_class)
    score = policy.score(block, now_ns)
    if s.notices:
        s.out.append(Removed(s.space_list[block.space].id, block, pool.tier, reason, score))
    if s.limits.num_tombstones:
        session = block.last_session.id if block.last_session is not None else None
        s.tombstones[(block.space, block.hash)] = Tombstone(now_ns, pool.tier, reason, score, policy.name, session)
        if len(s.tombstones) > s.limits.num_tombstones:
            s.tombstones.popitem(last=False)


def _forget(s: State, block: Block, now_ns: int) -> None:
    """A block without copies: unlink it, or keep it as a ghost while it has children or a lease."""
    if block.visible:
        update_visibility(s, block)
    while True:
        parent = block.parent
        if block.kids:
            s.ghosts.setdefault(block, now_ns)
            return
        s.ghosts.pop(block, None)
        s.space_list[block.space].blocks.pop(block.hash, None)
        if parent is None:
            return
        unlink(parent, block)
        parent.num_tips += block.num_tips
        parent.leases += block.leases
        refresh(s, parent, now_ns)
        if any(r is not None for r in parent.residencies):
            return
        block = parent


# ---- tree


def link(space: Space, block_hash: BlockHash, parent: Block | None) -> Block:
    """The block of that hash, made a child of `parent` when it is new."""
    block = space.blocks.get(block_hash)
    if block is None:
        block = space.blocks[block_hash] = Block(block_hash, parent, space.index, space.slot_bytes)
        if parent is not None:
            kids = parent.kids
            if isinstance(kids, set):
                kids.add(block)
            else:
                kids.append(block)
                if len(kids) > MANY_KIDS:
                    parent.kids = set(kids)
    return block


def unlink(parent: Block, block: Block) -> None:
    """Take a dead block from its parent's children."""
    parent.kids.remove(block)


def live(block: Block | None) -> Block | None:
    """The nearest ancestor still in the table: where the tips and leases of a dead block have moved to."""
    while block is not None and not block.kids and all(r is None for r in block.residencies):
        block = block.parent
    return block
