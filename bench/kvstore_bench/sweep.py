"""Policies over capacities of one trace, with the ceiling and the bound beside them.

Every point gives two figures: `blocks`, the share of block references that hit, and `tokens`, the share of input
tokens that need no prefill (only the leading run of a request's blocks counts). Capacities are numbers of blocks.

A name by itself is the compiled flat form. `machine:NAME` is the service's own policy of that name in the service's own
machine: slower by orders of magnitude, leaves only, and the only form of what needs sessions (`machine:tool-ttl`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks import doubling_depth
from kvstore.core.eviction import POLICIES as CORE_POLICIES
from kvstore_bench.flat import bounds, classic
from kvstore_bench.flat.learned import session_hits
from kvstore_bench.flat.runs import leading_runs
from kvstore_bench.losses import Lost, causes, lost
from kvstore_bench.models import Model
from kvstore_bench.points import Kept, Point, point_key, trace_digest
from kvstore_bench.replay import replay_machine
from kvstore_bench.traces.model import Trace

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
T = TypeVar("T")

POLICIES = (
    "infinite",
    "optimum",
    "session",
    "session+ends",
    "session-time",
    "session-time+ends",
    "leaf-lru",
    "lru",
    "fifo",
    "lfu",
    "sieve",
    "arc",
    "s3-fifo",
    "w-tinylfu",
    "gdsf",
    "belady",
)
BY_TIME = ("session-time", "session-time+ends")
"""`session` with blocks counted by the time to compute them; they need a model."""
MACHINE = "machine:"
MACHINE_POLICIES = tuple(MACHINE + name for name in CORE_POLICIES)


@dataclass
class Simulator:
    """Simulations of one trace; shared passes (stack distances, next uses) are made once.

    With `kept`, points that were finished before are taken from there, and new ones go there.
    """

    trace: Trace
    kept: Kept | None = None
    model: Model | None = None

    @property
    def doubles_at(self) -> int:
        """As in `Share`, for the model. Raises ValueError without one."""
        if self.model is None:
            raise ValueError("session-time counts computing time: name a model")
        return doubling_depth(self.model.doubles_at, self.trace.block_tokens)

    @cached_property
    def digest(self) -> str:
        return trace_digest(self.trace)

    @cached_property
    def distances(self) -> npt.NDArray[np.int32]:
        return bounds.leaf_lru_distances(self.trace.ids, self.trace.offsets, self.trace.num_blocks)

    @cached_property
    def following(self) -> I64:
        return bounds.next_uses(self.trace.ids, self.trace.num_blocks)

    @cached_property
    def causes(self) -> U8:
        return causes(self.trace)

    def lost(self, point: Point) -> Lost:
        """Where the misses of a point come from."""
        return lost(self.trace, self.causes, point.runs)

    def point(self, policy: str, capacity: int) -> Point:
        """One policy at one capacity (in blocks), simulated unless it was kept."""
        if self.kept is None:
            return aside(lambda: self._simulate(policy, capacity))
        counted = f" {self.doubles_at}" if policy in BY_TIME else ""
        key = point_key(self.digest, policy + counted, capacity)
        found = self.kept.find(key)
        if found is None:
            found = aside(lambda: self._simulate(policy, capacity))
            self.kept.add(key, self.trace.name, found)
        return found

    def _simulate(self, policy: str, capacity: int) -> Point:
        begin = time.perf_counter()
        if policy.startswith("session"):
            doubles_at = self.doubles_at if policy in BY_TIME else 0
            runs = session_hits(self.trace, capacity, signal_ends=policy.endswith("+ends"), doubles_at=doubles_at)
            found = int(runs.sum())
        elif policy in MACHINE_POLICIES:
            size = max(1, min(capacity, self.trace.num_blocks))  # larger holds no more, and costs tables
            runs = replay_machine(self.trace, policy.removeprefix(MACHINE), size).hits
            found = int(runs.sum())
        else:
            hits = self.hits(policy, capacity)
            runs, found = leading_runs(hits, self.trace.offsets), int(hits.sum())
        seconds = time.perf_counter() - begin
        blocks = found / max(1, self.trace.num_references)
        return Point(policy, capacity, blocks, self.tokens(runs) / max(1, self.trace.total_tokens), seconds, runs)

    def hits(self, policy: str, capacity: int) -> U8:
        """[N] 1 per reference that hits. Raises ValueError for an unknown policy."""
        ids, num_blocks = self.trace.ids, self.trace.num_blocks
        table: dict[str, Callable[[], U8]] = {
            "infinite": lambda: (self.distances > 0).astype(np.uint8),
            "optimum": lambda: bounds.belady(ids, num_blocks, capacity, self.following),
            "leaf-lru": lambda: ((self.distances > 0) & (self.distances <= capacity)).astype(np.uint8),
            "lru": lambda: classic.queue_hits(ids, num_blocks, capacity, True),
            "fifo": lambda: classic.queue_hits(ids, num_blocks, capacity, False),
            "lfu": lambda: classic.frequency_hits(ids, num_blocks, capacity, False),
            "gdsf": lambda: classic.frequency_hits(ids, num_blocks, capacity, True),
            "sieve": lambda: classic.sieve_hits(ids, num_blocks, capacity),
            "arc": lambda: classic.arc_hits(ids, num_blocks, capacity),
            "s3-fifo": lambda: classic.s3fifo_hits(ids, num_blocks, capacity),
            "w-tinylfu": lambda: classic.tinylfu_hits(ids, num_blocks, capacity),
            "belady": lambda: classic.belady_admit_hits(ids, self.following, capacity),
        }
        if policy not in table:
            raise ValueError(f"unknown policy {policy!r}; known: {', '.join(POLICIES)}")
        return table[policy]()

    def tokens(self, runs: I64) -> int:
        """Input tokens that the leading blocks stand for; a partial last block counts what it holds."""
        trace = self.trace
        return int(np.minimum(runs * trace.block_tokens, trace.input_tokens).sum())

    def compute(self, runs: I64) -> float:
        """Share of the prefill's FLOPs that the leading blocks save; the model must be known."""
        assert self.model is not None
        inputs = self.trace.input_tokens.astype(np.float64)
        cached = np.minimum(runs * self.trace.block_tokens, inputs)
        saved, whole = (float(self.model.prefill_flops(np.zeros_like(n), n).sum()) for n in (cached, inputs))
        return saved / max(1.0, whole)

    def sweep(self, policies: list[str], capacities: list[int]) -> Iterator[Point]:
        """All points; policies that don't depend on capacity are simulated once."""
        for policy in policies:
            fixed: Point | None = None
            for capacity in capacities:
                if policy == "infinite" and fixed is not None:
                    yield replace(fixed, capacity=capacity, seconds=0.0)
                    continue
                fixed = self.point(policy, capacity)
                yield fixed


def aside(work: Callable[[], T]) -> T:
    """Do the work in another thread, so that Ctrl-C gets through at once: compiled code doesn't hear of it, and a point
    may take a minute. The thread is left to end with the process."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def gap_closed(lru: float, optimum: float, value: float) -> float | None:
    """Share of the distance from leaf-first LRU to the optimum that `value` closes; None where there is no distance."""
    return (value - lru) / (optimum - lru) if optimum - lru > 1e-9 else None
