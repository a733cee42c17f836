"""One machine, a node's two tiers, agents that come back, and hands that fail now and then: millions of operations.

Operations are events given to the machine. Invariants are checked every `CHECK_EVERY` of them (that costs O(n)), the
hit rate is taken window by window and must not decay: a leak of slots or leases shows there before it shows anywhere
else.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

from kvstore.core import commands, events
from kvstore.core.commands import ReserveStatus
from kvstore.core.eviction import make_policy
from kvstore.core.machine import Machine
from kvstore.core.state import Limits, TierConfig
from kvstore.core.types import BlockHash, Durability, KeyspaceId, LeaseId, OpId, SessionId, Tier
from kvstore.errors import KVStoreError
from kvstore.testing.soak.tally import Tally

SLOT = 4096
SPACE = KeyspaceId(b"s" * 32)
NUM_AGENTS = 160
CHECK_EVERY = 2_000
NUM_WINDOWS = 10
WINDOW_MIN = 20_000
"""Operations in a window before its hit rate means something: the tiers fill during the first one."""
STEADY = 0.8
"""The last windows' hit rate must reach this share of the first ones'."""
MS = 1_000_000


class Agent:
    """A context that grows turn by turn, and starts anew (another generation) when it is long."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.generation = 0
        self.length = 4

    @property
    def session(self) -> SessionId:
        return SessionId(f"a{self.number}-{self.generation}")

    def path(self) -> list[BlockHash]:
        """Two blocks shared by all, then its own."""
        own = (1 + self.number) << 32 | self.generation
        return [
            BlockHash((0 if depth < 2 else own).to_bytes(8, "big") + depth.to_bytes(8, "big"))
            for depth in range(self.length)
        ]


class Driver:
    """Random agents and hands around one machine; `num_ops` counts events."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        tiers = [
            TierConfig(Tier.DRAM, 512 * SLOT, lambda t: make_policy("session", t), 32 * SLOT),
            TierConfig(
                Tier.NVME, 2048 * SLOT, lambda t: make_policy("session", t), 32 * SLOT, free_target=0.02, durable=True
            ),
        ]
        limits = Limits(num_sessions=400, num_leases=2_000, orphan_ttl_ns=500 * MS, num_tombstones=1_000)
        self.machine = Machine(tiers, limits, notices=True)
        self.now_ns = 0
        self.num_ops = 0
        self.num_errors = 0
        self.num_faults = 0
        self.request = 0
        self.work: list[commands.Command] = []
        self.leases: list[LeaseId] = []
        self.fills: list[tuple[OpId, list[BlockHash]]] = []
        self.waiting: dict[int, list[BlockHash]] = {}
        self.reads: list[OpId] = []
        self.agents = [Agent(n) for n in range(NUM_AGENTS)]
        self.num_asked = 0
        self.num_hit = 0
        self.step(events.RegisterKeyspace(SPACE, SLOT))

    def step(self, event: events.Event) -> list[commands.Command]:
        """One operation; answers are sorted into what the driver has to do next."""
        self.num_ops += 1
        self.now_ns += self.rng.randrange(2 * MS)
        try:
            out = self.machine.step(event, self.now_ns)
        except KVStoreError:
            self.num_errors += 1
            return []
        for command in out:
            if isinstance(command, commands.Move | commands.Unpublish | commands.Sync):
                self.work.append(command)
            elif isinstance(command, commands.Reserved):
                path = self.waiting.pop(command.request, [])
                pairs = zip(path, command.statuses, strict=True)
                granted = [h for h, status in pairs if status == ReserveStatus.GRANTED]
                if granted:
                    self.fills.append((command.op, granted))
        return out

    def turn(self) -> None:
        """One agent's step, then the hands catch up with most of the work."""
        agent = self.rng.choice(self.agents)
        self.rng.choices([self.come_back, self.grow, self.wait, self.rare], [10, 10, 6, 1])[0](agent)
        while self.fills and self.rng.random() < 0.9:
            self.seal()
        while self.work and self.rng.random() < 0.9:
            self.hand()
        if self.rng.random() < 0.05:
            self.step(events.Tick())

    def come_back(self, agent: Agent) -> None:
        """Acquire, restore, release; some forget to release."""
        self.step(events.OpenSession(agent.session, SPACE))
        self.step(events.Signal(agent.session, events.SignalKind.TURN_START))
        path = agent.path()
        for c in self.step(events.Acquire(SPACE, path, f"c{agent.number % 7}", 200 * MS, agent.session)):
            if isinstance(c, commands.Acquired):
                self.num_asked += len(path)
                self.num_hit += c.num_blocks
                if c.lease:
                    self.restore(c)

    def restore(self, got: commands.Acquired) -> None:
        for c in self.step(events.Restore(got.lease, 0, got.num_blocks)):
            if isinstance(c, commands.RestorePlan) and self.rng.random() < 0.95:
                bad = tuple(i for i in range(len(c.places)) if self.rng.random() < 0.0005)
                self.num_faults += len(bad)
                self.step(events.RestoreDone(c.op, bad))
        if self.rng.random() < 0.95:
            self.step(events.Release((got.lease,)))

    def grow(self, agent: Agent) -> None:
        """A turn's new blocks are reserved, to be sealed soon; long contexts are ended and replaced."""
        agent.length += self.rng.randrange(1, 5)
        if agent.length > 40:
            self.step(events.EndSession(agent.session))
            agent.generation += 1
            agent.length = 4
            self.step(events.OpenSession(agent.session, SPACE))
        self.request += 1
        path = agent.path()
        self.waiting[self.request] = path
        owner = f"c{agent.number % 7}"
        event = events.Reserve(
            self.request, SPACE, path, 0, owner, Tier.DRAM, 400 * MS, self.rng.choice([0, 50 * MS]), agent.session
        )
        self.step(event)

    def wait(self, agent: Agent) -> None:
        kind = self.rng.choice(list(events.SignalKind))
        self.step(events.Signal(agent.session, kind, "bash", self.rng.choice([-1, 100 * MS])))
        if self.rng.random() < 0.3:
            self.step(events.Prefetch(agent.session))

    def rare(self, agent: Agent) -> None:
        kind = self.rng.randrange(5)
        if kind == 0:
            self.step(events.Detach(f"c{agent.number % 7}"))
        elif kind == 1:
            self.num_faults += 1
            self.step(events.Lost(SPACE, self.rng.choice(agent.path()), self.rng.choice([Tier.DRAM, Tier.NVME])))
        elif kind == 2:
            self.request += 1
            durability = self.rng.choice(list(Durability))
            self.step(events.Persist(self.request, SPACE, agent.path(), durability, 100 * MS))
        elif kind == 3:
            self.step(events.Fork(agent.session, SessionId(f"f{self.num_ops % 50}")))
        else:
            self.step(events.Supersede(agent.session, agent.path()[: agent.length // 2]))

    def seal(self) -> None:
        op, granted = self.fills.pop(self.rng.randrange(len(self.fills)))
        if self.rng.random() < 0.01:
            return  # a client that died: the reservation must expire
        cut = len(granted) if self.rng.random() < 0.98 else self.rng.randrange(len(granted))
        self.step(events.Seal(op, tuple(granted[:cut]), tuple(granted[cut:])))

    def hand(self) -> None:
        """Finish one piece of work, any of those that run; one in a hundred fails."""
        command = self.work.pop(self.rng.randrange(len(self.work)))
        if isinstance(command, commands.Move):
            failed = tuple(i for i in range(len(command.items)) if self.rng.random() < 0.01)
            corrupt = tuple(i for i in failed if self.rng.random() < 0.2)
            dead = self.rng.random() < 0.001
            self.num_faults += len(failed) + dead
            self.step(events.MoveDone(command.op, failed, corrupt, dead))
            if dead:
                self.step(events.TierAlive(command.target, True))
        elif isinstance(command, commands.Unpublish):
            self.step(events.UnpublishDone(command.op))
        elif isinstance(command, commands.Sync):
            self.step(events.SyncDone(command.op, self.rng.random() < 0.95))

    def settle(self) -> None:
        """Everybody leaves and all work ends."""
        for number in range(7):
            self.step(events.Detach(f"c{number}"))
        for _ in range(100):
            while self.work:
                self.hand()
            self.now_ns += 1_000 * MS
            self.step(events.Tick())


def soak_machine(tally: Tally, seed: int, stop: Callable[[], bool], num_operations: int) -> None:
    """Until `num_operations` events (0: until `stop()`)."""
    driver = Driver(seed)
    rates: list[float] = []
    window = max(CHECK_EVERY, num_operations // NUM_WINDOWS) if num_operations else 50_000
    next_check, next_window, counted = CHECK_EVERY, window, 0
    try:
        while not stop() and not (num_operations and driver.num_ops >= num_operations):
            driver.turn()
            if driver.num_ops >= next_check:
                driver.machine.check_invariants()
                tally.add("operations", driver.num_ops - counted)
                counted, next_check = driver.num_ops, driver.num_ops + CHECK_EVERY
            if driver.num_ops >= next_window:
                rates.append(driver.num_hit / max(1, driver.num_asked))
                driver.num_hit = driver.num_asked = 0
                next_window += window
        driver.settle()
        driver.machine.check_invariants()
    except AssertionError as error:
        tally.bad("broken_invariants", 1, f"after {driver.num_ops} operations: {error}")
    tally.add("operations", driver.num_ops - counted)
    tally.fault("machine_level", driver.num_faults)
    _judge(driver, rates, window, tally)


def _judge(driver: Driver, rates: list[float], window: int, tally: Tally) -> None:
    machine = driver.machine
    for pool in machine.pools():
        stuck = pool.num_filling + pool.num_draining + pool.num_borrowed
        tally.bad("leaked_slots", stuck, f"{pool.tier.label} of the machine")
    tally.bad("leaked_leases", machine.num_leases, "of the machine")
    tally.bad("leaked_operations", machine.num_ops, "of the machine")
    steady = rates[1:]  # the first window fills the tiers
    if len(steady) >= 4 and window >= WINDOW_MIN:
        half = len(steady) // 2
        first, last = statistics.mean(steady[:half]), statistics.mean(steady[half:])
        tally.ratios["hit_rate_last_half_over_first_half"] = (last / first if first else 0.0, STEADY)
        tally.ratios["hit_rate"] = (last, 0.0)
