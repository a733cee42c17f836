"""The plan for an NVMe tier that comes back smaller, for any scatter of blocks over segments."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.record import NO_PARENT
from kvstore.core.types import BlockHash, Slot
from kvstore.testing.faults import Fault, FaultPlan
from kvstore.testing.oracle import make_record
from kvstore.tiers.datadir import DataDir
from kvstore.tiers.index_lmdb import Entry
from kvstore.tiers.shrink import make_plan, shrink
from kvstore.tiers.transfer import Copy, Memory, Priority, TransferEngine

SLOT = 4096
SEGMENT = 8 * SLOT


def forest(seed: int, num_chains: int, length: int) -> list[Entry]:
    """Chains of blocks in slots of two size classes, one a segment, scattered at random."""
    rng = random.Random(seed)
    blocks: list[tuple[str, int, BlockHash, int]] = []
    for chain in range(num_chains):
        parent = NO_PARENT
        for depth in range(rng.randrange(1, length + 1)):
            size = SLOT * (1 + chain % 2)
            blocks.append((f"{chain}/{depth}", depth, parent, size))
            parent = make_record(f"{chain}/{depth}", 2, 64, depth=depth, parent=parent).hash
    entries = []
    for number, size in enumerate((SLOT, 2 * SLOT)):
        mine = [b for b in blocks if b[3] == size]
        per_segment = SEGMENT // size
        places = list(range(-(-len(mine) // per_segment) * per_segment))
        rng.shuffle(places)
        for (name, depth, parent, _), place in zip(mine, places, strict=False):
            segment = 2 * (place // per_segment) + number
            slot = segment * SEGMENT + place % per_segment * size
            record = make_record(name, 2, 64, depth=depth, parent=parent)
            entries.append(Entry(record, Slot(slot), size))
    return entries


@given(seed=st.integers(0, 10_000), num_chains=st.integers(1, 8), keep=st.integers(0, 12))
def test_plan_keeps_prefixes_in_slots_of_their_own(seed: int, num_chains: int, keep: int) -> None:
    """What is kept reaches its root, lies within what stays, and shares no slot; as much is kept as there is room."""
    entries = forest(seed, num_chains, 10)
    stay = [s for s in sorted({e.slot // SEGMENT for e in entries}) if s < keep]
    plan = make_plan(entries, SEGMENT, stay)
    moved = {entry.key: slot for entry, slot in plan.moves}
    kept = [e for e in entries if e.key not in plan.dropped]
    names = {e.record.hash for e in kept}
    assert all(e.record.parent == NO_PARENT or e.record.parent in names for e in kept)
    places = [moved.get(e.key, e.slot) for e in kept]
    assert len(set(places)) == len(places)
    assert all(place // SEGMENT in stay for place in places)
    for size in (SLOT, 2 * SLOT):
        room = sum(SEGMENT // size for s in stay if s % 2 == (size != SLOT))
        assert sum(e.size_class == size for e in kept) == min(room, sum(e.size_class == size for e in entries))


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.EIO, Fault.FLIP, Fault.SHORT])
def test_shrinking_leaves_only_records_that_hold(tmp_path: Path, fault: Fault) -> None:
    """Reads and writes fail while blocks are moved: each record that is left names a slot with its block's bytes, or
    is found out by its checksum; none names a slot that is gone."""
    import numpy as np

    from kvstore.testing import oracle

    entries = [e for e in forest(3, 8, 10) if e.size_class == SLOT]
    data = DataDir.open(tmp_path, 64 * SEGMENT, segment_bytes=SEGMENT)
    engine = TransferEngine(2)
    for entry in entries:
        payload = np.zeros(SLOT, dtype=np.uint8)
        oracle.fill(entry.record, payload[:128])
        place = data.slab.place(entry.slot, 128)
        assert engine.submit([Copy(Memory(payload), place, 128, 64)], Priority.WRITE).wait()[0].ok
    data.index.commit(entries)
    data.close()
    plan = FaultPlan(seed=1, reads={fault: 0.2}, writes={fault: 0.2})
    data = DataDir.open(tmp_path, 2 * SEGMENT, segment_bytes=SEGMENT, faults=plan)
    assert shrink(data.slab, data.index) is not None
    plan.enabled = False
    left = list(data.recover())
    assert left and all(e.slot < 2 * SEGMENT for e in left)
    assert data.slab.segments() <= [0, 1]
    wrong = 0
    for entry in left:
        target = np.zeros(SLOT, dtype=np.uint8)
        copy = Copy(data.slab.place(entry.slot, 128, make=False), Memory(target), 128, 64, entry.record.checksums)
        if engine.submit([copy], Priority.READ).wait()[0].ok:
            assert oracle.verify(entry.record, target[:128]) is None
        else:
            wrong += 1
    assert not wrong or fault is Fault.FLIP
    engine.close()
    data.close()
