"""Token chains: token ids -> block hashes and digests, incrementally.

    hash_i   = XXH3-128(seed, parent hash (16) | token ids as u32 LE | extra keys)
    seed     = bytes 16..24 of the keyspace id, LE
    parent_0 = bytes 0..16 of the keyspace id
    digest_i = BLAKE2b-256(token ids as u32 LE | extra keys)

Extra keys are what changes a block's meaning besides its tokens (image digests and the like), each encoded as
`offset in block u32 LE | length u32 LE | bytes`, in order of offset. XXH3 finds blocks; it isn't a security boundary,
so a hit is confirmed by comparing digests before its bytes are used.

Source: XXH3 as specified by the xxHash project (doc/xxhash_spec.md); BLAKE2b from RFC 7693. Golden vectors in
`tests/golden/`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.core.keyspace import Keyspace
from kvstore.core.types import BlockHash
from kvstore.errors import InvalidField

HASH_BYTES = 16
DIGEST_BYTES = 32
MAX_TOKEN_ID = 2**32 - 1

Tokens = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, order=True)
class ExtraKey:
    """Something besides tokens that enters a block's identity, at token position `position` of the context."""

    position: int
    value: bytes


class TokenChain:
    """Block hashes and digests of a growing context.

    `extend` hashes only new full blocks. Not thread-safe; owned by one session.
    """

    def __init__(self, keyspace: Keyspace, extra_keys: Sequence[ExtraKey] = ()) -> None:
        self.keyspace = keyspace
        self._seed = int.from_bytes(keyspace.id[16:24], "little")
        self._root = bytes(keyspace.id[:16])
        self._tokens = np.empty(0, dtype="<u4")
        self._num_tokens = 0
        self._hashes = bytearray()
        self._digests = bytearray()
        self._extra = sorted(extra_keys)

    @property
    def num_tokens(self) -> int:
        """Tokens in the chain, those of the unfinished last block included."""
        return self._num_tokens

    @property
    def num_blocks(self) -> int:
        """Full blocks only."""
        return len(self._hashes) // HASH_BYTES

    @property
    def hashes(self) -> bytes:
        """16 bytes for each full block."""
        return bytes(self._hashes)

    @property
    def digests(self) -> bytes:
        """32 bytes for each full block."""
        return bytes(self._digests)

    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        """Read-only view, `[num_tokens]` u32."""
        view = self._tokens[: self._num_tokens]
        view.flags.writeable = False
        return view

    def hash_at(self, index: int) -> BlockHash:
        """Hash of block `index`."""
        return BlockHash(bytes(self._hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]))

    def digest_at(self, index: int) -> bytes:
        """Token digest of block `index`."""
        return bytes(self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES])

    def extend(self, token_ids: Tokens) -> int:
        """Append tokens; returns the number of blocks that became full. Raises InvalidField on ids outside u32."""
        new = check_tokens(token_ids)
        self._append(new)
        before = self.num_blocks
        size = self.keyspace.block_tokens
        raw = self._tokens[: self._num_tokens].tobytes() if before * size + size <= self._num_tokens else b""
        parent = bytes(self._hashes[-HASH_BYTES:]) if before else self._root
        for index in range(before, self._num_tokens // size):
            body = raw[index * size * 4 : (index + 1) * size * 4] + self._extra_bytes(index)
            parent = xxhash.xxh3_128_digest(parent + body, seed=self._seed)
            self._hashes += parent
            self._digests += hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()
        return self.num_blocks - before

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens from position `num_tokens` on."""
        if not 0 <= num_tokens <= self._num_tokens:
            raise InvalidField("num_tokens", f"{num_tokens} is out of range", f"use 0 to {self._num_tokens}")
        self._num_tokens = num_tokens
        blocks = num_tokens // self.keyspace.block_tokens
        del self._hashes[blocks * HASH_BYTES :]
        del self._digests[blocks * DIGEST_BYTES :]

    def update(self, token_ids: Tokens) -> int:
        """Make the chain equal `token_ids`, keeping the common prefix. Returns the number of tokens kept."""
        new = check_tokens(token_ids)
        common = common_prefix(self._tokens[: self._num_tokens], new)
        self.truncate(common)
        self.extend(new[common:])
        return common

    def copy(self) -> TokenChain:
        """An independent chain with the same content (a fork)."""
        other = TokenChain(self.keyspace, self._extra)
        other._tokens = self._tokens[: self._num_tokens].copy()
        other._num_tokens = self._num_tokens
        other._hashes = bytearray(self._hashes)
        other._digests = bytearray(self._digests)
        return other

    def _append(self, new: npt.NDArray[np.uint32]) -> None:
        needed = self._num_tokens + len(new)
        if needed > len(self._tokens):
            grown = np.empty(max(needed, 2 * len(self._tokens), 256), dtype="<u4")
            grown[: self._num_tokens] = self._tokens[: self._num_tokens]
            self._tokens = grown
        self._tokens[self._num_tokens : needed] = new
        self._num_tokens = needed

    def _extra_bytes(self, index: int) -> bytes:
        if not self._extra:
            return b""
        size = self.keyspace.block_tokens
        inside = [k for k in self._extra if index * size <= k.position < (index + 1) * size]
        return b"".join(struct.pack("<II", k.position - index * size, len(k.value)) + k.value for k in inside)


def check_tokens(token_ids: Tokens) -> npt.NDArray[np.uint32]:
    """`token_ids` as u32 LE, `[n]`. Raises InvalidField naming the first bad position."""
    array = np.asarray(token_ids)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InvalidField("token_ids", f"shape {array.shape} of {array.dtype}", "give a flat list of integers")
    if array.dtype == np.dtype("<u4"):
        return array
    bad = np.flatnonzero((array < 0) | (array > MAX_TOKEN_ID)) if array.size else array
    if bad.size:
        raise InvalidField(
            "token_ids", f"{array[bad[0]]} at position {bad[0]} is out of range", f"use 0 to {MAX_TOKEN_ID}"
        )
    return array.astype("<u4")


def common_prefix(a: npt.NDArray[np.uint32], b: npt.NDArray[np.uint32]) -> int:
    """Length of the longest common prefix of two token arrays."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n
