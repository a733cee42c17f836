"""Whose blocks fill a tier over time, from a replay through the machine.

A resident block counts under what the session that made it, or used it last as the end of its context, is doing then.
"""

from __future__ import annotations

import numpy as np

from kvstore.core.machine import Machine
from kvstore.core.types import Activity
from kvstore_bench.replay import KEYSPACE, replay_machine
from kvstore_bench.rows import duration
from kvstore_bench.traces.model import Trace

CLASSES = ("said nothing", "waits for a tool", "idle after a turn", "ended")
CLASS_OF = {Activity.OPEN: 0, Activity.RUNNING: 0, Activity.TOOL_WAIT: 1, Activity.IDLE: 2, Activity.ENDED: 3}
NUM_SLICES = 48
REFERENCES_MAX = 4_000_000
"""Longer traces are shown from the start up to here."""

Columns = list[tuple[str, list[float]]]


def residency_columns(trace: Trace, policy: str, capacity: int) -> Columns:
    """Time labels in hours, and the share of the tier that each of `CLASSES` fills. Ends of sessions are signalled."""
    stop = int(np.searchsorted(trace.offsets, REFERENCES_MAX, side="right")) - 1
    part = trace.head(stop) if 0 < stop < trace.num_requests else trace
    times = part.times_ns
    at = np.searchsorted(times, np.linspace(0, int(times[-1]), NUM_SLICES + 1)[1:], side="right") - 1
    wanted = set(at.tolist())
    columns: Columns = []

    def sample(machine: Machine, r: int) -> None:
        if r in wanted:
            columns.append((duration(int(times[r])), _shares(machine, capacity)))

    replay_machine(part, policy, capacity, signal_ends=True, sample=sample)
    return columns


def _shares(machine: Machine, capacity: int) -> list[float]:
    counts = [0] * len(CLASSES)
    for block in machine.space(KEYSPACE).blocks.values():
        activity = block.last_session.activity if block.last_session is not None else Activity.OPEN
        counts[CLASS_OF[activity]] += 1
    return [count / capacity for count in counts]
