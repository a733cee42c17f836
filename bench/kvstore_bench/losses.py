"""Where misses come from: each missed token by why its block had been there before, and how long ago.

    first sight        no request had it before: no cache can have it
    after ...          the session's request before this one had it: the session came back after a tool call, the end of
                       a turn, or a stop that the trace doesn't name
    older branch       the session had it earlier, but not in its last request: it went back to a branch it had left
    another's prefix   another session used it last

"How long ago" is the time since the request that last had the block was answered (as far as the trace says how long
the model worked). A block's cause is the same for every policy; a policy decides only whether it misses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_bench.flat.compiled import jit
from kvstore_bench.traces.model import Trace

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

WHY = (
    "after a tool call",
    "after a turn's end",
    "after other stop",
    "an older branch",
    "another's prefix",
)
GAPS = ("under 10 s", "10-60 s", "1-15 min", "over 15 min")
EDGES_NS = np.array([10, 60, 900], np.int64) * 10**9
FIRST_SIGHT = len(WHY) * len(GAPS)
NAMES = (*(f"{why}, {gap}" for why in WHY for gap in GAPS), "first sight")
_WHY_OF_STOP = np.array([2, 0, 1, 1], np.int64)
"""By Stop: unknown, tool, turn, length."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Missed tokens of one policy at one capacity: [len(NAMES)], and all input tokens they are a share of."""

    tokens: I64
    total: int

    @property
    def missed(self) -> float:
        """Share of all input tokens."""
        return float(self.tokens.sum()) / max(1, self.total)

    def share(self, cause: int) -> float:
        """Of all input tokens."""
        return float(self.tokens[cause]) / max(1, self.total)

    def of_missed(self, cause: int) -> float:
        """Of the missed ones."""
        return float(self.tokens[cause]) / max(1, int(self.tokens.sum()))

    def why(self, number: int) -> float:
        """Share of all input tokens, of one of WHY, whatever the gap."""
        return sum(self.share(number * len(GAPS) + gap) for gap in range(len(GAPS)))


def causes(trace: Trace) -> U8:
    """[N] the cause (index into NAMES) of each reference, should it miss."""
    done = trace.times_ns + trace.service_ns
    stop = _WHY_OF_STOP[trace.stop.astype(np.int64)]
    return _causes(
        trace.ids, trace.offsets, trace.session, trace.times_ns, done, stop, trace.num_blocks, trace.num_sessions
    )


def lost(trace: Trace, cause: U8, runs: I64) -> Lost:
    """Where the misses of one simulation come from. `runs`: leading blocks found, by request."""
    tokens = _lost(cause, trace.offsets, runs, trace.input_tokens, trace.block_tokens)
    return Lost(tokens, trace.total_tokens)


@jit
def _causes(
    ids: npt.NDArray[np.int32],
    offsets: I64,
    session: npt.NDArray[np.int32],
    times: I64,
    done: I64,
    stop: I64,
    num_blocks: int,
    num_sessions: int,
) -> U8:
    out = np.empty(len(ids), np.uint8)
    last = np.full(num_blocks, -1, np.int64)  # request that last had the block
    latest = np.full(num_sessions, -1, np.int64)  # a session's last request
    for r in range(len(times)):
        s = session[r]
        for i in range(offsets[r], offsets[r + 1]):
            before = last[ids[i]]
            last[ids[i]] = r
            if before < 0:
                out[i] = FIRST_SIGHT
                continue
            gap = times[r] - done[before]
            step = 0
            while step < len(EDGES_NS) and gap >= EDGES_NS[step]:
                step += 1
            if session[before] != s:
                why = 4
            elif before != latest[s]:
                why = 3
            else:
                why = stop[before]
            out[i] = why * 4 + step
        latest[s] = r
    return out


@jit
def _lost(cause: U8, offsets: I64, runs: I64, inputs: I64, block_tokens: int) -> I64:
    out = np.zeros(FIRST_SIGHT + 1, np.int64)
    for r in range(len(runs)):
        at = min(runs[r] * block_tokens, inputs[r])
        first = False  # behind the first new block all is new
        for i in range(offsets[r] + runs[r], offsets[r + 1]):
            tokens = min(block_tokens, inputs[r] - at)
            first = first or cause[i] == FIRST_SIGHT
            out[FIRST_SIGHT if first else cause[i]] += tokens
            at += tokens
        out[FIRST_SIGHT] += inputs[r] - at  # tokens behind the last block
    return out
