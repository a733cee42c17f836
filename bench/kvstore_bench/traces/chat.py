"""OpenAI-style chat JSONL: one request a line, `messages` with roles and text, and when it came.

Time is `timestamp` or `created` (seconds); without one, requests are a second apart and that is said. The session is
`session_id`, `conversation_id` or `user`; without one, a request whose messages begin with an earlier request's
messages is its next turn. The last message tells why the one before stopped: a `tool` message means that the model
waited for a tool.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.fields import Record
from kvstore_bench.traces.model import STOP_NAMES, RawRequest, Stop
from kvstore_bench.traces.options import ReadOptions, Skips
from kvstore_bench.traces.source import line_sources, lines, parse_json
from kvstore_bench.traces.text import Blocks

BLOCK_TOKENS = 64
NS = 1_000_000_000
SESSION_FIELDS = ("session_id", "conversation_id", "user")
TIME_FIELDS = ("timestamp", "created")


class _Threads:
    """Finds the session that a list of messages continues."""

    def __init__(self) -> None:
        self._ends: dict[int, str] = {}

    def find(self, messages: list[str]) -> str:
        digests, digest = [], 0
        for message in messages:
            digest = xxhash.xxh3_64_intdigest(message.encode("utf-8", "replace"), seed=digest)
            digests.append(digest)
        session = next((self._ends[d] for d in reversed(digests) if d in self._ends), f"s{len(self._ends)}")
        self._ends[digests[-1]] = session
        return session


def read(path: Path, options: ReadOptions, skips: Skips) -> Iterator[RawRequest]:
    """All requests in file order."""
    blocks = Blocks(options.tokenizer, options.block_tokens_or(BLOCK_TOKENS))
    threads = _Threads()
    for name, stream in line_sources(path):
        for number, line in lines(name, stream):
            try:
                yield _request(Record(name, number, parse_json(name, number, line)), blocks, threads)
            except TraceError as error:
                skips.take(error)


def _request(record: Record, blocks: Blocks, threads: _Threads) -> RawRequest:
    body = record.value.get("body")
    if isinstance(body, dict):
        record = Record(record.path, record.line, {**record.value, **body})
    messages = [_message(record, index, value) for index, value in enumerate(record.items("messages"))]
    if not messages:
        raise record.error("messages", "is empty")
    named = next((field for field in SESSION_FIELDS if record.value.get(field) is not None), "")
    timed = next((field for field in TIME_FIELDS if record.value.get(field) is not None), "")
    seconds = record.number(timed) if timed else float(record.line)
    session = record.text(named) if named else threads.find(messages)
    ids, tokens = blocks.of("\x1e".join(messages))
    output, stop, tool = _answer(record, blocks)
    return RawRequest(round(seconds * NS), session, ids, tokens, output, stop=stop, tool=tool)


def _message(record: Record, index: int, value: Any) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise record.error(f"messages[{index}]", "expected an object with a role")
    content = value.get("content")
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    calls = value.get("tool_calls")
    return f"{value['role']}\x1f{text}" + (json.dumps(calls, sort_keys=True) if calls else "")


def _answer(record: Record, blocks: Blocks) -> tuple[int, Stop, str]:
    """(output tokens, stop, tool) of the response, when the line has one."""
    response = record.value.get("response")
    choices = response.get("choices") if isinstance(response, dict) else record.value.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return 0, Stop.UNKNOWN, ""
    message = choices[0].get("message")
    message = message if isinstance(message, dict) else {}
    stop = STOP_NAMES.get(str(choices[0].get("finish_reason")), Stop.UNKNOWN)
    calls = message.get("tool_calls")
    tool = ""
    if isinstance(calls, list) and calls and isinstance(calls[0], dict):
        function = calls[0].get("function")
        tool = str(function.get("name", "")) if isinstance(function, dict) else ""
    return blocks.count(str(message.get("content") or "")), stop, tool
