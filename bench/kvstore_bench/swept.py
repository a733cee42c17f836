"""A sweep: simulate the points of all cases, a table on the terminal, rows, a chart and tables on a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from kvstore_bench.capacities import parse_capacity
from kvstore_bench.lossview import UNITS, Pair, loss_rows, loss_section, loss_tables, main_policy, sentences
from kvstore_bench.points import Kept, Point
from kvstore_bench.report import Page, Series, line_chart, stacked_chart
from kvstore_bench.residency import CLASSES, residency_columns
from kvstore_bench.rows import Row, write_json
from kvstore_bench.sweep import Simulator
from kvstore_bench.terminal import Asked, cases, describe, finished_points, out, progress
from kvstore_bench.traces.model import Trace


@dataclass(slots=True)
class Swept:
    """All points of one trace. `names`: capacities as they were asked for, parallel to `sizes` (blocks)."""

    simulator: Simulator
    points: list[Point]
    names: list[str]
    sizes: list[int]

    @property
    def trace(self) -> Trace:
        return self.simulator.trace

    @property
    def capacities(self) -> list[tuple[str, int]]:
        return list(zip(self.names, self.sizes, strict=True))

    def percent(self, name: str, size: int) -> float:
        """A capacity as % of the distinct blocks: as asked for, where it was asked for in %."""
        asked = name.replace("%", "").strip()
        return float(asked) if "%" in name else 100.0 * size / self.trace.num_blocks

    def at(self, policy: str, size: int) -> Point:
        """The point of a policy, simulated now where it wasn't asked for."""
        found = (p for p in self.points if p.policy == policy and p.capacity == size)
        return next(found, None) or self.simulator.point(policy, size)


def sweep_command(
    traces: list[Path],
    policies: list[str],
    capacities: list[str],
    asked: Asked,
    losses: bool,
    json: Path | None,
    html: Path | None,
) -> None:
    """Points of all cases of all traces."""
    page = Page("Hit rates", "tokens saved by policy and capacity; simulated, no warm-up") if html is not None else None
    rows: list[Row] = []
    with finished_points(asked.resume) as kept:
        for path in traces:
            for trace in cases(path, asked):
                swept = sweep_trace(trace, policies, capacities, asked, kept)
                print_points(swept)
                rows += point_rows(swept)
                if losses:
                    rows += show_losses(swept)
                if page is not None:
                    add_to_page(page, swept)
    if json is not None:
        write_json(json, rows)
    if html is not None and page is not None:
        html.write_text(page.render(), encoding="utf-8")


def sweep_trace(trace: Trace, policies: list[str], capacities: list[str], asked: Asked, kept: Kept | None) -> Swept:
    """All points of one trace, with a bar. A capacity named twice counts once."""
    names = list(dict.fromkeys(capacities))
    sizes = [parse_capacity(text, trace.num_blocks, asked.token_bytes * trace.block_tokens) for text in names]
    simulator = Simulator(trace, kept, asked.model)
    points = []
    with progress() as bar:
        task = bar.add_task(f"simulating {trace.name}", total=len(policies) * len(sizes))
        for point in simulator.sweep(policies, sizes):
            points.append(point)
            bar.advance(task)
    return Swept(simulator, points, names, sizes)


def by_policy(swept: Swept) -> dict[str, list[Point]]:
    """Points of each policy in the order of capacities."""
    found: dict[str, list[Point]] = {}
    for point in swept.points:
        found.setdefault(point.policy, []).append(point)
    return found


def point_rows(swept: Swept) -> list[Row]:
    """Two figures a point, with a model three."""
    return [
        Row(f"{swept.trace.name}/{policy}/{name}/{what}", value, "share", note="from the resume file" if p.kept else "")
        for policy, points in by_policy(swept).items()
        for name, p in zip(swept.names, points, strict=True)
        for what, value in _figures(swept, p)
    ]


def _figures(swept: Swept, point: Point) -> Iterator[tuple[str, float]]:
    yield "tokens", point.tokens
    yield "blocks", point.blocks
    if swept.simulator.model is not None:
        yield "compute", swept.simulator.compute(point.runs)


def print_points(swept: Swept) -> None:
    """Policies down, capacities across; tokens saved, and blocks hit in brackets."""
    trace = swept.trace
    out.print(f"{trace.name}: {describe(trace)}", markup=False, highlight=False)
    model = swept.simulator.model
    what = "tokens saved (blocks hit)" if model is None else f"tokens saved (FLOPs of {model.name}'s prefill saved)"
    table = Table(caption=caption(what, swept.points))
    table.add_column("policy", no_wrap=True)
    for name in swept.names:
        table.add_column(name, justify="right")
    table.add_column("M refs/s", justify="right")
    for policy, points in by_policy(swept).items():
        timed = [point.seconds for point in points if point.seconds > 0]
        rate = f"{trace.num_references / min(timed) / 1e6:.3g}" if timed else "-"
        cells = []
        for p in points:
            other = p.blocks if model is None else swept.simulator.compute(p.runs)
            cells.append(f"{p.tokens:.1%} ({other:.1%}){'*' if p.kept else ''}")
        table.add_row(policy, *cells, rate)
    out.print(table)


def caption(text: str, points: list[Point]) -> str:
    """What the figures are, and what a star means where there is one."""
    return f"{text}\n* from an earlier run" if any(point.kept for point in points) else text


def loss_pairs(swept: Swept) -> list[Pair]:
    """The main policy and the optimum at every capacity."""
    policy, lost = main_policy([point.policy for point in swept.points]), swept.simulator.lost
    return [
        Pair(name, policy, lost(swept.at(policy, size)), lost(swept.at("optimum", size)))
        for name, size in swept.capacities
    ]


def show_losses(swept: Swept) -> list[Row]:
    """Words and tables on the terminal; gives the rows."""
    pairs = loss_pairs(swept)
    for text in sentences(pairs):
        out.print(f"- {text}", markup=False, highlight=False)
    out.print(UNITS, highlight=False)
    for table in loss_tables(pairs):
        out.print(table, "")
    return loss_rows(swept.trace.name, pairs)


def _curves(page: Page, swept: Swept) -> None:
    shares = {size: swept.percent(name, size) for name, size in swept.capacities}
    found = by_policy(swept).items()
    series = [Series(policy, [(shares[p.capacity], p.tokens) for p in points]) for policy, points in found]
    page.svg(line_chart(series, "capacity, % of the distinct blocks (logarithmic)"))
    header = ["policy", *(name if "%" in name else f"{name} ({shares[s]:.3g} %)" for name, s in swept.capacities)]
    page.table(header, [[s.name, *(f"{y:.1%}" for _, y in s.points)] for s in series])
    page.text(
        "optimum: Belady's rule with bypass, which no policy can beat. infinite: the ceiling of any cache. "
        "Only the leading run of a request's blocks counts."
    )


def add_to_page(page: Page, swept: Swept) -> None:
    """The page with this trace added."""
    trace, sizes = swept.trace, swept.sizes
    page.heading(trace.name)
    page.text(describe(trace))
    _curves(page, swept)
    loss_section(page, loss_pairs(swept))
    middle = sorted(sizes)[len(sizes) // 2]
    page.text(
        f"Whose blocks fill a tier of {middle:,} blocks over time, by what their session is doing then "
        "(policy session, ends of sessions signalled, replayed through the service's own machine):"
    )
    columns = residency_columns(trace, "session", middle)
    page.svg(stacked_chart(CLASSES, columns, "time", "Whose blocks fill the tier over time"))
    for note in trace.notes:
        page.text(f"Note: {note}.")
