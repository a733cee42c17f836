"""Seeded runs of a machine whose hands delay, fail and reorder completions. Invariants are checked after every step."""

from __future__ import annotations

import random

import pytest

from kvstore.core import commands, events
from kvstore.core.eviction import POLICIES, make_policy
from kvstore.core.machine import Machine
from kvstore.core.state import Limits, TierConfig
from kvstore.core.types import BlockHash, Durability, KeyspaceId, LeaseId, SessionId, Slot, Tier
from kvstore.errors import KVStoreError

SLOT = 4096
KS = [KeyspaceId(bytes([i]) * 32) for i in range(2)]
SIZES = [SLOT, 2 * SLOT]
Quotas = dict[tuple[str, Tier], int]


def chain(space: int, session: int, branch: int, length: int) -> list[BlockHash]:
    """A path: 3 blocks shared by all sessions, then the session's own; `branch` changes everything from block 6 on."""
    path = []
    for depth in range(length):
        owner = 0 if depth < 3 else 1 + session * 16 + (branch if depth >= 6 else 0)
        path.append(BlockHash(bytes([space]) + owner.to_bytes(7, "big") + depth.to_bytes(8, "big")))
    return path


class Driver:
    """Random clients and hands around one machine."""

    def __init__(self, seed: int, tiers: list[TierConfig], tombstones: int = 100, quotas: Quotas | None = None) -> None:
        self.rng = random.Random(seed)
        limits = Limits(
            move_bytes=0,
            quotas=quotas or {},
            num_tombstones=tombstones,
            num_sessions=12,
            num_leases=30,
            orphan_ttl_ns=5000,
            num_waiters=4,
        )
        self.machine = Machine(tiers, limits, notices=True)
        self.now = 0
        self.work: list[commands.Command] = []
        self.leases: list[tuple[LeaseId, int]] = []
        self.borrowed: list[tuple[LeaseId, Slot]] = []
        self.fills: list[tuple[int, list[BlockHash]]] = []
        self.reads: list[int] = []
        self.requests: dict[int, list[BlockHash]] = {}
        self.answered = 0
        self.errors = 0
        self.tiers = [c.tier for c in tiers]
        for ks, size in zip(KS, SIZES, strict=True):
            self.step(events.RegisterKeyspace(ks, size, "ab"[ks[0]]))

    def step(self, event: events.Event) -> list[commands.Command]:
        self.now += self.rng.randrange(0, 50)
        try:
            out = self.machine.step(event, self.now)
        except KVStoreError:
            self.errors += 1
            out = []
        for c in out:
            self._take(c)
        self.machine.check_invariants()
        return out

    def _take(self, c: commands.Command) -> None:
        if isinstance(c, commands.Move | commands.Unpublish | commands.Sync):
            self.work.append(c)
        elif isinstance(c, commands.Reserved):
            path = self.requests.pop(c.request)
            self.answered += 1
            granted = [h for h, st in zip(path, c.statuses, strict=True) if st == commands.ReserveStatus.GRANTED]
            if granted:
                self.fills.append((c.op, granted))
        elif isinstance(c, commands.Persisted):
            path = self.requests.pop(c.request)
            assert c.num_blocks <= len(path)
            self.answered += 1

    def hands(self) -> None:
        """Finish one piece of work: any, not the oldest; sometimes with failures."""
        if not self.work:
            return
        c = self.work.pop(self.rng.randrange(len(self.work)))
        if isinstance(c, commands.Move):
            bad = tuple(i for i in range(len(c.items)) if self.rng.random() < 0.1)
            corrupt = tuple(i for i in bad if self.rng.random() < 0.3)
            self.step(events.MoveDone(c.op, bad, corrupt, tier_dead=self.rng.random() < 0.02))
        elif isinstance(c, commands.Unpublish):
            self.step(events.UnpublishDone(c.op))
        elif isinstance(c, commands.Sync):
            self.step(events.SyncDone(c.op, self.rng.random() < 0.9))
        if self.rng.random() < 0.05:
            self.step(events.MoveDone(c.op))  # a second, stale completion

    def client(self) -> None:
        rng = self.rng
        space = rng.randrange(2)
        number = rng.randrange(8)
        sid = SessionId(f"s{space}-{number}")
        path = chain(space, number, rng.randrange(2), rng.randrange(1, 14))
        kind = rng.randrange(17)
        if kind == 0:
            self.step(events.OpenSession(sid, KS[space]))
        elif kind == 1:
            self.step(events.Signal(sid, rng.choice(list(events.SignalKind)), "bash", rng.choice([-1, 1000])))
        elif kind == 2:
            self.step(events.Fork(sid, SessionId(f"s{space}-{rng.randrange(8)}f")))
        elif kind == 3:
            self.step(events.Supersede(sid, path))
        elif kind == 4:
            self.step(events.EndSession(sid))
        elif kind in (5, 6):
            session = sid if rng.random() < 0.7 else None
            for c in self.step(
                events.Acquire(KS[space], path, f"c{number}", rng.randrange(10, 3000), session, rng.random() < 0.3)
            ):
                if isinstance(c, commands.Acquired) and c.lease:
                    self.leases.append((c.lease, c.num_blocks))
        elif kind in (7, 8, 9):
            request = self.answered + len(self.requests) + self.now * 1000
            first = rng.randrange(len(path)) if rng.random() < 0.3 else 0
            self.requests[request] = path[first:]
            tier = self.tiers[0] if rng.random() < 0.9 else rng.choice(self.tiers)
            before = self.errors
            self.step(
                events.Reserve(
                    request,
                    KS[space],
                    path,
                    first,
                    f"c{number}",
                    tier,
                    rng.randrange(10, 3000),
                    rng.choice([0, 500]),
                    sid,
                )
            )
            if self.errors > before:
                del self.requests[request]
        elif kind == 10 and self.fills:
            op, granted = self.fills.pop(rng.randrange(len(self.fills)))
            rng.shuffle(granted)
            cut = rng.randrange(len(granted) + 1) if rng.random() < 0.2 else len(granted)
            self.step(events.Seal(op, tuple(granted[:cut]), tuple(granted[cut:])))
        elif kind == 11 and self.leases:
            lease, count = self.leases[rng.randrange(len(self.leases))]
            for c in self.step(events.Restore(lease, 0, count)):
                if isinstance(c, commands.RestorePlan):
                    self.reads.append(c.op)
        elif kind == 12 and self.reads:
            op = self.reads.pop(rng.randrange(len(self.reads)))
            self.step(events.RestoreDone(op, tuple(i for i in range(3) if rng.random() < 0.1)))
        elif kind == 13 and self.leases:
            lease, _ = self.leases.pop(rng.randrange(len(self.leases)))
            self.step(events.Release((lease,)) if rng.random() < 0.8 else events.Renew((lease,), 1000))
        elif kind == 14:
            self._rare(sid, KS[space], path, number)
        elif kind == 15 and self.leases:
            lease, _ = self.leases[rng.randrange(len(self.leases))]
            for c in self.step(events.Borrow(lease, self.tiers[0], rng.randrange(1, 4))):
                if isinstance(c, commands.Borrowed):
                    self.borrowed += [(lease, slot) for slot in c.slots]
        elif kind == 16 and self.borrowed:
            lease, slot = self.borrowed.pop(rng.randrange(len(self.borrowed)))
            if rng.random() < 0.7:
                depth = next((n for held, n in self.leases if held == lease), 0)
                longer = chain(space, number, 0, depth + 1)
                self.step(events.Adopt(lease, self.tiers[0], longer[-1], slot))
            else:
                self.step(events.GiveBack(lease, (slot,)))

    def _rare(self, sid: SessionId, ks: KeyspaceId, path: list[BlockHash], number: int) -> None:
        rng = self.rng
        kind = rng.randrange(6)
        if kind == 0:
            self.step(events.Detach(f"c{number}"))
        elif kind == 1:
            self.step(events.Lost(ks, rng.choice(path), rng.choice(self.tiers)))
        elif kind == 2:
            self.step(events.Prefetch(sid))
        elif kind == 3:
            self.step(events.TierAlive(self.tiers[-1], True))
        elif kind == 4:
            request = self.answered + len(self.requests) + self.now * 1000 + 7
            self.requests[request] = path
            before = self.errors
            self.step(events.Persist(request, ks, path, rng.choice(list(Durability)), 700))
            if self.errors > before:
                del self.requests[request]
        else:
            self.now += rng.randrange(3000)
            self.step(events.Tick())

    def settle(self) -> None:
        """Everybody leaves, all work ends: nothing may be leased, held, filling or waiting."""
        for _ in range(300):
            while self.work:
                self.hands()
            self.now += 10_000
            self.step(events.Tick())
        m = self.machine
        assert m.num_leases == 0 and not self.requests
        assert not self.work and m.num_ops == 0
        for pool in m.pools():
            assert pool.num_filling == pool.num_draining == pool.num_borrowed == 0


def tier(which: Tier, blocks: int, policy: str, durable: bool = False) -> TierConfig:
    return TierConfig(
        which,
        blocks * SLOT,
        lambda t: make_policy(policy, t),
        segment_bytes=4 * SLOT,
        clean_above=0.3,
        free_target=0.1 if durable else 0.0,
        durable=durable,
    )


SETUPS = {
    "node": [(Tier.DRAM, 24, False), (Tier.NVME, 48, True)],
    "engine": [(Tier.HBM, 32, False)],
    "embedded": [(Tier.HBM, 16, False), (Tier.DRAM, 24, False), (Tier.NVME, 48, True)],
    "dram only": [(Tier.DRAM, 24, False)],
}


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("policy", ["leaf-lru", "session"])
@pytest.mark.parametrize("seed", range(6))
def test_random_clients_and_hands(setup: str, policy: str, seed: int) -> None:
    run_and_settle(setup, policy, seed, 1200)


@pytest.mark.parametrize("setup", ["node", "dram only"])
@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"leaf-lru", "session"}))
@pytest.mark.parametrize("seed", range(2))
def test_every_policy_keeps_the_invariants(setup: str, policy: str, seed: int) -> None:
    run_and_settle(setup, policy, seed, 700)


def run_and_settle(setup: str, policy: str, seed: int, num_steps: int) -> None:
    driver = Driver(seed, [tier(t, n, policy, d) for t, n, d in SETUPS[setup]])
    for _ in range(num_steps):
        if driver.rng.random() < 0.35:
            driver.hands()
        else:
            driver.client()
    driver.settle()
    assert driver.answered > 50


def test_same_seed_same_commands() -> None:
    def run() -> list[str]:
        driver = Driver(5, [tier(t, n, "session", d) for t, n, d in SETUPS["node"]])
        log = []
        for _ in range(300):
            driver.hands() if driver.rng.random() < 0.35 else driver.client()
            log.append(repr(driver.work))
        return log

    assert run() == run()


@pytest.mark.parametrize("seed", range(4))
def test_tenants_stay_within_their_quotas(seed: int) -> None:
    quotas = {("b", Tier.DRAM): 6 * SLOT, ("b", Tier.NVME): 20 * SLOT}
    driver = Driver(seed, [tier(t, n, "leaf-lru", d) for t, n, d in SETUPS["node"]], quotas=quotas)
    for _ in range(1200):
        driver.hands() if driver.rng.random() < 0.35 else driver.client()
        for which in (Tier.DRAM, Tier.NVME):
            pool = driver.machine.pool(which)
            assert pool is not None and pool.used_by["b"] <= quotas["b", which]
    driver.settle()
