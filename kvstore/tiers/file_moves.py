"""How bytes move between memory and files.

Copies whose places are adjacent in a file are one preadv or pwritev. When that fails or comes back short, what is
missing is done again copy by copy, so that one bad place on the disk costs one block and not its neighbours.

O_DIRECT wants addresses and lengths in units of 4 KiB. Aligned memory is used in place; the odd end of a payload, and
memory that isn't aligned, go through a bounce buffer of the thread. Space behind a payload, up to the unit, is written
as zeros.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence

from kvstore.errors import KVStoreError, TierFull, TransferError
from kvstore.tiers import native
from kvstore.tiers.files import OpenFile
from kvstore.tiers.moves import Job, Obstacle, fail, fail_all, settle, sums_of

_Call = Callable[[Sequence[memoryview], int], int]
"""`OpenFile.read` or `OpenFile.write`."""

_MAX_RUN = 256
"""Copies in one call; each takes at most two of the kernel's 1,024 vectors."""


def read_jobs(jobs: Sequence[Job], obstacle: Obstacle) -> None:
    """Carry out copies from files to memory; joined where they follow each other. Verified together at the end."""
    landed = _move(_plan(jobs), obstacle, "read")
    for job in landed:
        if job.bounce is not None:
            at = _bounced_from(job)
            job.memory[at:] = job.bounce[: len(job.memory) - at]
    _release(jobs)
    for job, found in zip(landed, sums_of(landed), strict=True):
        settle(job, found, "read from disk")


def check_sources(jobs: Sequence[Job]) -> list[Job]:
    """The first half of a copy from memory to a file: those whose source is right; the others have failed."""
    verified = zip(jobs, sums_of(jobs), strict=True)
    return [job for job, found in verified if settle(job, found, "in memory, before writing")]


def write_jobs(good: Sequence[Job], obstacle: Obstacle) -> None:
    """The second half: carry out copies from memory to files, of checked sources."""
    plan = _plan(good)
    for job in good:
        if job.bounce is not None:
            at = _bounced_from(job)
            rest = len(job.memory) - at
            job.bounce[:rest] = job.memory[at:]
            job.bounce[rest:] = bytes(len(job.bounce) - rest)
    _move(plan, obstacle, "write")
    _release(good)


# ---- runs ----------------------------------------------------------------------------------------------------------


class _Run:
    """Jobs that are adjacent in one file, and the one call that moves them all."""

    __slots__ = ("buffers", "file", "jobs", "num_bytes", "offset")

    def __init__(self, file: OpenFile, offset: int) -> None:
        self.file = file
        self.offset = offset
        self.jobs: list[Job] = []
        self.buffers: list[memoryview] = []
        self.num_bytes = 0

    def add(self, job: Job) -> None:
        """Append one; sets its bounce buffer when it needs one."""
        self.jobs.append(job)
        self.buffers += _buffers(job, self.file.align)
        self.num_bytes += job.stored_bytes


def _plan(jobs: Sequence[Job]) -> list[_Run]:
    """Everything is worked out before the first call, so that little is done between calls: there threads compete."""
    plan: list[_Run] = []
    run: _Run | None = None
    for job in jobs:
        assert job.file is not None
        if (
            run is None
            or job.offset != run.offset + run.num_bytes
            or job.file is not run.file
            or len(run.jobs) == _MAX_RUN
        ):
            run = _Run(job.file, job.offset)
            plan.append(run)
        run.add(job)
    return plan


def _move(plan: Sequence[_Run], obstacle: Obstacle, word: str) -> list[Job]:
    """Carry out; returns the good ones, records the failure of the others."""
    good: list[Job] = []
    helper = native.load() if len(plan) > 1 and all(map(_is_plain, plan)) else None
    if helper is not None and obstacle() is None:
        calls = [(run.file.fd, run.jobs[0].address, run.num_bytes, run.offset) for run in plan]
        results = helper.read(calls) if word == "read" else helper.write(calls)
        for run, result in zip(plan, results, strict=True):
            error = OSError(-result, os.strerror(-result)) if result < 0 else None
            good += _judge(run, max(0, result), error, word)
        return good
    for run in plan:
        if (stop := obstacle()) is not None:
            fail_all(run.jobs, stop)
            continue
        try:
            moved, error = _call_of(run.file, word)(run.buffers, run.offset), None
        except OSError as problem:
            moved, error = 0, problem
        good += _judge(run, moved, error, word)
    return good


def _is_plain(run: _Run) -> bool:
    """One block that lies in its own memory: the helper can do many of these in one call, without the interpreter."""
    return len(run.jobs) == 1 and run.jobs[0].bounce is None and run.file.faults is None


def _call_of(file: OpenFile, word: str) -> _Call:
    return file.read if word == "read" else file.write


def _judge(run: _Run, moved: int, error: OSError | None, word: str) -> list[Job]:
    if moved == run.num_bytes:
        return run.jobs
    return _salvage(run, moved, error, _call_of(run.file, word), word)


def _salvage(run: _Run, moved: int, error: OSError | None, call: _Call, word: str) -> list[Job]:
    """After a call that failed or came back short: go on with each job alone, where it isn't through."""
    if error is not None and len(run.jobs) == 1:
        fail(run.jobs[0], _os_error(run.file, word, run.offset, error))
        return []
    good: list[Job] = []
    start = 0
    for job in run.jobs:
        done = min(max(0, moved - start), job.stored_bytes)
        if _alone(run.file, job, done, call, word):
            good.append(job)
        start += job.stored_bytes
    return good


def _alone(file: OpenFile, job: Job, done: int, call: _Call, word: str) -> bool:
    """Move the rest of one job, as long as calls make progress. Returns success; records failure."""
    buffers, wanted = _seen(job), job.stored_bytes
    done -= done % file.align
    try:
        while done < wanted:
            count = call(_rest(buffers, done), job.offset + done)
            if done + count < wanted:
                count -= count % file.align
            if count <= 0:
                text = f"{file.name}: short {word} at {job.offset}: {done} of {wanted} bytes; the file was cut"
                fail(job, TransferError(text))
                return False
            done += count
    except OSError as error:
        fail(job, _os_error(file, word, job.offset, error))
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
        return TierFull(f"{text}; free space on the disk or make nvme_bytes smaller")
    return TransferError(text)


# ---- alignment -----------------------------------------------------------------------------------------------------


def _buffers(job: Job, align: int) -> list[memoryview]:
    """What the file call sees of one job. Sets `job.bounce` when a part of it isn't the job's own memory."""
    total = job.copy.num_bytes
    if align > 1 and job.address % align:
        job.bounce = _bounce.take(job.stored_bytes)
    elif total != job.stored_bytes:
        job.bounce = _bounce.take(align)
    return _seen(job)


def _seen(job: Job) -> list[memoryview]:
    if job.bounce is None:
        return [job.memory]
    at = _bounced_from(job)
    return [job.memory[:at], job.bounce] if at else [job.bounce]


def _bounced_from(job: Job) -> int:
    """Offset in the job's memory from which the bounce buffer stands in for it."""
    assert job.bounce is not None
    return job.stored_bytes - len(job.bounce)


def _release(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.bounce = None
    _bounce.rewind()


class _Bounce(threading.local):
    """Aligned memory of the calling thread, handed out front to back within one unit."""

    def __init__(self) -> None:
        self._chunks: list[memoryview] = []
        self._used = 0

    def take(self, num_bytes: int) -> memoryview:
        """Room of `num_bytes`, a multiple of 4 KiB; valid until `rewind`."""
        if not self._chunks or self._used + num_bytes > len(self._chunks[-1]):
            self._chunks.append(memoryview(mmap.mmap(-1, max(num_bytes, _CHUNK_BYTES))))
            self._used = 0
        start = self._used
        self._used += num_bytes
        return self._chunks[-1][start : self._used]

    def rewind(self) -> None:
        """Everything taken is free again; more than one chunk isn't kept."""
        del self._chunks[1:]
        self._used = 0


_CHUNK_BYTES = 2 << 20
_bounce = _Bounce()
