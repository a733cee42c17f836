"""Small file systems of their own, for tests that fill a disk for real."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


class NoVolume(Exception):
    """This machine doesn't let us mount; the text says what is missing."""


@contextlib.contextmanager
def tmpfs(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A tmpfs of `size_bytes` on `folder`, unmounted at the end. Raises NoVolume."""
    if os.geteuid() != 0:
        raise NoVolume("mounting a tmpfs needs root")
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={size_bytes},mode=0700"
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        raise NoVolume(f"mount refused a tmpfs: {made.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, leave_bytes: int = 0) -> Path:
    """Take all free space but `leave_bytes` with one file; remove it to give the space back."""
    stat = os.statvfs(folder)
    ballast = folder / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, stat.f_bavail * stat.f_frsize - leave_bytes))
    return ballast
