"""Layer-wise restore: each group of layers has its event, and a checksum taken on the device before it.

    copy stream:   [copy 0..g)[sum 0..g) E0 [copy g..2g)[sum g..2g) E1 ... [sums to host] E_last
    compute:                 wait E0  layer 0 .. g-1      wait E1 ...

The engine may compute on a layer before the sums are compared on the host; its result counts only if `finish`
returns no bad slice. So a wrong byte can cost a recompute but never reach an answer.

Whoever computes in another thread learns of each event by `told`, since nothing can wait for an event that hasn't been
recorded: a device takes such an event as one that has happened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kvstore_gpu.errors import LayoutError
from kvstore_gpu.streams import Backend, Copies, Event, HostBuffer, Stream

if TYPE_CHECKING:
    from kvstore_gpu.arena import Arena

U64Array = npt.NDArray[np.uint64]
Told = Callable[[int, Event], None]
"""Called with a number of layers, from the first on, and the event after which they are there."""


def not_told(num_layers: int, event: Event) -> None:
    """Nobody wants to know."""


class LayerRestore:
    """A restore under way; made by `Arena.restore_layers`."""

    def __init__(self, backend: Backend, stream: Stream, copies: Copies, staged: list[tuple[HostBuffer, int]]) -> None:
        self._backend, self._stream, self._copies, self._staged = backend, stream, copies, staged
        self._held: list[HostBuffer] = []
        self._events: list[Event] = []
        self._layers_per_event = 1
        self._expected: U64Array | None = None
        self._sums: HostBuffer | None = None

    def hold(self, buffers: list[HostBuffer]) -> None:
        """Keep the sources alive until `finish`."""
        self._held += buffers

    def start(
        self, arena: Arena, offsets: U64Array, expected: U64Array | None, layers_per_event: int, told: Told
    ) -> None:
        """Enqueue everything. Called once, by the arena. After an error nothing runs any more."""
        num_pairs, num_slices = len(offsets), arena.num_slices
        if expected is not None and expected.shape != (num_pairs, num_slices):
            raise LayoutError(f"expected sums {expected.shape} for {num_pairs} blocks of {num_slices} slices")
        self._layers_per_event, self._expected = layers_per_event, expected
        if expected is not None:
            self._sums = self._backend.pinned(num_pairs * num_slices * 8)
        try:
            for first in range(0, num_slices, layers_per_event):
                last = min(first + layers_per_event, num_slices)
                self._group(arena, offsets, first, last - first)
                told(last, self._events[-1])
        except BaseException:  # the slots will be somebody else's: what was enqueued must be through
            with contextlib.suppress(Exception):
                self._stream.record().wait()
            raise

    def before_layer(self, layer: int, stream: Stream | None = None) -> None:
        """The engine's work from now on starts after this layer has arrived; the calling thread goes on."""
        (stream or self._backend.compute_stream()).wait_for(self._events[layer // self._layers_per_event])

    def layer_done(self, layer: int) -> bool:
        """Whether a layer has arrived; doesn't wait."""
        return self._events[layer // self._layers_per_event].done()

    def finish(self) -> list[tuple[int, int]]:
        """Wait for all of it; (pair, slice) of each slice that is wrong. Without expected sums none is checked."""
        if self._events:
            self._events[-1].wait()
        self._held.clear()
        if self._expected is None or self._sums is None:
            return []
        got = np.empty_like(self._expected)
        table, start = self._sums.view(np.uint64), 0
        for first in range(0, got.shape[1], self._layers_per_event):
            part = got[:, first : first + self._layers_per_event]
            part[...] = table[start : start + part.size].reshape(part.shape)
            start += part.size
        return [(int(pair), int(layer)) for pair, layer in np.argwhere(got != self._expected)]

    def _group(self, arena: Arena, offsets: U64Array, first: int, count: int) -> None:
        begin, size = first * arena.slice_bytes, count * arena.slice_bytes
        if len(self._copies.sizes):
            arena.enqueue(self._stream, self._copies.shifted(begin, size), into_pool=True)
        for memory, target in self._staged:
            arena.send_staged(self._stream, memory[begin : begin + size], target + begin)
        if self._sums is not None:
            start = len(offsets) * first * 8
            target = torch.from_numpy(self._sums[start : start + len(offsets) * count * 8].view(np.int64))
            at = offsets + np.uint64(first * arena.slice_bytes)

            def sum_group() -> None:
                sums = arena.kernels.checksum(arena.tensor, at, count, arena.slice_bytes)
                target.copy_(sums.view(-1), non_blocking=True)

            self._stream.run(sum_group)
        self._events.append(self._stream.record())
