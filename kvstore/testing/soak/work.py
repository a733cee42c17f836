"""What a client of the soak does: offloads, restores, forks, supersessions, ends, prefetches, all judged.

Contexts are named by a seed, so any process can make them again. What an offload acknowledged as durable goes into a
ledger; nothing in the ledger may be missing after a kill, as long as no more is written than NVMe holds.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass

from kvstore.core.hashing import TokenChain
from kvstore.core.types import Durability
from kvstore.errors import CapacityError, RequestError, TierError
from kvstore.testing.soak.tally import Tally
from kvstore.testing.stub import Seen, StubEngine
from kvstore_client.session import Session

LENGTHS = (2, 8, 24, 48)
SHARED = 2


@dataclass(frozen=True)
class Promise:
    """`num_blocks` leading blocks of this context were acknowledged as durable."""

    seed: int
    length: int
    branch: int
    num_blocks: int


class Ledger:
    """Promises of one era. Thread-safe. `num_offered` counts blocks that may have been stored, promised or not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, int, int], Promise] = {}
        self.num_offered = 0

    def offer(self, num_blocks: int) -> None:
        """About to offload so many blocks."""
        with self._lock:
            self.num_offered += num_blocks

    def promise(self, p: Promise) -> None:
        """Acknowledged."""
        with self._lock:
            self._kept[p.seed, p.length, p.branch] = p

    def all(self) -> list[Promise]:
        """Everything promised so far."""
        with self._lock:
            return list(self._kept.values())


class Worker:
    """One client's random work. Errors that a client must expect (full, away, expired) are part of it."""

    def __init__(self, engine: StubEngine, tally: Tally, ledger: Ledger, seed: int, seeds: range) -> None:
        self.engine = engine
        self.tally = tally
        self.ledger = ledger
        self.rng = random.Random(seed)
        self.seeds = seeds
        self.fresh = iter(seeds)
        self.known: list[tuple[int, int, int]] = []
        self.sessions: dict[str, Session] = {}
        self.name = f"{seed}"

    def step(self) -> None:
        """One operation."""
        self.tally.add("operations")
        try:
            self.rng.choices(
                [self.offload, self.restore, self.signal, self.fork, self.supersede, self.end, self.prefetch],
                [30, 40, 10, 5, 5, 5, 5],
            )[0]()
        except (CapacityError, TierError, RequestError):
            self.tally.add("refused")

    def context(self, new: bool) -> tuple[int, int, int]:
        """Seed, length, branch; of a context seen before unless `new`."""
        if new or not self.known:
            made = (next(self.fresh, self.seeds[-1]), self.rng.choice(LENGTHS), self.rng.randrange(2))
            self.known.append(made)
            return made
        return self.rng.choice(self.known)

    def offload(self) -> None:
        seed, length, branch = self.context(new=self.rng.random() < 0.7)
        durability = self.rng.choice([Durability.DRAM, Durability.NVME, Durability.NVME, Durability.SYNCED])
        chain = self.engine.chain(seed, length, branch, SHARED)
        session = self.rng.choice([*self.sessions, ""])
        self.ledger.offer(length)
        done = self.engine.offload(chain, durability, session)
        self.tally.add("blocks_written", done.num_copied)
        if durability != Durability.DRAM and done.num_blocks:
            self.ledger.promise(Promise(seed, length, branch, done.num_blocks))

    def restore(self) -> None:
        seed, length, branch = self.context(new=False)
        chain = self.engine.chain(seed, length, branch, SHARED)
        self.judged(chain, self.engine.restore(chain, self.rng.choice([*self.sessions, ""])))

    def judged(self, chain: TokenChain, seen: Seen) -> None:
        """Count one restore."""
        self.tally.add("blocks_restored", seen.num_ok)
        self.tally.add("blocks_verified", seen.num_ok - len(seen.wrong))
        self.tally.bad("wrong_bytes_blocks", len(seen.wrong), f"blocks {seen.wrong[:5]} of {chain.hash_at(0).hex()}")

    def signal(self) -> None:
        session = self.some_session()
        kind = self.rng.randrange(4)
        if kind == 0:
            session.turn_start()
        elif kind == 1:
            session.tool_start(self.rng.choice(["bash", "search", "edit"]), self.rng.choice([0.0, 0.5, 20.0]))
        elif kind == 2:
            session.tool_end()
        else:
            session.turn_end()

    def some_session(self) -> Session:
        """An open session, opened when there is none; at most four."""
        if len(self.sessions) < 4:
            name = f"{self.name}-{self.rng.randrange(1000)}"
            self.sessions[name] = self.engine.client.session(name, self.engine.keyspace)
        return self.rng.choice(list(self.sessions.values()))

    def fork(self) -> None:
        parent = self.some_session()
        name = f"{self.name}-f{self.rng.randrange(1000)}"
        if name not in self.sessions:
            self.sessions[name] = parent.fork(name)

    def supersede(self) -> None:
        session = self.some_session()
        seed, length, branch = self.context(new=False)
        session.supersede(self.engine.chain(seed, max(1, length // 2), branch, min(SHARED, length // 2)).tokens)

    def end(self) -> None:
        if self.sessions:
            self.sessions.pop(self.rng.choice(list(self.sessions))).end()

    def prefetch(self) -> None:
        self.engine.client.prefetch(self.some_session().id)


def check_promise(engine: StubEngine, tally: Tally, promise: Promise, may_be_lost: bool = False) -> None:
    """Restore a promised context: what was acknowledged must be there, and right."""
    chain = engine.chain(promise.seed, promise.length, promise.branch, SHARED)
    seen = engine.restore(chain)
    tally.add("blocks_restored", seen.num_ok)
    tally.add("blocks_verified", seen.num_ok - len(seen.wrong))
    tally.bad("wrong_bytes_blocks", len(seen.wrong), f"blocks {seen.wrong[:5]} of promised context {promise}")
    missing = max(0, promise.num_blocks - seen.num_ok)
    if may_be_lost:
        tally.add("blocks_lost_to_rot", missing)
    else:
        text = f"{missing} of {promise}; restore said {seen.result.errors if seen.result else 'nothing held'}"
        tally.bad("durable_blocks_lost", missing, text)
