"""What a measurement is given is checked before it works: wrong input is one line with the option and the mend."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.errors import InvalidField
from kvstore.sizes import format_bytes, parse_bytes
from kvstore_bench.terminal import check_outputs
from kvstore_gpu.doctor import filesystem

PAGE_BYTES = 4096
MOUNTS = Path("/proc/self/mountinfo")
NO_DISK = ("devtmpfs", "proc", "ramfs", "sysfs", "tmpfs")
ROUNDS_MAX = 1_000_000


def check_whole(name: str, value: int, least: int, most: int) -> int:
    """The number itself. Raises InvalidField outside [least, most]."""
    if not least <= value <= most:
        raise InvalidField(name, f"{value:,} is out of range", f"use {least:,} to {most:,}")
    return value


def check_places(data_dir: Path | None, json: Path | None) -> None:
    """A folder that can be worked in, a file that can be written. Raises InvalidField or TraceError."""
    check_outputs(json)
    if data_dir is None:
        return
    if not data_dir.is_dir():
        raise InvalidField("data_dir", f"{data_dir} is no folder", "make it, or name another on the disk to measure")
    if not os.access(data_dir, os.W_OK | os.X_OK):
        raise InvalidField("data_dir", f"{data_dir} can't be written", "name a folder that you may write")
    if filesystem(data_dir.resolve(), MOUNTS.read_text()) in NO_DISK:
        raise InvalidField("data_dir", f"{data_dir} lies on no disk", "name a folder on the disk to measure")


def block_sizes(text: str, largest: int) -> list[int]:
    """Sizes as people write them, whole 4 KiB up to `largest`. Raises InvalidField."""
    try:
        sizes = [parse_bytes(word) for word in text.split(",")]
    except ValueError as error:
        raise InvalidField("sizes", str(error), "give block sizes such as 2MiB,64KiB") from None
    for size in sizes:
        if size % PAGE_BYTES or not 0 < size <= largest:
            mend = f"use multiples of 4KiB up to {format_bytes(largest)}"
            raise InvalidField("sizes", f"{format_bytes(size)} is no size of a block here", mend)
    return sizes
