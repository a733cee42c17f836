"""The DRAM pool: one shared memory object that the service and its clients map.

It is created without a name (memfd, or an unnamed file on a private tmpfs), so a killed process leaves nothing
behind: the memory goes when the last map and descriptor go. Large reads with O_DIRECT run about twice as fast into
huge pages, so three ways to get them are tried, best first:

    hugetlb     memfd with MFD_HUGETLB            needs vm.nr_hugepages free for the whole arena
    tmpfs       unnamed file on tmpfs huge=always a mounted one given by path, or (with CAP_SYS_ADMIN) one of our
                                                  own that is never attached to the file tree
    memfd       plain memfd + MADV_HUGEPAGE       huge only where shmem_enabled is "advise" or "always"

First touch of fresh memory is slower than the disk, so `create` touches every 4 KiB of it beforehand, in parallel.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvstore.errors import SetupError

Huge = Literal["auto", "never", "require"]
HUGE_BYTES = 2 << 20
_TOUCH_BYTES = 64 << 20
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Backing:
    fd: int
    page_kind: str
    """hugetlb, tmpfs (huge), or memfd (4 KiB, unless shmem_enabled says otherwise)."""
    advice: str


class Arena:
    """Shared memory. `array` is `[size]` u8, page-aligned, zero at first; written by whoever owns a slot."""

    def __init__(self, backing: _Backing, size: int, map_bytes: int) -> None:
        self.fd = backing.fd
        self.size = size
        self.page_kind = backing.page_kind
        self.advice = backing.advice
        self._map: mmap.mmap | None = mmap.mmap(backing.fd, map_bytes)
        self.array: Bytes = np.frombuffer(self._map, dtype=np.uint8)[:size]

    @classmethod
    def create(
        cls, capacity_bytes: int, huge: Huge = "auto", pretouch_threads: int = 0, tmpfs: Path | None = None
    ) -> Arena:
        """A new arena, touched. `pretouch_threads` 0: one a core. `tmpfs`: a mount with huge=always to use.

        Raises SetupError when the memory isn't there, or `huge` is "require" and no huge pages can be had.
        """
        if capacity_bytes <= 0:
            raise SetupError(f"dram_bytes: {capacity_bytes} is not positive; give the size of the DRAM pool")
        map_bytes = -(-capacity_bytes // HUGE_BYTES) * HUGE_BYTES
        check_memory(map_bytes)
        backing = _choose(map_bytes, huge, tmpfs)
        try:
            arena = cls(backing, capacity_bytes, map_bytes)
        except (OSError, ValueError) as error:
            os.close(backing.fd)
            raise SetupError(f"dram_bytes: can't map {map_bytes} bytes ({error}); make it smaller") from None
        arena._prepare(map_bytes, pretouch_threads or os.cpu_count() or 1)
        return arena

    @classmethod
    def map(cls, fd: int, size: int) -> Arena:
        """Map an arena that another process created; takes over `fd`. Raises SetupError when it's too short."""
        found = os.fstat(fd).st_size
        if found < size or size <= 0:
            raise SetupError(f"arena: descriptor holds {found} bytes, {size} were announced; reconnect to the service")
        map_bytes = min(found, -(-size // HUGE_BYTES) * HUGE_BYTES)
        return cls(_Backing(fd, "mapped", ""), size, map_bytes)

    def close(self) -> None:
        """Unmap and close. Views that others still hold keep the map alive until they go."""
        if self._map is None:
            return
        self.array = np.empty(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):  # a view is still out there: its end unmaps
            self._map.close()
        self._map = None
        os.close(self.fd)

    def _prepare(self, map_bytes: int, num_threads: int) -> None:
        assert self._map is not None
        if self.page_kind == "memfd":
            self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        with ThreadPoolExecutor(num_threads, "pretouch") as pool:
            list(pool.map(lambda at: whole[at : at + _TOUCH_BYTES].fill(0), range(0, map_bytes, _TOUCH_BYTES)))


def check_memory(wanted_bytes: int) -> None:
    """Raises SetupError when the machine can't hold `wanted_bytes` more; the OOM killer would come otherwise."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    room = max(kib.get("MemAvailable", 0), kib.get("HugePages_Free", 0) * kib.get("Hugepagesize", 0)) * 1024
    if room and wanted_bytes > room:
        raise SetupError(
            f"dram_bytes: {wanted_bytes} bytes asked for, {room} are available; make it smaller or free memory"
        )


def _choose(map_bytes: int, huge: Huge, tmpfs: Path | None) -> _Backing:
    if huge == "never":
        return _Backing(_plain(map_bytes), "memfd", "")
    if (fd := _hugetlb(map_bytes)) >= 0:
        return _Backing(fd, "hugetlb", "")
    if tmpfs is not None:
        return _Backing(_unnamed_on(tmpfs, map_bytes), "tmpfs", "")
    if (fd := _private_tmpfs(map_bytes)) >= 0:
        return _Backing(fd, "tmpfs", "")
    if _shmem_mode() in ("always", "advise"):
        return _Backing(_plain(map_bytes), "memfd", "")
    advice = (
        "the DRAM pool has 4 KiB pages, so disk reads run at about half speed; as root set "
        f"`sysctl vm.nr_hugepages={map_bytes // HUGE_BYTES}`, "
        "or start the service with CAP_SYS_ADMIN (it then makes a private tmpfs with huge=always)"
    )
    if huge == "require":
        raise SetupError(f"huge_pages: no huge pages to be had: {advice}")
    return _Backing(_plain(map_bytes), "memfd", advice)


def _shmem_mode() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return "never"
    return text.partition("[")[2].partition("]")[0]


def _plain(map_bytes: int) -> int:
    return _sized(os.memfd_create("kvstore-arena", os.MFD_CLOEXEC), map_bytes)


def _hugetlb(map_bytes: int) -> int:
    """Descriptor, or -1 when the pages aren't there. The map reserves them, so a later touch can't fail with SIGBUS."""
    fd = -1
    try:
        fd = os.memfd_create("kvstore-arena", os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
        os.ftruncate(fd, map_bytes)
        mmap.mmap(fd, map_bytes).close()
        return fd
    except (OSError, ValueError):
        if fd >= 0:
            os.close(fd)
        return -1


def _unnamed_on(folder: Path, map_bytes: int) -> int:
    try:
        return _sized(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), map_bytes)
    except OSError as error:
        raise SetupError(f"huge tmpfs: {folder}: {error.strerror}; give a tmpfs mounted with huge=always") from None


def _sized(fd: int, map_bytes: int) -> int:
    """Give the file its length with real space behind it: a sparse map would end in SIGBUS when memory runs out."""
    try:
        os.ftruncate(fd, map_bytes)
        return fd
    except OSError:
        os.close(fd)
        raise


# System calls of the mount interface (same numbers on every 64-bit Linux); glibc wraps them only since 2.36.
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_SET_STRING, _CMD_CREATE = 1, 6


def _private_tmpfs(map_bytes: int) -> int:
    """An unnamed file on a huge tmpfs that is attached nowhere and dies with its descriptors; -1 without the right."""
    opened: list[int] = []
    try:
        context = _syscall(_FSOPEN, b"tmpfs", 1)
        opened.append(context)
        for key, value in ((b"huge", b"always"), (b"size", str(map_bytes + HUGE_BYTES).encode())):
            _syscall(_FSCONFIG, context, _SET_STRING, key, value, 0)
        _syscall(_FSCONFIG, context, _CMD_CREATE, None, None, 0)
        mount = _syscall(_FSMOUNT, context, 1, 0)
        opened.append(mount)
        return _sized(os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=mount), map_bytes)
    except OSError:
        return -1
    finally:
        for fd in opened:
            os.close(fd)


def _syscall(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
