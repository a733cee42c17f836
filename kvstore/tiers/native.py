"""The compiled helper: copy and hash in one pass, many file calls in one, outside of the interpreter lock. Optional.

`native.c` is compiled on first use with the machine's C compiler and kept in the user's cache directory, named by the
hash of its source. It's compared with the xxhash package before it is used. Without a compiler, without a place for
the result, or when the comparison fails, `load` returns None and moves.py does the same in Python: equal results,
about half the speed for large blocks, a fifth for small slices.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

SOURCE = Path(__file__).with_name("native.c")
SLICE_BYTES_MIN = 241
"""Shorter inputs are hashed by other formulas of XXH3, which the helper doesn't have."""

_COMPILE_TIMEOUT_S = 60
log = logging.getLogger(__name__)

Span = tuple[int, int, int, int]
"""Target address, source address, bytes, slice bytes: `struct job` in native.c."""


Place = tuple[int, int, int, int]
"""Descriptor, address in memory, bytes, offset in the file: `struct place` in native.c."""


class Native:
    """The loaded helper. Addresses are the caller's responsibility: they must stay valid during the call."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._copy = _prototype(library.kvstore_copy)
        self._hash = _prototype(library.kvstore_hash)
        self._read = _prototype(library.kvstore_read)
        self._write = _prototype(library.kvstore_write)

    def copy(self, spans: Sequence[Span]) -> bytes:
        """Copy every span; XXH3-64 of each of its slices in order, 8 bytes LE each, all spans behind one another."""
        return self._call(self._copy, spans)

    def hash(self, spans: Sequence[Span]) -> bytes:
        """XXH3-64 of each slice of the *targets*; sources are ignored."""
        return self._call(self._hash, spans)

    def copy_rows(self, jobs: npt.NDArray[np.uint64], sums: npt.NDArray[np.uint64]) -> None:
        """`copy` for spans as rows of a contiguous `[n, 4]` array; checksums go to `sums`, contiguous, one a slice."""
        assert jobs.flags.c_contiguous and sums.flags.c_contiguous and sums.flags.writeable
        self._copy(jobs.ctypes.data, len(jobs), sums.ctypes.data)

    def read(self, places: Sequence[Place]) -> list[int]:
        """One pread each, one after the other: bytes read, or minus the errno."""
        return self._io(self._read, places)

    def write(self, places: Sequence[Place]) -> list[int]:
        """One pwrite each, one after the other: bytes written, or minus the errno."""
        return self._io(self._write, places)

    @staticmethod
    def _io(function: ctypes._FuncPointer, places: Sequence[Place]) -> list[int]:
        flat = array("Q")
        for place in places:
            flat.extend(place)
        results = (ctypes.c_int64 * len(places))()
        function(flat.buffer_info()[0], len(places), results)
        return list(results)

    @staticmethod
    def _call(function: ctypes._FuncPointer, spans: Sequence[Span]) -> bytes:
        flat = array("Q")
        for span in spans:
            flat.extend(span)
        sums = (ctypes.c_uint64 * sum(n // size for _, _, n, size in spans))()
        function(flat.buffer_info()[0], len(spans), sums)
        return bytes(sums)


def _prototype(function: ctypes._FuncPointer) -> ctypes._FuncPointer:
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    function.restype = None
    return function


_lock = threading.Lock()
_loaded: list[Native | None] = []


def load() -> Native | None:
    """The helper, built when it isn't there yet; None when it can't be had. Thread-safe; the answer stays the same."""
    with _lock:
        if not _loaded:
            _loaded.append(_load())
        return _loaded[0]


def _load() -> Native | None:
    try:
        helper = Native(_built())
    except (OSError, subprocess.SubprocessError) as error:
        log.info("copies run in Python: the helper can't be built (%s)", error)
        return None
    if not agrees(helper):
        log.warning("copies run in Python: the helper's checksums differ from the xxhash package's")
        return None
    return helper


def _built() -> Path:
    """Path of the shared object. Raises OSError or SubprocessError."""
    name = hashlib.blake2b(SOURCE.read_bytes() + platform.machine().encode(), digest_size=12).hexdigest()
    folder = _cache_folder()
    path = folder / f"native-{name}.so"
    if not path.exists():
        _compile(path)
    return path


def _cache_folder() -> Path:
    """A folder that nobody else can write to: what lies in it will be executed."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid == os.geteuid() and not found.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    return Path(tempfile.mkdtemp(prefix="kvstore-native-"))


def _compile(path: Path) -> None:
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise OSError("no C compiler")
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(fresh), str(SOURCE)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)


def agrees(helper: Native) -> bool:
    """Whether it copies right and hashes as the xxhash package does, at lengths around every edge of XXH3."""
    source = (np.arange(70_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(17)).astype(np.uint8)
    target = np.zeros_like(source)
    there, here = (int(a.__array_interface__["data"][0]) for a in (target, source))
    for size in (241, 255, 256, 320, 1023, 1024, 1025, 1088, 2048, 4096, 23_040, 65_536):
        for shift in (0, 1, 64):
            expected = xxhash.xxh3_64_intdigest(source[shift : shift + size].tobytes()).to_bytes(8, "little")
            target.fill(0)
            copied = helper.copy([(there + shift, here + shift, size, size)])
            same = bool((target[shift : shift + size] == source[shift : shift + size]).all())
            if not same or {copied, helper.hash([(here + shift, 0, size, size)])} != {expected}:
                return False
    return True
