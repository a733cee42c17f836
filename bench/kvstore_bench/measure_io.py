"""`kvstore bench io`: every host data path against its limit, measured in the same run on the same buffers.

    path                   measured                                       limit
    dram -> pool           verified copies through the transfer engine    memcpy, the better of one and two threads
    nvme -> pool           verified reads, O_DIRECT                       O_DIRECT reads, the better of 8 and 9 threads
    pool -> nvme durable   checksums + writes + fdatasync + index commit  O_DIRECT writes + fdatasync

Rounds are interleaved, and path and limit take turns in going first; figures are medians. Everything is touched
before, the page cache is bypassed, targets are poisoned before the last round and compared with the source after it,
so that a path that moved nothing can't win. Blocks lie in scattered slots with gaps, so no request is joined with
another; the row "adjacent" shows what joining gives. The pool is private memory with huge pages, as an engine's pool
is.
"""

from __future__ import annotations

import mmap
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
from rich.console import Console

from kvstore.core.record import NO_PARENT, Record
from kvstore.core.types import BlockHash, KeyspaceId, Slot
from kvstore.errors import SetupError
from kvstore.sizes import format_bytes
from kvstore.tiers.arena import Arena
from kvstore.tiers.datadir import DataDir
from kvstore.tiers.files import probe_direct
from kvstore.tiers.index_lmdb import Entry
from kvstore.tiers.transfer import Copy, File, Memory, Priority, TransferEngine, checksums_of
from kvstore_bench import raw_io
from kvstore_bench.inputs import ROUNDS_MAX, block_sizes, check_places, check_whole
from kvstore_bench.rows import EXIT_INVALID, Row, exit_status, show, write_json

Bytes = npt.NDArray[np.uint8]
IO_THREADS = 8
ATTEMPTS = 2
SEGMENT_BYTES = 64 << 20
_POISON = 0xA5
GOALS = {"dram -> pool": 0.85, "nvme -> pool": 0.90, "pool -> nvme durable": 0.85}
SMALL_BYTES, SMALL_SHARE = 64 << 10, 0.75


@dataclass(frozen=True)
class Size:
    """Shape of the blocks."""

    block_bytes: int
    slice_bytes: int
    num_blocks: int

    @property
    def label(self) -> str:
        """For row names."""
        return f"{self.num_blocks} x {format_bytes(self.block_bytes)}"


def size_of(block_bytes: int, total_bytes: int = 512 << 20) -> Size:
    """64 KiB a layer slice, as with 8 KV heads of 128 in bf16 and 16 tokens; 4 KiB for small blocks."""
    slice_bytes = 64 << 10 if block_bytes > SMALL_BYTES and block_bytes % (64 << 10) == 0 else 4 << 10
    return Size(block_bytes, min(slice_bytes, block_bytes), max(8, total_bytes // block_bytes))


class Rig:
    """Buffers, files and threads for one size. The arena holds payloads in order; other slots are scattered."""

    def __init__(self, size: Size, folder: Path, stack: ExitStack, adjacent: bool = False) -> None:
        self.size = size
        total = size.num_blocks * size.block_bytes
        self.arena = Arena.create(total)
        stack.callback(self.arena.close)
        self.pool = private_pool(total)
        self.data = DataDir.open(folder, 4 * total + 4 * SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES)
        stack.callback(self.data.close)
        self.engine = TransferEngine(IO_THREADS)
        stack.callback(self.engine.close)
        draw = np.random.default_rng(1)
        order = np.arange(size.num_blocks)
        self.pool_slots = [int(i) * size.block_bytes for i in draw.permutation(order)]
        self.nvme_slots = nvme_slots(size, [int(i) for i in (order if adjacent else 2 * draw.permutation(order))])
        self._fill(draw)

    def _fill(self, draw: np.random.Generator) -> None:
        size = self.size
        self.arena.array[:] = np.frombuffer(draw.bytes(self.arena.size), dtype=np.uint8)
        self.records = [self._record(i) for i in range(size.num_blocks)]
        self.places = [self.data.slab.place(slot, size.block_bytes) for slot in self.nvme_slots]
        self.store()

    def _record(self, index: int) -> Record:
        size = self.size
        payload = self.arena.array[index * size.block_bytes : (index + 1) * size.block_bytes]
        sums = checksums_of(payload.data, size.slice_bytes)
        name = BlockHash(index.to_bytes(16, "little"))
        return Record(KeyspaceId(bytes(32)), name, NO_PARENT, 0, bytes(32), size.slice_bytes, sums)

    # ---- measured paths

    def restore_dram(self) -> None:
        """Arena -> pool, verified."""
        n, size, arena, pool = self.size.block_bytes, self.size.slice_bytes, self.arena.array, self.pool
        blocks = zip(range(0, len(arena), n), self.pool_slots, self.records, strict=True)
        self._run([Copy(Memory(arena, at), Memory(pool, slot), n, size, r.checksums) for at, slot, r in blocks])

    def restore_nvme(self) -> None:
        """NVMe -> pool, verified."""
        n, size, pool = self.size.block_bytes, self.size.slice_bytes, self.pool
        blocks = zip(self.places, self.pool_slots, self.records, strict=True)
        self._run([Copy(place, Memory(pool, slot), n, size, r.checksums) for place, slot, r in blocks])

    def offload_durable(self) -> None:
        """Pool -> NVMe: checksums computed, payloads synced, then the records committed and synced."""
        self._run([self._write(Memory(self.pool, slot), i) for i, slot in enumerate(self.pool_slots)])
        self.data.slab.sync(self.nvme_slots)
        self._commit()

    def store(self) -> None:
        """Arena -> NVMe, so that there is something to read."""
        self._run([self._write(Memory(self.arena.array, i * self.size.block_bytes), i) for i in self._all()])
        self.data.slab.sync()
        self._commit()

    def _commit(self) -> None:
        rows = zip(self.records, self.nvme_slots, strict=True)
        self.data.index.commit([Entry(r, slot, self.size.block_bytes) for r, slot in rows], sync=True)

    def _write(self, source: Memory, index: int) -> Copy:
        return Copy(source, self.places[index], self.size.block_bytes, self.size.slice_bytes, None, True)

    def _run(self, copies: list[Copy]) -> None:
        writing = isinstance(copies[0].target, File)
        for result in self.engine.submit(copies, Priority.WRITE if writing else Priority.READ).wait():
            if result.error is not None:
                raise SetupError(f"bench: a copy failed: {result.error}")

    def _at(self, index: int) -> int:
        return index * self.size.block_bytes

    def _all(self) -> range:
        return range(self.size.num_blocks)

    # ---- limits

    def raw_copies(self) -> list[raw_io.RawCopy]:
        """The same copies as `restore_dram`."""
        source, target = self.arena.array.ctypes.data, self.pool.ctypes.data
        n = self.size.block_bytes
        return [raw_io.RawCopy(source + self._at(i), target + self.pool_slots[i], n) for i in self._all()]

    def raw_ios(self) -> list[raw_io.RawIO]:
        """The same requests as `restore_nvme` and `offload_durable`."""
        view, n = self.pool.data, self.size.block_bytes
        return [
            raw_io.RawIO(place.file, place.offset, view[slot : slot + n])
            for place, slot in zip(self.places, self.pool_slots, strict=True)
        ]

    # ---- proof

    def poison(self) -> None:
        """Make "never written" visible."""
        self.pool.fill(_POISON)

    def check_pool(self) -> None:
        """Every block of the pool is the arena's. Raises SetupError."""
        n = self.size.block_bytes
        for i in self._all():
            slot = self.pool_slots[i]
            if not np.array_equal(self.pool[slot : slot + n], self.arena.array[self._at(i) : self._at(i) + n]):
                raise SetupError(f"bench: block {i} of the pool isn't what was stored; the run is invalid")


def nvme_slots(size: Size, numbers: list[int]) -> list[Slot]:
    """Slots by number, skipping the end of each segment where no whole one fits."""
    per_segment = SEGMENT_BYTES // size.block_bytes
    return [Slot(n // per_segment * SEGMENT_BYTES + n % per_segment * size.block_bytes) for n in numbers]


def private_pool(num_bytes: int) -> Bytes:
    """Touched private memory with huge pages where they can be had, `[num_bytes]` u8."""
    room = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_HUGEPAGE)
    pool = np.frombuffer(room, dtype=np.uint8)
    pool.fill(0)
    return pool


@dataclass
class Contest:
    """A path and its limits, timed in turns."""

    name: str
    path: Callable[[], None]
    limits: Sequence[Callable[[], None]]
    path_s: list[float] = field(default_factory=list)
    limit_s: list[float] = field(default_factory=list)

    def round(self, number: int) -> None:
        """As many attempts for the path as for its limits together, the best ones count; who goes first alternates."""
        path = limit = float("inf")
        for turn in range(ATTEMPTS):
            for other in self.limits:
                if (number + turn) % 2:
                    limit = min(limit, timed(other))
                    path = min(path, timed(self.path))
                else:
                    path = min(path, timed(self.path))
                    limit = min(limit, timed(other))
        self.path_s.append(path)
        self.limit_s.append(limit)

    def row(self, size: Size, suffix: str = "") -> Row:
        """Median against median, GB/s."""
        total = size.num_blocks * size.block_bytes / 1e9
        goal = GOALS[self.name] * (SMALL_SHARE if size.block_bytes <= SMALL_BYTES else 1)
        name = f"{self.name}, {size.label}{suffix}"
        return Row(name, total / median(self.path_s), "GB/s", total / median(self.limit_s), round(goal, 4))


def timed(call: Callable[[], None]) -> float:
    """Seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def contests(rig: Rig, stack: ExitStack) -> list[Contest]:
    """The paths of one rig."""
    copies, ios = rig.raw_copies(), rig.raw_ios()
    one, two, *many = [raw_io.Threads(n) for n in (1, 2, IO_THREADS, IO_THREADS + 1)]
    for pool in (one, two, *many):
        stack.callback(pool.close)
    memcpy = [partial(raw_io.copy, pool, copies) for pool in (one, two)]
    return [
        Contest("dram -> pool", rig.restore_dram, memcpy),
        Contest("nvme -> pool", rig.restore_nvme, [partial(raw_io.read, pool, ios) for pool in many]),
        Contest("pool -> nvme durable", rig.offload_durable, [partial(raw_io.write, pool, ios) for pool in many]),
    ]


def measure_size(size: Size, rounds: int, folder: Path, adjacent: bool = False) -> list[Row]:
    """Rows for one block size. Raises SetupError when a path moved wrong bytes."""
    with ExitStack() as stack:
        rig = Rig(size, folder, stack, adjacent)
        rivals = contests(rig, stack)
        if adjacent:
            rivals = rivals[1:]
        for contest in rivals:  # warm-up, not counted
            timed(contest.path)
            timed(contest.limits[-1])
        for number in range(rounds):
            for contest in rivals:
                contest.round(number)
        for path in (rig.restore_dram, rig.restore_nvme):
            rig.poison()
            path()
            rig.check_pool()
        return [c.row(size, ", adjacent" if adjacent else "") for c in rivals]


def measure(rounds: int, sizes: Sequence[int], data_dir: Path, console: Console) -> list[Row]:
    """All rows. Raises SetupError when the run can't be valid (no O_DIRECT, wrong bytes)."""
    if not probe_direct(data_dir):
        raise SetupError(f"bench: {data_dir} can't do O_DIRECT, so the page cache would be measured; give --data-dir")
    rows: list[Row] = []
    for block_bytes in sizes:
        size = size_of(block_bytes)
        console.print(f"{size.label}, {rounds} rounds ...", style="dim")
        for adjacent in (False, True) if block_bytes <= SMALL_BYTES else (False,):
            with scratch(data_dir) as folder:
                rows += measure_size(size, rounds, folder, adjacent)
    return rows


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A folder that goes away afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(rounds: int = 5, sizes: str = "2MiB,5MiB,64KiB", data_dir: Path | None = None, json: Path | None = None) -> int:
    """Every data path of this machine against its limit, measured in the same run."""
    console = Console()
    check_places(data_dir, json)
    check_whole("rounds", rounds, 1, ROUNDS_MAX)
    wanted = block_sizes(sizes, SEGMENT_BYTES)
    try:
        rows = measure(rounds, wanted, data_dir or Path.cwd(), console)
    except SetupError as error:
        console.print(f"invalid: {error}", style="red")
        return EXIT_INVALID
    show(console, "data paths of this machine", rows)
    if json is not None:
        write_json(json, rows)
    return exit_status(rows)
