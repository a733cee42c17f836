"""A real service and real client processes; the service is killed at random points, again and again.

Time goes in eras, each with a data directory of its own and a ledger of what was promised. An era ends before more is
written than NVMe holds, so nothing promised may be evicted, and is of one kind:

    kills    SIGKILL of the service, SIGKILL and SIGSTOP of clients          nothing promised may be missing
    full     the same on a volume that somebody else has nearly filled      nothing promised may be missing
    rot      the same, and files are cut and flipped while it is down       no wrong bytes; rot may cost blocks
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.errors import KVStoreError
from kvstore.testing.processes import num_descriptors, num_shared_maps
from kvstore.testing.service import ServiceProcess, wait_for
from kvstore.testing.soak.tally import Tally
from kvstore.testing.soak.work import Ledger, Promise, Worker, check_promise
from kvstore.testing.stub import StubEngine, tiny_keyspace
from kvstore.testing.volumes import NoVolume, fill, tmpfs
from kvstore.tiers.fsck import fsck
from kvstore_client import Client

MIB = 1 << 20
NVME_BYTES = 48 * MIB
VOLUME_BYTES = 64 * MIB
VOLUME_LEFT_BYTES = 16 * MIB
OFFERED_MAX = int(0.6 * NVME_BYTES / 4096)
NUM_WORKERS = 2
NUM_CHECKED = 12
"""Promises looked at after each start; all of them at the end of an era."""
ERAS = ("kills", "full", "kills", "rot")
Stop = Callable[[], bool]


class WorkerProcess:
    """A `worker` subprocess, and the thread that reads what it says."""

    def __init__(self, address: str, tally: Tally, ledger: Ledger, seed: int, seeds: range) -> None:
        command = [sys.executable, "-m", "kvstore.testing.soak.worker", address]
        arguments = [str(n) for n in (seed, seeds.start, seeds.stop)]
        self.process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
        self._tally = tally
        self._ledger = ledger
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # cut off by a kill
                self._take(json.loads(line))

    def _take(self, said: dict[str, object]) -> None:
        if "promise" in said:
            self._ledger.promise(Promise(*said["promise"]))  # type: ignore[misc]
        elif "offered" in said:
            self._ledger.offer(int(str(said["offered"])))
        else:
            for name, count in dict(said["counts"]).items():  # type: ignore[call-overload]
                self._tally.add(name, count)
            self._tally.problems += list(said["problems"])[:3]  # type: ignore[call-overload]

    def kill(self) -> None:
        """SIGKILL, and read what is left."""
        self.process.kill()
        self.process.wait()
        self._thread.join()


class Era:
    """One data directory and its service."""

    def __init__(self, kind: str, folder: Path, tally: Tally, seed: int) -> None:
        self.kind = kind
        self.tally = tally
        self.rng = random.Random(seed)
        self.seed = seed
        self.ledger = Ledger()
        self.service = ServiceProcess(folder, dram_bytes=MIB, nvme_bytes=NVME_BYTES, segment_bytes=MIB)
        self.service.options["scrub_bytes_per_s"] = 0
        self.workers: list[WorkerProcess] = []
        self.num_started = 0

    def run(self, stop: Stop) -> None:
        """Lives until the era is full or `stop()`; then everything promised is checked."""
        try:
            self.service.start()
            while not stop() and self.ledger.num_offered < OFFERED_MAX:
                self.life()
            self.last_life()
        finally:
            for worker in self.workers:
                worker.kill()
            self.service.stop(signal.SIGKILL)

    def start_worker(self) -> None:
        """Each has contexts of its own, so that none is promised twice."""
        self.num_started += 1
        first = self.num_started * 1_000_000
        seeds = range(first, first + 1_000_000)
        address, seed = self.service.address, self.seed * 1_000 + self.num_started
        self.workers.append(WorkerProcess(address, self.tally, self.ledger, seed, seeds))

    def life(self) -> None:
        """One life of the service: some work, some faults, a kill at a random point, a start, a check."""
        while len(self.workers) < NUM_WORKERS:
            self.start_worker()
        killer = self.service.kill_after_ms(self.rng.randrange(20, 700))
        self.disturb()
        killer.join()
        self.tally.add("service_kills")
        self.tally.fault("service_sigkill")
        if self.kind == "rot":
            self.rot()
        self.service.start()
        self.check(
            self.rng.sample(promises, min(NUM_CHECKED, len(promises))) if (promises := self.ledger.all()) else []
        )

    def disturb(self) -> None:
        """Work of our own, and what happens to clients meanwhile."""
        with contextlib.suppress(KVStoreError), Client(self.service.address, timeout_s=5) as client:
            self.num_started += 1
            seeds = range(self.num_started * 1_000_000, (self.num_started + 1) * 1_000_000)
            engine = StubEngine(client, tiny_keyspace(), 64, self.seed)
            worker = Worker(engine, self.tally, self.ledger, self.rng.randrange(1 << 30), seeds)
            victim = self.rng.choice(self.workers)
            kind = self.rng.random()
            if kind < 0.5:
                victim.process.send_signal(signal.SIGSTOP)
                self.tally.fault("client_sigstop")
            elif kind < 0.6:
                victim.kill()
                self.workers.remove(victim)
                self.tally.add("client_kills")
                self.tally.fault("client_sigkill")
            while client.boot_epoch and self.service.process is not None and self.service.process.poll() is None:
                worker.step()
        for each in self.workers:
            each.process.send_signal(signal.SIGCONT)

    def rot(self) -> None:
        """Cut or flip one payload file."""
        files = sorted(self.service.data_dir.glob("slab/*.seg"))
        if not files:
            return
        path = self.rng.choice(files)
        size = path.stat().st_size
        with path.open("r+b") as file:
            if self.rng.random() < 0.3:
                file.truncate(size // 4096 // 2 * 4096)
                self.tally.fault("file_truncated")
                return
            for _ in range(8):
                at = self.rng.randrange(max(1, size))
                file.seek(at)
                old = file.read(1) or b"\0"
                file.seek(at)
                file.write(bytes([old[0] ^ 1 << self.rng.randrange(8)]))
                self.tally.fault("bit_flip")

    def check(self, promises: list[Promise]) -> None:
        """Restore promised contexts."""
        with Client(self.service.address, timeout_s=20) as client:
            engine = StubEngine(client, tiny_keyspace(), 64, self.seed)
            for promise in promises:
                check_promise(engine, self.tally, promise, self.kind == "rot")

    def last_life(self) -> None:
        """Everything promised is there; nobody leaves anything behind; the data directory is whole."""
        while self.workers:
            self.workers.pop().kill()
        wait_for(lambda: self.service.metric("kvstore_clients") == 0, "clients to be gone")
        baseline = self.settled_descriptors()
        self.check(self.ledger.all())
        wait_for(lambda: self.service.metric("kvstore_clients") == 0, "the checker to be gone")
        self.leaks(baseline)
        status = self.service.stop()
        self.tally.bad("unexpected_errors", status != 0, f"the service ended with {status}")
        if self.kind != "rot":
            report = fsck(self.service.data_dir)
            self.tally.bad("unexpected_errors", len(report.problems), f"fsck of a {self.kind} era: {report.lines()}")

    def settled_descriptors(self) -> int:
        """Open descriptors of the service once closed connections are really gone."""
        assert self.service.process is not None
        pid = self.service.process.pid
        counts = [num_descriptors(pid)]

        def steady() -> bool:
            counts.append(num_descriptors(pid))
            return len(counts) > 20 and len(set(counts[-20:])) == 1

        wait_for(steady, "descriptors to settle")
        return counts[-1]

    def leaks(self, baseline: int) -> None:
        """What the service holds although nobody is there."""
        names = {
            "kvstore_leases": "leaked_leases",
            "kvstore_operations": "leaked_operations",
            'kvstore_residencies{state="filling",tier="dram"}': "leaked_slots",
            'kvstore_residencies{state="draining",tier="dram"}': "leaked_slots",
            'kvstore_residencies{state="filling",tier="nvme"}': "leaked_slots",
            'kvstore_residencies{state="draining",tier="nvme"}': "leaked_slots",
        }
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: not any(self.service.metric(n) for n in names), "the service to be quiet")
        sample = self.service.metrics()
        for name, kind in names.items():
            self.tally.bad(kind, int(sample[name]), name)
        more = self.settled_descriptors() - baseline
        segments = len(list(self.service.data_dir.glob("slab/*.seg")))
        self.tally.bad("leaked_descriptors", max(0, more), f"of the service, with {segments} segments")


def soak_kills(tally: Tally, seed: int, stop: Stop, num_kills: int) -> None:
    """Until `stop()`, or the service was killed `num_kills` times (0: no bound)."""
    descriptors, maps, named = num_descriptors(), num_shared_maps(), set(os.listdir("/dev/shm"))
    before = tally.counts["service_kills"]

    def enough() -> bool:
        return stop() or bool(num_kills and tally.counts["service_kills"] - before >= num_kills)

    number = 0
    while not enough():
        kind = ERAS[number % len(ERAS)]
        with _era_folder(kind, tally) as folder:
            if folder is not None:
                Era(kind, folder, tally, seed * 100 + number).run(enough)
        number += 1
    time.sleep(0.5)  # channels of closed clients close their sockets a little later
    gc.collect()
    tally.bad("leaked_descriptors", max(0, num_descriptors() - descriptors), "of the soak's own process")
    tally.bad("leaked_shared_memory", max(0, num_shared_maps() - maps), "maps of the soak's own process")
    left = {n for n in os.listdir("/dev/shm") if "kvstore" in n} - named
    tally.bad("leaked_shared_memory", len(left), f"named objects {sorted(left)}")


@contextlib.contextmanager
def _era_folder(kind: str, tally: Tally) -> Iterator[Path | None]:
    with tempfile.TemporaryDirectory(prefix="kvstore-soak-") as name:
        if kind != "full":
            yield Path(name)
            return
        try:
            with tmpfs(Path(name) / "volume", VOLUME_BYTES) as folder:
                fill(folder, VOLUME_LEFT_BYTES)
                tally.fault("full_volume")
                yield folder
        except NoVolume as missing:
            tally.add("eras_without_volume")
            tally.problems.append(f"no full volume: {missing}")
            yield None
