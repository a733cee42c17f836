"""Layers of a restore as they come, for an engine that computes on them before their bytes have been judged.

    restore's threads    part -> told(n, ready), told(m, ready), ... -> close
    engine's thread      open -> before_layer(0) -> before_layer(1) -> ...

A restore may move its blocks in several batches; a layer is there when it is there in each of them. What is computed
this way is worth nothing unless the restore then says that every block was right.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvstore.errors import Unavailable

Ready = Callable[[], None]
"""Makes what its caller enqueues from then on start after some layers are there; where nothing is enqueued, waits."""


class LayerGate:
    """Of one restore of `num_blocks` blocks. Thread-safe, but for `before_layer`, which is one thread's.

    `on_open` is called once, from another thread, when `open` turns true. `patience_s`: longest time that
    `before_layer` may wait, all its calls together.
    """

    def __init__(self, num_blocks: int, on_open: Callable[[], None], patience_s: float) -> None:
        self.patience_s = patience_s
        self._num_missing = num_blocks
        self._on_open = on_open
        self._changed = threading.Condition()
        self._parts: list[list[tuple[int, Ready]]] = []
        """For each batch what it was told, in order: (layers from the first on, how to wait for them)."""
        self._closed = False

    @property
    def open(self) -> bool:
        """Are the first layers of all blocks on their way, and the verdict still out?"""
        return not self._closed and not self._num_missing

    def part(self, num_blocks: int) -> Callable[[int, Ready], None]:
        """A batch of so many blocks comes by layers; its mover calls the result for each group of layers, in order."""
        known: list[tuple[int, Ready]] = []
        with self._changed:
            self._parts.append(known)

        def told(num_layers: int, ready: Ready) -> None:
            with self._changed:
                known.append((num_layers, ready))
                self._num_missing -= num_blocks if len(known) == 1 else 0
                opened = len(known) == 1 and self.open
                self._changed.notify_all()
            if opened:
                self._on_open()

        return told

    def before_layer(self, layer: int) -> None:
        """What the caller enqueues from now on may touch this layer of all blocks.

        Raises Unavailable when the restore ended before that was so, and when patience did.
        """
        for known in self._parts:
            self._wait_for(layer, known)()

    def close(self) -> None:
        """The restore is over, one way or another: what hasn't come won't. Again is a no-op."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait_for(self, layer: int, known: list[tuple[int, Ready]]) -> Ready:
        def there() -> bool:
            return bool(known) and known[-1][0] > layer

        started = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: there() or self._closed, self.patience_s)
            self.patience_s -= min(time.monotonic() - started, self.patience_s)
            if not there():
                raise Unavailable(f"layer {layer} hasn't come")
            return next(ready for num_layers, ready in known if num_layers > layer)
