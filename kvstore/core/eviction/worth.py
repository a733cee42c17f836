"""What a wait is described by, in words a machine can see.

All quantities enter as logarithms: behaviour changes with the order of magnitude, and coarse classes fill fast.
"""

from __future__ import annotations

from math import log2

from kvstore.core.blocks import Block, Share
from kvstore.core.eviction.curve import INDEX_STEPS, NO_INDEX
from kvstore.core.eviction.resume import Key
from kvstore.core.sessions import Session
from kvstore.core.types import Activity

NUM_CONTEXTS = 10
SESSION_CONTEXT = 6
NS = 1_000_000_000


class Pace:
    """What a policy remembers of a session between its requests. Gaps in ns, lengths in blocks."""

    __slots__ = (
        "first",
        "gap_ns",
        "known",
        "length",
        "mean_gap_ns",
        "num_requests",
        "num_waits",
        "promise",
        "started_ns",
        "stop",
        "tip",
    )

    def __init__(self) -> None:
        self.first = True
        self.gap_ns = -1
        """The last wait."""
        self.mean_gap_ns = -1.0
        """Smoothed wait, factor 1/4."""
        self.num_waits = 0
        self.length = 0
        """Blocks of the context when the last wait began."""
        self.num_requests = 0
        """Requests of the session that are known here."""
        self.known = 0
        """Blocks that were there before the current request: of other sessions at first, then of its own."""
        self.started_ns = -1
        """When the current request began; -1 when unknown."""
        self.tip: Block | None = None
        """The deepest block of the latest touch."""
        self.stop: Activity | None = None
        """How its last wait began."""
        self.promise: tuple[int, int, int] | None = None
        """What the wait to come is thought to be worth: (number of waits, length of the context) it was worked out for,
        and the index."""

    def note_gap(self, gap_ns: int, now_ns: int) -> None:
        """A wait ended with a new request."""
        self.gap_ns = gap_ns
        gap = float(gap_ns)
        self.mean_gap_ns = gap if self.mean_gap_ns < 0.0 else self.mean_gap_ns + (gap - self.mean_gap_ns) / 4
        self.num_waits += 1
        self.known = self.length
        self.started_ns = now_ns


def octave(value: float, per: int = 1) -> int:
    """Whole part of `per` x log2(value + 1)."""
    return int(per * log2(value + 1.0))


def gap_octave(gap_ns: float) -> int:
    """0 for no gap yet, else 1 .. 20 by its log2 in seconds, from 1/4 s on."""
    if gap_ns < 0:
        return 0
    return min(20, max(1, int(log2(max(gap_ns / NS, 0.25))) + 3))


def contexts(session: Session, pace: Pace, activity: Activity, now_ns: int) -> list[Key]:
    """[NUM_CONTEXTS] the classes a wait belongs to that begins now with `activity`; their order is the model's
    numbering."""
    stop, length = activity.value, session.num_blocks
    count = octave(pace.num_waits)
    known = min(pace.known, length)
    written = session.output_tokens
    if written >= 0:
        output, fine = octave(written), octave(written, 2)
    elif 0 <= pace.started_ns < now_ns:
        busy_ms = (now_ns - pace.started_ns) / 1e6
        output, fine = 64 + octave(busy_ms), 64 + octave(busy_ms, 2)
    else:
        output, fine = -1, -1
    expected = gap_octave(session.expected_ns)
    return [
        (stop,),
        (stop, gap_octave(pace.mean_gap_ns)),
        (stop, gap_octave(pace.gap_ns)),
        (stop, count),
        (stop, output),
        (stop, octave(length, 2)),
        (stop, session.id),
        (octave(length - known), octave(known, 2)),
        (fine, count),
        (stop, session.tool, expected),
    ]


def priced(worth: int, num_blocks: int, share: Share) -> int:
    """The worth of a context's block number `num_blocks` (from 1 on), by the time it takes to compute again; as it is
    where the share counts all blocks alike."""
    if not share.doubles_at or worth == NO_INDEX:
        return worth
    return worth + round(INDEX_STEPS * log2(1.0 + num_blocks / share.doubles_at))
