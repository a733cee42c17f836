"""Where each number of a plan comes from: its formula in words, and the inputs with their values.

What the table gives can be worked out again with a pocket calculator, except what is summed over requests; of those
the sums are given.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore_bench.hardware import GIB
from kvstore_bench.plan import DAY_S, MONTH_H, Mix, Planner

HEAD = ("number", "value", "formula in words", "inputs")


@dataclass(frozen=True, slots=True)
class Sums:
    """What a mix's figures are made of, over all requests."""

    found: int
    computed: int
    blocks: tuple[int, int, int]
    """Cache sizes in blocks: HBM, with DRAM, with NVMe."""


def sums(planner: Planner, mix: Mix) -> Sums:
    """Blocks found and computed with a mix."""
    hbm, dram, nvme = planner.sizes(mix.dram_gib, mix.nvme_gib)
    found = int(planner.found(mix.dram_gib, mix.nvme_gib)[-1].sum())
    blocks = planner.blocks(hbm), planner.blocks(dram), planner.blocks(nvme)
    return Sums(found, planner.simulator.trace.num_references - found, blocks)


def appendix(planner: Planner, mix: Mix) -> list[list[str]]:
    """Lines of the table for one mix."""
    return [*_of_model(planner), *_of_tokens(planner, mix), *_of_time(planner, mix), *_of_money(planner, mix)]


def _of_model(planner: Planner) -> list[list[str]]:
    model, trace = planner.model, planner.simulator.trace
    return [
        ["KV bytes per token", f"{model.kv_bytes_per_token:,}", "from the model's config", model.basis],
        [
            "bytes of a block",
            f"{planner.block_bytes:,}",
            "KV bytes per token x tokens per block",
            f"{model.kv_bytes_per_token:,}; {trace.block_tokens} (trace)",
        ],
    ]


def _of_tokens(planner: Planner, mix: Mix) -> list[list[str]]:
    trace, hw, found = planner.simulator.trace, planner.hardware, sums(planner, mix)
    total = trace.total_tokens
    return [
        [
            "blocks in HBM; with DRAM; with NVMe",
            "; ".join(f"{n:,}" for n in found.blocks),
            "GiB x 2^30 / bytes of a block, at most the trace's distinct blocks",
            f"{hw.hbm_gib:,.0f}, {mix.dram_gib:,.0f}, {mix.nvme_gib:,.0f} GiB; {trace.num_blocks:,} distinct",
        ],
        [
            "blocks found",
            f"{found.found:,}",
            f"leading blocks of all requests that a cache of all tiers' size finds, policy {planner.policy}",
            f"{trace.num_references:,} block references (trace)",
        ],
        [
            "tokens saved",
            f"{mix.tokens_saved:.1%}",
            "tokens of the blocks found (a partial last block counts what it holds) / input tokens",
            f"{mix.tokens_saved * total:,.0f}; {total:,} (trace)",
        ],
    ]


def _of_time(planner: Planner, mix: Mix) -> list[list[str]]:
    model, hw = planner.model, planner.hardware
    speed = f"{hw.gpu_flops:.3g} FLOP/s x {hw.utilization:g} (hardware)"
    return [
        [
            "prefill seconds of a request",
            "by request",
            "(2 x active parameters x new tokens + 2 x layers x attention width x new tokens x (cached + new / 2)) "
            "/ (FLOP/s x utilization); at least one token is new",
            f"{model.active_params:.4g}; {model.num_layers}; {model.attention_width:,} (model); {speed}",
        ],
        [
            "GPU seconds",
            f"{mix.gpu_seconds:,.0f}",
            "sum of the prefill seconds of all requests",
            "as above, with what this mix finds as cached",
        ],
        [
            "GPU seconds saved",
            f"{mix.gpu_seconds_saved:,.0f}",
            "the same sum with nothing cached, less GPU seconds",
            f"{planner.gpu_seconds_bare:,.0f} - {mix.gpu_seconds:,.0f}",
        ],
        [
            "TTFT p50; p99",
            f"{mix.ttft_p50:.3f} s; {mix.ttft_p99:.2f} s",
            "percentiles over requests of: prefill seconds + bytes from DRAM / its bandwidth + bytes from NVMe / its "
            "bandwidth + its latency where NVMe is read; nothing waits for another request",
            f"{hw.dram_bandwidth / 1e9:g} GB/s; {hw.nvme_bandwidth / 1e9:g} GB/s; {hw.nvme_latency_s * 1e3:g} ms",
        ],
    ]


def _of_money(planner: Planner, mix: Mix) -> list[list[str]]:
    trace, hw = planner.simulator.trace, planner.hardware
    hours = planner.duration_s / 3600.0
    gpu, memory = mix.gpu_seconds * hw.gpu_usd_hour / 3600.0, mix.usd_month * hours / MONTH_H
    written = mix.nvme_writes_tib_day * planner.duration_s / DAY_S
    rated = mix.nvme_gib * GIB * hw.nvme_writes_per_day / (1 << 40)
    return [
        [
            "USD a month",
            f"{mix.usd_month:,.2f}",
            "DRAM GiB x price + NVMe GiB x price",
            f"{mix.dram_gib:,.0f} x {hw.dram_usd_gib_month:g}; {mix.nvme_gib:,.0f} x {hw.nvme_usd_gib_month:g}",
        ],
        [
            "cost of the trace, USD",
            f"{gpu + memory:,.4f}",
            f"GPU seconds / 3600 x GPU price + USD a month x hours of the trace / {MONTH_H:g}",
            f"{hw.gpu_usd_hour:g} USD/h: {gpu:,.4f}; {hours:,.2f} h: {memory:,.4f}",
        ],
        [
            "USD per million input tokens",
            f"{mix.usd_per_million_tokens:.4f}",
            "cost of the trace / input tokens x 1,000,000",
            f"{gpu + memory:,.4f}; {trace.total_tokens:,}",
        ],
        [
            "USD per finished session",
            f"{mix.usd_per_session:.4f}",
            "cost of the trace / its sessions (each is finished with its last request)",
            f"{gpu + memory:,.4f}; {trace.num_sessions:,}",
        ],
        [
            "SSD writes a day, TiB",
            f"{mix.nvme_writes_tib_day:,.2f}",
            "blocks computed (each is written once; 0 without NVMe) x bytes of a block, per day of the trace",
            f"{sums(planner, mix).computed:,} blocks; {written:,.2f} TiB in {hours:,.2f} h",
        ],
        [
            "wear (endurance used)",
            f"{mix.nvme_endurance_used:.3g}x",
            "SSD writes a day / (NVMe TiB x rated drive writes a day)",
            f"{mix.nvme_writes_tib_day:,.2f}; {rated:,.2f} TiB a day ({hw.nvme_writes_per_day:g} drive writes)",
        ],
    ]
