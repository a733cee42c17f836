"""The NVMe pool: one address space of byte offsets over preallocated segment files.

    slot (byte offset in the pool) = segment index * segment_bytes + offset in the file slab/000000.seg
    slab/000001.seg ...      each `segment_bytes` long, made on first use, dropped when the machine says it's empty

Which size class a segment serves is the slot allocator's business; the slab only maps offsets to files. A segment is
allocated in full when it's made, so that "full" shows as TierFull then, and not as ENOSPC, SIGBUS or a torn block
later. Two limits are kept whatever the machine asks for: `capacity_bytes` over what is really on disk, and
`reserve_bytes` of free space on the file system.

Written by one process (the data directory's lock). Clients read through descriptors they were passed.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstore.core.types import SLOT_ALIGN, Slot
from kvstore.errors import InvalidField, SetupError, TierFull, TransferError
from kvstore.tiers.files import Direct, Faults, OpenFile, choose_direct
from kvstore.tiers.moves import File

DEFAULT_SEGMENT_BYTES = 256 << 20
log = logging.getLogger(__name__)
_NAME = re.compile(r"(\d{6,})\.seg")


class Slab:
    """Segment files of one folder. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        segment_bytes: int,
        reserve_bytes: int,
        direct: bool,
        faults: Faults | None,
    ) -> None:
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self.reserve_bytes = reserve_bytes
        self.direct = direct
        self._faults = faults
        self._lock = threading.Lock()
        self._files: dict[int, OpenFile] = {}
        self._syncers = ThreadPoolExecutor(4, "kvstore-sync")

    @classmethod
    def open(
        cls,
        folder: Path,
        capacity_bytes: int,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        reserve_bytes: int = 0,
        faults: Faults | None = None,
        *,
        mend: bool = True,
        direct: Direct = "auto",
    ) -> Slab:
        """Open the segments that are there; make none. Raises SetupError: sizes don't fit, folder not usable.

        A segment of wrong length (cut off, or killed while it was made) gets its length back when `mend`: blocks in
        its good part stay, the others show as checksum mismatches. `direct` "on" refuses a disk that can't do O_DIRECT.
        """
        if segment_bytes <= 0 or segment_bytes % SLOT_ALIGN:
            raise SetupError(f"segment_bytes: {segment_bytes} is no multiple of {SLOT_ALIGN}; use e.g. 268435456")
        if capacity_bytes < segment_bytes:
            raise SetupError(
                f"nvme_bytes: {capacity_bytes} is less than a segment of {segment_bytes}; "
                "make it larger or segment_bytes smaller"
            )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            slab = cls(folder, capacity_bytes, segment_bytes, reserve_bytes, choose_direct(folder, direct), faults)
            slab._open_existing(mend)
        except OSError as error:
            raise SetupError(f"data_dir: {folder}: {error.strerror}; give a directory this user can write") from None
        return slab

    @property
    def num_segments_max(self) -> int:
        """Segments that the capacity allows. Slots at or beyond `num_segments_max * segment_bytes` are refused."""
        return self.capacity_bytes // self.segment_bytes

    def segments(self) -> list[int]:
        """Indexes of the segments on disk."""
        with self._lock:
            return sorted(self._files)

    def place(self, slot: Slot, num_bytes: int, *, make: bool = True) -> File:
        """Where the payload of `slot` lies. Makes its segment when `make`; else the segment must be there.

        Raises TierFull (capacity, reserve, ENOSPC), TransferError (segment missing, I/O error), InvalidField.
        """
        index, offset = divmod(slot, self.segment_bytes)
        if slot < 0 or slot % SLOT_ALIGN or num_bytes <= 0 or offset + num_bytes > self.segment_bytes:
            raise InvalidField("slot", f"{slot} with {num_bytes} bytes crosses a segment", "use slots of the allocator")
        file = self._files.get(index)
        if file is None:
            if not make:
                raise TransferError(f"segment {index} isn't on disk; run `kvstore fsck`")
            file = self._make(index)
        return File(file, offset)

    def sync(self, slots: Iterable[Slot] | None = None) -> None:
        """What was written to these slots (None: to any) is on the medium afterwards. Raises TransferError."""
        with self._lock:
            wanted = set(self._files) if slots is None else {slot // self.segment_bytes for slot in slots}
            files = [self._files[index] for index in sorted(wanted) if index in self._files]
        list(self._syncers.map(_sync_file, files))  # at the same time: the disk joins their flushes

    def drop_segment(self, index: int) -> None:
        """Give an empty segment's space back. No operation may use it any more. Unknown segments are ignored."""
        with self._lock:
            file = self._files.pop(index, None)
            if file is None:
                return
            (self.folder / file.name).unlink(missing_ok=True)
            file.close()

    def used_bytes_on_disk(self) -> int:
        """Blocks the file system has really given to segments, in bytes."""
        with self._lock:
            return sum(os.fstat(file.fd).st_blocks * 512 for file in self._files.values())

    def export_fd(self, index: int) -> int | None:
        """A new read-only descriptor of one segment, with O_DIRECT where it works; None when it isn't on disk.

        The caller closes it.
        """
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
        with self._lock:
            file = self._files.get(index)
            # By descriptor: what was written is there even if somebody has removed the name.
            return None if file is None else os.open(f"/proc/self/fd/{file.fd}", flags)

    def close(self) -> None:
        """Close all segments."""
        self._syncers.shutdown()
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _open_existing(self, mend: bool) -> None:
        for entry in sorted(self.folder.iterdir()):
            index = segment_index(entry.name)
            if index is None:
                continue
            file = OpenFile.open(entry, os.O_RDWR, direct=self.direct, faults=self._faults)
            if mend and file.size() != self.segment_bytes:
                log.warning("%s: %d bytes instead of %d; mended", entry, file.size(), self.segment_bytes)
                self._give_length(file)
            self._files[index] = file

    def _give_length(self, file: OpenFile) -> None:
        os.ftruncate(file.fd, self.segment_bytes)
        try:
            file.allocate(0, self.segment_bytes)
        except OSError as error:  # a hole stays; writing into it may meet ENOSPC, which is an ordinary path
            log.warning("%s: can't allocate all of it: %s", file.name, error.strerror)

    def _make(self, index: int) -> OpenFile:
        with self._lock:
            if index in self._files:
                return self._files[index]
            self._check_room(index)
            path = self.folder / f"{index:06d}.seg"
            file = OpenFile.open(path, os.O_RDWR | os.O_CREAT, direct=self.direct, faults=self._faults)
            try:
                file.allocate(0, self.segment_bytes)
                sync_folder(self.folder)
            except OSError as error:
                file.close()
                path.unlink(missing_ok=True)
                text = f"{path.name}: can't allocate {self.segment_bytes} bytes: {error.strerror}"
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise TierFull(f"{text}; free space on the disk or make nvme_bytes smaller") from None
                raise TransferError(text) from None
            self._files[index] = file
            return file

    def _check_room(self, index: int) -> None:
        if index >= self.num_segments_max or len(self._files) >= self.num_segments_max:
            raise TierFull(f"nvme: segment {index} is beyond nvme_bytes ({self.capacity_bytes})")
        stat = os.statvfs(self.folder)
        free = stat.f_bavail * stat.f_frsize
        if free - self.segment_bytes < self.reserve_bytes:
            raise TierFull(
                f"nvme: {free} bytes free on the disk; a segment of {self.segment_bytes} would cross "
                f"nvme_reserve_bytes ({self.reserve_bytes})"
            )


def _sync_file(file: OpenFile) -> None:
    try:
        file.sync()
    except OSError as error:
        raise TransferError(f"{file.name}: sync failed: {error.strerror}") from None


def segment_index(name: str) -> int | None:
    """Index in a segment's file name; None for other files."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def sync_folder(folder: Path) -> None:
    """Make names in `folder` durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
