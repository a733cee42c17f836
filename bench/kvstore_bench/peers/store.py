"""What `bench peers` needs of a store, and of a peer that can open one.

    put(n)      source -> store, under names of its own for each n; returns when a get would find them
    get()       store -> target: the blocks of put(0)
    cool()      untimed: whatever keeps the next get from being served by the page cache
    forget(n)   untimed: give the room of put(n) back

`verify` asks a store for what a restore of ours does as well: XXH3-64 of each layer slice, compared after the copy.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvstore_bench.peers.blocks import Blocks

WAIT_S = 30.0


class PeerFailed(RuntimeError):
    """A peer isn't there, didn't start, or lost what it was given. Its rows say so; the run goes on."""


class Store(Protocol):
    """One open store. Methods raise PeerFailed."""

    def put(self, number: int) -> None: ...
    def get(self, verify: bool) -> None: ...
    def cool(self) -> None: ...
    def forget(self, number: int) -> None: ...


Opener = Callable[[Blocks, Path], contextlib.AbstractContextManager[Store]]


@dataclass(frozen=True)
class Goal:
    """Least ratio of our rate to the peer's on a path, for 2 MiB blocks. `verify`: the peer verifies as well;
    `ours`: we do."""

    path: str
    ratio: float | None
    verify: bool = False
    ours: bool = True

    @property
    def who(self) -> str:
        """Who verifies, for row names."""
        return "both verified" if self.verify else "verified" if self.ours else "neither verified"


@dataclass(frozen=True)
class Peer:
    """A store that may be installed. `missing()`: what it lacks here, or None."""

    name: str
    install: str
    missing: Callable[[], str | None]
    open: Opener
    goals: Sequence[Goal] = field(default=())


def absent_module(name: str) -> str | None:
    """Why `name` can't be imported; None when it can. It is imported here, so a broken one counts as absent."""
    import importlib

    try:
        importlib.import_module(name)
    except Exception as error:  # any import error of somebody else's package
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


@contextlib.contextmanager
def process(command: Sequence[str], log: Path, ready: Callable[[], bool]) -> Iterator[subprocess.Popen[bytes]]:
    """Run somebody's server until the block ends. Raises PeerFailed with the end of its log when it doesn't start."""
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.PIPE)
    try:
        end = time.monotonic() + WAIT_S
        while not ready():
            if child.poll() is not None or time.monotonic() > end:
                raise PeerFailed(f"{command[0]} did not start: {log.read_text(errors='replace')[-300:]}")
            time.sleep(0.02)
        yield child
    finally:
        child.terminate()
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def listens(port: int) -> bool:
    """Whether somebody accepts on this port of the loopback address."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def drop_cache(folder: Path) -> None:
    """Write back and drop the page cache of every file below `folder`."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Poll. Raises PeerFailed."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise PeerFailed(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.01)
