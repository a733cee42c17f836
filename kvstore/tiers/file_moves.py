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
import threading
from collections.abc import Callable, Iterator, Sequence

from kvstore.errors import KVStoreError, TierFull, TransferError
from kvstore.tiers.files import OpenFile
from kvstore.tiers.moves import Job, Obstacle, fail, fail_all, settle, sums_of

_Call = Callable[[Sequence[memoryview], int], int]
"""`OpenFile.read` or `OpenFile.write`."""

_MAX_RUN = 256
"""Copies in one call; each takes at most two of the kernel's 1,024 vectors."""


def read_jobs(jobs: Sequence[Job], obstacle: Obstacle) -> None:
    """Carry out copies from files to memory; joined where they follow each other. Verified together at the end."""
    landed: list[Job] = []
    for file, run in runs(jobs):
        if (stop := obstacle()) is not None:
            fail_all(run, stop)
        else:
            landed += _read_run(file, run)
    for job, found in zip(landed, sums_of(landed), strict=True):
        settle(job, found, "read from disk")


def write_jobs(jobs: Sequence[Job], obstacle: Obstacle) -> None:
    """Carry out copies from memory to files. Those whose source is wrong are left out."""
    verified = zip(jobs, sums_of(jobs), strict=True)
    good = [job for job, found in verified if settle(job, found, "in memory, before writing")]
    for file, run in runs(good):
        if (stop := obstacle()) is not None:
            fail_all(run, stop)
        else:
            _write_run(file, run)


def runs(jobs: Sequence[Job]) -> Iterator[tuple[OpenFile, list[Job]]]:
    """Cut into runs that are adjacent in one file."""
    run: list[Job] = []
    last: OpenFile | None = None
    end = 0
    for job in jobs:
        assert job.file is not None
        if last is not None and (job.offset != end or job.file is not last or len(run) == _MAX_RUN):
            yield last, run
            run = []
        run.append(job)
        last, end = job.file, job.offset + job.stored_bytes
    if last is not None:
        yield last, run


# ---- one run -------------------------------------------------------------------------------------------------------


def _read_run(file: OpenFile, run: list[Job]) -> list[Job]:
    good = _move_run(file, run, [_buffers(job, file.align) for job in run], file.read, "read")
    for job in good:
        if job.bounce is not None:
            at = _bounced_from(job)
            job.memory[at:] = job.bounce[: len(job.memory) - at]
    _release(run)
    return good


def _write_run(file: OpenFile, run: list[Job]) -> None:
    parts = [_buffers(job, file.align) for job in run]
    for job in run:
        if job.bounce is not None:
            at = _bounced_from(job)
            rest = len(job.memory) - at
            job.bounce[:rest] = job.memory[at:]
            job.bounce[rest:] = bytes(len(job.bounce) - rest)
    _move_run(file, run, parts, file.write, "write")
    _release(run)


def _move_run(file: OpenFile, run: list[Job], parts: list[list[memoryview]], call: _Call, word: str) -> list[Job]:
    """One call for all, then alone what it didn't cover. Returns the good ones, records the failure of others."""
    moved = 0
    if len(run) > 1:
        try:
            moved = call([buffer for part in parts for buffer in part], run[0].offset)
        except OSError:
            moved = 0  # each is tried alone below, and reports its own error
    good: list[Job] = []
    end = 0
    for job, part in zip(run, parts, strict=True):
        end += job.stored_bytes
        if end <= moved or _alone(file, job, part, call, word):
            good.append(job)
    return good


def _alone(file: OpenFile, job: Job, buffers: list[memoryview], call: _Call, word: str) -> bool:
    """Move one, going on after short counts as long as they make progress. Returns success; records failure."""
    done, wanted = 0, job.stored_bytes
    try:
        while done < wanted:
            count = call(_rest(buffers, done) if done else buffers, job.offset + done)
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
    if align == 1 or (job.address % align == 0 and total == job.stored_bytes):
        return [job.memory]
    if job.address % align:
        job.bounce = _bounce.take(job.stored_bytes)
        return [job.bounce]
    job.bounce = _bounce.take(align)
    whole = total - total % align
    return [job.memory[:whole], job.bounce] if whole else [job.bounce]


def _bounced_from(job: Job) -> int:
    """Offset in the job's memory from which the bounce buffer stands in for it."""
    assert job.bounce is not None
    return job.stored_bytes - len(job.bounce)


def _release(run: list[Job]) -> None:
    for job in run:
        job.bounce = None
    _bounce.rewind()


class _Bounce(threading.local):
    """Aligned memory of the calling thread, handed out front to back within one run."""

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
