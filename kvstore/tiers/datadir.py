"""One data directory: who owns it, what format it has, what is in it.

    <dir>/FORMAT        JSON: format version, segment_bytes; written once, replaced atomically
    <dir>/LOCK          flock'd by the one service that runs; holds its pid
    <dir>/index/        LMDB (index_lmdb.py)
    <dir>/slab/*.seg    payloads (slab.py)

Each opening draws a random boot epoch: whatever carries another one (leases, operations, descriptors) belongs to an
earlier life. The lock is the kernel's, so it goes with the process, kill -9 included. A directory of another format
version is refused, never guessed at.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.errors import SetupError, TransferError
from kvstore.tiers.files import Direct, Faults
from kvstore.tiers.index_lmdb import DEFAULT_MAP_BYTES, BlockIndex, Entry
from kvstore.tiers.slab import DEFAULT_SEGMENT_BYTES, Slab, sync_folder

FORMAT_VERSION = 1
Progress = Callable[[int, int], None]


class DataDir:
    """An open, locked data directory."""

    def __init__(self, path: Path, lock_fd: int, index: BlockIndex, slab: Slab) -> None:
        self.path = path
        self.index = index
        self.slab = slab
        self.boot_epoch = secrets.randbits(63) | 1
        """Random and never 0."""
        self.num_dropped = 0
        """Records that the last `recover` dropped."""
        self._lock_fd = lock_fd

    @classmethod
    def open(
        cls,
        path: Path,
        capacity_bytes: int,
        *,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        reserve_bytes: int = 0,
        map_bytes: int = DEFAULT_MAP_BYTES,
        direct: Direct = "auto",
        faults: Faults | None = None,
    ) -> DataDir:
        """Lock and open `path`, making it when it isn't there. An existing directory keeps its own segment size.

        Raises SetupError, one line: not writable, in use (names the pid), other format version, sizes that don't fit.
        """
        lock_fd = acquire_lock(path)
        try:
            segment_bytes = check_format(path, segment_bytes)
            slab = Slab.open(path / "slab", capacity_bytes, segment_bytes, reserve_bytes, faults, direct=direct)
            index = BlockIndex.open(path / "index", map_bytes)
        except BaseException:
            os.close(lock_fd)
            raise
        return cls(path, lock_fd, index, slab)

    def recover(self, progress: Progress | None = None) -> Iterator[Entry]:
        """Every block whose record is whole and whose slot is really there, once a slot.

        What doesn't hold is deleted from the index at the end, and segments that hold nothing are dropped. Payloads
        aren't read: a torn one shows at its first restore (and in `fsck`). Of two records that claim one slot neither
        is given back. Parents may come after children. Raises SetupError when the index can't be read.
        """
        try:
            yield from self._recovered(progress)
        except TransferError as error:
            raise SetupError(f"{error}; run `kvstore fsck --repair`") from None

    def _recovered(self, progress: Progress | None) -> Iterator[Entry]:
        disputed = self._disputed_slots()
        segments, limit = set(self.slab.segments()), self.slab.num_segments_max
        used: set[int] = set()
        bad: list[bytes] = []
        for item in self.index.scan(progress):
            if isinstance(item, bytes):
                bad.append(item)
            elif item.slot in disputed or not self._fits(item, segments, limit):
                bad.append(item.key)
            else:
                used.add(item.slot // self.slab.segment_bytes)
                yield item
        self._clean(bad, segments - used)

    def _disputed_slots(self) -> set[int]:
        """Slots that overlap another one. A first pass over places alone; entries are streamed afterwards."""
        flat = array("q")
        for slot, size in self.index.places():
            if slot < 1 << 62 and size < 1 << 40:  # others don't fit anywhere, and will be told so
                flat.extend((slot, size))
        places = np.frombuffer(flat, dtype=np.int64).reshape(-1, 2)
        places = places[places[:, 0].argsort(kind="stable")]
        clash = np.flatnonzero(places[:-1].sum(axis=1) > places[1:, 0])
        return set(places[np.concatenate([clash, clash + 1]), 0].tolist())

    def _clean(self, bad: list[bytes], empty: set[int]) -> None:
        self.num_dropped = len(bad)
        for start in range(0, len(bad), 10_000):
            self.index.commit(deletes=bad[start : start + 10_000])
        for index in empty:
            self.slab.drop_segment(index)

    def _fits(self, entry: Entry, segments: set[int], limit: int) -> bool:
        index, offset = divmod(entry.slot, self.slab.segment_bytes)
        inside = index in segments and index < limit and offset + entry.size_class <= self.slab.segment_bytes
        return inside and entry.record.payload_bytes <= entry.size_class

    def close(self) -> None:
        """Sync, close, unlock."""
        self.index.close()
        self.slab.close()
        os.close(self._lock_fd)


def acquire_lock(path: Path) -> int:
    """Descriptor that holds the directory's lock until closed. Raises SetupError naming the holder."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SetupError(f"data_dir: {path}: {error.strerror}; give a directory this user can write") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise SetupError(f"data_dir: {path} is in use by process {holder}; stop it or give another directory") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def check_format(path: Path, segment_bytes: int) -> int:
    """Segment size of the directory; writes FORMAT when there is none. Raises SetupError for another version."""
    found = read_format(path)
    if found is None:
        _write_format(path, {"format": FORMAT_VERSION, "segment_bytes": segment_bytes})
        return segment_bytes
    return int(found["segment_bytes"])


def read_format(path: Path) -> dict[str, Any] | None:
    """Content of FORMAT; None for a new directory. Raises SetupError when it's unreadable or of another version."""
    file = path / "FORMAT"
    try:
        found = json.loads(file.read_text())
        version, segment_bytes = int(found["format"]), int(found["segment_bytes"])
    except FileNotFoundError:
        if any(path.glob("slab/*.seg")):
            raise SetupError(f"data_dir: {path} has payloads but no FORMAT file; give another directory") from None
        return None
    except (ValueError, KeyError, TypeError, OSError):
        raise SetupError(f"data_dir: {file} is damaged; give another directory or delete this one") from None
    if version != FORMAT_VERSION:
        age = "older" if version < FORMAT_VERSION else "newer"
        raise SetupError(
            f"data_dir: {path} has format {version}, {age} than this release's {FORMAT_VERSION}; "
            "use the release that wrote it, or another directory"
        )
    return {"format": version, "segment_bytes": segment_bytes}


def _write_format(path: Path, content: dict[str, Any]) -> None:
    fresh = path / "FORMAT.new"
    with fresh.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path / "FORMAT")
    sync_folder(path)
