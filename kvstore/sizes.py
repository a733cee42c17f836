"""Sizes: read by people, computed in bytes; and what this machine has to give by default.

Defaults are a share of what is there, never everything: a cache that fills a disk or a memory cgroup takes its
neighbours down.
"""

from __future__ import annotations

import os
import re
from decimal import Decimal
from pathlib import Path

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_CGROUP_MAX = Path("/sys/fs/cgroup/memory.max")


def parse_bytes(text: str | int) -> int:
    """Bytes from `8589934592`, `"8GiB"`, `"8g"` (both binary) or `"8GB"` (decimal).

    Raises ValueError with a line for people.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is no size such as 8GiB")
    return int(Decimal(match[1]) * _UNITS[match[2].lower()])  # exact, where a float would round large ones


def format_bytes(num_bytes: int) -> str:
    """The shortest exact binary form that `parse_bytes` reads back, such as `8GiB` or `1536MiB`."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return str(num_bytes)


def round_bytes(num_bytes: int) -> str:
    """For reading only: three digits or so, such as `7.6 GiB`."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or its cgroup's limit where that is lower."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(_CGROUP_MAX.read_text()))
    except (OSError, ValueError):
        return machine


def disk_bytes(folder: Path) -> int:
    """Bytes free on the file system of `folder`, what lies in `folder` already included.

    Counting our own files keeps a share of this figure the same over a restart.
    """
    there = _existing(folder)
    stat = os.statvfs(there)
    return stat.f_bavail * stat.f_frsize + (_held_bytes(folder) if there == folder else 0)


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _held_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name), follow_symlinks=False).st_blocks * 512
            except OSError:
                continue  # went away while we looked
    return total
