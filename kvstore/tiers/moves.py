"""How bytes move: one copy, or a run of copies that are adjacent in a file.

What is verified, and when (XXH3-64 of each layer slice):

    memory -> memory   the target: hashed in the pass that stores it, from the registers that it is stored from
    file   -> memory   the target, after the read landed; other threads have their reads in flight meanwhile
    memory -> file     the source, before the write: bytes that are wrong already must not become durable

A run of copies is one preadv or pwritev. When it fails or comes back short, what is missing is done again copy by
copy, so that one bad place on the disk costs one block and not its neighbours.

O_DIRECT wants addresses and lengths in units of 4 KiB. Aligned memory is used in place; the odd end of a payload, and
memory that isn't aligned, go through a bounce buffer of the thread. Space behind a payload, up to the unit, is
written as zeros.

Copying and hashing is done by a small compiled helper (native.py), one call for a whole run, the interpreter lock
released; in its absence by memmove and the xxhash package, step by step, the hash following while the step is in the
processor's cache.
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
from kvstore.tiers import native
from kvstore.tiers.files import DIRECT_ALIGN, OpenFile

Bytes = npt.NDArray[np.uint8]
_STEP_BYTES = 512 << 10
"""Bytes copied before they are hashed, without the helper: they should be in the cache still."""

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

    __slots__ = ("address", "copy", "index", "memory", "result", "source_address", "wants_sums")

    def __init__(self, index: int, copy: Copy, memory: memoryview, address: int, source_address: int) -> None:
        self.index = index
        self.copy = copy
        self.memory = memory
        self.address = address
        self.source_address = source_address
        self.wants_sums = copy.checksums is not None or copy.want_checksums
        self.result: CopyResult | None = None

    @property
    def span(self) -> native.Span:
        """As the compiled helper wants it."""
        return self.address, self.source_address, self.copy.num_bytes, self.copy.slice_bytes


def fail(job: Job, error: KVStoreError) -> None:
    """Record the outcome of a copy that didn't work."""
    job.result = CopyResult(error)


# ---- checksums -----------------------------------------------------------------------------------------------------


def checksums_of(memory: memoryview, slice_bytes: int) -> bytes:
    """XXH3-64 of each slice of `memory`, 8 bytes LE each."""
    whole = np.frombuffer(memory, dtype=np.uint8)
    span = (int(whole.__array_interface__["data"][0]), 0, len(whole), slice_bytes)
    helper = native.load()
    if helper is not None and slice_bytes >= native.SLICE_BYTES_MIN and len(whole) % slice_bytes == 0:
        return helper.hash([span])
    return _python_sums(memory, slice_bytes)


def _python_sums(memory: memoryview, size: int) -> bytes:
    return array("Q", [_digest(memory[at : at + size]) for at in range(0, len(memory), size)]).tobytes()


def _sums(jobs: Sequence[Job]) -> list[bytes | None]:
    """Checksums of each job's memory, where they are wanted; one call for all of them if it can be had."""
    wanted = [job for job in jobs if job.wants_sums]
    helper = _helper_for(wanted)
    if helper is None:
        return [_python_sums(job.memory, job.copy.slice_bytes) if job.wants_sums else None for job in jobs]
    found = iter(_split(wanted, helper.hash([job.span for job in wanted])))
    return [next(found) if job.wants_sums else None for job in jobs]


def _helper_for(jobs: Sequence[Job]) -> native.Native | None:
    if all(job.copy.slice_bytes >= native.SLICE_BYTES_MIN for job in jobs):
        return native.load()
    return None


def _split(jobs: Sequence[Job], sums: bytes) -> list[bytes]:
    parts, at = [], 0
    for job in jobs:
        length = job.copy.num_bytes // job.copy.slice_bytes * 8
        parts.append(sums[at : at + length])
        at += length
    return parts


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


# ---- memory to memory ----------------------------------------------------------------------------------------------


def copy_run(jobs: Sequence[Job]) -> None:
    """Carry out copies in memory."""
    helper = _helper_for(jobs)
    if helper is not None:
        for job, found in zip(jobs, _split(jobs, helper.copy([job.span for job in jobs])), strict=True):
            _settle(job, found if job.wants_sums else None, "copy in memory")
        return
    for job in jobs:
        _settle(job, _python_copy(job), "copy in memory")


def _python_copy(job: Job) -> bytes | None:
    """Copy, hashing each step of the target while it is in the cache."""
    target, source, memory = job.address, job.source_address, job.memory
    size, total = job.copy.slice_bytes, job.copy.num_bytes
    if not job.wants_sums:
        _memmove(target, source, total)
        return None
    step = size * max(1, _STEP_BYTES // size)
    sums: list[int] = []
    for start in range(0, total, step):
        end = min(start + step, total)
        _memmove(target + start, source + start, end - start)
        sums += [_digest(memory[at : at + size]) for at in range(start, end, size)]
    return array("Q", sums).tobytes()


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
    offset, end, good = place.offset, 0, []
    for span in spans:
        end += span.num_bytes
        if end <= landed or _again(place.file, span, offset, place.file.read, "read"):
            _unstage(span)
            good.append(span.job)
        offset += span.num_bytes
    for job, found in zip(good, _sums(good), strict=True):
        _settle(job, found, "read from disk")


def _unstage(span: _Span) -> None:
    if span.bounce is not None:
        span.job.memory[span.at :] = span.bounce[: span.job.copy.num_bytes - span.at]


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
    for job, found in zip(jobs, _sums(jobs), strict=True):
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
