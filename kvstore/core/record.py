"""The record that travels with a block: what it is, and the checksums of its bytes.

    offset  size        field
    0       4           magic b"KVR1"
    4       4           num_slices u32 LE
    8       4           depth u32 LE        position of the block in its chain
    12      4           slice_bytes u32 LE  payload bytes of one layer slice
    16      32          keyspace id
    48      16          block hash
    64      16          parent hash         all zero for the first block
    80      32          token digest
    112     8 * slices  XXH3-64 of each layer slice, u64 LE
    end     8           XXH3-64 of everything before it

The same bytes are stored on NVMe, sent over gRPC, and compared at restore.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.core.types import BlockHash, KeyspaceId

MAGIC = b"KVR1"
_HEAD = struct.Struct("<4sIII32s16s16s32s")
HEAD = np.dtype(
    [
        ("magic", "V4"),
        ("num_slices", "<u4"),
        ("depth", "<u4"),
        ("slice_bytes", "<u4"),
        ("keyspace", "V32"),
        ("hash", "V16"),
        ("parent", "V16"),
        ("digest", "V32"),
    ]
)
"""The fixed part, for judging many records at once."""
TAIL_BYTES = 8
NO_PARENT = BlockHash(bytes(16))
MAX_SLICES = 65536


class BadRecord(ValueError):
    """The bytes are no record of this version, or damaged."""


class Record(NamedTuple):
    """Identity and checksums of one block. `checksums` holds 8 bytes LE for each layer slice."""

    keyspace: KeyspaceId
    hash: BlockHash
    parent: BlockHash
    depth: int
    digest: bytes
    slice_bytes: int
    checksums: bytes

    @property
    def num_slices(self) -> int:
        """Number of layer slices."""
        return len(self.checksums) // 8

    @property
    def payload_bytes(self) -> int:
        """Bytes that the checksums cover."""
        return self.num_slices * self.slice_bytes

    def encode(self) -> bytes:
        """The stored form."""
        head = _HEAD.pack(
            MAGIC, self.num_slices, self.depth, self.slice_bytes, self.keyspace, self.hash, self.parent, self.digest
        )
        body = head + self.checksums
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def decode_record(raw: bytes) -> Record:
    """Inverse of `Record.encode`. Raises BadRecord."""
    if len(raw) < _HEAD.size + 8:
        raise BadRecord(f"record of {len(raw)} bytes is too short")
    magic, slices, depth, slice_bytes, keyspace, block_hash, parent, digest = _HEAD.unpack_from(raw)
    if magic != MAGIC:
        raise BadRecord(f"unknown record version {magic!r}")
    if len(raw) != _HEAD.size + 8 * slices + 8:
        raise BadRecord(f"record of {len(raw)} bytes should hold {slices} checksums")
    if xxhash.xxh3_64_intdigest(raw[:-8]).to_bytes(8, "little") != raw[-8:]:
        raise BadRecord("record checksum differs")
    return Record(
        KeyspaceId(keyspace), BlockHash(block_hash), BlockHash(parent), depth, digest, slice_bytes, raw[_HEAD.size : -8]
    )
