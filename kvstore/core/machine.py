"""The machine: `step(event, now_ns) -> commands`. Pure, and the one entry point to the state of its tiers.

Every step handles one event, then lets the consequences run: expiries (on Tick), waiters, durability waits, background
copies. The same class runs in the node service (dram, nvme), in an engine (hbm), and in the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.core import activity, events, moving, reading, writing
from kvstore.core.blocks import Block
from kvstore.core.commands import Command, Location
from kvstore.core.events import Event
from kvstore.core.invariants import check_invariants
from kvstore.core.sessions import Session
from kvstore.core.state import Limits, Pool, Space, State, TierConfig
from kvstore.core.tree import link, live, make_ready, match, path_of, place
from kvstore.core.types import Activity, BlockHash, Hashes, KeyspaceId, LeaseId, OpId, ResidencyState, SessionId, Tier


class Machine:
    """Owner of every slot of its tiers. Not thread-safe: one caller.

    Args:
        tiers: at most one a `Tier`.
        limits: configured maxima.
        notices: also emit `Stored` and `Removed` for every change of the resident set.

    `step` raises a RequestError or CapacityError for an event that can't be; the state is then unchanged.
    """

    def __init__(self, tiers: list[TierConfig], limits: Limits | None = None, notices: bool = False) -> None:
        self._s = State(tiers, limits or Limits(), notices)

    def step(self, event: Event, now_ns: int) -> list[Command]:
        """Handle one event at time `now_ns` (which must not go backwards)."""
        s = self._s
        s.out = []
        _HANDLERS[type(event)](s, event, now_ns)
        if s.waiters:
            writing.serve_waiters(s, now_ns)
        if s.persists:
            writing.advance_persists(s, now_ns)
        moving.background(s, now_ns)
        return s.out

    # ---- queries: no side effects

    def match(self, keyspace: KeyspaceId, hashes: Hashes) -> int:
        """Length of the longest resident prefix, in blocks. Takes no lease, touches nothing."""
        return match(self._s.space(keyspace), hashes)

    def locate(self, lease: LeaseId) -> list[Location]:
        """Fastest copies of all blocks of a leased path, in path order."""
        found = []
        for block in path_of(live(self._s.leases.get(lease).block)):
            copy = reading.best_copy(self._s, block)
            if copy is None:
                break
            found.append(Location(block, copy[0], copy[1].slot))
        return found

    def session(self, session_id: SessionId) -> Session:
        """Raises UnknownSession."""
        return activity.get_session(self._s, session_id)

    def find_session(self, session_id: SessionId) -> Session | None:
        """An open session, or None."""
        return self._s.sessions.get(session_id)

    def sessions(self) -> list[Session]:
        """All open sessions, longest untouched first."""
        return list(self._s.sessions.values())

    def session_path(self, session_id: SessionId) -> list[Block]:
        """Resident blocks of a session's context, first first."""
        return path_of(live(self.session(session_id).tip))

    def space(self, keyspace: KeyspaceId) -> Space:
        """Raises UnknownKeyspace."""
        return self._s.space(keyspace)

    def spaces(self) -> list[Space]:
        """All keyspaces."""
        return list(self._s.space_list)

    def space_of(self, block: Block) -> Space:
        """The keyspace a block belongs to."""
        return self._s.space_list[block.space]

    def space_at(self, index: int) -> Space:
        """The keyspace a session belongs to, by `Session.space`."""
        return self._s.space_list[index]

    def fill_blocks(self, op: OpId) -> dict[BlockHash, Block]:
        """Blocks of a running reservation that are not sealed yet. Raises LeaseExpired."""
        return dict(writing.fill_op(self._s, op).blocks)

    def residency(self, keyspace: KeyspaceId, block_hash: BlockHash, tier: Tier) -> ResidencyState | None:
        """State of one copy; None where there is none. Raises UnknownKeyspace."""
        block = self._s.space(keyspace).blocks.get(block_hash)
        copy = block.residencies[tier] if block is not None else None
        return copy.state if copy is not None else None

    def pool(self, tier: Tier) -> Pool | None:
        """Read-only: counts of a tier."""
        return self._s.pools.get(tier)

    def pools(self) -> list[Pool]:
        """Read-only: all tiers, fastest first."""
        return list(self._s.pools.values())

    @property
    def num_leases(self) -> int:
        """Live leases."""
        return len(self._s.leases)

    @property
    def num_ops(self) -> int:
        """Running operations of clients and hands."""
        return len(self._s.ops)

    @property
    def num_stale(self) -> int:
        """Completions that came too late and were dropped."""
        return self._s.num_stale

    @property
    def prefetches(self) -> dict[str, int]:
        """Blocks brought up ahead of need: started, read in time, evicted unread."""
        s = self._s
        return {"started": s.num_prefetched, "used": s.num_prefetch_used, "wasted": s.num_prefetch_wasted}

    @property
    def busy(self) -> bool:
        """Does anything wait for time to pass?"""
        s = self._s
        return bool(s.waiters or s.persists or s.ghosts or len(s.leases) or s.ops or s.foresight.waiting)

    def why_missing(self, keyspace: KeyspaceId, block_hash: BlockHash, now_ns: int) -> str:
        """One line: why a block isn't resident."""
        space = self._s.space(keyspace)
        block = space.blocks.get(block_hash)
        if block is not None:
            return "resident" if block.visible else "being filled, or an ancestor was lost"
        stone = self._s.tombstones.get((space.index, block_hash))
        if stone is None:
            return "never stored here, or evicted too long ago to tell"
        return stone.tell(now_ns)

    def what_went(self, session_id: SessionId, now_ns: int) -> str:
        """One line: which blocks that a session was the last to use are gone, and why the last of them; empty when
        none."""
        gone = [stone for stone in self._s.tombstones.values() if stone.session == session_id]
        if not gone:
            return ""
        return f"{len(gone)} copies of blocks it was the last to use are gone; the last: {gone[-1].tell(now_ns)}"

    def count_sessions(self) -> dict[Activity, int]:
        """Open sessions by activity."""
        counts = dict.fromkeys(Activity, 0)
        for session in self._s.sessions.values():
            counts[session.activity] += 1
        return counts

    def check_invariants(self) -> None:
        """Conservation arithmetic over everything; raises AssertionError. For tests and soak runs: costs O(n)."""
        check_invariants(self._s)


def _on_register(s: State, e: events.RegisterKeyspace, now_ns: int) -> None:
    s.register(e.keyspace, e.slot_bytes, e.tenant, e.doubles_at)


def _on_recovered(s: State, e: events.Recovered, now_ns: int) -> None:
    space = s.space(e.keyspace)
    pool = s.pools[e.tier]
    for block_hash, parent_hash, slot in e.blocks:
        parent = space.blocks.get(parent_hash) if parent_hash is not None else None
        if (parent_hash is not None and parent is None) or block_hash in space.blocks:
            continue
        if not pool.slots.claim(slot, space.slot_bytes):
            continue
        block = link(space, block_hash, parent)
        block.last_access_ns = now_ns
        place(s, block, pool, slot, 0, now_ns)
        make_ready(s, block, pool, now_ns)


def _on_tick(s: State, e: events.Tick, now_ns: int) -> None:
    reading.expire_leases(s, now_ns)
    reading.prefetch_due(s, now_ns)
    writing.expire_fills(s, now_ns)
    moving.drop_orphans(s, now_ns, s.limits.orphan_ttl_ns)


_HANDLERS: dict[type, Callable[[State, Any, int], None]] = {
    events.RegisterKeyspace: _on_register,
    events.OpenSession: activity.on_open,
    events.Signal: activity.on_signal,
    events.Fork: activity.on_fork,
    events.Supersede: activity.on_supersede,
    events.EndSession: activity.on_end,
    events.Acquire: reading.on_acquire,
    events.Renew: reading.on_renew,
    events.Release: reading.on_release,
    events.Restore: reading.on_restore,
    events.RestoreDone: reading.on_restore_done,
    events.Prefetch: reading.on_prefetch,
    events.Reserve: writing.on_reserve,
    events.Seal: writing.on_seal,
    events.Persist: writing.on_persist,
    events.Borrow: writing.on_borrow,
    events.Adopt: writing.on_adopt,
    events.GiveBack: writing.on_give_back,
    events.MoveDone: moving.on_move_done,
    events.UnpublishDone: moving.on_unpublish_done,
    events.SyncDone: writing.on_sync_done,
    events.Lost: moving.on_lost,
    events.TierAlive: moving.on_tier_alive,
    events.Recovered: _on_recovered,
    events.RecoveredSession: activity.on_recovered_session,
    events.Detach: reading.on_detach,
    events.Tick: _on_tick,
}
