"""How bytes move: one copy, or a run of copies that are adjacent in a file.

What is verified, and when (XXH3-64 of each layer slice):

    memory -> memory   the target, slice by slice, right after it was copied and while it is in the processor's cache
    file   -> memory   the target, after the read landed; other threads have their reads in flight meanwhile
    memory -> file     the source, before the write: bytes that are wrong already must not become durable

A run of copies is one preadv or pwritev. When it fails or comes back short, what is missing is done again copy by
copy, so that one bad place on the disk costs one block and not its neighbours.

O_DIRECT wants addresses and lengths in units of 4 KiB. Aligned memory is used in place; the odd end of a payload, and
memory that isn't aligned, go through a bounce buffer of the thread. Space behind a payload, up to the unit, is
written as zeros.

The interpreter lock is released inside memmove, preadv, pwritev and XXH3, which is where the time goes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import ChecksumMismatch, InvalidField, KVStoreError, TierFull, TransferError
from kvstore.tiers.files import DIRECT_ALIGN, OpenFile

Bytes = npt.NDArray[np.uint8]
_STEP_BYTES = 64 << 10
"""Bytes copied before they are hashed: small enough to be in the cache still, large enough to hide a call's cost."""

_Call = Callable[[Sequence[memoryview], int], int]
"""`OpenFile.read` or `OpenFile.write`."""

_memmove = ctypes.memmove
_digest = xxhash.xxh3_64_intdigest


@dataclass(slots=True)
class Memory:
    """A place in memory: `array` is a contiguous 1-D u8 view, `offset` counts bytes into it."""

    array: Bytes
    offset: int = 0


@dataclass(slots=True)
class File:
    """A place in a file; `offset` is a multiple of 4 KiB."""

    file: OpenFile
    offset: int


Place = Memory | File


@dataclass(slots=True)
class Copy:
    """Move `num_bytes` from `source` to `target`; one of them may be a file.

    `checksums`: what the bytes must be, 8 bytes LE for each slice of `slice_bytes`; None to move unverified.
    `want_checksums`: compute them and return them.
    """

    source: Place
    target: Place
    num_bytes: int
    slice_bytes: int
    checksums: bytes | None = None
    want_checksums: bool = False


@dataclass(slots=True)
class CopyResult:
    """Outcome of one copy. After an error the target's content is undefined."""

    error: KVStoreError | None
    checksums: bytes | None = None

    @property
    def ok(self) -> bool:
        """Every byte is there, and verified where checksums were given."""
        return self.error is None


class Pool:
    """Address and buffer of an array, worked out once for all its copies."""

    __slots__ = ("address", "array", "size", "view", "writeable")

    def __init__(self, source: Bytes) -> None:
        if source.dtype != np.uint8 or source.ndim != 1 or not source.flags.c_contiguous:
            raise InvalidField(
                "array", f"{source.dtype} {source.shape} is no flat run of bytes", "give a 1-D uint8 view"
            )
        self.array = source
        self.address = int(source.__array_interface__["data"][0])
        self.size = len(source)
        self.view = source.data
        self.writeable = bool(source.flags.writeable)


class Job:
    """One copy, checked, its memory side resolved. `memory`: its bytes; for memory to memory, those of the target."""

    __slots__ = ("address", "copy", "index", "memory", "result", "source_address")

    def __init__(self, index: int, copy: Copy, memory: memoryview, address: int, source_address: int) -> None:
        self.index = index
        self.copy = copy
        self.memory = memory
        self.address = address
        self.source_address = source_address
        self.result: CopyResult | None = None


def fail(job: Job, error: KVStoreError) -> None:
    """Record the outcome of a copy that didn't work."""
    job.result = CopyResult(error)


# ---- checksums -----------------------------------------------------------------------------------------------------


def checksums_of(memory: memoryview, slice_bytes: int) -> bytes:
    """XXH3-64 of each slice of `memory`, 8 bytes LE each."""
    return array("Q", [_digest(memory[at : at + slice_bytes]) for at in range(0, len(memory), slice_bytes)]).tobytes()


def mismatch(found: bytes, expected: bytes, what: str) -> ChecksumMismatch:
    """The error for differing checksums; names the first slice that differs."""
    first = next(i for i in range(0, len(expected), 8) if found[i : i + 8] != expected[i : i + 8]) // 8
    return ChecksumMismatch(f"{what}: bytes of layer slice {first} aren't the ones that were sealed")


def _settle(job: Job, found: bytes | None, what: str) -> bool:
    """Compare and record. Returns whether the copy is good."""
    expected = job.copy.checksums
    if expected is not None and found != expected:
        assert found is not None
        fail(job, mismatch(found, expected, what))
        return False
    job.result = CopyResult(None, found)
    return True


def _wants(copy: Copy) -> bool:
    return copy.checksums is not None or copy.want_checksums


# ---- memory to memory ----------------------------------------------------------------------------------------------


def copy_memory(job: Job) -> None:
    """Copy, hashing each step of the target while it is in the cache."""
    copy = job.copy
    if not _wants(copy):
        _memmove(job.address, job.source_address, copy.num_bytes)
        job.result = CopyResult(None)
        return
    size = copy.slice_bytes
    sums = _copy_large(job) if size > 4 * _STEP_BYTES else _copy_small(job, size * max(1, _STEP_BYTES // size))
    _settle(job, array("Q", sums).tobytes(), "copy in memory")


def _copy_small(job: Job, step: int) -> list[int]:
    target, source, memory = job.address, job.source_address, job.memory
    size, total = job.copy.slice_bytes, job.copy.num_bytes
    sums: list[int] = []
    for start in range(0, total, step):
        end = min(start + step, total)
        _memmove(target + start, source + start, end - start)
        sums += [_digest(memory[at : at + size]) for at in range(start, end, size)]
    return sums


def _copy_large(job: Job) -> list[int]:
    target, source, memory = job.address, job.source_address, job.memory
    sums: list[int] = []
    for first in range(0, job.copy.num_bytes, job.copy.slice_bytes):
        stream = xxhash.xxh3_64()
        for start in range(first, first + job.copy.slice_bytes, 4 * _STEP_BYTES):
            end = min(start + 4 * _STEP_BYTES, first + job.copy.slice_bytes)
            _memmove(target + start, source + start, end - start)
            stream.update(memory[start:end])
        sums.append(stream.intdigest())
    return sums


# ---- bounce buffers ------------------------------------------------------------------------------------------------


class _Bounce(threading.local):
    """Aligned memory of the calling thread, handed out front to back within one operation."""

    def __init__(self) -> None:
        self._view = memoryview(b"")
        self._used = 0

    def reset(self, needed: int) -> None:
        self._used = 0
        if needed > len(self._view):
            self._view = memoryview(mmap.mmap(-1, needed))

    def take(self, num_bytes: int) -> memoryview:
        start = self._used
        self._used += num_bytes
        assert self._used <= len(self._view)
        return self._view[start : self._used]


_bounce = _Bounce()


def _round_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


@dataclass(slots=True)
class _Span:
    """What the file call sees of one job: buffers, and which of them stands in for `memory[at:]`."""

    job: Job
    buffers: list[memoryview]
    num_bytes: int
    bounce: memoryview | None = None
    at: int = 0


def _span(job: Job, align: int) -> _Span:
    total = job.copy.num_bytes
    if align == 1 or (job.address % align == 0 and total % align == 0):
        return _Span(job, [job.memory], total)
    length = _round_up(total, align)
    if job.address % align:
        bounce = _bounce.take(length)
        return _Span(job, [bounce], length, bounce, 0)
    whole = total - total % align
    bounce = _bounce.take(align)
    return _Span(job, [job.memory[:whole], bounce] if whole else [bounce], length, bounce, whole)


def _spans(jobs: Sequence[Job], align: int) -> list[_Span]:
    _bounce.reset(sum(_round_up(j.copy.num_bytes, DIRECT_ALIGN) for j in jobs if _bounces(j, align)))
    return [_span(job, align) for job in jobs]


def _bounces(job: Job, align: int) -> bool:
    return align > 1 and bool(job.address % align or job.copy.num_bytes % align)


# ---- file to memory ------------------------------------------------------------------------------------------------


def read_run(jobs: Sequence[Job]) -> None:
    """Carry out copies whose places are adjacent in one file, in order."""
    place = jobs[0].copy.source
    assert isinstance(place, File)
    spans = _spans(jobs, place.file.align)
    landed = _first_try(place.file.read, spans, place.offset)
    offset, end = place.offset, 0
    for span in spans:
        end += span.num_bytes
        if end <= landed or _again(place.file, span, offset, place.file.read, "read"):
            _land(span)
        offset += span.num_bytes


def _land(span: _Span) -> None:
    job = span.job
    if span.bounce is not None:
        job.memory[span.at :] = span.bounce[: job.copy.num_bytes - span.at]
    found = checksums_of(job.memory, job.copy.slice_bytes) if _wants(job.copy) else None
    _settle(job, found, "read from disk")


# ---- memory to file ------------------------------------------------------------------------------------------------


def write_run(jobs: Sequence[Job]) -> None:
    """Carry out copies whose places are adjacent in one file, in order. Copies whose source is wrong are left out."""
    for run in _good_runs(jobs):
        place = run[0].copy.target
        assert isinstance(place, File)
        spans = _spans(run, place.file.align)
        for span in spans:
            _stage(span)
        landed = _first_try(place.file.write, spans, place.offset)
        offset, end = place.offset, 0
        for span in spans:
            end += span.num_bytes
            if end > landed:
                _again(place.file, span, offset, place.file.write, "write")
            offset += span.num_bytes


def _good_runs(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    run: list[Job] = []
    for job in jobs:
        found = checksums_of(job.memory, job.copy.slice_bytes) if _wants(job.copy) else None
        if _settle(job, found, "in memory, before writing"):
            run.append(job)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _stage(span: _Span) -> None:
    if span.bounce is not None:
        rest = span.job.copy.num_bytes - span.at
        span.bounce[:rest] = span.job.memory[span.at :]
        span.bounce[rest:] = bytes(len(span.bounce) - rest)


# ---- both directions -----------------------------------------------------------------------------------------------


def _first_try(call: _Call, spans: list[_Span], offset: int) -> int:
    """Bytes moved by one call for all spans; 0 when it failed (each is then tried alone, and reports its own error)."""
    if len(spans) == 1:
        return 0
    try:
        return call([b for span in spans for b in span.buffers], offset)
    except OSError:
        return 0


def _again(file: OpenFile, span: _Span, offset: int, call: _Call, word: str) -> bool:
    """Move one span, going on after short counts as long as they make progress. Returns success; records failure."""
    done = 0
    try:
        while done < span.num_bytes:
            count = call(_rest(span.buffers, done), offset + done)
            if done + count < span.num_bytes:
                count -= count % file.align
            if count <= 0:
                text = f"{file.name}: short {word} at {offset}: {done} of {span.num_bytes} bytes; the file was cut"
                fail(span.job, TransferError(text))
                return False
            done += count
    except OSError as error:
        fail(span.job, _os_error(file, word, offset, error))
        return False
    return True


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest


def _os_error(file: OpenFile, word: str, offset: int, error: OSError) -> KVStoreError:
    text = f"{file.name}: {word} at {offset} failed: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TierFull(f"{text}; free space on the disk or make nvme.capacity_bytes smaller")
    return TransferError(text)
