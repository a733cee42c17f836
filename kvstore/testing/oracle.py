"""Payloads that say whose they are.

A block's payload is a pseudo-random stream keyed by the SHA-256 of its full identity: keyspace id (which covers
model, weights and their epoch, adapter, tenant, dtype, layout, rank), parent hash, block hash, token digest, position
and shape. So a restored byte can be judged without knowing who wrote it, and any mix-up of two blocks shows.
Destinations are poisoned first, so "never written" shows too.

Stream: Philox 4x64 with the digest's bytes 0..16 as key and 16..32 as the upper half of the counter, output as u64 LE.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), as in `numpy.random.Philox.random_raw`.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.core.record import NO_PARENT, Record
from kvstore.core.types import BlockHash, KeyspaceId

Bytes = npt.NDArray[np.uint8]
POISON = 0xA5
"""Two of them make a negative, tiny bfloat16; what counts is that no oracle payload holds a run of them."""


def stream(record: Record, num_bytes: int) -> Bytes:
    """The first `num_bytes` of the block's payload. Checksums in `record` don't matter. New array, `[num_bytes]` u8."""
    identity = (
        struct.pack("<II", record.depth, record.slice_bytes)
        + record.keyspace
        + record.hash
        + record.parent
        + record.digest
    )
    seed = hashlib.sha256(identity).digest()
    key, counter = int.from_bytes(seed[:16], "little"), int.from_bytes(seed[16:], "little") << 128
    words = np.random.Philox(key=key, counter=counter).random_raw(-(-num_bytes // 8))
    return np.asarray(words, dtype="<u8").view(np.uint8)[:num_bytes]


def fill(record: Record, array: Bytes) -> None:
    """Overwrite `array` with the block's payload."""
    array[:] = stream(record, len(array))


def verify(record: Record, array: Bytes) -> int | None:
    """None when `array` holds the block's payload, else the first wrong offset."""
    expected = stream(record, len(array))
    if np.array_equal(expected, array):
        return None
    return int(np.flatnonzero(expected != array)[0])


def poison(array: Bytes) -> None:
    """Overwrite `array` with 0xA5."""
    array.fill(POISON)


def make_record(
    name: str, num_slices: int, slice_bytes: int, *, depth: int = 0, parent: BlockHash = NO_PARENT, keyspace: str = "k"
) -> Record:
    """A record of an invented block, with the checksums of its oracle payload. Equal arguments give equal records."""

    def invent(kind: str, length: int) -> bytes:
        return hashlib.blake2b(f"{kind}/{keyspace}/{name}".encode(), digest_size=length).digest()

    space = hashlib.blake2b(keyspace.encode(), digest_size=32).digest()
    bare = Record(
        KeyspaceId(space),
        BlockHash(invent("hash", 16)),
        parent,
        depth,
        invent("digest", 32),
        slice_bytes,
        bytes(8 * num_slices),
    )
    payload = stream(bare, bare.payload_bytes)
    sums = b"".join(
        xxhash.xxh3_64_intdigest(payload.data[at : at + slice_bytes]).to_bytes(8, "little")
        for at in range(0, len(payload), slice_bytes)
    )
    return Record(bare.keyspace, bare.hash, parent, depth, bare.digest, slice_bytes, sums)
