"""The parts of a node, made from its configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvstore.config import ServiceConfig
from kvstore.core.events import Lost
from kvstore.core.state import Limits, TierConfig
from kvstore.core.types import Tier
from kvstore.errors import SetupError
from kvstore.lessons import learned_policy
from kvstore.metrics import Metrics
from kvstore.scrubber import Scrubber
from kvstore.tiers.arena import Arena, Huge
from kvstore.tiers.datadir import DataDir
from kvstore.tiers.files import Faults
from kvstore.tiers.transfer import TransferEngine

TOMBSTONES = 100_000
NVME_FREE_TARGET = 0.02
_HUGE: dict[str, Huge] = {"auto": "auto", "on": "require", "off": "never"}


def open_data(config: ServiceConfig, faults: Faults | None) -> DataDir | None:
    """Lock and open the data directory; None without an NVMe tier. Raises SetupError."""
    if not config.nvme_bytes:
        return None
    check_disk(Path(config.data_dir), config.nvme_bytes)
    return DataDir.open(
        Path(config.data_dir),
        config.nvme_bytes,
        segment_bytes=config.segment_bytes,
        reserve_bytes=config.nvme_reserve_bytes,
        direct=config.direct_io,
        faults=faults,
    )


def check_disk(folder: Path, nvme_bytes: int) -> None:
    """Raises SetupError when the cap is more than the whole disk: it would cap nothing."""
    there = next(p for p in (folder, *folder.parents) if p.exists())
    stat = os.statvfs(there)
    total = stat.f_blocks * stat.f_frsize
    if nvme_bytes > total:
        raise SetupError(f"nvme_bytes: {nvme_bytes} is more than the disk under {there} holds ({total}); lower it")


def open_arena(config: ServiceConfig) -> Arena:
    """The DRAM tier. Raises SetupError."""
    return Arena.create(config.dram_bytes, _HUGE[config.huge_pages])


def start_scrubber(
    config: ServiceConfig, data: DataDir, engine: TransferEngine, lost: Callable[[Lost], object], metrics: Metrics
) -> Scrubber | None:
    """None when scrubbing is switched off."""
    rate = config.scrub_bytes_per_s
    return Scrubber(data, engine, rate, lost, metrics) if rate else None


def tiers_of(config: ServiceConfig, data: DataDir | None) -> list[TierConfig]:
    """Tiers of a node. The data directory keeps its own segment size, and what eviction has learned."""
    index = data.index if data is not None else None
    tiers = [
        TierConfig(
            Tier.DRAM,
            config.dram_bytes,
            lambda tier: learned_policy(config.dram_policy, tier, index),
            segment_bytes=config.segment_bytes,
            clean_above=config.write_behind_watermark,
        )
    ]
    if data is not None:
        tiers.append(
            TierConfig(
                Tier.NVME,
                config.nvme_bytes,
                lambda tier: learned_policy(config.nvme_policy, tier, index),
                segment_bytes=data.slab.segment_bytes,
                free_target=NVME_FREE_TARGET,
                durable=True,
            )
        )
    return tiers


def limits_of(config: ServiceConfig) -> Limits:
    quotas: dict[tuple[str, Tier], int] = {}
    for tenant, quota in config.tenants.items():
        for tier, num_bytes in ((Tier.DRAM, quota.dram_bytes), (Tier.NVME, quota.nvme_bytes)):
            if num_bytes is not None:
                quotas[tenant, tier] = num_bytes
    return Limits(
        num_sessions=config.max_sessions, num_leases=config.max_leases, quotas=quotas, num_tombstones=TOMBSTONES
    )
