"""Moving blocks between a pool and the service's tiers, with every byte judged at its target.

A restore trusts nothing but the chain that the caller hashed: the record must name this keyspace, hash, parent,
position and token digest, and the bytes must match the record's checksums where they now lie. The first block that
doesn't ends the prefix.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.core.hashing import DIGEST_BYTES, HASH_BYTES, TokenChain
from kvstore.core.keyspace import Keyspace
from kvstore.core.record import NO_PARENT, Record
from kvstore.core.types import BlockHash, Tier
from kvstore.errors import ChecksumMismatch, InvalidField, KVStoreError, Unavailable
from kvstore.tiers.transfer import Copy, CopyResult, File, Memory, Priority, Transfer, TransferEngine
from kvstore_client.descriptors import Descriptors
from kvstore_client.pool import Pool


@dataclass
class Outcome:
    """What became of a page of blocks. `corrupt` are positions in the context."""

    num_ok: int = 0
    tiers: list[Tier] = field(default_factory=list)
    corrupt: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


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
    engine: TransferEngine,
    chain: TokenChain,
    first: int,
    places: Sequence[tuple[Tier, int, Record]],
    pool: Pool,
    slots: Sequence[int],
    descriptors: Descriptors,
    deadline: float,
) -> Outcome:
    """Copy the located blocks into `slots` of the pool and judge them there."""
    out = Outcome()
    batches: dict[Tier, list[tuple[int, Copy]]] = {}
    wrong: dict[int, str] = {}
    for i, (tier, slot, record) in enumerate(places):
        problem = confirm(record, chain, first + i)
        if problem is not None:
            wrong[i] = problem
            out.corrupt.append(first + i)
            continue
        try:
            source = _place(tier, slot, descriptors)
        except KVStoreError as error:
            wrong[i] = str(error)
            continue
        target = Memory(pool.flat, slots[i] * pool.stride_bytes)
        copy = Copy(source, target, record.payload_bytes, record.slice_bytes, record.checksums)
        batches.setdefault(tier, []).append((i, copy))
    _run(engine, batches, deadline, first, wrong, out)
    out.num_ok = min(wrong, default=len(places))
    out.tiers = [tier for tier, _, _ in places[: out.num_ok]]
    out.errors = [f"block {first + i}: {text}" for i, text in sorted(wrong.items())][:4]
    return out


def _place(tier: Tier, slot: int, descriptors: Descriptors) -> Memory | File:
    if tier == Tier.DRAM:
        return Memory(descriptors.arena.array, slot)
    return File(*descriptors.segment(slot))


def _run(
    engine: TransferEngine,
    batches: dict[Tier, list[tuple[int, Copy]]],
    deadline: float,
    first: int,
    wrong: dict[int, str],
    out: Outcome,
) -> None:
    """All tiers at once; results into `wrong` and `out.corrupt`."""
    running: list[tuple[list[int], Transfer]] = []
    for batch in batches.values():
        left = deadline - time.monotonic()
        transfer = engine.submit([c for _, c in batch], Priority.READ, max(left, 0.0))
        running.append(([i for i, _ in batch], transfer))
    for indices, transfer in running:
        for i, result in zip(indices, finish(transfer, deadline), strict=True):
            if result.error is not None:
                wrong[i] = str(result.error)
                if isinstance(result.error, ChecksumMismatch):
                    out.corrupt.append(first + i)


def finish(transfer: Transfer, deadline: float) -> list[CopyResult]:
    """Results by the deadline, or of what was running when it passed: a copy that has started can't be called back, and
    its memory isn't free before it ends."""
    try:
        return transfer.wait(max(deadline - time.monotonic(), 0.0))
    except Unavailable:
        transfer.cancel()
        return transfer.wait()


def write_blocks(
    engine: TransferEngine,
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
    copies = [
        Copy(
            Memory(pool.flat, mine * pool.stride_bytes),
            Memory(descriptors.arena.array, theirs),
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
