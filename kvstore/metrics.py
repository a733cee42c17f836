"""Prometheus metrics of a node. Counting never raises, and label values come from fixed sets.

Counters and histograms are bumped where things happen; gauges are read from the machine when somebody scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

LATENCY_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
REASONS = ("evicted", "corrupt", "orphan", "copy failed", "not filled", "evicted: no room below", "retired")

Rows = Iterable[tuple[dict[str, str], float]]


class Metrics:
    """All series of one node, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._hits = self._counter("hit_blocks", "Blocks served to restores", ["tier"])
        self._matched = self._counter("matched_blocks", "Blocks found by Acquire", [])
        self._asked = self._counter("requested_blocks", "Blocks asked for by Acquire", [])
        self._bytes = self._counter("moved_bytes", "Bytes moved", ["tier", "direction"])
        self._evictions = self._counter("evictions", "Copies that left a tier", ["tier", "reason"])
        self._failures = self._counter("failures", "Failures by kind", ["kind"])
        self._offloads = self._counter("sealed_blocks", "Blocks sealed by clients", [])
        self._dropped = self._counter("dropped_blocks", "Blocks that found no room when a client offloaded them", [])
        self._rpc = Histogram(
            "kvstore_rpc_seconds", "Time in a call", ["method"], registry=self.registry, buckets=LATENCY_BUCKETS
        )
        self._move = Histogram(
            "kvstore_move_seconds",
            "Time of a move",
            ["source", "target"],
            registry=self.registry,
            buckets=LATENCY_BUCKETS,
        )

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"kvstore_{name}", text, labels, registry=self.registry)

    def gauges(self, read: Callable[[], Iterable[tuple[str, str, Rows]]]) -> None:
        """`read() -> (name, help, [(labels, value)])` is called at each scrape."""
        self.registry.register(_Gauges(read))

    def hits(self, tier: str, num_blocks: int) -> None:
        """Blocks handed to a restore."""
        if num_blocks > 0:
            self._hits.labels(tier).inc(num_blocks)

    def acquired(self, num_requested: int, num_matched: int) -> None:
        """One Acquire."""
        self._asked.inc(num_requested)
        self._matched.inc(num_matched)

    def moved(self, tier: str, direction: str, num_bytes: int) -> None:
        """`direction` is "in" or "out"."""
        if num_bytes > 0:
            self._bytes.labels(tier, direction).inc(num_bytes)

    def evicted(self, tier: str, reason: str) -> None:
        """A READY copy left a tier."""
        self._evictions.labels(tier, reason if reason in REASONS else "other").inc()

    def failed(self, kind: str, count: int = 1) -> None:
        """`kind`: the class name of a KVStoreError, or another fixed word."""
        if count > 0:
            self._failures.labels(kind).inc(count)

    def sealed(self, num_blocks: int) -> None:
        """Blocks a client offloaded."""
        self._offloads.inc(num_blocks)

    def dropped(self, num_blocks: int) -> None:
        """Blocks an offload had to leave out."""
        if num_blocks > 0:
            self._dropped.inc(num_blocks)

    def rpc(self, method: str, seconds: float) -> None:
        """One call."""
        self._rpc.labels(method).observe(seconds)

    def move(self, source: str, target: str, seconds: float) -> None:
        """One background move."""
        self._move.labels(source, target).observe(seconds)


class _Gauges(Collector):
    def __init__(self, read: Callable[[], Iterable[tuple[str, str, Rows]]]) -> None:
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, text, rows in self._read():
            family = GaugeMetricFamily(f"kvstore_{name}", text, labels=None)
            for labels, value in rows:
                family.add_sample(f"kvstore_{name}", labels, value)
            yield family
