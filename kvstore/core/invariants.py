"""What must hold after every step. Conservation arithmetic, never a heuristic; each line is a bug class of its own."""

from __future__ import annotations

from kvstore.core.blocks import Block
from kvstore.core.state import DRAINING, FILLING, READY, FillOp, MoveOp, Pool, ReadOp, State
from kvstore.core.tree import evictable, live, readable
from kvstore.core.types import Tier


def check_invariants(s: State) -> None:
    """Raises AssertionError naming the first thing that doesn't add up."""
    blocks = [b for space in s.space_list for b in space.blocks.values()]
    for pool in s.pools.values():
        _check_pool(s, pool, blocks)
    for space in s.space_list:
        for key, block in space.blocks.items():
            assert key == block.hash
            _check_block(s, block)
    _check_holds(s, blocks)
    _check_leases(s, blocks)
    _check_tips(s, blocks)


def _check_pool(s: State, pool: Pool, blocks: list[Block]) -> None:
    pool.slots.check()
    copies = [(b, r) for b in blocks if (r := b.residencies[pool.tier]) is not None]
    slots = [r.slot for _, r in copies]
    assert len(set(slots)) == len(slots), "two residencies share a slot"
    num = {state: sum(r.state == state for _, r in copies) for state in (FILLING, READY, DRAINING)}
    assert num[FILLING] == pool.num_filling and num[READY] == pool.num_ready
    detached = pool.num_draining - num[DRAINING]
    used = sum(pool.slots.num_used.values())
    assert used == len(copies) + detached + pool.num_borrowed, "used slots = filling + ready + draining + borrowed"
    borrowed = [slot for lease in s.leases.all() for slot, tier in lease.borrowed.items() if tier == pool.tier]
    assert len(borrowed) == pool.num_borrowed and not set(borrowed) & set(slots)
    cleaning = [
        op for op in s.ops.values() if isinstance(op, MoveOp) and op.source is pool and op.target.tier > pool.tier
    ]
    assert pool.num_cleaning == len(cleaning)
    assert pool.dirty_bytes == sum(b.share.size_class for b in pool.dirty)
    if pool.lower is not None:
        assert set(pool.dirty) == {
            b for b, r in copies if r.state == READY and all(x is None for x in b.residencies[pool.tier + 1 :])
        }
    for share, count in pool.num_candidates.items():
        assert count == sum(r.candidate for b, r in copies if b.share == share)
    for tenant, used in pool.used_by.items():
        shares = [b.share for b, _ in copies]
        shares += [s.space_list[x.space].share for x in s.leases.all() for t in x.borrowed.values() if t == pool.tier]
        assert used == sum(share.size_class for share in shares if share.tenant == tenant)


def _check_block(s: State, block: Block) -> None:
    assert block.kids or any(r is not None for r in block.residencies), "a dead block is in the table"
    parent = block.parent
    assert (parent is None) == (block.depth == 0)
    if parent is not None:
        assert block in parent.kids and block.depth == parent.depth + 1
        assert s.space_list[block.space].blocks.get(parent.hash) is parent, "a child of a block that isn't in the table"
    assert block.visible == (readable(block) and (parent is None or parent.visible)), "the visible set is prefix-closed"
    assert block.leases >= 0 and block.num_tips >= 0
    for index, residency in enumerate(block.residencies):
        if residency is None:
            continue
        pool = s.pools[Tier(index)]
        assert residency.holds >= 0
        assert residency.num_kids == sum(k.residencies[index] is not None for k in block.kids)
        assert residency.candidate == evictable(pool, block, residency), "candidate status is stale"
        assert residency.state in (FILLING, READY) or residency.holds, "a draining copy that nobody holds"
    if not readable(block) and block.kids and any(readable(k) for k in block.kids):
        filling = any(r is not None and r.state == FILLING for r in block.residencies)
        assert filling or block in s.ghosts, "orphans without a ghost on record"


def _check_holds(s: State, blocks: list[Block]) -> None:
    held: dict[int, int] = {}
    for op in s.ops.values():
        if isinstance(op, (ReadOp, MoveOp)):
            for _, residency, _ in op.blocks:
                held[id(residency)] = held.get(id(residency), 0) + 1
        elif isinstance(op, FillOp):
            for block in op.blocks.values():
                residency_or_none = block.residencies[op.pool.tier]
                assert residency_or_none is not None and residency_or_none.state == FILLING
    for block in blocks:
        for residency_or_none in block.residencies:
            if residency_or_none is not None:
                assert residency_or_none.holds == held.get(id(residency_or_none), 0), "holds of running operations"


def _check_leases(s: State, blocks: list[Block]) -> None:
    counts: dict[int, int] = {}
    for lease in s.leases.all():
        block = live(lease.block)
        if block is not None:
            counts[id(block)] = counts.get(id(block), 0) + 1
    for block in blocks:
        assert block.leases == counts.get(id(block), 0), "leases on a block"


def _check_tips(s: State, blocks: list[Block]) -> None:
    counts: dict[int, int] = {}
    for session in s.sessions.values():
        tip = live(session.tip)
        if tip is not None:
            counts[id(tip)] = counts.get(id(tip), 0) + 1
    for block in blocks:
        assert block.num_tips == counts.get(id(block), 0), "session tips on a block"
