"""The tiers that the kit runs over.

A `Bench` is a pair of ends: `home` (always memory of this process) and `away` (the tier under test), each a sequence
of places one slot apart. To bring another tier under the kit, write one more maker and add it to `MAKERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.core.record import Record
from kvstore.core.types import SLOT_ALIGN, Slot
from kvstore.testing import oracle
from kvstore.testing.faults import FaultPlan
from kvstore.tiers import native
from kvstore.tiers.arena import Arena
from kvstore.tiers.moves import Place
from kvstore.tiers.slab import Slab
from kvstore.tiers.transfer import Copy, CopyResult, Memory, Priority, Transfer, TransferEngine

NUM_SLOTS = 64
MAX_SLOT_BYTES = 256 << 10
Bytes = npt.NDArray[np.uint8]
WAIT_S = 30.0


@dataclass
class Shape:
    """Bytes of a block in a test."""

    num_slices: int
    slice_bytes: int

    @property
    def payload_bytes(self) -> int:
        return self.num_slices * self.slice_bytes

    @property
    def slot_bytes(self) -> int:
        return -(-self.payload_bytes // SLOT_ALIGN) * SLOT_ALIGN


@dataclass
class Bench:
    """A tier, the engine that serves it, and memory at home. `plan` damages file I/O; None for tiers without files."""

    name: str
    engine: TransferEngine
    home: Bytes
    away: Callable[[int, int], Place]
    """(slot, payload bytes) -> place in the tier."""
    plan: FaultPlan | None = None
    closers: list[Callable[[], None]] = field(default_factory=list)

    def store(
        self, records: list[Record], slots: list[int], *, shift: int = 0, deadline_s: float | None = None
    ) -> Transfer:
        """Fill home with the records' payloads and copy them into the tier."""
        copies = []
        for position, (record, slot) in enumerate(zip(records, slots, strict=True)):
            start = position * MAX_SLOT_BYTES + shift
            oracle.fill(record, self.home[start : start + record.payload_bytes])
            copies.append(self._copy(Memory(self.home, start), self.away(slot, record.payload_bytes), record))
        return self.engine.submit(copies, Priority.WRITE, deadline_s)

    def load(
        self, records: list[Record], slots: list[int], *, shift: int = 0, deadline_s: float | None = None
    ) -> Transfer:
        """Poison home and copy the tier's bytes into it."""
        oracle.poison(self.home)
        copies = [
            self._copy(
                self.away(slot, record.payload_bytes), Memory(self.home, position * MAX_SLOT_BYTES + shift), record
            )
            for position, (record, slot) in enumerate(zip(records, slots, strict=True))
        ]
        return self.engine.submit(copies, Priority.READ, deadline_s)

    def judge(self, records: list[Record], results: list[CopyResult], *, shift: int = 0) -> None:
        """Whatever is reported as good must be the oracle's payload, with poison all around it."""
        assert len(results) == len(records)
        for position, (record, result) in enumerate(zip(records, results, strict=True)):
            start, end = position * MAX_SLOT_BYTES + shift, position * MAX_SLOT_BYTES + shift + record.payload_bytes
            if result.ok:
                assert oracle.verify(record, self.home[start:end]) is None
            outside = self.home[end : (position + 1) * MAX_SLOT_BYTES]
            assert (outside == oracle.POISON).all(), "bytes behind the target were touched"
            assert (self.home[position * MAX_SLOT_BYTES : start] == oracle.POISON).all(), "bytes before it were touched"

    @staticmethod
    def _copy(source: Place, target: Place, record: Record) -> Copy:
        return Copy(source, target, record.payload_bytes, record.slice_bytes, record.checksums)


def _memory(_folder: Path) -> Bench:
    pool = np.zeros(NUM_SLOTS * MAX_SLOT_BYTES, dtype=np.uint8)
    return Bench("memory", TransferEngine(4), _home(), lambda slot, _n: Memory(pool, slot))


def _arena(_folder: Path) -> Bench:
    arena = Arena.create(NUM_SLOTS * MAX_SLOT_BYTES, "auto")
    return Bench("arena", TransferEngine(4), _home(), lambda slot, _n: Memory(arena.array, slot), closers=[arena.close])


def _slab(folder: Path) -> Bench:
    plan = FaultPlan(seed=1)
    slab = Slab.open(folder, NUM_SLOTS * MAX_SLOT_BYTES, 4 << 20, faults=plan)
    return Bench("slab", TransferEngine(4), _home(), lambda slot, n: slab.place(Slot(slot), n), plan, [slab.close])


def _buffered_slab(folder: Path) -> Bench:
    plan = FaultPlan(seed=1)
    slab = Slab(folder, NUM_SLOTS * MAX_SLOT_BYTES, 4 << 20, 0, False, plan)
    return Bench(
        "slab-buffered", TransferEngine(4), _home(), lambda slot, n: slab.place(Slot(slot), n), plan, [slab.close]
    )


MAKERS = {"memory": _memory, "arena": _arena, "slab": _slab, "slab-buffered": _buffered_slab}


def _home() -> Bytes:
    raw = np.empty(NUM_SLOTS * MAX_SLOT_BYTES + SLOT_ALIGN, dtype=np.uint8)
    start = -raw.ctypes.data % SLOT_ALIGN
    return raw[start : start + NUM_SLOTS * MAX_SLOT_BYTES]


@pytest.fixture(params=["compiled", "python"], autouse=True)
def helper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything runs with the compiled helper and without it."""
    if request.param == "python":
        monkeypatch.setattr(native, "load", lambda: None)
    elif native.load() is None:
        pytest.skip("no C compiler: the helper can't be built")


@pytest.fixture(params=list(MAKERS))
def bench(request: pytest.FixtureRequest, tmp_path: Path, helper: None) -> Iterator[Bench]:
    made: Bench = MAKERS[request.param](tmp_path)
    yield made
    made.engine.close()
    for close in made.closers:
        close()


@pytest.fixture(params=["slab", "slab-buffered"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, helper: None) -> Iterator[Bench]:
    made: Bench = MAKERS[request.param](tmp_path)
    yield made
    assert made.plan is not None
    made.plan.release()
    made.engine.close()
    for close in made.closers:
        close()
