"""Leases, restores, prefetches."""

from __future__ import annotations

from kvstore.core.activity import get_session, set_tip, touch
from kvstore.core.blocks import Block, Residency
from kvstore.core.commands import Acquired, LeaseEnded, Location, Prefetching, Renewed, RestorePlan
from kvstore.core.events import Acquire, Detach, Prefetch, Release, Renew, Restore, RestoreDone
from kvstore.core.leases import Lease
from kvstore.core.moving import lose, promote, release_hold
from kvstore.core.sessions import Session
from kvstore.core.state import READY, FillOp, ReadOp, State
from kvstore.core.tree import free_slot, live, match, refresh, unborrow
from kvstore.core.types import Activity, LeaseId, OpId, Tier
from kvstore.core.writing import abort_fill
from kvstore.errors import InvalidField


def on_acquire(s: State, e: Acquire, now_ns: int) -> None:
    space = s.space(e.keyspace)
    session = get_session(s, e.session) if e.session is not None else None
    if session is not None and session.space != space.index:
        raise InvalidField(
            "session_id", f"{e.session!r} is open in another keyspace", "use that keyspace, or another session"
        )
    count = match(space, e.hashes)
    block = space.blocks[e.hashes[count - 1]] if count else None
    lease_id = LeaseId(0)
    if block is not None or e.empty:
        expires = now_ns + min(e.ttl_ns, s.limits.lease_ttl_ns_max)
        lease_id = s.leases.grant(e.owner, space.index, block, session, expires).id
    if session is not None:
        if session.activity != Activity.RUNNING:
            session.num_requests += 1
        session.num_blocks, session.num_found = len(e.hashes), count
        set_tip(s, session, block, now_ns)
    if block is not None:
        block.leases += 1
        touch(s, block, session, now_ns)
        refresh(s, block, now_ns)
    s.out.append(Acquired(lease_id, count))


def on_renew(s: State, e: Renew, now_ns: int) -> None:
    expired = []
    for lease_id in e.leases:
        lease = s.leases.find(lease_id)
        if lease is None:
            expired.append(lease_id)
        else:
            s.leases.renew(lease, now_ns + min(e.ttl_ns, s.limits.lease_ttl_ns_max))
    s.out.append(Renewed(tuple(expired)))


def on_release(s: State, e: Release, now_ns: int) -> None:
    for lease_id in e.leases:
        lease = s.leases.find(lease_id)
        if lease is not None:
            end_lease(s, lease, now_ns)


def end_lease(s: State, lease: Lease, now_ns: int) -> None:
    """Take back everything a lease claimed: its block, its running reads, its borrowed slots."""
    for op_id in list(lease.ops):
        op = s.ops.pop(OpId(op_id), None)
        if isinstance(op, ReadOp):
            _end_read(s, op, now_ns)
    for slot in list(lease.borrowed):
        pool = unborrow(s, lease, slot)
        assert pool is not None
        free_slot(s, pool, slot)
    s.leases.remove(lease)
    block = live(lease.block)
    if block is not None:
        block.leases -= 1
        refresh(s, block, now_ns)


def expire_leases(s: State, now_ns: int) -> None:
    for lease in s.leases.expired(now_ns):
        end_lease(s, lease, now_ns)
        s.out.append(LeaseEnded(lease.id, lease.owner))


def leased_path(lease: Lease, first: int, last: int) -> list[Block]:
    """Blocks [first, last) of a leased path. Raises InvalidField on a bad range."""
    deepest = live(lease.block)
    length = 0 if deepest is None else deepest.depth + 1
    if not 0 <= first <= last <= length:
        raise InvalidField(
            "first, last", f"[{first}, {last}) is outside the leased prefix", f"stay within [0, {length})"
        )
    path: list[Block] = []
    block = deepest
    while block is not None and block.depth >= first:
        if block.depth < last:
            path.append(block)
        block = block.parent
    path.reverse()
    return path


def best_copy(s: State, block: Block) -> tuple[Tier, Residency] | None:
    """The fastest READY copy."""
    for tier in s.pools:
        residency = block.residencies[tier]
        if residency is not None and residency.state == READY:
            return tier, residency
    return None


def on_restore(s: State, e: Restore, now_ns: int) -> None:
    lease = s.leases.get(e.lease)
    op = ReadOp(lease.id, e.first, [])
    places = []
    for block in leased_path(lease, e.first, e.last):
        copy = best_copy(s, block)
        if copy is None:
            break  # lost under the lease: the plan is cut at the last good block
        op.blocks.append((block, copy[1], copy[0]))
        places.append(Location(block, copy[0], copy[1].slot))
    op_id = s.new_op(op)
    lease.ops.add(op_id)
    for block, residency, _ in op.blocks:
        residency.holds += 1
        s.num_prefetch_used += residency.prefetched
        residency.prefetched = False
        refresh(s, block, now_ns)
    s.out.append(RestorePlan(op_id, e.first, tuple(places)))


def on_restore_done(s: State, e: RestoreDone, now_ns: int) -> None:
    op = s.ops.get(e.op)
    if not isinstance(op, ReadOp):
        s.num_stale += 1
        return
    del s.ops[e.op]
    lease = s.leases.find(op.lease)
    if lease is not None:
        lease.ops.discard(e.op)
    _end_read(s, op, now_ns)
    for position in e.corrupt:
        if 0 <= position - op.first < len(op.blocks):
            block, residency, tier = op.blocks[position - op.first]
            if block.residencies[tier] is residency:
                lose(s, block, s.pools[tier], now_ns)


def _end_read(s: State, op: ReadOp, now_ns: int) -> None:
    for block, residency, tier in op.blocks:
        release_hold(s, block, residency, s.pools[tier], now_ns)


def on_prefetch(s: State, e: Prefetch, now_ns: int) -> None:
    s.out.append(Prefetching(_bring_up(s, get_session(s, e.session), now_ns)))


def _bring_up(s: State, session: Session, now_ns: int) -> int:
    """Start promotions of a session's context; returns how many blocks."""
    tip = live(session.tip)
    return promote(s, tip, now_ns) if tip is not None else 0


def prefetch_due(s: State, now_ns: int) -> None:
    """Tick: bring up the contexts of agents that are about to come back."""
    for session in s.foresight.due(s.sessions, now_ns):
        _bring_up(s, session, now_ns)


def on_detach(s: State, e: Detach, now_ns: int) -> None:
    for lease in s.leases.all():
        if lease.owner == e.owner:
            end_lease(s, lease, now_ns)
    for op_id, op in list(s.ops.items()):
        if isinstance(op, FillOp) and op.owner == e.owner:
            abort_fill(s, op_id, op, now_ns)
