"""A running service's events as a trace: who asked for which context when, and why it stopped.

    Watch --> SNAPSHOT, STORED: parent of each block       --> paths
          --> SESSION "acquire 120 96" + two hashes        --> a request: 120 blocks, 96 of them found
          --> SESSION "tool_start 52 bash", "fork a", ...  --> why the session's latest request stopped, or its end

A request names the last block it asked for; its path is read off the parents once the missing blocks were stored. What
was never stored (no room, or nobody offloaded it) gets numbers of its own, so lengths are right. Tokens behind the last
full block are not announced and so not recorded.

A request without a session continues the one whose context its own begins with (as with chat logs), or starts one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from kvstore.errors import KVStoreError
from kvstore_api.v1 import kvstore_pb2 as pb
from kvstore_bench.traces.model import RawRequest, Stop, Trace, build
from kvstore_client import Client

HASH_BYTES = 16
STOPS = {"tool_start": Stop.TOOL, "turn_end": Stop.TURN, "stopped": Stop.UNKNOWN}
RETRY_S = 0.2


@dataclass(slots=True)
class _Asked:
    """One acquire as announced."""

    time_ns: int
    session: str
    num_blocks: int
    last: bytes
    found: bytes
    stop: Stop = Stop.UNKNOWN
    tool: str = ""
    output_tokens: int = 0
    end: bool = False
    parent: str = ""


@dataclass
class _Ends:
    """Where contexts of nobody's ended so far: finds the session that a path continues."""

    nameless: dict[bytes, str] = field(default_factory=dict)
    num_threads: int = 0

    def thread(self, path: list[bytes]) -> str:
        """Name of the session of a request that named none."""
        found = next((self.nameless[block] for block in reversed(path) if block in self.nameless), "")
        if not found:
            self.num_threads += 1
            found = f"nameless-{self.num_threads}"
        self.nameless[path[-1]] = found
        return found


@dataclass
class Recorder:
    """Takes events in order, gives a trace at any time. Holds one entry a block ever seen and one a request."""

    parents: dict[bytes, bytes] = field(default_factory=dict)
    asked: list[_Asked] = field(default_factory=list)
    latest: dict[str, _Asked] = field(default_factory=dict)
    forks: dict[str, str] = field(default_factory=dict)
    """Parents of forks that haven't asked for anything yet."""
    sequence: int = 0

    def take(self, event: pb.IndexEvent) -> None:
        """One event of `Watch`."""
        self.sequence = event.sequence
        if event.kind in (pb.IndexEvent.SNAPSHOT, pb.IndexEvent.STORED):
            pairs = zip(_split(event.hashes), _split(event.parents), strict=True)
            self.parents.update(pairs)
        elif event.kind == pb.IndexEvent.SESSION:
            self._session(event)

    def _session(self, event: pb.IndexEvent) -> None:
        what, _, rest = event.detail.partition(" ")
        if what == "acquire":
            hashes = _split(event.hashes)
            if hashes:
                found = hashes[1] if len(hashes) > 1 else b""
                request = _Asked(event.time_ns, event.session_id, int(rest.split()[0]), hashes[0], found)
                request.parent = self.forks.pop(event.session_id, "")
                self.asked.append(request)
                if event.session_id:
                    self.latest[event.session_id] = request
            return
        if what == "fork":
            self.forks[event.session_id] = rest
            return
        request_or_none = self.latest.get(event.session_id)
        if request_or_none is None:
            return
        if what in STOPS:
            written, _, request_or_none.tool = rest.partition(" ")
            request_or_none.stop, request_or_none.output_tokens = STOPS[what], int(written)
        elif what == "endsession":
            request_or_none.end = True
            del self.latest[event.session_id]

    def trace(self, name: str, block_tokens: int) -> Trace:
        """Everything recorded so far."""
        ends = _Ends()
        return build(name, [self._request(asked, ends, block_tokens) for asked in self.asked], block_tokens)

    def _request(self, asked: _Asked, ends: _Ends, block_tokens: int) -> RawRequest:
        path = self._path(asked)
        return RawRequest(
            time_ns=asked.time_ns,
            session=asked.session or ends.thread(path),
            ids=np.array([_number(h) for h in path], np.int64),
            input_tokens=asked.num_blocks * block_tokens,
            output_tokens=asked.output_tokens,
            stop=asked.stop,
            tool=asked.tool,
            end=asked.end,
            parent=asked.parent,
        )

    def _path(self, asked: _Asked) -> list[bytes]:
        whole = self._known(asked.last)
        if len(whole) == asked.num_blocks:
            return whole
        known = self._known(asked.found)
        rest = range(len(known), asked.num_blocks)
        return known + [blake2b(asked.last + n.to_bytes(4, "little"), digest_size=HASH_BYTES).digest() for n in rest]

    def _known(self, block: bytes) -> list[bytes]:
        path = []
        while block in self.parents:
            path.append(block)
            block = self.parents[block]
        return path[::-1]


def _split(raw: bytes) -> list[bytes]:
    return [raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES)]


def _number(block: bytes) -> int:
    return int.from_bytes(block[:8], "little") >> 1


def follow(client: Client, recorder: Recorder, stop: threading.Event) -> None:
    """Feed the recorder until `stop`; begins anew after a gap or when the service comes back."""
    while not stop.is_set():
        try:
            _feed(client.watch(recorder.sequence), recorder, stop)
        except KVStoreError:
            recorder.sequence = 0  # away: its next life counts anew, so take a snapshot
        stop.wait(RETRY_S)


def _feed(events: Iterable[pb.IndexEvent], recorder: Recorder, stop: threading.Event) -> None:
    for event in events:
        recorder.take(event)
        if stop.is_set():
            return


def record(address: str, seconds: float, block_tokens: int, name: str) -> Trace:
    """Watch a service for `seconds` (0: until interrupted). Raises Unavailable when it doesn't answer at first."""
    recorder, stop = Recorder(), threading.Event()
    with Client(address) as client:
        thread = threading.Thread(target=follow, args=(client, recorder, stop), daemon=True)
        thread.start()
        end = time.monotonic() + seconds
        try:
            while thread.is_alive() and not (seconds and time.monotonic() >= end):
                thread.join(min(1.0, max(0.01, end - time.monotonic())) if seconds else 1.0)
        except KeyboardInterrupt:
            pass
        stop.set()
    return recorder.trace(name, block_tokens)
