"""Many requests with one prefix: what one restore is reading from NVMe, the others copy from it.

    leader   reads into its own slots ------------------> done: these blocks are good
    others   wait for it, by their own deadline -> copy from the leader's slots, verify -> or read after all

The leader's slots are memory of the same process, and may hold something else by the time they are copied: the
checksums at the target tell, and the block is then read from NVMe like any other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from kvstore.core.types import BlockHash
from kvstore.tiers.transfer import Memory

Key = tuple[int, int, BlockHash]
"""Boot epoch, slot, block: what was read under one key is the same bytes for everybody."""


class Flight:
    """One restore's reads from NVMe. `good` holds what was verified, once `done` is set."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.places: dict[Key, Memory] = {}
        self.good: dict[Key, Memory] = {}


class SharedReads:
    """Reads under way in this process, by block. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[Key, Flight] = {}
        self.num_waiting = 0
        """Blocks that wait for another restore's read, now."""

    def board(self, wanted: Iterable[tuple[Key, Memory]]) -> tuple[Flight, dict[Key, Flight]]:
        """A flight for what nobody reads yet, and for the rest the flights to wait for. `land` it in any case."""
        mine = Flight()
        others: dict[Key, Flight] = {}
        with self._lock:
            for key, place in wanted:
                flight = self._flights.setdefault(key, mine)
                if flight is mine:
                    mine.places[key] = place
                else:
                    others[key] = flight
            self.num_waiting += len(others)
        return mine, others

    def land(self, flight: Flight, good: Iterable[Key]) -> None:
        """The flight's reads are over; `good` are the blocks whose bytes were verified."""
        with self._lock:
            flight.good = {key: flight.places[key] for key in good}
            for key in flight.places:
                del self._flights[key]
        flight.done.set()

    def wait(self, others: dict[Key, Flight], deadline: float) -> dict[Key, Memory]:
        """Wait for other restores until `deadline` (monotonic seconds); returns where the blocks that came
        good can be copied from."""
        for flight in set(others.values()):
            flight.done.wait(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self.num_waiting -= len(others)
        return {key: flight.good[key] for key, flight in others.items() if key in flight.good}
