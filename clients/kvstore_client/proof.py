"""Is this the record of that block? Asked of whole pages at once, since blocks may be small and many.

A restore trusts nothing but the chain that the caller hashed. Every field of a record that says what the block is must
be what the chain says: all heads are compared in one go. Its checksums are judged by what they are for: bytes that
don't match them are refused. So the record's own checksum needs no look here; the service looked at it when it read
the record.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.core.hashing import DIGEST_BYTES, HASH_BYTES, TokenChain
from kvstore.core.record import HEAD, MAGIC, NO_PARENT, TAIL_BYTES, BadRecord, Record, decode_record


def checksums_of_records(
    records: Sequence[bytes], chain: TokenChain, first: int
) -> tuple[npt.NDArray[np.uint64], dict[int, str]]:
    """Checksums that each record gives, `[records, slices]` u64, and what is wrong with those that are not of blocks
    `first`, `first + 1`, ... of the chain (by position in `records`; their checksums must not be used)."""
    slices = chain.keyspace.num_layers
    size = HEAD.itemsize + 8 * slices + TAIL_BYTES
    wrong = {i: "layout differs" for i, record in enumerate(records) if len(record) != size}
    whole = [bytes(size) if i in wrong else record for i, record in enumerate(records)] if wrong else records
    table = np.frombuffer(b"".join(whole), dtype=np.uint8).reshape(len(records), size)
    heads = expected_heads(chain, first, first + len(records))
    for i in np.flatnonzero((table[:, : HEAD.itemsize] != heads).any(axis=1)).tolist():
        wrong[i] = what_differs(records[i], chain, first + i) or "record differs"
    sums = np.ascontiguousarray(table[:, HEAD.itemsize : -TAIL_BYTES])
    return sums.view("<u8").astype(np.uint64, copy=False), wrong


def expected_heads(chain: TokenChain, first: int, last: int) -> npt.NDArray[np.uint8]:
    """Heads that the records of blocks [first, last) must have, `[last - first, HEAD.itemsize]` u8."""
    keyspace, hashes = chain.keyspace, chain.hashes
    heads = np.zeros(last - first, dtype=HEAD)
    heads["magic"] = np.void(MAGIC)
    heads["num_slices"] = keyspace.num_layers
    heads["depth"] = np.arange(first, last)
    heads["slice_bytes"] = keyspace.slice_bytes
    heads["keyspace"] = np.void(keyspace.id)
    heads["hash"] = np.frombuffer(hashes, dtype="V16")[first:last]
    heads["parent"] = np.frombuffer(NO_PARENT + hashes, dtype="V16")[first:last]
    heads["digest"] = np.frombuffer(chain.digests, dtype="V32")[first:last]
    return heads.view(np.uint8).reshape(last - first, HEAD.itemsize)


def what_differs(raw: bytes, chain: TokenChain, index: int) -> str | None:
    """None when the record is that of block `index`, else what differs."""
    try:
        record = decode_record(raw)
    except BadRecord as error:
        return str(error)
    return _difference(record, chain, index)


def _difference(record: Record, chain: TokenChain, index: int) -> str | None:
    keyspace = chain.keyspace
    if record.keyspace != keyspace.id:
        return "keyspace differs"
    parent = chain.hash_at(index - 1) if index else NO_PARENT
    if record.hash != chain.hash_at(index) or record.parent != parent or record.depth != index:
        return "another block's record"
    if record.digest != chain.digest_at(index):
        return "token digest differs: a hash collision"
    if (record.num_slices, record.slice_bytes) != (keyspace.num_layers, keyspace.slice_bytes):
        return "layout differs"
    return None


assert (HEAD["hash"].itemsize, HEAD["digest"].itemsize) == (HASH_BYTES, DIGEST_BYTES)
