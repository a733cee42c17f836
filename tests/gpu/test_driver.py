"""How the driver is called, against a libcuda whose device memory is host memory."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from kvstore_gpu.driver import BATCH_MAX, Driver
from kvstore_gpu.errors import DriverError, PinRefused, Unavailable
from kvstore_gpu.pinned import MemoryLimits, memory_limits, register
from kvstore_gpu.testing import build_stub

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        stub = build_stub(HERE / "libcuda_memory.c", tmp_path_factory.mktemp("stub") / "libcuda_memory.so")
    except Unavailable as error:
        pytest.skip(str(error))
    return ctypes.CDLL(str(stub))


@pytest.fixture
def driver(library: ctypes.CDLL) -> Driver:
    driver = Driver(library)
    driver.bind()
    driver.enter()
    return driver


def test_a_missing_driver_is_named() -> None:
    with pytest.raises(Unavailable, match="libnothere"):
        Driver.load("libnothere.so.1")


@pytest.mark.parametrize("stream", [0, 7])
def test_copies_arrive_in_batches_where_there_is_a_stream(driver: Driver, library: ctypes.CDLL, stream: int) -> None:
    count = BATCH_MAX + 3
    source = np.random.default_rng(0).integers(0, 256, (count, 24), dtype=np.uint8)
    target = np.zeros_like(source)
    step = np.arange(count, dtype=np.int64) * 24
    before = library.test_batches()
    order = np.random.default_rng(1).permutation(count)
    ends = (target.ctypes.data + step[order], source.ctypes.data + step[order])
    driver.copy(*ends, np.full(count, 24, dtype=np.int64), stream)
    assert np.array_equal(source, target)
    assert library.test_batches() - before == (2 if stream else 0)


def test_memory_and_ipc(driver: Driver) -> None:
    assert driver.version == 13000
    assert driver.can_batch
    address = driver.allocate(8192)
    handle = driver.export_ipc(address)
    assert len(handle) == 64
    assert driver.open_ipc(handle) == address
    driver.close_ipc(address)
    driver.free(address)
    with pytest.raises(DriverError, match="out of memory"):
        driver.allocate(1 << 41)


def test_registration_goes_in_chunks_and_comes_back(driver: Driver, library: ctypes.CDLL) -> None:
    memory = np.zeros(10 * 4096 + 5, dtype=np.uint8)
    region = register(driver, memory, chunk_bytes=4096, num_threads=3)
    assert library.test_registered() == 11
    assert region.covers(memory.ctypes.data + 4000, 8192)
    assert not region.covers(memory.ctypes.data + 4096, memory.nbytes)
    region.close()
    assert library.test_registered() == 0
    assert not region.covers(memory.ctypes.data, 1)


def test_a_refused_registration_leaves_nothing_and_says_why(driver: Driver, library: ctypes.CDLL) -> None:
    library.test_refuse(1)
    try:
        with pytest.raises(PinRefused, match="RLIMIT_MEMLOCK is"):
            register(driver, np.zeros(3 * 4096, dtype=np.uint8), chunk_bytes=4096)
    finally:
        library.test_refuse(0)
    assert library.test_registered() == 0


class RefuseSome:
    """Takes two chunks, then refuses."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def enter(self) -> None:
        """Nothing to enter."""

    def register_host(self, address: int, num_bytes: int) -> None:
        if len(self.held) == 2:
            raise DriverError("cuMemHostRegister_v2", 2, "out of memory")
        self.held.append(address)

    def unregister_host(self, address: int) -> None:
        self.held.remove(address)


def test_a_registration_that_fails_half_way_is_undone() -> None:
    registrar = RefuseSome()
    with pytest.raises(PinRefused, match="out of memory"):
        register(registrar, np.zeros(5 * 4096, dtype=np.uint8), chunk_bytes=4096, num_threads=1)
    assert registrar.held == []


def test_limits_are_read_and_explained(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1073741824\n")
    (tmp_path / "memory.current").write_text("536870912\n")
    limits = memory_limits(tmp_path)
    assert (limits.cgroup_max_bytes, limits.cgroup_used_bytes) == (1 << 30, 1 << 29)
    assert "allows 1024 MiB, 512 MiB are in use" in limits.text()
    assert "container's memory limit" in limits.mend(1 << 30)
    assert "memlock" in MemoryLimits(65536, None, None).mend(1 << 30)
    assert MemoryLimits(None, None, None).mend(1) == "use a smaller arena"
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limits(tmp_path).cgroup_max_bytes is None
