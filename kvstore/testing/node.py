"""A node in this process whose NVMe files obey a plan of faults: real runtime, real servers, real sockets.

plan = FaultPlan(seed=1, writes={Fault.EIO: 0.1})
with FaultyNode(folder, plan, dram_bytes=4 << 20) as node, Client(node.address) as client:
    ...
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any, Self

from kvstore.config import ServiceConfig
from kvstore.runtime import Runtime
from kvstore.testing.faults import FaultPlan

WAIT_S = 60.0
SMALL: dict[str, Any] = {
    "dram_bytes": 4 << 20,
    "nvme_bytes": 64 << 20,
    "segment_bytes": 1 << 20,
    "nvme_reserve_bytes": 0,
    "huge_pages": "off",
    "metrics_port": 0,
    "scrub_bytes_per_s": 0,
    "lease_ttl_s": 30.0,
}


class FaultyNode:
    """Settings not given are small ones (`SMALL`). Leaving the block lets stalled calls go on, and stops the node."""

    def __init__(self, folder: Path, plan: FaultPlan | None = None, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        given = SMALL | {"data_dir": folder / "data", "socket": folder / "kv.sock"} | settings
        self.plan = plan or FaultPlan()
        self.config = ServiceConfig(**given)
        self.runtime = Runtime(self.config, faults=self.plan)
        self.address = f"unix:{self.config.socket}"
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faulty-node", daemon=True)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        from kvstore_server.main import start

        async with contextlib.AsyncExitStack() as stack:
            await start(self.config, self.runtime, stack)
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(WAIT_S):
            raise TimeoutError("the node did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self.plan.enabled = False
        self.plan.release()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        self.runtime.close()

    def sample(self, name: str, **labels: str) -> float:
        """One metric's value, by the name the registry knows it under (`kvstore_..._total` for counters)."""
        found = self.runtime.metrics.registry.get_sample_value(name, labels)
        return 0.0 if found is None else found

    def quiet(self) -> bool:
        """Nothing runs, waits, or is held."""
        machine = self.runtime.machine
        pools = machine.pools()
        moving = any(p.num_filling or p.num_draining or p.num_borrowed for p in pools)
        return not moving and machine.num_ops == 0 and machine.num_leases == 0

    def check(self) -> None:
        """Conservation of everything the machine owns. Raises AssertionError."""
        self.runtime.read(lambda machine: machine.check_invariants())
