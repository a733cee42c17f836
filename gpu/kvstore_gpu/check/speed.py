"""How fast, against a limit measured in the same run.

Every function runs on any device; `Sizes.small` makes the same code run in a test on a CPU, where figures mean
nothing. Times are taken between two points at which the device has nothing left to do *for this process*, over
several repeats, best of a few.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from kvstore_gpu.arena import Arena, PoolSpec
from kvstore_gpu.check.rows import NotHere, Row, compared, plain
from kvstore_gpu.layout import EnginePool
from kvstore_gpu.pinned import PinnedBuffer, PinnedRegion, one_copy, register
from kvstore_gpu.probe import Probe, probe
from kvstore_gpu.streams import Backend, CudaBackend, HostBuffer

GB = 1e9
LLAMA_70B_PARAMETERS = 70.6e9


@dataclass(frozen=True)
class Sizes:
    """How much is moved; the defaults are those of the goals."""

    slots: PoolSpec = field(default=PoolSpec(256, 32, 1 << 16))  # 256 x 2 MiB
    heads: int = 8
    head_dim: int = 128
    context: PoolSpec = field(default=PoolSpec(2048, 80, 1 << 16))  # 32k tokens, 80 layers x 64 KiB: 5 MiB a block
    context_tokens: int = 32_768
    decode_matrix: int = 8192
    decode_steps: int = 200
    busy_size: int = 2048
    rounds: int = 5
    repeats: int = 10
    decode_contexts: tuple[int, int] = (8, 32_768)
    """Rows and tokens of each."""

    @classmethod
    def small(cls) -> Sizes:
        """Everything, in a second, on a CPU."""
        spec = PoolSpec(8, 4, 1 << 13)
        return cls(spec, 2, 64, spec, 128, 128, 5, 32, 1, 1, (2, 304))


def best(backend: Backend, work: Callable[[], object], rounds: int, repeats: int = 1) -> float:
    """Seconds of one `work`, best of `rounds`; each round enqueues it `repeats` times and waits once."""
    spent = list[float]()
    for _ in range(rounds + 1):  # the first round warms up
        backend.compute_stream().record().wait()
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        backend.compute_stream().record().wait()
        spent.append((time.perf_counter() - begun) / repeats)
    return min(spent[1:])


@contextmanager
def pinned_dram(arena: Arena, num_bytes: int) -> Iterator[HostBuffer]:
    """A touched host mapping, registered in chunks where there is a device, as the node's arena is."""
    whole = np.zeros(num_bytes + 4096, dtype=np.uint8)
    dram = whole[-whole.ctypes.data % 4096 :][:num_bytes]
    dram[:: 1 << 12] = 7
    pinned: PinnedRegion | PinnedBuffer = PinnedBuffer(dram)
    if isinstance(arena.backend, CudaBackend):
        pinned = register(arena.backend.driver, dram)
    arena.use_pinned(pinned)
    try:
        yield dram
    finally:
        arena.forget_pinned(pinned)
        if isinstance(pinned, PinnedRegion):
            pinned.close()


@contextmanager
def pool(spec: PoolSpec, device: str) -> Iterator[Arena]:
    """An arena for a while."""
    arena = Arena.create(spec, device)
    try:
        yield arena
    finally:
        arena.close()


def transfers(device: str, sizes: Sizes) -> list[Row]:
    """256 x 2 MiB slots each way, scattered at both ends, against one large copy of as many bytes."""
    spec = sizes.slots
    with pool(spec, device) as arena, pinned_dram(arena, spec.num_slots * spec.stride_bytes) as dram:
        order = np.random.default_rng(0).permutation(spec.num_slots) * spec.stride_bytes
        straight = np.arange(spec.num_slots, dtype=np.int64) * spec.stride_bytes
        views = [dram[at : at + spec.stride_bytes] for at in straight.tolist()]
        slots = [arena.slot(int(i)) for i in order // spec.stride_bytes]
        ways: dict[str, Callable[[], None]] = {
            "H2D, scattered slots": lambda: arena.copy_in_slots(dram, straight, order).wait(),
            "D2H, scattered slots": lambda: arena.copy_out_slots(dram, order, straight).wait(),
            "H2D, adjacent slots": lambda: arena.copy_in_slots(dram, straight, straight).wait(),
            "H2D, a list of buffers": lambda: arena.copy_in(zip(views, slots, strict=True)).wait(),
        }
        limits = {name: dram.nbytes / one_large(arena, dram, sizes, into=name == "H2D") for name in ("H2D", "D2H")}
        rows = list[Row]()
        for name, work in ways.items():
            rate = dram.nbytes / best(arena.backend, work, sizes.rounds)
            goal = 0.95 if "scattered" in name else None
            rows.append(compared(f"{name} against one large copy", rate / GB, "GB/s", limits[name[:3]] / GB, goal))
        return rows


def one_large(arena: Arena, dram: HostBuffer, sizes: Sizes, *, into: bool) -> float:
    """Seconds of one copy of all of `dram`."""
    stream = arena.backend.new_stream()
    device, host = arena.tensor.data_ptr(), int(dram.ctypes.data)
    copy = one_copy(device, host, dram.nbytes) if into else one_copy(host, device, dram.nbytes)

    def work() -> None:
        arena.backend.copy(stream, copy)
        stream.record().wait()

    return best(arena.backend, work, sizes.rounds)


def kernels(device: str, sizes: Sizes, host_to_device: float | None, nvme: float | None) -> list[Row]:
    """Gather and scatter against a device-to-device copy; checksum against PCIe (GB/s) and NVMe (bytes a second)."""
    spec = sizes.slots
    with pool(spec, device) as arena:
        if device != "cpu" and arena.kernels.name != "cuda":
            raise NotHere("the CUDA kernels can't be loaded here: CuPy or NVRTC is missing")
        num_bytes = spec.num_slots * spec.stride_bytes

        def rate(work: Callable[[], object]) -> float:
            return num_bytes / best(arena.backend, work, sizes.rounds, sizes.repeats) / GB

        other = torch.empty_like(arena.tensor)
        limit = rate(lambda: other.copy_(arena.tensor))
        engine, chunks, at = _engine(arena, other, sizes)
        gather = rate(lambda: arena.kernels.gather(engine, chunks, arena.tensor, at))
        scatter = rate(lambda: arena.kernels.scatter(engine, chunks, arena.tensor, at))
        sums = rate(lambda: arena.kernels.checksum(arena.tensor, at, spec.num_slices, spec.slice_bytes))
        rows = [compared("gather against a device-to-device copy", gather, "GB/s", limit, 0.85)]
        rows.append(compared("scatter against a device-to-device copy", scatter, "GB/s", limit, 0.85))
        if nvme is not None:
            rows.append(compared("XXH3-64 on the device against NVMe", sums, "GB/s", nvme / GB, 10))
        if host_to_device is not None:
            rows.append(compared("XXH3-64 on the device against H2D", sums, "GB/s", host_to_device, 1))
        return rows


def _engine(arena: Arena, memory: torch.Tensor, sizes: Sizes) -> tuple[EnginePool, np.ndarray, np.ndarray]:
    """A layer-first pool over `memory`, as large as the arena, its blocks shuffled."""
    spec = arena.spec
    tokens = spec.slice_bytes // (2 * 2 * sizes.heads * sizes.head_dim)
    shape = (spec.num_slices, 2, spec.num_slots, tokens, sizes.heads, sizes.head_dim)
    whole = memory.view(-1)[: spec.num_slots * spec.slot_bytes].view(torch.bfloat16).view(shape)
    engine = EnginePool.describe(list(whole), ("kv", "block", "token", "head", "dim"), tokens)
    order = np.random.default_rng(1).permutation(spec.num_slots)
    at = np.arange(spec.num_slots, dtype=np.uint64) * np.uint64(spec.stride_bytes)
    return engine, engine.chunk_offsets(order, spec.num_slots), at


def storage(device: str, sizes: Sizes, folder: Path) -> tuple[list[Row], Probe]:
    """NVMe -> pool by each path. The limit of kvikio's is the host's."""
    found = probe(folder, sizes.slots, device)
    rows = [plain("NVMe to pool by the host path", (found.host_rate or 0) / GB, "GB/s")]
    if found.gds_rate is not None and found.host_rate:
        name = f"NVMe to pool by kvikio ({found.mode})"
        rows.append(compared(name, found.gds_rate / GB, "GB/s", found.host_rate / GB))
    return rows, found


def restore(device: str, sizes: Sizes) -> list[Row]:
    """A 32k-token context of Llama-70B's shape from pinned DRAM, by layer and verified, against computing it again."""
    spec = _fitting(sizes.context, device)
    share = spec.num_slots / sizes.context.num_slots
    with pool(spec, device) as arena, pinned_dram(arena, spec.num_slots * spec.stride_bytes) as dram:
        pairs = [(row, arena.slot(i)) for i, row in enumerate(dram.reshape(spec.num_slots, -1))]
        arena.copy_in(pairs).wait()
        expected = arena.checksums([slot for _, slot in pairs])
        wrong = list[tuple[int, int]]()
        first = list[float]()

        def work() -> None:
            begun = time.perf_counter()
            going = arena.restore_layers(pairs, expected, layers_per_event=4)
            while not going.layer_done(0):
                time.sleep(0)
            first.append(time.perf_counter() - begun)
            wrong.extend(going.finish())

        seconds = best(arena.backend, work, min(sizes.rounds, 3)) / share
        recompute = _recompute_seconds(arena, sizes)
        num_bytes = sizes.context.num_slots * sizes.context.stride_bytes
        limit = dram.nbytes / one_large(arena, dram, sizes, into=True)
    return [
        plain("restored context, slices that don't verify", len(wrong), "", 0),
        compared("restore of 32k tokens against recompute, estimated", seconds, "s", recompute),
        compared("restore of 32k tokens against one large copy", num_bytes / seconds / GB, "GB/s", limit / GB),
        plain("restore of 32k tokens: first layers there after", min(first), "s"),
    ]


def _fitting(spec: PoolSpec, device: str) -> PoolSpec:
    """As many blocks as fit into a third of free device and host memory; results are scaled to the whole."""
    pages = Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]
    room = int(pages) * 1024
    if device != "cpu":
        room = min(room, int(torch.cuda.mem_get_info(device)[0]))
    return PoolSpec(max(1, min(spec.num_slots, room // 3 // spec.stride_bytes)), spec.num_slices, spec.slice_bytes)


def _recompute_seconds(arena: Arena, sizes: Sizes) -> float:
    """Prefill at the speed of a large bf16 matrix product: faster than any engine, so a hard comparison."""
    size = sizes.decode_matrix
    left = torch.randn((size, size), device=arena.tensor.device, dtype=torch.bfloat16)
    seconds = best(arena.backend, lambda: torch.mm(left, left), min(sizes.rounds, 3))
    return 2 * LLAMA_70B_PARAMETERS * sizes.context_tokens / (2 * size**3 / seconds)


def background(device: str, sizes: Sizes) -> list[Row]:
    """Decode steps (matrix by vector, bound by memory as decoding is) alone, and while a context is restored."""
    spec = _fitting(sizes.slots, device)
    weights = torch.randn((4, sizes.decode_matrix, sizes.decode_matrix), device=device, dtype=torch.bfloat16)
    vector = torch.randn((sizes.decode_matrix, 1), device=device, dtype=torch.bfloat16)
    with pool(spec, device) as arena, pinned_dram(arena, spec.num_slots * spec.stride_bytes) as dram:
        offsets = np.arange(spec.num_slots, dtype=np.int64) * spec.stride_bytes

        def decode() -> None:
            for matrix in weights:
                torch.mm(matrix, vector)

        alone = best(arena.backend, decode, sizes.rounds, sizes.decode_steps)
        running = [arena.copy_in_slots(dram, offsets, offsets)]

        def decode_beside() -> None:
            if running[-1].done():
                running.append(arena.copy_in_slots(dram, offsets, offsets))
            decode()

        beside = best(arena.backend, decode_beside, sizes.rounds, sizes.decode_steps)
        for handle in running:
            handle.wait()
    return [plain("decode slower while restoring", 100 * (beside / alone - 1), "%", 3 if device != "cpu" else None)]
