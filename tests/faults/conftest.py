"""Nodes, clients and volumes for the fault tests. Each test is one row of how caches of this kind fail in the field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.faults import FaultPlan
from kvstore.testing.node import FaultyNode
from kvstore.testing.service import ServiceProcess
from kvstore.testing.stub import StubEngine, tiny_keyspace
from kvstore.testing.volumes import NoVolume, tmpfs
from kvstore_client import Client

MIB = 1 << 20


@pytest.fixture(autouse=True)
def quick_revival(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that failed is tried again at the next tick, so that faults come one after another."""
    monkeypatch.setattr("kvstore.runtime.REVIVE_AFTER_S", 0.0)


@pytest.fixture
def plan() -> FaultPlan:
    return FaultPlan(seed=1)


@pytest.fixture
def node(tmp_path: Path, plan: FaultPlan) -> Iterator[FaultyNode]:
    """DRAM of 1 MiB (256 blocks) over 8 MiB of NVMe (2,048 blocks)."""
    with FaultyNode(tmp_path, plan, dram_bytes=MIB, nvme_bytes=8 * MIB, segment_bytes=MIB // 4) as node:
        yield node


@pytest.fixture
def client(node: FaultyNode) -> Iterator[Client]:
    with Client(node.address) as client:
        yield client


@pytest.fixture
def engine(client: Client) -> StubEngine:
    return StubEngine(client, tiny_keyspace())


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    """The same sizes in a process of its own. Not started."""
    process = ServiceProcess(tmp_path, dram_bytes=MIB, nvme_bytes=8 * MIB, segment_bytes=MIB // 4)
    yield process
    process.stop()


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB; skips where none can be mounted."""
    try:
        with tmpfs(tmp_path / "volume", 16 * MIB) as folder:
            yield folder
    except NoVolume as missing:
        pytest.skip(str(missing))
