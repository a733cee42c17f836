"""Making room, and moving blocks between tiers.

    make_room:  evict clean victims of a tier until a slot is free; where eviction takes I/O, start it and say "later"
    clean:      copy dirty blocks of a tier down, in order of sealing, so that victims are nearly always copies
    keep_free:  in durable tiers, evict a little ahead of demand, since a slot is free only after its record is deleted

A dirty block is evicted without a copy only when nobody holds its branch any more, or when the tier below can't take
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum

from kvstore.core.blocks import Block, Residency, Share
from kvstore.core.commands import Move, MoveItem, Unpublish
from kvstore.core.events import Lost, MoveDone, TierAlive, UnpublishDone
from kvstore.core.state import DRAINING, FILLING, READY, MoveOp, Pool, State, UnpublishOp
from kvstore.core.tree import drop, free_slot, make_ready, note_ghost, path_of, place, refresh, update_visibility
from kvstore.core.types import OpId, Slot, Tier

DIRTY_SCAN_MAX = 1024
VICTIMS_MAX = 4096


class Room(IntEnum):
    """Outcome of `make_room`."""

    FREE = 0
    LATER = 1
    NONE = 2


def make_room(s: State, pool: Pool, share: Share, now_ns: int) -> Room:
    """Try to have one free slot for `share`. LATER: I/O is under way that will free one.

    A tenant at its quota makes room among its own blocks only.
    """
    if _has_room(pool, share):
        return Room.FREE
    for _ in range(VICTIMS_MAX):
        victim = _victim(pool, share, now_ns)
        if victim is None:
            break
        if pool.config.durable:
            evict_durable(s, pool, [victim], now_ns)
            if not _has_room(pool, share):
                return Room.LATER
        else:
            drop(s, victim, pool, now_ns, "evicted")
        if _has_room(pool, share):
            return Room.FREE
    if pool.num_draining or pool.num_cleaning or clean(s, pool, now_ns, force=True):
        return Room.LATER
    return Room.FREE if _drop_dirty(s, pool, share, now_ns) and _has_room(pool, share) else Room.NONE


def take_slots(
    s: State, pool: Pool, share: Share, count: int, now_ns: int, admits: Callable[[int], bool] | None
) -> list[Slot]:
    """As many slots for a run of blocks as can be had at once, at most `count`: free ones, then those of victims,
    handed over as they are. May stop early; `make_room` knows all ways."""
    if pool.quotas or pool.config.durable:
        return []
    slots = pool.slots.allocate_many(share.size_class, count)
    if len(slots) == count or share not in pool.policies:
        return slots
    policy, candidates = pool.policies[share], pool.num_candidates
    while len(slots) < count and candidates[share]:
        if admits is not None and not admits(now_ns):
            break
        victim = policy.victim(now_ns)
        if victim is None:
            break
        slots.append(drop(s, victim, pool, now_ns, "evicted", keep_slot=True))
    return slots


def _has_room(pool: Pool, share: Share) -> bool:
    return bool(pool.slots.num_free(share.size_class)) and not (pool.quotas and pool.over_quota(share))


def _victim(pool: Pool, share: Share, now_ns: int) -> Block | None:
    """The worst candidate of the share itself, else (below quota) of the share with the most candidates."""
    if pool.num_candidates.get(share):
        return pool.policies[share].victim(now_ns)
    if pool.over_quota(share) or not pool.num_candidates:
        return None
    other = max(pool.num_candidates, key=pool.num_candidates.__getitem__)
    return pool.policy(other).victim(now_ns) if pool.num_candidates[other] else None


def _drop_dirty(s: State, pool: Pool, share: Share, now_ns: int) -> bool:
    """Last resort when the tier below takes nothing: drop the oldest dirty leaf that nobody uses right now."""
    for index, block in enumerate(pool.dirty):
        if index >= DIRTY_SCAN_MAX:
            return False
        residency = block.residencies[pool.tier]
        assert residency is not None
        if block.share == share and not block.kids and not block.leases and not residency.holds:
            drop(s, block, pool, now_ns, "evicted: no room below")
            return True
    return False


def evict_durable(s: State, pool: Pool, victims: Iterable[Block], now_ns: int, reason: str = "evicted") -> None:
    """Unpublish, and free the slots once the deletion of the records is committed."""
    op = UnpublishOp(pool, [], [])
    for block in victims:
        op.names.append((s.space_list[block.space].id, block.hash))
        op.slots.append(drop(s, block, pool, now_ns, reason, keep_slot=True))
        pool.num_draining += 1
    if op.slots:
        s.out.append(Unpublish(s.new_op(op), pool.tier, tuple(op.names)))


def on_unpublish_done(s: State, e: UnpublishDone, now_ns: int) -> None:
    op = s.ops.pop(e.op, None)
    if not isinstance(op, UnpublishOp):
        s.num_stale += 1
        return
    for slot in op.slots:
        op.pool.num_draining -= 1
        free_slot(s, op.pool, slot)


# ---- copying down


def background(s: State, now_ns: int) -> None:
    """After every event: start what should be under way."""
    for pool in s.pools.values():
        if pool.dirty and pool.dirty_bytes > pool.config.clean_above * pool.slots.capacity_bytes:
            clean(s, pool, now_ns)
        if pool.config.free_target:
            keep_free(s, pool, now_ns)


def keep_free(s: State, pool: Pool, now_ns: int) -> None:
    """Evict ahead of demand, at most room for one move: all of it once half is used up, so that one deletion serves
    many blocks."""
    for share in pool.num_candidates:
        capacity = pool.slots.capacity(share.size_class)
        target = min(int(pool.config.free_target * capacity), s.limits.items_of(share.size_class))
        short = target - pool.slots.num_free(share.size_class) - pool.num_draining
        if 2 * short >= target > 0:
            evict_durable(s, pool, _victims(pool, share, short, now_ns), now_ns)


def _victims(pool: Pool, share: Share, count: int, now_ns: int) -> Iterator[Block]:
    """The worst candidates of a share; each has to go before the next is asked for."""
    for _ in range(count):
        victim = pool.policies[share].victim(now_ns) if pool.num_candidates[share] else None
        if victim is None:
            return
        yield victim


def clean(s: State, pool: Pool, now_ns: int, force: bool = False, only: Iterable[Block] | None = None) -> bool:
    """Start one move of dirty blocks to the tier below. True when something was started.

    `only`: blocks that a client waits for, in path order; they go before the others and past the limit on moves in
    flight.
    """
    target = pool.sink
    if target is None or (only is None and s.moves_in_flight >= s.limits.num_moves_in_flight):
        return False
    items: list[MoveItem] = []
    op = MoveOp(pool, target, [])
    op_id = s.new_op(op)
    for block in _to_clean(s, pool, target, only):
        slot = _slot_below(s, target, block.share, now_ns)
        if slot is None:
            break
        items.append(_start_copy(s, op, op_id, block, slot, now_ns))
    if not items:
        del s.ops[op_id]
        return False
    s.moves_in_flight += 1
    pool.num_cleaning += 1
    s.out.append(Move(op_id, pool.tier, target.tier, tuple(items), urgent=only is not None or force))
    return True


def _to_clean(s: State, pool: Pool, target: Pool, only: Iterable[Block] | None) -> list[Block]:
    """Dirty blocks in an order that keeps the lower tier prefix-closed; at most one move's worth."""
    chosen: dict[Block, None] = {}
    for scanned, block in enumerate(only if only is not None else pool.dirty):
        if len(chosen) >= s.limits.items_of(block.share.size_class) or scanned >= DIRTY_SCAN_MAX:
            break
        for ancestor in _missing_below(block, pool, target, chosen):
            chosen[ancestor] = None
    return list(chosen)


def _missing_below(block: Block, pool: Pool, target: Pool, chosen: dict[Block, None]) -> list[Block]:
    """The block and those of its ancestors that the lower tier lacks, parents first; empty when one can't be copied."""
    chain: list[Block] = []
    b: Block | None = block
    while b is not None and b.residencies[target.tier] is None and b not in chosen:
        residency = b.residencies[pool.tier]
        if residency is None or residency.state != READY:
            return []
        chain.append(b)
        b = b.parent
    chain.reverse()
    return chain


def _slot_below(s: State, target: Pool, share: Share, now_ns: int) -> Slot | None:
    if make_room(s, target, share, now_ns) != Room.FREE:
        return None
    return target.slots.allocate(share.size_class)


def _start_copy(s: State, op: MoveOp, op_id: OpId, block: Block, slot: Slot, now_ns: int) -> MoveItem:
    source = block.residencies[op.source.tier]
    assert source is not None and source.state == READY
    source.holds += 1
    target = place(s, block, op.target, slot, op_id, now_ns)
    op.blocks.append((block, source, target))
    refresh(s, block, now_ns)
    return MoveItem(block, source.slot, slot)


def on_move_done(s: State, e: MoveDone, now_ns: int) -> None:
    op = s.ops.pop(e.op, None)
    if not isinstance(op, MoveOp):
        s.num_stale += 1
        return
    s.moves_in_flight -= 1
    if op.target.tier > op.source.tier:
        op.source.num_cleaning -= 1
    if e.tier_dead:
        set_alive(s, op.target, False, now_ns)
    failed, corrupt = set(e.failed) | set(e.corrupt), set(e.corrupt)
    for index, (block, source, target) in enumerate(op.blocks):
        assert target.state == FILLING
        if index in failed:
            drop(s, block, op.target, now_ns, "copy failed")
        else:
            make_ready(s, block, op.target, now_ns)
        release_hold(s, block, source, op.source, now_ns)
        if index in corrupt and block.residencies[op.source.tier] is source:
            lose(s, block, op.source, now_ns)


# ---- losing


def lose(s: State, block: Block, pool: Pool, now_ns: int, reason: str = "corrupt") -> None:
    """A copy is wrong or gone. In a durable tier its record is deleted before the slot is used again."""
    residency = block.residencies[pool.tier]
    if residency is None or residency.state != READY:
        return
    if not residency.holds:
        _remove_lost(s, block, pool, now_ns, reason)
        return
    residency.state = DRAINING  # goes when the last reader or writer ends
    pool.num_ready -= 1
    pool.num_draining += 1
    refresh(s, block, now_ns)
    update_visibility(s, block)
    note_ghost(s, block, now_ns)


def _remove_lost(s: State, block: Block, pool: Pool, now_ns: int, reason: str = "corrupt") -> None:
    if pool.config.durable:
        evict_durable(s, pool, [block], now_ns, reason)
    else:
        drop(s, block, pool, now_ns, reason)


def release_hold(s: State, block: Block, residency: Residency, pool: Pool, now_ns: int) -> None:
    """One operation less on a slot; a copy that was lost meanwhile goes with the last one."""
    residency.holds -= 1
    if residency.state == DRAINING and residency.holds == 0:
        residency.state = READY
        pool.num_draining -= 1
        pool.num_ready += 1
        _remove_lost(s, block, pool, now_ns)
    elif block.residencies[pool.tier] is residency:
        refresh(s, block, now_ns)


def on_lost(s: State, e: Lost, now_ns: int) -> None:
    block = s.space(e.keyspace).blocks.get(e.hash)
    if block is not None and e.tier in s.pools:
        lose(s, block, s.pools[e.tier], now_ns, e.reason)


def on_tier_alive(s: State, e: TierAlive, now_ns: int) -> None:
    set_alive(s, s.pools[e.tier], e.alive, now_ns)


def set_alive(s: State, pool: Pool, alive: bool, now_ns: int) -> None:
    """A tier that can't be written takes no more copies; what it holds can still be read until a read fails."""
    if pool.alive == alive:
        return
    pool.alive = alive
    for upper in s.pools.values():
        if upper.tier < pool.tier:
            for block in list(upper.dirty):
                refresh(s, block, now_ns)


def drop_orphans(s: State, now_ns: int, older_than_ns: int) -> None:
    """Take away orphan subtrees whose time is over: leaves first, never a held slot."""
    for root, since in list(s.ghosts.items()):
        if now_ns - since < older_than_ns:
            break
        for block in reversed(_subtree(root)):
            for pool in s.pools.values():
                residency = block.residencies[pool.tier]
                if residency is None or residency.state != READY or residency.holds or block.kids:
                    continue
                if pool.config.durable:
                    evict_durable(s, pool, [block], now_ns)
                else:
                    drop(s, block, pool, now_ns, "orphan")


def _subtree(root: Block) -> list[Block]:
    found = []
    stack = [root]
    while stack:
        block = stack.pop()
        found.append(block)
        stack.extend(block.kids)
    return found


def promote(s: State, tip: Block, now_ns: int) -> int:
    """Start copying a path one tier up, first blocks first, into room that needs no I/O. Returns blocks started."""
    started = 0
    for source in s.pools.values():
        target = source.upper
        if target is None or not source.alive:
            continue
        op = MoveOp(source, target, [])
        op_id = s.new_op(op)
        items: list[MoveItem] = []
        for block in path_of(tip):
            if not _promotable(block, source):
                continue
            if len(items) >= 8 * s.limits.num_move_items or make_room(s, target, block.share, now_ns) != Room.FREE:
                break
            slot = target.slots.allocate(block.share.size_class)
            assert slot is not None
            items.append(_start_copy(s, op, op_id, block, slot, now_ns))
            op.blocks[-1][2].prefetched = True
        s.num_prefetched += len(items)
        if items:
            s.moves_in_flight += 1
            s.out.append(Move(op_id, source.tier, target.tier, tuple(items), urgent=True))
            started += len(items)
        else:
            del s.ops[op_id]
    return started


def _promotable(block: Block, source: Pool) -> bool:
    mine = block.residencies[source.tier]
    if mine is None or mine.state != READY:
        return False
    return all(block.residencies[t] is None for t in Tier if t < source.tier)
