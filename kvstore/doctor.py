"""`kvstore doctor`: which data paths this machine has, in plain words, and what would give it the others.

Nothing is configured and nothing is kept: each finding comes from trying the thing itself, on a small scale.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstore.config import default_data_dir
from kvstore.errors import KVStoreError
from kvstore.sizes import disk_bytes, memory_bytes, round_bytes

_TRIAL_BYTES = 8 << 20


class Finding(NamedTuple):
    """`good` is None where there is nothing to judge."""

    what: str
    good: bool | None
    text: str


def run(data_dir: Path | None = None) -> int:
    """Print all findings; always 0, because a machine without a fast path still works."""
    folder = data_dir.expanduser().absolute() if data_dir else default_data_dir()
    table = Table(box=None, show_header=False)
    for finding in [*host(folder), *device(folder)]:
        mark = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[finding.good]
        table.add_row(mark, escape(finding.what), escape(finding.text))
    Console().print(table)
    return 0


def host(folder: Path) -> Iterator[Finding]:
    """Memory, the arena's pages, and the disk under `folder`."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "without limit" if limit == resource.RLIM_INFINITY else f"up to {round_bytes(limit)}"
    yield Finding("memory", None, f"{round_bytes(memory_bytes())} usable; may be locked {locked}")
    yield _arena()
    yield from _disk(folder)


def device(folder: Path) -> Iterator[Finding]:
    """What the GPU side says about itself; one line where it isn't installed."""
    try:
        from kvstore_gpu.doctor import report
    except ModuleNotFoundError as error:
        yield Finding("gpu", False, f"{error.name} isn't installed: pip install 'kvstore[gpu]'")
        return
    for finding in report(folder if folder.is_dir() else None):
        mend = f"; to mend: {finding.mend}" if finding.mend else ""
        yield Finding(finding.path, finding.available, finding.why + mend)


def _arena() -> Finding:
    from kvstore.tiers.arena import Arena

    try:
        arena = Arena.create(_TRIAL_BYTES)
    except KVStoreError as error:
        return Finding("arena", False, str(error))
    huge = arena.page_kind != "memfd"
    text = f"{'huge' if huge else '4 KiB'} pages ({arena.page_kind})" + (f"; {arena.advice}" if arena.advice else "")
    arena.close()
    return Finding("arena", huge, text)


def _disk(folder: Path) -> Iterator[Finding]:
    from kvstore.tiers.files import probe_direct

    there = next(p for p in (folder, *folder.parents) if p.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        yield Finding("nvme", False, f"{there} isn't writable by this user; give a --data-dir that is")
        return
    yield Finding("nvme", None, f"{folder}: {round_bytes(disk_bytes(folder))} free")
    direct = probe_direct(there)
    missing = "refused by this file system: reads go through the page cache; use ext4 or xfs on a local disk"
    yield Finding("direct i/o", direct, "O_DIRECT works" if direct else missing)
