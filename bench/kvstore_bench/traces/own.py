"""Our own form: JSONL, a header and one request a line. Everything the others carry fits, and nothing has to be
guessed.

    {"kvstore_trace": 1, "block_tokens": 64, "partial_last": false}
    {"t": 12.5, "session": "a", "ids": [1, 2, 3], "in": 200, "out": 40, "stop": "tool", "tool": "bash", "end": false,
    "parent": ""}

`t` is seconds, ids are integers below 2^63 that stand for whole prefixes. `in`, `out` in tokens. `stop`: tool, turn,
length or unknown.
"""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.fields import Record
from kvstore_bench.traces.model import RawRequest, Stop, Trace
from kvstore_bench.traces.options import ReadOptions, Skips
from kvstore_bench.traces.source import line_sources, lines, parse_json

VERSION = 1
NS = 1_000_000_000


def read(path: Path, options: ReadOptions, skips: Skips) -> Iterator[RawRequest]:
    """All requests after the header."""
    for name, stream in line_sources(path):
        header = False
        for number, line in lines(name, stream):
            record = Record(name, number, parse_json(name, number, line)) if not header else None
            if record is not None:
                _header(record, options)
                header = True
                continue
            try:
                yield _request(Record(name, number, parse_json(name, number, line)))
            except TraceError as error:
                skips.take(error)


def _header(record: Record, options: ReadOptions) -> None:
    version = record.number("kvstore_trace")
    if version != VERSION:
        raise record.error("kvstore_trace", f"version {version:g} is unknown", f"this reader knows version {VERSION}")
    options.block_tokens_or(int(record.number("block_tokens", low=1, high=1 << 20)))
    options.partial_last = bool(record.value.get("partial_last", False))


def _request(record: Record) -> RawRequest:
    stop = record.text("stop", "unknown").upper()
    if stop not in Stop.__members__:
        raise record.error("stop", f"{stop.lower()!r} is unknown", "use tool, turn, length or unknown")
    return RawRequest(
        time_ns=round(record.number("t") * NS),
        session=record.text("session"),
        ids=record.ids("ids"),
        input_tokens=record.tokens("in"),
        output_tokens=record.tokens("out", 0),
        stop=Stop[stop],
        tool=record.text("tool", ""),
        end=bool(record.value.get("end", False)),
        parent=record.text("parent", ""),
    )


def write_file(trace: Trace, path: Path, tick: Callable[[], None] | None = None) -> None:
    """The trace as a file, packed when the name ends in .gz or .xz; the file appears whole or not at all."""
    part = path.with_name(path.name + ".part")
    opener = gzip.open if path.suffix == ".gz" else lzma.open if path.suffix == ".xz" else open
    try:
        with opener(part, "wt", encoding="utf-8") as stream:
            write(trace, stream, tick)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write(trace: Trace, stream: IO[str], tick: Callable[[], None] | None = None) -> None:
    """The trace in this form."""
    head = {"kvstore_trace": VERSION, "block_tokens": trace.block_tokens, "partial_last": trace.partial_last}
    stream.write(json.dumps(head) + "\n")
    for r in range(trace.num_requests):
        stream.write(json.dumps(row(trace, r), separators=(",", ":")) + "\n")
        if tick is not None:
            tick()


def row(trace: Trace, r: int) -> dict[str, object]:
    """One request as a record."""
    session, tool = int(trace.session[r]), int(trace.tool[r])
    parent = int(trace.parent[session])
    return {
        "t": int(trace.times_ns[r]) / NS,
        "session": trace.session_names[session],
        "ids": trace.ids[trace.offsets[r] : trace.offsets[r + 1]].tolist(),
        "in": int(trace.input_tokens[r]),
        "out": int(trace.output_tokens[r]),
        "stop": Stop(int(trace.stop[r])).name.lower(),
        "tool": trace.tool_names[tool] if tool >= 0 else "",
        "end": bool(trace.end[r]),
        "parent": trace.session_names[parent] if parent >= 0 else "",
    }
