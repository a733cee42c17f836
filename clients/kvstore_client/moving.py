"""Moving blocks between a pool and the service's tiers, with every byte judged at its target.

A restore trusts nothing but the chain that the caller hashed: the record must name this keyspace, hash, parent,
position and token digest, and the bytes must match the record's checksums where they now lie. The first block that
doesn't ends the prefix.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.core.hashing import TokenChain
from kvstore.core.keyspace import Keyspace
from kvstore.core.record import NO_PARENT, Record
from kvstore.core.types import BlockHash, Tier
from kvstore.errors import InvalidField, KVStoreError, TransferError, Unavailable
from kvstore.tiers.files import OpenFile
from kvstore.tiers.tables import Table, TableTransfer, usable
from kvstore.tiers.transfer import Copy, File, Memory, Priority, TransferEngine
from kvstore_client.descriptors import Descriptors
from kvstore_client.layers import LayerGate
from kvstore_client.movers import LayerMover, Mover, Moving
from kvstore_client.pool import Pool
from kvstore_client.proof import checksums_of_records
from kvstore_client.sharing import Key, SharedReads

_DRAM = int(Tier.DRAM)
R = TypeVar("R", covariant=True)


@dataclass
class Plan:
    """Where a page of blocks lies, and their records."""

    tiers: bytes
    """A `Tier` a byte."""
    slots: list[int]
    records: Sequence[bytes]


@dataclass
class Outcome:
    """What became of a page of blocks. `corrupt` are positions in the context."""

    num_ok: int = 0
    tiers: bytes = b""
    """Where each of them came from, a `Tier` a byte."""
    corrupt: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_shared: int = 0
    """Blocks of NVMe that another restore of this process had read."""


def check_pool(pool: Pool, keyspace: Keyspace, slots: Sequence[int]) -> None:
    """Raises InvalidField when the pool can't hold this keyspace's blocks in these slots."""
    if pool.stride_bytes < keyspace.block_bytes:
        raise InvalidField(
            "pool",
            f"slots of {pool.stride_bytes} bytes, blocks of {keyspace.block_bytes}",
            "use the keyspace's slot_bytes",
        )
    bad = [s for s in slots if not 0 <= s < pool.num_slots]
    if bad:
        raise InvalidField("slots", f"{bad[0]} is outside the pool", f"use 0 to {pool.num_slots - 1}")


def read_blocks(
    engine: Mover,
    shared: SharedReads,
    chain: TokenChain,
    first: int,
    plan: Plan,
    pool: Pool,
    slots: Sequence[int],
    descriptors: Descriptors,
    deadline: float,
    gate: LayerGate | None = None,
) -> Outcome:
    """Copy the located blocks into `slots` of the pool and judge them there.

    What another restore of this process is reading from NVMe is copied from it. What failed on NVMe is read a second
    time before it is called lost, since that costs the block its life. Blocks that all lie in DRAM come by layers where
    there is a `gate` and the mover can. Raises Unavailable when the service has gone.
    """
    sums, wrong = checksums_of_records(plan.records, chain, first)
    reading = _Reading(engine, chain, first, sums, pool, slots, descriptors, deadline, gate)
    reading.refuse(wrong)
    for i, (tier, slot) in enumerate(zip(plan.tiers, plan.slots, strict=True)):
        if i not in wrong:
            reading.add(i, tier, slot)
    reading.run(shared)
    return reading.outcome(plan.tiers)


class _Reading:
    """One page of a restore. Indices count from its first block."""

    def __init__(
        self,
        engine: Mover,
        chain: TokenChain,
        first: int,
        sums: npt.NDArray[np.uint64],
        pool: Pool,
        slots: Sequence[int],
        descriptors: Descriptors,
        deadline: float,
        gate: LayerGate | None,
    ) -> None:
        self.engine = engine
        self.gate = gate
        self.chain = chain
        self.first = first
        self.sums = sums
        self.block_bytes = chain.keyspace.block_bytes
        self.slice_bytes = chain.keyspace.slice_bytes
        self.flat = pool.flat
        self.offsets = np.asarray(slots, dtype=np.int64) * pool.stride_bytes
        self.descriptors = descriptors
        self.deadline = deadline
        self.arena = arena_of(descriptors)
        self.out = Outcome()
        self.wrong: dict[int, str] = {}
        self.dram: dict[int, int] = {}
        """Arena slots."""
        self.nvme: dict[int, int] = {}
        """Slots of the slab."""

    def refuse(self, wrong: dict[int, str]) -> None:
        self.wrong |= wrong
        self.out.corrupt += [self.first + i for i in wrong]

    def add(self, i: int, tier: int, slot: int) -> None:
        (self.dram if tier == _DRAM else self.nvme)[i] = slot

    def target(self, i: int) -> Memory:
        return Memory(self.flat, int(self.offsets[i]))

    def copy(self, i: int, source: Memory | File) -> Copy:
        return Copy(
            source, Memory(self.flat, int(self.offsets[i])), self.block_bytes, self.slice_bytes, self.sums[i].tobytes()
        )

    def run(self, shared: SharedReads) -> None:
        epoch, chain, first = self.descriptors.boot_epoch, self.chain, self.first
        keys = {(epoch, slot, chain.hash_at(first + i)): i for i, slot in self.nvme.items()}
        flight, others = shared.board((key, self.target(i)) for key, i in keys.items())
        good: list[Key] = []
        copying: _FromArena | None = None
        try:
            mine = [keys[key] for key in flight.places]
            copying = self.from_arena()
            failed = self.from_files(mine)
            good = [key for key in flight.places if keys[key] not in failed and keys[key] not in self.wrong]
        finally:
            shared.land(flight, good)
            if copying is not None:  # the slots are the caller's again only once nothing runs into them
                for i, error in copying.errors(self.deadline).items():
                    self.judge(i, error)
            sources = shared.wait(others, self.deadline)
        again = failed + self.from_others({keys[key]: source for key, source in sources.items()})
        again += [keys[key] for key in others if key not in sources]
        self.from_files(sorted(again), last_try=True)

    def from_arena(self) -> _FromArena:
        """Start copying what lies in DRAM. As a table where that can be: blocks may be small and many."""
        indices = list(self.dram)
        left = max(self.deadline - time.monotonic(), 0.0)
        if not (isinstance(self.engine, TransferEngine) and usable(self.slice_bytes)):
            copies = [self.copy(i, Memory(self.arena, slot)) for i, slot in self.dram.items()]
            if self.gate is not None and isinstance(self.engine, LayerMover) and not (self.nvme or self.wrong):
                told = self.gate.part(len(copies))
                return _FromArena(indices, self.engine.submit_by_layers(copies, told, left))
            return _FromArena(indices, self.engine.submit(copies, Priority.READ, left))
        slots = np.fromiter(self.dram.values(), dtype=np.int64, count=len(indices))
        targets, sums = self.offsets, self.sums
        if len(indices) < len(targets):
            targets, sums = targets[indices], sums[indices]
        table = Table(self.arena, slots, self.flat, targets, self.block_bytes, self.slice_bytes, sums)
        return _FromArena(indices, self.engine.submit_table(table, Priority.READ, left))

    def from_files(self, indices: list[int], last_try: bool = False) -> list[int]:
        """Read from NVMe. Returns those that failed and may be tried again."""
        copies: dict[int, Copy] = {}
        failed: dict[int, KVStoreError] = {}
        opened: dict[int, OpenFile] = {}
        for i in indices:
            index, offset = divmod(self.nvme[i], self.descriptors.segment_bytes)
            try:
                if index not in opened:
                    opened[index], _ = self.descriptors.segment(self.nvme[i])
                copies[i] = self.copy(i, File(opened[index], offset))
            except KVStoreError as error:
                failed[i] = error.with_traceback(None)  # its frames would keep the arena mapped
        for i, problem in zip(copies, self.ended(self.start(list(copies.values()))), strict=True):
            if problem is not None:
                failed[i] = problem
        again = [] if last_try else [i for i, error in failed.items() if isinstance(error, TransferError)]
        for i in failed.keys() - set(again):
            self.judge(i, failed[i])
        return again

    def from_others(self, sources: dict[int, Memory]) -> list[int]:
        """Copy what other restores have read. Returns those whose bytes are others by now."""
        copies = [self.copy(i, source) for i, source in sources.items()]
        failed = [i for i, error in zip(sources, self.ended(self.start(copies)), strict=True) if error is not None]
        self.out.num_shared += len(sources) - len(failed)
        return failed

    def start(self, copies: list[Copy]) -> Moving:
        return self.engine.submit(copies, Priority.READ, max(self.deadline - time.monotonic(), 0.0))

    def ended(self, transfer: Moving) -> list[KVStoreError | None]:
        return [result.error for result in finish(transfer, self.deadline)]

    def judge(self, i: int, error: KVStoreError) -> None:
        self.wrong[i] = str(error)
        if isinstance(error, TransferError):  # wrong bytes, or none: whoever asks again must not be promised them
            self.out.corrupt.append(self.first + i)

    def outcome(self, tiers: bytes) -> Outcome:
        self.out.num_ok = min(self.wrong, default=len(tiers))
        self.out.tiers = tiers[: self.out.num_ok]
        self.out.errors = [f"block {self.first + i}: {text}" for i, text in sorted(self.wrong.items())][:4]
        return self.out


class _FromArena:
    """Copies out of DRAM under way. `indices`: their blocks."""

    def __init__(self, indices: list[int], transfer: Moving | TableTransfer) -> None:
        self.indices = indices
        self.transfer = transfer

    def errors(self, deadline: float) -> dict[int, KVStoreError]:
        """What failed, by block, when all are through."""
        if isinstance(self.transfer, TableTransfer):
            return {self.indices[row]: error for row, error in finish(self.transfer, deadline).errors.items()}
        results = zip(self.indices, finish(self.transfer, deadline), strict=True)
        return {i: result.error for i, result in results if result.error is not None}


def arena_of(descriptors: Descriptors) -> npt.NDArray[np.uint8]:
    """The mapped arena; whoever holds the array keeps it mapped. Raises Unavailable when it was unmapped."""
    array = descriptors.arena.array
    if not len(array):
        raise Unavailable("service: went away meanwhile; retry later")
    return array


class _Waitable(Protocol[R]):
    def wait(self, timeout: float | None = None) -> R: ...
    def cancel(self) -> None: ...


def finish(transfer: _Waitable[R], deadline: float) -> R:
    """Results by the deadline, or of what was running when it passed: a copy that has started can't be called back, and
    its memory isn't free before it ends."""
    try:
        return transfer.wait(max(deadline - time.monotonic(), 0.0))
    except Unavailable:
        transfer.cancel()
        return transfer.wait()


def write_blocks(
    engine: Mover,
    chain: TokenChain,
    granted: Sequence[tuple[int, int]],
    pool: Pool,
    slots: Sequence[int],
    descriptors: Descriptors,
    deadline: float,
) -> tuple[list[Record], list[BlockHash]]:
    """Copy blocks into arena slots. `granted`: (position in the context, arena slot), `slots`: their slots in the pool.

    Returns records of what was copied, and hashes of what was not.
    """
    keyspace = chain.keyspace
    found = _sealed_sums(engine, keyspace, granted, pool, slots, arena_of(descriptors), deadline)
    records: list[Record] = []
    failed: list[BlockHash] = []
    for (index, _), sums in zip(granted, found, strict=True):
        if sums is None:
            failed.append(chain.hash_at(index))
            continue
        parent = chain.hash_at(index - 1) if index else NO_PARENT
        records.append(
            Record(
                keyspace.id,
                chain.hash_at(index),
                parent,
                index,
                chain.digest_at(index),
                keyspace.slice_bytes,
                sums,
            )
        )
    return records, failed


def _sealed_sums(
    engine: Mover,
    keyspace: Keyspace,
    granted: Sequence[tuple[int, int]],
    pool: Pool,
    slots: Sequence[int],
    arena: npt.NDArray[np.uint8],
    deadline: float,
) -> list[bytes | None]:
    """Copy pool -> arena. Checksums of each block, None for those that weren't copied."""
    left, size = max(deadline - time.monotonic(), 0.0), keyspace.block_bytes
    sources = [slot * pool.stride_bytes for slot in slots]
    targets = [theirs for _, theirs in granted]
    if isinstance(engine, TransferEngine) and usable(keyspace.slice_bytes):
        table = Table(pool.flat, np.array(sources), arena, np.array(targets), size, keyspace.slice_bytes)
        done = finish(engine.submit_table(table, Priority.WRITE, left), deadline)
        return [None if row in done.errors else sums.tobytes() for row, sums in enumerate(done.checksums)]
    copies = [
        Copy(Memory(pool.flat, source), Memory(arena, target), size, keyspace.slice_bytes, want_checksums=True)
        for source, target in zip(sources, targets, strict=True)
    ]
    results = finish(engine.submit(copies, Priority.WRITE, left), deadline)
    return [None if result.error is not None else result.checksums for result in results]
