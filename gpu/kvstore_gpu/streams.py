"""Streams, events and copies, as little of them as transfers need, so that tests can put something else in their place.

A *stream* is a queue of work; work of different streams has no order except what events give it. `Backend` makes
streams and carries out copies. Three exist:

    InlineBackend                  host memory: work is done when the call returns, every event has happened
    CudaBackend                    PyTorch streams and events, copies by the driver
    kvstore_gpu.testing.FakeBackend  host memory, but work is delayed and reordered wherever events leave it free
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstore_gpu.driver import Driver, I64Array
from kvstore_gpu.errors import LayoutError

HostBuffer = npt.NDArray[np.uint8]
Work = Callable[[], None]


@dataclass(frozen=True)
class Copies:
    """A batch of copies by address; no order among them, so no target may overlap another."""

    targets: I64Array
    sources: I64Array
    sizes: I64Array

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole batch."""
        return int(self.sizes.sum())

    def shifted(self, start: int, size: int) -> Copies:
        """The same part of every copy: `size` bytes from `start`."""
        return Copies(self.targets + start, self.sources + start, np.full_like(self.sizes, size))

    def coalesced(self) -> Copies:
        """Neighbours at both ends become one copy.

        Raises: LayoutError when targets overlap: the batch would have no defined outcome.
        """
        if not len(self.targets) == len(self.sources) == len(self.sizes):
            raise LayoutError(f"{len(self.sources)} sources for {len(self.targets)} targets")
        if len(self.sizes) < 2:
            return self
        order = np.argsort(self.targets, kind="stable")
        targets, sources, sizes = self.targets[order], self.sources[order], self.sizes[order]
        gaps = targets[1:] - (targets[:-1] + sizes[:-1])
        if int(gaps.min()) < 0:
            raise LayoutError("two copies of one batch write the same bytes")
        apart = (gaps != 0) | (sources[1:] != sources[:-1] + sizes[:-1])
        starts = np.flatnonzero(np.concatenate(([True], apart)))
        return Copies(targets[starts], sources[starts], np.add.reduceat(sizes, starts))

    def cut(self, borders: I64Array, *, at_sources: bool) -> Copies:
        """The same copies, none of which crosses one of the sorted `borders` at the named end."""
        parts, left = list[Copies](), self
        while len(borders) and len(left.sizes):
            start = left.sources if at_sources else left.targets
            after = np.append(borders, np.iinfo(np.int64).max)[np.searchsorted(borders, start, side="right")]
            head = np.minimum(left.sizes, after - start)
            parts.append(Copies(left.targets, left.sources, head))
            more = left.sizes > head
            rest = left.sizes[more] - head[more]
            left = Copies(left.targets[more] + head[more], left.sources[more] + head[more], rest)
        parts.append(left)
        ends = ([getattr(part, end) for part in parts] for end in ("targets", "sources", "sizes"))
        return Copies(*(np.concatenate(arrays) for arrays in ends))


class Event(Protocol):
    """A point in a stream's work."""

    def done(self) -> bool:
        """Whether it has been reached; doesn't wait."""

    def wait(self) -> None:
        """Block the calling thread until it is reached."""


class Stream(Protocol):
    """A queue of work on the device."""

    def record(self) -> Event:
        """Mark the end of what was enqueued so far."""

    def wait_for(self, event: Event) -> None:
        """Whatever is enqueued from now on starts after the event; the calling thread goes on."""

    def run(self, work: Work) -> None:
        """Enqueue what `work` launches, such as kernels on torch's current stream."""


class Backend(Protocol):
    """A place where streams live."""

    needs_pinned: bool
    """Whether host memory must be pinned for a copy to be asynchronous."""

    def enter(self) -> None:
        """Make the calling thread able to use this backend; the thread that made it is already."""

    def compute_stream(self) -> Stream:
        """The stream on which the calling thread computes now."""

    def new_stream(self) -> Stream:
        """A stream of its own, before compute in priority."""

    def copy(self, stream: Stream, copies: Copies) -> None:
        """Enqueue a batch."""

    def pinned(self, num_bytes: int) -> HostBuffer:
        """Fresh host memory that a copy may use asynchronously."""


class _Happened:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class _Inline:
    def record(self) -> Event:
        return _Happened()

    def wait_for(self, event: Event) -> None:
        event.wait()

    def run(self, work: Work) -> None:
        work()


class InlineBackend:
    """Host memory; everything happens at once."""

    needs_pinned = False

    def __init__(self) -> None:
        self._stream = _Inline()

    def enter(self) -> None:
        """See `Backend`."""

    def compute_stream(self) -> Stream:
        """See `Backend`."""
        return self._stream

    def new_stream(self) -> Stream:
        """See `Backend`."""
        return self._stream

    def copy(self, stream: Stream, copies: Copies) -> None:
        """See `Backend`."""
        stream.run(lambda: move_on_host(copies))

    def pinned(self, num_bytes: int) -> HostBuffer:
        """See `Backend`."""
        return np.empty(num_bytes, dtype=np.uint8)


def move_on_host(copies: Copies) -> None:
    """Carry out a batch of copies between host addresses."""
    lists = (copies.targets.tolist(), copies.sources.tolist(), copies.sizes.tolist())
    for target, source, size in zip(*lists, strict=True):
        ctypes.memmove(target, source, size)


class CudaEvent:
    """A torch event."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def done(self) -> bool:
        """See `Event`."""
        return bool(self.raw.query())

    def wait(self) -> None:
        """See `Event`; torch releases the GIL."""
        self.raw.synchronize()


class CudaStream:
    """A torch stream."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def record(self) -> Event:
        """See `Stream`."""
        # Blocking synchronisation: the waiting thread sleeps and leaves its core to the engine.
        event = torch.cuda.Event(blocking=True)
        event.record(self.raw)
        return CudaEvent(event)

    def wait_for(self, event: Event) -> None:
        """See `Stream`."""
        if isinstance(event, CudaEvent):
            self.raw.wait_event(event.raw)
        else:
            event.wait()

    def run(self, work: Work) -> None:
        """See `Stream`."""
        with torch.cuda.stream(self.raw):
            work()


class CudaBackend:
    """One CUDA device, through torch's streams and the driver's copies."""

    needs_pinned = True

    def __init__(self, device: torch.device, driver: Driver) -> None:
        # Another thread can't be told to use "cuda": torch wants to know which.
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self.driver = driver
        torch.zeros(1, device=self.device)  # makes the primary context current in this thread
        driver.bind()

    def enter(self) -> None:
        """See `Backend`."""
        torch.cuda.set_device(self.device)
        self.driver.enter()

    def compute_stream(self) -> Stream:
        """See `Backend`."""
        return CudaStream(torch.cuda.current_stream(self.device))

    def new_stream(self) -> Stream:
        """See `Backend`."""
        return CudaStream(torch.cuda.Stream(self.device, priority=-1))

    def copy(self, stream: Stream, copies: Copies) -> None:
        """See `Backend`."""
        assert isinstance(stream, CudaStream)
        self.driver.copy(copies.targets, copies.sources, copies.sizes, int(stream.raw.cuda_stream))

    def pinned(self, num_bytes: int) -> HostBuffer:
        """See `Backend`."""
        memory: HostBuffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return memory
