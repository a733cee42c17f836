"""What every measurement ends in: rows of one form, as a table for people and a list for machines.

`{"name", "value", "unit", "limit", "ratio", "goal", "ok"}`: the figure, the limit measured in the same run (or null),
value / limit, the goal for the ratio (or for the value where there is no limit), and whether it holds (null where
nothing is promised). What could not be measured has no value, and a `note` says why.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

EXIT_OK, EXIT_MISSED, EXIT_INVALID = 0, 1, 2


MEASURED = ("s", "ms", "us", "GB/s", "GiB/s", "MB/s", "share", "x", "tokens/s", "USD", "times", "")
"""Units of what is measured rather than counted: always with decimals."""


def figure(value: float, unit: str) -> str:
    """A value as people read it: counts whole, measured values with two decimals."""
    return f"{value:,.0f}" if unit not in MEASURED and float(value).is_integer() else f"{value:.2f}"


def duration(time_ns: int) -> str:
    """Hours, or minutes below one."""
    hours = time_ns / 3.6e12
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"


@dataclass(frozen=True)
class Row:
    """One figure. `lower_is_better` turns the goal round: then it's a maximum."""

    name: str
    value: float | None
    unit: str
    limit: float | None = None
    goal: float | None = None
    lower_is_better: bool = False
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """value / limit."""
        return self.value / self.limit if self.limit and self.value is not None else None

    @property
    def text(self) -> str:
        """Value and unit, or why there is none."""
        return f"{figure(self.value, self.unit)} {self.unit}" if self.value is not None else self.note

    @property
    def ok(self) -> bool | None:
        """Whether the goal holds; None without one."""
        if self.goal is None or self.value is None:
            return None
        judged = self.ratio if self.ratio is not None else self.value
        return judged <= self.goal if self.lower_is_better else judged >= self.goal

    def as_json(self) -> dict[str, object]:
        """The form that all benches share."""
        found = {k: v for k, v in asdict(self).items() if k != "lower_is_better" and (k != "note" or v)}
        return {**found, "ratio": self.ratio, "ok": self.ok}


def row(name: str, value: float | None, unit: str, *, limit: float | None = None, goal: float | None = None) -> Row:
    """A row by keywords."""
    return Row(name, value, unit, limit, goal)


def show(console: Console, title: str, rows: Sequence[Row]) -> None:
    """Print the table."""
    table = Table(title=title)
    for name in ("path", "achieved", "limit", "ratio", "goal", ""):
        table.add_column(name, justify="left" if name in ("path", "") else "right")
    for row in rows:
        limit = "" if row.limit is None else figure(row.limit, row.unit)
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        goal = "" if row.goal is None else f"{'<=' if row.lower_is_better else '>='} {_goal(row)}"
        mark = {True: "[green]ok[/]", False: "[red]missed[/]", None: ""}[row.ok]
        table.add_row(row.name, row.text, limit, ratio, goal, mark)
    console.print(table)


def _goal(row: Row) -> str:
    """A goal stands for a ratio where there is a limit, else for a value."""
    return figure(row.goal or 0.0, "" if row.limit is not None else row.unit)


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Write the list for machines."""
    path.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")


def exit_status(rows: Sequence[Row]) -> int:
    """1 when a goal doesn't hold."""
    return EXIT_MISSED if any(row.ok is False for row in rows) else EXIT_OK


exit_code = exit_status
"""The same, by another name."""
