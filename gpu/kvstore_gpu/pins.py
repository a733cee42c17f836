"""Pins a client's DRAM arena when a copy first touches it, and lets go of it when the client does.

Registering a large mapping takes seconds, so a thread of its own does it; until it is through, copies are staged. The
client unmaps the arena when its service goes away, and a new life of the service wants that memory: so nothing here
holds the client's array itself, only its bytes, until the thread has unregistered them. The end of the array is told by
a weak reference, whose callback does no more than leave word.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from dataclasses import dataclass

from kvstore_gpu.arena import Arena
from kvstore_gpu.errors import DriverError
from kvstore_gpu.pinned import PinnedRegion
from kvstore_gpu.streams import HostBuffer

log = logging.getLogger(__name__)


@dataclass
class _Mapping:
    """One array of a client. `memory`: a view that keeps the mapping while it's registered."""

    array: weakref.ref[HostBuffer]
    memory: HostBuffer | None
    region: PinnedRegion | None = None


class Pins:
    """`see` is for the arena's owner thread; `close` comes before the arena's."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._mappings: dict[int, _Mapping] = {}
        """By number, of arrays that still live as far as `see` knows."""
        self._count = 0
        self._words: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        """`put` may be called from a weak reference's callback, wherever that comes."""
        self._thread = threading.Thread(target=self._serve, name="kvstore-pin", daemon=True)
        self._thread.start()

    def see(self, array: HostBuffer) -> None:
        """This array is copied from or to: pin it, unless that was asked for already. Doesn't wait."""
        if not self._arena.backend.needs_pinned or any(m.array() is array for m in list(self._mappings.values())):
            return
        self._count += 1
        number, words = self._count, self._words
        self._mappings[number] = _Mapping(weakref.ref(array, lambda _: words.put(("gone", number))), array[:])
        words.put(("seen", number))

    def close(self) -> None:
        """Unregister everything; waits for it."""
        self._words.put(("stop", 0))
        self._thread.join()

    def _serve(self) -> None:
        entered = False
        while (word := self._words.get())[0] != "stop":
            what, number = word
            try:
                if not entered:
                    self._arena.backend.enter()
                    entered = True
                self._pin(number) if what == "seen" else self._let_go(number)
            except Exception:  # slower, not wrong: copies are staged
                log.exception("pinning the DRAM arena failed; copies go through a staging ring")
        for number in list(self._mappings):
            with contextlib.suppress(DriverError):  # the process ends, or the device is lost
                self._let_go(number)

    def _pin(self, number: int) -> None:
        mapping = self._mappings[number]
        if mapping.array() is not None and mapping.memory is not None:
            mapping.region = self._arena.pin(mapping.memory)

    def _let_go(self, number: int) -> None:
        mapping = self._mappings.pop(number)
        if mapping.region is not None:
            self._arena.forget_pinned(mapping.region)
            mapping.region.close()
        mapping.memory = None
