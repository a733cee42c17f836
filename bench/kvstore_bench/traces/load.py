"""One entry for all formats: tell which it is, read it, bring it to the common form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from kvstore_bench.traces import bailian, chat, kvtester, lmcache, mooncake, own
from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.fields import Record
from kvstore_bench.traces.model import RawRequest, Trace, build
from kvstore_bench.traces.options import ReadOptions, Skips
from kvstore_bench.traces.source import is_tar, lines, members, open_packed, parse_json
from kvstore_bench.traces.text import Blocks

Reader = Callable[[Path, ReadOptions, Skips], Iterator[RawRequest]]

FORMATS: dict[str, Reader] = {
    "mooncake": mooncake.read,
    "kvtester": kvtester.read,
    "lmcache": lmcache.read,
    "bailian": bailian.read,
    "chat": chat.read,
    "own": own.read,
}
PARTIAL = {"mooncake", "bailian"}
TEXT = {"lmcache", "chat"}
REQUESTS_MAX = 50_000_000


def detect(path: Path) -> str:
    """Name of the format, by the first record. Raises TraceError when none fits."""
    name, line, text = _first(path)
    record = Record(name, line, parse_json(name, line, text))
    keys = record.value.keys()
    if "kvstore_trace" in keys:
        return "own"
    if "requests" in keys:
        return "kvtester"
    if {"chat_id", "hash_ids"} <= keys:
        return "bailian"
    if {"timestamp", "hash_ids"} <= keys:
        return "mooncake"
    if "messages" in keys or isinstance(record.value.get("body"), dict):
        return "chat"
    if {"timestamp", "input"} <= keys:
        return "lmcache"
    found = ", ".join(sorted(keys)[:8]) or "nothing"
    raise TraceError(name, f"no known trace format has the fields {found}", line=line, mend="say which with --format")


def _first(path: Path) -> tuple[str, int, bytes]:
    """(file, line, text) of the first record; line 0 when it is the whole file."""
    if path.is_dir() or is_tar(path):
        for name, content in members(path):
            if name.endswith((".md", ".txt")):
                continue
            head = content[:1].strip() or content[:64].strip()[:1]
            single = head == b"{" and name.endswith(".json")
            if single:
                return name, 0, content
            return name, 1, content.split(b"\n", 1)[0]
        raise TraceError(str(path), "is empty", mend="name a file, folder or archive with a trace in it")
    with open_packed(path) as stream:
        for number, line in lines(str(path), stream):
            if line.strip() in (b"{", b"["):
                stream.close()
                return str(path), 0, ReadOptions().single(path)
            return str(path), number, line
    raise TraceError(str(path), "is empty", mend="name a file with at least one request")


def load(
    path: Path,
    options: ReadOptions | None = None,
    *,
    form: str = "",
    lenient: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Trace:
    """The trace of one file, folder or archive, packed or not.

    `progress` is called with the number of requests now and then. Raises TraceError.
    """
    if not path.exists():
        raise TraceError(str(path), "doesn't exist", mend="check the path")
    form = form or detect(path)
    if form not in FORMATS:
        raise TraceError(str(path), f"unknown format {form!r}", mend=f"use one of {', '.join(FORMATS)}")
    options = replace(options) if options else ReadOptions()
    options.is_archive = path.is_dir() or is_tar(path)
    options.partial_last = form in PARTIAL
    skips = Skips(lenient)
    requests = _collect(path, FORMATS[form](path, options, skips), skips, progress)
    if not requests:
        why = f"; {skips.count} skipped, the first: {skips.first[0]}" if skips.count else ""
        raise TraceError(str(path), f"holds no usable request{why}", mend="is it the right file?")
    trace = build(_name(path), requests, options.block_tokens, partial_last=options.partial_last)
    trace.skipped = skips.count
    trace.notes.extend(skips.first)
    if form in TEXT and (note := Blocks("", 1).note) and not options.tokenizer:
        trace.notes.append(note)
    return trace


def _name(path: Path) -> str:
    name = path.name
    for suffix in (".xz", ".gz", ".bz2", ".zst", ".tar", ".jsonl", ".json"):
        name = name.removesuffix(suffix)
    return name


def _collect(
    path: Path, reader: Iterable[RawRequest], skips: Skips, progress: Callable[[int], None] | None
) -> list[RawRequest]:
    """All requests; of a container that is cut off, those before the cut when lenient."""
    requests: list[RawRequest] = []
    try:
        for request in reader:
            requests.append(request)
            if len(requests) > REQUESTS_MAX:
                raise TraceError(str(path), f"has more than {REQUESTS_MAX} requests", mend="cut it into several files")
            if progress is not None and len(requests) % 256 == 0:
                progress(len(requests))
    except TraceError as error:
        if not requests or len(requests) > REQUESTS_MAX:
            raise
        skips.take(error)
    return requests
