"""Capacities as people write them: `5%` of the trace's distinct blocks, `4096` blocks, `64GiB` of a model's KV."""

from __future__ import annotations

import re

from kvstore_bench.traces.errors import TraceError

UNITS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
VALUE_MAX = 1e9
"""A billion blocks."""
_FORM = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*(%|[a-zA-Z]*)\s*$")


def parse_capacity(text: str, num_blocks: int, block_bytes: int) -> int:
    """Capacity in blocks, at least 1. `block_bytes` is 0 where no model was named. Raises TraceError."""
    match = _FORM.match(text)
    if match is None:
        raise TraceError("--capacity", f"can't read {text!r}", mend="use 5%, 4096 or 64GiB")
    value, unit = float(match.group(1)), match.group(2).lower()
    if value <= 0:
        raise TraceError("--capacity", f"{text!r} is no cache", mend="give more than 0")
    if value > VALUE_MAX and unit in ("", "%", "blocks"):
        raise TraceError("--capacity", f"{text!r} is more than any cache", mend="give less")
    if unit == "%":
        return max(1, min(int(num_blocks * value / 100.0), int(VALUE_MAX)))
    if unit in ("", "blocks"):
        return max(1, int(value))
    if unit not in UNITS:
        raise TraceError("--capacity", f"unknown unit {unit!r}", mend=f"use %, blocks or {', '.join(UNITS)}")
    if not block_bytes:
        raise TraceError("--capacity", f"{text!r} needs to know the size of a block", mend="add --model")
    return max(1, min(int(value * UNITS[unit] / block_bytes), int(VALUE_MAX)))
