"""The decode kernel, run on the host, against attention in float64: every length, layout and batch; and places beyond
what 32 bits count.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import pytest
import torch

from kvstore_gpu import build
from kvstore_gpu.decode import SPLIT, PagedDecode, obstacle, readable, reference, scratch_floats, splits_of
from kvstore_gpu.errors import LayoutError, Unavailable
from kvstore_gpu.kernels import HostKernels

NAN = float("nan")
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Named from Python 3.13 on; Linux gives the number."""
MOST = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest difference from float64, values of unit variance: mostly the rounding of the result."""


@dataclass
class Case:
    """A poisoned pool, contexts in scattered slots, one new token each."""

    lengths: list[int]
    block_tokens: int = 16
    kv_heads: int = 2
    group: int = 1
    dim: int = 64
    dtype: torch.dtype = torch.float32
    gap: int = 0
    """Values between one slot and the next, beyond the layers."""
    num_layers: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.blocks = [-(-length // self.block_tokens) for length in self.lengths]
        num_slots = sum(self.blocks) + 3
        one = 2 * self.block_tokens * self.kv_heads * self.dim
        stride = self.num_layers * one + self.gap
        raw = torch.full((num_slots * stride + 16,), NAN, dtype=self.dtype)
        start = -raw.data_ptr() % 32 // raw.element_size()
        strides = (stride, one // 2, self.kv_heads * self.dim, self.dim, 1)
        shape = (num_slots, 2, self.block_tokens, self.kv_heads, self.dim)
        self.layers = [raw.as_strided(shape, strides, start + i * one) for i in range(self.num_layers)]
        self.layer = self.layers[-1]
        order = torch.randperm(num_slots, generator=self.generator).to(torch.int32)
        self.table = torch.full((len(self.lengths), max(self.blocks, default=0) + 2), 1 << 30, dtype=torch.int32)
        for row, count in enumerate(self.blocks):
            self.table[row, :count] = order[sum(self.blocks[:row]) :][:count]
        self.query = self.random(len(self.lengths), self.kv_heads * self.group, self.dim)
        self.key, self.value = (self.random(len(self.lengths), self.kv_heads, self.dim) for _ in range(2))
        for row, length in enumerate(self.lengths):
            for token in range(length - 1):
                slot = int(self.table[row, token // self.block_tokens])
                self.layer[slot, :, token % self.block_tokens] = self.random(2, self.kv_heads, self.dim)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def run(
        self, kernels: HostKernels, rows: list[int] | None = None, *, more_splits: int = 0, append: bool = True
    ) -> torch.Tensor:
        """The kernel's result for some rows, in that order."""
        rows = list(range(len(self.lengths))) if rows is None else rows
        heads, num_splits = self.query.shape[1], splits_of(max(self.lengths)) + more_splits
        out = torch.full((len(rows), heads, self.dim), NAN, dtype=self.dtype)
        scratch = torch.full((scratch_floats(len(rows), heads, self.dim, num_splits),), NAN)
        lengths = torch.tensor([self.lengths[row] for row in rows])
        new = (self.key[rows], self.value[rows]) if append else None
        call = (self.layer, self.table[rows], lengths, self.query[rows], out, scratch, self.dim**-0.5, num_splits)
        PagedDecode(kernels).attend(*call, new)
        return out

    def worst(self, kernels: HostKernels) -> float:
        """Largest difference; the new tokens must be in the pool, and nothing else may have changed."""
        before = [layer.clone() for layer in self.layers]
        out = self.run(kernels)
        for row, length in enumerate(self.lengths):
            if length:
                slot, place = int(self.table[row, (length - 1) // self.block_tokens]), (length - 1) % self.block_tokens
                before[-1][slot, 0, place], before[-1][slot, 1, place] = self.key[row], self.value[row]
        same = [torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before, self.layers, strict=True)]
        assert all(same), "only the new tokens are written"
        want = reference(self.layer, self.table, torch.tensor(self.lengths), self.query, self.dim**-0.5)
        assert torch.equal(self.run(kernels, append=False), out), "a token that is there already counts the same"
        return float((out.double() - want).abs().max())


@pytest.mark.parametrize("group", [1, 3, 4, 8, 12, 16])
@pytest.mark.parametrize("block_tokens", [16, 64, 256])
def test_it_agrees_with_attention_in_float64(host_kernels: HostKernels, block_tokens: int, group: int) -> None:
    lengths = [1, block_tokens - 1, block_tokens, block_tokens + 1, SPLIT, SPLIT + 1, 0, 2 * SPLIT + 77]
    case = Case(lengths, block_tokens, group=group, seed=group)
    assert case.worst(host_kernels) < MOST[torch.float32]
    assert host_kernels.offences() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [16, 64, 72, 80, 96, 128, 192, 256])
def test_every_width_and_dtype(host_kernels: HostKernels, dim: int, dtype: torch.dtype) -> None:
    case = Case([300, 17, 33], 24, kv_heads=3, group=4, dim=dim, dtype=dtype, seed=dim)
    assert case.worst(host_kernels) < MOST[dtype]
    assert host_kernels.offences() == 0


def test_every_length_around_what_it_is_cut_by(host_kernels: HostKernels) -> None:
    """Lanes, tiles and splits end at different places: each length there by itself."""
    lengths = [*range(1, 70), *range(120, 136), *range(250, 262), *range(510, 516)]
    case = Case(lengths, 8, kv_heads=1, group=2)
    assert case.worst(host_kernels) < MOST[torch.float32]


@pytest.mark.parametrize("gap", [8, 40, 4096])
def test_slots_may_lie_apart(host_kernels: HostKernels, gap: int) -> None:
    case = Case([200, 90], gap=gap, dtype=torch.bfloat16, num_layers=3)
    assert case.worst(host_kernels) < MOST[torch.bfloat16]
    assert host_kernels.offences() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_has_the_same_bits_in_every_batch(host_kernels: HostKernels, dtype: torch.dtype) -> None:
    """Alone, among eight, backwards, beside padding, with room for longer contexts; and in other slots."""
    case = Case([700, 5, 256, 0, 1, 513, 300, 44], group=3, dtype=dtype)
    together = case.run(host_kernels)
    assert torch.equal(case.run(host_kernels, list(range(7, -1, -1))), together.flip(0))
    assert torch.equal(case.run(host_kernels, more_splits=5), together)
    for row in range(8):
        assert torch.equal(case.run(host_kernels, [row])[0], together[row])
    again, moved = Case([*case.lengths], group=3, dtype=dtype), case.table.clone()
    for at, old in enumerate(sorted(set(case.table[case.table < 1 << 30].tolist()), reverse=True)):
        again.layer[at], again.table[moved == old] = case.layer[old], at
    assert not torch.equal(again.table, case.table)
    assert torch.equal(again.run(host_kernels), together)


def test_rows_need_not_be_contiguous(host_kernels: HostKernels) -> None:
    """As a model gives them: heads first, or cut out of something wider at any place."""
    case = Case([100, 37], group=2, dtype=torch.bfloat16)
    want = case.run(host_kernels)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.zeros(2, 2, 64 + 3, dtype=torch.bfloat16)
    wide[..., 3:] = case.key
    case.key = wide[..., 3:]
    assert readable(case.query) is case.query and readable(case.key) is not case.key
    assert torch.equal(case.run(host_kernels), want)
    assert host_kernels.offences() == 0


def test_places_beyond_32_bits(host_kernels: HostKernels) -> None:
    """A pool of 48 GiB, of which a few slots are ever touched: 2^33 values of 4 bytes and more lie before the last."""
    num_slots, one = 3 << 12, 1 << 20  # values; 4 MiB a slot
    size = num_slots * one * 4
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        memory = mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        pytest.skip(f"no {size} bytes of address space: {error}")
    layer = torch.frombuffer(memory, dtype=torch.float32).as_strided(
        (num_slots, 2, 16, 2, 64), (one, 2048, 128, 64, 1), one - 4096
    )
    assert layer[-1].data_ptr() - layer[0].data_ptr() > 1 << 35
    slots = [num_slots - 1, 0, num_slots // 2 + 5, 2048, 4096, num_slots - 2]
    case = Case([90, 16 * 4])
    case.layer = layer
    case.table[0, :6], case.table[1, :4] = torch.tensor(slots[::-1]), torch.tensor([7, num_slots - 9, 2049, 8192])
    for slot in {*slots, 7, num_slots - 9, 2049, 8192}:
        layer[slot] = case.random(*layer.shape[1:])
    out = case.run(host_kernels)
    want = reference(layer, case.table, torch.tensor(case.lengths), case.query, 0.125)
    assert float((out.double() - want).abs().max()) < MOST[torch.float32]


def test_large_scores_do_not_overflow(host_kernels: HostKernels) -> None:
    case = Case([600, 600])
    case.query *= 200
    want = case.run(host_kernels)
    assert want.isfinite().all()
    assert case.worst(host_kernels) < 1e-3


def test_what_does_not_fit_is_refused(host_kernels: HostKernels) -> None:
    case = Case([20, 30])
    good = case.layer, case.table, torch.tensor(case.lengths), case.query, torch.zeros(2, 2, 64), torch.zeros(1000)
    attend = PagedDecode(host_kernels).attend
    attend(*good, 0.1, 1)
    for at, bad, what in (
        (1, case.table.long(), "table"),
        (2, torch.tensor([1]), "lengths"),
        (3, case.query.double(), "rows"),
        (4, torch.zeros(2, 64, 2).transpose(1, 2), "out"),
        (5, torch.zeros(10), "scratch's size"),
    ):
        wrong = [*good]
        wrong[at] = bad
        with pytest.raises(LayoutError, match=what):
            attend(*wrong, 0.1, 1)
    with pytest.raises(LayoutError, match="new rows"):
        attend(*good, 0.1, 1, (case.key, case.value.double()))


def test_pools_that_it_can_not_read_are_told() -> None:
    assert "steps of 16" in obstacle(torch.zeros(2, 2, 8, 1, 12, dtype=torch.bfloat16), 2)
    assert "steps of 16" in obstacle(torch.zeros(2, 2, 8, 1, 512), 2)
    assert "multiples of 16" in obstacle(torch.zeros(2, 2, 8, 1, 66)[..., :64], 2)
    assert "evenly" in obstacle(torch.zeros(2, 2, 8, 2, 64), 3)
    assert "float64" in obstacle(torch.zeros(2, 2, 8, 2, 64, dtype=torch.float64), 2)
    assert obstacle(torch.zeros(2, 2, 8, 2, 64), 6) == ""


def test_its_kernels_compile_without_a_device() -> None:
    try:
        image = build.cubin("sm_90").read_bytes()
    except Unavailable as error:
        pytest.skip(str(error))
    names = [f"kv_decode_{form}_{turn}" for form in ("float32", "bfloat16", "float16") for turn in (1, 2, 4, 8)]
    assert all(name.encode() in image for name in [*names, "kv_join_bfloat16"])
