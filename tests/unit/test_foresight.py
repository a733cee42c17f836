"""Predicted resumes, and the prefetches that follow."""

from __future__ import annotations

import numpy as np

from kvstore.core import commands, events
from kvstore.core.eviction import make_policy
from kvstore.core.foresight import Foresight
from kvstore.core.machine import Machine
from kvstore.core.state import Limits, TierConfig
from kvstore.core.types import BlockHash, Durability, KeyspaceId, SessionId, Tier

S = 10**9
SLOT = 4096
KS = KeyspaceId(b"k" * 32)
PATH = [BlockHash(f"x{i}".encode().ljust(16, b".")) for i in range(4)]


def test_a_tool_is_believed_once_it_has_a_past() -> None:
    foresight = Foresight()
    rng = np.random.default_rng(0)
    assert foresight.predict("bash") is None
    for wait in rng.lognormal(np.log(20), 0.5, 200):
        foresight.wait_ended("bash", int(wait * S))
    predicted = foresight.predict("bash")
    assert predicted is not None and 8 * S < predicted < 20 * S
    older = foresight.predict("bash", age_ns=40 * S)
    assert older is None or older >= 40 * S
    assert foresight.predict("python") is None


def waiting_machine() -> Machine:
    """Session "a" waits for a tool from time 1 s on; its four blocks are on NVMe only."""
    policy = lambda tier: make_policy("leaf-lru", tier)  # noqa: E731
    tiers = [
        TierConfig(Tier.DRAM, 4 * SLOT, policy, SLOT),
        TierConfig(Tier.NVME, 16 * SLOT, policy, SLOT, durable=True),
    ]
    machine = Machine(tiers, Limits(prefetch_lead_ns=2 * S))
    machine.step(events.RegisterKeyspace(KS, SLOT), 0)
    machine.step(events.OpenSession(SessionId("a"), KS), 0)
    store(machine, PATH, "a")
    other = [BlockHash(f"y{i}".encode().ljust(16, b".")) for i in range(4)]
    store(machine, other, None)
    machine.step(events.Lost(KS, other[3], Tier.DRAM), 1)
    for block_hash in reversed(other[:3]):
        machine.step(events.Lost(KS, block_hash, Tier.DRAM), 1)
    return machine


def store(machine: Machine, path: list[BlockHash], session: str | None) -> None:
    sid = SessionId(session) if session else None
    machine.step(events.Reserve(1, KS, path, 0, "c", Tier.DRAM, S, 0, sid), 1)
    out = machine.step(events.Seal(next(iter(machine._s.ops)), tuple(path)), 1)
    out += machine.step(events.Persist(2, KS, path, Durability.NVME, S), 1)
    for c in out:
        if isinstance(c, commands.Move):
            machine.step(events.MoveDone(c.op), 1)


def moves(out: list[commands.Command]) -> list[commands.Move]:
    return [c for c in out if isinstance(c, commands.Move)]


def test_blocks_rise_ahead_of_the_time_that_the_agent_said() -> None:
    machine = waiting_machine()
    hint = events.Signal(SessionId("a"), events.SignalKind.TOOL_START, "bash", 20 * S)
    [changed] = machine.step(hint, S)
    assert isinstance(changed, commands.SessionChanged) and changed.predicted_ns == 20 * S
    assert not moves(machine.step(events.Tick(), 15 * S))
    [move] = moves(machine.step(events.Tick(), 20 * S))
    assert (move.source, move.target, len(move.items)) == (Tier.NVME, Tier.DRAM, 4)
    machine.step(events.MoveDone(move.op), 20 * S)
    [got] = machine.step(events.Acquire(KS, PATH, "c", S), 21 * S)
    [plan] = machine.step(events.Restore(got.lease, 0, 4), 21 * S)
    assert {p.tier for p in plan.places} == {Tier.DRAM}
    assert machine.prefetches == {"started": 4, "used": 4, "wasted": 0}
    machine.check_invariants()


def test_a_wait_that_is_over_is_not_prefetched() -> None:
    machine = waiting_machine()
    machine.step(events.Signal(SessionId("a"), events.SignalKind.TOOL_START, "bash", 20 * S), S)
    machine.step(events.Signal(SessionId("a"), events.SignalKind.TOOL_END), 5 * S)
    machine.step(events.Signal(SessionId("a"), events.SignalKind.TOOL_START, "bash"), 6 * S)
    assert not moves(machine.step(events.Tick(), 20 * S))


def test_a_prefetch_that_nobody_read_is_counted_as_waste() -> None:
    machine = waiting_machine()
    machine.step(events.Signal(SessionId("a"), events.SignalKind.TOOL_START, "bash", 20 * S), S)
    [move] = moves(machine.step(events.Tick(), 20 * S))
    machine.step(events.MoveDone(move.op), 20 * S)
    store(machine, [BlockHash(f"z{i}".encode().ljust(16, b".")) for i in range(4)], None)
    assert machine.prefetches["wasted"] == 4
