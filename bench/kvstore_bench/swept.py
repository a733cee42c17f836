"""Showing a sweep: a table on the terminal, a chart and a table on a page."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from kvstore_bench.report import Page, Series, line_chart, stacked_chart
from kvstore_bench.residency import CLASSES, residency_columns
from kvstore_bench.sweep import Point, Simulator
from kvstore_bench.traces.model import Trace


def sweep_points(trace: Trace, policies: list[str], sizes: list[int], tick: Callable[[], None]) -> list[Point]:
    """All points, without the runs of requests."""
    points = []
    for point in Simulator(trace).sweep(policies, sizes):
        points.append(Point(point.policy, point.capacity, point.blocks, point.tokens, point.seconds))
        tick()
    return points


def print_points(out: Console, trace: Trace, about: str, points: list[Point], names: list[str]) -> None:
    """Policies down, capacities across; tokens saved, and blocks hit in brackets."""
    table = Table(title=f"{trace.name}: {about}", title_justify="left", caption="tokens saved (blocks hit)")
    table.add_column("policy")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("M refs/s", justify="right")
    for policy in dict.fromkeys(point.policy for point in points):
        mine = [point for point in points if point.policy == policy]
        timed = [point.seconds for point in mine if point.seconds > 0]
        rate = f"{trace.num_references / min(timed) / 1e6:.3g}" if timed else "-"
        table.add_row(policy, *(f"{p.tokens:.1%} ({p.blocks:.1%})" for p in mine), rate)
    out.print(table)


def sweep_page(page: Page | None, trace: Trace, about: str, points: list[Point], sizes: list[int]) -> Page:
    """The page with this trace added."""
    page = page or Page("Hit rates", "tokens saved by policy and capacity; simulated, no warm-up")
    page.heading(trace.name)
    page.text(about)
    series: dict[str, Series] = {}
    for point in points:
        share = 100.0 * point.capacity / trace.num_blocks
        series.setdefault(point.policy, Series(point.policy)).points.append((round(share, 3), point.tokens))
    page.svg(line_chart(list(series.values()), "capacity, % of the distinct blocks (logarithmic)"))
    header = ["policy", *(f"{100.0 * size / trace.num_blocks:.3g} %" for size in sizes)]
    rows = [[name, *(f"{y:.1%}" for _, y in one.points)] for name, one in series.items()]
    page.table(header, rows)
    page.text(
        "optimum: Belady's rule with bypass, which no policy can beat. infinite: the ceiling of any cache. "
        "Only the leading run of a request's blocks counts."
    )
    middle = sorted(sizes)[len(sizes) // 2]
    page.text(
        f"Whose blocks fill a tier of {middle:,} blocks over time, by what their session is doing then "
        "(policy session, ends of sessions signalled, replayed through the service's own machine):"
    )
    columns = residency_columns(trace, "session", middle)
    page.svg(stacked_chart(CLASSES, columns, "time", "Whose blocks fill the tier over time"))
    for note in trace.notes:
        page.text(f"Note: {note}.")
    return page
