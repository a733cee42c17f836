"""The machine against a reference that a reader can check at a glance: a few sets and dictionaries.

The reference knows nothing of slots, trees, policies or moves. It knows what clients were told and what the hands
finished, and from that what must be resident, what may be, and what is leased:

    known     blocks that were sealed and never reported lost: only these may be matched
    leased    leases and the prefix each protects: all of it must stay resident, whatever is evicted
    durable   copies that a finished, good move put on NVMe: only these may be promised as durable

Hands finish work in any order, fail at will, and are late.
"""

from __future__ import annotations

from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvstore.core import commands, events
from kvstore.core.commands import ReserveStatus
from kvstore.core.eviction import make_policy
from kvstore.core.machine import Machine
from kvstore.core.state import Limits, TierConfig
from kvstore.core.types import BlockHash, Durability, KeyspaceId, LeaseId, SessionId, Tier
from kvstore.errors import KVStoreError

SLOT = 4096
SPACE = KeyspaceId(b"m" * 32)
DRAM_BLOCKS, NVME_BLOCKS = 12, 24
TTL_NS = 1_000


def path(branch: int, length: int) -> list[BlockHash]:
    """Two blocks shared by all branches, then the branch's own."""
    return [BlockHash(bytes([0 if d < 2 else 1 + branch]) * 15 + bytes([d])) for d in range(length)]


PATHS = st.builds(path, st.integers(0, 4), st.integers(1, 7))
SESSIONS = st.integers(0, 3).map(lambda n: SessionId(f"s{n}"))


class MachineModel(RuleBasedStateMachine):
    leases: Bundle[tuple[LeaseId, tuple[BlockHash, ...]]] = Bundle("leases")
    fills: Bundle[tuple[int, tuple[BlockHash, ...]]] = Bundle("fills")

    @initialize(policy=st.sampled_from(["leaf-lru", "session"]))
    def start(self, policy: str) -> None:
        tiers = [
            TierConfig(Tier.DRAM, DRAM_BLOCKS * SLOT, lambda t: make_policy(policy, t), 4 * SLOT, clean_above=0.4),
            TierConfig(
                Tier.NVME, NVME_BLOCKS * SLOT, lambda t: make_policy(policy, t), 4 * SLOT, free_target=0.1, durable=True
            ),
        ]
        self.machine = Machine(tiers, Limits(num_leases=8, num_sessions=3, orphan_ttl_ns=5_000, num_waiters=3))
        self.now = 0
        self.request = 0
        self.work: list[Any] = []
        self.known: set[BlockHash] = set()
        self.durable: set[BlockHash] = set()
        self.leased: dict[LeaseId, tuple[int, list[BlockHash]]] = {}
        self.asked: dict[int, list[BlockHash]] = {}
        self.persisting: dict[int, tuple[list[BlockHash], Durability]] = {}
        self.late_fills: list[tuple[int, tuple[BlockHash, ...]]] = []
        self.step(events.RegisterKeyspace(SPACE, SLOT))

    def step(self, event: events.Event) -> list[Any]:
        """Step at the next moment; take work and late answers; None of a refused event may have changed anything."""
        self.now += 1
        try:
            out = self.machine.step(event, self.now)
        except KVStoreError:
            return []
        for command in out:
            if isinstance(command, commands.Move | commands.Unpublish | commands.Sync):
                self.work.append(command)
                if isinstance(command, commands.Unpublish):
                    self.durable -= {block_hash for _, block_hash in command.blocks}
            elif isinstance(command, commands.Reserved):
                self.take_reserved(command)
            elif isinstance(command, commands.Persisted):
                self.take_persisted(command)
            elif isinstance(command, commands.LeaseEnded):
                expires, _ = self.leased.pop(command.lease)
                assert expires <= self.now, "a lease ended before its time"
        return out

    def take_reserved(self, command: commands.Reserved) -> None:
        asked = self.asked.pop(command.request)
        granted = tuple(h for h, status in zip(asked, command.statuses, strict=True) if status == ReserveStatus.GRANTED)
        assert not any(self.machine.residency(SPACE, h, Tier.DRAM) is None for h in granted)
        if granted:
            self.late_fills.append((command.op, granted))

    def take_persisted(self, command: commands.Persisted) -> None:
        asked, durability = self.persisting.pop(command.request)
        promised = asked[: command.num_blocks]
        assert set(promised) <= self.known, "a promise about a block nobody sealed"
        if durability != Durability.DRAM:
            assert set(promised) <= self.durable, "a promise of durability without a finished copy"

    # ---- clients

    @rule(target=fills, hashes=PATHS, session=SESSIONS, wait=st.sampled_from([0, 50]))
    def reserve(self, hashes: list[BlockHash], session: SessionId, wait: int) -> Any:
        self.request += 1
        self.asked[self.request] = hashes
        event = events.Reserve(self.request, SPACE, hashes, 0, "client", Tier.DRAM, TTL_NS, wait, session)
        self.step(event)
        return self.new_fills()

    def new_fills(self) -> Any:
        found, self.late_fills = self.late_fills, []
        return multiple(*found)

    @rule(fill=consumes(fills), num_good=st.integers(0, 7))
    def seal(self, fill: tuple[int, tuple[BlockHash, ...]], num_good: int) -> None:
        op, granted = fill
        good, failed = granted[:num_good], granted[num_good:]
        before = set(self.known)
        self.known |= set(good)  # a wait for them may be answered in the same step
        if not any(isinstance(c, commands.Sealed) for c in self.step(events.Seal(op, good, failed))):
            self.known = before

    @rule(target=leases, hashes=PATHS, session=st.none() | SESSIONS)
    def acquire(self, hashes: list[BlockHash], session: SessionId | None) -> Any:
        expected = self.machine.match(SPACE, hashes)
        for c in self.step(events.Acquire(SPACE, hashes, "client", TTL_NS, session)):
            if isinstance(c, commands.Acquired):
                assert c.num_blocks == expected, "Match and Acquire differ"
                if c.lease:
                    self.leased[c.lease] = (self.now + TTL_NS, hashes[: c.num_blocks])
                    return (c.lease, tuple(hashes[: c.num_blocks]))
        return multiple()

    @rule(lease=consumes(leases))
    def release(self, lease: tuple[LeaseId, tuple[BlockHash, ...]]) -> None:
        self.step(events.Release((lease[0],)))
        self.leased.pop(lease[0], None)

    @rule(lease=leases, corrupt=st.sets(st.integers(0, 6), max_size=1))
    def restore(self, lease: tuple[LeaseId, tuple[BlockHash, ...]], corrupt: set[int]) -> None:
        for c in self.step(events.Restore(lease[0], 0, len(lease[1]))):
            if isinstance(c, commands.RestorePlan):
                assert [p.block.hash for p in c.places] == list(lease[1][: len(c.places)])
                self.lost(lease[1][i] for i in corrupt if i < len(c.places))
                self.step(events.RestoreDone(c.op, tuple(corrupt)))

    def lost(self, hashes: Any) -> None:
        """A copy was wrong: nothing may be concluded about these blocks, nor about what a lease on them protects."""
        for block_hash in hashes:
            for lease, (expires, held) in list(self.leased.items()):
                if block_hash in held:
                    self.leased[lease] = (expires, held[: held.index(block_hash)])

    @rule(hashes=PATHS, durability=st.sampled_from(list(Durability)), wait=st.sampled_from([0, 50, 500]))
    def persist(self, hashes: list[BlockHash], durability: Durability, wait: int) -> None:
        self.request += 1
        self.persisting[self.request] = (hashes, durability)
        if (
            not self.step(events.Persist(self.request, SPACE, hashes, durability, wait))
            and self.request in self.persisting
        ):
            waiting = {w.request for w in self.machine._s.persists}
            if self.request not in waiting:  # refused
                del self.persisting[self.request]

    @rule(session=SESSIONS, kind=st.sampled_from(list(events.SignalKind)))
    def signal(self, session: SessionId, kind: events.SignalKind) -> None:
        self.step(events.Signal(session, kind, "bash"))

    @rule(session=SESSIONS)
    def open(self, session: SessionId) -> None:
        self.step(events.OpenSession(session, SPACE))

    @rule(session=SESSIONS)
    def end(self, session: SessionId) -> None:
        self.step(events.EndSession(session))

    @rule(session=SESSIONS, hashes=PATHS)
    def supersede(self, session: SessionId, hashes: list[BlockHash]) -> None:
        self.step(events.Supersede(session, hashes))

    @rule(session=SESSIONS)
    def prefetch(self, session: SessionId) -> None:
        self.step(events.Prefetch(session))

    @rule(hashes=PATHS)
    def probe(self, hashes: list[BlockHash]) -> None:
        before = sorted(self.machine.space(SPACE).blocks)
        assert set(hashes[: self.machine.match(SPACE, hashes)]) <= self.known
        assert sorted(self.machine.space(SPACE).blocks) == before

    # ---- hands and time

    @precondition(lambda self: self.work)
    @rule(data=st.data(), fails=st.sets(st.integers(0, 7), max_size=2), dies=st.booleans())
    def hand(self, data: st.DataObject, fails: set[int], dies: bool) -> None:
        """Finish any piece of work."""
        command = self.work.pop(data.draw(st.integers(0, len(self.work) - 1)))
        if isinstance(command, commands.Move):
            failed = tuple(i for i in sorted(fails) if i < len(command.items))
            if command.target == Tier.NVME:
                self.durable |= {m.block.hash for i, m in enumerate(command.items) if i not in failed}
            self.step(events.MoveDone(command.op, failed, (), dies and not failed and len(fails) == 1))
        elif isinstance(command, commands.Unpublish):
            self.step(events.UnpublishDone(command.op))
        else:
            self.step(events.SyncDone(command.op, not fails))

    @rule()
    def revive(self) -> None:
        self.step(events.TierAlive(Tier.NVME, True))

    @rule(by=st.sampled_from([1, 100, 2_000]))
    def tick(self, by: int) -> None:
        self.now += by
        self.step(events.Tick())
        assert not any(expires <= self.now for expires, _ in self.leased.values()), "a lease outlived its time"

    @rule()
    def detach(self) -> None:
        self.step(events.Detach("client"))
        self.leased.clear()
        assert self.machine.num_leases == 0

    # ---- what holds after every step

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "machine"):
            self.machine.check_invariants()

    @invariant()
    def leased_blocks_are_there(self) -> None:
        for _, held in getattr(self, "leased", {}).values():
            assert self.machine.match(SPACE, held) == len(held), "a leased prefix was evicted"

    @invariant()
    def nothing_is_matched_that_was_not_sealed(self) -> None:
        for branch in range(5 if hasattr(self, "machine") else 0):
            whole = path(branch, 7)
            assert set(whole[: self.machine.match(SPACE, whole)]) <= self.known

    def teardown(self) -> None:
        """Everybody leaves: everything ends."""
        if not hasattr(self, "machine"):
            return
        self.step(events.Detach("client"))
        self.leased.clear()
        for _ in range(40):
            while self.work:
                command = self.work.pop()
                if isinstance(command, commands.Move):
                    if command.target == Tier.NVME:
                        self.durable |= {m.block.hash for m in command.items}
                    self.step(events.MoveDone(command.op))
                elif isinstance(command, commands.Unpublish):
                    self.step(events.UnpublishDone(command.op))
                else:
                    self.step(events.SyncDone(command.op, True))
            self.now += 10_000
            self.step(events.Tick())
        assert self.machine.num_leases == self.machine.num_ops == 0
        assert not self.asked and not self.persisting
        for pool in self.machine.pools():
            assert pool.num_filling == pool.num_draining == pool.num_borrowed == 0


# No shrinking: with this many rules it takes longer than reading what failed.
MachineModel.TestCase.settings = settings(
    settings(), stateful_step_count=50, max_examples=100, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
TestMachineAgainstModel = MachineModel.TestCase
