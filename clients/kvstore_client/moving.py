"""Moving blocks between a pool and the service's tiers, with every byte judged at its target.

A restore trusts nothing but the chain that the caller hashed: the record must name this keyspace, hash, parent,
position and token digest, and the bytes must match the record's checksums where they now lie. The first block that
doesn't ends the prefix.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.core.hashing import DIGEST_BYTES, HASH_BYTES, TokenChain
from kvstore.core.keyspace import Keyspace
from kvstore.core.record import NO_PARENT, Record
from kvstore.core.types import BlockHash, Tier
from kvstore.errors import InvalidField, KVStoreError, TransferError, Unavailable
from kvstore.tiers.transfer import Copy, CopyResult, File, Memory, Priority
from kvstore_client.descriptors import Descriptors
from kvstore_client.movers import Mover, Moving
from kvstore_client.pool import Pool
from kvstore_client.sharing import Key, SharedReads


@dataclass
class Outcome:
    """What became of a page of blocks. `corrupt` are positions in the context."""

    num_ok: int = 0
    tiers: list[Tier] = field(default_factory=list)
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


def identity(chain: TokenChain, index: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Keyspace id, hash, parent hash and digest that block `index` of a chain must have."""
    parent = chain.hash_at(index - 1) if index else NO_PARENT
    digest = chain.digest_at(index)
    return chain.keyspace.id, chain.hash_at(index), parent, digest


def confirm(record: Record, chain: TokenChain, index: int) -> str | None:
    """None when the record is that of block `index`, else what differs."""
    space, block_hash, parent, digest = identity(chain, index)
    keyspace = chain.keyspace
    if record.keyspace != space:
        return "keyspace differs"
    if record.hash != block_hash or record.parent != parent or record.depth != index:
        return "another block's record"
    if record.digest != digest:
        return "token digest differs: a hash collision"
    if (record.num_slices, record.slice_bytes) != (keyspace.num_layers, keyspace.slice_bytes):
        return "layout differs"
    return None


def read_blocks(
    engine: Mover,
    shared: SharedReads,
    chain: TokenChain,
    first: int,
    places: Sequence[tuple[Tier, int, Record]],
    pool: Pool,
    slots: Sequence[int],
    descriptors: Descriptors,
    deadline: float,
) -> Outcome:
    """Copy the located blocks into `slots` of the pool and judge them there.

    What another restore of this process is reading from NVMe is copied from it. What failed on NVMe is read a second
    time before it is called lost, since that costs the block its life. Raises Unavailable when the service has gone.
    """
    reading = _Reading(engine, first, pool, slots, descriptors, deadline)
    for i, (tier, slot, record) in enumerate(places):
        problem = confirm(record, chain, first + i)
        if problem is None:
            reading.add(i, tier, slot, record)
        else:
            reading.wrong[i] = problem
            reading.out.corrupt.append(first + i)
    reading.run(shared)
    return reading.outcome([tier for tier, _, _ in places])


class _Reading:
    """One page of a restore. Indices count from its first block."""

    def __init__(
        self,
        engine: Mover,
        first: int,
        pool: Pool,
        slots: Sequence[int],
        descriptors: Descriptors,
        deadline: float,
    ) -> None:
        self.engine = engine
        self.first = first
        self.pool = pool
        self.slots = slots
        self.descriptors = descriptors
        self.deadline = deadline
        self.arena = arena_of(descriptors)
        self.out = Outcome()
        self.wrong: dict[int, str] = {}
        self.dram: dict[int, tuple[int, Record]] = {}
        self.nvme: dict[int, tuple[int, Record]] = {}

    def add(self, i: int, tier: Tier, slot: int, record: Record) -> None:
        (self.dram if tier == Tier.DRAM else self.nvme)[i] = (slot, record)

    def target(self, i: int) -> Memory:
        return Memory(self.pool.flat, self.slots[i] * self.pool.stride_bytes)

    def copy(self, i: int, source: Memory | File, record: Record) -> Copy:
        return Copy(source, self.target(i), record.payload_bytes, record.slice_bytes, record.checksums)

    def run(self, shared: SharedReads) -> None:
        keys = {(self.descriptors.boot_epoch, slot, record.hash): i for i, (slot, record) in self.nvme.items()}
        flight, others = shared.board((key, self.target(i)) for key, i in keys.items())
        good: list[Key] = []
        copying: Moving | None = None
        try:
            mine = [keys[key] for key in flight.places]
            copying = self.start([self.copy(i, Memory(self.arena, s), r) for i, (s, r) in self.dram.items()])
            failed = self.from_files(mine)
            good = [key for key in flight.places if keys[key] not in failed and keys[key] not in self.wrong]
        finally:
            shared.land(flight, good)
            if copying is not None:  # the slots are the caller's again only once nothing runs into them
                for i, error in zip(self.dram, self.ended(copying), strict=True):
                    self.judge(i, error)
            sources = shared.wait(others, self.deadline)
        again = failed + self.from_others({keys[key]: source for key, source in sources.items()})
        again += [keys[key] for key in others if key not in sources]
        self.from_files(sorted(again), last_try=True)

    def from_files(self, indices: list[int], last_try: bool = False) -> list[int]:
        """Read from NVMe. Returns those that failed and may be tried again."""
        copies: dict[int, Copy] = {}
        failed: dict[int, KVStoreError] = {}
        for i in indices:
            slot, record = self.nvme[i]
            try:
                copies[i] = self.copy(i, File(*self.descriptors.segment(slot)), record)
            except KVStoreError as error:
                failed[i] = error
        for i, problem in zip(copies, self.ended(self.start(list(copies.values()))), strict=True):
            if problem is not None:
                failed[i] = problem
        again = [] if last_try else [i for i, error in failed.items() if isinstance(error, TransferError)]
        for i in failed.keys() - set(again):
            self.judge(i, failed[i])
        return again

    def from_others(self, sources: dict[int, Memory]) -> list[int]:
        """Copy what other restores have read. Returns those whose bytes are others by now."""
        copies = [self.copy(i, source, self.nvme[i][1]) for i, source in sources.items()]
        failed = [i for i, error in zip(sources, self.ended(self.start(copies)), strict=True) if error is not None]
        self.out.num_shared += len(sources) - len(failed)
        return failed

    def start(self, copies: list[Copy]) -> Moving:
        return self.engine.submit(copies, Priority.READ, max(self.deadline - time.monotonic(), 0.0))

    def ended(self, transfer: Moving) -> list[KVStoreError | None]:
        return [result.error for result in finish(transfer, self.deadline)]

    def judge(self, i: int, error: KVStoreError | None) -> None:
        if error is None:
            return
        self.wrong[i] = str(error)
        if isinstance(error, TransferError):  # wrong bytes, or none: whoever asks again must not be promised them
            self.out.corrupt.append(self.first + i)

    def outcome(self, tiers: list[Tier]) -> Outcome:
        self.out.num_ok = min(self.wrong, default=len(tiers))
        self.out.tiers = tiers[: self.out.num_ok]
        self.out.errors = [f"block {self.first + i}: {text}" for i, text in sorted(self.wrong.items())][:4]
        return self.out


def arena_of(descriptors: Descriptors) -> npt.NDArray[np.uint8]:
    """The mapped arena; whoever holds the array keeps it mapped. Raises Unavailable when it was unmapped."""
    array = descriptors.arena.array
    if not len(array):
        raise Unavailable("service: went away meanwhile; retry later")
    return array


def finish(transfer: Moving, deadline: float) -> list[CopyResult]:
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
    arena = arena_of(descriptors)
    copies = [
        Copy(
            Memory(pool.flat, mine * pool.stride_bytes),
            Memory(arena, theirs),
            keyspace.block_bytes,
            keyspace.slice_bytes,
            want_checksums=True,
        )
        for (_, theirs), mine in zip(granted, slots, strict=True)
    ]
    transfer = engine.submit(copies, Priority.WRITE, max(deadline - time.monotonic(), 0.0))
    records: list[Record] = []
    failed: list[BlockHash] = []
    for (index, _), result in zip(granted, finish(transfer, deadline), strict=True):
        if result.error is not None or result.checksums is None:
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
                result.checksums,
            )
        )
    return records, failed


__all__ = ["DIGEST_BYTES", "HASH_BYTES", "Outcome", "check_pool", "confirm", "read_blocks", "write_blocks"]
