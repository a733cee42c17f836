"""The decode kernel and the engine's decode step: right, how much of the device's bandwidth, run or replayed.

right    the kernel against attention in float64; a row alone and in a batch; places that 32 bits don't count
read     bytes of K and V a second, against what a device-to-device copy reads and writes
steps    a decode step of the engine, its launches made one by one or replayed as a CUDA graph
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstore_gpu.arena import PoolSpec
from kvstore_gpu.check import engine
from kvstore_gpu.check.rows import NotHere, Row, compared, plain
from kvstore_gpu.check.speed import GB, Sizes, best, pool
from kvstore_gpu.check.verify import kernels_on
from kvstore_gpu.decode import NAMES, PagedDecode, reference, scratch_floats, splits_of
from kvstore_gpu.kernels import SourceKernels
from kvstore_gpu.streams import Backend, InlineBackend

if TYPE_CHECKING:
    from kvstore_engine.decode import Decoder

READ = "decode attention against a device-to-device copy"
STEPS = "decode steps run and replayed"
LASTS_S = 30.0
"""Loading the model, capturing its steps."""
MOST = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest difference from float64 over values of unit variance: mostly the rounding of the result."""
BEYOND = 1 << 31
"""Elements, between a pool's first slot and its last."""


def kernel_on(device: str) -> PagedDecode:
    """The device's kernel, or its source run on the host. Raises: NotHere."""
    kernels = kernels_on(device)
    if not isinstance(kernels, SourceKernels):
        raise NotHere("the CUDA kernels can't be loaded here: CuPy or NVRTC is missing")
    return PagedDecode(kernels)


@dataclass
class Layer:
    """One layer of a pool, contexts in scattered slots of it, and the tensors of one call."""

    layer: torch.Tensor
    lengths: list[int]
    num_heads: int

    def __post_init__(self) -> None:
        num_slots, _, size, _, dim = self.layer.shape
        device, source = self.layer.device, torch.Generator().manual_seed(num_slots)
        most = max(self.lengths)
        order = torch.randperm(num_slots, generator=source).to(torch.int32)
        blocks = -(-most // size)
        table = torch.zeros(len(self.lengths), blocks, dtype=torch.int32)
        for row in range(len(self.lengths)):
            table[row] = order[torch.arange(row * blocks, (row + 1) * blocks) % num_slots]
        self.table = table.to(device)
        self.counts = torch.tensor(self.lengths).to(device)
        self.num_splits = splits_of(most)
        query = torch.randn(len(self.lengths), self.num_heads, dim, generator=source)
        self.query = query.to(self.layer.dtype).to(device)
        self.out = torch.empty_like(self.query)
        size = scratch_floats(len(self.lengths), self.num_heads, dim, self.num_splits)
        self.scratch = torch.empty(size, dtype=torch.float32, device=device)
        self.scale = float(dim) ** -0.5

    def attend(self, kernel: PagedDecode, row: int | None = None) -> torch.Tensor:
        """All rows, or one alone; valid until the next call."""
        rows = slice(None) if row is None else slice(row, row + 1)
        out = self.out[rows]
        tables = self.layer, self.table[rows], self.counts[rows], self.query[rows], out, self.scratch
        kernel.attend(*tables, self.scale, self.num_splits)
        return out

    def wrong(self, kernel: PagedDecode) -> float:
        """Largest difference from float64, NaN told."""
        want = reference(self.layer, self.table, torch.tensor(self.lengths), self.query, self.scale)
        return float((self.attend(kernel).cpu().double() - want).abs().max())


def right(device: str) -> list[Row]:
    """Every dtype; a batch against its rows alone; slots farther apart than 32 bits count."""
    kernel, rows, apart = kernel_on(device), list[Row](), 0
    for dtype, name in NAMES.items():
        for num_heads, kv_heads, dim in ((8, 8, 64), (24, 8, 128), (16, 2, 128), (12, 1, 256)):
            source = torch.Generator().manual_seed(dim)
            layer = torch.randn(80, 2, 16, kv_heads, dim, generator=source).to(dtype).to(device)
            case = Layer(layer, [1, 16, 17, 256, 257, 600, 0, 1200], num_heads)
            worst = case.wrong(kernel)
            together = case.attend(kernel).clone()
            apart += sum(int((case.attend(kernel, row)[0] != together[row]).sum()) for row in range(8))
            rows.append(
                plain(f"decode attention, {name} {num_heads}/{kv_heads} heads of {dim}", worst, "", MOST[dtype])
            )
    rows.append(plain("decode attention, wrong values of rows alone against a batch", apart, "", 0))
    return rows + _far(kernel, device)


def _far(kernel: PagedDecode, device: str) -> list[Row]:
    """33 slots over a little more than 2^31 elements, as a large pool's are; only where there is room for that."""
    step = BEYOND // 32 // 4096 * 4096 + 4096
    if device == "cpu" or torch.cuda.mem_get_info(device)[0] < 80 * step:
        return []
    memory = torch.empty(33 * step, dtype=torch.bfloat16, device=device)
    layer = memory.as_strided((33, 2, 16, 8, 128), (step, 16384, 1024, 128, 1))
    source = torch.Generator().manual_seed(9)
    layer.copy_(torch.randn(layer.shape, generator=source).to(torch.bfloat16))
    worst = Layer(layer, [500, 300], 16).wrong(kernel)
    return [plain("decode attention, a pool of over 2^31 elements", worst, "", MOST[torch.bfloat16])]


def read(device: str, sizes: Sizes) -> list[Row]:
    """Llama-70B's heads (64 over 8 of 128, bf16), blocks of 16 tokens: a batch of contexts, and one."""
    kernel, (num_rows, num_tokens) = kernel_on(device), sizes.decode_contexts
    rows = list[Row]()
    with pool(PoolSpec(1, 1, 4096), device) as arena:
        shape = (num_rows * num_tokens // 16, 2, 16, 8, 128)
        layer = torch.empty(shape, dtype=torch.bfloat16, device=device).fill_(0.5)
        other, num_bytes = torch.empty_like(layer), layer.numel() * 2
        seconds = best(arena.backend, lambda: other.copy_(layer), sizes.rounds, sizes.repeats)
        limit = 2 * num_bytes / seconds / GB
        for count in (num_rows, 1):
            case = Layer(layer, [num_tokens] * count, 64)

            def work(case: Layer = case) -> None:
                case.attend(kernel)

            rate = num_bytes * count / num_rows / best(arena.backend, work, sizes.rounds, sizes.repeats) / GB
            rows.append(compared(f"decode attention of {count} x {num_tokens} tokens, read", rate, "GB/s", limit))
    return rows


def steps(device: str, small: bool) -> list[Row]:
    """A full batch of the engine's model, contexts half as long as it allows. Raises NotHere: what is missing."""
    model, config = engine.model_of(device, small)
    from kvstore_engine.executor import Executor
    from kvstore_engine.pool import KVPool

    memory = KVPool(model.keyspace, config.pool_bytes, model.device)
    try:
        executor = Executor(model, memory, config.max_batch, config.threads, "auto", "auto")
        if executor.decoder is None:
            raise NotHere("our kernel doesn't decode here, the log says why")
        backend = memory.arena.backend if memory.arena is not None else InlineBackend()
        return stepped(executor.decoder, backend, 1 if small else 20)
    finally:
        memory.close()


def stepped(decoder: Decoder, backend: Backend, repeats: int) -> list[Row]:
    """Milliseconds of a step by either way; the bits of both."""
    from kvstore_engine.executor import Work

    num_rows, size = decoder.num_rows, decoder.pool.keyspace.block_tokens
    blocks = min(decoder.context_tokens_max // 2 // size, decoder.pool.num_slots // num_rows)
    start, slots = blocks * size - 1, range(num_rows * blocks)
    decoder.inputs.fill([Work([7 + i], start, slots[i * blocks : (i + 1) * blocks]) for i in range(num_rows)])
    num_splits, name = decoder.bucket(start + 1), f"decode step, {num_rows} x {start + 1} tokens"
    run = 1e3 * best(backend, lambda: decoder.run(num_splits), 3, repeats)
    rows = [plain(f"{name}, run", run, "ms")]
    want, found = decoder.run(num_splits).clone(), decoder.replay(num_splits)
    if found is not None:  # else the log says why
        rows.append(plain("decode step, wrong values of a replay", int((found != want).sum()), "", 0))
        replayed = 1e3 * best(backend, lambda: decoder.replay(num_splits), 3, repeats)
        rows.append(compared(f"{name}, replayed against run", replayed, "ms", run))
    return rows
