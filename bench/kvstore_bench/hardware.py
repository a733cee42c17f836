"""Tiers with price, bandwidth, capacity and endurance. Presets are assumptions to be replaced: every figure shows in
the report.

A file given as `--hardware` is JSON with the same fields; what it leaves out comes from the preset it names as `base`.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvstore_bench.traces.errors import TraceError

GIB = 1 << 30
POSITIVE = ("gpu_flops", "utilization", "dram_bandwidth", "nvme_bandwidth", "nvme_writes_per_day")
"""Divided by."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One node. Prices in USD; bandwidths in bytes/s towards the device; capacities in GiB."""

    name: str
    gpu_usd_hour: float
    """All GPUs of the node."""
    gpu_flops: float
    """Dense 16-bit FLOP/s of all GPUs."""
    utilization: float
    """Share of it that prefill reaches."""
    hbm_gib: float
    """HBM left for KV after weights."""
    dram_bandwidth: float
    nvme_bandwidth: float
    nvme_latency_s: float
    dram_usd_gib_month: float
    nvme_usd_gib_month: float
    nvme_writes_per_day: float
    """Endurance: full drive writes a day."""
    dram_gib_max: float
    nvme_gib_max: float


PRESETS: dict[str, Hardware] = {
    "h100-8": Hardware(
        name="h100-8", gpu_usd_hour=24.0, gpu_flops=8 * 989e12, utilization=0.45, hbm_gib=320.0, dram_bandwidth=8 *
        25e9, nvme_bandwidth=24e9, nvme_latency_s=0.0005, dram_usd_gib_month=0.60, nvme_usd_gib_month=0.02,
        nvme_writes_per_day=1.0, dram_gib_max=2048.0, nvme_gib_max=30720.0,
    ),
    "h100-1": Hardware(
        name="h100-1", gpu_usd_hour=3.0, gpu_flops=989e12, utilization=0.45, hbm_gib=50.0, dram_bandwidth=25e9,
        nvme_bandwidth=12e9, nvme_latency_s=0.0005, dram_usd_gib_month=0.60, nvme_usd_gib_month=0.02,
        nvme_writes_per_day=1.0, dram_gib_max=512.0, nvme_gib_max=7680.0,
    ),
    "l40s-1": Hardware(
        name="l40s-1", gpu_usd_hour=1.0, gpu_flops=362e12, utilization=0.40, hbm_gib=24.0, dram_bandwidth=20e9,
        nvme_bandwidth=6e9, nvme_latency_s=0.0005, dram_usd_gib_month=0.60, nvme_usd_gib_month=0.02,
        nvme_writes_per_day=1.0, dram_gib_max=256.0, nvme_gib_max=3840.0,
    ),
}  # fmt: skip


def load_hardware(name: str) -> Hardware:
    """A preset by name, or a JSON file. Raises TraceError that names the field."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.is_file():
        raise TraceError(name, "is no known hardware", mend=f"use {', '.join(PRESETS)} or a JSON file")
    try:
        given = json.loads(path.read_bytes())
    except ValueError as error:
        raise TraceError(name, f"isn't valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise TraceError(name, "expected a JSON object")
    base = PRESETS.get(str(given.pop("base", "h100-8")))
    if base is None:
        raise TraceError(name, "unknown preset", field="base", mend=f"use {', '.join(PRESETS)}")
    return replace(base, **_checked(name, given))


def _checked(name: str, given: dict[str, Any]) -> dict[str, Any]:
    known = asdict(PRESETS["h100-8"])
    for field, value in given.items():
        if field not in known:
            raise TraceError(name, "unknown field", field=field, mend=f"use {', '.join(known)}")
        if field == "name":
            given[field] = str(value)
            continue
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not numeric or not 0 <= float(value) < math.inf or (field in POSITIVE and not value):
            least = "above 0" if field in POSITIVE else "of at least 0"
            raise TraceError(name, f"expected a number {least}, found {value!r}", field=field)
    return given
