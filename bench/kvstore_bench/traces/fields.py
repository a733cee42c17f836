"""Checked access to the fields of a record; every complaint names file, line and field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.model import I64

TOKENS_MAX = 1 << 31
TIME_MAX = 1e13
_MISSING = object()


class Record:
    """One JSON object and where it stands."""

    __slots__ = ("line", "path", "value")

    def __init__(self, path: str, line: int, value: Mapping[str, Any]) -> None:
        self.path, self.line, self.value = path, line, value

    def error(self, field: str, problem: str, mend: str = "") -> TraceError:
        return TraceError(self.path, problem, line=self.line, field=field, mend=mend)

    def number(self, field: str, default: float | None = None, *, low: float = 0.0, high: float = TIME_MAX) -> float:
        """A finite number in [low, high]."""
        value = self.value.get(field, _MISSING)
        if value is _MISSING or value is None:
            if default is None:
                raise self.error(field, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(field, f"expected a number, found {type(value).__name__}")
        if not low <= value <= high:
            raise self.error(field, f"{value} is outside [{low:g}, {high:g}]")
        return float(value)

    def tokens(self, field: str, default: int | None = None) -> int:
        """A count of tokens."""
        return int(self.number(field, default, high=TOKENS_MAX))

    def text(self, field: str, default: str | None = None) -> str:
        value = self.value.get(field, _MISSING)
        if value is _MISSING or value is None:
            if default is None:
                raise self.error(field, "is missing")
            return default
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            raise self.error(field, f"expected text, found {type(value).__name__}")
        return value

    def ids(self, field: str) -> I64:
        """A list of integer block ids."""
        value = self.value.get(field, _MISSING)
        if value is _MISSING:
            raise self.error(field, "is missing", "wrong format? say which with --format")
        if not isinstance(value, list):
            raise self.error(field, f"expected a list of integers, found {type(value).__name__}")
        try:
            array = np.asarray(value)
        except (ValueError, OverflowError):
            raise self.error(field, "expected a flat list of integers") from None
        if array.size == 0:
            return np.zeros(0, np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise self.error(field, "expected a flat list of integers below 2^63")
        return array.astype(np.int64)

    def items(self, field: str) -> list[Any]:
        value = self.value.get(field, _MISSING)
        if value is _MISSING:
            raise self.error(field, "is missing", "wrong format? say which with --format")
        if not isinstance(value, list):
            raise self.error(field, f"expected a list, found {type(value).__name__}")
        return value
