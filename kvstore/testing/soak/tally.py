"""What a soak has done and found; the table for people and the rows for machines."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

DONE = (
    "operations",
    "refused",
    "blocks_written",
    "blocks_restored",
    "blocks_verified",
    "service_kills",
    "client_kills",
)
MUST_BE_ZERO = (
    "wrong_bytes_blocks",
    "durable_blocks_lost",
    "leaked_slots",
    "leaked_leases",
    "leaked_operations",
    "leaked_records",
    "leaked_descriptors",
    "leaked_shared_memory",
    "broken_invariants",
    "unexpected_errors",
)


@dataclass
class Tally:
    """Thread-safe counts. `faults` is by kind; `problems` are the first texts of what must not be."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Name -> (value, goal): figures that must reach a goal."""
    problems: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, count: int = 1) -> None:
        """Count something done."""
        with self._lock:
            self.counts[name] += count

    def fault(self, kind: str, count: int = 1) -> None:
        """Count injected faults."""
        with self._lock:
            self.faults[kind] += count

    def bad(self, name: str, count: int, text: str) -> None:
        """Count something that must not be; `name` is one of MUST_BE_ZERO."""
        assert name in MUST_BE_ZERO
        if count:
            with self._lock:
                self.counts[name] += count
                if len(self.problems) < 20:
                    self.problems.append(f"{name}: {text}")

    @property
    def num_faults(self) -> int:
        """Injected so far."""
        return sum(self.faults.values())

    @property
    def ok(self) -> bool:
        """Nothing that must be zero isn't, and every ratio reaches its goal."""
        return not any(self.counts[n] for n in MUST_BE_ZERO) and all(v >= goal for v, goal in self.ratios.values())

    def rows(self) -> list[dict[str, Any]]:
        """One row a figure: name, value, unit, limit, ratio, goal, ok."""

        def row(
            name: str, value: float, unit: str, goal: float | None = None, ok: bool | None = None
        ) -> dict[str, Any]:
            return {"name": name, "value": value, "unit": unit, "limit": None, "ratio": None, "goal": goal, "ok": ok}

        done = [row(n, self.counts[n], "count") for n in DONE]
        faults = [row(f"fault_{kind}", count, "count") for kind, count in sorted(self.faults.items()) if count]
        zero = [row(n, self.counts[n], "count", 0, self.counts[n] == 0) for n in MUST_BE_ZERO]
        ratios = [row(n, v, "ratio", goal, v >= goal) for n, (v, goal) in self.ratios.items()]
        return [*done, row("faults_injected", self.num_faults, "count"), *faults, *ratios, *zero]

    def table(self) -> Table:
        """For people."""
        table = Table(title="soak")
        for column in ("figure", "value", "must be", ""):
            table.add_column(column, justify="left" if column == "figure" else "right")
        for row in self.rows():
            goal = "" if row["goal"] is None else f"{'>= ' if row['goal'] else ''}{row['goal']:g}"
            mark = {True: "ok", False: "[red]NO", None: ""}[row["ok"]]
            value = row["value"]
            table.add_row(row["name"], f"{value:,}" if isinstance(value, int) else f"{value:.3f}", goal, mark)
        return table

    def write(self, path: Path) -> None:
        """The rows as JSON."""
        path.write_text(json.dumps(self.rows(), indent=1) + "\n")
