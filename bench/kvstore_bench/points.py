"""Finished points of a sweep, kept in a file, so that a stopped run goes on where it was.

One JSON line a point, appended and flushed when it's done; each carries a checksum of itself. A point is found again
by a digest of everything that decides its figures: the trace as it was read (so its options, seed and span too), the
policy, the capacity, and the sources of the simulators and of the service's policies. What doesn't match is left alone.
"""

from __future__ import annotations

import base64
import fcntl
import json
import zlib
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

import kvstore.core
from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.model import Trace

I64 = npt.NDArray[np.int64]
HEAD = {"kvstore_points": 1}


@dataclass(slots=True)
class Point:
    """One policy at one capacity. `seconds` is the time the simulation took, 0 where it came from a shared pass."""

    policy: str
    capacity: int
    blocks: float
    tokens: float
    seconds: float = 0.0
    runs: I64 = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)
    """[num_requests] leading blocks found."""
    kept: bool = False
    """Taken from a file of finished points, not simulated in this run."""


def trace_digest(trace: Trace) -> str:
    """What of a trace decides the figures of a simulation."""
    digest = blake2b(digest_size=16)
    parts = (trace.times_ns, trace.session, trace.offsets, trace.ids, trace.input_tokens, trace.output_tokens)
    for array in (*parts, trace.stop, trace.tool, trace.end, trace.parent, trace.service_ns):
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(array).data)
    digest.update(json.dumps([trace.block_tokens, trace.partial_last, trace.session_names, trace.tool_names]).encode())
    return digest.hexdigest()


@cache
def code_digest() -> str:
    """Of the sources whose change may change a figure: simulators, and the core with its policies."""
    here, core = Path(__file__).parent, Path(kvstore.core.__path__[0])
    files = [here / "sweep.py", here / "replay.py", *sorted((here / "flat").glob("*.py")), *sorted(core.rglob("*.py"))]
    digest = blake2b(digest_size=16)
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


class Kept:
    """The file. One run at a time; a line that was being written when a run was killed is cut off.

    `found`: keys of points from earlier runs that were asked for in this one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: set[str] = set()
        self._file: IO[bytes] = path.open("a+b")
        try:
            self._points = self._start()
            self._earlier = set(self._points)
        except BaseException:
            self._file.close()
            raise

    def _start(self) -> dict[str, dict[str, Any]]:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TraceError(str(self.path), "is in use by another run", mend="wait for it, or name another") from None
        self._file.seek(0)
        raw = self._file.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        if not whole and raw and not json.dumps(HEAD).encode().startswith(raw):
            raise TraceError(str(self.path), "is no file of finished points", mend="name a new file")
        points = self._parse(whole.splitlines())
        self._file.truncate(len(whole))
        if not whole:
            self._write(json.dumps(HEAD))
        return points

    def _parse(self, lines: list[bytes]) -> dict[str, dict[str, Any]]:
        points: dict[str, dict[str, Any]] = {}
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if number == 1:
                if value != HEAD:
                    raise TraceError(str(self.path), "is no file of finished points", mend="name a new file")
            elif not isinstance(value, dict) or value.pop("sum", None) != _checksum(value):
                mend = "delete the line to simulate its point again, or the file"
                raise TraceError(str(self.path), "is damaged", line=number, mend=mend)
            else:
                points[value["key"]] = value
        return points

    def find(self, key: str) -> Point | None:
        """The point that was finished under this key."""
        value = self._points.get(key)
        if value is None:
            return None
        self.found |= {key} & self._earlier
        runs = np.frombuffer(zlib.decompress(base64.b64decode(value["runs"])), "<i4").astype(np.int64)
        figures = (value["policy"], value["capacity"], value["blocks"], value["tokens"], value["seconds"])
        return Point(*figures, runs=runs, kept=key in self._earlier)

    def add(self, key: str, trace: str, point: Point) -> None:
        """Keep a finished point; it is in the file when this returns."""
        runs = base64.b64encode(zlib.compress(point.runs.astype("<i4").tobytes(), 6)).decode()
        value: dict[str, Any] = {"key": key, "trace": trace, "policy": point.policy, "capacity": point.capacity}
        value |= {"blocks": point.blocks, "tokens": point.tokens, "seconds": point.seconds, "runs": runs}
        self._write(json.dumps(value | {"sum": _checksum(value)}))
        self._points[key] = value

    def _write(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def __len__(self) -> int:
        return len(self._points)

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def point_key(trace: str, policy: str, capacity: int) -> str:
    """Name of a point. `trace` is a trace's digest."""
    return blake2b(f"{trace} {code_digest()} {policy} {capacity}".encode(), digest_size=16).hexdigest()


def _checksum(value: dict[str, Any]) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
