"""A node in this process, its NVMe files and its clients' reads damaged by plans: EIO, ENOSPC, short, torn, flipped."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import kvstore.runtime
from kvstore.core.types import Tier
from kvstore.errors import KVStoreError
from kvstore.testing.faults import Fault, FaultPlan
from kvstore.testing.node import FaultyNode
from kvstore.testing.processes import num_descriptors, num_shared_maps
from kvstore.testing.service import wait_for
from kvstore.testing.soak.tally import Tally
from kvstore.testing.soak.work import Ledger, Worker
from kvstore.testing.stub import StubEngine, damage_reads, tiny_keyspace
from kvstore_client import Client

MIB = 1 << 20
NUM_CLIENTS = 3
NUM_SEGMENTS = 32
SEEDS = 400
"""Contexts of one client: more than NVMe holds, so that eviction goes on all the time."""
READS = {Fault.EIO: 0.04, Fault.SHORT: 0.04, Fault.FLIP: 0.04}
WRITES = {Fault.EIO: 0.03, Fault.ENOSPC: 0.02, Fault.SHORT: 0.05, Fault.FLIP: 0.03, Fault.TORN: 0.03}
OTHERS = {Fault.EIO: 0.05}
Stop = Callable[[], bool]


def soak_disk(tally: Tally, seed: int, stop: Stop, num_faults: int) -> None:
    """Until `stop()`, or `num_faults` (0: no bound) were injected here."""
    kvstore.runtime.REVIVE_AFTER_S = 0.0  # the next fault is due at the next tick
    descriptors, maps = num_descriptors(), num_shared_maps()
    before = tally.num_faults
    with tempfile.TemporaryDirectory(prefix="kvstore-soak-") as folder:
        _run(tally, seed, lambda: stop() or bool(num_faults and tally.num_faults - before >= num_faults), Path(folder))
    gc.collect()  # a cycle that waits for its collection is no leak
    tally.bad("leaked_descriptors", max(0, num_descriptors() - descriptors), "after the node in this process ended")
    tally.bad("leaked_shared_memory", max(0, num_shared_maps() - maps), "maps after the node in this process ended")


def _run(tally: Tally, seed: int, stop: Stop, folder: Path) -> None:
    plan = FaultPlan(seed, reads=READS, writes=WRITES, syncs=OTHERS, allocations=OTHERS)
    plans = [plan, *(FaultPlan(seed + 1 + n, reads=READS) for n in range(NUM_CLIENTS))]
    counted = [0] * len(plans)

    def count() -> None:
        for index, each in enumerate(plans):
            new = each.num_injected - counted[index]
            counted[index] += new
            tally.fault("file_layer", new)

    with FaultyNode(folder, plan, dram_bytes=MIB, nvme_bytes=8 * MIB, segment_bytes=MIB // 4) as node:
        threads = [
            threading.Thread(target=_client, args=(node, plans[1 + n], tally, seed, n, stop))
            for n in range(NUM_CLIENTS)
        ]
        for thread in threads:
            thread.start()
        while any(t.is_alive() for t in threads):
            count()
            time.sleep(0.05)
        count()
        plan.enabled = False
        _settle(node, tally)
    for each in plans:
        for kind, number in each.counts.items():
            tally.fault(kind, number)
    tally.faults["file_layer"] -= sum(counted)


def _client(node: FaultyNode, plan: FaultPlan, tally: Tally, seed: int, number: int, stop: Stop) -> None:
    try:
        with Client(node.address, timeout_s=10) as client:
            engine = StubEngine(client, tiny_keyspace(), 64, seed)
            seeds = range(number * SEEDS, (number + 1) * SEEDS)
            worker = Worker(engine, tally, Ledger(), seed * 100 + number, seeds)
            steps = 0
            while not stop():
                if steps % 20 == 0:
                    damage_reads(client, plan, NUM_SEGMENTS)
                worker.step()
                steps += 1
                if steps % SEEDS == 0:
                    worker.fresh = iter(seeds)
                if steps % 100 == 0:
                    node.check()
            plan.enabled = False
    except KVStoreError as error:
        tally.bad("unexpected_errors", 1, f"client {number}: {error}")
    except AssertionError as error:
        tally.bad("broken_invariants", 1, f"client {number}: {error}")
    except Exception as error:
        tally.bad("unexpected_errors", 1, f"client {number}: {type(error).__name__}: {error}")


def _settle(node: FaultyNode, tally: Tally) -> None:
    """Everybody has left: nothing may be held, filling, draining, or kept on record."""
    try:
        wait_for(node.quiet, "all work to end")
    except TimeoutError:
        machine = node.runtime.machine
        for pool in machine.pools():
            stuck = pool.num_filling + pool.num_draining + pool.num_borrowed
            tally.bad("leaked_slots", stuck, f"{pool.tier.label}: filling, draining or borrowed")
        tally.bad("leaked_leases", machine.num_leases, "nobody holds them")
        tally.bad("leaked_operations", machine.num_ops, "nobody runs them")
    try:
        node.check()
    except AssertionError as error:
        tally.bad("broken_invariants", 1, str(error))
    dram = node.runtime.machine.pool(Tier.DRAM)
    assert dram is not None
    tally.bad("leaked_records", max(0, len(node.runtime.records) - dram.num_ready), "records of blocks not in DRAM")
