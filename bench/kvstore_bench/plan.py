"""How much DRAM and NVMe to buy, from a trace.

A mix is (HBM, DRAM, NVMe) bytes. The tiers act as one cache as large as their sum, with the hottest blocks on top: a
request's leading blocks that a cache of HBM size finds come from HBM, what HBM + DRAM adds comes from DRAM, what the
whole adds from NVMe. The rest is prefilled. From that, per request:

    TTFT = NVMe bytes / bandwidth + DRAM bytes / bandwidth + prefill FLOPs / (FLOP/s x utilization)

without queueing, so it is a floor, equal for all mixes. Every number in a report goes back to the trace, the model's
config, or a field of the hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvstore_bench.hardware import GIB, Hardware
from kvstore_bench.losses import Lost, lost
from kvstore_bench.models import Model
from kvstore_bench.sweep import Simulator

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
MONTH_H = 730.0
DAY_S = 86_400.0
DRAM_STEPS = (0.0, 0.0625, 0.125, 0.25, 0.5, 1.0)
NVME_STEPS = (0.0, 0.0625, 0.25, 1.0)


@dataclass(slots=True)
class Mix:
    """One choice of sizes and what it gives. Seconds are per request unless named otherwise."""

    dram_gib: float
    nvme_gib: float
    tokens_saved: float
    saved_hbm: float
    saved_dram: float
    saved_nvme: float
    gpu_seconds: float
    gpu_seconds_saved: float
    ttft_p50: float
    ttft_p99: float
    usd_month: float
    usd_per_million_tokens: float
    usd_per_session: float
    nvme_writes_tib_day: float
    nvme_endurance_used: float
    """Writes a day over what the drives are rated for; 0 without NVMe."""


@dataclass(slots=True)
class Plan:
    """All mixes tried, the cheapest that meets the target (or None), and why."""

    mixes: list[Mix]
    best: Mix | None
    target_p99: float
    reasons: list[str]

    @property
    def shown(self) -> Mix:
        """The mix that words and pictures are about: the choice, or what comes closest to the target."""
        return self.best or closest(self.mixes)


def closest(mixes: list[Mix]) -> Mix:
    """The least p99, at the least price."""
    return min(mixes, key=lambda mix: (mix.ttft_p99, mix.usd_month))


class Planner:
    """Evaluates mixes of one trace, model and node."""

    def __init__(self, simulator: Simulator, model: Model, hardware: Hardware, policy: str) -> None:
        self.simulator, self.model, self.hardware, self.policy = simulator, model, hardware, policy
        trace = simulator.trace
        self.block_bytes = trace.block_tokens * model.kv_bytes_per_token
        self.duration_s = max(1.0, float(trace.times_ns[-1]) / 1e9)
        self._runs: dict[int, I64] = {}

    def blocks(self, gib: float) -> int:
        """How many blocks fit, at most those that the trace has."""
        return min(int(gib * GIB / self.block_bytes), self.simulator.trace.num_blocks)

    def lost(self, gib: float) -> Lost:
        """Where the misses of a cache of that size come from."""
        return lost(self.simulator.trace, self.simulator.causes, self.runs(gib))

    def runs(self, gib: float) -> I64:
        """[num_requests] leading blocks that a cache of that size finds."""
        capacity = self.blocks(gib)
        if capacity <= 0:
            return np.zeros(self.simulator.trace.num_requests, np.int64)
        if capacity not in self._runs:
            self._runs[capacity] = self.simulator.point(self.policy, capacity).runs
        return self._runs[capacity]

    def sizes(self, dram_gib: float, nvme_gib: float) -> tuple[float, float, float]:
        """GiB of HBM, with DRAM, with NVMe."""
        hbm = self.hardware.hbm_gib
        return hbm, hbm + dram_gib, hbm + dram_gib + nvme_gib

    def found(self, dram_gib: float, nvme_gib: float) -> tuple[I64, I64, I64]:
        """[num_requests] leading blocks found in HBM, with DRAM, with NVMe: never fewer in more."""
        hbm, dram, total = map(self.runs, self.sizes(dram_gib, nvme_gib))
        dram = np.maximum(dram, hbm)
        return hbm, dram, np.maximum(total, dram)

    def mix(self, dram_gib: float, nvme_gib: float) -> Mix:
        """What these sizes give."""
        hw, trace = self.hardware, self.simulator.trace
        hbm, dram, total = self.found(dram_gib, nvme_gib)
        inputs = trace.input_tokens.astype(np.float64)
        cached = np.minimum(total * trace.block_tokens, trace.input_tokens).astype(np.float64)
        prefill = self.prefill_s(cached, inputs)
        from_dram, from_nvme = (dram - hbm) * self.block_bytes, (total - dram) * self.block_bytes
        ttft = (
            prefill
            + from_dram / hw.dram_bandwidth
            + from_nvme / hw.nvme_bandwidth
            + (from_nvme > 0) * hw.nvme_latency_s
        )
        gpu = float(prefill.sum())  # a request always computes one token at least
        tokens = max(1.0, float(inputs.sum()))
        usd_month = dram_gib * hw.dram_usd_gib_month + nvme_gib * hw.nvme_usd_gib_month
        usd = gpu * hw.gpu_usd_hour / 3600.0 + usd_month * self.duration_s / 3600.0 / MONTH_H
        # every block that had to be computed is written down once
        written = float((np.diff(trace.offsets) - total).sum()) * self.block_bytes if nvme_gib else 0.0
        per_day = written / self.duration_s * DAY_S
        rated = nvme_gib * GIB * hw.nvme_writes_per_day
        share = trace.block_tokens / tokens
        return Mix(
            dram_gib=dram_gib,
            nvme_gib=nvme_gib,
            tokens_saved=float(cached.sum()) / tokens,
            saved_hbm=float(hbm.sum()) * share,
            saved_dram=float((dram - hbm).sum()) * share,
            saved_nvme=float((total - dram).sum()) * share,
            gpu_seconds=gpu,
            gpu_seconds_saved=self.gpu_seconds_bare - gpu,
            ttft_p50=float(np.percentile(ttft, 50)),
            ttft_p99=float(np.percentile(ttft, 99)),
            usd_month=usd_month,
            usd_per_million_tokens=usd / tokens * 1e6,
            usd_per_session=usd / max(1, trace.num_sessions),
            nvme_writes_tib_day=per_day / (1 << 40),
            nvme_endurance_used=per_day / rated if rated else 0.0,
        )

    @cached_property
    def gpu_seconds_bare(self) -> float:
        """Prefill of the whole trace without any cache."""
        inputs = self.simulator.trace.input_tokens.astype(np.float64)
        return float(self.prefill_s(np.zeros_like(inputs), inputs).sum())

    def prefill_s(self, cached: F64, inputs: F64) -> F64:
        """GPU seconds of the tokens behind the cached ones, by request; deep ones attend to more and cost more."""
        rest = np.maximum(inputs - cached, 1.0)
        return self.model.prefill_flops(cached, rest) / (self.hardware.gpu_flops * self.hardware.utilization)

    def grid(self) -> list[tuple[float, float]]:
        """(DRAM, NVMe) sizes to try."""
        hw = self.hardware
        return [(d * hw.dram_gib_max, n * hw.nvme_gib_max) for d in DRAM_STEPS for n in NVME_STEPS]

    def evaluate(self, tick: Callable[[], None] | None = None) -> Iterator[Mix]:
        """All mixes of the grid."""
        for dram_gib, nvme_gib in self.grid():
            yield self.mix(dram_gib, nvme_gib)
            if tick is not None:
                tick()
