"""NVMe <-> pool by the kernel's calls: rows of a host pool, bounce buffers, failures told by piece, fallback."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore_gpu.arena import Arena, PoolSpec
from kvstore_gpu.errors import LayoutError
from kvstore_gpu.nvme import Batch, Failure, FallbackPath, HostPath, Piece, random_block
from kvstore_gpu.probe import judge, probe
from kvstore_gpu.testing import Behind, FakeBackend

SPEC = PoolSpec(num_slots=8, num_slices=2, slice_bytes=5000)
STRIDE = SPEC.stride_bytes


def pool(behind: bool, seed: int = 0) -> Arena:
    kind = Behind if behind else Arena
    return kind.create(SPEC, backend=FakeBackend(seed, needs_pinned=behind))


def slab(folder: Path) -> Path:
    path = folder / "slab"
    path.write_bytes(b"".join(random_block(STRIDE, i).tobytes() for i in range(16)))
    return path


def rows(arena: Arena) -> np.ndarray:
    assert isinstance(arena.backend, FakeBackend)
    arena.backend.drain()
    view: np.ndarray = arena.tensor.numpy()
    return view


@pytest.mark.parametrize("behind", [False, True])
def test_pieces_are_read_and_written(tmp_path: Path, behind: bool) -> None:
    for seed in range(5):
        arena = pool(behind, seed)
        path = HostPath(arena, slab(tmp_path), num_threads=2)
        arena.tensor.fill_(0xA5)
        pieces = [((15 - i) * STRIDE, arena.slot(i)) for i in range(7)]
        assert path.read(pieces).wait() == []
        for i in range(7):
            assert np.array_equal(rows(arena)[i], random_block(STRIDE, 15 - i))
        assert (rows(arena)[7] == 0xA5).all()
        assert path.write([(0, arena.slot(3))]).wait() == []
        assert np.array_equal(np.fromfile(tmp_path / "slab", dtype=np.uint8)[:STRIDE], random_block(STRIDE, 12))
        path.close()


@pytest.mark.parametrize("behind", [False, True])
def test_a_piece_beyond_the_file_fails_alone(tmp_path: Path, behind: bool) -> None:
    arena = pool(behind)
    path = HostPath(arena, slab(tmp_path), num_threads=1)
    offsets = [0, 16 * STRIDE, STRIDE, 16 * STRIDE - 4096]
    failed = path.read([(offset, arena.slot(i)) for i, offset in enumerate(offsets)]).wait()
    assert [failure.index for failure in failed] == [1, 3]
    assert "only 0 of" in failed[0].why
    assert "only 4096 of" in failed[1].why
    assert np.array_equal(rows(arena)[2], random_block(STRIDE, 1))
    path.close()


def test_a_passed_descriptor_will_do(tmp_path: Path) -> None:
    fd = os.open(slab(tmp_path), os.O_RDONLY)
    arena = pool(False)
    path = HostPath(arena, fd)
    os.close(fd)
    assert path.read([(STRIDE, arena.slot(0))]).wait() == []
    assert np.array_equal(rows(arena)[0], random_block(STRIDE, 1))
    assert "Bad file descriptor" in path.write([(0, arena.slot(0))]).wait()[0].why
    path.close()


@pytest.mark.parametrize("piece", [(100, 0), (-4096, 0), (0, 4096), (0, 8 * STRIDE)])
def test_misplaced_pieces_are_refused(tmp_path: Path, piece: Piece) -> None:
    path = HostPath(pool(False), slab(tmp_path))
    with pytest.raises(LayoutError):
        path.read([piece])
    path.close()


def test_two_batches_share_the_bounce_buffers(tmp_path: Path) -> None:
    arena = pool(True)
    path = HostPath(arena, slab(tmp_path), num_threads=1)  # two buffers
    first = path.read([(i * STRIDE, arena.slot(i)) for i in range(3)])  # takes both
    second = path.read([(i * STRIDE, arena.slot(i)) for i in range(3, 6)])
    assert second.wait() == []
    assert first.wait() == []
    for i in range(6):
        assert np.array_equal(rows(arena)[i], random_block(STRIDE, i))
    path.close()


class Lost:
    """Nothing arrives."""

    def __init__(self, failures: list[Failure]) -> None:
        self.failures = failures

    def wait(self) -> list[Failure]:
        return self.failures


class Broken:
    """A path that loses some pieces."""

    name = "broken"

    def __init__(self, lost: set[int]) -> None:
        self.lost = lost

    def read(self, pieces: Sequence[Piece]) -> Batch:
        lost = [Failure(i, "lost") for i in range(len(pieces)) if i in self.lost]
        return Lost(lost)

    write = read

    def close(self) -> None:
        """Nothing to close."""


def test_what_one_path_loses_goes_by_the_other(tmp_path: Path) -> None:
    arena = pool(False)
    path = FallbackPath(Broken({1, 3}), HostPath(arena, slab(tmp_path)))
    pieces = [(0, arena.slot(0)), (STRIDE, arena.slot(1)), (0, arena.slot(2)), (99 * STRIDE, arena.slot(3))]
    failed = path.read(pieces).wait()
    assert [failure.index for failure in failed] == [3]
    assert path.num_fallbacks == 2
    assert path.last_reason == "lost"
    assert np.array_equal(rows(arena)[1], random_block(STRIDE, 1))
    path.close()


def test_the_probe_leaves_no_file_and_measures_the_host_path(tmp_path: Path) -> None:
    found = probe(tmp_path, SPEC)
    assert found.host_rate is not None
    assert found.host_rate > 0
    assert list(tmp_path.iterdir()) == []


def test_the_faster_path_is_chosen_and_emulation_is_named() -> None:
    assert judge(6e9, 3e9, 0.0).chosen == "gds"
    assert judge(6e9, 3e9, 0.0).mode == "real"
    assert judge(2e9, 3e9, 1.0).chosen == "host"
    assert judge(4e9, 3e9, 1.0).mode == "compat"
