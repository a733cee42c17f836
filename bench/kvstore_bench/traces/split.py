"""Half of a trace's sessions, to show on some what was chosen on others.

A session and all that it started (sub-agents, theirs) stay together. Which half it is in follows from its name alone,
so it doesn't change with the seed that places sessions in time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.model import Trace, last_of_session, renumber

CHOICES = ("all", "even", "odd")


def only(trace: Trace, which: str) -> Trace:
    """The requests of all, or of every second, session. Raises TraceError for another word or an empty half."""
    if which not in CHOICES:
        raise TraceError("--sessions", f"{which!r} is unknown", mend=f"use {', '.join(CHOICES)}, or even,odd")
    if which == "all":
        return trace
    wanted = _half(trace, CHOICES.index(which) - 1)
    rows = np.flatnonzero(wanted[trace.session])
    if not len(rows):
        raise TraceError(trace.name, f"has no {which} sessions", mend="use --sessions all")
    return _rows(trace, rows, f"{trace.name}, {which} sessions")


def _half(trace: Trace, rest: int) -> npt.NDArray[np.bool_]:
    """[num_sessions] in that half: every second root by name, and all below it."""
    root = np.arange(trace.num_sessions)
    while (above := trace.parent[root]).max(initial=-1) >= 0:
        root = np.where(above >= 0, above, root)
    roots = sorted({int(number) for number in root}, key=lambda number: trace.session_names[number])
    half = np.zeros(trace.num_sessions, np.int64)
    half[roots] = np.arange(len(roots)) % 2
    return np.asarray(half[root] == rest)


def _rows(trace: Trace, rows: npt.NDArray[np.int64], name: str) -> Trace:
    """These requests as a trace of its own, sessions and blocks numbered anew."""
    counts = np.diff(trace.offsets)[rows]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    at = np.arange(offsets[-1]) + np.repeat(trace.offsets[rows] - offsets[:-1], counts)
    ids, num_blocks = renumber(trace.ids[at].astype(np.int64))
    old, inverse = np.unique(trace.session[rows], return_inverse=True)
    number_of = np.full(trace.num_sessions + 1, -1, np.int32)  # the last stands for "no parent"
    number_of[old] = np.arange(len(old))
    session = inverse.reshape(-1).astype(np.int32)
    return Trace(
        name=name,
        block_tokens=trace.block_tokens,
        times_ns=trace.times_ns[rows] - trace.times_ns[rows[0]],
        session=session,
        offsets=offsets,
        ids=ids,
        input_tokens=trace.input_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        stop=trace.stop[rows],
        tool=trace.tool[rows],
        end=trace.end[rows] | last_of_session(session, len(old)),
        parent=number_of[trace.parent[old]],
        service_ns=trace.service_ns[rows],
        session_names=[trace.session_names[number] for number in old],
        tool_names=trace.tool_names,
        num_blocks=num_blocks,
        partial_last=trace.partial_last,
        notes=list(trace.notes),
    )
