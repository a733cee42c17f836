"""Alibaba Bailian JSONL: `chat_id`, `parent_chat_id` (-1 for none), `timestamp` (s), `input_length`, `output_length`,
`type`, `turn`, `hash_ids` of 16-token blocks, global.

A session is a chain of chats by parent. A chat whose parent isn't in the trace starts a session.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.fields import Record
from kvstore_bench.traces.model import RawRequest, Stop
from kvstore_bench.traces.options import ReadOptions, Skips
from kvstore_bench.traces.source import line_sources, lines, parse_json

BLOCK_TOKENS = 16
NS = 1_000_000_000


def read(path: Path, options: ReadOptions, skips: Skips) -> Iterator[RawRequest]:
    """All chats in file order; parents come before their children."""
    block_tokens = options.block_tokens_or(BLOCK_TOKENS)
    session_of: dict[str, str] = {}
    for name, stream in line_sources(path):
        for number, line in lines(name, stream):
            try:
                yield _request(Record(name, number, parse_json(name, number, line)), block_tokens, session_of)
            except TraceError as error:
                skips.take(error)


def _request(record: Record, block_tokens: int, session_of: dict[str, str]) -> RawRequest:
    chat = record.text("chat_id")
    parent = record.text("parent_chat_id", "-1")
    time_ns = round(record.number("timestamp") * NS)
    input_tokens = record.tokens("input_length")
    ids = record.ids("hash_ids")
    if not input_tokens // block_tokens <= len(ids) <= input_tokens // block_tokens + 1:
        raise record.error(
            "hash_ids",
            f"{len(ids)} blocks of {block_tokens} tokens don't make {input_tokens} input tokens",
            "another block size? set --block-tokens",
        )
    session = session_of[chat] = session_of.get(parent, chat)
    return RawRequest(time_ns, session, ids, input_tokens, record.tokens("output_length", 0), stop=Stop.TURN)
