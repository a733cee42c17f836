"""LMCache agent traces: JSONL with `timestamp` (us), `input` (the whole prompt's text), `output`, `session_id`.

Text becomes blocks through a tokenizer when one is named (anything `transformers` loads), else through a stand-in
that is said aloud: 4 UTF-8 bytes are one token. Every call of a run but its last is followed by a tool (the agent's
shell), so stops are tool calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.fields import Record
from kvstore_bench.traces.model import RawRequest, Stop
from kvstore_bench.traces.options import ReadOptions, Skips
from kvstore_bench.traces.source import line_sources, lines, parse_json
from kvstore_bench.traces.text import Blocks

BLOCK_TOKENS = 64
US = 1000


def read(path: Path, options: ReadOptions, skips: Skips) -> Iterator[RawRequest]:
    """All calls, session by session."""
    blocks = Blocks(options.tokenizer, options.block_tokens_or(BLOCK_TOKENS))
    for name, stream in line_sources(path):
        for number, line in lines(name, stream):
            try:
                yield _request(Record(name, number, parse_json(name, number, line)), blocks, Path(name).stem)
            except TraceError as error:
                skips.take(error)


def _request(record: Record, blocks: Blocks, default_session: str) -> RawRequest:
    time_ns = round(record.number("timestamp", high=1e17) * US)
    ids, tokens = blocks.of(record.text("input"))
    output = record.text("output", "")
    return RawRequest(
        time_ns,
        record.text("session_id", default_session),
        ids,
        tokens,
        blocks.count(output),
        stop=Stop.TOOL,
    )
