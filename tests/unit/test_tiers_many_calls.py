"""Scattered small blocks go to the disk in few calls of the helper; each still has an outcome of its own."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import TransferError
from kvstore.tiers import native
from kvstore.tiers.files import OpenFile
from kvstore.tiers.transfer import Copy, CopyResult, File, Memory, Priority, TransferEngine, checksums_of

BLOCK = 8192
COUNT = 20


@pytest.fixture(autouse=True)
def _helper() -> None:
    if native.load() is None:
        pytest.skip("no C compiler: the helper isn't there")


def rig(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> tuple[np.ndarray, OpenFile]:
    memory = np.random.default_rng(1).integers(0, 256, COUNT * BLOCK, dtype=np.uint8)
    return memory, OpenFile.open(path, flags, direct=False)


def run(copies: list[Copy], priority: Priority) -> list[CopyResult]:
    engine = TransferEngine(1)
    try:
        return engine.submit(copies, priority).wait(30)
    finally:
        engine.close()


def places(file: OpenFile) -> list[File]:
    """With gaps, so that nothing is joined."""
    return [File(file, 2 * i * BLOCK) for i in range(COUNT)]


def write(memory: np.ndarray, file: OpenFile) -> list[CopyResult]:
    copies = [Copy(Memory(memory, i * BLOCK), p, BLOCK, 4096, None, True) for i, p in enumerate(places(file))]
    return run(copies, Priority.WRITE)


def read(target: np.ndarray, file: OpenFile, written: list[CopyResult]) -> list[CopyResult]:
    ends = zip(places(file), written, strict=True)
    copies = [Copy(p, Memory(target, i * BLOCK), BLOCK, 4096, w.checksums) for i, (p, w) in enumerate(ends)]
    return run(copies, Priority.READ)


def test_written_and_read_back(tmp_path: Path) -> None:
    memory, file = rig(tmp_path / "slab")
    written = write(memory, file)
    assert [w.checksums for w in written] == [
        checksums_of(memory[i : i + BLOCK].data, 4096) for i in range(0, len(memory), BLOCK)
    ]
    target = np.zeros_like(memory)
    assert all(r.ok for r in read(target, file, written))
    assert (target == memory).all()


def test_a_short_file_costs_only_what_lies_behind_its_end(tmp_path: Path) -> None:
    memory, file = rig(tmp_path / "slab")
    written = write(memory, file)
    os.ftruncate(file.fd, 2 * 12 * BLOCK + 100)
    target = np.zeros_like(memory)
    results = read(target, file, written)
    assert [r.ok for r in results] == [True] * 12 + [False] * 8
    assert all(isinstance(r.error, TransferError) and "cut" in str(r.error) for r in results[12:])
    assert (target[: 12 * BLOCK] == memory[: 12 * BLOCK]).all()


def test_what_the_system_says_is_told(tmp_path: Path) -> None:
    (tmp_path / "slab").touch()
    memory, file = rig(tmp_path / "slab", os.O_RDONLY)
    results = write(memory, file)
    assert not any(r.ok for r in results)
    assert all("Bad file descriptor" in str(r.error) for r in results)
