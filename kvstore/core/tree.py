"""The tree of blocks: matching, linking, residencies, and the facts derived from them.

Three derived facts are kept up to date at every change, by `refresh` and `update_visibility`:
- *visible*: readable, and so are all ancestors. Binary search for the longest prefix stands on it.
- *candidate*: may leave its tier now (see `evictable`); the tier's policy holds exactly the candidates.
- *dirty*: READY in a tier that has a lower one, with no copy below. In order of sealing, parents before children.
"""

from __future__ import annotations

from kvstore.core.blocks import Block, Residency
from kvstore.core.commands import Removed, SegmentFree, Stored
from kvstore.core.leases import Lease
from kvstore.core.state import FILLING, READY, Pool, Space, State, Tombstone
from kvstore.core.types import NUM_TIERS, BlockHash, Hashes, Slot

NO_COPIES: list[Residency | None] = [None] * NUM_TIERS

MANY_KIDS = 8

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
    for residency in block.residencies:  # noqa: SIM110 - a plain loop: this is the hottest line of a replay
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
    if residency.num_kids or residency.holds or residency.state is not READY:
        return False
    if block.residencies.count(None) < NUM_TIERS - 1:
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
            share = block.share
            policy = pool.policy(share)
            if wanted:
                pool.num_candidates[share] += 1
                policy.add(block, now_ns)
            else:
                pool.num_candidates[share] -= 1
                policy.discard(block, now_ns)
        if pool.lower is not None:
            _refresh_dirty(pool, block, residency)


def _refresh_dirty(pool: Pool, block: Block, residency: Residency) -> None:
    dirty = residency.state is READY and not _lower_copy(pool, block)
    if dirty == (block in pool.dirty):
        return
    if dirty:
        pool.dirty[block] = None
        pool.dirty_bytes += block.share.size_class
    else:
        _undirty(pool, block)


def _lower_copy(pool: Pool, block: Block) -> bool:
    """Does a tier below hold a copy, readable or not?"""
    below = pool.lower
    while below is not None:
        if block.residencies[below.tier] is not None:
            return True
        below = below.lower
    return False


def _undirty(pool: Pool, block: Block) -> None:
    del pool.dirty[block]
    pool.dirty_bytes -= block.share.size_class


# ---- residencies


def place(s: State, block: Block, pool: Pool, slot: Slot, op: int, now_ns: int) -> Residency:
    """A FILLING residency in an allocated slot."""
    residency = Residency(slot, FILLING, op)
    block.residencies[pool.tier] = residency
    pool.num_filling += 1
    if block.share.tenant:
        pool.count_share(block.share, 1)
    if block.kids:
        residency.num_kids = sum(k.residencies[pool.tier] is not None for k in block.kids)
    parent = block.parent
    if parent is not None:
        above = parent.residencies[pool.tier]
        if above is not None:
            above.num_kids += 1
        for copy in parent.residencies:
            if copy is not None and copy.candidate:  # a child can only end that, never begin it
                refresh(s, parent, now_ns)
                break
    return residency


def make_ready(s: State, block: Block, pool: Pool, now_ns: int) -> None:
    """FILLING -> READY, and publish."""
    residency = block.residencies[pool.tier]
    assert residency is not None and residency.state is FILLING
    residency.state = READY
    residency.op = 0
    pool.num_filling -= 1
    pool.num_ready += 1
    was_ghost = bool(s.ghosts) and s.ghosts.pop(block, None) is not None
    parent = block.parent
    if parent is not None and not parent.visible:
        note_ghost(s, parent, now_ns)
    block.visible = parent is None or parent.visible
    if was_ghost:
        for kid in block.kids:
            update_visibility(s, kid)
    if not residency.num_kids or pool.lower is not None or pool.upper is not None:  # else nothing else has changed
        refresh(s, block, now_ns)
    if s.notices:
        s.out.append(Stored(s.space_list[block.space].id, block, pool.tier))


def drop(s: State, block: Block, pool: Pool, now_ns: int, reason: str, keep_slot: bool = False) -> Slot:
    """Take a copy away. Unless `keep_slot` (the slot is still draining), its slot is free afterwards.

    The block itself goes when this was its last copy and nothing hangs on it; otherwise it becomes a ghost.
    """
    residency = block.residencies[pool.tier]
    assert residency is not None
    was_ready = residency.state is READY
    if residency.prefetched:
        s.num_prefetch_wasted += 1
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
    if has_copies(block):
        if was_ready and not readable(block):
            note_ghost(s, block, now_ns)
            update_visibility(s, block)
        refresh(s, block, now_ns)
        if parent is not None:
            refresh(s, parent, now_ns)
    elif parent is None or block.kids or s.ghosts or not has_copies(parent):
        _forget(s, block, now_ns)
    else:  # a leaf below a block that stays: nearly always so
        block.visible = False
        _unlink(s, block, parent)
        refresh(s, parent, now_ns)
    return residency.slot


def _unlink(s: State, block: Block, parent: Block) -> None:
    """A block leaves the table; what ended there ends at its parent."""
    s.space_list[block.space].blocks.pop(block.hash, None)
    parent.kids.remove(block)
    parent.num_tips += block.num_tips
    parent.leases += block.leases


def has_copies(block: Block) -> bool:
    """Does any tier hold a copy, readable or not?"""
    return block.residencies != NO_COPIES


def _uncount(s: State, pool: Pool, block: Block, residency: Residency, now_ns: int) -> None:
    if residency.candidate:
        residency.candidate = False
        share = block.share
        pool.num_candidates[share] -= 1
        pool.policies[share].evicted(block, now_ns)
    if pool.dirty and block in pool.dirty:
        _undirty(pool, block)
    if block.share.tenant:
        pool.count_share(block.share, -1)
    if residency.state is READY:
        pool.num_ready -= 1
    elif residency.state is FILLING:
        pool.num_filling -= 1


def free_slot(s: State, pool: Pool, slot: Slot) -> None:
    """Back to the allocator; says so when a segment became empty."""
    segment = pool.slots.free(slot)
    if segment is not None and pool.config.durable:
        s.out.append(SegmentFree(pool.tier, segment))


def borrow(s: State, lease: Lease, pool: Pool, slot: Slot) -> None:
    """An allocated slot goes under a lease, without identity."""
    lease.borrowed[slot] = pool.tier
    pool.num_borrowed += 1
    pool.count_share(s.space_list[lease.space].share, 1)


def unborrow(s: State, lease: Lease, slot: Slot) -> Pool | None:
    """A borrowed slot leaves its lease; the caller frees or fills it. None when it wasn't borrowed under this lease."""
    tier = lease.borrowed.pop(slot, None)
    if tier is None:
        return None
    pool = s.pools[tier]
    pool.num_borrowed -= 1
    pool.count_share(s.space_list[lease.space].share, -1)
    return pool


def inherit(parent: Block, child: Block) -> None:
    """A parent was used whenever its child was."""
    if child.last_access_ns > parent.last_access_ns:
        parent.last_access_ns = child.last_access_ns
        parent.last_session = child.last_session


def _note_removal(s: State, block: Block, pool: Pool, now_ns: int, reason: str) -> None:
    policy = pool.policy(block.share)
    score = policy.score(block, now_ns)
    if s.notices:
        s.out.append(Removed(s.space_list[block.space].id, block, pool.tier, reason, score))
    if s.limits.num_tombstones:
        session = block.last_session.id if block.last_session is not None else None
        s.tombstones[(block.space, block.hash)] = Tombstone(now_ns, pool.tier, reason, score, policy.name, session)
        if len(s.tombstones) > s.limits.num_tombstones:
            s.tombstones.popitem(last=False)


def _forget(s: State, block: Block, now_ns: int) -> None:
    """A block without copies: unlink it, or keep it as a ghost while it has children or a lease. The parent's status
    is up to date afterwards."""
    if block.visible:
        block.visible = False
        for kid in block.kids:
            update_visibility(s, kid)
    while True:
        parent = block.parent
        if block.kids:
            s.ghosts.setdefault(block, now_ns)
            if parent is not None:
                refresh(s, parent, now_ns)
            return
        if s.ghosts:
            s.ghosts.pop(block, None)
        if parent is None:
            s.space_list[block.space].blocks.pop(block.hash, None)
            return
        _unlink(s, block, parent)
        if has_copies(parent):
            refresh(s, parent, now_ns)
            return
        block = parent


# ---- tree


def link(space: Space, block_hash: BlockHash, parent: Block | None) -> Block:
    """The block of that hash, made a child of `parent` when it is new."""
    block = space.blocks.get(block_hash)
    if block is None:
        block = space.blocks[block_hash] = Block(block_hash, parent, space.index, space.share)
        if parent is not None:
            add_kid(parent, block)
    return block


def add_kid(parent: Block, block: Block) -> None:
    """A new block below another."""
    kids = parent.kids
    if isinstance(kids, set):
        kids.add(block)
    else:
        kids.append(block)
        if len(kids) > MANY_KIDS:
            parent.kids = set(kids)


def live(block: Block | None) -> Block | None:
    """The nearest ancestor still in the table: where the tips and leases of a dead block have moved to."""
    while block is not None and not block.kids and not has_copies(block):
        block = block.parent
    return block
