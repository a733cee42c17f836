"""The one place where bytes meet the operating system's files.

`OpenFile` is a descriptor with its length alignment. O_DIRECT is *probed*, by a real write and read of one unit,
since neither the platform nor the file system's name tells whether it works; where it doesn't, the file is opened
buffered and one warning is logged. Every call passes an optional `Faults` object, so that tests can damage I/O
exactly where the kernel would.

Ownership: whoever opens an `OpenFile` closes it, or lets go of it: its descriptor is closed with the last reference, so
that a number is never used again under a transfer that still runs. Calls on one file may come from many threads
(positions are always explicit).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from kvstore.errors import SetupError

DIRECT_ALIGN = 4096
"""Unit of offsets, lengths and addresses for O_DIRECT; at least the logical block size of every disk in use."""

Buffers = Sequence[memoryview]
log = logging.getLogger(__name__)


class Faults(Protocol):
    """A plan of damage. Every method may raise OSError, wait, or change what happens; the default is to do nothing."""

    def read(self, file: OpenFile, buffers: Buffers, offset: int) -> int:
        """Carry out one read. Returns the byte count, like preadv."""

    def write(self, file: OpenFile, buffers: Buffers, offset: int) -> int:
        """Carry out one write. Returns the byte count, like pwritev."""

    def sync(self, file: OpenFile) -> None:
        """Carry out one fdatasync."""

    def allocate(self, file: OpenFile, offset: int, length: int) -> None:
        """Carry out one fallocate."""


class OpenFile:
    """An open file. `direct`: the page cache is bypassed, so addresses, offsets and lengths must be aligned."""

    __slots__ = ("align", "direct", "faults", "fd", "name")

    def __init__(self, fd: int, name: str, direct: bool, faults: Faults | None = None) -> None:
        self.fd = fd
        self.name = name
        self.direct = direct
        self.align = DIRECT_ALIGN if direct else 1
        self.faults = faults

    @classmethod
    def open(cls, path: Path, flags: int, *, direct: bool, faults: Faults | None = None) -> OpenFile:
        """Open `path` with `flags`, and with O_DIRECT when `direct`. Raises OSError."""
        extra = os.O_DIRECT if direct else 0
        return cls(os.open(path, flags | extra | os.O_CLOEXEC, 0o600), path.name, direct, faults)

    @classmethod
    def adopt(cls, fd: int, name: str, faults: Faults | None = None) -> OpenFile:
        """Take over a descriptor that came from another process; whether it is direct is read from its flags."""
        import fcntl

        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        return cls(fd, name, direct, faults)

    def read(self, buffers: Buffers, offset: int) -> int:
        """Fill `buffers` in order from `offset`; returns the bytes read, which may be fewer. Raises OSError."""
        if self.faults is not None:
            return self.faults.read(self, buffers, offset)
        return os.preadv(self.fd, buffers, offset)

    def write(self, buffers: Buffers, offset: int) -> int:
        """Write `buffers` in order at `offset`; returns the bytes written, which may be fewer. Raises OSError."""
        if self.faults is not None:
            return self.faults.write(self, buffers, offset)
        return os.pwritev(self.fd, buffers, offset)

    def sync(self) -> None:
        """Data, and the metadata needed to read it, are on the medium when this returns. Raises OSError."""
        if self.faults is not None:
            self.faults.sync(self)
        else:
            os.fdatasync(self.fd)

    def allocate(self, offset: int, length: int) -> None:
        """Reserve space on the medium, so that a later write can't fail for want of it. Raises OSError."""
        if self.faults is not None:
            self.faults.allocate(self, offset, length)
        else:
            os.posix_fallocate(self.fd, offset, length)

    def size(self) -> int:
        """Length in bytes."""
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError, TypeError):  # half made, or the interpreter is ending
            self.close()


Direct = Literal["auto", "on", "off"]


def choose_direct(folder: Path, wanted: Direct) -> bool:
    """Whether to open files in `folder` with O_DIRECT. Raises SetupError when it's wanted and doesn't work."""
    if wanted == "off":
        return False
    works = probe_direct(folder)
    if not works and wanted == "on":
        raise SetupError(f"direct_io: O_DIRECT doesn't work in {folder}; set it to auto, or use another disk")
    return works


def probe_direct(folder: Path) -> bool:
    """Whether files in `folder` can be written and read with O_DIRECT at `DIRECT_ALIGN`. Logs one warning when not."""
    path = folder / f".probe-{os.getpid()}"
    try:
        works = _try_direct(path)
    except OSError as error:
        log.warning("%s: O_DIRECT doesn't work here (%s); using buffered I/O", folder, error.strerror)
        return False
    finally:
        path.unlink(missing_ok=True)
    if not works:
        log.warning("%s: O_DIRECT returned other bytes than were written; using buffered I/O", folder)
    return works


def _try_direct(path: Path) -> bool:
    file = OpenFile.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, direct=True)
    try:
        with (
            mmap.mmap(-1, 2 * DIRECT_ALIGN) as room,  # anonymous maps are aligned
            memoryview(room) as whole,
            whole[:DIRECT_ALIGN] as written,
            whole[DIRECT_ALIGN:] as landed,
        ):
            written[:] = bytes(range(256)) * (DIRECT_ALIGN // 256)
            file.write([written], 0)
            return file.read([landed], 0) == DIRECT_ALIGN and written == landed
    finally:
        file.close()
