"""Reserving, sealing, persisting; and borrowed slots of an engine.

A `Reserve` names a path; blocks already there are RESIDENT, blocks being filled by somebody else IN_FLIGHT, the rest
get slots in path order. When room takes I/O to make, the request waits (bounded in number and time) and is answered as
a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import islice

from kvstore.core.activity import set_tip, still_open, touch
from kvstore.core.blocks import Block, Residency
from kvstore.core.commands import Adopted, Borrowed, Persisted, Reserved, ReserveStatus, Sealed, Sync
from kvstore.core.events import Adopt, Borrow, GiveBack, Persist, Reserve, Seal, SyncDone
from kvstore.core.moving import Room, clean, make_room, release_hold, take_slots
from kvstore.core.sessions import Session
from kvstore.core.state import FILLING, READY, FillOp, PersistWait, Pool, Space, State, SyncOp, Waiter
from kvstore.core.tree import add_kid, borrow, drop, free_slot, link, live, make_ready, place, refresh, unborrow
from kvstore.core.types import BlockHash, Durability, OpId, Slot, Tier
from kvstore.errors import InvalidField, LeaseExpired, LimitExceeded

NO_SLOT = Slot(-1)
GRANTED, RESIDENT, IN_FLIGHT = ReserveStatus.GRANTED, ReserveStatus.RESIDENT, ReserveStatus.IN_FLIGHT
FULL, NO_PARENT = ReserveStatus.FULL, ReserveStatus.NO_PARENT


def on_reserve(s: State, e: Reserve, now_ns: int) -> None:
    space = s.space(e.keyspace)
    pool = _pool(s, e.tier)
    if not 0 <= e.first <= len(e.hashes):
        raise InvalidField("first", f"{e.first} is outside the path", f"use 0 to {len(e.hashes)}")
    session = s.sessions.get(e.session) if e.session is not None else None
    if session is not None:
        session.num_blocks = max(session.num_blocks, len(e.hashes))
    op = FillOp(e.owner, space, pool, session, now_ns + min(e.ttl_ns, s.limits.lease_ttl_ns_max))
    op_id = s.new_op(op)
    count = len(e.hashes) - e.first
    w = Waiter(e.request, op_id, e.hashes, e.first, [FULL] * count, [NO_SLOT] * count, now_ns + e.wait_ns)
    if _advance(s, w, op, now_ns) == Room.LATER and e.wait_ns > 0:
        if len(s.waiters) >= s.limits.num_waiters:
            _answer(s, w)
        else:
            s.waiters.append(w)
    else:
        _answer(s, w)


def _pool(s: State, tier: Tier) -> Pool:
    if tier not in s.pools:
        raise InvalidField(
            "tier", f"{tier.label} is not a tier of this node", f"use {', '.join(t.label for t in s.pools)}"
        )
    return s.pools[tier]


def _advance(s: State, w: Waiter, op: FillOp, now_ns: int) -> Room:
    """Decide as many positions as can be decided now, in path order. LATER when one waits for I/O."""
    blocks, hashes, end = op.space.blocks, w.hashes, len(w.hashes)
    at = w.first + w.num_decided
    parent = blocks.get(hashes[at - 1]) if 0 < at < end else None
    mine = False  # the parent was granted just now: it can't go
    while at < end:
        if at and not mine and not _has_copy(parent):
            _decide(w, [NO_PARENT] * (end - at))
            break
        block = blocks.get(hashes[at])
        status = _standing(block) if block is not None else None
        if status is not None:
            _decide(w, [status])
            mine = False
        else:
            if not _admits(op, now_ns):
                _decide(w, [FULL] * (end - at))
                break
            room = make_room(s, op.pool, op.space.share, now_ns)
            if room != Room.FREE:
                return room
            if at and not mine and not _has_copy(parent):
                continue  # making room took it
            block = _grant(s, w, op, parent, now_ns)
            block = _grant_run(s, w, op, block, now_ns)
            mine = True
        parent = block
        at = w.first + w.num_decided
    return Room.FREE


def _decide(w: Waiter, statuses: list[ReserveStatus]) -> None:
    w.statuses[w.num_decided : w.num_decided + len(statuses)] = statuses
    w.num_decided += len(statuses)


def _admits(op: FillOp, now_ns: int) -> bool:
    """Is a new block of this session worth more than what it would push out of the last tier? Policies that can't tell
    say yes."""
    asked = _admission(op)
    return asked is None or bool(op.pool.slots.num_free(op.space.slot_bytes)) or asked(now_ns)


def _admission(op: FillOp) -> Callable[[int], bool] | None:
    """Whom to ask, by the time, whether a block of the operation may push out another; None when it may."""
    session = op.session
    if op.pool.sink is not None or session is None:
        return None
    admits: Callable[[Session, int], bool] | None = getattr(op.pool.policy(op.space.share), "admits", None)
    return None if admits is None else functools.partial(admits, session)


def _grant_run(s: State, w: Waiter, op: FillOp, parent: Block, now_ns: int) -> Block:
    """Grant what follows a block granted just now, as long as nobody has heard of it and slots are to be had at once.
    Returns the last block granted."""
    space, tier, session = op.space, op.pool.tier, op.session
    blocks, hashes, share = space.blocks, w.hashes, space.share
    new: dict[BlockHash, None] = {}  # in path order; a careless client may name a block twice
    for at in range(w.first + w.num_decided, len(hashes)):
        name = hashes[at]
        if name in blocks or name in new:
            break
        new[name] = None
    slots = take_slots(s, op.pool, share, len(new), now_ns, _admission(op))
    copy = parent.residencies[tier]
    for name, slot in zip(new, slots, strict=False):
        assert copy is not None
        copy.num_kids += 1
        block = blocks[name] = Block(name, parent, space.index, share)
        add_kid(parent, block)
        block.last_access_ns = now_ns
        block.last_session = session
        copy = block.residencies[tier] = Residency(slot, FILLING, w.op_id)
        op.blocks[name] = parent = block
    op.pool.num_filling += len(slots)
    w.slots[w.num_decided : w.num_decided + len(slots)] = slots
    _decide(w, [GRANTED] * len(slots))
    return parent


def _has_copy(block: Block | None) -> bool:
    return block is not None and any(r is not None and r.state in (READY, FILLING) for r in block.residencies)


def _standing(block: Block) -> ReserveStatus | None:
    """RESIDENT or IN_FLIGHT for a block that needs no slot; None for one that does."""
    states = [r.state for r in block.residencies if r is not None]
    if READY in states:
        return RESIDENT
    return IN_FLIGHT if states else None


def _grant(s: State, w: Waiter, op: FillOp, parent: Block | None, now_ns: int) -> Block:
    slot = op.pool.slots.allocate(op.space.slot_bytes)
    assert slot is not None
    block = link(op.space, w.hashes[w.first + w.num_decided], parent)
    block.last_access_ns = now_ns
    if op.session is not None:
        block.last_session = op.session
    place(s, block, op.pool, slot, w.op_id, now_ns)
    op.blocks[block.hash] = block
    w.slots[w.num_decided] = slot
    _decide(w, [GRANTED])
    return block


def _answer(s: State, w: Waiter) -> None:
    op = s.ops.get(w.op_id)
    if isinstance(op, FillOp) and not op.blocks:
        del s.ops[w.op_id]
    elif op is None:  # expired or abandoned while it waited: its slots are somebody else's
        w.statuses = [FULL if status == GRANTED else status for status in w.statuses]
        w.slots = [NO_SLOT] * len(w.slots)
    s.out.append(Reserved(w.request, w.op_id, tuple(w.statuses), tuple(w.slots)))


def serve_waiters(s: State, now_ns: int) -> None:
    """Give room that has become free to those who wait, in order; end waits whose time is over."""
    if not s.waiters:
        return
    waiting = s.waiters
    s.waiters = []
    blocked = False
    for w in waiting:
        op = s.ops.get(w.op_id)
        if not isinstance(op, FillOp):  # its client is gone
            _answer(s, w)
            continue
        room = Room.LATER if blocked else _advance(s, w, op, now_ns)
        if room != Room.LATER or now_ns >= w.deadline_ns:
            _answer(s, w)
        else:
            blocked = True
            s.waiters.append(w)


def fill_op(s: State, op_id: OpId) -> FillOp:
    """A running reservation. Raises LeaseExpired."""
    op = s.ops.get(op_id)
    if not isinstance(op, FillOp):
        raise LeaseExpired(f"op_id: reservation {op_id} has expired; reserve again")
    return op


def on_seal(s: State, e: Seal, now_ns: int) -> None:
    op = fill_op(s, e.op)
    named = (*e.sealed, *e.failed)
    unknown = [h for h in named if h not in op.blocks]
    if unknown:
        raise InvalidField(
            "records", f"block {unknown[0].hex()} was not granted by operation {e.op}", "seal granted blocks only"
        )
    if len(set(named)) < len(named):
        raise InvalidField("records", "a block is named twice", "seal or fail each granted block once")
    deepest: Block | None = None
    held: list[tuple[Block, Residency]] = []  # no candidates before it is known whose context ends there
    for block_hash in e.failed:
        _drop_fill(s, op, op.blocks.pop(block_hash), now_ns)
    for block_hash in e.sealed:
        block = op.blocks.pop(block_hash)
        copy = block.residencies[op.pool.tier]
        if copy is not None and not copy.num_kids:
            copy.holds += 1
            held.append((block, copy))
        make_ready(s, block, op.pool, now_ns)
        if block.visible and (deepest is None or block.depth > deepest.depth):
            deepest = block
    if not op.blocks:
        del s.ops[e.op]
    if deepest is not None:
        _moved_on(s, op, deepest, now_ns)
    for block, copy in held:
        release_hold(s, block, copy, op.pool, now_ns)
    s.out.append(Sealed(len(e.sealed)))


def _moved_on(s: State, op: FillOp, deepest: Block, now_ns: int) -> None:
    """The session's context grew to `deepest`, if that continues where it was."""
    session = still_open(s, op.session)
    if session is not None:
        tip = live(session.tip)
        if tip is None or deepest.depth >= tip.depth:
            set_tip(s, session, deepest, now_ns)
    touch(s, deepest, session, now_ns)


def _drop_fill(s: State, op: FillOp, block: Block, now_ns: int) -> None:
    residency = block.residencies[op.pool.tier]
    assert residency is not None and residency.state == FILLING
    drop(s, block, op.pool, now_ns, "not filled")


def abort_fill(s: State, op_id: OpId, op: FillOp, now_ns: int) -> None:
    """Take back what was reserved and never sealed, deepest blocks first."""
    for block in sorted(op.blocks.values(), key=lambda b: -b.depth):
        _drop_fill(s, op, block, now_ns)
    op.blocks.clear()
    s.ops.pop(op_id, None)


def expire_fills(s: State, now_ns: int) -> None:
    for op_id, op in list(s.ops.items()):
        if isinstance(op, FillOp) and op.expires_ns <= now_ns:
            abort_fill(s, op_id, op, now_ns)


# ---- durability


def on_persist(s: State, e: Persist, now_ns: int) -> None:
    space = s.space(e.keyspace)
    if len(s.persists) >= s.limits.num_waiters:
        raise LimitExceeded(f"max_waiters: {s.limits.num_waiters} requests wait already; try again later")
    s.persists.append(PersistWait(e.request, _known_path(space, e), e.durability, now_ns + e.wait_ns))


def _known_path(space: Space, e: Persist) -> list[Block]:
    path: list[Block] = []
    for index in range(len(e.hashes)):
        block = space.blocks.get(e.hashes[index])
        if block is None or block.depth != index:
            break
        path.append(block)
    return path


def _holds(s: State, block: Block, durability: Durability) -> bool:
    """Is there a whole copy in a tier that keeps this promise? One being filled is none."""
    for tier, pool in s.pools.items():
        residency = block.residencies[tier]
        ready = residency is not None and residency.state is READY
        if ready and (durability == Durability.DRAM or pool.config.durable):
            return True
    return False


def _kept_prefix(s: State, w: PersistWait, first: int = 0) -> int:
    for index in range(first, len(w.path)):
        if not _holds(s, w.path[index], w.durability):
            return index
    return len(w.path)


def advance_persists(s: State, now_ns: int) -> None:
    """Copy down what waiting clients need; answer those that are done, or late, or can't be served.

    Looks only behind what was found kept before, and at everything again before it answers.
    """
    waiting, s.persists = s.persists, []
    for w in waiting:
        w.num_kept = _kept_prefix(s, w, w.num_kept)
        if w.num_kept == len(w.path):
            w.num_kept = _kept_prefix(s, w)
        synced = w.durability == Durability.SYNCED and bool(w.path)
        done = w.num_kept == len(w.path) and not synced
        if not done and now_ns < w.deadline_ns and (w.syncing or _push(s, w, now_ns)):
            s.persists.append(w)
        else:
            s.out.append(Persisted(w.request, 0 if synced else _kept_prefix(s, w)))


def _push(s: State, w: PersistWait, now_ns: int) -> bool:
    """Start or await the next step; False when nothing can be done for this path."""
    if w.num_kept == len(w.path):
        w.syncing = True
        s.out.append(Sync(s.new_op(SyncOp([w]))))
        return True
    block = w.path[w.num_kept]
    if any(r is not None and r.state is FILLING for r in block.residencies):
        return True
    if w.durability == Durability.DRAM:
        return False
    for pool in s.pools.values():
        residency = block.residencies[pool.tier]
        if residency is not None and residency.state is READY and pool.sink is not None:
            clean(s, pool, now_ns, only=islice(w.path, w.num_kept, None))
            return True
    return False


def on_sync_done(s: State, e: SyncDone, now_ns: int) -> None:
    op = s.ops.pop(e.op, None)
    if not isinstance(op, SyncOp):
        s.num_stale += 1
        return
    for w in op.waits:
        if w in s.persists:
            s.persists.remove(w)
            s.out.append(Persisted(w.request, _kept_prefix(s, w) if e.ok else 0))


# ---- borrowed slots


def on_borrow(s: State, e: Borrow, now_ns: int) -> None:
    lease = s.leases.get(e.lease)
    pool = _pool(s, e.tier)
    share = s.space_list[lease.space].share
    got: list[Slot] = []
    while len(got) < e.count and make_room(s, pool, share, now_ns) == Room.FREE:
        slot = pool.slots.allocate(share.size_class)
        assert slot is not None
        got.append(slot)
        borrow(s, lease, pool, slot)
    s.out.append(Borrowed(tuple(got)))


def on_give_back(s: State, e: GiveBack, now_ns: int) -> None:
    lease = s.leases.get(e.lease)
    for slot in e.slots:
        pool = unborrow(s, lease, slot)
        if pool is None:
            raise InvalidField(
                "slots", f"slot {slot} is not borrowed under lease {e.lease}", "return borrowed slots only"
            )
        free_slot(s, pool, slot)


def on_adopt(s: State, e: Adopt, now_ns: int) -> None:
    lease = s.leases.get(e.lease)
    if lease.borrowed.get(e.slot) != e.tier:
        raise InvalidField("slot", f"{e.slot} is not borrowed under lease {e.lease}", "adopt borrowed slots only")
    pool, space = _pool(s, e.tier), s.space_list[lease.space]
    parent = live(lease.block)
    block = link(space, e.hash, parent)
    if block.parent is not parent:
        raise InvalidField("hash", f"{e.hash.hex()} doesn't continue the leased path", "adopt blocks in path order")
    there = block.residencies[e.tier]
    duplicate = there is not None
    block.leases += 1  # first: it is no candidate while its reader goes on from it
    if there is None:
        unborrow(s, lease, e.slot)
        there = place(s, block, pool, e.slot, 0, now_ns)
        block.last_session = lease.session
        make_ready(s, block, pool, now_ns)
    lease.block = block
    if parent is not None:
        parent.leases -= 1
        refresh(s, parent, now_ns)
    refresh(s, block, now_ns)
    session = still_open(s, lease.session)
    if session is not None:
        session.num_blocks = max(session.num_blocks, block.depth + 1)
        set_tip(s, session, block, now_ns)
    touch(s, block, session, now_ns)
    s.out.append(Adopted(there.slot, duplicate))
