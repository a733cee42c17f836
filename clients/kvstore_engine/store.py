"""What the scheduler asks of a cache service. All calls may block, up to a deadline; none is made from the scheduler's
thread.

A store may fail (raise KVStoreError or OSError) at any call: the engine then computes. It may not lie: `restore` counts
only blocks whose bytes were verified where they now lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.core.events import SignalKind
from kvstore.core.hashing import TokenChain
from kvstore.core.types import Durability
from kvstore_client.layers import LayerGate
from kvstore_engine.pool import KVPool


@dataclass(frozen=True)
class StoreLease:
    """A claim on the first `num_blocks` blocks of a context. `token` means something to the store only."""

    num_blocks: int
    token: object = None


@dataclass(frozen=True)
class RestoreResult:
    """What a restore brought: the first `num_ok` of the blocks asked for are right; where they came from, and how long
    it took.
    """

    num_ok: int
    num_dram: int = 0
    num_nvme: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class PoolStats:
    """The engine's side of the accounts, totals since start but for the first two."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    restored_tokens_dram: int = 0
    restored_tokens_nvme: int = 0


class ContextStore(Protocol):
    """The cache service as an engine sees it. Thread-safe."""

    def acquire(self, session: str, chain: TokenChain, num_blocks: int) -> StoreLease | None:
        """Claim what is held of the chain's first `num_blocks` blocks; None when nothing is."""

    def restore(
        self,
        lease: StoreLease,
        first: int,
        last: int,
        pool: KVPool,
        slots: Sequence[int],
        gate: LayerGate | None = None,
    ) -> RestoreResult:
        """Copy blocks `[first, last)` into the pool's slots, in order, and verify them there. May open `gate` if they
        come by layers. When this returns or raises, nothing writes into the slots any more."""

    def release(self, lease: StoreLease) -> None:
        """Give a claim back; again is a no-op."""

    def offload(
        self, session: str, chain: TokenChain, last: int, pool: KVPool, slots: Sequence[int], durability: Durability
    ) -> int:
        """Copy down what isn't held yet of blocks `[0, last)`; how many leading blocks now hold the promise."""

    def signal(
        self, session: str, kind: SignalKind, tool: str = "", expected_s: float = 0.0, output_tokens: int = 0
    ) -> None:
        """What the agent does now; `output_tokens`: how many the model just wrote."""

    def fork(self, parent: str, session: str) -> None:
        """A session that starts at its parent's context."""

    def end(self, session: str) -> None:
        """The session won't come back."""

    def report(self, stats: PoolStats) -> None:
        """The engine's pool, for the service's metrics. Must not block."""

    def close(self) -> None:
        """Let go of everything."""


class NullStore:
    """No store: nothing is held, nothing is kept."""

    def acquire(self, session: str, chain: TokenChain, num_blocks: int) -> StoreLease | None:
        return None

    def restore(
        self,
        lease: StoreLease,
        first: int,
        last: int,
        pool: KVPool,
        slots: Sequence[int],
        gate: LayerGate | None = None,
    ) -> RestoreResult:
        return RestoreResult(0)

    def release(self, lease: StoreLease) -> None:
        pass

    def offload(
        self, session: str, chain: TokenChain, last: int, pool: KVPool, slots: Sequence[int], durability: Durability
    ) -> int:
        return 0

    def signal(
        self, session: str, kind: SignalKind, tool: str = "", expected_s: float = 0.0, output_tokens: int = 0
    ) -> None:
        pass

    def fork(self, parent: str, session: str) -> None:
        pass

    def end(self, session: str) -> None:
        pass

    def report(self, stats: PoolStats) -> None:
        pass

    def close(self) -> None:
        pass
