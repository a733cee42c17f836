"""Test helpers: a backend that misbehaves as far as the rules of streams allow, and a stand-in for libcuda.

`FakeBackend` keeps every stream as a queue. Whenever somebody waits, a seeded generator picks, step by step, any
stream whose next piece of work isn't held back by an event; copies of one batch go in random order, in pieces.
Whatever isn't ordered by an event therefore happens early, late or in between, depending on the seed.

`LateCopies` does so to an arena's copies only, under an engine that computes at once in a thread of its own.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
from collections import deque
from functools import partial
from pathlib import Path

import numpy as np

from kvstore_gpu.arena import Arena
from kvstore_gpu.errors import Unavailable
from kvstore_gpu.pinned import one_copy
from kvstore_gpu.streams import Copies, Event, HostBuffer, InlineBackend, Stream, Work, move_on_host

PIECE_BYTES = 1 << 16
HAND = "kvstore-device"
"""The thread of a `DeviceHand`."""


class Pinning(InlineBackend):
    """Copies from pageable memory need staging, as on a device."""

    needs_pinned = True


class Behind(Arena):
    """A pool that the host can't address, as a device's is."""

    def host_view(self) -> HostBuffer | None:
        """None, as for a device."""
        return None


class FakeEvent:
    """Happens when its stream's queue gets there."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend, self.happened = backend, False

    def done(self) -> bool:
        """See `Event`; gives the world a chance to move on."""
        self._backend.step()
        return self.happened

    def wait(self) -> None:
        """See `Event`."""
        while not self.happened:
            if not self._backend.step() and not self.happened:  # another thread may have made it happen
                raise AssertionError("deadlock: an event that no queued work leads to")


class FakeStream:
    """A queue of work, marks and waits."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend
        self.queue: deque[Work | FakeEvent | tuple[FakeEvent]] = deque()

    def record(self) -> Event:
        """See `Stream`."""
        event = FakeEvent(self._backend)
        self.queue.append(event)
        return event

    def wait_for(self, event: Event) -> None:
        """See `Stream`."""
        assert isinstance(event, FakeEvent)
        if self._backend.honour_waits:
            self.queue.append((event,))

    def run(self, work: Work) -> None:
        """See `Stream`."""
        self.queue.append(work)

    def ready(self) -> bool:
        """Whether the head of the queue may go."""
        return bool(self.queue) and not (isinstance(self.queue[0], tuple) and not self.queue[0][0].happened)

    def advance(self) -> None:
        """Do the head of the queue."""
        head = self.queue.popleft()
        if isinstance(head, FakeEvent):
            head.happened = True
        elif not isinstance(head, tuple):
            head()


class FakeBackend:
    """Streams over host memory with every freedom that events leave.

    `honour_waits=False` drops every order between streams: a test of order must fail then, or it tests nothing.
    """

    def __init__(self, seed: int, needs_pinned: bool = False, honour_waits: bool = True) -> None:
        self.needs_pinned, self.honour_waits = needs_pinned, honour_waits
        self._random = random.Random(seed)
        self._compute = FakeStream(self)
        self._streams = [self._compute]

    def enter(self) -> None:
        """See `Backend`."""

    def compute_stream(self) -> Stream:
        """See `Backend`."""
        return self._compute

    def new_stream(self) -> Stream:
        """See `Backend`."""
        self._streams.append(FakeStream(self))
        return self._streams[-1]

    def copy(self, stream: Stream, copies: Copies) -> None:
        """See `Backend`."""
        lists = (copies.targets.tolist(), copies.sources.tolist(), copies.sizes.tolist())
        pieces = [
            (target + at, source + at, min(PIECE_BYTES, size - at))
            for target, source, size in zip(*lists, strict=True)
            for at in range(0, size, PIECE_BYTES)
        ]
        self._random.shuffle(pieces)
        for piece in pieces:
            stream.run(partial(move_on_host, one_copy(*piece)))

    def pinned(self, num_bytes: int) -> HostBuffer:
        """See `Backend`."""
        return np.full(num_bytes, 0xA5, dtype=np.uint8)

    def step(self) -> bool:
        """One piece of work of a random stream; False when nothing can go on."""
        ready = [stream for stream in self._streams if stream.ready()]
        if ready:
            self._random.choice(ready).advance()
        return bool(ready)

    def drain(self) -> None:
        """Until nothing is left."""
        while self.step():
            pass


class _Now(FakeStream):
    """A stream whose work is done when the call returns, as torch's on a CPU."""

    def record(self) -> Event:
        """See `Stream`."""
        event = FakeEvent(self._backend)
        event.happened = True
        return event

    def wait_for(self, event: Event) -> None:
        """See `Stream`."""
        if self._backend.honour_waits:
            event.wait()

    def run(self, work: Work) -> None:
        """See `Stream`."""
        work()


class _LateEvent(FakeEvent):
    def __init__(self, backend: LateCopies) -> None:
        super().__init__(backend)
        self._late = backend

    def wait(self) -> None:
        """See `Event`."""
        if threading.current_thread().name == HAND:
            assert self._late.rest.wait(30)
        super().wait()


class _LateStream(FakeStream):
    def __init__(self, backend: LateCopies) -> None:
        super().__init__(backend)
        self._late = backend

    def record(self) -> Event:
        """See `Stream`."""
        event = _LateEvent(self._late)
        self.queue.append(event)
        return event


class LateCopies(FakeBackend):
    """For an engine over host memory: what it computes happens at once, an arena's copies when they are waited for.

    While `rest` isn't set only the engine's waiting gets copies done; the hand's thread waits for `rest`, and then gets
    done what is left. Thread-safe.
    """

    def __init__(self, seed: int, needs_pinned: bool = False, honour_waits: bool = True) -> None:
        super().__init__(seed, needs_pinned, honour_waits)
        self.rest = threading.Event()
        self.rest.set()
        self._lock = threading.RLock()
        self._now = _Now(self)
        self._num_late = 2
        """Streams of the arena, one each way, which it makes first; then comes that of its hand's thread."""

    def compute_stream(self) -> Stream:
        """See `Backend`."""
        return self._now

    def new_stream(self) -> Stream:
        """See `Backend`."""
        if not self._num_late:
            return self._now
        self._num_late -= 1
        self._streams.append(_LateStream(self))
        return self._streams[-1]

    def step(self) -> bool:
        """See `FakeBackend`."""
        with self._lock:
            return super().step()


def build_stub(source: Path, target: Path) -> Path:
    """Compile a C stand-in for a driver library as a shared object with soname `libcuda.so.1`.

    Raises: Unavailable without a C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Unavailable("stub libcuda", "no C compiler found", "install gcc")
    flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *flags, str(source), "-o", str(target)], check=True)
    return target
