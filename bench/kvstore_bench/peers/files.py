"""Plain files: one a block, read by eight threads with O_DIRECT. What a cache without an index would cost."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstore_bench.peers.blocks import Blocks
from kvstore_bench.peers.store import Goal, Peer, PeerFailed, drop_cache

THREADS = 8


class Files:
    """A folder of blocks."""

    def __init__(self, blocks: Blocks, folder: Path, threads: ThreadPoolExecutor) -> None:
        self._blocks = blocks
        self._folder = folder
        self._threads = threads

    def put(self, number: int) -> None:
        """Write every block to a file of its own."""
        folder = self._folder / str(number)
        folder.mkdir()
        list(self._threads.map(lambda i: self._write(folder, i), range(self._blocks.num_blocks)))

    def get(self, verify: bool) -> None:
        """Read every file. Raises PeerFailed."""
        if not all(self._threads.map(lambda i: self._read(i, verify), range(self._blocks.num_blocks))):
            raise PeerFailed("a file came back short or wrong")

    def cool(self) -> None:
        """O_DIRECT doesn't use the page cache; what put left there goes all the same."""
        drop_cache(self._folder)

    def forget(self, number: int) -> None:
        """Remove the files."""
        for path in (self._folder / str(number)).iterdir():
            path.unlink()

    def _write(self, folder: Path, index: int) -> None:
        (folder / str(index)).write_bytes(self._blocks.view(self._blocks.source, index))

    def _read(self, index: int, verify: bool) -> bool:
        fd = os.open(self._folder / "0" / str(index), os.O_RDONLY | os.O_DIRECT)
        try:
            count = os.preadv(fd, [self._blocks.view(self._blocks.target, index)], 0)
        finally:
            os.close(fd)
        return count == self._blocks.block_bytes and (not verify or self._blocks.verify(index))


@contextlib.contextmanager
def open_files(blocks: Blocks, folder: Path) -> Iterator[Files]:
    """A fresh folder."""
    with ThreadPoolExecutor(THREADS, "files") as threads:
        yield Files(blocks, folder, threads)


PEERS = [
    Peer(
        "plain files, O_DIRECT",
        "",
        lambda: None,
        open_files,
        [Goal("cold get", None, ours=False), Goal("cold get", None, True)],
    )
]
