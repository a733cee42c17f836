"""Showing a plan: a table on the terminal, rows, and a page for the reader who has to sign."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvstore_bench.appendix import HEAD as APPENDIX_HEAD
from kvstore_bench.appendix import appendix
from kvstore_bench.plan import Mix, Plan, Planner
from kvstore_bench.report import Page, Series, line_chart, stacked_chart
from kvstore_bench.rows import Row, duration, row

HEAD = ("DRAM", "NVMe", "saved", "GPU s", "p50 s", "p99 s", "$/month", "$/Mtok", "$/sess.", "wear")
SLICES = 48


def cells(mix: Mix) -> list[str]:
    """One mix as texts, in the order of HEAD."""
    return [
        f"{mix.dram_gib:,.0f}",
        f"{mix.nvme_gib:,.0f}",
        f"{mix.tokens_saved:.1%}",
        f"{mix.gpu_seconds_saved:,.0f}",
        f"{mix.ttft_p50:.2f}",
        f"{mix.ttft_p99:.2f}",
        f"{mix.usd_month:,.0f}",
        f"{mix.usd_per_million_tokens:.4f}",
        f"{mix.usd_per_session:.4f}",
        f"{mix.nvme_endurance_used:.2g}x" if mix.nvme_endurance_used < 100 else f"{mix.nvme_endurance_used:,.0f}x",
    ]


def print_plan(out: Console, plan: Plan, planner: Planner, about: str) -> None:
    """Table and reasons."""
    out.print(f"{planner.simulator.trace.name}: {about}", markup=False, highlight=False)
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption="DRAM, NVMe: GiB. GPU s: seconds of prefill saved. wear: SSD writes over their rating.",
    )
    for head in HEAD:
        table.add_column(head, justify="right", no_wrap=True)
    for mix in plan.mixes:
        table.add_row(*cells(mix), style="bold green" if mix is plan.best else None)
    out.print(table)
    for reason in plan.reasons:
        out.print(f"- {reason}", markup=False, highlight=False)


UNITS = {
    "dram_gib": "GiB",
    "nvme_gib": "GiB",
    "gpu_seconds": "s",
    "gpu_seconds_saved": "s",
    "ttft_p50": "s",
    "ttft_p99": "s",
    "usd_month": "USD",
    "usd_per_million_tokens": "USD",
    "usd_per_session": "USD",
    "nvme_writes_tib_day": "TiB",
    "nvme_endurance_used": "x",
}


def plan_rows(plan: Plan) -> list[Row]:
    """All figures of the best mix (or of none), then of all mixes."""
    named = [("best", plan.best)] if plan.best is not None else []
    named += [(f"dram {mix.dram_gib:g} GiB, nvme {mix.nvme_gib:g} GiB", mix) for mix in plan.mixes]
    return [
        row(f"{name}/{field}", float(value), UNITS.get(field, "share"))
        for name, mix in named
        for field, value in asdict(mix).items()
    ]


def plan_page(plan: Plan, planner: Planner, about: str) -> Page:
    """The report."""
    trace, hw, model = planner.simulator.trace, planner.hardware, planner.model
    page = Page(f"Capacity plan: {trace.name}", f"{model.name} on {hw.name}, policy {planner.policy}. {about}.")
    page.heading("What to buy, and why")
    page.bullets(plan.reasons)
    page.heading("Mixes")
    page.table(HEAD, [cells(mix) for mix in plan.mixes], plan.mixes.index(plan.shown))
    page.heading("Tokens saved by cache size")
    page.svg(_curve(planner))
    chosen = plan.shown
    page.heading(f"Where tokens came from, with {chosen.dram_gib:,.0f} GiB DRAM and {chosen.nvme_gib:,.0f} GiB NVMe")
    page.svg(_sources(planner, chosen))
    page.heading("Inputs")
    page.text(
        "DRAM, NVMe: GiB. GPU s: seconds of prefill saved against no cache at all. wear: SSD writes a day over what "
        "the drives are rated for. TTFT is the time to compute and load one request alone, without queueing. GPU cost "
        "counts prefill only. Prices, bandwidths and endurance are assumptions until you give your own (--hardware "
        "FILE)."
    )
    given = [
        ["KV bytes per token", f"{model.kv_bytes_per_token:,} ({model.basis})"],
        ["active parameters", f"{model.active_params:.3g}"],
        ["target for TTFT p99", f"{plan.target_p99:g} s"],
    ]
    page.table(("input", "value"), given + [[k, _plain(v)] for k, v in asdict(hw).items()], words=True)
    page.heading("Appendix: where each number comes from")
    page.text(f"For the mix of {chosen.dram_gib:,.0f} GiB DRAM and {chosen.nvme_gib:,.0f} GiB NVMe; others alike.")
    page.table(APPENDIX_HEAD, appendix(planner, chosen), words=True)
    return page


def _plain(value: object) -> str:
    return f"{value:,.10g}" if isinstance(value, float) else str(value)


def _curve(planner: Planner) -> str:
    simulator = planner.simulator
    shares = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0)
    sizes = sorted({max(1, int(simulator.trace.num_blocks * share)) for share in shares})
    lines = []
    for name in dict.fromkeys(("infinite", "optimum", planner.policy, "leaf-lru")):
        points = [(round(s * planner.block_bytes / (1 << 30), 2), simulator.point(name, s).tokens) for s in sizes]
        lines.append(Series(name, points))
    return line_chart(lines, "cache, GiB (logarithmic)")


def _sources(planner: Planner, mix: Mix) -> str:
    trace = planner.simulator.trace
    hbm, dram, total = planner.found(mix.dram_gib, mix.nvme_gib)
    edges = np.linspace(0, float(trace.times_ns[-1]) + 1.0, SLICES + 1)
    which = np.clip(np.searchsorted(edges, trace.times_ns, side="right") - 1, 0, SLICES - 1)
    columns = []
    for number in range(SLICES):
        here = which == number
        tokens = float(trace.input_tokens[here].sum())
        parts = [float(part[here].sum()) * trace.block_tokens for part in (hbm, dram - hbm, total - dram)]
        shares = [part / tokens for part in parts] if tokens else [0.0, 0.0, 0.0]
        shares.append(max(0.0, 1.0 - sum(shares)) if tokens else 0.0)
        columns.append((duration(int(edges[number])), shares))
    return stacked_chart(["HBM", "DRAM", "NVMe", "computed"], columns, "since the first request")
