"""Which way from NVMe to the pool is there, and which is faster: found out by trying, at start.

`probe` makes a scratch file beside the slabs and a scratch pool on the same device, writes blocks by one path,
reads them back by both, compares every byte (into poisoned slots), and times the reads. GPUDirect Storage is then

    real      bytes arrived and this process's read calls moved none of them
    compat    bytes arrived, but through read calls: cuFile or kvikio emulated it
    absent    kvikio, driver or device is missing, or what came back was wrong

The witness is `rchar` of /proc/self/io, since neither library says per file what it did.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from prometheus_client import Gauge

from kvstore_gpu.arena import Arena, PoolSpec
from kvstore_gpu.errors import Unavailable
from kvstore_gpu.gds import GdsPath, Settings
from kvstore_gpu.nvme import FallbackPath, HostPath, NvmePath, Piece, random_block

Mode = Literal["real", "compat", "absent"]
NUM_BLOCKS = 8
NUM_ROUNDS = 3
log = logging.getLogger(__name__)
_MODE = Gauge("kvstore_gds_mode", "1 for the way in which GPUDirect Storage works on this machine", ["mode"])
_RATE = Gauge("kvstore_nvme_read_bytes_per_second", "NVMe to pool, measured by the probe at start", ["path"])


@dataclass(frozen=True)
class Probe:
    """What was found. Rates are bytes a second of NVMe -> pool, None where the path didn't work."""

    mode: Mode
    gds_rate: float | None
    host_rate: float | None
    chosen: Literal["gds", "host"]
    why: str


def probe(folder: Path, spec: PoolSpec, device: str = "cpu", settings: Settings | None = None) -> Probe:
    """Try both paths with blocks of `spec` in `folder`; log, publish and return the outcome.

    Raises: OSError when not even the host path works in that folder.
    """
    found = _try_paths(folder, PoolSpec(NUM_BLOCKS, spec.num_slices, spec.slice_bytes), device, settings)
    log.info("GPUDirect Storage: %s; NVMe reads go by the %s path (%s)", found.mode, found.chosen, found.why)
    for mode in ("real", "compat", "absent"):
        _MODE.labels(mode).set(mode == found.mode)
    for path, rate in (("gds", found.gds_rate), ("host", found.host_rate)):
        _RATE.labels(path).set(rate or 0)
    return found


def open_path(found: Probe, arena: Arena, file: Path | int, settings: Settings | None = None) -> NvmePath:
    """The chosen path for one slab; GPUDirect Storage always with the host path behind it."""
    host = HostPath(arena, file)
    if found.chosen == "host":
        return host
    try:
        return FallbackPath(GdsPath(arena, file, settings), host)
    except Unavailable as error:
        log.warning("%s; this file is read by the host path", error)
        return host


def _try_paths(folder: Path, spec: PoolSpec, device: str, settings: Settings | None) -> Probe:
    scratch = folder / f".gds-probe-{os.getpid()}"
    arena = Arena.create(spec, device)
    try:
        with scratch.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, spec.num_slots * spec.stride_bytes)
        host_trial = Trial(HostPath(arena, scratch))
        try:
            return _compare(arena, scratch, host_trial, settings)
        finally:
            host_trial.path.close()
    finally:
        scratch.unlink(missing_ok=True)
        arena.close()


def _compare(arena: Arena, scratch: Path, host_trial: Trial, settings: Settings | None) -> Probe:
    why = host_trial.run(arena)
    if why:
        raise OSError(f"{scratch.parent}: {why}")
    try:
        gds_trial = Trial(GdsPath(arena, scratch, settings))
    except Unavailable as error:
        return Probe("absent", None, host_trial.rate, "host", error.why)
    try:
        why = gds_trial.run(arena)
    finally:
        gds_trial.path.close()
    if why:
        return Probe("absent", None, host_trial.rate, "host", why)
    return judge(gds_trial.rate, host_trial.rate, gds_trial.share_by_calls)


def judge(gds_rate: float, host_rate: float, share_by_calls: float) -> Probe:
    """Real or emulated, and which to use. `share_by_calls`: read calls' bytes over bytes delivered."""
    mode: Mode = "compat" if share_by_calls > 0.5 else "real"
    rates = f"{gds_rate / 1e9:.2f} GB/s by kvikio, {host_rate / 1e9:.2f} GB/s by the host"
    return Probe(mode, gds_rate, host_rate, "gds" if gds_rate > host_rate else "host", rates)


class Trial:
    """One path, tried: does what was written come back, and how fast."""

    def __init__(self, path: NvmePath) -> None:
        self.path = path
        self.rate = 0.0
        self.share_by_calls = 0.0

    def run(self, arena: Arena) -> str:
        """Empty when every byte was right, else what went wrong."""
        slots = [arena.slot(i) for i in range(arena.num_slots)]
        pieces = [(int(slot), slot) for slot in slots]
        blocks = [random_block(arena.stride_bytes, seed) for seed in range(len(slots))]
        arena.copy_in(zip(blocks, slots, strict=True)).wait()
        if failed := self.path.write(pieces).wait():
            return f"writing: {failed[0].why}"
        before, spent = bytes_by_calls(), list[float]()
        for _ in range(NUM_ROUNDS):
            arena.poison(slots)
            why, seconds = self._read(arena, pieces, blocks)
            if why:
                return why
            spent.append(seconds)
        num_bytes = len(slots) * arena.stride_bytes
        self.rate = num_bytes / min(spent)
        self.share_by_calls = (bytes_by_calls() - before) / (NUM_ROUNDS * num_bytes)
        return ""

    def _read(self, arena: Arena, pieces: list[Piece], blocks: list[np.ndarray]) -> tuple[str, float]:
        arena.backend.compute_stream().record().wait()
        begun = time.perf_counter()
        failed = self.path.read(pieces).wait()
        seconds = time.perf_counter() - begun
        if failed:
            return f"reading: {failed[0].why}", seconds
        got = [np.empty(arena.stride_bytes, dtype=np.uint8) for _ in blocks]
        arena.copy_out([(slot, target) for (_, slot), target in zip(pieces, got, strict=True)]).wait()
        same = all(np.array_equal(a, b) for a, b in zip(got, blocks, strict=True))
        return "" if same else "the blocks read back differ from those written", seconds


def bytes_by_calls(read: Callable[[], str] | None = None) -> int:
    """Bytes that this process's read calls have returned so far."""
    text = read() if read else Path("/proc/self/io").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("rchar")))
