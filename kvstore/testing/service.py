"""A real node service in a process of its own, for tests: start, kill, restart, read its metrics."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Protocol

WAIT_S = 60.0
POLL_S = 0.01


class HasEpoch(Protocol):
    @property
    def boot_epoch(self) -> int: ...


class ServiceProcess:
    """One service on one data directory. Attributes may be changed before `start`."""

    def __init__(
        self, folder: Path, *, dram_bytes: int, nvme_bytes: int, segment_bytes: int, lease_ttl_s: float = 5
    ) -> None:
        self.data_dir = folder / "data"
        self.socket = folder / "kv.sock"
        self.metrics_port = free_port()
        self.options = {
            "dram_bytes": dram_bytes,
            "nvme_bytes": nvme_bytes,
            "segment_bytes": segment_bytes,
            "lease_ttl_s": lease_ttl_s,
            "nvme_reserve_bytes": 0,
            "huge_pages": "off",
        }
        self.log = folder / "service.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """What a client connects to."""
        return f"unix:{self.socket}"

    def environment(self) -> dict[str, str]:
        """Its whole configuration, as KVSTORE_* variables."""
        mine = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")}
        given = self.options | {"data_dir": self.data_dir, "socket": self.socket, "metrics_port": self.metrics_port}
        return mine | {f"KVSTORE_{k.upper()}": str(v) for k, v in given.items()}

    def start(self) -> None:
        """Start, and return once it serves. Raises RuntimeError with its log when it ends instead.

        A metrics port that somebody else took since it was chosen is chosen again.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        while not self._try_start():
            self.metrics_port = free_port()

    def _try_start(self) -> bool:
        before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "kvstore", "serve"]
            self.process = subprocess.Popen(command, env=self.environment(), stdout=log, stderr=log)
        end = time.monotonic() + WAIT_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end:
                said = self.log.read_text()[before:]
                if f":{self.metrics_port} is taken" in said:
                    return False
                raise RuntimeError(f"the service did not start:\n{said[-3000:]}")
            time.sleep(POLL_S)
        return True

    def _answers(self) -> bool:
        from grpc import RpcError, insecure_channel
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        if not self.socket.exists():
            return False
        with insecure_channel(self.address) as channel, contextlib.suppress(RpcError):
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
        return False

    def run_to_end(self) -> tuple[int, str]:
        """Run a service that should refuse to start. Returns exit status and what it printed."""
        command = [sys.executable, "-m", "kvstore", "serve"]
        done = subprocess.run(command, env=self.environment(), capture_output=True, timeout=WAIT_S, check=False)
        return done.returncode, (done.stdout + done.stderr).decode()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(WAIT_S)

    def kill_after_ms(self, delay_ms: int) -> threading.Timer:
        """SIGKILL at a random point of what happens meanwhile; join the result."""
        timer = threading.Timer(delay_ms / 1e3, self.kill)
        timer.start()
        return timer

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to stop; returns its exit status."""
        if self.process is None or self.process.poll() is not None:
            return 0
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def metrics(self) -> dict[str, float]:
        """All samples, by name with labels as exposed."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=5) as reply:
            lines = reply.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line and line[0] != "#"}

    def metric(self, name: str) -> float:
        """One sample."""
        return self.metrics()[name]

    def wait_metric(self, name: str, value: float) -> None:
        """Until a sample has a value. Raises TimeoutError."""
        wait_for(lambda: self.metric(name) == value, f"{name} to be {value}")

    def wait_attached(self, client: HasEpoch, old_epoch: int) -> None:
        """Until the client is attached to a life other than `old_epoch`."""
        wait_for(lambda: client.boot_epoch not in (0, old_epoch), "the client to reconnect")


def wait_for(condition: object, what: str) -> None:
    """Poll until `condition()` holds. Raises TimeoutError naming `what`."""
    end = time.monotonic() + WAIT_S
    while not condition():  # type: ignore[operator]
        if time.monotonic() > end:
            raise TimeoutError(f"waited {WAIT_S} s for {what}")
        time.sleep(POLL_S)


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
