"""Rows of the check: one figure each, in the form that all bench commands share."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """A figure, the limit of the same run, their ratio, the goal, and whether it holds (None: nothing promised)."""

    name: str
    value: float | None
    unit: str
    limit: float | None = None
    ratio: float | None = None
    goal: float | None = None
    ok: bool | None = None


Sense = Literal["at least", "at most"]


def compared(
    name: str, value: float, unit: str, limit: float, goal: float | None = None, sense: Sense = "at least"
) -> Row:
    """A row whose goal is for value / limit."""
    ratio = value / limit if limit else None
    return Row(name, value, unit, limit, ratio, goal, _holds(ratio, goal, sense))


def plain(name: str, value: float, unit: str, goal: float | None = None, sense: Sense = "at most") -> Row:
    """A row whose goal is for the value itself."""
    return Row(name, value, unit, None, None, goal, _holds(value, goal, sense))


def _holds(figure: float | None, goal: float | None, sense: Sense) -> bool | None:
    if goal is None or figure is None:
        return None
    return figure >= goal if sense == "at least" else figure <= goal


@dataclass
class Results:
    """Rows, what was skipped and why, what broke; and the time that is left."""

    seconds: float
    rows: list[Row] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    def run(self, name: str, work: Callable[[], list[Row]], lasts_s: float = 0.0) -> None:
        """Do one item; whatever it raises is reported and the next item goes on. One that may last `lasts_s` begins
        that much earlier, or not at all."""
        spent = time.monotonic() - self.begun
        if spent + lasts_s > self.seconds:
            self.skip(name, f"the {self.seconds:.0f} s for this run were used up")
            return
        try:
            self.rows += work()
        except NotHere as error:
            self.skip(name, str(error))
        except AssertionError:
            raise
        except Exception as error:  # one broken item must not hide what the others say
            log.debug("%s broke", name, exc_info=True)
            self.broken.append((name, f"{type(error).__name__}: {error}"))

    def skip(self, name: str, why: str) -> None:
        """Name an item that this machine can't do."""
        self.skipped.append((name, why))

    @property
    def status(self) -> int:
        """0; 1 when a goal doesn't hold; 2 when something broke, so that the run says nothing."""
        if self.broken:
            return 2
        return int(any(row.ok is False for row in self.rows))

    def write(self, path: Path) -> None:
        """Rows as JSON; skipped and broken items are rows without a value."""
        missing = [Row(name, None, "", ok=None) for name, _ in self.skipped]
        missing += [Row(name, None, "", ok=False) for name, _ in self.broken]
        path.write_text(json.dumps([asdict(row) for row in self.rows + missing], indent=1) + "\n")

    def table(self) -> str:
        """For people."""
        lines = [f"{'':<58}{'value':>12} {'unit':<8}{'limit':>12}{'ratio':>11}{'goal':>8}  ok"]
        lines += [_line(row) for row in self.rows]
        lines += [f"skipped: {name}: {why}" for name, why in self.skipped]
        lines += [f"BROKEN:  {name}: {why}" for name, why in self.broken]
        return "\n".join(lines)


class NotHere(Exception):
    """This machine lacks what an item needs."""


def _line(row: Row) -> str:
    mark = {True: "yes", False: "NO", None: ""}[row.ok]
    figures = f"{_short(row.limit):>12}{_short(row.ratio):>11}{_short(row.goal):>8}"
    return f"{row.name:<58}{_short(row.value):>12} {row.unit:<8}{figures}  {mark}"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
