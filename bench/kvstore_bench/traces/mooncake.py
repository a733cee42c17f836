"""Mooncake JSONL: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512-token blocks, global, the last
one partial.

There are no session ids. A request whose ids extend an earlier request's full blocks is taken as that session's next
turn; any other request starts a session.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.fields import Record
from kvstore_bench.traces.model import RawRequest
from kvstore_bench.traces.options import ReadOptions, Skips
from kvstore_bench.traces.source import line_sources, lines, parse_json

BLOCK_TOKENS = 512
MS = 1_000_000


class SessionFinder:
    """Names the session of each request by what it extends."""

    def __init__(self) -> None:
        self._tips: dict[int, int] = {}
        self._tip_of: list[int] = []

    def session(self, ids: list[int], num_full: int) -> int:
        """The session whose last full block lies deepest in `ids`, else a new one. Moves its tip."""
        found = -1
        for block in reversed(ids[1:]):
            found = self._tips.get(block, -1)
            if found >= 0:
                break
        if found < 0:
            found = len(self._tip_of)
            self._tip_of.append(-1)
        self._move(found, ids[num_full - 1] if num_full > 1 else -1)
        return found

    def _move(self, session: int, tip: int) -> None:
        old = self._tip_of[session]
        if old >= 0 and self._tips.get(old) == session:
            del self._tips[old]
        self._tip_of[session] = tip
        if tip >= 0:
            self._tips[tip] = session


def read(path: Path, options: ReadOptions, skips: Skips) -> Iterator[RawRequest]:
    block_tokens = options.block_tokens_or(BLOCK_TOKENS)
    finder = SessionFinder()
    for name, stream in line_sources(path):
        for number, line in lines(name, stream):
            try:
                yield _request(Record(name, number, parse_json(name, number, line)), block_tokens, finder)
            except TraceError as error:
                skips.take(error)


def _request(record: Record, block_tokens: int, finder: SessionFinder) -> RawRequest:
    time_ns = round(record.number("timestamp") * MS)
    input_tokens = record.tokens("input_length")
    output_tokens = record.tokens("output_length", 0)
    ids = record.ids("hash_ids")
    if len(ids) != -(-input_tokens // block_tokens) and len(ids) != input_tokens // block_tokens:
        raise record.error(
            "hash_ids",
            f"{len(ids)} blocks of {block_tokens} tokens don't make {input_tokens} input tokens",
            "another block size? set --block-tokens",
        )
    session = finder.session(ids.tolist(), min(len(ids), input_tokens // block_tokens))
    return RawRequest(time_ns, f"s{session}", ids, input_tokens, output_tokens)
