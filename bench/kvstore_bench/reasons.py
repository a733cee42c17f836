"""Which mix to take, and why, in words for a reader who wasn't there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore_bench.hardware import GIB
from kvstore_bench.losses import FIRST_SIGHT, GAPS
from kvstore_bench.lossview import PHRASES
from kvstore_bench.plan import Mix, Plan, Planner, closest
from kvstore_bench.report import short
from kvstore_bench.sweep import BY_TIME

DEEP_TOKENS = 100_000
WORTH_SAYING = 0.001
"""Share of all input tokens."""


def decide(mixes: list[Mix], planner: Planner, target_p99: float) -> Plan:
    """The cheapest mix that meets the target without wearing the drives out, and the reasons."""
    fit = [m for m in mixes if m.ttft_p99 <= target_p99 and m.nvme_endurance_used <= 1.0]
    best = min(fit, key=lambda m: (m.usd_per_million_tokens, m.usd_month), default=None)
    return Plan(mixes, best, target_p99, reasons(mixes, best, planner, target_p99))


def reasons(mixes: list[Mix], best: Mix | None, planner: Planner, target_p99: float) -> list[str]:
    """The choice (or that there is none) first, then what it rests on."""
    trace, hw = planner.simulator.trace, planner.hardware
    ceiling = planner.simulator.point("infinite", trace.num_blocks).tokens
    bare = next(m for m in mixes if not m.dram_gib and not m.nvme_gib)
    chosen = best or closest(mixes)
    return [
        _closest(mixes, target_p99) if best is None else _choice(best, bare, target_p99),
        *_catches(planner, chosen),
        *([] if best is None else [_wear(best) if best.nvme_gib else _without_nvme(mixes, best)]),
        f"HBM alone ({hw.hbm_gib:,.0f} GiB) saves {bare.tokens_saved:.1%} of the tokens and "
        f"{bare.gpu_seconds_saved:,.0f} of the {planner.gpu_seconds_bare:,.0f} GPU seconds that prefill takes without "
        f"any cache; TTFT p99 is then {bare.ttft_p99:.2f} s.",
        f"However large the cache, at most {ceiling:.1%} of the {trace.total_tokens:,} input tokens can be saved: "
        "the rest is new text.",
        _depth(planner),
        *_by_time(planner, bare, chosen),
        _sizes(planner),
    ]


def _sizes(planner: Planner) -> str:
    trace, model = planner.simulator.trace, planner.model
    distinct_gib = trace.num_blocks * planner.block_bytes / GIB
    return (
        f"One token's KV is {model.kv_bytes_per_token / 1024:.1f} KiB ({model.basis}); the trace's "
        f"{trace.num_blocks:,} distinct blocks of {trace.block_tokens} tokens are {short(distinct_gib)} GiB."
    )


def _depth(planner: Planner) -> str:
    """Why blocks deep in a context are worth more."""
    tokens = float(planner.simulator.trace.block_tokens)
    first, deep = planner.prefill_s(np.array([0.0, DEEP_TOKENS]), np.array([tokens, DEEP_TOKENS + tokens])) * 1e3
    return (
        f"To compute one block of {tokens:.0f} tokens takes {first:.2f} ms of the GPU at the start of a context and "
        f"{deep:.2f} ms behind {DEEP_TOKENS:,} tokens ({deep / first:.1f} times as long): long contexts gain most."
    )


def _by_time(planner: Planner, bare: Mix, mix: Mix) -> Iterator[str]:
    """What the other way of counting would give, as engine and service can be told to."""
    setting = f"`recompute_doubles_at = {planner.model.doubles_at}` in the configuration of engine and service"
    if planner.policy == "session":
        other = Planner(planner.simulator, planner.model, planner.hardware, "session-time")
        alone, chosen = (other.mix(m.dram_gib, m.nvme_gib) for m in (bare, mix))
        yield (
            f"With {setting} blocks count by the time to compute them: HBM alone then saves "
            f"{alone.gpu_seconds_saved:,.0f} GPU seconds instead of {bare.gpu_seconds_saved:,.0f} (and "
            f"{alone.tokens_saved:.1%} of the tokens instead of {bare.tokens_saved:.1%}), this mix "
            f"{chosen.gpu_seconds_saved:,.0f} instead of {mix.gpu_seconds_saved:,.0f}."
        )
    elif planner.policy in BY_TIME:
        yield f"Blocks are counted by the time to compute them: that is {setting}."


def _choice(best: Mix, bare: Mix, target_p99: float) -> str:
    return (
        f"{best.dram_gib:,.0f} GiB DRAM and {best.nvme_gib:,.0f} GiB NVMe is the cheapest mix with p99 <= "
        f"{target_p99:.2f} s: it saves {best.tokens_saved:.1%} of the tokens and {best.gpu_seconds_saved:,.0f} GPU "
        f"seconds, for {best.usd_month:,.0f} USD a month of memory and flash; {best.usd_per_million_tokens:.4f} USD "
        f"per million input tokens against {bare.usd_per_million_tokens:.4f} with HBM alone."
    )


def _closest(mixes: list[Mix], target_p99: float) -> str:
    near = closest(mixes)
    worn = f" but writes {near.nvme_endurance_used:.3g}x what its drives endure" if near.nvme_endurance_used > 1 else ""
    sound = [m for m in mixes if m.nvme_endurance_used <= 1]
    best = closest(sound)
    other = f" (without wearing drives out: {best.dram_gib:,.0f} GiB DRAM, {best.ttft_p99:.2f} s)" if worn else ""
    return (
        f"No mix meets a p99 of {target_p99:.2f} s. Closest, {near.dram_gib:,.0f} GiB DRAM and {near.nvme_gib:,.0f} "
        f"GiB NVMe, reaches {near.ttft_p99:.2f} s{worn}{other}; the rest is prefill of tokens no cache has seen, "
        "which only faster GPUs shorten."
    )


def _catches(planner: Planner, mix: Mix) -> list[str]:
    """What the memory beside HBM is for, from the causes of the misses it avoids."""
    small, large = planner.lost(planner.hardware.hbm_gib), planner.lost(planner.sizes(mix.dram_gib, mix.nvme_gib)[-1])
    gain = [small.share(c) - large.share(c) for c in range(FIRST_SIGHT)]
    most = sorted((c for c in range(FIRST_SIGHT) if gain[c] >= WORTH_SAYING), key=lambda c: -gain[c])[:3]
    if not most:
        return []
    parts = "; ".join(f"{gain[c]:.1%} {_when(c)}" for c in most)
    return [
        f"What {mix.dram_gib:,.0f} GiB DRAM and {mix.nvme_gib:,.0f} GiB NVMe add to HBM is {sum(gain):.1%} of the "
        f"input tokens. The largest parts: {parts}."
    ]


def _when(cause: int) -> str:
    return f"for {PHRASES[cause // len(GAPS)]}, last used {GAPS[cause % len(GAPS)]} before"


def _wear(best: Mix) -> str:
    return (
        f"NVMe takes {best.nvme_writes_tib_day:.1f} TiB of writes a day, {best.nvme_endurance_used:.0%} of what it "
        "is rated for."
    )


def _without_nvme(mixes: list[Mix], best: Mix) -> str:
    """Why no NVMe is in the best mix, from the mixes that have it."""
    same = [m for m in mixes if m.dram_gib == best.dram_gib and m.nvme_gib]
    if not same:
        return "The node takes no NVMe."
    gain = max(m.tokens_saved for m in same) - best.tokens_saved
    worn = min(m.nvme_endurance_used for m in same)
    wear = f", and every size would be worn out early ({worn:.3g}x its rating at best)" if worn > 1.0 else ""
    return f"NVMe beside that much DRAM would save {gain:.1%} more of the tokens at most{wear}: not the cheapest way."
