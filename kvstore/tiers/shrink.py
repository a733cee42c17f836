"""NVMe that comes back smaller: what is kept is a prefix of every context, whatever segments it lay in.

    segments   | 0 | 1 | 2 | 3 |        capacity is 2 segments now: 2 and 3 go
    kept       the shallowest blocks of all, as many as the slots of 0 and 1
    moved      kept blocks of 2 and 3, into slots of 0 and 1 whose blocks are not kept

A parent is shallower than its children, so what is kept is closed under parents: no block is kept that no prefix
reaches. Order, safe against a kill at any point: records of what isn't kept are deleted -> payloads are copied,
verified -> synced -> records name the new slots. A record always names a slot that holds its block.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core.types import Slot
from kvstore.tiers.index_lmdb import BlockIndex, Entry
from kvstore.tiers.slab import Slab
from kvstore.tiers.transfer import Copy, CopyResult, Memory, Priority, TransferEngine

log = logging.getLogger(__name__)
BATCH_BYTES = 16 << 20
DELETE_BATCH = 10_000


@dataclass
class Plan:
    """What to do with the blocks of a directory that is too large."""

    dropped: list[bytes]
    moves: list[tuple[Entry, Slot]]


def shrink(slab: Slab, index: BlockIndex) -> Plan | None:
    """Bring a directory within `slab.capacity_bytes`; None when it is already. Raises TransferError, TierFull.

    Call before anything else reads or writes it. The segments beyond the capacity hold nothing afterwards.
    """
    limit = slab.num_segments_max
    if not any(segment >= limit for segment in slab.segments()):
        return None
    entries = [item for item in index.scan() if isinstance(item, Entry)]
    plan = make_plan(entries, slab.segment_bytes, [s for s in slab.segments() if s < limit])
    for start in range(0, len(plan.dropped), DELETE_BATCH):
        index.commit(deletes=plan.dropped[start : start + DELETE_BATCH])
    _move(slab, index, plan.moves)
    log.warning(
        "NVMe is smaller now: %d of %d blocks kept, %d of them moved",
        len(entries) - len(plan.dropped),
        len(entries),
        len(plan.moves),
    )
    return plan


def make_plan(entries: Sequence[Entry], segment_bytes: int, segments: Sequence[int]) -> Plan:
    """Decide, class by class. `segments`: those that stay."""
    plan = Plan([], [])
    slots = _slots_by_class(entries, segment_bytes, segments)
    for size_class, room in slots.items():
        mine = sorted((e for e in entries if e.size_class == size_class), key=lambda e: e.record.depth)
        kept, dropped = mine[: len(room)], mine[len(room) :]
        plan.dropped += [e.key for e in dropped]
        free = iter(sorted(room - {e.slot for e in kept}))
        plan.moves += [(e, Slot(next(free))) for e in kept if e.slot not in room]
    return plan


def _slots_by_class(entries: Sequence[Entry], segment_bytes: int, segments: Sequence[int]) -> dict[int, set[int]]:
    """Every slot of the segments that stay, by size class; empty ones go to the class that lacks most."""
    slots: dict[int, set[int]] = {e.size_class: set() for e in entries}
    class_of = {e.slot // segment_bytes: e.size_class for e in entries}
    lacks = {c: sum(e.size_class == c for e in entries) for c in slots}
    for segment in sorted(segments, key=lambda s: s not in class_of):
        size_class = class_of.get(segment) or max(lacks, key=lacks.__getitem__, default=0)
        if not size_class:
            continue
        base = segment * segment_bytes
        made = {base + i * size_class for i in range(segment_bytes // size_class)}
        slots[size_class] |= made
        lacks[size_class] -= len(made)
    return slots


def _move(slab: Slab, index: BlockIndex, moves: Sequence[tuple[Entry, Slot]]) -> None:
    engine = TransferEngine()
    try:
        for batch in _batches(moves):
            with mmap.mmap(-1, sum(e.size_class for e, _ in batch)) as room:
                good = _move_batch(slab, engine, batch, room)
            slab.sync([entry.slot for entry in good])
            lost = {e.key for e, _ in batch} - {e.key for e in good}
            index.commit(good, lost)
    finally:
        engine.close()


def _batches(moves: Sequence[tuple[Entry, Slot]]) -> Iterator[list[tuple[Entry, Slot]]]:
    batch: list[tuple[Entry, Slot]] = []
    used = 0
    for entry, slot in moves:
        if batch and used + entry.size_class > BATCH_BYTES:
            yield batch
            batch, used = [], 0
        batch.append((entry, slot))
        used += entry.size_class
    if batch:
        yield batch


def _move_batch(
    slab: Slab, engine: TransferEngine, batch: Sequence[tuple[Entry, Slot]], room: mmap.mmap
) -> list[Entry]:
    """Through memory, verified on the way in and on the way out. Returns entries with their new slots."""
    scratch = np.frombuffer(room, dtype=np.uint8)
    offsets = np.cumsum([0, *(e.size_class for e, _ in batch)]).tolist()
    reads = [_copy(slab, e, e.slot, scratch, at, True) for (e, _), at in zip(batch, offsets, strict=False)]
    read = _run(engine, reads, Priority.READ)
    there = [(e, slot, at) for (e, slot), at, r in zip(batch, offsets, read, strict=False) if r.ok]
    written = _run(engine, [_copy(slab, e, slot, scratch, at, False) for e, slot, at in there], Priority.WRITE)
    return [e._replace(slot=slot) for (e, slot, _), r in zip(there, written, strict=True) if r.ok]


def _copy(slab: Slab, entry: Entry, slot: Slot, scratch: npt.NDArray[np.uint8], at: int, reading: bool) -> Copy:
    r = entry.record
    file, memory = slab.place(slot, r.payload_bytes, make=False), Memory(scratch, at)
    source, target = (file, memory) if reading else (memory, file)
    return Copy(source, target, r.payload_bytes, r.slice_bytes, r.checksums)


def _run(engine: TransferEngine, copies: list[Copy], priority: Priority) -> list[CopyResult]:
    return engine.submit(copies, priority).wait() if copies else []
