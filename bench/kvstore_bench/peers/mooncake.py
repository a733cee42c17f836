"""Mooncake Store: a master process, and a client library that can contribute memory of its own.

    local segment     this process owns the memory: a get is a copy within it
    remote over tcp   another process (mooncake_node.py) owns it: a get crosses the loopback interface
    SSD offload       this process owns the memory; every block was written to its files, and then driven out of memory
                      by puts of other objects

The master is told to listen on the loopback address only. For SSD offload it looks for work every second, in batches
that the blocks fill, and read leases are short. The puts that drive the blocks out start only when all are on disk: in
its defaults the store drops what it has no memory for before it was written.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore.testing.service import free_port
from kvstore_bench.peers.blocks import Blocks
from kvstore_bench.peers.store import (
    Goal,
    Peer,
    PeerFailed,
    absent_module,
    drop_cache,
    listens,
    process,
    wait_until,
)

INSTALL = "apt-get install libibverbs1 librdmacm1 libnuma1; pip install --no-deps mooncake-transfer-engine-non-cuda"
LOCAL_BUFFER_BYTES = 64 << 20
MASTER = ["--metrics_host=127.0.0.1", "--rpc_address=127.0.0.1"]
OFFLOAD = ["--enable_offload=true", "--default_kv_lease_ttl=2000"]
BATCH_OBJECTS = 256
"""In one call; with some thousands its TCP transport fails."""
LEASE_S = 2.2
DRIVE_OUT_S = 90.0
NUM_BATCHES = 8


def missing() -> str | None:
    """What is lacking."""
    os.environ.setdefault("GLOG_minloglevel", "3")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    return absent_module("mooncake.store")


class Mooncake:
    """A connected client with both pools registered."""

    def __init__(self, store: Any, blocks: Blocks, ssd: Path | None) -> None:
        self._store = store
        self._blocks = blocks
        self._ssd = ssd
        self._sizes = [blocks.block_bytes] * blocks.num_blocks
        self._from, self._into = blocks.addresses(blocks.source), blocks.addresses(blocks.target)
        for pool in (blocks.source, blocks.target):
            _check(store.register_buffer(pool.ctypes.data, blocks.total_bytes), "register_buffer")

    def put(self, number: int) -> None:
        """In batches, and to disk where there is one. Raises PeerFailed."""
        names = self._names(number)
        for part in self._batches():
            for result in self._store.batch_put_from(names[part], self._from[part], self._sizes[part]):
                _check(result, "put")
        if self._ssd is not None:
            self._to_disk(self._ssd, number)

    def _to_disk(self, ssd: Path, number: int) -> None:
        """Wait until all blocks are in files, then put other objects until no block is left in memory."""
        total = self._blocks.total_bytes
        wait_until(lambda: sum(p.stat().st_size for p in ssd.rglob("*") if p.is_file()) >= total, "its files", 180)
        time.sleep(LEASE_S)
        end = time.monotonic() + DRIVE_OUT_S
        num_others = 0
        while self._in_memory(number):
            if time.monotonic() > end:
                raise PeerFailed("blocks stay in memory")
            time.sleep(LEASE_S)  # looking at an object leases it
            for _ in range(3 * NUM_BATCHES):
                step = max(1, self._blocks.num_blocks // NUM_BATCHES)
                names = [f"other:{num_others + i}" for i in range(step)]
                num_others += step
                self._store.batch_put_from(names, self._from[:step], self._sizes[:step])
                time.sleep(0.05)  # its eviction runs beside

    def _in_memory(self, number: int) -> bool:
        names = self._names(number)
        return any(r.is_memory_replica() for name in names for r in self._store.get_replica_desc(name))

    def get(self, verify: bool) -> None:
        """In batches. Raises PeerFailed."""
        names = self._names(0)
        results: list[int] = []
        for part in self._batches():
            results += self._store.batch_get_into(names[part], self._into[part], self._sizes[part])
        lost = sum(result != self._blocks.block_bytes for result in results)
        if lost:
            raise PeerFailed(f"{lost} of {self._blocks.num_blocks} objects are gone (error {min(results)})")
        if verify and not all(self._blocks.verify(i) for i in range(self._blocks.num_blocks)):
            raise PeerFailed("an object is wrong")

    def cool(self) -> None:
        """Its files out of the page cache."""
        if self._ssd is not None:
            drop_cache(self._ssd)

    def forget(self, number: int) -> None:
        """Remove. Nobody read these, so no lease is in the way."""
        for name in self._names(number):
            self._store.remove(name)

    def _batches(self) -> list[slice]:
        return [slice(at, at + BATCH_OBJECTS) for at in range(0, self._blocks.num_blocks, BATCH_OBJECTS)]

    def _names(self, number: int) -> list[str]:
        return [f"{number}:{i}" for i in range(self._blocks.num_blocks)]


def connect(master_port: int, segment_bytes: int, ssd: Path | None = None) -> Any:
    """A client of the master on this host that contributes `segment_bytes`. Raises PeerFailed."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    where = f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", ""
    more = {} if ssd is None else {"enable_ssd_offload": True, "ssd_offload_path": str(ssd)}
    _check(store.setup(*where, f"127.0.0.1:{master_port}", **more), "setup")
    return store


def _check(result: int, what: str) -> None:
    if result:
        raise PeerFailed(f"{what} failed with {result}")


@contextlib.contextmanager
def _master(folder: Path, more: list[str]) -> Iterator[int]:
    import mooncake

    port = free_port()
    binary = Path(mooncake.__file__).parent / "mooncake_master"
    command = [str(binary), f"--rpc_port={port}", f"--metrics_port={free_port()}", *MASTER, *more]
    with process(command, folder / "master.log", lambda: listens(port)):
        yield port


@contextlib.contextmanager
def _client(blocks: Blocks, port: int, segment_bytes: int, ssd: Path | None = None) -> Iterator[Mooncake]:
    store = connect(port, segment_bytes, ssd)
    try:
        yield Mooncake(store, blocks, ssd)
    finally:
        store.close()


@contextlib.contextmanager
def open_local(blocks: Blocks, folder: Path) -> Iterator[Mooncake]:
    """Memory of this process."""
    with _master(folder, []) as port, _client(blocks, port, 4 * blocks.total_bytes) as store:
        yield store


@contextlib.contextmanager
def open_remote(blocks: Blocks, folder: Path) -> Iterator[Mooncake]:
    """Memory of another process."""
    ready = folder / "node.ready"
    command = [sys.executable, "-m", "kvstore_bench.peers.mooncake_node"]
    with _master(folder, []) as port:
        arguments = [*command, str(port), str(4 * blocks.total_bytes), str(ready)]
        with process(arguments, folder / "node.log", ready.exists), _client(blocks, port, 0) as store:
            yield store


@contextlib.contextmanager
def open_ssd(blocks: Blocks, folder: Path) -> Iterator[Mooncake]:
    """Files in `folder`."""
    ssd = folder / "ssd"
    ssd.mkdir()
    segment_bytes = blocks.total_bytes * 8 // 5
    os.environ["MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS"] = "1"
    os.environ["MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT"] = str(max(1, blocks.num_blocks // NUM_BATCHES))
    os.environ["MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES"] = str(max(1, blocks.total_bytes // NUM_BATCHES))
    with _master(folder, OFFLOAD) as port, _client(blocks, port, segment_bytes, ssd) as store:
        yield store


PEERS = [
    Peer("Mooncake local segment", INSTALL, missing, open_local, [Goal("get", 1.0), Goal("put", None)]),
    Peer("Mooncake remote tcp", INSTALL, missing, open_remote, [Goal("get", 3.0), Goal("put", 3.0)]),
    Peer("Mooncake SSD offload", INSTALL, missing, open_ssd, [Goal("cold get", 1.5)]),
]
