"""The arena: shared by descriptor, touched, gone with its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import SetupError
from kvstore.tiers import arena as arena_module
from kvstore.tiers.arena import Arena


@pytest.mark.parametrize("huge", ["auto", "never"])
def test_two_maps_share_bytes(huge: arena_module.Huge) -> None:
    ours = Arena.create(5 << 20, huge)
    theirs = Arena.map(os.dup(ours.fd), 5 << 20)
    ours.array[123] = 7
    theirs.array[-1] = 9
    assert (theirs.array[123], ours.array[-1]) == (7, 9)
    assert ours.array.ctypes.data % 4096 == 0
    assert len(theirs.array) == 5 << 20
    ours.close()
    assert theirs.array[123] == 7
    theirs.close()


def test_memory_is_really_there() -> None:
    """Every byte has memory behind it once `create` returns: no SIGBUS and no first-touch cost later."""
    arena = Arena.create(8 << 20)
    assert os.fstat(arena.fd).st_blocks * 512 >= 8 << 20
    arena.close()


def test_close_with_a_view_outside() -> None:
    arena = Arena.create(1 << 20)
    view = arena.array[:10]
    arena.close()
    arena.close()
    assert view[0] == 0


@pytest.mark.parametrize("size", [0, -5])
def test_sizes_that_cannot_be(size: int) -> None:
    with pytest.raises(SetupError, match="dram_bytes"):
        Arena.create(size)


def test_more_than_the_machine_has() -> None:
    with pytest.raises(SetupError, match="make it smaller"):
        Arena.create(1 << 50)


def test_map_of_a_short_descriptor() -> None:
    fd = os.memfd_create("short")
    os.ftruncate(fd, 4096)
    with pytest.raises(SetupError, match="4096 bytes"):
        Arena.map(fd, 8192)
    os.close(fd)


def test_without_huge_pages_the_operator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_hugetlb", "_private_tmpfs"):
        monkeypatch.setattr(arena_module, name, lambda _n: -1)
    monkeypatch.setattr(arena_module, "_shmem_mode", lambda: "never")
    arena = Arena.create(4 << 20)
    assert arena.page_kind == "memfd"
    assert "vm.nr_hugepages=2" in arena.advice
    arena.close()
    with pytest.raises(SetupError, match="nr_hugepages"):
        Arena.create(4 << 20, "require")


def test_a_tmpfs_given_by_path(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="huge=always"):
        Arena.create(4 << 20, tmpfs=tmp_path / "missing")
    if arena_module._hugetlb(4 << 20) >= 0:
        pytest.skip("hugetlb pages are reserved here and win")
    arena = Arena.create(4 << 20, tmpfs=tmp_path)
    assert list(tmp_path.iterdir()) == []
    arena.close()


def test_killed_processes_leave_nothing() -> None:
    """Ten lives that end by SIGKILL: no name, no shared memory stays behind."""
    before = _shared_kib()
    code = (
        "import os, signal; from kvstore.tiers.arena import Arena; "
        "arena = Arena.create(64 << 20); os.kill(os.getpid(), signal.SIGKILL)"
    )
    for _ in range(10):
        done = subprocess.run([sys.executable, "-c", code], check=False)
        assert done.returncode == -signal.SIGKILL
    assert _shared_kib() - before < 10 * (64 << 10) // 2


def _shared_kib() -> int:
    line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("Shmem:"))
    return int(line.split()[1])
