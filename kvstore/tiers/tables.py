"""Many equal copies in memory as columns of numbers, for blocks so small that an object each would cost more than they.

    Table (offsets, checksums as arrays) -> jobs `[n, 4]` u64, the layout that native.c reads -> ranges of rows -> lane

One call of the compiled helper copies and hashes a range, outside of the interpreter lock; all checksums are compared
at once when the last range is through. Needs the helper (native.py): `usable` says whether it's there.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidField, KVStoreError, Unavailable
from kvstore.tiers import native
from kvstore.tiers.moves import Pool, mismatch

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint64]


@dataclass
class Table:
    """Copies of `num_bytes` each from `source` to `target`, at these offsets (`[n]`, integers).

    `checksums`: `[n, num_bytes / slice_bytes]` u64, what the bytes must be; None to move unverified.
    """

    source: Bytes
    source_offsets: npt.NDArray[np.integer]
    target: Bytes
    target_offsets: npt.NDArray[np.integer]
    num_bytes: int
    slice_bytes: int
    checksums: Numbers | None = None

    def __len__(self) -> int:
        return len(self.source_offsets)


@dataclass
class TableResult:
    """`errors` by row; after an error the target's content is undefined. `checksums`: XXH3-64 of what was stored in the
    target, `[n, slices]` u64."""

    checksums: Numbers
    errors: dict[int, KVStoreError] = field(default_factory=dict)


def usable(slice_bytes: int) -> bool:
    """Whether tables with slices of this size can be moved here."""
    return slice_bytes >= native.SLICE_BYTES_MIN and native.load() is not None


class TableTransfer:
    """A submitted table."""

    def __init__(self, table: Table, deadline: float | None) -> None:
        self.deadline = deadline
        self._table = table  # keeps the memory there
        self._jobs = jobs_of(table)
        self._sums = np.zeros((len(table), table.num_bytes // table.slice_bytes), dtype=np.uint64)
        self._errors: dict[int, KVStoreError] = {}
        self._left = len(table)
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._cancelled = False
        if not self._left:
            self._finished.set()

    def wait(self, timeout: float | None = None) -> TableResult:
        """Results when all are through. Raises Unavailable after `timeout` seconds; the memory is still in use then."""
        if not self._finished.wait(timeout):
            raise Unavailable(f"transfer of {len(self._table)} blocks isn't through after {timeout} s")
        errors = dict(self._errors)
        expected = self._table.checksums
        if expected is not None:
            for row in np.flatnonzero((self._sums != expected).any(axis=1)).tolist():
                found, wanted = self._sums[row].tobytes(), expected[row].tobytes()
                errors.setdefault(row, mismatch(found, wanted, "copy in memory"))
        return TableResult(self._sums, errors)

    def done(self) -> bool:
        """Whether every copy is through; the memory may be used again."""
        return self._finished.is_set()

    def cancel(self) -> None:
        """Drop what hasn't started; those copies end with Unavailable."""
        self._cancelled = True

    def run(self, first: int, last: int) -> None:
        """Engine only: carry out rows [first, last)."""
        error = self._obstacle()
        helper = native.load()
        if error is None and helper is not None:
            helper.copy_rows(self._jobs[first:last], self._sums[first:last])
        elif error is None:
            error = Unavailable("the compiled helper is gone")
        if error is not None:
            self._errors.update(dict.fromkeys(range(first, last), error))
        with self._lock:
            self._left -= last - first
            if not self._left:
                self._finished.set()

    def _obstacle(self) -> KVStoreError | None:
        if self._cancelled:
            return Unavailable("transfer was cancelled")
        if self.deadline is not None and time.monotonic() > self.deadline:
            return Unavailable("deadline passed before the copy started")
        return None


def jobs_of(table: Table) -> Numbers:
    """Checked rows of target address, source address, bytes, slice bytes. Raises InvalidField."""
    n, size, count = table.num_bytes, table.slice_bytes, len(table)
    if n <= 0 or size <= 0 or n % size:
        raise InvalidField("table", f"{n} bytes in slices of {size}", "give whole slices")
    if len(table.target_offsets) != count:
        raise InvalidField("table", f"{count} sources, {len(table.target_offsets)} targets", "give one for each")
    if table.checksums is not None and table.checksums.shape != (count, n // size):
        raise InvalidField("table", f"checksums of shape {table.checksums.shape}", "give one a slice")
    target, source = Pool(table.target), Pool(table.source)
    if not target.writeable:
        raise InvalidField("table", "target is read-only", "give a writeable array")
    jobs = np.empty((count, 4), dtype=np.uint64)
    sides = ((target, table.target_offsets), (source, table.source_offsets))
    for column, (pool, offsets) in enumerate(sides):
        if count and not 0 <= int(offsets.min()) <= int(offsets.max()) <= pool.size - n:
            raise InvalidField("table", f"{n} bytes don't fit at an offset into {pool.size}", "give places inside")
        jobs[:, column] = offsets.astype(np.uint64) + np.uint64(pool.address)
    jobs[:, 2], jobs[:, 3] = n, size
    return jobs
