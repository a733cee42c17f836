"""What calls return."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.core.types import KeyspaceId


@dataclass(frozen=True, slots=True)
class Lease:
    """A claim on the first `num_blocks` blocks of a context. It ends after `ttl_s`; a running restore renews it."""

    id: int
    keyspace: KeyspaceId
    num_blocks: int
    boot_epoch: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Restored:
    """The first `num_ok` of the blocks asked for are in the pool and verified there.

    `num_dram` and `num_nvme` say where those came from; `errors` why the next one did not come.
    """

    num_ok: int
    num_dram: int = 0
    num_nvme: int = 0
    seconds: float = 0.0
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Offloaded:
    """The first `num_blocks` of the context hold the promise asked for; `num_copied` were moved by this call."""

    num_blocks: int
    num_copied: int = 0
    seconds: float = 0.0
    errors: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class PoolReport:
    """An engine's own tier, totals since it started; sent with each heartbeat."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    restored_tokens_dram: int = 0
    restored_tokens_nvme: int = 0
