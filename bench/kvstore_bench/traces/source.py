"""Bytes of a trace, whatever it is packed in: plain, gz, bz2, xz, zst (when `zstandard` is there), and tar of any of
these.

Compression is told by the first bytes, never by the name. Lines are streamed with a bound on their length; members of
an archive come in name order of the archive's own order. All trouble with the container is a `TraceError` naming the
file.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from kvstore_bench.traces.errors import TraceError

LINE_BYTES_MAX = 256 << 20
MEMBER_BYTES_MAX = 1 << 30

Progress = Callable[[int, int], None]
"""Called with (bytes read of the packed file, its size)."""

_PACKED_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError)


def open_packed(path: Path) -> IO[bytes]:
    """A readable stream of the unpacked bytes."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise TraceError(str(path), error.strerror or str(error), mend="check the path and its permissions") from None
    magic = raw.read(6)
    raw.seek(0)
    if magic.startswith(b"\xfd7zXZ\x00"):
        return cast(IO[bytes], lzma.LZMAFile(raw))
    if magic.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if magic.startswith(b"BZh"):
        return cast(IO[bytes], bz2.BZ2File(raw))
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        return _open_zstd(path, raw)
    return raw


def _open_zstd(path: Path, raw: IO[bytes]) -> IO[bytes]:
    try:
        import zstandard  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise TraceError(str(path), "is zstd-compressed", mend="pip install zstandard, or unpack it first") from None
    return cast(IO[bytes], zstandard.ZstdDecompressor().stream_reader(raw))


def is_tar(path: Path) -> bool:
    """Whether the unpacked stream is a tar archive."""
    with open_packed(path) as stream:
        try:
            head = stream.read(512)
        except _PACKED_ERRORS as error:
            raise TraceError(
                str(path), f"can't be unpacked: {error}", mend="the file is truncated or corrupt"
            ) from None
    return len(head) == 512 and head[257:262] == b"ustar"


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of every regular file of a tar archive or folder, one at a time."""
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if file.is_file() and not file.name.startswith("."):
                with open_packed(file) as stream:
                    yield str(file), _read_all(str(file), stream)
        return
    with open_packed(path) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    content = archive.extractfile(member) if member.isfile() else None
                    if content is not None:
                        name = f"{path}!{member.name}"
                        yield name, _read_all(name, content)
        except _PACKED_ERRORS as error:
            raise TraceError(
                str(path), f"can't be unpacked: {error}", mend="the archive is truncated or corrupt"
            ) from None


def _read_all(name: str, stream: IO[bytes]) -> bytes:
    try:
        content = stream.read(MEMBER_BYTES_MAX + 1)
    except _PACKED_ERRORS as error:
        raise TraceError(name, f"can't be unpacked: {error}", mend="the file is truncated or corrupt") from None
    if len(content) > MEMBER_BYTES_MAX:
        raise TraceError(name, f"is larger than {MEMBER_BYTES_MAX >> 20} MiB", mend="split it into several files")
    return content


def lines(name: str, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line) of every line that isn't blank."""
    number = 0
    while True:
        try:
            line = stream.readline(LINE_BYTES_MAX + 1)
        except _PACKED_ERRORS as error:
            raise TraceError(
                name, f"can't be unpacked: {error}", line=number + 1, mend="the file is truncated or corrupt"
            ) from None
        if not line:
            return
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise TraceError(
                name, f"line is longer than {LINE_BYTES_MAX >> 20} MiB", line=number, mend="is it JSON lines?"
            )
        if line.strip():
            yield number, line


def line_sources(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Streams of JSON lines: the file itself, or every member of an archive or folder."""
    if path.is_dir() or is_tar(path):
        for name, content in members(path):
            yield name, io.BytesIO(content)
    else:
        with open_packed(path) as stream:
            yield str(path), stream


def parse_json(name: str, line: int, text: bytes) -> dict[str, Any]:
    """One JSON object, or a TraceError that names the place."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(name, f"isn't valid JSON: {error}", line=line, mend="the line is cut off or no JSON") from None
    if not isinstance(value, dict):
        raise TraceError(name, f"expected a JSON object, found {type(value).__name__}", line=line)
    return value
