"""kv-cache-tester: one JSON file per coding-agent session, 64-token hash ids that mean something only within their
session.

What sessions share is the leading tool and system part, the first (tool_tokens + system_tokens) // block_size blocks:
the tool blocks of sessions with equal model and tool count, and the system blocks where the system count is equal
too. Requests of a nested sub-agent form a session of their own. Sessions carry no arrival time: starts are drawn
uniformly over a span, in file order, from a seeded generator.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.fields import Record
from kvstore_bench.traces.model import I64, STOP_NAMES, RawRequest, Stop
from kvstore_bench.traces.options import ReadOptions, Skips
from kvstore_bench.traces.source import members

NS = 1_000_000_000


class _Ids:
    """Global numbers for session-local ids."""

    def __init__(self) -> None:
        self._next = 0
        self._heads: dict[tuple[str, int, int], I64] = {}

    def fresh(self, count: int) -> int:
        start = self._next
        self._next += count
        return start

    def head(self, model: str, tool_tokens: int, system_tokens: int, block_tokens: int) -> I64:
        """The shared leading blocks of one kind of session: tools by (model, tools), the rest by system too."""
        num_tools = tool_tokens // block_tokens
        num_head = (tool_tokens + system_tokens) // block_tokens
        tools = self._part((model, tool_tokens, -1), num_tools)
        return np.concatenate([tools, self._part((model, tool_tokens, system_tokens), num_head - num_tools)])

    def _part(self, key: tuple[str, int, int], count: int) -> I64:
        if key not in self._heads:
            start = self.fresh(count)
            self._heads[key] = np.arange(start, start + count, dtype=np.int64)
        return self._heads[key]


class _LocalMap:
    """Local id -> global id for one file."""

    def __init__(self, ids: _Ids) -> None:
        self._ids = ids
        self._table = np.full(0, -1, np.int64)

    def pin(self, local: I64, target: I64) -> None:
        self._grow(local)
        self._table[local] = target

    def __call__(self, local: I64) -> I64:
        self._grow(local)
        found = self._table[local]
        if (missing := np.unique(local[found < 0])).size:
            start = self._ids.fresh(len(missing))
            self._table[missing] = np.arange(start, start + len(missing))
            found = self._table[local]
        return found

    def _grow(self, local: I64) -> None:
        need = int(local.max(initial=-1)) + 1
        if need > len(self._table):
            table = np.full(max(need, 2 * len(self._table)), -1, np.int64)
            table[: len(self._table)] = self._table
            self._table = table


LOCAL_ID_MAX = 1 << 26


def read(path: Path, options: ReadOptions, skips: Skips) -> Iterator[RawRequest]:
    """All requests of all sessions of an archive, folder or single file, session by session."""
    generator = np.random.default_rng(options.seed)
    ids = _Ids()
    for name, content in members(path) if options.is_archive else [(str(path), options.single(path))]:
        if name.endswith((".md", ".txt")):
            continue
        start_s = float(generator.uniform(0.0, options.span_s))
        try:
            yield from _session(name, content, start_s, ids, options)
        except TraceError as error:
            skips.take(error)


def _session(name: str, content: bytes, start_s: float, ids: _Ids, options: ReadOptions) -> list[RawRequest]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TraceError(name, f"isn't valid JSON: {error}", mend="the file is cut off or no JSON") from None
    if not isinstance(value, dict):
        raise TraceError(name, f"expected a JSON object, found {type(value).__name__}")
    record = Record(name, 0, value)
    block_tokens = int(record.number("block_size", low=1, high=1 << 20))
    if block_tokens != options.block_tokens_or(block_tokens):
        raise record.error("block_size", f"{block_tokens} differs from {options.block_tokens} of earlier sessions")
    out: list[RawRequest] = []
    key = record.text("id", Path(name).stem)
    _requests(record, key, "", start_s, _LocalMap(ids), ids, block_tokens, out)
    return out


def _requests(
    record: Record,
    key: str,
    parent: str,
    start_s: float,
    local: _LocalMap,
    ids: _Ids,
    block_tokens: int,
    out: list[RawRequest],
) -> None:
    tools, system = record.tokens("tool_tokens", 0), record.tokens("system_tokens", 0)
    models = record.value.get("models")
    model = str(models[0]) if isinstance(models, list) and models else ""
    shared = ids.head(model, tools, system, block_tokens)
    pin = True
    for index, value in enumerate(record.items("requests")):
        if not isinstance(value, dict):
            raise record.error(f"requests[{index}]", "expected a JSON object")
        request = Record(record.path, index + 1, value)
        time_s = start_s + request.number("t")
        if "requests" in value:
            child = f"{key}/{request.text('agent_id', str(index))}"
            _requests(request, child, key, time_s, local, ids, block_tokens, out)
            continue
        blocks = request.ids("hash_ids")
        if blocks.size and not 0 <= int(blocks.min()) <= int(blocks.max()) <= LOCAL_ID_MAX:
            raise request.error("hash_ids", f"ids must lie in [0, {LOCAL_ID_MAX}]")
        if pin:
            pin = False
            local.pin(blocks[: len(shared)], shared[: len(blocks)])
        out.append(_request(request, key, parent, time_s, local(blocks)))


def _request(request: Record, key: str, parent: str, time_s: float, blocks: I64) -> RawRequest:
    stop: Any = STOP_NAMES.get(request.text("stop", ""), Stop.UNKNOWN)
    return RawRequest(
        time_ns=round(time_s * NS),
        session=key,
        ids=blocks,
        input_tokens=request.tokens("in"),
        output_tokens=request.tokens("out", 0),
        stop=stop,
        parent=parent,
        service_ns=round(request.number("api_time", 0.0) * NS),
    )
