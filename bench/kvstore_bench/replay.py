"""A trace through the service's own machine: the simulator is the service.

One tier, no hands: every request is Signal (the session runs), Acquire (match and lease), Signal (why it stopped),
Reserve and Seal of what is missing, Release. Hashes are the trace's block numbers. Reserve happens under the request's
own lease, so what is being used can't be evicted for its own tail; a context that doesn't fit is cut at the end.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.core.commands import Acquired, Reserved, ReserveStatus
from kvstore.core.events import (
    Acquire,
    EndSession,
    OpenSession,
    RegisterKeyspace,
    Release,
    Reserve,
    Seal,
    SignalKind,
)
from kvstore.core.events import Signal as SignalEvent
from kvstore.core.eviction import make_policy
from kvstore.core.eviction.protocol import EvictionPolicy
from kvstore.core.machine import Machine
from kvstore.core.state import Limits, TierConfig
from kvstore.core.types import SLOT_ALIGN, BlockHash, KeyspaceId, SessionId, Tier
from kvstore_bench.traces.model import Stop, Trace

KEYSPACE = KeyspaceId(bytes(32))
TTL_NS = 60 * 10**9
STOPPED = {
    Stop.UNKNOWN: SignalKind.STOPPED,
    Stop.TOOL: SignalKind.TOOL_START,
    Stop.TURN: SignalKind.TURN_END,
    Stop.LENGTH: SignalKind.TURN_END,
}


@dataclass(slots=True)
class Replayed:
    """What a replay found. `hits`: [num_requests] leading blocks that were resident."""

    hits: npt.NDArray[np.int64]
    num_references: int
    seconds: float

    @property
    def rate(self) -> float:
        """Block references a second."""
        return self.num_references / max(self.seconds, 1e-9)


class Turn(NamedTuple):
    """How a request ended."""

    stop: Stop
    tool: str
    output_tokens: int
    end: bool
    """It was the session's last one, and its owner says so."""


class Replayer:
    """Drives one machine with one tier of `capacity` blocks."""

    def __init__(self, policy: str | EvictionPolicy, capacity: int, num_blocks: int, doubles_at: int = 0) -> None:
        size = capacity * SLOT_ALIGN
        make = (lambda t: make_policy(policy, t)) if isinstance(policy, str) else (lambda _: policy)
        tier = TierConfig(Tier.DRAM, size, make, segment_bytes=size)
        self.machine = Machine([tier], Limits(num_sessions=1 << 24, num_leases=1 << 20))
        self.hashes = [BlockHash(number.to_bytes(16, "little")) for number in range(num_blocks)]
        self.machine.step(RegisterKeyspace(KEYSPACE, SLOT_ALIGN, doubles_at=doubles_at), 0)
        self._open: set[str] = set()
        self._request = 0

    def use(self, path: list[BlockHash], name: str, turn: Turn, now_ns: int) -> int:
        """One request; returns how many leading blocks were there."""
        step, session = self.machine.step, SessionId(name)
        if name not in self._open:
            self._open.add(name)
            step(OpenSession(session, KEYSPACE), now_ns)
        step(SignalEvent(session, SignalKind.TURN_START), now_ns)
        answer = step(Acquire(KEYSPACE, path, "replay", TTL_NS, session), now_ns)
        acquired = next(command for command in answer if isinstance(command, Acquired))
        step(SignalEvent(session, STOPPED[turn.stop], turn.tool, output_tokens=turn.output_tokens), now_ns)
        if acquired.num_blocks < len(path):
            self._fill(path, session, acquired.num_blocks, now_ns)
        if acquired.lease:
            step(Release((acquired.lease,)), now_ns)
        if turn.end:
            self._open.discard(name)
            step(EndSession(session), now_ns)
        return acquired.num_blocks

    def _fill(self, path: list[BlockHash], session: SessionId, first: int, now_ns: int) -> None:
        self._request += 1
        event = Reserve(self._request, KEYSPACE, path, first, "replay", Tier.DRAM, TTL_NS, 0, session)
        reserved = next(c for c in self.machine.step(event, now_ns) if isinstance(c, Reserved))
        granted = tuple(
            block
            for block, status in zip(path[first:], reserved.statuses, strict=True)
            if status == ReserveStatus.GRANTED
        )
        if granted:
            self.machine.step(Seal(reserved.op, granted), now_ns)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """No cyclic garbage collection meanwhile: what a replay drops has no cycles, and looking for some costs a third."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def replay_machine(
    trace: Trace,
    policy: str | EvictionPolicy,
    capacity: int,
    *,
    signal_ends: bool = False,
    doubles_at: int = 0,
    sample: Callable[[Machine, int], None] | None = None,
) -> Replayed:
    """Replay a whole trace. Partial last blocks are left out, since only full blocks are sealed.

    `doubles_at`: see `Share`. `sample` is called after each request, with its number.
    """
    replayer = Replayer(policy, capacity, trace.num_blocks, doubles_at)
    table, full = replayer.hashes, trace.full_blocks().tolist()
    offsets, times, sessions = trace.offsets.tolist(), trace.times_ns.tolist(), trace.session.tolist()
    turns = list(_turns(trace, signal_ends))
    hits = np.zeros(trace.num_requests, np.int64)
    begin = time.perf_counter()
    with without_collector():
        for r in range(trace.num_requests):
            path = [table[block] for block in trace.ids[offsets[r] : offsets[r] + full[r]].tolist()]
            hits[r] = replayer.use(path, trace.session_names[sessions[r]], turns[r], times[r])
            if sample is not None:
                sample(replayer.machine, r)
    return Replayed(hits, trace.num_references, time.perf_counter() - begin)


def _turns(trace: Trace, signal_ends: bool) -> Iterator[Turn]:
    tools = [*trace.tool_names, ""]
    ends = (trace.end & signal_ends).tolist()
    for stop, tool, written, end in zip(
        trace.stop.tolist(), trace.tool.tolist(), trace.output_tokens.tolist(), ends, strict=True
    ):
        yield Turn(Stop(stop), tools[tool] if stop == Stop.TOOL else "", written, end)
