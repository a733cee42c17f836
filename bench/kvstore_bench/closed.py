"""`compare --gap-closed`: the share of the distance from leaf-first LRU to the optimum, and how much it swings between
start seeds and halves of the sessions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.table import Table

from kvstore_bench.capacities import parse_capacity
from kvstore_bench.points import Kept, Point
from kvstore_bench.rows import Row, exit_code, write_json
from kvstore_bench.sweep import Simulator, gap_closed
from kvstore_bench.swept import Swept, caption, show_losses
from kvstore_bench.terminal import Asked, cases, describe, finished_points, out, progress
from kvstore_bench.traces.model import Trace

NEVER_BELOW = -0.003
"""Share of tokens by which `session` may fall behind leaf-first LRU."""
POLICIES = ("leaf-lru", "session", "session+ends", "optimum")
HEADS = ("capacity", "leaf-lru", "session", "+ends", "optimum", "closed", "closed, +ends")


@dataclass(slots=True)
class Line:
    """One capacity of one case: tokens saved by each of POLICIES, and the shares closed (None: no distance)."""

    case: str
    capacity: str
    tokens: list[float]
    closed: float | None
    closed_ends: float | None
    kept: bool


def gap_command(traces: list[Path], capacities: list[str], asked: Asked, losses: bool, json: Path | None) -> None:
    """A table for each case, and a summary where a trace has several."""
    rows: list[Row] = []
    names = list(dict.fromkeys(capacities))
    with finished_points(asked.resume) as kept:
        for path in traces:
            lines: list[Line] = []
            for trace in cases(path, asked):
                swept, found = _case(trace, names, asked.token_bytes, kept)
                lines += found
                rows += [row for line in found for row in _rows(line)]
                if losses:
                    rows += show_losses(swept)
            if len({line.case for line in lines}) > 1:
                _summary(path.name, names, lines)
    if json is not None:
        write_json(json, rows)
    if code := exit_code(rows):
        raise typer.Exit(code)


def _case(trace: Trace, names: list[str], token_bytes: int, kept: Kept | None) -> tuple[Swept, list[Line]]:
    simulator = Simulator(trace, kept)
    sizes = [parse_capacity(text, trace.num_blocks, token_bytes * trace.block_tokens) for text in names]
    swept = Swept(simulator, [], names, sizes)
    lines = []
    with progress() as bar:
        task = bar.add_task(f"simulating {trace.name}", total=len(POLICIES) * len(sizes))
        for text, size in zip(names, sizes, strict=True):
            for policy in POLICIES:
                swept.points.append(simulator.point(policy, size))
                bar.advance(task)
            lines.append(_line(trace.name, text, swept))
    _print(trace, lines, swept.points)
    return swept, lines


def _line(case: str, text: str, swept: Swept) -> Line:
    points = swept.points[-len(POLICIES) :]
    lru, mine, ends, best = values = [point.tokens for point in points]
    shares = gap_closed(lru, best, mine), gap_closed(lru, best, ends)
    return Line(case, text, values, *shares, kept=all(point.kept for point in points))


def _print(trace: Trace, lines: list[Line], points: list[Point]) -> None:
    out.print(f"{trace.name}: {describe(trace)}", markup=False, highlight=False)
    table = Table(caption=caption("tokens saved, then share of the distance closed", points))
    for head in HEADS:
        table.add_column(head, justify="right")
    for line in lines:
        values = (f"{value:.1%}" for value in line.tokens)
        mark = "*" if line.kept else ""
        table.add_row(line.capacity + mark, *values, percent(line.closed), percent(line.closed_ends))
    out.print(table)


def _summary(name: str, names: list[str], lines: list[Line]) -> None:
    """Share closed of every case by capacity, then mean and swing."""
    cases = list(dict.fromkeys(line.case for line in lines))
    prefix = len(cases[0].split(", ")[0])
    out.print(f"{name}: share closed, by case (with ends signalled in brackets)", markup=False, highlight=False)
    table = Table()
    table.add_column("case")
    for text in names:
        table.add_column(text, justify="right")
    for case in cases:
        mine = [line for line in lines if line.case == case]
        cells = (f"{percent(line.closed)} ({percent(line.closed_ends)})" for line in mine)
        table.add_row(case[prefix:].removeprefix(", ") or "all", *cells)
    table.add_section()
    columns = [[line for line in lines if line.capacity == text] for text in names]
    table.add_row("mean", *(_two(column, mean) for column in columns))
    table.add_row("from - to", *(_two(column, swing) for column in columns))
    out.print(table)


def _two(column: list[Line], text: Callable[[list[float | None]], str]) -> str:
    return f"{text([line.closed for line in column])} ({text([line.closed_ends for line in column])})"


def mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return percent(sum(known) / len(known)) if known else "-"


def swing(values: list[float | None]) -> str:
    known = [100 * value for value in values if value is not None]
    return f"{min(known):.0f}-{max(known):.0f}" if known else "-"


def _rows(line: Line) -> list[Row]:
    lru, mine = line.tokens[:2]
    name, note = f"{line.case}/{line.capacity}", "from the resume file" if line.kept else ""
    return [
        Row(f"{name}/closed", line.closed, "share", note=note),
        Row(f"{name}/closed+ends", line.closed_ends, "share", note=note),
        Row(f"{name}/session-minus-lru", mine - lru, "share", goal=NEVER_BELOW, note=note),
    ]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
