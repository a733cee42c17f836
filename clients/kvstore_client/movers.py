"""What the client asks of whatever moves its bytes: `TransferEngine` for host memory, a device hand for HBM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from kvstore.tiers.transfer import Copy, CopyResult, Priority
from kvstore_client.layers import Ready


class Moving(Protocol):
    """A batch of copies under way."""

    def wait(self, timeout: float | None = None) -> list[CopyResult]:
        """Results in order. Raises Unavailable after `timeout` seconds; the memory is still in use then."""

    def done(self) -> bool:
        """May the memory be used again?"""

    def cancel(self) -> None:
        """Drop what hasn't started."""


class Mover(Protocol):
    """Moves copies, all of one direction a batch, reads before writes."""

    def submit(self, copies: Sequence[Copy], priority: Priority, deadline_s: float | None = None) -> Moving:
        """Start a batch. Raises InvalidField, TierFull, Unavailable; nothing was started then."""

    def close(self) -> None:
        """Stop."""


@runtime_checkable
class LayerMover(Protocol):
    """A `Mover` that can also bring blocks layer by layer, for who computes on the first ones meanwhile."""

    def submit_by_layers(
        self, copies: Sequence[Copy], told: Callable[[int, Ready], None], deadline_s: float | None = None
    ) -> Moving:
        """Start reading blocks from host memory, all with checksums. `told` hears of each group of layers, in order,
        from another thread, or of none; the results are as final as `submit`'s. Raises as `submit`."""
