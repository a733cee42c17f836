"""The one form all traces are brought to: requests in time order over densely numbered blocks.

    times_ns[r]  session[r]  stop[r] ...        one entry a request
    ids[offsets[r] : offsets[r + 1]]            its blocks from the first token on, numbered 0 .. num_blocks - 1

A block id stands for the whole chain up to it, as with a real prefix hash: equal id means equal prefix. Readers yield
`RawRequest`s whose ids may be any 64-bit numbers; `build` sorts by time (stable) and renumbers blocks in order of
first use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]


class Stop(IntEnum):
    """Why the model stopped after a request, as far as the trace says."""

    UNKNOWN = 0
    TOOL = 1
    TURN = 2
    LENGTH = 3


STOP_NAMES = {
    "tool_use": Stop.TOOL,
    "tool_calls": Stop.TOOL,
    "function_call": Stop.TOOL,
    "end_turn": Stop.TURN,
    "stop": Stop.TURN,
    "stop_sequence": Stop.TURN,
    "max_tokens": Stop.LENGTH,
    "length": Stop.LENGTH,
}


@dataclass(slots=True)
class RawRequest:
    """One request as a reader found it. `ids` are full blocks plus, where a format has it, the partial last."""

    time_ns: int
    session: str
    ids: I64
    input_tokens: int
    output_tokens: int = 0
    stop: Stop = Stop.UNKNOWN
    tool: str = ""
    end: bool = False
    parent: str = ""
    service_ns: int = 0
    """How long the model worked on it, when the trace says; 0 otherwise."""


@dataclass(slots=True)
class Trace:
    """Requests in time order. Arrays are parallel unless said otherwise; all times in ns from the first request."""

    name: str
    block_tokens: int
    times_ns: I64
    session: I32
    offsets: I64
    """[num_requests + 1] into `ids`."""
    ids: I32
    input_tokens: I64
    output_tokens: I64
    stop: npt.NDArray[np.int8]
    tool: npt.NDArray[np.int16]
    """Index into `tool_names`, -1 when unknown."""
    end: npt.NDArray[np.bool_]
    """This is the last request of its session."""
    parent: I32
    """Per session: the session it was started by, or -1."""
    service_ns: I64
    session_names: list[str]
    tool_names: list[str]
    num_blocks: int
    partial_last: bool
    """The last id of a request may stand for fewer than `block_tokens` tokens."""
    skipped: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return len(self.times_ns)

    @property
    def num_references(self) -> int:
        return len(self.ids)

    @property
    def num_sessions(self) -> int:
        return len(self.session_names)

    @property
    def total_tokens(self) -> int:
        """Input tokens of all requests."""
        return int(self.input_tokens.sum())

    def full_blocks(self) -> I64:
        """[num_requests] how many of a request's blocks are full; only those are sealed and kept."""
        counts = np.diff(self.offsets)
        return np.minimum(counts, self.input_tokens // self.block_tokens) if self.partial_last else counts

    def head(self, num_requests: int) -> Trace:
        """The first requests, with blocks numbered as in the whole trace (they are numbered by first use)."""
        stop = int(self.offsets[num_requests])
        ids = self.ids[:stop]
        return Trace(
            name=f"{self.name}[:{num_requests}]",
            block_tokens=self.block_tokens,
            times_ns=self.times_ns[:num_requests],
            session=self.session[:num_requests],
            offsets=self.offsets[: num_requests + 1],
            ids=ids,
            input_tokens=self.input_tokens[:num_requests],
            output_tokens=self.output_tokens[:num_requests],
            stop=self.stop[:num_requests],
            tool=self.tool[:num_requests],
            end=last_of_session(self.session[:num_requests], self.num_sessions),
            parent=self.parent,
            service_ns=self.service_ns[:num_requests],
            session_names=self.session_names,
            tool_names=self.tool_names,
            num_blocks=int(ids.max(initial=-1)) + 1,
            partial_last=self.partial_last,
        )


def last_of_session(session: I32, num_sessions: int) -> npt.NDArray[np.bool_]:
    """[num_requests] True where no later request belongs to the same session."""
    last = np.full(num_sessions, -1, np.int64)
    last[session] = np.arange(len(session))
    end = np.zeros(len(session), np.bool_)
    end[last[last >= 0]] = True
    return end


def strictly_increasing(times_ns: I64) -> I64:
    """Equal times moved apart by a nanosecond each, so that order of use is order of time."""
    steps = np.arange(len(times_ns), dtype=np.int64)
    return np.maximum.accumulate(times_ns - steps) + steps


def renumber(ids: I64) -> tuple[I32, int]:
    """Ids numbered densely in order of first use, and how many there are."""
    unique, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    rank = np.empty(len(unique), np.int32)
    rank[np.argsort(first, kind="stable")] = np.arange(len(unique), dtype=np.int32)
    return rank[inverse.reshape(-1)], len(unique)


def _intern(names: Iterable[str], table: dict[str, int]) -> I32:
    return np.array([table.setdefault(name, len(table)) for name in names], np.int32)


def build(name: str, requests: list[RawRequest], block_tokens: int, *, partial_last: bool = False) -> Trace:
    """Bring requests to the common form. `requests` may be unsorted and is sorted in place."""
    requests.sort(key=lambda request: request.time_ns)
    start = requests[0].time_ns if requests else 0
    sessions: dict[str, int] = {}
    session = _intern((r.session for r in requests), sessions)
    tools: dict[str, int] = {}
    tool = np.array([tools.setdefault(r.tool, len(tools)) if r.tool else -1 for r in requests], np.int16)
    offsets = np.zeros(len(requests) + 1, np.int64)
    np.cumsum([len(r.ids) for r in requests], out=offsets[1:])
    ids, num_blocks = renumber(np.concatenate([r.ids for r in requests]) if requests else np.zeros(0, np.int64))
    parent = np.full(len(sessions), -1, np.int32)
    for r in requests:
        if r.parent:
            parent[sessions[r.session]] = sessions.get(r.parent, -1)
    said_end = np.array([r.end for r in requests], np.bool_)
    return Trace(
        name=name,
        block_tokens=block_tokens,
        times_ns=strictly_increasing(np.array([r.time_ns - start for r in requests], np.int64)),
        session=session,
        offsets=offsets,
        ids=ids,
        input_tokens=np.array([r.input_tokens for r in requests], np.int64),
        output_tokens=np.array([r.output_tokens for r in requests], np.int64),
        stop=np.array([r.stop for r in requests], np.int8),
        tool=tool,
        end=said_end | last_of_session(session, len(sessions)),
        parent=parent,
        service_ns=np.array([r.service_ns for r in requests], np.int64),
        session_names=list(sessions),
        tool_names=list(tools),
        num_blocks=num_blocks,
        partial_last=partial_last,
    )
