"""What a policy has learned, as bytes: so that a restart doesn't make it a beginner again.

A packed list of numbers and key words, JSON inside zlib; no code, no objects. Only counts that mean the same after the
restart are kept: those of running waits, paces and clocks are not. Reading trusts nothing: what was cut, damaged,
made by another version or shaped otherwise raises ValueError, and the policy stays as it was.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from math import isfinite
from typing import Any

VERSION = 2
BYTES_MAX = 64 << 20
"""Of the unpacked text."""


def pack(kind: str, content: dict[str, Any]) -> bytes:
    """`content` holds lists, numbers and strings only."""
    text = json.dumps({"kind": kind, "version": VERSION, **content}, separators=(",", ":"), allow_nan=False)
    return zlib.compress(text.encode("ascii"))


def unpack(kind: str, data: bytes) -> dict[str, Any]:
    """Raises ValueError when `data` isn't a whole packing of this kind and version."""
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(data, BYTES_MAX)
    except zlib.error as error:
        raise ValueError(f"what was learned is damaged: {error}") from None
    if not reader.eof or reader.unused_data:
        raise ValueError("what was learned is cut off, too long, or followed by something else")
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("what was learned is no list of numbers") from None
    if not isinstance(content, dict) or content.get("kind") != kind or content.get("version") != VERSION:
        raise ValueError(f"not what a {kind} of version {VERSION} has learned")
    return content


def counts(value: object, length: int) -> list[float]:
    """A list of at most `length` finite numbers, none below 0, filled up with zeros."""
    numbers = finite(value)
    if len(numbers) > length or any(number < 0 for number in numbers):
        raise ValueError(f"expected at most {length} counts")
    return numbers + [0.0] * (length - len(numbers))


def pair(value: object, length: int) -> tuple[list[float], list[float]]:
    """Events and exposures by bin, each event with its exposure."""
    both = as_list(value)
    if len(both) != 2:
        raise ValueError("expected events and exposures")
    events, exposed = (counts(one, length) for one in both)
    if any(event > at_risk for event, at_risk in zip(events, exposed, strict=True)):
        raise ValueError("what was learned counts more ends than waits")
    return events, exposed


def finite(value: object) -> list[float]:
    """A list of finite numbers."""
    if not isinstance(value, list) or not all(isinstance(x, (int, float)) and isfinite(x) for x in value):
        raise ValueError("expected a list of numbers")
    return [float(x) for x in value]


def key(value: object) -> tuple[object, ...]:
    """The key of a context: a list of whole numbers and words."""
    if not isinstance(value, list) or not all(isinstance(x, (int, str)) for x in value):
        raise ValueError("expected a list of whole numbers and words")
    return tuple(value)


def trimmed(numbers: Iterable[float]) -> list[float]:
    """Without the zeros at the end; whole numbers as such, which packs better."""
    out = [int(x) if x == int(x) else x for x in numbers]
    while out and not out[-1]:
        out.pop()
    return out


def as_list(value: object) -> list[Any]:
    """A list, whatever is in it."""
    if not isinstance(value, list):
        raise ValueError("expected a list")
    return value
