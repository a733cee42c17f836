"""Pools on a device: where their memory comes from, and what moves blocks between them and the service.

Both are `kvstore_gpu`'s, imported only when there is such a pool. The store connects before it knows the pool, so its
client is given a `PoolMover`, which makes the device's hand when it first sees the pool.

The first batch that reads a slab starts a probe beside the work, in the slab's own folder: GPUDirect Storage is used
once that found it faster, and the host reads until then. No request waits for it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvstore.core.keyspace import Keyspace
from kvstore.errors import SetupError, TierError, Unavailable
from kvstore.tiers.transfer import Copy, File, Priority
from kvstore_client.layers import Ready
from kvstore_client.movers import Moving

if TYPE_CHECKING:
    from kvstore_gpu.arena import Arena
    from kvstore_gpu.hand import DeviceHand

log = logging.getLogger(__name__)
ON_ARENA = frozenset({"cuda"})
"""Devices whose pool is an arena and whose blocks are moved by its hand. (Tests add the CPU.)"""
FREE_SHARE_MAX = 0.9
"""Of the device's free memory; the rest is for activations."""


def make_arena(keyspace: Keyspace, num_slots: int, device: torch.device) -> Arena:
    """Zeroed slots in one allocation of their own. Raises SetupError when they can't be had."""
    from kvstore_gpu.arena import Arena, PoolSpec

    num_bytes = num_slots * keyspace.slot_bytes
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if num_bytes > free * FREE_SHARE_MAX:
            raise SetupError(f"pool_bytes: {num_bytes} is more than the device has free ({free}); use less")
    try:
        arena = Arena.create(PoolSpec(num_slots, keyspace.num_layers, keyspace.slice_bytes), device)
    except (TierError, Unavailable) as error:
        raise SetupError(f"pool_bytes: {num_bytes} can't be allocated on {device}: {error}") from None
    arena.tensor.zero_()
    return arena


class PoolMover:
    """A `kvstore_client.movers.Mover`, by layers too, for one device pool. Thread-safe; `close` it before the arena."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hand: DeviceHand | None = None
        self._probe: threading.Thread | None = None
        self._closed = False

    def use(self, arena: Arena) -> None:
        """Copies name this pool from now on. Raises SetupError for a second pool, Unavailable when closed."""
        from kvstore_gpu.hand import DeviceHand

        with self._lock:
            if self._closed:
                raise Unavailable("device: closed")
            if self._hand is None:
                self._hand = DeviceHand(arena)
            elif self._hand.arena is not arena:
                raise SetupError("store: serves one device pool; make another store for another pool")

    def submit(self, copies: Sequence[Copy], priority: Priority, deadline_s: float | None = None) -> Moving:
        """See `Mover`."""
        hand = self._the_hand()
        if self._probe is None and hand.arena.backend.needs_pinned:
            slab = next((copy.source for copy in copies if isinstance(copy.source, File)), None)
            if slab is not None:
                folder = Path(os.readlink(f"/proc/self/fd/{slab.file.fd}")).parent
                self._start(lambda: choose_path(hand, folder))
        return hand.submit(copies, priority, deadline_s)

    def submit_by_layers(
        self, copies: Sequence[Copy], told: Callable[[int, Ready], None], deadline_s: float | None = None
    ) -> Moving:
        """See `LayerMover`."""
        return self._the_hand().submit_by_layers(copies, told, deadline_s)

    def close(self) -> None:
        """Finish what is queued, and stop; again is a no-op."""
        with self._lock:
            self._closed = True
            probe, hand = self._probe, self._hand
        if probe is not None:
            probe.join()
        if hand is not None:
            hand.close()

    def _the_hand(self) -> DeviceHand:
        hand = self._hand
        if hand is None:
            raise Unavailable("device: no pool yet")
        return hand

    def _start(self, probing: Callable[[], None]) -> None:
        with self._lock:
            if self._probe is None and not self._closed:
                self._probe = threading.Thread(target=probing, name="kvstore-probe", daemon=True)
                self._probe.start()


def choose_path(hand: DeviceHand, folder: Path) -> None:
    """Try both ways from NVMe to the pool in `folder`, and let the hand use the faster."""
    from kvstore_gpu import probe

    if not os.access(folder, os.W_OK):
        log.info("GPUDirect Storage: not tried, this process can't write to %s", folder)
        return
    try:
        found = probe.probe(folder, hand.arena.spec, str(hand.arena.tensor.device))
    except Exception as error:  # a driver's error may be anything; the host goes on reading
        log.warning("GPUDirect Storage: the probe in %s failed (%s); the host reads", folder, error)
        return
    hand.use_gds = found.chosen == "gds"
