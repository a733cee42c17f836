"""The blocks that every store gets: payloads in a source pool, read back into a target pool.

Both pools are touched private memory with huge pages, as an engine's pool is. Block `i` lies in slot `slots[i]` of
either, in a shuffled order, so that nobody can join neighbours. `poison` and `same` around an untimed get tell whether
a store really moved the bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.core.keyspace import Keyspace
from kvstore.errors import InvalidField
from kvstore.testing.oracle import poison
from kvstore.tiers.moves import checksums_of
from kvstore_bench.measure_io import private_pool
from kvstore_client import HostPool

Bytes = npt.NDArray[np.uint8]
KIB = 1 << 10
BLOCK_TOKENS = 16
SHAPES = {2048 * KIB: (32, 8, 128), 64 * KIB: (16, 1, 64)}
"""Block bytes -> layers, KV heads, head dim: slices of 64 KiB, and of 4 KiB for small blocks."""


def keyspace_of(block_bytes: int) -> Keyspace:
    """A model whose blocks have this size. Raises InvalidField for a size that none of the shapes gives."""
    if block_bytes not in SHAPES:
        raise InvalidField("sizes", f"{block_bytes} bytes", f"use {' or '.join(str(s) for s in SHAPES)} bytes")
    num_layers, num_kv_heads, head_dim = SHAPES[block_bytes]
    return Keyspace(
        model="bench",
        weights_digest="0" * 32,
        tokenizer_digest="0" * 32,
        kv_dtype="bfloat16",
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope="none",
        block_tokens=BLOCK_TOKENS,
    )


class Blocks:
    """`num_blocks` random payloads of one keyspace. `source` and `target` are `[total_bytes]` u8."""

    def __init__(self, keyspace: Keyspace, num_blocks: int, seed: int = 1) -> None:
        assert keyspace.block_bytes == keyspace.slot_bytes, "shapes are chosen so"
        draw = np.random.default_rng(seed)
        self.keyspace = keyspace
        self.num_blocks = num_blocks
        self.block_bytes = keyspace.block_bytes
        self.total_bytes = num_blocks * keyspace.block_bytes
        self.slots = [int(i) for i in draw.permutation(num_blocks)]
        self.source = private_pool(self.total_bytes)
        self.target = private_pool(self.total_bytes)
        self.source[:] = np.frombuffer(draw.bytes(self.total_bytes), dtype=np.uint8)
        self.pools = HostPool(self.source, self.block_bytes), HostPool(self.target, self.block_bytes)
        self.sums = [checksums_of(self.view(self.source, i), keyspace.slice_bytes) for i in range(num_blocks)]

    def at(self, index: int) -> int:
        """Offset of block `index` in either pool."""
        return self.slots[index] * self.block_bytes

    def view(self, pool: Bytes, index: int) -> memoryview:
        """Bytes of one block."""
        return pool.data[self.at(index) : self.at(index) + self.block_bytes]

    def addresses(self, pool: Bytes) -> list[int]:
        """Of every block, in order."""
        base = int(pool.ctypes.data)
        return [base + self.at(i) for i in range(self.num_blocks)]

    def verify(self, index: int) -> bool:
        """Whether the target holds block `index`, by the checksums that a restore verifies."""
        return checksums_of(self.view(self.target, index), self.keyspace.slice_bytes) == self.sums[index]

    def poison(self) -> None:
        """Make "never written" visible in the target."""
        poison(self.target)

    def same(self) -> bool:
        """Whether the target holds every block."""
        return bool(np.array_equal(self.source, self.target))
