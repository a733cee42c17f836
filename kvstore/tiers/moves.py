"""What is moved, and how it moves in memory. Files are in file_moves.py.

What is verified, and when (XXH3-64 of each layer slice):

    memory -> memory   the target: hashed in the pass that stores it, from the registers that it is stored from
    file   -> memory   the target, after the read landed; other threads have their reads in flight meanwhile
    memory -> file     the source, before the write: bytes that are wrong already must not become durable

Copying and hashing is done by a small compiled helper (native.py), one call for a whole unit, the interpreter lock
released; in its absence by memmove and the xxhash package, step by step, the hash following while the step is in the
processor's cache.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import ChecksumMismatch, InvalidField, KVStoreError
from kvstore.tiers import native
from kvstore.tiers.files import OpenFile

Bytes = npt.NDArray[np.uint8]
_STEP_BYTES = 512 << 10
"""Bytes copied before they are hashed, without the helper: they should be in the cache still."""

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
    """One copy, checked and resolved. `memory`: the bytes on this side; from memory to memory, those of the target."""

    __slots__ = (
        "address",
        "bounce",
        "copy",
        "file",
        "index",
        "memory",
        "offset",
        "result",
        "source_address",
        "stored_bytes",
        "wants_sums",
    )

    def __init__(self, index: int, copy: Copy, memory: memoryview, address: int, source_address: int) -> None:
        self.index = index
        self.copy = copy
        self.memory = memory
        self.address = address
        self.source_address = source_address
        self.wants_sums = copy.checksums is not None or copy.want_checksums
        self.result: CopyResult | None = None
        self.file: OpenFile | None = None
        self.offset = 0
        self.stored_bytes = copy.num_bytes
        """Bytes that a file call moves: rounded up to the file's unit."""
        self.bounce: memoryview | None = None
        """Stands in for the end of `memory`, or for all of it, during a file call."""

    @property
    def span(self) -> native.Span:
        """As the compiled helper wants it."""
        return self.address, self.source_address, self.copy.num_bytes, self.copy.slice_bytes


Obstacle = Callable[[], KVStoreError | None]
"""Asked before each piece of work: why it must not start, or None."""


def resolve(copies: Sequence[Copy], first: int = 0) -> list[Job]:
    """Check every copy and work out its addresses. Raises InvalidField naming the position, counted from `first`."""
    pools: dict[int, Pool] = {}
    return [_resolve_one(index, copy, pools) for index, copy in enumerate(copies, first)]


def _resolve_one(index: int, copy: Copy, pools: dict[int, Pool]) -> Job:
    n, size, expected = copy.num_bytes, copy.slice_bytes, copy.checksums
    if n <= 0 or size <= 0 or n % size:
        raise InvalidField(f"copies[{index}]", f"{n} bytes in slices of {size}", "give whole slices")
    if expected is not None and len(expected) * size != n * 8:
        raise InvalidField(f"copies[{index}].checksums", f"{len(expected)} bytes", "give 8 bytes a slice")
    source, target = copy.source, copy.target
    if isinstance(source, Memory):
        pool = pools.get(id(source.array)) or _add_pool(source, pools)
        if not 0 <= source.offset <= pool.size - n:
            raise _outside(index, source, n, pool)
        here = pool.address + source.offset
        if isinstance(target, File):
            return _file_job(index, copy, pool.view[source.offset : source.offset + n], here, target)
    elif isinstance(target, File):
        raise InvalidField(f"copies[{index}]", "from file to file", "go through memory")
    pool = pools.get(id(target.array)) or _add_pool(target, pools)
    if not 0 <= target.offset <= pool.size - n:
        raise _outside(index, target, n, pool)
    if not pool.writeable:
        raise InvalidField(f"copies[{index}]", "target is read-only", "give a writeable array")
    memory = pool.view[target.offset : target.offset + n]
    if isinstance(source, File):
        return _file_job(index, copy, memory, pool.address + target.offset, source)
    return Job(index, copy, memory, pool.address + target.offset, here)


def _add_pool(place: Memory, pools: dict[int, Pool]) -> Pool:
    pools[id(place.array)] = pool = Pool(place.array)
    return pool


def _outside(index: int, place: Memory, num_bytes: int, pool: Pool) -> InvalidField:
    text = f"{num_bytes} bytes at {place.offset} don't fit into {pool.size}"
    return InvalidField(f"copies[{index}]", text, "give a place inside of the array")


def _file_job(index: int, copy: Copy, memory: memoryview, address: int, place: File) -> Job:
    align = place.file.align
    if place.offset < 0 or place.offset % align:
        raise InvalidField(f"copies[{index}]", f"file offset {place.offset}", "give a multiple of 4,096")
    job = Job(index, copy, memory, address, 0)
    job.file, job.offset = place.file, place.offset
    job.stored_bytes = -(-copy.num_bytes // align) * align
    return job


def fail(job: Job, error: KVStoreError) -> None:
    """Record the outcome of a copy that didn't work."""
    job.result = CopyResult(error)


def fail_all(jobs: Sequence[Job], error: KVStoreError) -> None:
    """Record one outcome for many copies."""
    for job in jobs:
        fail(job, error)


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


def sums_of(jobs: Sequence[Job]) -> list[bytes | None]:
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


def settle(job: Job, found: bytes | None, what: str) -> bool:
    """Compare and record. Returns whether the copy is good."""
    expected = job.copy.checksums
    if expected is not None and found != expected:
        assert found is not None
        fail(job, mismatch(found, expected, what))
        return False
    job.result = CopyResult(None, found)
    return True


# ---- memory to memory ----------------------------------------------------------------------------------------------


def copy_jobs(jobs: Sequence[Job], obstacle: Obstacle) -> None:
    """Carry out copies in memory."""
    stop = obstacle()
    if stop is not None:
        fail_all(jobs, stop)
        return
    helper = _helper_for(jobs)
    if helper is not None:
        for job, found in zip(jobs, _split(jobs, helper.copy([job.span for job in jobs])), strict=True):
            settle(job, found if job.wants_sums else None, "copy in memory")
        return
    for job in jobs:
        settle(job, _python_copy(job), "copy in memory")


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
