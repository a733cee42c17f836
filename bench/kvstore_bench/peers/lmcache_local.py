"""LMCache's back ends inside this process: CPU memory, and files read with O_DIRECT.

A get of the CPU back end returns a reference to its own memory, so it is followed by the copy into the pool that an
engine needs; the disk back end reads into its own memory first, and the same copy follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvstore_bench.measure_io import timed
from kvstore_bench.peers.blocks import Blocks
from kvstore_bench.peers.store import Goal, Peer, PeerFailed, absent_module, drop_cache, wait_until

INSTALL = "pip install lmcache (brings its own torch and numpy: use a separate environment, see docs/0007-peers.md)"
READ_THREADS = 8
BATCH_BLOCKS_BYTES = 64 << 20
GIB = 1 << 30


def quiet() -> None:
    """No reports to its makers, no log lines."""
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")


def missing() -> str | None:
    """What is lacking."""
    quiet()
    return absent_module("lmcache.v1.storage_backend.local_disk_backend")


class Cpu:
    """LocalCPUBackend."""

    def __init__(self, backend: Any, blocks: Blocks) -> None:
        import torch

        self._backend = backend
        self._blocks = blocks
        self._torch = torch
        self._from, self._into = self._tensors(blocks.source), self._tensors(blocks.target)

    def _tensors(self, pool: Any) -> list[Any]:
        """One bf16 tensor a block, over the pool's own memory."""
        whole = self._torch.from_numpy(pool).view(self._torch.bfloat16)
        size = self._blocks.block_bytes // 2
        return [whole[self._blocks.at(i) // 2 :][:size] for i in range(self._blocks.num_blocks)]

    def key(self, number: int, index: int) -> Any:
        """The name of a block."""
        from lmcache.utils import CacheEngineKey

        return CacheEngineKey("bench", 1, 0, number << 32 | index, self._torch.bfloat16)

    def _room(self) -> Any:
        """Memory of the back end for one block."""
        from lmcache.v1.memory_management import MemoryFormat

        keyspace = self._blocks.keyspace
        width = keyspace.num_kv_heads * keyspace.head_dim
        shape = self._torch.Size([2, keyspace.num_layers, keyspace.block_tokens, width])
        room = self._backend.allocate(shape, self._torch.bfloat16, MemoryFormat.KV_2LTD)
        if room is None:
            raise PeerFailed("the CPU back end has no room")
        return room

    def filled(self, index: int) -> Any:
        """A copy of a source block in the back end's memory."""
        room = self._room()
        room.tensor.view(-1).copy_(self._from[index])
        return room

    def put(self, number: int) -> None:
        """Allocate, copy, insert."""
        for index in range(self._blocks.num_blocks):
            room = self.filled(index)
            self._backend.submit_put_task(self.key(number, index), room)
            room.ref_count_down()
        if number == 0:
            self.tune(lambda: self.get(False))

    def tune(self, get: Callable[[], None]) -> None:
        """Let torch copy with one thread or with all, whichever is faster: next to other work, more can be slower."""
        counts = sorted({1, os.cpu_count() or 1})
        seconds: dict[int, list[float]] = {n: [] for n in counts}
        for _ in range(3):
            for num_threads in counts:
                self._torch.set_num_threads(num_threads)
                seconds[num_threads].append(timed(get))
        self._torch.set_num_threads(min(counts, key=lambda n: min(seconds[n])))

    def get(self, verify: bool) -> None:
        """Look up and copy. Raises PeerFailed."""
        for index in range(self._blocks.num_blocks):
            self.take(index, self._backend.get_blocking(self.key(0, index)), verify)

    def take(self, index: int, found: Any, verify: bool) -> None:
        """Copy what a back end returned into the pool, and let go of it."""
        if found is None:
            raise PeerFailed(f"block {index} is gone")
        self._into[index].copy_(found.tensor.view(-1))
        found.ref_count_down()
        if verify and not self._blocks.verify(index):
            raise PeerFailed(f"block {index} is wrong")

    def cool(self) -> None:
        """It has no disk."""

    def forget(self, number: int) -> None:
        """Remove."""
        for index in range(self._blocks.num_blocks):
            self._backend.remove(self.key(number, index))


class Disk:
    """LocalDiskBackend over the CPU back end's memory."""

    def __init__(self, cpu: Cpu, backend: Any, folder: Path) -> None:
        self._cpu = cpu
        self._backend = backend
        self._folder = folder

    def put(self, number: int) -> None:
        """Submit, and wait until the last file is written."""
        n = self._cpu._blocks.num_blocks
        for index in range(n):
            room = self._cpu.filled(index)
            self._backend.submit_put_task(self._cpu.key(number, index), room)
            room.ref_count_down()
        wait_until(lambda: all(self._backend.contains(self._cpu.key(number, i)) for i in range(n)), "its writes", 120)
        if number == 0:
            self._cpu.tune(lambda: self.get(False))

    def get(self, verify: bool) -> None:
        """Its batched read, then the copy. Raises PeerFailed."""
        blocks = self._cpu._blocks
        step = max(1, BATCH_BLOCKS_BYTES // blocks.block_bytes)
        for first in range(0, blocks.num_blocks, step):
            batch = range(first, min(first + step, blocks.num_blocks))
            found = self._backend.batched_get_blocking([self._cpu.key(0, i) for i in batch])
            for index, one in zip(batch, found, strict=True):
                self._cpu.take(index, one, verify)

    def cool(self) -> None:
        """O_DIRECT reads past the page cache; what was written through it goes all the same."""
        drop_cache(self._folder)

    def forget(self, number: int) -> None:
        """Remove."""
        for index in range(self._cpu._blocks.num_blocks):
            self._backend.remove(self._cpu.key(number, index))


def _config(max_cpu_gib: float, folder: Path | None) -> Any:
    from lmcache.v1.config import LMCacheEngineConfig

    disk = {} if folder is None else {"local_disk": f"file://{folder}/", "max_local_disk_size": 16.0}
    extra = {"use_odirect": True, "disk_io_threads": READ_THREADS}
    return LMCacheEngineConfig.from_defaults(
        chunk_size=16, local_cpu=True, max_local_cpu_size=max_cpu_gib, extra_config=extra, **disk
    )


def _cpu(blocks: Blocks, config: Any) -> Any:
    import torch
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    k = blocks.keyspace
    shape = (k.num_layers, 2, k.block_tokens, k.num_kv_heads, k.head_dim)
    metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.bfloat16, shape, chunk_size=k.block_tokens)
    return LocalCPUBackend(config, metadata, "cpu")


@contextlib.contextmanager
def open_cpu(blocks: Blocks, folder: Path) -> Iterator[Cpu]:
    """Memory for three sets."""
    backend = _cpu(blocks, _config(3.2 * blocks.total_bytes / GIB, None))
    try:
        yield Cpu(backend, blocks)
    finally:
        backend.close()


@contextlib.contextmanager
def open_disk(blocks: Blocks, folder: Path) -> Iterator[Disk]:
    """Files in `folder`, and its event loop in a thread."""
    from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

    config = _config(1.2 * blocks.total_bytes / GIB, folder)
    cpu = _cpu(blocks, config)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="lmcache", daemon=True)
    thread.start()
    backend = LocalDiskBackend(config, loop, cpu, "cpu")
    try:
        yield Disk(Cpu(cpu, blocks), backend, folder)
    finally:
        backend.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        cpu.close()


PEERS = [
    Peer(
        "LMCache CPU back end",
        INSTALL,
        missing,
        open_cpu,
        [Goal("get", 1.0, ours=False), Goal("get", 1.0, True), Goal("put", None)],
    ),
    Peer(
        "LMCache disk back end, O_DIRECT",
        INSTALL,
        missing,
        open_disk,
        [Goal("cold get", 1.1, ours=False), Goal("cold get", 1.1, True)],
    ),
]
