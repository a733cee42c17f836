"""Is every byte right? Each function runs on any device, compares with the host's results and counts mistakes.

Random data, poisoned targets, goals of zero mistakes.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import torch
import xxhash

from kvstore.core.types import Slot
from kvstore.tiers.transfer import Copy, Memory, Priority
from kvstore_gpu.arena import Arena, PoolSpec
from kvstore_gpu.build import ARCHITECTURES, compile_cubin
from kvstore_gpu.check.rows import NotHere, Row, plain
from kvstore_gpu.errors import Unavailable
from kvstore_gpu.hand import DeviceHand
from kvstore_gpu.kernels import HostKernels, Kernels, TorchKernels, best_kernels
from kvstore_gpu.layout import EnginePool
from kvstore_gpu.nvme import random_block
from kvstore_gpu.pinned import PinnedBuffer, register
from kvstore_gpu.quant import Codec, Format, measure
from kvstore_gpu.streams import CudaBackend

LAYOUTS = {
    "kv, block, token, head, dim": ("kv", "block", "token", "head", "dim"),
    "block, kv, head, token, dim": ("block", "kv", "head", "token", "dim"),
    "block, head, token, kv, dim": ("block", "head", "token", "kv", "dim"),
    "block, token, dim": ("block", "token", "dim"),
}
SIZES = {"kv": 2, "block": 24, "head": 3}
LENGTHS = [*range(260), 1023, 1024, 1025, 2047, 4096, 8192, 16_385, 65_536, 100_001]
SPEC = PoolSpec(num_slots=12, num_slices=8, slice_bytes=49_152)


def cubins() -> list[Row]:
    """The sources compile for each named architecture; needs no device."""
    try:
        made = sum(compile_cubin(arch).startswith(b"\x7fELF") for arch in ARCHITECTURES)
    except Unavailable as error:
        raise NotHere(str(error)) from error
    return [plain(f"architectures compiled ({', '.join(ARCHITECTURES)})", made, "", len(ARCHITECTURES), "at least")]


def kernels_on(device: str) -> Kernels:
    """The kernels to verify: the device's, or their sources run on the host. Raises: NotHere."""
    try:
        return HostKernels() if device == "cpu" else best_kernels(torch.device(device))
    except Unavailable as error:
        raise NotHere(str(error)) from error


def kernels(device: str) -> list[Row]:
    """Gather, scatter, checksum and fill, each against the host's reference."""
    tried = kernels_on(device)
    if tried.name == "torch":
        raise NotHere("the CUDA kernels can't be loaded here: CuPy or NVRTC is missing")
    wrong = sum(_moves(tried, axes, dim, device) for axes in LAYOUTS.values() for dim in (16, 9, 64))
    rows = [plain(f"gather and scatter, wrong bytes ({tried.name})", wrong, "", 0)]
    rows.append(plain(f"XXH3-64 over {len(LENGTHS)} lengths, wrong sums ({tried.name})", _sums(tried, device), "", 0))
    rows.append(plain(f"poison fill, wrong bytes ({tried.name})", _fill(tried, device), "", 0))
    return rows


def _moves(tried: Kernels, axes: tuple[str, ...], dim: int, device: str) -> int:
    sizes = {**SIZES, "token": 32, "dim": dim}
    shape = [sizes[axis] for axis in axes]
    source = torch.Generator().manual_seed(dim)
    layers = [torch.randint(0, 2**15, shape, dtype=torch.int16, generator=source) for _ in range(3)]
    here = EnginePool.describe(layers, axes, 16)
    there = EnginePool.describe([layer.to(device) for layer in layers], axes, 16)
    chunks = here.chunk_offsets(np.random.default_rng(dim).permutation(24)[:4], 8)
    stride = -(-here.shape.slot_bytes // 4096) * 4096
    at = np.arange(8, dtype=np.uint64)[::-1].copy() * np.uint64(stride)
    want = torch.full((8, stride), 0xA5, dtype=torch.uint8)
    got = want.to(device)
    TorchKernels().gather(here, chunks, want, at)
    tried.gather(there, chunks, got, at)
    wrong = _different(got, want)
    for pool in (here, there):
        for layer in pool.layers:
            layer.zero_()
    TorchKernels().scatter(here, chunks, want, at)
    tried.scatter(there, chunks, want.to(device), at)
    return wrong + sum(_different(a, b) for a, b in zip(there.layers, here.layers, strict=True))


def _sums(tried: Kernels, device: str) -> int:
    data = torch.from_numpy(random_block(200_000, 1))
    there, wrong = data.to(device), 0
    for length in LENGTHS:
        want = xxhash.xxh3_64_intdigest(data[64 : 64 + length].numpy())
        got = tried.checksum(there, np.array([64], dtype=np.uint64), 1, length)
        wrong += int(got.cpu()[0, 0]) % 2**64 != want
    return wrong


def _fill(tried: Kernels, device: str) -> int:
    want = torch.from_numpy(random_block(100_000, 2))
    got, at = want.to(device), np.array([4096, 50_001], dtype=np.uint64)
    TorchKernels().fill(want, at, 33_333)
    tried.fill(got, at, 33_333)
    return _different(got, want)


def copies(device: str) -> list[Row]:
    """Blocks in and out: by pair, by slot, pinned in chunks (runs cross their borders) and staged."""
    arena = Arena.create(SPEC, device)
    try:
        dram = random_block(SPEC.num_slots * SPEC.stride_bytes, 3)
        rows, region = list[Row](), None
        if arena.backend.needs_pinned:
            rows.append(plain("staged copies in and out, wrong bytes", _round_trip(arena, dram), "", 0))
        if isinstance(arena.backend, CudaBackend):
            dram = page_aligned(dram)
            region = register(arena.backend.driver, dram, chunk_bytes=1 << 20)
            arena.use_pinned(region)
        rows.append(plain("copies in and out, wrong bytes", _round_trip(arena, dram), "", 0))
        rows.append(plain("whole slots in and out, wrong bytes", _slot_trip(arena, dram), "", 0))
        if region is not None:
            region.close()
        return rows
    finally:
        arena.close()


def _round_trip(arena: Arena, dram: np.ndarray) -> int:
    slots = [arena.slot(i) for i in range(arena.num_slots)]
    sources = list(dram.reshape(arena.num_slots, -1))
    arena.poison(slots)
    arena.copy_in(zip(sources, slots[::-1], strict=True)).wait()
    sums = arena.checksums(slots)
    wrong = sum(int(sums[-1 - i, 0]) != _slice_sum(source, 0) for i, source in enumerate(sources))
    got = [np.full(arena.stride_bytes, 0xA5, dtype=np.uint8) for _ in slots]
    arena.copy_out(zip(slots[::-1], got, strict=True)).wait()
    return wrong + sum(int((a != b).sum()) for a, b in zip(got, sources, strict=True))


def _slot_trip(arena: Arena, dram: np.ndarray) -> int:
    offsets = np.arange(arena.num_slots, dtype=np.int64) * arena.stride_bytes
    before = dram.copy()
    arena.poison([Slot(int(at)) for at in offsets])
    into = arena.copy_in_slots(dram, offsets, offsets)
    into.wait()
    dram[:] = 0xA5
    arena.copy_out_slots(dram, offsets, offsets).wait()
    wrong = int((dram != before).sum())
    dram[:] = before
    return wrong


def page_aligned(memory: np.ndarray) -> np.ndarray:
    """A copy that begins on a page, as mappings do."""
    whole = np.empty(memory.nbytes + 4096, dtype=np.uint8)
    part = whole[-whole.ctypes.data % 4096 :][: memory.nbytes]
    part[:] = memory
    return part


def layers(device: str) -> list[Row]:
    """A layer-wise restore with one damaged slice: that one is named, and no other."""
    arena = Arena.create(SPEC, device)
    try:
        memory = arena.backend.pinned(4 * SPEC.stride_bytes)
        memory[:] = random_block(memory.nbytes, 4)
        arena.use_pinned(PinnedBuffer(memory))
        blocks = list(memory.reshape(4, -1))
        expected = np.array(
            [[_slice_sum(block, i) for i in range(SPEC.num_slices)] for block in blocks], dtype=np.uint64
        )
        blocks[2][5 * SPEC.slice_bytes + 77] ^= 4
        pairs = [(block, arena.slot(3 * i)) for i, block in enumerate(blocks)]
        restore = arena.restore_layers(pairs, expected, layers_per_event=3)
        for layer in range(SPEC.num_slices):
            restore.before_layer(layer)
        missed = restore.finish() != [(2, 5)]
        return [plain("layer-wise restore, damage not named or wrongly named", int(missed), "", 0)]
    finally:
        arena.close()


def hand(device: str) -> list[Row]:
    """The client's way: offload with checksums and restore verified, through the hand's thread."""
    arena = Arena.create(SPEC, device)
    mover = DeviceHand(arena)
    try:
        first, second = random_block(4 * SPEC.stride_bytes, 6), np.zeros(4 * SPEC.stride_bytes, dtype=np.uint8)
        shape = (SPEC.slot_bytes, SPEC.slice_bytes)
        slots = [Memory(arena.flat, i * SPEC.stride_bytes) for i in range(8)]
        up = [Copy(Memory(first, s.offset), s, *shape) for s in slots[:4]]
        down = [Copy(s, Memory(second, s.offset), *shape, want_checksums=True) for s in slots[:4]]
        results = mover.submit(up, Priority.READ).wait(30) + (stored := mover.submit(down, Priority.WRITE).wait(30))
        sums = [result.checksums for result in stored]
        again = [Copy(Memory(second, i * SPEC.stride_bytes), slots[4 + i], *shape, sums[i]) for i in range(4)]
        results += mover.submit(again, Priority.READ).wait(30)
        failed = sum(not result.ok for result in results)
        rows = zip(first.reshape(4, -1), second.reshape(4, -1), strict=True)
        wrong = sum(int((a[: SPEC.slot_bytes] != b[: SPEC.slot_bytes]).sum()) for a, b in rows)
        return [plain("offload and restore by the client's hand, wrong bytes", wrong + failed, "", 0)]
    finally:
        mover.close()
        arena.close()


def _slice_sum(block: np.ndarray, index: int) -> int:
    return xxhash.xxh3_64_intdigest(block[index * SPEC.slice_bytes : (index + 1) * SPEC.slice_bytes].tobytes())


def order(device: str, busy_size: int = 2048) -> list[Row]:
    """Copies against a busy compute stream: what goes out is what was computed before, what is read is what came in."""
    arena = Arena.create(SPEC, device)
    try:
        memory = arena.backend.pinned(2 * SPEC.stride_bytes)
        arena.use_pinned(PinnedBuffer(memory))
        out, new = memory.reshape(2, -1)
        busy, wrong = torch.ones((busy_size, busy_size), device=device), 0
        for value in range(50):
            for _ in range(10):
                busy = busy @ busy * 1e-4
            arena.tensor[0].fill_(value)
            leaving = arena.copy_out([(arena.slot(0), out)])
            leaving.before_compute()
            arena.tensor[0].fill_(0xA5)
            leaving.wait()
            wrong += int((out != value).sum())
            new[:] = value + 100
            arena.copy_in([(new, arena.slot(0))]).before_compute()
            wrong += int((arena.tensor[0] != value + 100).sum())
        return [plain("copies against busy compute, wrong bytes in 50 rounds", wrong, "", 0)]
    finally:
        arena.close()


_CHILD = """
import sys
from kvstore_gpu.arena import Arena, PoolSpec
spec = PoolSpec(*map(int, sys.argv[2:5]))
arena = Arena.open_ipc(spec, bytes.fromhex(sys.argv[1]), sys.argv[5])
print(arena.checksums([arena.slot(i) for i in range(spec.num_slots)]).tobytes().hex())
arena.close()
"""


def ipc(device: str) -> list[Row]:
    """Another process opens the pool and sums it. Raises: NotHere for host memory."""
    if device == "cpu":
        raise NotHere("CUDA IPC needs a device")
    arena = Arena.create(SPEC, device)
    try:
        arena.copy_in((random_block(SPEC.stride_bytes, i), arena.slot(i)) for i in range(SPEC.num_slots)).wait()
        want = arena.checksums([arena.slot(i) for i in range(SPEC.num_slots)])
        sizes = [str(size) for size in (SPEC.num_slots, SPEC.num_slices, SPEC.slice_bytes)]
        command = [sys.executable, "-c", _CHILD, arena.export_ipc().hex(), *sizes, device]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        if done.returncode:
            raise RuntimeError(f"the other process failed: {done.stderr.strip().splitlines()[-1:]}")
        got = np.frombuffer(bytes.fromhex(done.stdout.strip()), dtype=np.uint64)
        return [plain("pool opened by another process, wrong sums", int((got != want.ravel()).sum()), "", 0)]
    finally:
        arena.close()


def quantised(device: str) -> list[Row]:
    """Quantised copies: largest error as a share of its bound, and the error as such."""
    source = torch.Generator().manual_seed(5)
    blocks = torch.randn((4, 8, 2, 16, 8, 128), generator=source).mul(torch.randn(8, 1, generator=source).exp())
    rows = list[Row]()
    for form in Format:
        codec = Codec(form, 8, 2, 16, 8, 128)
        error = measure(codec, blocks.to(device, torch.bfloat16))
        rows.append(plain(f"{form.name.lower()}: largest error / its bound", error.worst_of_bound, "", 1 + 1e-5))
        rows.append(plain(f"{form.name.lower()}: root mean square error, relative", error.relative_rms, ""))
        rows.append(plain(f"{form.name.lower()}: bytes saved", 100 * error.bytes_saved, "%"))
    return rows


def _different(got: torch.Tensor, want: torch.Tensor) -> int:
    there, here = got.cpu().contiguous().view(-1), want.contiguous().view(-1)
    return int((there.view(torch.uint8) != here.view(torch.uint8)).sum())
