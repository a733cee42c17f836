"""The machine's promises one by one, as short stories."""

from __future__ import annotations

import pytest

from kvstore.core import commands, events
from kvstore.core.commands import Command, ReserveStatus
from kvstore.core.eviction import make_policy
from kvstore.core.machine import Machine
from kvstore.core.state import Limits, TierConfig
from kvstore.core.types import (
    Activity,
    BlockHash,
    Durability,
    HashList,
    KeyspaceId,
    LeaseId,
    OpId,
    SessionId,
    Slot,
    Tier,
)
from kvstore.errors import InvalidField, LeaseExpired, LimitExceeded, UnknownKeyspace, UnknownSession

SLOT = 4096
KS = KeyspaceId(b"k" * 32)
A, B = SessionId("a"), SessionId("b")
TTL = 1000


def path(name: str, length: int) -> list[BlockHash]:
    return [BlockHash(f"{name}{i}".encode().ljust(16, b".")) for i in range(length)]


def make(dram: int = 8, nvme: int = 0, hbm: int = 0, **limits: int) -> Machine:
    sizes = ((Tier.HBM, hbm), (Tier.DRAM, dram), (Tier.NVME, nvme))
    tiers = [
        TierConfig(t, n * SLOT, lambda t: make_policy("leaf-lru", t), SLOT, 0.5, durable=t == Tier.NVME)
        for t, n in sizes
        if n
    ]
    machine = Machine(tiers, Limits(num_tombstones=100, **limits), notices=True)
    machine.step(events.RegisterKeyspace(KS, SLOT), 0)
    for session in (A, B):
        machine.step(events.OpenSession(session, KS), 0)
    return machine


def one(out: list[Command], kind: type) -> object:
    found = [c for c in out if isinstance(c, kind)]
    assert len(found) == 1, out
    return found[0]


def reserve(
    machine: Machine, hashes: list[BlockHash], now: int, session: SessionId | None = A, wait: int = 0
) -> object:
    event = events.Reserve(now, KS, hashes, 0, "client", machine.pools()[0].tier, TTL, wait, session)
    return one(machine.step(event, now), commands.Reserved)


def store(machine: Machine, hashes: list[BlockHash], now: int, session: SessionId | None = A) -> None:
    got = reserve(machine, hashes, now, session)
    granted = tuple(h for h, s in zip(hashes, got.statuses, strict=True) if s == ReserveStatus.GRANTED)
    assert ReserveStatus.FULL not in got.statuses
    if granted:
        machine.step(events.Seal(got.op, granted), now)
    machine.check_invariants()


def acquire(machine: Machine, hashes: list[BlockHash], now: int, session: SessionId | None = None) -> commands.Acquired:
    return one(machine.step(events.Acquire(KS, hashes, "client", TTL, session), now), commands.Acquired)


def work(machine: Machine, out: list[Command], now: int) -> None:
    """Hands that do everything at once."""
    todo = list(out)
    while todo:
        c = todo.pop(0)
        if isinstance(c, commands.Move):
            todo += machine.step(events.MoveDone(c.op), now)
        elif isinstance(c, commands.Unpublish):
            todo += machine.step(events.UnpublishDone(c.op), now)
        elif isinstance(c, commands.Sync):
            todo += machine.step(events.SyncDone(c.op, True), now)
    machine.check_invariants()


def test_matching_finds_the_longest_prefix_and_has_no_side_effect() -> None:
    machine = make()
    store(machine, path("x", 5), 1)
    for length in range(9):
        assert machine.match(KS, path("x", length)) == min(length, 5)
    assert machine.match(KS, HashList(b"".join(path("x", 5)))) == 5
    assert machine.match(KS, path("y", 3)) == 0
    assert machine.num_leases == 0


def test_leaves_go_first_and_the_usable_prefix_stays() -> None:
    machine = make(dram=6)
    store(machine, path("x", 6), 1)
    store(machine, path("y", 3), 2, B)
    assert machine.match(KS, path("x", 6)) == 3
    assert machine.match(KS, path("y", 3)) == 3


def test_a_lease_on_the_tip_protects_the_whole_prefix() -> None:
    machine = make(dram=6)
    store(machine, path("x", 4), 1)
    lease = acquire(machine, path("x", 4), 2)
    got = reserve(machine, path("y", 4), 3, B)
    assert got.statuses.count(ReserveStatus.GRANTED) == 2
    assert got.statuses.count(ReserveStatus.FULL) == 2
    assert machine.match(KS, path("x", 4)) == 4
    machine.step(events.Release((lease.lease,)), 4)
    assert reserve(machine, path("z", 3), 5, B).statuses.count(ReserveStatus.GRANTED) == 3


def test_leases_expire_by_the_clock_and_their_slots_come_back() -> None:
    machine = make()
    store(machine, path("x", 2), 1)
    lease = acquire(machine, path("x", 2), 2).lease
    plan = one(machine.step(events.Restore(lease, 0, 2), 3), commands.RestorePlan)
    assert [p.tier for p in plan.places] == [Tier.DRAM] * 2
    out = machine.step(events.Tick(), 2 + TTL)
    assert one(out, commands.LeaseEnded).lease == lease
    machine.check_invariants()
    with pytest.raises(LeaseExpired):
        machine.step(events.Restore(lease, 0, 2), 3000)
    machine.step(events.RestoreDone(plan.op), 3001)
    assert machine.num_stale == 1


def test_a_reservation_that_is_never_sealed_is_taken_back() -> None:
    machine = make()
    got = reserve(machine, path("x", 3), 1)
    assert machine.match(KS, path("x", 3)) == 0
    machine.step(events.Tick(), 1 + TTL)
    assert all(p.num_filling == 0 for p in machine.pools())
    with pytest.raises(LeaseExpired):
        machine.step(events.Seal(got.op, tuple(path("x", 3))), 2000)


def test_of_many_writers_of_one_key_one_wins_and_none_fails() -> None:
    machine = make()
    first = reserve(machine, path("x", 2), 1)
    second = reserve(machine, path("x", 2), 2, B)
    assert set(second.statuses) == {ReserveStatus.IN_FLIGHT}
    machine.step(events.Seal(first.op, tuple(path("x", 2))), 3)
    assert set(reserve(machine, path("x", 2), 4, B).statuses) == {ReserveStatus.RESIDENT}


def test_a_child_sealed_before_its_parent_is_not_seen() -> None:
    machine = make()
    got = reserve(machine, path("x", 3), 1)
    machine.step(events.Seal(got.op, (path("x", 3)[2],)), 2)
    assert machine.match(KS, path("x", 3)) == 0
    machine.step(events.Seal(got.op, tuple(path("x", 2))), 3)
    assert machine.match(KS, path("x", 3)) == 3


def test_orphans_are_invisible_until_somebody_seals_the_lost_block_again() -> None:
    machine = make()
    store(machine, path("x", 5), 1)
    machine.step(events.Lost(KS, path("x", 5)[2], Tier.DRAM), 2)
    machine.check_invariants()
    assert machine.match(KS, path("x", 5)) == 2
    store(machine, path("x", 3), 3)
    assert machine.match(KS, path("x", 5)) == 5


def test_orphans_nobody_adopts_go_after_their_time() -> None:
    machine = make(orphan_ttl_ns=100)
    store(machine, path("x", 5), 1)
    machine.step(events.Lost(KS, path("x", 5)[2], Tier.DRAM), 2)
    for now in (200, 300, 400):
        machine.step(events.Tick(), now)
    machine.check_invariants()
    assert machine.pools()[0].num_ready == 2


def test_a_block_lost_under_a_reader_goes_when_the_reader_ends() -> None:
    machine = make()
    store(machine, path("x", 2), 1)
    lease = acquire(machine, path("x", 2), 2).lease
    plan = one(machine.step(events.Restore(lease, 0, 2), 3), commands.RestorePlan)
    machine.step(events.Lost(KS, path("x", 2)[1], Tier.DRAM), 4)
    machine.check_invariants()
    assert machine.match(KS, path("x", 2)) == 1
    assert machine.pools()[0].slots.used_bytes == 2 * SLOT
    machine.step(events.RestoreDone(plan.op), 5)
    assert machine.pools()[0].slots.used_bytes == SLOT


def test_dirty_blocks_are_copied_down_parents_first() -> None:
    machine = make(dram=8, nvme=16)
    got = reserve(machine, path("x", 6), 1)
    out = machine.step(events.Seal(got.op, tuple(path("x", 6))), 2)
    move = one(out, commands.Move)
    assert [item.block.depth for item in move.items] == sorted(item.block.depth for item in move.items)
    work(machine, out, 3)
    assert machine.pool(Tier.NVME).num_ready == 6


def test_when_dram_is_full_a_store_waits_for_the_copy_and_not_longer_than_it_said() -> None:
    machine = make(dram=4, nvme=16)
    got = reserve(machine, path("x", 4), 1)
    out = machine.step(events.Seal(got.op, tuple(path("x", 4))), 2)
    late = machine.step(events.Reserve(7, KS, path("y", 2), 0, "client", Tier.DRAM, TTL, 50, B), 3)
    assert not [c for c in late if isinstance(c, commands.Reserved)]
    moved = machine.step(events.MoveDone(one(out, commands.Move).op), 4)
    assert one(moved, commands.Reserved).statuses == (ReserveStatus.GRANTED,) * 2
    reserve(machine, path("z", 2), 5)
    machine.step(events.Reserve(8, KS, path("w", 9), 0, "client", Tier.DRAM, TTL, 50, B), 6)
    ended = machine.step(events.Tick(), 100)
    assert [c.request for c in ended if isinstance(c, commands.Reserved)] in ([8], [])


def test_persist_is_answered_when_the_path_is_durable() -> None:
    machine = make(dram=8, nvme=16)
    store(machine, path("x", 3), 1)
    out = machine.step(events.Persist(9, KS, path("x", 3), Durability.SYNCED, 1000), 2)
    assert not [c for c in out if isinstance(c, commands.Persisted)]
    out = machine.step(events.MoveDone(one(out, commands.Move).op), 3)
    out = machine.step(events.SyncDone(one(out, commands.Sync).op, True), 4)
    assert one(out, commands.Persisted).num_blocks == 3


def test_a_failed_copy_shortens_what_persist_promises() -> None:
    machine = make(dram=8, nvme=16)
    store(machine, path("x", 3), 1)
    out = machine.step(events.Persist(9, KS, path("x", 3), Durability.NVME, 10), 2)
    machine.step(events.MoveDone(one(out, commands.Move).op, failed=(1, 2), tier_dead=True), 3)
    late = machine.step(events.Tick(), 50)
    answers = [c for c in late if isinstance(c, commands.Persisted)]
    assert not answers or answers[0].num_blocks == 1
    assert machine.match(KS, path("x", 3)) == 3


def test_nvme_slots_are_free_only_after_the_record_is_gone() -> None:
    machine = make(dram=4, nvme=4)
    for number, name in enumerate("xyz"):
        got = reserve(machine, path(name, 2), 10 * number, A, 0)
        out = machine.step(events.Seal(got.op, tuple(path(name, 2))), 10 * number + 1)
        out += machine.step(events.Persist(number, KS, path(name, 2), Durability.NVME, 5), 10 * number + 2)
        unpublished = [c for c in out if isinstance(c, commands.Unpublish)]
        if name == "z":
            assert unpublished
            assert machine.pool(Tier.NVME).num_draining == len(unpublished)
        work(machine, out, 10 * number + 3)


def test_an_ended_session_gives_its_room_first() -> None:
    machine = make(dram=6)
    store(machine, path("x", 3), 1, A)
    store(machine, path("y", 3), 2, B)
    done = one(machine.step(events.EndSession(B), 3), commands.SessionChanged)
    assert done.num_abandoned == 3
    with pytest.raises(UnknownSession):
        machine.session(B)


def test_supersession_abandons_only_what_nobody_else_holds() -> None:
    machine = make(dram=12)
    store(machine, path("x", 5), 1, A)
    machine.step(events.Fork(A, SessionId("child")), 2)
    assert one(machine.step(events.Supersede(A, path("x", 2)), 3), commands.SessionChanged).num_abandoned == 0
    assert one(machine.step(events.EndSession(SessionId("child")), 4), commands.SessionChanged).num_abandoned == 3


def test_dirty_blocks_of_an_abandoned_branch_are_dropped_and_not_written() -> None:
    machine = make(dram=4, nvme=8)
    store(machine, path("x", 2), 1, A)
    machine.step(events.EndSession(A), 2)
    got = one(machine.step(events.Reserve(1, KS, path("y", 4), 0, "c", Tier.DRAM, TTL, 0, B), 3), commands.Reserved)
    assert got.statuses == (ReserveStatus.GRANTED,) * 4
    assert machine.pool(Tier.NVME).num_ready == 0


def test_an_engine_borrows_slots_and_adopts_full_blocks() -> None:
    machine = make(dram=0, hbm=4)
    lease = one(machine.step(events.Acquire(KS, [], "e", TTL, A, empty=True), 1), commands.Acquired).lease
    slots = one(machine.step(events.Borrow(lease, Tier.HBM, 3), 2), commands.Borrowed).slots
    x = path("x", 2)
    assert not one(machine.step(events.Adopt(lease, Tier.HBM, x[0], slots[0]), 3), commands.Adopted).duplicate
    machine.step(events.Adopt(lease, Tier.HBM, x[1], slots[1]), 4)
    assert [p.slot for p in machine.locate(lease)] == list(slots[:2])
    other = one(machine.step(events.Acquire(KS, x[:1], "e", TTL, B), 5), commands.Acquired).lease
    more = one(machine.step(events.Borrow(other, Tier.HBM, 5), 6), commands.Borrowed).slots
    assert len(more) == 1
    twin = one(machine.step(events.Adopt(other, Tier.HBM, x[1], more[0]), 7), commands.Adopted)
    assert twin.duplicate and twin.slot == slots[1]
    machine.step(events.Release((lease, other)), 8)
    machine.check_invariants()
    assert machine.pools()[0].num_borrowed == 0


def test_limits_and_unknown_names_are_one_line_errors_that_change_nothing() -> None:
    machine = make(num_leases=1, num_sessions=2)
    store(machine, path("x", 2), 1)
    acquire(machine, path("x", 2), 2)
    cases = [
        (events.Acquire(KS, path("x", 1), "c", TTL), LimitExceeded, "max_leases"),
        (events.OpenSession(SessionId("c"), KS), LimitExceeded, "max_sessions"),
        (events.OpenSession(SessionId(""), KS), InvalidField, "session_id"),
        (events.Acquire(KeyspaceId(b"z" * 32), [], "c", TTL), UnknownKeyspace, "keyspace_id"),
        (events.Reserve(1, KS, path("x", 1), 0, "c", Tier.NVME, TTL), InvalidField, "tier"),
        (events.Reserve(1, KS, path("x", 1), 5, "c", Tier.DRAM, TTL), InvalidField, "first"),
        (events.Restore(LeaseId(99), 0, 1), LeaseExpired, "lease_id"),
        (events.Seal(OpId(99), ()), LeaseExpired, "op_id"),
        (events.Restore(LeaseId(1), 0, 3), InvalidField, "first, last"),
    ]
    for event, error, words in cases:
        with pytest.raises(error) as caught:
            machine.step(event, 3)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
        machine.check_invariants()


def test_why_missing_tells_who_pushed_it_out() -> None:
    machine = make(dram=4)
    store(machine, path("x", 3), 1, A)
    store(machine, path("y", 3), 2, B)
    assert "evicted from dram" in machine.why_missing(KS, path("x", 3)[2], 5)
    assert "session 'a'" in machine.why_missing(KS, path("x", 3)[2], 5)
    assert "never stored" in machine.why_missing(KS, path("q", 1)[0], 5)
    assert "2 copies" in machine.what_went(A, 5)
    assert machine.what_went(B, 5) == ""


def test_contexts_of_recovered_sessions_are_worth_something() -> None:
    """After a restart a context that a session waits with stays longer than a block that nobody holds."""
    tier = TierConfig(Tier.NVME, 4 * SLOT, lambda t: make_policy("session", t), 4 * SLOT, durable=True)
    machine = Machine([tier])
    held, free = BlockHash(b"h" * 16), BlockHash(b"f" * 16)
    machine.step(events.RegisterKeyspace(KS, SLOT), 1)
    machine.step(events.Recovered(KS, ((held, None, Slot(0)), (free, None, Slot(SLOT)))), 2)
    machine.step(events.RecoveredSession(SessionId("a"), KS, held, int(Activity.TOOL_WAIT)), 3)
    pool = machine.pool(Tier.NVME)
    assert pool is not None
    policy, blocks = pool.policy(machine.space(KS).share), machine.space(KS).blocks
    assert policy.victim(4) is blocks[free]
    assert policy.score(blocks[held], 4) > policy.score(blocks[free], 4) == 0
    machine.check_invariants()


def test_a_path_that_names_a_block_twice_costs_no_slot() -> None:
    machine = make()
    a, b, c, d = path("x", 4)
    got = reserve(machine, [a, b, c, b, d], 1)
    assert isinstance(got, commands.Reserved)
    assert [s.name for s in got.statuses] == ["GRANTED", "GRANTED", "GRANTED", "IN_FLIGHT", "GRANTED"]
    machine.check_invariants()
    machine.step(events.Detach("client"), 2)
    machine.check_invariants()
    assert machine.pools()[0].slots.used_bytes == 0


def test_sealing_a_block_twice_is_refused_and_changes_nothing() -> None:
    machine = make()
    a, b = path("x", 2)
    got = reserve(machine, [a, b], 1)
    assert isinstance(got, commands.Reserved)
    for sealed, failed in (((a, a), ()), ((a,), (a,))):
        with pytest.raises(InvalidField, match="twice"):
            machine.step(events.Seal(got.op, sealed, failed), 2)
    machine.step(events.Seal(got.op, (a, b)), 3)
    machine.check_invariants()
    assert machine.match(KS, [a, b]) == 2
