"""The `.cu` sources, run on the host, against numpy, torch indexing and the xxhash package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore_gpu import build
from kvstore_gpu.errors import LayoutError, Unavailable
from kvstore_gpu.kernels import POISON, HostKernels, Kernels, TorchKernels
from kvstore_gpu.layout import EnginePool

LENGTHS = [*range(520), *range(1000, 1100), *range(2040, 2060), 8192, 16385, 17408, 17409, 65536, 65544, 100_001]
AXES = {
    "layer first": ("kv", "block", "token", "head", "dim"),
    "blocks first": ("block", "kv", "token", "head", "dim"),
    "heads first": ("block", "kv", "head", "token", "dim"),
    "packed": ("block", "head", "token", "kv", "dim"),
    "latent": ("block", "token", "dim"),
}


def aligned(num_bytes: int, shift: int = 0) -> torch.Tensor:
    """Poisoned uint8 tensor that starts `shift` bytes after a multiple of 16."""
    raw = torch.full((num_bytes + 32,), POISON, dtype=torch.uint8)
    start = -raw.data_ptr() % 16 + shift
    return raw[start : start + num_bytes]


def random_bytes(seed: int, num_bytes: int, shift: int = 0) -> torch.Tensor:
    out = aligned(num_bytes, shift)
    out.copy_(torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)))
    return out


def offsets(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@pytest.mark.parametrize("shift", [0, 1, 8])
def test_checksum_equals_xxhash_at_every_length(host_kernels: HostKernels, shift: int) -> None:
    data = random_bytes(7, max(LENGTHS), shift)
    for length in LENGTHS:
        got = host_kernels.checksum(data, offsets(0), 1, length)
        assert int(got[0, 0]) % 2**64 == xxhash.xxh3_64_intdigest(data[:length].numpy()), length
    assert host_kernels.offences() == 0


@pytest.mark.parametrize("slice_bytes", [8192, 24_576, 65_536, 9_000, 1_001])
def test_checksum_table_of_many_slots(host_kernels: HostKernels, slice_bytes: int) -> None:
    num_slices, at = 3, offsets(4096, 0, 3 * 65_536 + 4096)
    slots = random_bytes(3, 8 * 65_536)
    want = TorchKernels().checksum(slots, at, num_slices, slice_bytes)
    assert torch.equal(host_kernels.checksum(slots, at, num_slices, slice_bytes), want)
    assert int(want[1, 1]) % 2**64 == xxhash.xxh3_64_intdigest(slots[slice_bytes : 2 * slice_bytes].numpy())


@given(
    axes=st.sampled_from(sorted(AXES)),
    tokens=st.sampled_from([(16, 16), (16, 4), (4, 16), (3, 3), (1, 2)]),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 3, 8, 9, 16, 24, 64]),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.float32]),
    shift=st.sampled_from([0, 0, 0, 4, 8]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_gather_and_scatter_for_every_layout(
    host_kernels: HostKernels,
    axes: str,
    tokens: tuple[int, int],
    heads: int,
    dim: int,
    dtype: torch.dtype,
    shift: int,
    seed: int,
) -> None:
    case = Case(AXES[axes], tokens[0], tokens[1], heads, dim, dtype, shift, seed)
    for kernels in (host_kernels, TorchKernels()):
        case.check_gather(kernels)
        case.check_scatter(kernels)
    assert host_kernels.offences() == 0


class Case:
    """One engine pool, a block table, and what the slots must hold, worked out by tensor indexing alone."""

    num_blocks, num_layers, num_slots = 40, 2, 3

    def __init__(
        self,
        axes: tuple[str, ...],
        ours: int,
        theirs: int,
        heads: int,
        dim: int,
        dtype: torch.dtype,
        shift: int,
        seed: int,
    ) -> None:
        sizes = {"kv": 2, "block": self.num_blocks, "token": theirs, "head": heads, "dim": dim}
        shape = [sizes[a] for a in axes]
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        self.layers = [random_bytes(seed + i, num_bytes, shift).view(dtype).view(shape) for i in range(self.num_layers)]
        self.axes, self.ours, self.theirs = axes, ours, theirs
        self.pool = EnginePool.describe(self.layers, axes, ours)
        rng = np.random.default_rng(seed)
        self.table = rng.permutation(self.num_blocks)[: -(-self.num_slots * ours // theirs)]
        self.chunks = self.pool.chunk_offsets(self.table, self.num_slots)
        stride = -(-self.pool.shape.slot_bytes // 4096) * 4096
        self.stride, self.at = stride, offsets(3 * stride, 0, stride)

    def expected(self, slot: int) -> torch.Tensor:
        """Bytes `[layer][kv][token][head][dim]` of one slot."""
        order = [self.axes.index(a) for a in ("block", "token", "kv", "head", "dim") if a in self.axes]
        parts = []
        for layer in self.layers:
            sequence = layer.permute(order)[self.table.tolist()].flatten(0, 1)
            block = sequence[slot * self.ours : (slot + 1) * self.ours]
            parts.append(block.transpose(0, 1) if "kv" in self.axes else block)
        return torch.stack(parts).contiguous().view(-1).view(torch.uint8)

    def check_gather(self, kernels: Kernels) -> None:
        slots = aligned(5 * self.stride)
        kernels.gather(self.pool, self.chunks, slots, self.at)
        want = torch.full_like(slots, POISON)
        for slot, at in enumerate(self.at.tolist()):
            want[at : at + self.pool.shape.slot_bytes] = self.expected(slot)
        assert torch.equal(slots, want)

    def check_scatter(self, kernels: Kernels) -> None:
        slots = aligned(5 * self.stride)
        for slot, at in enumerate(self.at.tolist()):
            slots[at : at + self.pool.shape.slot_bytes] = self.expected(slot)
        before = [layer.clone() for layer in self.layers]
        self._poison_blocks()
        kernels.scatter(self.pool, self.chunks, slots, self.at)
        if (self.num_slots * self.ours) % self.theirs == 0:
            assert all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(self.layers, before, strict=True)
            )
        for slot in range(self.num_slots):
            at = int(self.at[slot])
            assert torch.equal(self.expected(slot), slots[at : at + self.pool.shape.slot_bytes])
        for layer, old in zip(self.layers, before, strict=True):
            layer.copy_(old)

    def _poison_blocks(self) -> None:
        blocks = self.axes.index("block")
        for layer in self.layers:
            raw = layer.view(torch.uint8)
            raw.index_fill_(blocks, torch.from_numpy(self.table), POISON)


@pytest.mark.parametrize(("start", "num_bytes"), [(0, 0), (0, 5), (4096, 16), (4097, 33), (8192, 40_001)])
def test_fill_touches_what_was_named_and_nothing_else(host_kernels: HostKernels, start: int, num_bytes: int) -> None:
    slots = random_bytes(1, 200_000)
    want = slots.clone()
    for at in (start, start + 100_000):
        want[at : at + num_bytes] = POISON
    host_kernels.fill(slots, offsets(start, start + 100_000), num_bytes)
    assert torch.equal(slots, want)
    assert host_kernels.offences() == 0


def test_slots_outside_the_pool_are_refused(host_kernels: HostKernels) -> None:
    slots = aligned(8192)
    with pytest.raises(LayoutError):
        host_kernels.checksum(slots, offsets(4096), 1, 4097)
    with pytest.raises(LayoutError):
        host_kernels.fill(slots, offsets(8192), 1)


def test_block_tables_are_checked() -> None:
    pool = EnginePool.describe([torch.zeros(2, 4, 16, 2, 8)], AXES["layer first"], 16)
    with pytest.raises(LayoutError, match="table has 1"):
        pool.chunk_offsets([0], 2)
    with pytest.raises(LayoutError, match="leaves the pool"):
        pool.chunk_offsets([0, 4], 2)
    with pytest.raises(LayoutError, match="divide"):
        EnginePool.describe([torch.zeros(2, 4, 16, 2, 8)], AXES["layer first"], 24)
    with pytest.raises(LayoutError, match="axes"):
        EnginePool.describe([torch.zeros(2, 4, 16, 2, 8)], ("kv", "block", "token", "dim", "head"), 16)


@pytest.mark.parametrize("arch", build.ARCHITECTURES)
def test_sources_compile_for_each_architecture_without_a_device(arch: str) -> None:
    try:
        image = build.compile_cubin(arch)
    except Unavailable as error:
        pytest.skip(str(error))
    assert image.startswith(b"\x7fELF")
    assert all(name in image for name in (b"kv_gather", b"kv_scatter", b"kv_checksum", b"kv_fill"))
